"""The operator watches all workspaces: every committed row once, in order, or an end."""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest
import structlog
from callers import ADMIN, Caller, Part, ask, registered
from large_rows import LARGE_BYTES
from sites import Site, SiteFactory
from waiting import until
from watchers import (
    WAYS,
    Watcher,
    append,
    choose,
    id_of,
    is_watched_by,
    nobody_watches,
    refused,
    watch,
    watch_any,
)

from restante import wire
from restante.feed import store, wakeups
from restante.feed.horizon import Horizon
from restante.feed.rules import NewActivity
from restante.feed.wakeups import CHANNEL
from restante.feed.watch_all import event_id, horizon_of
from restante.ids import new_activity_id

pytestmark = pytest.mark.anyio

BOTH = pytest.mark.parametrize("way", WAYS)


async def rows(watcher: Watcher, count: int) -> list[tuple[str, int]]:
    found = [await watcher.row() for _ in range(count)]
    return [(row["workspace_id"], row["seq"]) for row in found]


@BOTH
async def test_the_operator_sees_the_rows_of_all_workspaces(site: Site, way: str):
    """Those that register later, too; nothing from before."""
    one, other = await registered(site), await registered(site)
    await append(one, "from before", count=3)
    async with watch_any(site, way, headers=ADMIN) as watcher:
        await append(one, "a")
        await other.staged(Part(name="b.txt"))
        late = await registered(site)
        await append(late, "c", count=2)

        seen = await rows(watcher, 4)

    assert sorted(seen) == sorted([(one.id, 4), (other.id, 1), (late.id, 1), (late.id, 2)])
    await nobody_watches(site)


@BOTH
async def test_each_row_comes_once_and_in_the_order_of_its_feed(site: Site, way: str):
    """Whatever happens: searches, watchers that come while rows arrive, pages that are full."""
    choose(site, search_seconds=0, page_rows=3)
    workspaces = [await registered(site) for _ in range(6)]
    total, watchers = 30, 4
    # A watcher that came after the last row of a workspace would wait for it for ever.
    one_watches, all_watch = asyncio.Event(), asyncio.Barrier(watchers + len(workspaces))

    async def write(workspace: Caller) -> None:
        for number in range(total):
            await append(workspace, str(number))
        await all_watch.wait()
        await append(workspace, "end")

    async def follow() -> dict[str, list[int]]:
        seen: dict[str, list[int]] = {workspace.id: [] for workspace in workspaces}
        async with watch_any(site, way, headers=ADMIN) as watcher:
            one_watches.set()
            arrived = asyncio.create_task(all_watch.wait())
            ended = 0
            while ended < len(workspaces):
                row = await watcher.row()
                seen[row["workspace_id"]].append(row["seq"])
                ended += row["summary"] == "end"
        await arrived
        return seen

    following = [asyncio.create_task(follow())]
    await one_watches.wait()
    writing = [asyncio.create_task(write(workspace)) for workspace in workspaces]
    following += [asyncio.create_task(follow()) for _ in range(watchers - 1)]
    first, *others = await asyncio.gather(*following)
    await asyncio.gather(*writing)

    assert all(seqs == list(range(1, total + 2)) for seqs in first.values())
    for seen in others:
        for seqs in seen.values():
            assert seqs == list(range(seqs[0], total + 2))


@BOTH
async def test_rows_of_another_server_are_seen(run_site: SiteFactory, way: str):
    async with run_site() as here, run_site() as there:
        choose(there, heartbeat_seconds=3600, search_seconds=3600)
        async with watch_any(there, way, headers=ADMIN) as watcher:
            waiter = next(iter(there.state.wakeups._for_all))
            await until(lambda: not waiter.must_search)
            workspace = await registered(here)
            await workspace.staged(Part(name="a.txt"), Part(name="b.txt"))

            assert await rows(watcher, 2) == [(workspace.id, 1), (workspace.id, 2)]


async def append_silently(connection: Any, workspace: Caller, summary: str) -> None:
    """A row of a server that dies before it can tell anybody."""
    row = NewActivity("test", summary, b"{}")
    assert await store.append(connection, id_of(workspace), row, now=datetime.now(UTC))


KILL_LISTENERS = """
    select pg_terminate_backend(pid) from pg_stat_activity
     where datname = current_database() and query ilike 'listen %'
"""


@BOTH
async def test_rows_that_came_while_nothing_was_heard_are_seen_afterwards(
    site: Site, connections: Callable[[], Any], way: str
):
    """The listener lost its connection; when it has another, the watcher searches."""
    choose(site, heartbeat_seconds=3600, search_seconds=3600)
    connection = await connections()
    known, unknown = await registered(site), await registered(site)
    async with watch_any(site, way, headers=ADMIN) as watcher:
        await append(known, "heard of")
        assert await rows(watcher, 1) == [(known.id, 1)]
        for workspace in (known, unknown):
            await append_silently(connection, workspace, "not heard of")
        assert await connection.fetch(KILL_LISTENERS)

        assert sorted(await rows(watcher, 2)) == sorted([(known.id, 2), (unknown.id, 1)])


@BOTH
async def test_rows_of_a_server_that_died_are_found_by_the_next_search(
    site: Site, connections: Callable[[], Any], way: str
):
    choose(site, search_seconds=0.05)
    connection = await connections()
    workspaces = [await registered(site) for _ in range(3)]
    async with watch_any(site, way, headers=ADMIN) as watcher:
        for number in range(1, 4):
            for workspace in workspaces:
                await append_silently(connection, workspace, str(number))

            seen = await rows(watcher, 3)
            assert sorted(seen) == sorted((workspace.id, number) for workspace in workspaces)


@BOTH
async def test_a_row_that_was_rolled_back_is_never_seen(
    site: Site, connections: Callable[[], Any], way: str
):
    connection = await connections()
    workspace = await registered(site)
    async with watch_any(site, way, headers=ADMIN) as watcher:
        transaction = connection.transaction()
        await transaction.start()
        await append_silently(connection, workspace, "rolled back")
        site.state.wakeups.grew(id_of(workspace))
        await transaction.rollback()
        site.state.wakeups.grew(id_of(workspace))
        await append(workspace, "committed")

        assert await watcher.summaries(1) == ["committed"]


@BOTH
async def test_only_a_few_may_watch_all_at_once(
    site: Site, way: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(wakeups, "_MAX_WAITERS_FOR_ALL", 2)
    workspace = await registered(site)
    async with watch_any(site, "ws", headers=ADMIN), watch_any(site, "events", headers=ADMIN):
        assert await refused(site, "", way, headers=ADMIN) == (429, "too_many_at_once")
        async with watch(workspace, way, headers=ADMIN):
            pass
    await nobody_watches(site)
    async with watch_any(site, way, headers=ADMIN):
        pass


@BOTH
async def test_a_watcher_that_does_not_read_is_dropped(site: Site, way: str):
    workspace = await registered(site)
    large = b'"' + b"x" * 400_000 + b'"'
    choose(site, send_seconds=0.3)
    with structlog.testing.capture_logs() as logged:
        async with (
            watch_any(site, way, headers=ADMIN, read_bufsize=1024)
            if way == "events"
            else (watch_any(site, way, headers=ADMIN)) as watcher
        ):
            transport = getattr(watcher.way, "connection", None) or watcher.way._conn
            transport.transport.pause_reading()
            for number in range(40):
                await append(workspace, str(number), large)

            await until(lambda: dropped(logged))
            await until(lambda: is_watched_by(site, 0))
    assert [line["workspace"] for line in dropped(logged)] == ["all"]
    assert await open_places(site) == 0


def dropped(logged: list[Any]) -> list[Any]:
    return [line for line in logged if line["event"] == "watcher_dropped"]


async def open_places(site: Site) -> int:
    return LARGE_BYTES - site.state.feed.large_events.free_bytes


@BOTH
async def test_a_server_that_stops_ends_it(site: Site, way: str):
    choose(site, heartbeat_seconds=3600)
    async with watch_any(site, way, headers=ADMIN) as watcher:
        site.state.wakeups.stop()

        assert await watcher.end() == (1001 if way == "ws" else None)
    async with watch_any(site, way, headers=ADMIN) as late:
        assert await late.end() == (1001 if way == "ws" else None)
    await nobody_watches(site)


@BOTH
async def test_a_trim_of_rows_that_were_not_sent_yet_ends_it(
    site: Site, connections: Callable[[], Any], way: str
):
    connection = await connections()
    workspace = await registered(site)
    async with watch_any(site, way, headers=ADMIN) as watcher:
        await append(workspace, "seen")
        await watcher.row()
        await connection.execute(
            "update feeds set last_seq = 9, trimmed_seq = 9 where workspace_id = $1",
            id_of(workspace),
        )
        site.state.wakeups.grew(id_of(workspace))

        assert await watcher.end() == (4410 if way == "ws" else None)


@BOTH
async def test_more_active_workspaces_than_positions_end_it(
    site: Site, connections: Callable[[], Any], way: str
):
    """And while they are that active, a new watch is refused."""
    choose(site, max_positions=2, search_seconds=3600)
    connection = await connections()
    workspaces = [await registered(site) for _ in range(3)]
    async with watch_any(site, way, headers=ADMIN) as watcher:
        for workspace in workspaces:
            await append_silently(connection, workspace, "x")
        site.state.wakeups._wake_everyone()

        assert await watcher.end() == (4410 if way == "ws" else None)
    old = await connections()
    async with old.transaction():
        await old.execute("select pg_current_xact_id()")
        for workspace in workspaces:
            await append(workspace, "x")
        assert await refused(site, "", way, headers=ADMIN) == (429, "too_many_at_once")


@BOTH
async def test_more_wake_ups_than_are_kept_lose_nothing(
    site: Site, way: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(wakeups, "_MAX_GROWN", 2)
    choose(site, heartbeat_seconds=3600, search_seconds=3600)
    workspaces = [await registered(site) for _ in range(8)]
    async with watch_any(site, way, headers=ADMIN) as watcher:
        await asyncio.gather(*(append(workspace, "x", count=3) for workspace in workspaces))

        seen = await rows(watcher, 24)
    assert sorted(seen) == sorted((one.id, seq) for one in workspaces for seq in (1, 2, 3))


async def test_what_any_session_may_notify_is_harmless(site: Site, connections: Callable[[], Any]):
    connection = await connections()
    workspace = await registered(site)
    await append(workspace, "from before")
    async with watch_any(site, "ws", headers=ADMIN) as watcher:
        for payload in ("", "x", f"x,{uuid4()},nonsense,{workspace.id}"):
            await connection.execute(f"select pg_notify('{CHANNEL}', $1)", payload)
        await append(workspace, "one")

        assert await watcher.summaries(1) == ["one"]


async def test_a_stream_resumes_without_a_hole(site: Site, connections: Callable[[], Any]):
    """Also before its first event; what was sent in the last minute may come again."""
    workspaces = [await registered(site) for _ in range(3)]
    async with watch_any(site, "events", headers=ADMIN) as watcher:
        watcher._parsed(await watcher._read())
        assert watcher.last_id
    for workspace in workspaces:
        await append(workspace, "in between")

    headers = {**ADMIN, "Last-Event-ID": watcher.last_id}
    async with watch_any(site, "events", headers=headers) as watcher:
        assert sorted(await rows(watcher, 3)) == sorted((one.id, 1) for one in workspaces)
        await append(workspaces[0], "new")
        assert await rows(watcher, 1) == [(workspaces[0].id, 2)]
    await append(workspaces[1], "once more")

    params = {"last_event_id": watcher.last_id}
    async with watch_any(site, "events", headers=ADMIN, params=params) as watcher:
        seen: set[tuple[str, int]] = set()
        while (workspaces[1].id, 2) not in seen:
            seen |= set(await rows(watcher, 1))


async def test_a_quiet_stream_moves_on_without_events(site: Site):
    """So that an id that is sent back is never old."""
    choose(site, heartbeat_seconds=0.01, search_seconds=0)
    workspace = await registered(site)
    async with watch_any(site, "events", headers=ADMIN) as watcher:
        watcher._parsed(await watcher._read())
        first = horizon_of(watcher.last_id)
        await append(workspace, "something")
        await watcher.row()

        async def has_moved() -> bool:
            watcher._parsed(await watcher._read())
            return horizon_of(watcher.last_id).xid > first.xid

        await until(has_moved)


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (str(new_activity_id(datetime.now(UTC))), (400, "bad_request")),
        ("nonsense", (400, "bad_request")),
        ("1-" + "9" * 40, (400, "bad_request")),
        (event_id(Horizon(5, datetime.now(UTC) - timedelta(hours=2))), (410, "cursor_gone")),
        (event_id(Horizon(2**62, datetime.now(UTC))), (410, "cursor_gone")),
        ("99999999999999-5", (410, "cursor_gone")),
    ],
    ids=["a row", "nonsense", "too long", "old", "from another database", "from the future"],
)
@BOTH
async def test_an_id_that_cannot_be_resumed_after_is_refused(
    site: Site, way: str, sent: str, expected: tuple[int, str]
):
    headers = {**ADMIN, "Last-Event-ID": sent}

    assert await refused(site, "", way, headers=headers) == expected
    await nobody_watches(site)


async def test_those_who_watch_all_leave_connections_to_others(run_site: SiteFactory):
    async with run_site(pool_size=3) as site, AsyncExitStack() as stack:
        workspaces = [await registered(site) for _ in range(4)]
        watchers = [
            await stack.enter_async_context(watch_any(site, way, headers=ADMIN)) for way in WAYS * 5
        ]
        await asyncio.gather(*(append(workspace, "x", count=5) for workspace in workspaces))
        assert (await ask(site, "GET", "/ready")).status == 200

        expected = sorted((one.id, seq) for one in workspaces for seq in range(1, 6))
        for watcher in watchers:
            assert sorted(await rows(watcher, 20)) == expected


EVICTED = wire.NodeEvent(
    "OPLOG_PEER_EVICTED",
    "",
    datetime(2026, 1, 31, 12, tzinfo=UTC),
    wire.EvictedPeer(peer="https://b.example", table="pages", cause="cap_bytes", ops=7, bytes=70),
)


@BOTH
async def test_what_happens_to_the_server_is_told_to_the_operator_and_to_nobody_else(
    site: Site, way: str
):
    """It is in no feed: rows before and after it come as ever."""
    workspace = await registered(site)
    async with (
        watch_any(site, way, headers=ADMIN) as operator,
        watch(workspace, way) as owner,
    ):
        await append(workspace, "before")
        first = await operator.row()
        site.state.wakeups.announce(EVICTED)
        told = await operator.event()
        await append(workspace, "after")

        assert (first["summary"], (await operator.row())["summary"]) == ("before", "after")
        assert [(await owner.row())["summary"] for _ in range(2)] == ["before", "after"]

    assert told["event"] == "OPLOG_PEER_EVICTED"
    assert told["workspace_id"] == ""
    assert told["timestamp"] == "2026-01-31T12:00:00Z"
    assert told["payload"]["peer"] == "https://b.example"
    assert (told["payload"]["cause"], told["payload"]["bytes"]) == ("cap_bytes", 70)
