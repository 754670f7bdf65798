"""A server stops on a signal, in whatever state it is, and leaves no process behind."""

import asyncio
import os
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

import asyncpg
import pytest
from processes import STOPPED_SECONDS, Server, alive, children, wait_until
from waiting import until

STOPS = [signal.SIGTERM, signal.SIGINT]

OPEN_REQUESTS = {
    "half a request": b"GET /health HTTP/1.1\r\nHost: rest",
    "a body that never ends": b"POST /health HTTP/1.1\r\nHost: r\r\nContent-Length: 99\r\n\r\nabc",
    "an idle connection": b"GET /health HTTP/1.1\r\nHost: r\r\n\r\n",
    "a query of the database": b"GET /ready HTTP/1.1\r\nHost: r\r\n\r\n",
}


@pytest.fixture
def running(server: Server) -> Server:
    return server.start()


def assert_stopped_cleanly(server: Server) -> None:
    """It has ended with code 0, without a traceback, and left no process behind."""
    code = server.wait(STOPPED_SECONDS)
    assert (code, tracebacks(server)) == (0, [])
    assert not server.processes()


def tracebacks(server: Server) -> list[str]:
    return [line for line in server.output if "Traceback" in line]


@pytest.mark.parametrize("stop", STOPS)
def test_a_server_that_stops_also_stops_its_postgres(running: Server, stop: signal.Signals):
    running.signal(stop)

    assert_stopped_cleanly(running)


@pytest.mark.parametrize("sent", OPEN_REQUESTS.values(), ids=OPEN_REQUESTS)
def test_an_open_request_does_not_prevent_the_stop(running: Server, sent: bytes):
    where = urlsplit(running.address)
    with (
        socket.create_connection((where.hostname, where.port or 0)) as client,
        TableLock(running.dsn),
    ):
        client.sendall(sent)
        wait_until(
            lambda: running.get("/health")[0] == 200, seconds=30, what="an answer of the server"
        )
        running.signal(signal.SIGTERM)

        assert_stopped_cleanly(running)


def test_a_request_is_cancelled_when_the_grace_is_over(place: Path):
    """A setting says how long open requests may continue."""
    with Server(place / "data", "--shutdown-grace-seconds", "0.1") as server:
        server.started_once().start()
        where = urlsplit(server.address)
        with (
            TableLock(server.dsn) as lock,
            socket.create_connection((where.hostname, where.port or 0)) as client,
        ):
            client.sendall(OPEN_REQUESTS["a query of the database"])
            lock.until_a_session_waits()
            server.signal(signal.SIGTERM)

            assert_stopped_cleanly(server)


class TableLock:
    """Locks a table that every readiness check reads, so that a check waits until its timeout."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._locked = threading.Event()
        self._release = threading.Event()
        self._asked = threading.Event()
        self._waiting = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._hold()), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._locked.wait(30)
        return self

    def __exit__(self, *_: object) -> None:
        self._release.set()
        self._asked.set()
        self._thread.join(30)

    def until_a_session_waits(self) -> None:
        self._asked.set()
        assert self._waiting.wait(30)

    async def _hold(self) -> None:
        connection = await asyncpg.connect(self._dsn)
        try:
            await connection.execute("begin; lock restante.schema_migrations")
            self._locked.set()
            await asyncio.to_thread(self._asked.wait)
            if not self._release.is_set():
                await until(
                    lambda: connection.fetchval(
                        "select exists (select from pg_locks where not granted)"
                    )
                )
                self._waiting.set()
            await asyncio.to_thread(self._release.wait)
        except (OSError, asyncpg.PostgresError, asyncpg.InternalClientError):
            return
        finally:
            connection.terminate()


def claimed(server: Server) -> bool:
    return (server.data_dir / "lock").exists()


def creating_the_cluster(server: Server) -> bool:
    return "initdb" in children(server.pid).values()


def starting_postgres(server: Server) -> bool:
    return "postgres" in children(server.pid).values()


@pytest.mark.parametrize(
    ("stage", "stop"),
    [
        (claimed, signal.SIGINT),
        (creating_the_cluster, signal.SIGTERM),
        (starting_postgres, signal.SIGINT),
    ],
)
def test_a_server_can_be_stopped_before_it_is_ready(
    new_server: Server, stage: Callable[[Server], bool], stop: signal.Signals
):
    """The operator presses Ctrl-C at once; the next start is not affected by what is incomplete."""
    new_server.begin()
    wait_until(lambda: stage(new_server), seconds=30, what=stage.__name__)
    new_server.signal(stop)

    assert_stopped_cleanly(new_server)
    assert new_server.start().get("/ready")[0] == 200


def test_a_second_signal_does_not_leave_a_postgres_behind(new_server: Server):
    """People press Ctrl-C several times."""
    new_server.begin()
    wait_until(lambda: starting_postgres(new_server), seconds=30, what="a child")
    for _ in range(3):
        new_server.signal(signal.SIGINT)

    new_server.wait(STOPPED_SECONDS)
    wait_until(
        lambda: not new_server.processes(), seconds=STOPPED_SECONDS, what="the end of Postgres"
    )
    assert tracebacks(new_server) == []
    assert new_server.start().get("/ready")[0] == 200


def test_a_second_signal_to_a_running_server_changes_nothing(running: Server):
    for _ in range(3):
        running.signal(signal.SIGINT)

    assert_stopped_cleanly(running)


@pytest.fixture
def without_postgres(running: Server) -> Server:
    """A server right after its Postgres was killed, before it is restarted."""
    postgres = running.postgres_pid()
    os.kill(postgres, signal.SIGKILL)
    wait_until(lambda: not alive(postgres), seconds=STOPPED_SECONDS, what="the end of Postgres")
    return running


def test_a_server_can_be_stopped_while_it_restarts_postgres(without_postgres: Server):
    without_postgres.signal(signal.SIGTERM)

    code = without_postgres.wait(STOPPED_SECONDS)

    assert (code, tracebacks(without_postgres)) == (0, [])
    wait_until(
        lambda: not without_postgres.processes(),
        seconds=STOPPED_SECONDS,
        what="the end of Postgres",
    )


def test_a_server_can_be_stopped_while_postgres_hangs(running: Server):
    """A disk that does not respond blocks Postgres; the server still stops."""
    os.kill(running.postgres_pid(), signal.SIGSTOP)

    running.signal(signal.SIGTERM)

    running.wait(STOPPED_SECONDS)
    wait_until(lambda: not running.processes(), seconds=STOPPED_SECONDS, what="the end of Postgres")
