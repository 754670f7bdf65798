"""Settings are read from the environment and the flags, and checked."""

import pytest

from restante.delivery.rules import MAX_FILE_BYTES, MAX_REQUEST_BYTES
from restante.errors import SettingsInvalid
from restante.settings import Settings, given, load


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
            {"RESTANTE_MAX_FILE_BYTES": "52428801"},
            {},
            "RESTANTE_MAX_FILE_BYTES must not be greater than RESTANTE_MAX_REQUEST_BYTES",
        ),
        (
            {},
            {"max_file_bytes": 2**36 + 1},
            "--max-file-bytes is wrong: expected int <= 68719476736",
        ),
        ({"RESTANTE_LOG_FORMAT": "xml"}, {}, "RESTANTE_LOG_FORMAT is wrong: invalid enum value"),
    ],
)
def test_a_mistake_is_one_sentence_with_the_name_as_written(
    environ: dict[str, str], flags: dict[str, object], sentence: str
):
    with pytest.raises(SettingsInvalid, match=sentence):
        load(environ, flags)


@pytest.mark.parametrize(
    ("written", "meant"), [("on", True), ("off", False), ("Yes", True), ("no", False), ("0", False)]
)
def test_a_switch_is_written_as_people_write_it(written: str, meant: bool):
    assert load({"RESTANTE_STAGING": written}, {}).staging is meant


def test_variables_of_the_client_commands_are_tolerated():
    assert load({"RESTANTE_URL": "http://127.0.0.1:8080"}, {}) == Settings()


def test_other_peoples_variables_are_not_our_business():
    assert load({"PATH": "/bin", "RESTANT": "x"}, {}) == Settings()
