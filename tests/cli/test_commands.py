"""The command line as a person or a script meets it."""

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
    """A script compares it."""
    assert restante("--version") == (0, f"{__version__}\n", "")


def test_help_names_every_command():
    code, said, _ = restante("--help")

    assert code == 0
    assert "serve" in said
    assert "migrate" in said


def test_help_of_serve_names_every_setting_as_flag_and_variable():
    code, said, _ = restante("serve", "--help", COLUMNS="200")

    assert code == 0
    for field in Settings.__struct_fields__:
        assert f"--{field.replace('_', '-')}" in said
        assert variable(field) in said


def test_no_command_shows_the_help():
    code, said, _ = restante()

    assert code == 0
    assert "Usage" in said


@pytest.mark.parametrize(
    "words", [["swerve"], ["serve", "--prot", "1"], ["migrate", "--stat"], ["serve", "extra"]]
)
def test_a_word_that_is_not_known_is_refused_without_a_trace(words: list[str]):
    code, said, complained = restante(*words)

    assert code == 2
    assert words[-1] in said + complained or words[-2] in said + complained
    assert "Traceback" not in said + complained


@pytest.fixture
def stopped(server: Server) -> Server:
    """A data directory that a server has used and left."""
    server.start().stop()
    return server


def status_of(server: Server, *words: str) -> str:
    code, said, complained = restante("migrate", "--status", "--data-dir", server.data_dir, *words)
    assert (code, complained) == (0, "")
    return said


def test_status_asks_the_running_server(server: Server):
    server.start()
    postgres = server.postgres_pid()

    said = status_of(server)

    assert [line.split() for line in said.splitlines()] == [[name, "ran"] for name in NAMES]
    assert server.postgres_pid() == postgres
    assert server.get("/ready")[0] == 200


def test_status_of_a_stopped_server_starts_postgres_for_the_time_and_leaves_none(stopped: Server):
    said = status_of(stopped)

    assert [line.split()[0] for line in said.splitlines()] == NAMES
    assert not stopped.processes()
    assert stopped.start().get("/ready")[0] == 200


def test_status_as_json(stopped: Server):
    rows = msgspec.json.decode(status_of(stopped, "--json"))

    assert rows == [{"migration": name, "state": "ran"} for name in NAMES]


def test_status_changes_nothing(server: Server):
    """Asked before the first start, it says what would run and runs nothing."""
    first = status_of(server)

    assert "ran" not in [line.split(maxsplit=1)[1] for line in first.splitlines()]
    assert status_of(server) == first


def test_migrate_runs_what_is_due_once(server: Server):
    words = ["migrate", "--data-dir", server.data_dir]

    first, second = restante(*words), restante(*words)

    assert [line.split() for line in first.stdout.splitlines()] == [
        [name, "ran", "now"] for name in NAMES
    ]
    assert second == (0, "Nothing to do.\n", "")


def test_a_reader_that_goes_away_is_no_bug(stopped: Server):
    """`restante migrate --status | head -0` must not end in a trace."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as nobody:
        done = subprocess.run(
            [RESTANTE, "migrate", "--status", "--data-dir", stopped.data_dir],
            env=clean_environment(),
            stdout=nobody,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )

    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr


def test_the_module_is_the_command(tmp_path: Path):
    python = RESTANTE.with_name("python")
    done = subprocess.run(
        [python, "-m", "restante", "--version"], capture_output=True, text=True, check=True
    )

    assert done.stdout == f"{__version__}\n"
