"""After a crash the server recovers by itself, and no committed row is lost."""

import asyncio
import os
import random
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import msgspec
import pytest
import soak
from processes import STOPPED_SECONDS, Server, alive, children, wait_until

# A busy machine may be slow; how fast the recovery is, is not tested here.
READY_AGAIN_SECONDS = 60
GONE = (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError)


@pytest.fixture
def running(server: Server) -> Server:
    return server.start()


class Writer:
    """Commits rows one by one in a thread, and records the confirmed ones."""

    def __init__(self, dsn: str, numbers: Iterator[int]) -> None:
        self.confirmed: list[int] = []
        self._dsn = dsn
        self._numbers = numbers
        self._progress = threading.Condition()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._write()), daemon=True)
        self._thread.start()

    async def _write(self) -> None:
        """Write until the connection is lost."""
        try:
            async with connected(self._dsn) as connection:
                for number in self._numbers:
                    await connection.execute("insert into letters values ($1)", number)
                    with self._progress:
                        self.confirmed.append(number)
                        self._progress.notify_all()
        except GONE:
            return

    def wait_for(self, rows: int) -> None:
        with self._progress:
            assert self._progress.wait_for(lambda: len(self.confirmed) >= rows, timeout=60)

    def wait(self) -> None:
        """Wait until it has lost its connection."""
        self._thread.join(60)
        assert not self._thread.is_alive()


@asynccontextmanager
async def connected(dsn: str) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(dsn)
    try:
        yield connection
    finally:
        await connection.close(timeout=1)


def execute(dsn: str, statement: str) -> None:
    async def run() -> None:
        async with connected(dsn) as connection:
            await connection.execute(statement)

    asyncio.run(run())


def letters(dsn: str) -> set[int]:
    async def run() -> set[int]:
        async with connected(dsn) as connection:
            return {row["number"] for row in await connection.fetch("select number from letters")}

    return asyncio.run(run())


def kill_server(server: Server) -> None:
    server.kill()
    server.start()


def kill_postgres(server: Server) -> None:
    postgres = server.postgres_pid()
    os.kill(postgres, signal.SIGKILL)
    wait_until(lambda: not alive(postgres), seconds=STOPPED_SECONDS, what="the end of Postgres")
    ready_again(server)


def kill_both(server: Server) -> None:
    os.kill(server.postgres_pid(), signal.SIGKILL)
    kill_server(server)


CRASHES: list[Callable[[Server], None]] = [kill_server, kill_postgres, kill_both]


@pytest.mark.soak
@pytest.mark.parametrize("crash", CRASHES)
def test_no_committed_row_is_missing_after_a_crash(
    running: Server, crash: Callable[[Server], None]
):
    """Every confirmed row is stored, at whatever instant the crash comes."""
    execute(running.dsn, "create table letters (number bigint primary key)")
    confirmed: set[int] = set()
    numbers = iter(range(10**12))

    for run in soak.runs():
        with run as chance:
            writer = Writer(running.dsn, numbers)
            writer.wait_for(rows=chance.randrange(1, 300))
            random_instant(chance)
            crash(running)
            writer.wait()
            confirmed |= set(writer.confirmed)

            assert confirmed <= letters(running.dsn)


def random_instant(chance: random.Random) -> None:
    """The instant of the crash is random; no signal could choose it."""
    time.sleep(chance.uniform(0, 0.003))


def test_the_postgres_of_a_killed_server_ends_and_the_next_start_recovers(running: Server):
    running.kill()

    wait_until(
        lambda: not running.processes(), seconds=STOPPED_SECONDS, what="the end of every process"
    )
    assert running.start().get("/ready")[0] == 200


def test_a_killed_postgres_is_restarted_by_the_server(running: Server):
    """Until then the server is not ready, and says why."""
    server, postgres = running.pid, running.postgres_pid()
    with asked_while_halted(running) as answer:
        os.kill(postgres, signal.SIGKILL)
        wait_until(lambda: not alive(postgres), seconds=STOPPED_SECONDS, what="the end of Postgres")
    ready_again(running)

    status, body = answer()
    assert (status, body["code"]) == (503, "not_ready")
    assert "database" in body["error"]
    assert running.postgres_pid() != postgres
    assert alive(server)


@contextmanager
def asked_while_halted(server: Server) -> Iterator[Callable[[], tuple[int, dict[str, Any]]]]:
    """
    Halt the server, ask whether it is ready, and let it go on at the end.

    So it answers right after what happens inside, before it can do something about it.
    """
    where = urlsplit(server.address)
    connection = HTTPConnection(where.hostname or "", where.port, timeout=READY_AGAIN_SECONDS)

    def answer() -> tuple[int, dict[str, Any]]:
        response = connection.getresponse()
        with closing(connection):
            return response.status, msgspec.json.decode(response.read())

    halt(server.pid)
    try:
        connection.request("GET", "/ready")
        yield answer
    finally:
        os.kill(server.pid, signal.SIGCONT)


def ready_again(server: Server) -> None:
    wait_until(lambda: server.get("/ready")[0] == 200, seconds=READY_AGAIN_SECONDS, what="ready")


def test_a_server_with_a_postgres_that_hangs_is_alive_and_not_ready(running: Server):
    """A probe gets an answer although the database gives none."""
    with postgres_hangs(running):
        status, body = running.get("/ready")
        alive_status, _ = running.get("/health")

    assert (status, alive_status) == (503, 200)
    assert "did not answer within" in msgspec.json.decode(body)["error"]
    ready_again(running)


@contextmanager
def postgres_hangs(server: Server) -> Iterator[None]:
    """Halt every process of Postgres; the postmaster first, so that it starts no other."""
    postmaster = server.postgres_pid()
    halt(postmaster)
    backends = list(children(postmaster))
    for backend in backends:
        halt(backend)
    try:
        yield
    finally:
        for pid in [postmaster, *backends]:
            os.kill(pid, signal.SIGCONT)


def halt(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    status = Path(f"/proc/{pid}/status")
    wait_until(lambda: "State:\tT" in status.read_text(), seconds=30, what="a halted process")
