"""Settings are read from the environment and the flags, and checked."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from restante.delivery.rules import MAX_FILE_BYTES, MAX_REQUEST_BYTES
from restante.errors import SettingsInvalid
from restante.settings import Settings, allowed_origins, given, load


def test_nothing_given_means_the_defaults():
    assert load({}, {}) == Settings()


def test_server_and_client_agree_on_the_default_sizes():
    """A client imports no settings."""
    defaults = Settings()

    assert (defaults.max_file_bytes, defaults.max_request_bytes) == (
        MAX_FILE_BYTES,
        MAX_REQUEST_BYTES,
    )


def test_flags_win_over_the_environment_and_the_environment_over_defaults():
    settings = load({"RESTANTE_PORT": "9000", "RESTANTE_HOST": "::1"}, {"port": 9001, "host": None})

    assert (settings.port, settings.host) == (9001, "::1")


def test_an_empty_variable_counts_as_unset():
    assert load({"RESTANTE_DATABASE_URL": ""}, {}).database_url is None


def test_a_setting_equal_to_its_default_counts_as_given():
    environ = {"RESTANTE_PORT": str(Settings().port), "RESTANTE_HOST": "", "PATH": "/bin"}
    flags = {"feed_retention_days": Settings().feed_retention_days, "data_dir": None}

    assert given(environ, flags) == {"port", "feed_retention_days"}


@pytest.mark.parametrize(
    ("environ", "flags", "sentence"),
    [
        ({"RESTANTE_PORT": "many"}, {}, "RESTANTE_PORT is wrong: expected int"),
        ({"RESTANTE_PORT": "70000"}, {}, "RESTANTE_PORT is wrong: expected int <= 65535"),
        ({}, {"port": -1}, "--port is wrong: expected int >= 0"),
        ({"RESTANTE_PROT": "1"}, {}, "RESTANTE_PROT is not a setting.*Did you mean RESTANTE_PORT?"),
        ({"RESTANTE_XYZZY": "1"}, {}, "RESTANTE_XYZZY is not a setting of Restante.$"),
        ({"RESTANTE_ADMIN_TOKEN": "short"}, {}, "RESTANTE_ADMIN_TOKEN is too short"),
        (
            {"RESTANTE_MAX_FILE_BYTES": "52428801", "RESTANTE_MAX_REQUEST_BYTES": "52428800"},
            {},
            "RESTANTE_MAX_FILE_BYTES must not be greater than RESTANTE_MAX_REQUEST_BYTES",
        ),
        (
            {},
            {"max_file_bytes": 2**36 + 1},
            "--max-file-bytes is wrong: expected int <= 68719476736",
        ),
        ({"RESTANTE_CORS_ORIGINS": "*"}, {}, "RESTANTE_CORS_ORIGINS is wrong: list each origin"),
        ({"RESTANTE_CORS_ORIGINS": "https://*.x.test"}, {}, "list each origin"),
        ({"RESTANTE_CORS_ORIGINS": "http://a.test/"}, {}, '"http://a.test/" is not an origin'),
        ({"RESTANTE_CORS_ORIGINS": "http://a.test/path"}, {}, "is not an origin"),
        ({"RESTANTE_CORS_ORIGINS": "http://user@a.test"}, {}, "is not an origin"),
        ({"RESTANTE_CORS_ORIGINS": "http://a.test:0"}, {}, "is not an origin"),
        ({"RESTANTE_CORS_ORIGINS": "http://a.test:65536"}, {}, "is not an origin"),
        ({"RESTANTE_CORS_ORIGINS": "localhost:3000"}, {}, "is not an origin"),
        ({"RESTANTE_CORS_ORIGINS": "null"}, {}, "is not an origin"),
        ({"RESTANTE_CORS_ORIGINS": "http://a.test,"}, {}, '"" is not an origin'),
        ({"RESTANTE_CORS_ORIGINS": "none,http://a.test"}, {}, '"none" is not an origin'),
        ({"RESTANTE_CORS_ORIGINS": "http://caf\u00e9.test"}, {}, "is not an origin"),
        ({"RESTANTE_LOG_FORMAT": "xml"}, {}, "RESTANTE_LOG_FORMAT is wrong: invalid enum value"),
    ],
)
def test_a_mistake_is_one_sentence_with_the_name_as_written(
    environ: dict[str, str], flags: dict[str, object], sentence: str
):
    with pytest.raises(SettingsInvalid, match=sentence):
        load(environ, flags)


def test_a_larger_file_has_room_unless_a_quota_is_set():
    large = str(20 * 1024**3)
    limit, quota = {"RESTANTE_MAX_FILE_BYTES": large}, {"RESTANTE_WORKSPACE_MAX_BYTES": "5000"}

    raised, bounded = load(limit, {}), load(limit | quota, {})

    assert raised.max_request_bytes == raised.workspace_max_bytes == int(large)
    assert raised.workspace_max_written_bytes == int(large)
    assert (bounded.max_request_bytes, bounded.workspace_max_bytes) == (int(large), 5000)
    assert load({"RESTANTE_MAX_FILE_BYTES": "1000"}, {}) == replace(Settings(), max_file_bytes=1000)


@pytest.mark.parametrize(
    ("written", "meant"), [("on", True), ("off", False), ("Yes", True), ("no", False), ("0", False)]
)
def test_a_switch_is_written_as_people_write_it(written: str, meant: bool):
    assert load({"RESTANTE_STAGING": written}, {}).staging is meant


def test_variables_of_the_client_commands_are_tolerated():
    assert load({"RESTANTE_URL": "http://127.0.0.1:8080"}, {}) == Settings()


def test_other_peoples_variables_are_not_our_business():
    assert load({"PATH": "/bin", "RESTANT": "x"}, {}) == Settings()


@pytest.mark.parametrize(
    ("written", "allowed"),
    [
        ("none", set()),
        (" None ", set()),
        ("http://localhost:3000", {"http://localhost:3000"}),
        (
            "HTTPS://Canvas.Example:443, http://[::1]:80",
            {"https://canvas.example", "http://[::1]"},
        ),
        ("http://x.test:443,app://x:80", {"http://x.test:443", "app://x:80"}),
    ],
)
def test_origins_are_listed_as_browsers_send_them(written: str, allowed: set[str]):
    settings = load({"RESTANTE_CORS_ORIGINS": written}, {})

    assert allowed_origins(settings, on_loopback=True) == allowed


@pytest.mark.parametrize("written", [{}, {"RESTANTE_CORS_ORIGINS": ""}])
def test_by_default_a_canvas_on_the_same_machine_is_allowed(written: dict[str, str]):
    settings = load(written, {})

    assert allowed_origins(settings, on_loopback=True) == {"http://localhost:3000"}
    assert allowed_origins(settings, on_loopback=False) == set()


SECRET = "a-secret-of-the-tests-0123456789"


def test_a_secret_may_be_in_a_file(tmp_path: Path):
    """Containers and systemd hand secrets over as files."""
    file = tmp_path / "token"
    file.write_text(f"  {SECRET}\n")

    settings = load({"RESTANTE_ADMIN_TOKEN_FILE": str(file)}, {})

    assert settings.admin_token == SECRET
    assert load({"RESTANTE_ADMIN_TOKEN_FILE": "", "RESTANTE_ADMIN_TOKEN": SECRET}, {}) == settings


@pytest.mark.parametrize(
    ("contents", "sentence"),
    [
        (None, "RESTANTE_ADMIN_TOKEN_FILE is wrong: .*token cannot be read: No such file"),
        (b" \n", "RESTANTE_ADMIN_TOKEN_FILE is wrong: .*token is empty"),
        (b"\xff\xfe\x00", "RESTANTE_ADMIN_TOKEN_FILE is wrong: .*token is not a text file"),
        (b"short", "RESTANTE_ADMIN_TOKEN is too short"),
    ],
)
def test_a_file_without_a_secret_is_one_sentence(
    tmp_path: Path, contents: bytes | None, sentence: str
):
    if contents is not None:
        (tmp_path / "token").write_bytes(contents)

    with pytest.raises(SettingsInvalid, match=sentence):
        load({"RESTANTE_ADMIN_TOKEN_FILE": str(tmp_path / "token")}, {})


def test_a_directory_is_no_secret(tmp_path: Path):
    with pytest.raises(SettingsInvalid, match="cannot be read: Is a directory"):
        load({"RESTANTE_DATABASE_URL_FILE": str(tmp_path)}, {})


def test_a_secret_is_not_given_twice():
    both = {"RESTANTE_ADMIN_TOKEN": SECRET, "RESTANTE_ADMIN_TOKEN_FILE": "/run/secrets/token"}

    with pytest.raises(SettingsInvalid, match="are both set; set one of them"):
        load(both, {})


def test_only_secrets_are_read_from_files():
    with pytest.raises(SettingsInvalid, match="RESTANTE_PORT_FILE is not a setting"):
        load({"RESTANTE_PORT_FILE": "/run/port"}, {})
