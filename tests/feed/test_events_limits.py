"""Watchers are counted, bounded, dropped when they stall, and end with the server."""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit
from uuid import uuid4

import asyncpg
import pytest
import structlog
from aiohttp import ClientSession, ClientTimeout
from callers import Caller, bearer, registered
from processes import STOPPED_SECONDS, Server
from sites import Site, SiteFactory
from waiting import until
from watchers import (
    UPGRADE,
    WAYS,
    Watcher,
    append,
    choose,
    connected,
    gauge,
    id_of,
    is_count,
    is_watched_by,
    names,
    nobody_watches,
    refused,
    streaming,
    watch,
)

from restante.errors import DatabaseUnavailable, TooManyAtOnce
from restante.feed import sockets
from restante.feed.rules import UNLIMITED, Page, Query
from restante.feed.service import Feed
from restante.ids import WorkspaceId

pytestmark = pytest.mark.anyio


@pytest.fixture
async def workspace(site: Site) -> Caller:
    return await registered(site)


async def test_a_quiet_stream_sends_heartbeats(workspace: Caller):
    choose(workspace.site, heartbeat_seconds=0.01)
    async with watch(workspace, "events") as watcher:
        for _ in range(3):
            assert (await asyncio.wait_for(watcher._read(), 30)).startswith(":")
        await append(workspace, "one")

        assert await watcher.summaries(1) == ["one"]


@pytest.mark.parametrize("way", WAYS)
async def test_open_watches_are_counted_from_zero_and_back(site: Site, workspace: Caller, way: str):
    """Whether the watcher closes the connection or aborts it."""
    other_way = next(each for each in WAYS if each != way)
    assert [await gauge(site, each) for each in WAYS] == [0, 0]

    async with watch(workspace, way):
        await until(lambda: is_count(site, way, 1))
        async with watch(workspace, way) as second:
            await until(lambda: is_count(site, way, 2))
            assert await gauge(site, other_way) == 0
            transport_of(second).abort()
            await until(lambda: is_count(site, way, 1))
    await nobody_watches(site)


def transport_of(watcher: Watcher) -> asyncio.Transport:
    connection = getattr(watcher.way, "connection", None)
    return connection.transport if connection else watcher.way._writer.transport


@pytest.mark.parametrize("way", WAYS)
async def test_the_number_of_watchers_of_one_workspace_is_bounded(
    site: Site, workspace: Caller, way: str
):
    other = await registered(site)
    async with AsyncExitStack() as stack:
        places = await fill(stack, workspace)
        assert await refused(site, workspace.path, way, headers=bearer(workspace.token)) == (
            429,
            "too_many_at_once",
        )
        async with watch(other, way):
            pass

        await places.pop().aclose()

        async with watch(workspace, way) as watcher:
            await append(workspace, "there is room again")
            await watcher.row()


async def fill(stack: AsyncExitStack, workspace: Caller) -> list[AsyncExitStack]:
    """Take the places of all watchers of a workspace; each can be given up."""
    places: list[AsyncExitStack] = []
    wakeups = workspace.site.state.wakeups
    with suppress(TooManyAtOnce):
        while True:
            place = await stack.enter_async_context(AsyncExitStack())
            await place.enter_async_context(wakeups.waiting(id_of(workspace), is_watcher=True))
            places.append(place)
    return places


async def test_watchers_hold_no_connection_while_they_wait(run_site: SiteFactory):
    async with run_site(pool_size=2) as site, AsyncExitStack() as stack:
        workspace = await registered(site)
        watchers = [await stack.enter_async_context(watch(workspace, way)) for way in WAYS * 15]
        pool = site.state.db._pool
        await until(lambda: pool.get_idle_size() == pool.get_size())
        await append(workspace, "for everyone")

        assert [await watcher.summaries(1) for watcher in watchers] == [["for everyone"]] * 30


@pytest.mark.parametrize("way", WAYS)
async def test_a_watcher_that_does_not_read_is_dropped_and_others_are_not(
    site: Site, workspace: Caller, way: str
):
    """Its events do not pile up: its connection is aborted, and it can resume later."""
    large = b'"' + b"x" * 400_000 + b'"'
    async with watch(workspace, way) as good:
        with structlog.testing.capture_logs() as logged, stalled(workspace, way) as port:
            await until(lambda: is_watched_by(site, 2))
            choose(site, send_seconds=0.5)
            for number in range(40):
                await append(workspace, str(number), large)
                assert await good.summaries(1) == [str(number)]
            await until(lambda: "watcher_dropped" in names(logged))
            await until(lambda: is_watched_by(site, 1))

            (line,) = [line for line in logged if line["event"] == "watcher_dropped"]
            assert line["workspace"] == workspace.id
            # The server has discarded what it had written for it, although nobody read it.
            await until(lambda: port not in connected_ports(site))
        assert "bug" not in names(logged)
        await append(workspace, "still here")
        assert await good.summaries(1) == ["still here"]
        assert await gauge(site, way) == 1


def connected_ports(site: Site) -> set[int]:
    """The client ports of the server's connections, as the kernel has them."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    ours = f":{urlsplit(site.url).port:04X}"
    established = [row for row in rows if row[1].endswith(ours) and row[3] == "01"]
    return {int(row[2].rpartition(":")[2], 16) for row in established}


@contextmanager
def stalled(caller: Caller, way: str) -> Iterator[int]:
    """A watcher that connects and reads nothing; yields its port."""
    where = urlsplit(caller.site.url)
    headers = {"Host": "r", **bearer(caller.token), **(UPGRADE if way == "ws" else {})}
    lines = [f"GET {caller.path}/{way} HTTP/1.1", *(f"{k}: {v}" for k, v in headers.items())]
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((where.hostname, where.port))
        client.sendall("\r\n".join([*lines, "", ""]).encode())
        yield client.getsockname()[1]


async def test_what_a_watcher_sends_is_ignored(workspace: Caller):
    async with watch(workspace, "ws") as watcher:
        for _ in range(50):
            await watcher.way.send_str("hello")
            await watcher.way.send_bytes(b"\0" * sockets.MAX_MESSAGE_CHARACTERS)
        await append(workspace, "one")

        assert await watcher.summaries(1) == ["one"]


@pytest.mark.parametrize("size", [sockets.MAX_MESSAGE_CHARACTERS + 1, 20_000_000])
async def test_a_watcher_that_sends_too_much_is_disconnected(
    site: Site, workspace: Caller, size: int
):
    async with watch(workspace, "ws") as watcher:
        with suppress(ConnectionError):  # the server does not read all of it
            await watcher.way.send_bytes(b"\0" * size)

        assert await watcher.end() in {1009, 1006}
    await nobody_watches(site)


@pytest.mark.parametrize("way", WAYS)
async def test_a_server_that_stops_closes_its_watches(site: Site, workspace: Caller, way: str):
    """And those that begin while it stops; a heartbeat is not what ends them."""
    choose(site, heartbeat_seconds=3600)
    async with watch(workspace, way) as watcher:
        site.state.wakeups.stop()

        assert await watcher.end() == (1001 if way == "ws" else None)
        await nobody_watches(site)
    async with watch(workspace, way) as late:
        assert await late.end() == (1001 if way == "ws" else None)


class CountingFeed(Feed):
    """Counts how often watchers look for rows."""

    looks = 0

    async def read(self, workspace_id: WorkspaceId, query: Query) -> Page:
        self.looks += query.since_seq is not None
        return await super().read(workspace_id, query)


@pytest.mark.parametrize("way", WAYS)
async def test_a_watch_survives_an_outage_of_the_database(
    site: Site, workspace: Caller, cluster: str, way: str
):
    """A browser does not retry a stream that is refused, so the watch waits for Postgres."""
    feed = CountingFeed(site.state.db, site.state.wakeups, UNLIMITED, site.state.disk)
    site.state.feed = feed
    choose(site, trust_seconds=3600)
    async with watch(workspace, way) as watcher:
        async with no_database(site, cluster):
            site.state.wakeups.grew(id_of(workspace))
            await until(lambda: feed.looks >= 2, seconds=30)
        await until(lambda: accepted(workspace, "after the outage"), seconds=30)

        assert await watcher.summaries(1) == ["after the outage"]


@asynccontextmanager
async def no_database(site: Site, cluster: str) -> AsyncIterator[None]:
    name = (site.settings.database_url or "").partition("?")[0].rpartition("/")[2]
    maintenance = await asyncpg.connect(cluster)
    await maintenance.execute(f"alter database {name} allow_connections false")
    await maintenance.execute(
        "select pg_terminate_backend(pid) from pg_stat_activity where datname = $1", name
    )
    try:
        yield
    finally:
        await maintenance.execute(f"alter database {name} allow_connections true")
        await maintenance.close()


async def accepted(workspace: Caller, summary: str) -> bool:
    """Whether the server has reconnected to its database."""
    try:
        await append(workspace, summary)
    except DatabaseUnavailable:
        return False
    return True


class BrokenFeed(Feed):
    """A feed with a bug."""

    async def read(self, workspace_id: WorkspaceId, query: Query) -> Page:
        if query.since_seq is not None:
            raise ZeroDivisionError("secret detail")
        return await super().read(workspace_id, query)


async def test_a_bug_closes_a_websocket_and_is_logged_once(
    site: Site, workspace: Caller, caplog: pytest.LogCaptureFixture
):
    site.state.feed = BrokenFeed(site.state.db, site.state.wakeups, UNLIMITED, site.state.disk)
    with structlog.testing.capture_logs() as logged:
        async with watch(workspace, "ws") as watcher:
            site.state.wakeups.grew(id_of(workspace))

            assert await watcher.end() == 1011
        await nobody_watches(site)

    assert names(logged).count("bug") == 1
    assert [record for record in caplog.records if record.levelno > logging.INFO] == []


async def test_a_server_with_many_watchers_stops_in_time(server: Server):
    """And no token was logged, at any log level."""
    server.flags = ("--log-level", "debug")
    await asyncio.to_thread(server.start)
    timeout = ClientTimeout(total=60)
    async with ClientSession(server.address, timeout=timeout) as http, AsyncExitStack() as stack:
        body = {"id": str(uuid4()), "delivery_mode": "poll", "agent_card": {"name": "tester"}}
        async with http.post("/registry/register", json=body) as answer:
            token = (await answer.json())["auth_token"]
        path = f"/workspaces/{body['id']}"
        watchers = [
            await stack.enter_async_context(
                streaming(http, path, params={"access_token": token})
                if number % 2
                else connected(http, path, protocols=("bearer", token))
            )
            for number in range(50)
        ]
        message = {"jsonrpc": "2.0", "method": "message/send", "params": {"message": {"parts": []}}}
        headers = bearer(server.admin_token)
        async with http.post(f"{path}/a2a", json=message, headers=headers) as answer:
            assert answer.status == 200
        for watcher in watchers:
            assert (await watcher.row())["method"] == "message/send"

        stopping = asyncio.create_task(asyncio.to_thread(server.stop, STOPPED_SECONDS))

        ends = [await watcher.end() for watcher in watchers]
        assert await stopping == 0
    assert ends == [1001, None] * 25
    assert not [line for line in server.output if "Traceback" in line or token in line]
