"""
Everything at once: clients of all kinds, quotas at their edge, and kills of everything.

Two servers share a database.  Meanwhile sessions of Postgres are terminated, servers are stopped
and killed, and Postgres is killed.  Afterwards nothing that was confirmed is missing or stored
twice, readers have seen every row once, and every counter equals what the tables say.
"""

import asyncio
import hashlib
import os
import random
import signal
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import soak
from aiohttp import ClientSession, ClientTimeout
from chaos import NO_ANSWER, Clients
from cluster import connected
from processes import STOPPED_SECONDS, Server, alive, wait_until
from senders import registered
from waiting import until

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

SECONDS = soak.seconds(8, long=120)
WORKSPACES = 3
SENDERS = 2
# Small enough that a reader who leaves some files makes its senders meet the limit.
QUOTAS = ("--workspace-max-bytes", "25000000", "--workspace-max-files", "60")
MAX_STORED_BYTES = 256 * 1024 * 1024  # the least that can be set
STORED = ("--server-max-stored-bytes", str(MAX_STORED_BYTES))
QUIET = ("--log-level", "error")
SWEEPS = ("--sweep-interval-seconds", "2")
READY_SECONDS = 60
# How long after its server was killed the room of an upload may stay reserved.
LEASE_SECONDS = 75


@pytest.fixture
async def keeper(server: Server) -> Server:
    """Runs the Postgres of the others, and restarts it; no client knows this server."""
    server.flags = QUIET
    return await asyncio.to_thread(server.start)


@pytest.fixture
async def servers(keeper: Server, place: Path) -> AsyncIterator[Sequence[Server]]:
    """Two servers, each with the same port after every start."""
    flags = ("--database-url", keeper.dsn, *QUOTAS, *STORED, *SWEEPS, *QUIET)
    pair = [Server(place / name, *flags) for name in ("one", "other")]
    async with AsyncExitStack() as stack:
        for server in pair:
            stack.enter_context(server)
            await asyncio.to_thread(server.start)
            server.port = int(server.address.rpartition(":")[2])
        yield pair
        await asyncio.gather(*(asyncio.to_thread(server.stop) for server in pair))


@soak.only_long
@pytest.mark.soak
@pytest.mark.timeout(SECONDS + 300)
async def test_nothing_is_lost_or_miscounted_whatever_is_killed(
    keeper: Server, servers: Sequence[Server]
):
    with soak.one_run() as chance:
        async with at(servers) as sessions:
            all_clients = [await new_clients(sessions, chance) for _ in range(WORKSPACES)]
            async with asyncio.TaskGroup() as reading:
                begin_reading(all_clients, reading)
                async with asyncio.TaskGroup() as sending:
                    begin_sending(all_clients, sending)
                    await Saboteur(keeper, servers, chance).work(SECONDS)
                    stop_sending(all_clients)
                await send_doubtful_again(all_clients)
                await stop_reading_at_the_end(all_clients, keeper)

            async with connected(keeper.dsn) as connection:
                for clients in all_clients:
                    print(clients.id, dict(clients.ledger.statuses), flush=True)
                    await assert_each_once(clients, connection)
                    await assert_waiting_files(clients, connection)
                    await assert_stored_bytes(clients, connection)
                    await assert_counters(clients, connection)
                await assert_disk_use(connection)
                if soak.is_long():
                    await until(lambda: is_unreserved(connection), seconds=LEASE_SECONDS)


# The clients ------------------------------------------------------------------------------------


@asynccontextmanager
async def at(servers: Iterable[Server]) -> AsyncIterator[Sequence[ClientSession]]:
    async with AsyncExitStack() as stack:
        timeout = ClientTimeout(total=20)
        yield [
            await stack.enter_async_context(ClientSession(server.address, timeout=timeout))
            for server in servers
        ]


async def new_clients(sessions: Sequence[ClientSession], chance: random.Random) -> Clients:
    mailbox = await registered(sessions[0])
    at_each = [mailbox.at(session) for session in sessions]
    return Clients(at_each, random.Random(chance.getrandbits(64)))


def begin_reading(all_clients: Iterable[Clients], group: asyncio.TaskGroup) -> None:
    for clients in all_clients:
        taking, watching = clients.readers
        group.create_task(taking.follow(clients.take))
        group.create_task(watching.follow())


def begin_sending(all_clients: Iterable[Clients], group: asyncio.TaskGroup) -> None:
    for clients in all_clients:
        group.create_task(clients.send_messages())
        for _ in range(SENDERS):
            group.create_task(clients.send_files())


def stop_sending(all_clients: Iterable[Clients]) -> None:
    for clients in all_clients:
        clients.is_sending = False


async def send_doubtful_again(all_clients: Iterable[Clients]) -> None:
    """An aborted request with a key gets an answer after all."""
    for clients in all_clients:
        for request in clients.ledger.requests:
            if request.key and request.status in NO_ANSWER:
                await clients.send(request)


async def stop_reading_at_the_end(all_clients: Iterable[Clients], keeper: Server) -> None:
    async with connected(keeper.dsn) as connection:
        for clients in all_clients:

            async def is_at_the_end(clients: Clients = clients) -> bool:
                last_seq = await last_seq_of(clients, connection)
                return all(reader.last_seq == last_seq for reader in clients.readers)

            await until(is_at_the_end, seconds=READY_SECONDS)
            clients.is_reading = False


# What happens to the servers --------------------------------------------------------------------

Act = Callable[[], Awaitable[None]]


class Saboteur:
    """Terminates, stops and kills, one thing after the other, at random instants."""

    def __init__(self, keeper: Server, servers: Sequence[Server], chance: random.Random) -> None:
        self._keeper = keeper
        self._servers = servers
        self._chance = chance
        self._acts: dict[Act, int] = {
            self.terminate_a_session: 4,
            self.terminate_all_sessions: 2,
            self.kill_a_server: 2,
            self.stop_a_server: 2,
            self.kill_postgres: 2,
        }

    async def work(self, seconds: float) -> None:
        """Act for so long; at the end both servers and Postgres are running."""
        ends_at = asyncio.get_running_loop().time() + seconds
        while asyncio.get_running_loop().time() < ends_at:
            await asyncio.sleep(self._chance.uniform(0.2, 2))
            (act,) = self._chance.choices(list(self._acts), [*self._acts.values()])
            print(act.__name__, flush=True)
            await act()
        for server in self._servers:
            await asyncio.to_thread(ready, server)

    async def terminate_a_session(self) -> None:
        await self._terminate(limit=1)

    async def terminate_all_sessions(self) -> None:
        await self._terminate(limit=1000)

    async def _terminate(self, *, limit: int) -> None:
        async with connected(self._keeper.dsn) as connection:
            await connection.execute(
                """select pg_terminate_backend(pid) from
                   (select pid from pg_stat_activity
                     where backend_type = 'client backend' and pid <> pg_backend_pid()
                     order by random() limit $1) as sessions""",
                limit,
            )

    async def kill_a_server(self) -> None:
        await self._restart(signal.SIGKILL)

    async def stop_a_server(self) -> None:
        await self._restart(signal.SIGTERM)

    async def _restart(self, number: signal.Signals) -> None:
        server = self._chance.choice(self._servers)
        server.signal(number)
        await asyncio.to_thread(server.wait)
        await asyncio.sleep(self._chance.uniform(0, 1))
        await asyncio.to_thread(server.start)

    async def kill_postgres(self) -> None:
        """Until it is back nothing else happens: a server does not start without a database."""
        killed = self._keeper.postgres_pid()
        os.kill(killed, signal.SIGKILL)
        await asyncio.to_thread(ended, killed)
        await asyncio.to_thread(ready, self._keeper)


def ended(pid: int) -> None:
    wait_until(lambda: not alive(pid), seconds=STOPPED_SECONDS, what="the end of a process")


def ready(server: Server) -> None:
    wait_until(lambda: server.get("/ready")[0] == 200, seconds=READY_SECONDS, what="readiness")


# What is left -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Stored:
    """What the feed of a workspace announces."""

    files: dict[str, set[str]]  # the ids of each name; a reopened file is announced again
    texts: Counter[str]


async def stored(clients: Clients, connection: Any) -> Stored:
    rows = await connection.fetch(
        """select method, request_body ->> 'name' as name, request_body ->> 'file_id' as file_id,
                  request_body #>> '{params,message,parts,0,text}' as text
             from feed where workspace_id = $1::uuid""",
        clients.id,
    )
    files: dict[str, set[str]] = defaultdict(set)
    for row in rows:
        if row["name"]:
            files[row["name"]].add(row["file_id"])
    return Stored(files, Counter(row["text"] for row in rows if row["text"]))


async def assert_each_once(clients: Clients, connection: Any) -> None:
    """A confirmed request is there once, any other one completely and once, or not at all."""
    found, ledger = await stored(clients, connection), clients.ledger

    for request in ledger.requests:
        copies = {len(found.files.get(name, ())) for name in request.names}
        assert copies == {1} or (copies == {0} and not request.is_confirmed), request.names
        if request.is_confirmed:
            answered = [file["uri"].rpartition("/")[2] for file in request.answer]
            assert [found.files[name] for name in request.names] == [{file} for file in answered]
    assert found.files.keys() <= {name for request in ledger.requests for name in request.names}
    for text, status in ledger.messages.items():
        assert found.texts[text] == 1 or (found.texts[text] == 0 and status != 200), text
    assert found.texts.keys() <= ledger.messages.keys()


async def assert_waiting_files(clients: Clients, connection: Any) -> None:
    """What nobody has taken can still be fetched, byte for byte; readers checked the rest."""
    rows = await connection.fetch(
        """select file_id::text, name, encode(sha256, 'hex') as sha256, acked_at is null as waits
             from uploads where workspace_id = $1::uuid""",
        clients.id,
    )
    for row in rows:
        assert row["sha256"] == clients.ledger.sha256_of(row["name"])
        if row["waits"]:
            path = f"/pending-uploads/{row['file_id']}/content"
            content = (await clients.insist("GET", path)).body
            assert hashlib.sha256(content).hexdigest() == row["sha256"]


async def last_seq_of(clients: Clients, connection: Any) -> int:
    return await connection.fetchval(
        "select last_seq from feeds where workspace_id = $1::uuid", clients.id
    )


# A counter of `feeds`, and what it counts.
COUNTERS = {
    "last_seq": "select coalesce(max(seq), 0) from feed where workspace_id = $1",
    "waiting_files": "select count(*) from uploads where workspace_id = $1 and acked_at is null",
    "waiting_bytes": """select coalesce(sum(size), 0) from uploads
                         where workspace_id = $1 and acked_at is null""",
    "reserved_files": "select coalesce(sum(files), 0) from reservations where workspace_id = $1",
    "reserved_bytes": "select coalesce(sum(bytes), 0) from reservations where workspace_id = $1",
    "feed_bytes": "select coalesce(sum(bytes), 0) from feed where workspace_id = $1",
    "unacked_bytes": """select coalesce(sum(bytes), 0) from feed where workspace_id = $1
                         and seq > (select settled_seq from feeds where workspace_id = $1)""",
}


STORED_BYTES = """
    select coalesce((select sum(octet_length(bytes)) from chunks where workspace_id = $1), 0)
         + coalesce((select sum(bytes) from feed where workspace_id = $1), 0)
"""


async def assert_counters(clients: Clients, connection: Any) -> None:
    """In one snapshot, because sweeps go on."""
    async with connection.transaction(isolation="repeatable_read"):
        feed = await connection.fetchrow("select * from feeds where workspace_id = $1", clients.id)
        counted = {name: feed[name] for name in COUNTERS}
        expected = {name: await connection.fetchval(COUNTERS[name], clients.id) for name in counted}
        stored = await connection.fetchval(STORED_BYTES, clients.id)
        rows = await connection.fetchval(
            "select count(*) from feed where workspace_id = $1", clients.id
        )
    assert counted == expected
    assert stored <= feed["written_total"]  # aborted uploads too were counted as written
    assert rows == feed["last_seq"] - feed["trimmed_seq"]


async def assert_stored_bytes(clients: Clients, connection: Any) -> None:
    """Each file has its bytes, and no others are stored than those of unconfirmed uploads."""
    rows = await connection.fetch(
        """select uploads.size, sum(octet_length(bytes)) as stored
             from chunks left join uploads using (workspace_id, file_id)
            where workspace_id = $1 group by workspace_id, file_id, uploads.size""",
        clients.id,
    )
    assert all(row["stored"] == row["size"] for row in rows if row["size"] is not None)
    unreachable = sum(row["stored"] for row in rows if row["size"] is None)
    print(f"{unreachable:,} bytes are unreachable", flush=True)
    assert unreachable <= clients.ledger.unconfirmed_bytes


async def assert_disk_use(connection: Any) -> None:
    """A table takes a few percent more than its bytes, and each server one look's worth."""
    size = await connection.fetchval(
        "select sum(pg_total_relation_size(relid)) from pg_partition_tree('chunks')"
    )
    print(f"{size:,} bytes are on disk", flush=True)
    assert size <= MAX_STORED_BYTES * 1.1


async def is_unreserved(connection: Any) -> bool:
    return not await connection.fetchval("select count(*) from reservations")
