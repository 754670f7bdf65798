"""A watcher sees every committed row once, in order, and resumes where it was."""

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import pytest
from callers import ADMIN, Caller, Part, bearer, registered
from sites import Site, SiteFactory
from waiting import until
from watchers import WAYS, append, choose, id_of, is_watched_by, nobody_watches, refused, watch

from restante.feed.rules import UNLIMITED, Page
from restante.feed.service import Feed, Query
from restante.ids import ActivityId, WorkspaceId, new_activity_id

pytestmark = pytest.mark.anyio


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


async def test_an_event_of_a_stream_has_the_id_of_its_row(workspace: Caller):
    async with watch(workspace, "events") as watcher:
        for _ in range(2):
            await append(workspace, "a message")
            assert (await watcher.row())["id"] == watcher.last_id


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
            new_activity_id(datetime.now(UTC)),
            id_of(workspace),
        )
        site.state.wakeups.grew(id_of(workspace))  # a watcher that looks now must see nothing
        assert (await workspace.feed()) == []
        await transaction.rollback()
        await append(workspace, "committed")

        row = await watcher.row()

    assert (row["summary"], row["seq"]) == ("committed", 1)


async def test_json_with_line_breaks_arrives_whole(workspace: Caller):
    """An event ends at an empty line, and stored JSON may contain empty lines."""
    async with watch(workspace, "events") as watcher:
        await append(workspace, "odd", b'{"a":\r\n\r\n1,\n\n"b":\r"x\\ny"}')

        assert (await watcher.row())["request_body"] == {"a": 1, "b": "x\ny"}


@pytest.mark.parametrize("by", ["header", "query"])
@pytest.mark.parametrize("way", WAYS)
async def test_a_watcher_resumes_where_it_was(workspace: Caller, way: str, by: str):
    """Several pages behind, and with rows arriving meanwhile: none is missed, none is doubled."""
    choose(workspace.site, page_rows=3, heartbeat_seconds=3600)
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
async def test_the_header_wins_over_the_query_parameter(workspace: Caller, way: str):
    """A browser that reconnects sends the URL of its first attempt with a newer header."""
    for number in range(3):
        await append(workspace, str(number))
    _newest, middle, oldest = [row["id"] for row in await workspace.feed()]

    async with watch(
        workspace, way, params={"last_event_id": oldest}, headers={"Last-Event-ID": middle}
    ) as watcher:
        assert await watcher.summaries(1) == ["2"]


async def test_a_stream_that_breaks_before_its_first_event_has_missed_nothing(workspace: Caller):
    """The watcher is sent the id of the row before its first one, and reconnects with it."""
    await append(workspace, "before")
    async with watch(workspace, "events") as watcher:
        first = await asyncio.wait_for(watcher._read(), 30)
    watcher._parsed(first)
    assert watcher.last_id == (await workspace.feed())[0]["id"]
    await append(workspace, "in between")

    async with watch(workspace, "events", headers={"Last-Event-ID": watcher.last_id}) as watcher:
        assert await watcher.summaries(1) == ["in between"]


class GrowingFeed(Feed):
    """A feed that gets a row right after it was looked at, once."""

    def __init__(self, workspace: Caller) -> None:
        state = workspace.site.state
        super().__init__(state.db, state.wakeups, UNLIMITED, state.disk)
        self._workspace = workspace
        self._has_grown = False

    async def read(self, workspace_id: WorkspaceId, query: Query) -> Page:
        page = await super().read(workspace_id, query)
        await self._grow()
        return page

    async def newest(self, workspace_id: WorkspaceId) -> tuple[int, ActivityId | None]:
        newest = await super().newest(workspace_id)
        await self._grow()
        return newest

    async def _grow(self) -> None:
        if not self._has_grown:
            self._has_grown = True
            await append(self._workspace, "right after")


@pytest.mark.parametrize("resumes", [True, False])
@pytest.mark.parametrize("way", WAYS)
async def test_a_row_right_after_the_first_look_is_sent_at_once(
    workspace: Caller, way: str, *, resumes: bool
):
    """The waiter is registered before the look, so it is woken for what the look did not see."""
    choose(workspace.site, heartbeat_seconds=3600)
    await append(workspace, "before")
    last = (await workspace.feed())[0]["id"]
    workspace.site.state.feed = GrowingFeed(workspace)

    async with watch(workspace, way, headers={"Last-Event-ID": last} if resumes else {}) as watcher:
        assert await watcher.summaries(1) == ["right after"]


@pytest.mark.parametrize("way", WAYS)
async def test_watchers_that_connect_while_rows_arrive_see_every_row_from_their_first_one(
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
async def test_an_id_that_is_not_a_row_of_the_feed_is_refused_whatever_the_reason(
    site: Site, workspace: Caller, way: str, connections: Callable[[], Any]
):
    connection = await connections()
    other = await registered(site)
    await append(other, "theirs")
    await append(workspace, "trimmed", count=2)
    theirs = (await other.feed())[0]["id"]
    _second, first = [row["id"] for row in await workspace.feed()]
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
async def test_a_trim_of_rows_that_were_not_sent_yet_ends_the_watch(
    site: Site, workspace: Caller, way: str, connections: Callable[[], Any]
):
    """The watcher reconnects and is refused, so it knows that rows are missing."""
    connection = await connections()
    async with watch(workspace, way) as watcher:
        await append(workspace, "seen")
        await watcher.row()
        await connection.execute(
            "update feeds set last_seq = 9, trimmed_seq = 9 where workspace_id = $1",
            id_of(workspace),
        )
        site.state.wakeups.grew(id_of(workspace))

        assert await watcher.end() == (4410 if way == "ws" else None)
    await nobody_watches(site)


@pytest.mark.parametrize("way", WAYS)
async def test_rows_reach_readers_that_wait_at_another_server(run_site: SiteFactory, way: str):
    """Two servers share a database; an upload to one wakes watchers and polls at the other."""
    async with run_site() as here, run_site() as there:
        sender = await registered(here)
        waiting = Caller(there, sender.id, sender.token)
        choose(there, heartbeat_seconds=3600)
        await until_notified(here, there)
        async with watch(waiting, way) as watcher:
            polling = asyncio.create_task(waiting.feed(wait=60))
            await until(lambda: is_watched_by(there, 2))
            await sender.staged(Part(name="a.txt"))

            assert await watcher.summaries(1) == ["chat_upload_receive: a.txt"]
            assert [row["seq"] for row in await polling] == [1]


async def until_notified(here: Site, there: Site) -> None:
    """Wait until a notification of one server arrives at the other."""
    nobody = WorkspaceId(uuid4())

    async def arrives() -> bool:
        here.state.wakeups.grew(nobody)
        return await waiter.wait(0.1)

    async with there.state.wakeups.waiting(nobody) as waiter:
        await until(arrives)
