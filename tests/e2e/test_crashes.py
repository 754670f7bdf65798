"""What a crash may cost: time, and never a row that was committed."""

import asyncio
import os
import random
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import asyncpg
import msgspec
import pytest
import soak
from processes import Server, alive, children, wait_until

READY_AGAIN_SECONDS = 10
GONE = (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError)


@pytest.fixture
def running(server: Server) -> Server:
    return server.start()


class Writer:
    """Commits rows one by one in a thread of its own, and knows which commits were confirmed."""

    def __init__(self, dsn: str, numbers: Iterator[int]) -> None:
        self.confirmed: list[int] = []
        self._dsn = dsn
        self._numbers = numbers
        self._progress = threading.Condition()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._write()), daemon=True)
        self._thread.start()

    async def _write(self) -> None:
        """Write until the database goes away."""
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
            assert self._progress.wait_for(lambda: len(self.confirmed) >= rows, timeout=30)

    def wait(self) -> None:
        """Wait until it has noticed that the database is gone."""
        self._thread.join(30)
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
    wait_until(lambda: not alive(postgres), seconds=5, what="the end of Postgres")
    wait_until(lambda: server.get("/ready")[0] == 200, seconds=READY_AGAIN_SECONDS, what="ready")


def kill_both(server: Server) -> None:
    os.kill(server.postgres_pid(), signal.SIGKILL)
    kill_server(server)


CRASHES: list[Callable[[Server], None]] = [kill_server, kill_postgres, kill_both]


@pytest.mark.soak
@pytest.mark.parametrize("crash", CRASHES)
def test_no_committed_row_is_missing_after_a_crash(
    running: Server, crash: Callable[[Server], None]
):
    """Whatever was confirmed to a writer is there after the crash, at whichever instant it came."""
    execute(running.dsn, "create table letters (number bigint primary key)")
    confirmed: set[int] = set()
    numbers = iter(range(10**12))

    for run in soak.runs():
        with run as chance:
            writer = Writer(running.dsn, numbers)
            writer.wait_for(rows=chance.randrange(1, 300))
            between_two_rows(chance)
            crash(running)
            writer.wait()
            confirmed |= set(writer.confirmed)

            assert confirmed <= letters(running.dsn)


def between_two_rows(chance: random.Random) -> None:
    """The instant of the crash is what the run is about, so this once time may pass unasked."""
    time.sleep(chance.uniform(0, 0.003))


def test_a_killed_server_takes_its_postgres_along_and_the_next_start_recovers(running: Server):
    running.kill()

    wait_until(lambda: not running.processes(), seconds=5, what="the end of every process")
    assert running.start().get("/ready")[0] == 200


def test_a_killed_postgres_is_back_without_help_while_the_server_stays(running: Server):
    """No operator is awake when it happens."""
    server, postgres = running.pid, running.postgres_pid()
    os.kill(postgres, signal.SIGKILL)

    reason = answer_of_ready(running, 503)
    answer_of_ready(running, 200)

    assert msgspec.json.decode(reason)["code"] == "not_ready"
    assert "database" in msgspec.json.decode(reason)["error"]
    assert running.postgres_pid() != postgres
    assert children(os.getpid())[server] == "python"


def answer_of_ready(server: Server, status: int) -> bytes:
    """Ask without a pause, since Postgres is back in a moment, until this is the answer."""
    give_up_at = time.monotonic() + READY_AGAIN_SECONDS
    while (answer := server.get("/ready"))[0] != status:
        assert time.monotonic() < give_up_at, answer
    return answer[1]


def test_a_postgres_that_hangs_makes_the_server_not_ready_and_not_dead(running: Server):
    """A probe gets its answer in time even when the database gives none."""
    with postgres_hangs(running):
        status, body = running.get("/ready")
        alive_status, _ = running.get("/health")

    assert (status, alive_status) == (503, 200)
    assert "did not answer within 2 s" in msgspec.json.decode(body)["error"]
    answer_of_ready(running, 200)


@contextmanager
def postgres_hangs(server: Server) -> Iterator[None]:
    """Stop every process of it; the postmaster first, so that no backend is born meanwhile."""
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
    wait_until(
        lambda: "State:\tT" in status.read_text(), seconds=5, what="a process that stands still"
    )
