"""The canvas watches a workspace: every committed row once, in order, and nothing for ever."""

import asyncio
import json
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
    suppress,
)
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import asyncpg
import pytest
import structlog
from aiohttp import ClientSession, ClientTimeout, WSMsgType
from callers import ADMIN, Caller, Part, ask, bearer, registered
from processes import STOPPED_SECONDS, Server
from prometheus_client.parser import text_string_to_metric_families
from sites import ADMIN_TOKEN, Site, SiteFactory
from waiting import until

from restante.errors import DatabaseUnavailable
from restante.feed import events, wakeups
from restante.feed import watch as watching
from restante.feed.rules import NewActivity, new_activity_id
from restante.feed.service import Feed
from restante.ids import WorkspaceId, as_uuid

pytestmark = pytest.mark.anyio

NOWHERE = "/workspaces/00000000-0000-4000-8000-000000000000"
WAYS = ["events", "ws"]
GAUGES = {
    "events": "molecule_event_streams_active",
    "ws": "molecule_websocket_connections_active",
}
UPGRADE = {
    "Connection": "Upgrade",
    "Upgrade": "websocket",
    "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
}


class Ended(Exception):
    """The server has ended the watch; for a WebSocket, with this code."""

    def __init__(self, code: int | None = None) -> None:
        super().__init__(code)
        self.code = code


class Watcher:
    """One who watches, whichever way."""

    def __init__(self, read: Callable[[], Awaitable[str]], way: Any) -> None:
        self._read = read
        self.way = way  # the answer or the socket
        self.last_id = ""

    async def event(self) -> dict[str, Any]:
        """The next event; raises Ended."""
        while True:
            text = await self._read()
            if not text.startswith((":", "id:", "event:", "data:")):
                return json.loads(text)
            if found := self._parsed(text):
                return found

    def _parsed(self, block: str) -> dict[str, Any] | None:
        """What a browser makes of a block: an id alone is remembered, and is no event."""
        fields: dict[str, list[str]] = {}
        for line in block.splitlines():
            name, _, value = line.partition(":")
            fields.setdefault(name, []).append(value.removeprefix(" "))
        (self.last_id,) = fields.get("id", [self.last_id])
        if "data" not in fields:
            return None
        event = json.loads("\n".join(fields["data"]))
        assert fields["event"] == ["ACTIVITY_LOGGED"]
        assert event["payload"]["id"] == self.last_id
        return event

    async def row(self) -> dict[str, Any]:
        event = await self.event()
        assert event["event"] == "ACTIVITY_LOGGED"
        assert event["workspace_id"] == event["payload"]["workspace_id"]
        return event["payload"]

    async def summaries(self, count: int) -> list[str]:
        return [(await self.row())["summary"] for _ in range(count)]

    async def end(self) -> int | None:
        """Wait for the end; nothing may come before it."""
        try:
            event = await self.event()
        except Ended as ended:
            return ended.code
        raise AssertionError(f"unexpected: {event}")


@asynccontextmanager
async def streaming(http: ClientSession, path: str, **options: Any) -> AsyncIterator[Watcher]:
    async with http.get(f"{path}/events", **options) as answer:
        assert answer.status == 200, await answer.text()
        assert answer.content_type == "text/event-stream"

        async def read() -> str:
            block = await answer.content.readuntil(b"\n\n")
            if not block:
                raise Ended
            return block.decode()

        yield Watcher(read, answer)


@asynccontextmanager
async def connected(http: ClientSession, path: str, **options: Any) -> AsyncIterator[Watcher]:
    async with http.ws_connect(f"{path}/ws", **options) as ws:

        async def read() -> str:
            message = await ws.receive(20)
            if message.type is not WSMsgType.TEXT:
                raise Ended(ws.close_code)
            return message.data

        yield Watcher(read, ws)


def watch(caller: Caller, way: str, **options: Any) -> AbstractAsyncContextManager[Watcher]:
    """Watch with the workspace's own token, unless other headers are given."""
    open_way = {"events": streaming, "ws": connected}[way]
    headers = options.pop("headers", {})
    return open_way(
        caller.site.http, caller.path, headers={**bearer(caller.token), **headers}, **options
    )


async def refused(site: Site, path: str, way: str, **options: Any) -> tuple[int, str]:
    """Try to watch: the status, and the code of the JSON problem."""
    headers = {**(UPGRADE if way == "ws" else {}), **options.pop("headers", {})}
    answer = await ask(site, "GET", f"{path}/{way}", headers=headers, **options)
    return answer.status, answer.json["code"]


async def append(caller: Caller, summary: str, body: bytes = b"{}", *, count: int = 1) -> None:
    row = NewActivity("test", summary, body)
    for _ in range(count):
        await caller.site.state.feed.append(id_of(caller), row)


def id_of(caller: Caller) -> WorkspaceId:
    found = as_uuid(caller.id)
    assert found
    return WorkspaceId(found)


async def gauge(site: Site, way: str) -> float:
    page = (await ask(site, "GET", "/metrics")).body.decode()
    (value,) = [
        sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == GAUGES[way]
    ]
    return value


async def nobody_watches(site: Site) -> None:
    async def gone() -> bool:
        counts = [await gauge(site, way) for way in WAYS]
        return counts == [0, 0] and not site.state.feed.wakeups._waiters

    await until(gone)


@pytest.fixture
async def workspace(site: Site) -> Caller:
    return await registered(site)


@pytest.mark.parametrize("way", WAYS)
async def test_a_watcher_sees_each_new_row_as_the_feed_has_it(workspace: Caller, way: str):
    await append(workspace, "from before")
    async with watch(workspace, way) as watcher:
        await workspace.staged(Part(name="a.txt"), Part(name="b.txt"))
        await append(workspace, "a message")

        rows = [await watcher.row() for _ in range(3)]

    assert rows == (await workspace.feed())[2::-1]
    assert [row["summary"] for row in rows] == [
        "chat_upload_receive: a.txt",
        "chat_upload_receive: b.txt",
        "a message",
    ]


@pytest.mark.parametrize("way", WAYS)
async def test_the_operator_may_watch_any_workspace(workspace: Caller, way: str):
    async with watch(workspace, way, headers=ADMIN) as watcher:
        await append(workspace, "one")

        assert await watcher.summaries(1) == ["one"]


@pytest.mark.parametrize("way", WAYS)
async def test_other_workspaces_rows_are_not_seen(site: Site, workspace: Caller, way: str):
    other = await registered(site)
    async with watch(workspace, way) as watcher:
        await append(other, "not yours")
        await append(workspace, "yours")

        assert await watcher.summaries(1) == ["yours"]


@pytest.mark.parametrize("way", WAYS)
async def test_a_row_that_was_rolled_back_is_never_seen(
    site: Site, workspace: Caller, way: str, connections: Callable[[], Any]
):
    connection = await connections()
    async with watch(workspace, way) as watcher:
        transaction = connection.transaction()
        await transaction.start()
        await connection.execute(
            "update feeds set last_seq = last_seq + 1 where workspace_id = $1", id_of(workspace)
        )
        await connection.execute(
            "insert into feed (id, workspace_id, seq, activity_type, summary, status, created_at) "
            "select $1, $2, last_seq, 'a2a_receive', 'rolled back', 'ok', now() from feeds "
            "where workspace_id = $2",
            new_activity_id(),
            id_of(workspace),
        )
        site.state.feed.wakeups.grew(id_of(workspace))  # whoever looks now must see nothing
        assert (await workspace.feed()) == []
        await transaction.rollback()
        await append(workspace, "committed")

        row = await watcher.row()

    assert (row["summary"], row["seq"]) == ("committed", 1)


async def test_json_with_line_breaks_arrives_whole(workspace: Caller):
    """An event ends at an empty line, and stored JSON may have some."""
    async with watch(workspace, "events") as watcher:
        await append(workspace, "odd", b'{"a":\r\n\r\n1,\n\n"b":\r"x\\ny"}')

        assert (await watcher.row())["request_body"] == {"a": 1, "b": "x\ny"}


@pytest.mark.parametrize("by", ["header", "query"])
@pytest.mark.parametrize("way", WAYS)
async def test_a_watcher_goes_on_where_it_was(
    workspace: Caller, way: str, by: str, monkeypatch: pytest.MonkeyPatch
):
    """Pages behind, and with rows arriving meanwhile: none is missed and none is doubled."""
    monkeypatch.setattr(watching, "PAGE_ROWS", 3)
    monkeypatch.setattr(watching, "HEARTBEAT_SECONDS", 3600)
    for number in range(10):
        await append(workspace, str(number))
    last = (await workspace.feed())[-3]
    options: dict[str, Any] = (
        {"headers": {"Last-Event-ID": last["id"]}}
        if by == "header"
        else {"params": {"last_event_id": last["id"]}}
    )

    async with watch(workspace, way, **options) as watcher:
        await append(workspace, "10")
        seen = await watcher.summaries(8)
        await append(workspace, "11")
        seen += await watcher.summaries(1)

    assert seen == [str(number) for number in range(3, 12)]


@pytest.mark.parametrize("way", WAYS)
async def test_the_header_is_newer_than_the_address(workspace: Caller, way: str):
    """A browser that connects again sends the address of its first try."""
    for number in range(3):
        await append(workspace, str(number))
    newest, middle, oldest = [row["id"] for row in await workspace.feed()]
    del newest

    async with watch(
        workspace, way, params={"last_event_id": oldest}, headers={"Last-Event-ID": middle}
    ) as watcher:
        assert await watcher.summaries(1) == ["2"]


async def test_a_stream_that_breaks_before_its_first_event_has_missed_nothing(workspace: Caller):
    """A watcher gets the id of the row before its first, and comes back with it."""
    await append(workspace, "before")
    async with watch(workspace, "events") as watcher:
        first = await asyncio.wait_for(watcher._read(), 10)
    watcher._parsed(first)
    assert watcher.last_id == (await workspace.feed())[0]["id"]
    await append(workspace, "in between")

    async with watch(workspace, "events", headers={"Last-Event-ID": watcher.last_id}) as watcher:
        assert await watcher.summaries(1) == ["in between"]


@pytest.mark.parametrize("look", ["read", "rows_after"])
@pytest.mark.parametrize("way", WAYS)
async def test_a_row_right_after_the_first_look_is_not_waited_for(
    workspace: Caller, monkeypatch: pytest.MonkeyPatch, way: str, look: str
):
    """Whoever looks has been registered before, and so is woken for what the look did not see."""
    monkeypatch.setattr(watching, "HEARTBEAT_SECONDS", 3600)
    await append(workspace, "before")
    last = (await workspace.feed())[0]["id"]
    original = getattr(Feed, look)

    async def then_a_row(*given: Any) -> Any:
        page = await original(*given)
        monkeypatch.setattr(Feed, look, original)
        await append(workspace, "right after")
        return page

    monkeypatch.setattr(Feed, look, then_a_row)
    headers = {"Last-Event-ID": last} if look == "rows_after" else {}
    async with watch(workspace, way, headers=headers) as watcher:
        assert await watcher.summaries(1) == ["right after"]


@pytest.mark.parametrize("way", WAYS)
async def test_watchers_that_come_while_rows_do_see_every_one_from_their_first(
    workspace: Caller, way: str
):
    total, watchers = 150, 12

    async def write() -> None:
        for number in range(total):
            await append(workspace, str(number))
        await append(workspace, "end")

    async def follow() -> list[int]:
        async with watch(workspace, way) as watcher:
            seqs = [(row := await watcher.row())["seq"]]
            while row["summary"] != "end":
                seqs.append((row := await watcher.row())["seq"])
            return seqs

    writing = asyncio.create_task(write())
    following = [asyncio.create_task(follow())]
    while len(following) < watchers and not writing.done():
        await asyncio.sleep(0)
        following.append(asyncio.create_task(follow()))
    seen = await asyncio.gather(*following)
    await writing

    for seqs in seen:
        assert seqs == list(range(seqs[0], total + 2))


@pytest.mark.parametrize("way", WAYS)
async def test_a_position_that_is_not_there_is_gone_whatever_the_reason(
    site: Site, workspace: Caller, way: str, connections: Callable[[], Any]
):
    connection = await connections()
    other = await registered(site)
    await append(other, "theirs")
    await append(workspace, "trimmed", count=2)
    theirs = (await other.feed())[0]["id"]
    trimmed, first = [row["id"] for row in await workspace.feed()]
    del trimmed
    await connection.execute(
        "update feeds set trimmed_seq = 2 where workspace_id = $1", id_of(workspace)
    )

    for unknown in (str(uuid4()), theirs, first):
        assert await refused(
            site,
            workspace.path,
            way,
            headers={**bearer(workspace.token), "Last-Event-ID": unknown},
        ) == (410, "cursor_gone")
    assert await refused(
        site, workspace.path, way, headers={**bearer(workspace.token), "Last-Event-ID": "17"}
    ) == (400, "bad_request")
    await nobody_watches(site)


@pytest.mark.parametrize("way", WAYS)
async def test_a_trim_that_overtakes_a_watcher_ends_its_watch(
    site: Site, workspace: Caller, way: str, connections: Callable[[], Any]
):
    """It comes back, and is told that rows are missing; a hole never goes unnoticed."""
    connection = await connections()
    async with watch(workspace, way) as watcher:
        await append(workspace, "seen")
        await watcher.row()
        await connection.execute(
            "update feeds set last_seq = 9, trimmed_seq = 9 where workspace_id = $1",
            id_of(workspace),
        )
        site.state.feed.wakeups.grew(id_of(workspace))

        assert await watcher.end() == (4410 if way == "ws" else None)
    await nobody_watches(site)


async def test_a_quiet_stream_shows_that_it_lives(
    workspace: Caller, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(watching, "HEARTBEAT_SECONDS", 0.01)
    async with watch(workspace, "events") as watcher:
        for _ in range(3):
            assert (await asyncio.wait_for(watcher._read(), 10)).startswith(":")
        await append(workspace, "one")

        assert await watcher.summaries(1) == ["one"]


async def test_a_stream_may_be_asked_for_with_head(workspace: Caller):
    answer = await workspace.ask("HEAD", "/events")

    assert (answer.status, answer.headers["Content-Type"]) == (200, "text/event-stream")
    assert answer.headers["Cache-Control"] == "no-store, no-transform"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("headers", "path", "expected"),
    [
        ({}, "{own}", (401, "not_authenticated")),
        (bearer("nonsense"), "{own}", (401, "not_authenticated")),
        (bearer("é"), "{own}", (401, "not_authenticated")),
        ("other", "{own}", (401, "not_authenticated")),
        ("own", "/workspaces/nonsense", (400, "bad_request")),
        ("own", NOWHERE, (401, "not_authenticated")),
        (ADMIN, NOWHERE, (404, "workspace_unknown")),
        (ADMIN, "/workspaces/nonsense", (400, "bad_request")),
    ],
)
async def test_strangers_are_refused_in_our_shape_and_without_alarm(
    site: Site,
    workspace: Caller,
    caplog: pytest.LogCaptureFixture,
    *,
    way: str,
    headers: Any,
    path: str,
    expected: tuple[int, str],
):
    other = await registered(site)
    tokens = {"own": bearer(workspace.token), "other": bearer(other.token)}
    sent = tokens[headers] if isinstance(headers, str) else headers

    with structlog.testing.capture_logs() as logged:
        assert await refused(site, path.format(own=workspace.path), way, headers=sent) == expected

    await until(lambda: asyncio.sleep(0, logged))
    (line,) = logged
    assert line["event"] == {"events": "request", "ws": "websocket"}[way]
    assert line["route"] == f"/workspaces/{{workspace_id}}/{way}"
    assert line.get("status", line.get("code")) == expected[0]
    assert [record for record in caplog.records if record.levelno > logging.INFO] == []
    assert await gauge(site, way) == 0


async def test_a_browser_may_send_the_token_in_the_address_of_a_stream(
    site: Site, workspace: Caller
):
    for token in (workspace.token, ADMIN_TOKEN):
        async with streaming(site.http, workspace.path, params={"access_token": token}) as watcher:
            await append(workspace, "one")
            assert await watcher.summaries(1) == ["one"]

    params = {"access_token": "nonsense é"}
    assert (await refused(site, workspace.path, "events", params=params))[0] == 401
    params = {"access_token": workspace.token}
    assert (
        await refused(site, workspace.path, "events", params=params, headers=bearer("nonsense"))
    )[0] == 401


async def test_a_browser_may_offer_the_token_as_a_subprotocol(site: Site, workspace: Caller):
    for token in (workspace.token, ADMIN_TOKEN):
        async with connected(site.http, workspace.path, protocols=("bearer", token)) as watcher:
            assert watcher.way.protocol == "bearer"
            await append(workspace, "one")
            assert await watcher.summaries(1) == ["one"]

    for offered in ("bearer", "bearer, nonsense", f"other, {workspace.token}", workspace.token):
        headers = {"Sec-WebSocket-Protocol": offered}
        assert (await refused(site, workspace.path, "ws", headers=headers))[0] == 401
    params = {"access_token": workspace.token}
    assert (await refused(site, workspace.path, "ws", params=params))[0] == 401


async def test_tokens_reach_neither_logs_nor_metrics(site: Site, workspace: Caller):
    with structlog.testing.capture_logs() as logged:
        async with (
            streaming(site.http, workspace.path, params={"access_token": workspace.token}),
            connected(site.http, workspace.path, protocols=("bearer", workspace.token)),
        ):
            pass
        await nobody_watches(site)

    assert {"request", "websocket"} <= {line["event"] for line in logged}
    assert workspace.token not in str(logged)
    assert workspace.token not in (await ask(site, "GET", "/metrics")).body.decode()


@pytest.mark.parametrize("way", WAYS)
async def test_open_watches_are_counted_from_zero_and_back(site: Site, workspace: Caller, way: str):
    """However they end: by leaving, without a word, or from our side."""
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


async def is_count(site: Site, way: str, count: int) -> bool:
    return await gauge(site, way) == count


def transport_of(watcher: Watcher) -> asyncio.Transport:
    connection = getattr(watcher.way, "connection", None)
    return connection.transport if connection else watcher.way._writer.transport


@pytest.mark.parametrize("way", WAYS)
async def test_only_so_many_may_watch_one_workspace(
    site: Site, workspace: Caller, way: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(wakeups, "_MAX_WAITERS", 2)
    other = await registered(site)
    async with watch(workspace, way):
        async with watch(workspace, way):
            assert await refused(site, workspace.path, way, headers=bearer(workspace.token)) == (
                429,
                "too_many_at_once",
            )
            async with watch(other, way):
                pass
        await until(lambda: is_count(site, way, 1))
        async with watch(workspace, way) as watcher:
            await append(workspace, "there is room again")
            await watcher.row()


async def test_watchers_hold_no_connection_while_they_wait(run_site: SiteFactory):
    async with run_site(pool_size=2) as site, AsyncExitStack() as stack:
        workspace = await registered(site)
        watchers = [await stack.enter_async_context(watch(workspace, way)) for way in WAYS * 15]
        pool = site.state.feed._db._pool
        await until(lambda: asyncio.sleep(0, pool.get_idle_size() == pool.get_size()))
        await append(workspace, "for everyone")

        assert [await watcher.summaries(1) for watcher in watchers] == [["for everyone"]] * 30


@pytest.mark.parametrize("way", WAYS)
async def test_a_watcher_that_takes_nothing_is_dropped_and_others_are_not(
    site: Site, workspace: Caller, way: str, monkeypatch: pytest.MonkeyPatch
):
    """What is meant for it does not pile up: its connection is cut, and it can come back."""
    monkeypatch.setattr(events, "SEND_SECONDS", 0.1)
    large = b'"' + b"x" * 400_000 + b'"'
    async with watch(workspace, way) as good:
        with structlog.testing.capture_logs() as logged, stalled(workspace, way) as port:
            await until(lambda: is_watched_by(site, 2))
            for number in range(40):
                await append(workspace, str(number), large)
                assert await good.summaries(1) == [str(number)]
            await until(lambda: asyncio.sleep(0, "watcher_dropped" in names(logged)))
            await until(lambda: is_watched_by(site, 1))

            (line,) = [line for line in logged if line["event"] == "watcher_dropped"]
            assert line["workspace"] == workspace.id
            # The server has let go of all that was written for it, though nobody took it.
            await until(lambda: asyncio.sleep(0, port not in connected_ports(site)))
        assert "bug" not in names(logged)
        await append(workspace, "still here")
        assert await good.summaries(1) == ["still here"]
        assert await gauge(site, way) == 1


def names(logged: list[Any]) -> list[str]:
    return [line["event"] for line in logged]


async def is_watched_by(site: Site, count: int) -> bool:
    return sum(map(len, site.state.feed.wakeups._waiters.values())) == count


def connected_ports(site: Site) -> set[int]:
    """Where the connections that the server holds come from, as the kernel has them."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    ours = f":{urlsplit(site.url).port:04X}"
    established = [row for row in rows if row[1].endswith(ours) and row[3] == "01"]
    return {int(row[2].rpartition(":")[2], 16) for row in established}


@contextmanager
def stalled(caller: Caller, way: str) -> Iterator[int]:
    """A watcher that asks and then reads nothing at all; the port that it came from."""
    where = urlsplit(caller.site.url)
    headers = {"Host": "r", **bearer(caller.token), **(UPGRADE if way == "ws" else {})}
    lines = [f"GET {caller.path}/{way} HTTP/1.1", *(f"{k}: {v}" for k, v in headers.items())]
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((where.hostname, where.port))
        client.sendall("\r\n".join([*lines, "", ""]).encode())
        yield client.getsockname()[1]


async def test_what_a_watcher_sends_is_read_over(workspace: Caller):
    async with watch(workspace, "ws") as watcher:
        for _ in range(50):
            await watcher.way.send_str("hello")
            await watcher.way.send_bytes(b"\0" * events.MAX_MESSAGE_CHARACTERS)
        await append(workspace, "one")

        assert await watcher.summaries(1) == ["one"]


@pytest.mark.parametrize("size", [events.MAX_MESSAGE_CHARACTERS + 1, 20_000_000])
async def test_a_watcher_that_sends_too_much_is_shown_out(site: Site, workspace: Caller, size: int):
    async with watch(workspace, "ws") as watcher:
        with suppress(ConnectionError):  # it is not read to its end
            await watcher.way.send_bytes(b"\0" * size)

        assert await watcher.end() in {1009, 1006}
    await nobody_watches(site)


@pytest.mark.parametrize("way", WAYS)
async def test_a_server_that_stops_ends_its_watches_in_good_order(
    site: Site, workspace: Caller, way: str
):
    async with watch(workspace, way) as watcher:
        site.state.feed.wakeups.stop()

        assert await watcher.end() == (1001 if way == "ws" else None)
        await nobody_watches(site)
    async with watch(workspace, way) as late:
        assert await late.end() == (1001 if way == "ws" else None)


async def revoke(workspace: Caller) -> None:
    path = f"/admin/workspaces/{workspace.id}/token"
    assert (await ask(workspace.site, "DELETE", path, headers=ADMIN)).status == 200


async def remove(workspace: Caller) -> None:
    path = f"{workspace.path}?confirm=true"
    assert (await ask(workspace.site, "DELETE", path, headers=ADMIN)).status == 200


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("happens", "headers", "code"), [(revoke, {}, 4401), (remove, {}, 4401), (remove, ADMIN, 4404)]
)
async def test_a_watch_ends_with_the_right_to_it(
    site: Site,
    workspace: Caller,
    monkeypatch: pytest.MonkeyPatch,
    *,
    way: str,
    happens: Callable[[Caller], Awaitable[None]],
    headers: dict[str, str],
    code: int,
):
    """When the next row comes, which is not shown any more."""
    monkeypatch.setattr(watching, "TRUST_SECONDS", 0)
    async with watch(workspace, way, headers=headers) as watcher:
        await happens(workspace)
        await append(workspace, "not for you")

        assert await watcher.end() == (code if way == "ws" else None)
    await nobody_watches(site)


@pytest.mark.parametrize("way", WAYS)
async def test_a_quiet_watch_ends_with_the_right_to_it_too(
    site: Site, workspace: Caller, monkeypatch: pytest.MonkeyPatch, way: str
):
    monkeypatch.setattr(watching, "TRUST_SECONDS", 0)
    monkeypatch.setattr(watching, "HEARTBEAT_SECONDS", 0.01)
    async with watch(workspace, way) as watcher:
        await revoke(workspace)

        assert await watcher.end() == (4401 if way == "ws" else None)
    await nobody_watches(site)


async def test_the_operators_watch_outlives_the_workspaces_token(
    workspace: Caller, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(watching, "TRUST_SECONDS", 0)
    async with watch(workspace, "ws", headers=ADMIN) as watcher:
        await revoke(workspace)
        await append(workspace, "one")

        assert await watcher.summaries(1) == ["one"]


@pytest.mark.parametrize("way", WAYS)
async def test_a_watch_outlives_an_absence_of_the_database(
    site: Site, workspace: Caller, cluster: str, monkeypatch: pytest.MonkeyPatch, way: str
):
    """A browser gives up on a stream that is refused, so ours is kept until Postgres is back."""
    monkeypatch.setattr(watching, "_LOOK_AGAIN_SECONDS", 0.01)
    looked = 0
    look = Feed.rows_after

    async def rows_after(*given: Any) -> Any:
        nonlocal looked
        looked += 1
        return await look(*given)

    monkeypatch.setattr(Feed, "rows_after", rows_after)
    async with watch(workspace, way) as watcher:
        async with no_database(site, cluster):
            site.state.feed.wakeups.grew(id_of(workspace))
            await until(lambda: asyncio.sleep(0, looked >= 3))
        await until(lambda: accepted(workspace, "after the storm"))

        assert await watcher.summaries(1) == ["after the storm"]


@asynccontextmanager
async def no_database(site: Site, cluster: str) -> AsyncIterator[None]:
    name = (site.settings.database_url or "").partition("?")[0].rpartition("/")[2]
    maintenance = await asyncpg.connect(cluster)
    await maintenance.execute(f"alter database {name} allow_connections false")
    await maintenance.execute(
        "select pg_terminate_backend(pid) from pg_stat_activity where datname = $1", name
    )
    yield
    await maintenance.execute(f"alter database {name} allow_connections true")
    await maintenance.close()


async def accepted(workspace: Caller, summary: str) -> bool:
    """Whether the server has found its database again."""
    try:
        await append(workspace, summary)
    except DatabaseUnavailable:
        return False
    return True


async def test_a_bug_closes_a_websocket_and_is_told_once(
    site: Site, workspace: Caller, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def broken(_row: object) -> bytes:
        raise ZeroDivisionError("secret detail")

    monkeypatch.setattr(events, "_event", broken)
    with structlog.testing.capture_logs() as logged:
        async with watch(workspace, "ws") as watcher:
            await append(workspace, "one")

            assert await watcher.end() == 1011
        await nobody_watches(site)

    assert names(logged).count("bug") == 1
    assert [record for record in caplog.records if record.levelno > logging.INFO] == []


@pytest.mark.parametrize("way", WAYS)
async def test_rows_reach_those_who_wait_at_another_server(run_site: SiteFactory, way: str):
    """Two servers share a database; an upload to one is seen at the other at once."""
    async with run_site() as here, run_site() as there:
        sender = await registered(here)
        waiting = Caller(there, sender.id, sender.token)
        await heard(here, there)
        async with watch(waiting, way) as watcher:
            polling = asyncio.create_task(waiting.feed(wait=15))
            await until(lambda: is_watched_by(there, 2))
            async with asyncio.timeout(5):
                await sender.staged(Part(name="a.txt"))

                assert await watcher.summaries(1) == ["chat_upload_receive: a.txt"]
                assert [row["seq"] for row in await polling] == [1]


async def heard(here: Site, there: Site) -> None:
    """Until news from one server arrive at the other."""
    nobody = WorkspaceId(uuid4())
    async with there.context.feed.wakeups.waiting(nobody) as waiter:
        await waiter.wait(5)  # it listens now, and so everyone looks
        here.context.feed.wakeups.grew(nobody)
        assert await waiter.wait(10)


async def test_a_server_with_many_watchers_stops_in_time(server: Server):
    """And at no level of detail was a token logged."""
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
        message = {"jsonrpc": "2.0", "method": "message/send", "params": {"a": "b"}}
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
