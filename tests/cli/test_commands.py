"""Help, version, exit codes and `restante migrate`."""

import os
import subprocess
from pathlib import Path

import msgspec
import pytest
from processes import RESTANTE, Server, clean_environment, restante

from restante import __version__
from restante.database import migrate
from restante.settings import Settings, variable

NAMES = [str(migration) for migration in migrate.shipped()]


def test_the_version_is_printed_alone():
    """Scripts compare it."""
    assert restante("--version") == (0, f"{__version__}\n", "")


def test_help_names_every_command():
    code, output, _ = restante("--help")

    assert code == 0
    assert "serve" in output
    assert "migrate" in output


def test_help_of_serve_names_every_setting_as_flag_and_variable():
    code, output, _ = restante("serve", "--help", COLUMNS="200")

    assert code == 0
    for field in Settings.__struct_fields__:
        assert f"--{field.replace('_', '-')}" in output
        assert variable(field) in output


def test_without_a_command_the_help_is_shown():
    code, output, _ = restante()

    assert code == 0
    assert "Usage" in output


@pytest.mark.parametrize(
    "words", [["swerve"], ["serve", "--prot", "1"], ["migrate", "--stat"], ["serve", "extra"]]
)
def test_an_unknown_word_is_refused_without_a_traceback(words: list[str]):
    code, output, errors = restante(*words)

    assert code == 2
    assert words[-1] in output + errors or words[-2] in output + errors
    assert "Traceback" not in output + errors


@pytest.fixture
def stopped(server: Server) -> Server:
    """A server that was started and stopped again."""
    return server


def status_of(server: Server, *words: str) -> str:
    code, output, errors = restante("migrate", "--status", "--data-dir", server.data_dir, *words)
    assert (code, errors) == (0, "")
    return output


def test_status_uses_the_postgres_of_the_running_server(server: Server):
    server.start()
    postgres = server.postgres_pid()

    output = status_of(server)

    assert [line.split() for line in output.splitlines()] == [[name, "ran"] for name in NAMES]
    assert server.postgres_pid() == postgres
    assert server.get("/ready")[0] == 200


def test_status_of_a_stopped_server_starts_postgres_and_stops_it_again(stopped: Server):
    output = status_of(stopped)

    assert [line.split()[0] for line in output.splitlines()] == NAMES
    assert not stopped.processes()
    assert stopped.start().get("/ready")[0] == 200


def test_status_as_json(stopped: Server):
    rows = msgspec.json.decode(status_of(stopped, "--json"))

    assert rows == [{"migration": name, "state": "ran"} for name in NAMES]


def test_status_changes_nothing(new_server: Server):
    """Before the first start it lists what would run, and runs nothing."""
    first = status_of(new_server)

    assert "ran" not in [line.split(maxsplit=1)[1] for line in first.splitlines()]
    assert status_of(new_server) == first


def test_migrate_is_idempotent(new_server: Server):
    words = ["migrate", "--data-dir", new_server.data_dir]

    first, second = restante(*words), restante(*words)

    assert [line.split() for line in first.stdout.splitlines()] == [
        [name, "ran", "now"] for name in NAMES
    ]
    assert second == (0, "Nothing to do.\n", "")


@pytest.mark.parametrize("words", [("migrate", "--status"), ("status",)], ids=" ".join)
def test_a_closed_pipe_is_exit_code_141_and_no_traceback(stopped: Server, words: tuple[str, ...]):
    """As in `restante status | true`: plain lines and tables alike."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        done = subprocess.run(
            [RESTANTE, *words, "--data-dir", stopped.data_dir],
            env=clean_environment(),
            stdout=pipe,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )

    assert done.returncode == 141
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr


def test_python_m_restante_runs_the_command(tmp_path: Path):
    python = RESTANTE.with_name("python")
    done = subprocess.run(
        [python, "-m", "restante", "--version"], capture_output=True, text=True, check=True
    )

    assert done.stdout == f"{__version__}\n"


def test_a_command_creates_no_database_where_none_is(tmp_path: Path):
    """The directory is mistyped, or empty."""
    missing, empty = tmp_path / "missing", tmp_path / "empty"
    empty.mkdir()

    for directory in (missing, empty):
        outcome = restante("status", "--data-dir", directory)
        assert (outcome.code, outcome.stdout) == (1, "")
        assert (
            f"There is no database in {directory}: `restante serve` creates it." in outcome.stderr
        )
    assert not missing.exists()
    assert not any(one.is_dir() for one in empty.iterdir())
