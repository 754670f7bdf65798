"""Those who wait for a feed are woken: here at once, elsewhere by few notices."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any
from uuid import uuid4

import pytest
import structlog
from waiting import until

from restante.database.pool import Database, Listener, Tx
from restante.errors import DatabaseUnavailable, TooManyAtOnce
from restante.feed import store
from restante.feed import wakeups as module
from restante.feed.rules import NewActivity
from restante.feed.service import Feed, Query
from restante.feed.wakeups import Waiter, Wakeups
from restante.ids import WorkspaceId
from restante.server.wiring import _awake

pytestmark = pytest.mark.anyio

KILL_LISTENERS = """
    select pg_terminate_backend(pid) from pg_stat_activity
     where datname = current_database() and query ilike 'listen %'
"""


def some_workspace() -> WorkspaceId:
    return WorkspaceId(uuid4())


@pytest.fixture
def alone(db: Database, dsn: str) -> Wakeups:
    """The wake-ups of a process that neither tells nor hears."""
    return Wakeups(db, Listener(dsn))


@asynccontextmanager
async def process(db: Database, dsn: str) -> AsyncIterator[Wakeups]:
    """The wake-ups of a process that tells and hears, once it does: then everyone looks."""
    wakeups = Wakeups(db, Listener(dsn))
    async with wakeups.waiting(some_workspace()) as waiter, _awake(wakeups):
        assert await woken(waiter)
        yield wakeups


@asynccontextmanager
async def overheard(connection: Any) -> AsyncIterator[list[str]]:
    """Every notice that is given meanwhile; all given before the end are in it."""
    notices: list[str] = []
    last = asyncio.Event()

    def hear(_connection: object, _pid: int, _channel: str, payload: object) -> None:
        if payload == "the last one":
            last.set()
        else:
            notices.append(str(payload))

    await connection.add_listener(store.CHANNEL, hear)
    yield notices
    await connection.execute(f"notify {store.CHANNEL}, 'the last one'")
    await last.wait()
    await connection.remove_listener(store.CHANNEL, hear)


async def woken(waiter: Waiter, seconds: float = 10) -> bool:
    return await waiter.wait(seconds)


async def test_growth_wakes_everyone_who_waits_for_this_feed_and_nobody_else(alone: Wakeups):
    one, other = some_workspace(), some_workspace()
    async with alone.waiting(one) as a, alone.waiting(one) as b, alone.waiting(other) as c:
        alone.grew(one)

        assert await woken(a)
        assert await woken(b)
        assert not await woken(c, 0)


async def test_growth_during_a_look_is_not_lost(alone: Wakeups):
    """The waiter was woken, looks, and a row arrives that its look did not see."""
    workspace = some_workspace()
    async with alone.waiting(workspace) as waiter:
        alone.grew(workspace)
        assert await woken(waiter)
        alone.grew(workspace)

        assert await woken(waiter)
        assert not await woken(waiter, 0)


async def test_nothing_is_kept_for_those_who_have_left(
    alone: Wakeups, monkeypatch: pytest.MonkeyPatch
):
    """Not after a refusal, an error or a cancellation either: workspaces come and go for years."""
    monkeypatch.setattr(module, "_MAX_WAITERS", 1)
    workspace = some_workspace()

    async def wait_for_ever() -> None:
        async with alone.waiting(workspace) as waiter:
            await waiter.wait(None)

    async with alone.waiting(workspace):
        with pytest.raises(TooManyAtOnce, match="1 requests wait"):
            async with alone.waiting(workspace):
                pass
    with pytest.raises(ZeroDivisionError):
        async with alone.waiting(workspace):
            raise ZeroDivisionError
    waiting = asyncio.create_task(wait_for_ever())
    await asyncio.sleep(0)
    assert alone._waiters
    waiting.cancel()
    await asyncio.wait({waiting})
    alone.grew(some_workspace())

    assert alone._waiters == {}


async def test_the_stop_wakes_everyone_and_nobody_waits_any_more(alone: Wakeups, db: Database):
    one, other = some_workspace(), some_workspace()
    async with alone.waiting(one) as a, alone.waiting(other) as b:
        alone.stop()

        assert await woken(a)
        assert await woken(b)
    async with asyncio.timeout(5):
        page = await Feed(db, alone).read(one, Query(wait_seconds=60))
    assert not page.rows


async def test_fast_commits_share_a_notice(db: Database, dsn: str, connections: Callable[[], Any]):
    """One notice per commit would cost most of the throughput."""
    connection = await connections()
    workspace = await feed_of_a_workspace(connection)
    async with overheard(connection) as notices, process(db, dsn) as wakeups:
        feed = Feed(db, wakeups)
        for number in range(200):
            await feed.append(workspace, NewActivity("m", str(number), b"{}"))

    assert 1 <= len(notices) <= 100
    assert all(str(workspace) in notice for notice in notices)


async def feed_of_a_workspace(connection: Any) -> WorkspaceId:
    workspace = some_workspace()
    await connection.execute("insert into feeds (workspace_id) values ($1)", workspace)
    await connection.execute(
        "create table feed_all partition of feed for values from (minvalue) to (maxvalue)"
    )
    return workspace


async def test_many_workspaces_are_told_in_notices_that_fit(
    db: Database, dsn: str, connections: Callable[[], Any]
):
    connection = await connections()
    workspaces = [some_workspace() for _ in range(501)]
    async with AsyncExitStack() as stack:
        notices = await stack.enter_async_context(overheard(connection))
        here = await stack.enter_async_context(process(db, dsn))
        there = await stack.enter_async_context(process(db, dsn))
        waiters = [await stack.enter_async_context(there.waiting(each)) for each in workspaces]
        for workspace in workspaces:
            here.grew(workspace)

        assert all([await woken(waiter) for waiter in waiters])
        await until(lambda: asyncio.sleep(0, not here._something_to_tell.is_set()))

    assert len(notices) == 3


async def test_a_process_does_not_hear_its_own_notices(db: Database, dsn: str):
    """It has woken its own at the commit; they would look twice for every row."""
    workspace, later = some_workspace(), some_workspace()
    async with (
        process(db, dsn) as here,
        process(db, dsn) as there,
        here.waiting(workspace) as waiter,
        here.waiting(later) as second,
    ):
        here.grew(workspace)
        assert await woken(waiter)
        await here.tell_now()
        there.grew(later)  # comes after it on the same connection
        assert await woken(second)

        assert not await woken(waiter, 0)


async def test_after_a_gap_in_hearing_everyone_looks_again(
    alone: Wakeups,
    db: Database,
    dsn: str,
    connections: Callable[[], Any],
    monkeypatch: pytest.MonkeyPatch,
):
    """What was told while nobody listened is lost; and then news are heard again."""
    monkeypatch.setattr(module, "_LISTEN_AGAIN_SECONDS", 0)
    connection = await connections()
    workspace = some_workspace()
    async with process(db, dsn) as there, there.waiting(workspace) as waiter:
        assert len(await connection.fetch(KILL_LISTENERS)) == 1

        assert await woken(waiter)
        alone.grew(workspace)
        await alone.tell_now()
        assert await woken(waiter)


@pytest.mark.parametrize("failure", [DatabaseUnavailable("away"), ZeroDivisionError()])
async def test_a_notice_that_failed_is_given_again(
    db: Database, dsn: str, monkeypatch: pytest.MonkeyPatch, failure: Exception
):
    """Whatever the reason: a notifier that dies silently leaves other processes in the dark."""
    monkeypatch.setattr(module, "_TELL_AGAIN_SECONDS", 0)
    notify = store.notify
    failures = [failure]

    async def fail_once(connection: Tx, payload: str) -> None:
        if failures:
            raise failures.pop()
        await notify(connection, payload)

    monkeypatch.setattr(store, "notify", fail_once)
    workspace = some_workspace()
    with structlog.testing.capture_logs() as logged:
        async with (
            process(db, dsn) as here,
            process(db, dsn) as there,
            there.waiting(workspace) as waiter,
        ):
            here.grew(workspace)

            assert await woken(waiter)

    assert [line["event"] for line in logged] == ["notice_failed"]


async def test_nonsense_on_the_channel_harms_nobody(
    db: Database, dsn: str, connections: Callable[[], Any]
):
    connection = await connections()
    workspace = some_workspace()
    async with process(db, dsn) as there, there.waiting(workspace) as waiter:
        for payload in ("", "x", ",,", f"somebody,nonsense,{workspace}"):
            await connection.execute("select pg_notify($1, $2)", store.CHANNEL, payload)

        assert await woken(waiter)


async def test_what_was_committed_last_is_told_before_the_end(
    db: Database, dsn: str, connections: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
):
    """A server that is replaced has told the others of all that it took in."""
    monkeypatch.setattr(module, "_GATHER_SECONDS", 3600)
    connection = await connections()
    workspace = some_workspace()
    async with overheard(connection) as notices, process(db, dsn) as wakeups:
        wakeups.grew(workspace)

    assert [notice.split(",")[1:] for notice in notices] == [[str(workspace)]]
