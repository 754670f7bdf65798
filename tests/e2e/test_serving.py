"""A server at its start: the address, the admin token, the migrations, the logs."""

import fcntl
import os
import pty
import re
import stat
import subprocess
import termios
import threading
from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path

import asyncpg
import msgspec
import pytest
from processes import READY, RESTANTE, STOPPED_SECONDS, Server, clean_environment, wait_until

from restante import __version__
from restante.database import migrate


@pytest.fixture
def running(server: Server) -> Server:
    return server.start()


def test_a_ready_server_prints_its_address_and_what_to_do_next(running: Server):
    said = running.said[running.said.index(READY) :]

    assert re.match(r"Restante is ready at http://127\.0\.0\.1:\d+\n", said)
    assert str(running.data_dir / "admin-token") in said
    assert f"curl {running.address}/ready" in said
    assert running.get("/ready")[0] == 200


def test_the_second_start_creates_no_cluster_and_migrates_nothing(new_server: Server):
    """So it takes little time."""
    running = new_server.start()
    assert running.home is not None
    version = running.home / "postgres" / "PG_VERSION"
    before = version.stat().st_ino
    assert '"migrated"' in running.said
    running.stop()

    running.start()

    assert version.stat().st_ino == before
    assert '"migrated"' not in running.said


@pytest.mark.slow
@pytest.mark.anyio
async def test_five_servers_that_start_at_once_on_an_empty_database_become_ready(
    empty_dsn: str, tmp_path: Path
):
    with ExitStack() as stack:
        servers = [
            stack.enter_context(Server(tmp_path / str(number), "--database-url", empty_dsn))
            for number in range(5)
        ]
        for server in servers:
            server.begin()
        for server in servers:
            server.until_ready(90)

        assert [server.get("/ready")[0] for server in servers] == [200] * 5
        assert sum('"migrated"' in server.said for server in servers) == 1

    connection = await asyncpg.connect(empty_dsn)
    ran = await connection.fetch("select number from restante.schema_migrations order by number")
    await connection.close()
    assert [row["number"] for row in ran] == [m.number for m in migrate.shipped()]


@pytest.mark.anyio
async def test_a_server_on_a_given_database_starts_no_postgres(dsn_server: Server):
    assert dsn_server.home is None
    assert dsn_server.processes() == [dsn_server.pid]


@pytest.fixture
async def dsn_server(dsn: str, tmp_path: Path) -> AsyncIterator[Server]:
    with Server(tmp_path / "data", "--database-url", dsn) as server:
        yield server.start()


def test_the_admin_token_is_generated_once_and_only_its_owner_can_read_it(running: Server):
    file = running.data_dir / "admin-token"
    first = running.admin_token
    running.stop()

    running.start()

    assert running.admin_token == first
    assert len(first) >= 32
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_the_admin_token_is_never_printed(running: Server):
    running.get("/ready", {"Authorization": f"Bearer {running.admin_token}"})
    running.get(f"/nothing?token={running.admin_token}")
    running.stop()

    assert running.admin_token not in running.said


def test_an_admin_token_of_the_operator_is_not_stored(place: Path):
    token = "a-token-from-a-secret-store"
    with Server(place / "data", RESTANTE_ADMIN_TOKEN=token).started_once().start() as server:
        server.get("/ready", {"Authorization": f"Bearer {token}"})

        assert not (server.data_dir / "admin-token").exists()
        assert "admin token" not in server.said
        assert token not in server.said


def test_the_directories_of_the_database_are_private(new_server: Server):
    running = new_server.start()
    assert running.home is not None
    assert stat.S_IMODE((running.home / "postgres").stat().st_mode) == 0o700
    assert not stat.S_IMODE(running.data_dir.stat().st_mode) & 0o066


def test_logs_are_json_when_the_output_is_not_a_terminal(running: Server):
    running.get("/nothing", {"X-Request-ID": "a-request-of-mine"})
    running.get("/health", {"X-Request-ID": "a-probe"})
    running.stop()

    lines = [line for line in running.output if line.startswith("{")]
    events = [msgspec.json.decode(line) for line in lines]
    (event,) = [event for event in events if event.get("request_id") == "a-request-of-mine"]
    assert event["event"] == "request"
    assert (event["method"], event["path"], event["status"]) == ("GET", "/nothing", 404)
    assert event["client"] == "127.0.0.1"
    assert event["seconds"] >= 0
    assert event["timestamp"].endswith("Z")
    assert "a-probe" not in running.said
    assert (events[-1]["event"], events[-1]["version"]) == ("stopped", __version__)
    (started,) = [event for event in events if event["event"] == "started"]
    assert (started["version"], started["address"]) == (__version__, running.address)


@pytest.mark.anyio
async def test_logs_are_columns_on_a_terminal(dsn_on_terminal: "Terminal"):
    dsn_on_terminal.server.get("/nothing")

    line = wait_until(
        lambda: next((n for n in dsn_on_terminal.lines() if "/nothing" in n), None),
        seconds=30,
        what="a line for the request",
    )

    assert re.fullmatch(r"\d\d:\d\d:\d\d 404 GET +/nothing +\d+ B +\d+ ms", line)


class Terminal:
    """A server that a person starts on a terminal."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.text = ""
        self._ready = threading.Event()
        self._keyboard, screen = pty.openpty()
        self._process = subprocess.Popen(
            [RESTANTE, "serve", "--port", "0", "--data-dir", server.data_dir, *server.flags],
            env=clean_environment(),
            stdin=screen,
            stdout=screen,
            stderr=screen,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509
        )
        os.close(screen)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        assert self._ready.wait(60), self.text

    def _read(self) -> None:
        while True:
            try:
                chunk = os.read(self._keyboard, 4096)
            except OSError:  # the end of file of a pseudo-terminal
                return
            self.text += chunk.decode(errors="replace")
            found = re.search(rf"{READY}(\S+)\r?\n", self.text)
            if found and not self.server.address:
                self.server.address = found[1]
                self._ready.set()

    def lines(self) -> list[str]:
        return re.sub(r"\x1b\[[0-9;]*m", "", self.text).splitlines()

    def press_ctrl_c(self) -> int:
        """Press Ctrl-C; returns the exit code."""
        os.write(self._keyboard, b"\x03")
        code = self._process.wait(STOPPED_SECONDS)
        self._reader.join(STOPPED_SECONDS)
        os.close(self._keyboard)
        return code


@pytest.fixture
async def dsn_on_terminal(dsn: str, tmp_path: Path) -> AsyncIterator[Terminal]:
    terminal = Terminal(Server(tmp_path / "data", "--database-url", dsn))
    yield terminal
    assert terminal.press_ctrl_c() == 0
