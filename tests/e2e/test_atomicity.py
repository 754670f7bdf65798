"""
A crash at any instant leaves all of an upload or none of it.

While several senders send, SIGKILL ends the server, its Postgres, or one session of Postgres.
Afterwards every confirmed upload is stored, byte for byte, and every other one is stored completely
or not at all.  A retry with the same key says which, and never stores an upload twice.
"""

import asyncio
import os
import random
import signal
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import soak
from cluster import connected
from processes import STOPPED_SECONDS, Server, children, wait_until
from senders import LOST, UNAVAILABLE, Mailbox, Request, Senders, registered, session_with

from restante.delivery.subject import ExpiredReservations

pytestmark = pytest.mark.anyio

SHORT = 6
SENDERS = 4
READY_AGAIN_SECONDS = 60

Rows = list[dict[str, Any]]


def kill_server(server: Server, _chance: random.Random) -> None:
    server.signal(signal.SIGKILL)


def kill_postgres(server: Server, _chance: random.Random) -> None:
    os.kill(server.postgres_pid(), signal.SIGKILL)


def kill_session(server: Server, chance: random.Random) -> None:
    """Postgres then ends all of its sessions, and recovers by itself."""
    sessions = [pid for pid in children(server.postgres_pid()) if serves_a_client(pid)]
    os.kill(chance.choice(sessions), signal.SIGKILL)


def serves_a_client(pid: int) -> bool:
    try:
        return b"[local]" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


Kill = Callable[[Server, random.Random], None]
KILLS: Sequence[Kill] = [kill_server, kill_postgres, kill_session]
WEIGHTS = [6, 2, 2]


@pytest.mark.soak
async def test_a_crash_leaves_all_of_an_upload_or_none_of_it(server: Server):
    await asyncio.to_thread(server.start)
    seen = Tally()

    for run in soak.runs(SHORT):
        with run as chance:
            kill = chance.choices(KILLS, WEIGHTS)[0]
            print(kill.__name__, flush=True)
            async with session_with(server) as http:
                mailbox = await registered(http)
                requests = await sent_until(kill, server, mailbox, chance)
            if kill is kill_server:
                await asyncio.to_thread(started_again, server)
            await ready_again(server)

            async with session_with(server) as http, connected(server.dsn) as connection:
                mailbox = mailbox.at(http)
                rows = await consistent_feed(mailbox, connection)
                assert_whole_or_absent(requests, rows)
                await assert_contents(mailbox, requests, rows)
                seen.count(requests, rows)

                again = await sent_again(mailbox, requests, rows)
                assert_each_once(requests, again, await consistent_feed(mailbox, connection))
                await assert_reservations_expire(mailbox, connection)
                await connection.execute("truncate chunks, uploads, feed, answers")
    print(seen)


class Tally:
    """Counts the outcomes, for the output of a long run."""

    def __init__(self) -> None:
        self.confirmed = self.unconfirmed = self.stored = 0

    def count(self, requests: Iterable[Request], rows: Rows) -> None:
        names = names_in(rows)
        for request in requests:
            self.confirmed += request.is_confirmed
            self.unconfirmed += not request.is_confirmed
            self.stored += not request.is_confirmed and names >= set(request.names)

    def __str__(self) -> str:
        return (
            f"{self.confirmed} uploads were confirmed and are stored; of {self.unconfirmed} others"
            f" {self.stored} are stored and {self.unconfirmed - self.stored} are not"
        )


async def sent_until(
    kill: Kill, server: Server, mailbox: Mailbox, chance: random.Random
) -> Sequence[Request]:
    """Send concurrently, kill at a random instant, and return what was sent."""
    async with connected(server.dsn) as witness:
        lost = asyncio.Event()

        def is_lost(_connection: object) -> None:
            lost.set()

        witness.add_termination_listener(is_lost)
        senders = Senders(mailbox, chance, SENDERS)
        await senders.answered(chance.randrange(8))
        await random_instant(chance)
        kill(server, chance)
        await senders.stop()
        await lost.wait()
    assert {request.status for request in senders.requests} <= {200, LOST, UNAVAILABLE}
    return senders.requests


async def random_instant(chance: random.Random) -> None:
    """The instant of the crash is random; no signal could choose it."""
    await asyncio.sleep(chance.uniform(0, 0.1))


def started_again(server: Server) -> None:
    server.wait()
    wait_until(
        lambda: not server.processes(), seconds=STOPPED_SECONDS, what="the end of its Postgres"
    )
    server.start()


async def ready_again(server: Server) -> None:
    """Wait until the server is ready; it restarts Postgres by itself."""
    await asyncio.to_thread(
        wait_until,
        lambda: server.get("/ready")[0] == 200,
        seconds=READY_AGAIN_SECONDS,
        what="a ready server",
    )


async def consistent_feed(mailbox: Mailbox, connection: Any) -> Rows:
    """The feed, after checking that it agrees with the files and the counters."""
    rows = await mailbox.whole_feed()
    waiting = {upload["file_id"]: upload for upload in await mailbox.waiting()}
    announced = {row["request_body"]["file_id"]: row for row in rows}

    assert [row["seq"] for row in rows] == list(range(1, len(rows) + 1))
    assert announced.keys() == waiting.keys()
    for file_id, row in announced.items():
        assert_announces(row, mailbox, waiting[file_id])
    counters = await connection.fetchrow(
        "select last_seq, waiting_files, waiting_bytes from feeds where workspace_id = $1::uuid",
        mailbox.id,
    )
    assert tuple(counters) == (
        len(rows),
        len(waiting),
        sum(upload["size"] for upload in waiting.values()),
    )
    return rows


def assert_announces(row: dict[str, Any], mailbox: Mailbox, upload: dict[str, Any]) -> None:
    fixed = ("activity_type", "method", "status", "source_id", "target_id", "workspace_id")
    assert [row[name] for name in fixed] == [
        "a2a_receive",
        "chat_upload_receive",
        "ok",
        None,
        mailbox.id,
        mailbox.id,
    ]
    assert row["summary"] == f"chat_upload_receive: {upload['name']}"
    announced = ("file_id", "name", "display_name", "mimeType", "size", "uri")
    assert row["request_body"] == {name: upload[name] for name in announced}


def names_in(rows: Rows) -> set[str]:
    return {row["request_body"]["name"] for row in rows}


def assert_whole_or_absent(requests: Iterable[Request], rows: Rows) -> None:
    """A stored upload has all of its rows, in the order of its parts and next to each other."""
    by_name = {row["request_body"]["name"]: row for row in rows}
    assert by_name.keys() <= {name for request in requests for name in request.names}
    for request in requests:
        found = [by_name[name] for name in request.names if name in by_name]
        if request.is_confirmed or found:
            assert [row["request_body"]["name"] for row in found] == request.names
            first = found[0]["seq"]
            assert [row["seq"] for row in found] == list(range(first, first + len(found)))
        if request.is_confirmed:
            assert [row["request_body"]["uri"] for row in found] == uris_of(request)


def uris_of(request: Request) -> list[str]:
    return [file["uri"] for file in request.answer]


async def assert_contents(mailbox: Mailbox, requests: Iterable[Request], rows: Rows) -> None:
    hashes = {file.name: file.sha256 for request in requests for file in request.files}
    for row in rows:
        sent = row["request_body"]
        assert await mailbox.sha256_of(sent["file_id"]) == hashes[sent["name"]]


async def sent_again(mailbox: Mailbox, requests: Iterable[Request], rows: Rows) -> list[Request]:
    """Send every unconfirmed request that has a key once more, and the last confirmed one."""
    uris = {row["request_body"]["name"]: row["request_body"]["uri"] for row in rows}
    confirmed = [request for request in requests if request.key and request.is_confirmed][-1:]
    doubtful = [request for request in requests if request.key and not request.is_confirmed]
    again: list[Request] = []
    for request in (*confirmed, *doubtful):
        repeated = await mailbox.send(Request(request.files, request.key, request.is_chunked))
        assert repeated.is_confirmed
        if request.names[0] in uris:
            assert uris_of(repeated) == [uris[name] for name in request.names]
        again.append(repeated)
    return again


def assert_each_once(requests: Iterable[Request], again: Iterable[Request], rows_now: Rows) -> None:
    """No file is in the feed twice, and every confirmed one is in it."""
    names = [row["request_body"]["name"] for row in rows_now]
    assert len(names) == len(set(names))
    for request in (*requests, *again):
        if request.is_confirmed:
            assert set(request.names) <= set(names)


async def assert_reservations_expire(mailbox: Mailbox, connection: Any) -> None:
    """A reservation of an upload that the crash interrupted is released when it expires."""
    reserved = (
        "select reserved_bytes, reserved_files from feeds where workspace_id = $1::uuid",
        mailbox.id,
    )
    expected = await connection.fetchrow(
        "select coalesce(sum(bytes), 0), coalesce(sum(files), 0) from reservations"
        " where workspace_id = $1::uuid",
        mailbox.id,
    )
    assert tuple(await connection.fetchrow(*reserved)) == tuple(expected)

    await ExpiredReservations().delete_due(connection, now=datetime.now(UTC) + timedelta(days=2))

    assert tuple(await connection.fetchrow(*reserved)) == (0, 0)
