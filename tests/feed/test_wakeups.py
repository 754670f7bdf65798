"""Waiting readers are woken: in this process at once, in others by few notifications."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import pytest
import structlog
from factories import make_feed
from links import Link
from waiting import until

from restante.database.listener import Listener
from restante.database.pool import Database
from restante.errors import DatabaseUnavailable, TooManyAtOnce
from restante.feed.rules import NewActivity
from restante.feed.service import Feed, Query
from restante.feed.wakeups import CHANNEL, Waiter, Wakeups
from restante.ids import WorkspaceId
from restante.server.parts import notifying

pytestmark = pytest.mark.anyio

KILL_LISTENERS = """
    select pg_terminate_backend(pid) from pg_stat_activity
     where datname = current_database() and query ilike 'listen %'
"""


def some_workspace() -> WorkspaceId:
    return WorkspaceId(uuid4())


@pytest.fixture
def alone(db: Database, dsn: str) -> Wakeups:
    """The wake-ups of a process that exchanges no notifications by itself."""
    return Wakeups(db, Listener(dsn))


@asynccontextmanager
async def process(db: Database, dsn: str) -> AsyncIterator[Wakeups]:
    """The wake-ups of a process that exchanges notifications; yields once it listens."""
    wakeups = Wakeups(db, Listener(dsn))
    async with wakeups.waiting(some_workspace()) as waiter, notifying(wakeups):
        assert await is_woken(waiter)  # everyone looks when listening begins
        yield wakeups


@asynccontextmanager
async def recorded(connection: Any) -> AsyncIterator[list[str]]:
    """Every notification that is sent while inside; complete at the end."""
    notifications: list[str] = []
    last = asyncio.Event()

    def record(_connection: object, _pid: int, _channel: str, payload: object) -> None:
        if payload == "the last one":
            last.set()
        else:
            notifications.append(str(payload))

    await connection.add_listener(CHANNEL, record)
    yield notifications
    await connection.execute(f"notify {CHANNEL}, 'the last one'")
    await last.wait()
    await connection.remove_listener(CHANNEL, record)


async def is_woken(waiter: Waiter, seconds: float = 30) -> bool:
    return await waiter.wait(seconds)


async def test_growth_wakes_every_waiter_of_this_feed_and_of_no_other(alone: Wakeups):
    one, other = some_workspace(), some_workspace()
    async with alone.waiting(one) as a, alone.waiting(one) as b, alone.waiting(other) as c:
        alone.grew(one)

        assert await is_woken(a)
        assert await is_woken(b)
        assert not await is_woken(c, 0)


async def test_growth_during_a_look_is_not_lost(alone: Wakeups):
    """The waiter was woken, looks, and a row arrives that its look did not see."""
    workspace = some_workspace()
    async with alone.waiting(workspace) as waiter:
        alone.grew(workspace)
        assert await is_woken(waiter)
        alone.grew(workspace)

        assert await is_woken(waiter)
        assert not await is_woken(waiter, 0)


async def fill(stack: AsyncExitStack, wakeups: Wakeups, workspace: WorkspaceId) -> None:
    """Register waiters until one is refused."""
    with suppress(TooManyAtOnce):
        while True:
            await stack.enter_async_context(wakeups.waiting(workspace))


async def test_nothing_is_kept_for_waiters_that_have_left(alone: Wakeups):
    """Not after a refusal, an error or a cancellation either: workspaces come and go for years."""
    workspace = some_workspace()

    async def wait_for_ever() -> None:
        async with alone.waiting(workspace) as waiter:
            await waiter.wait(None)

    async with AsyncExitStack() as stack:
        await fill(stack, alone, workspace)
        with pytest.raises(TooManyAtOnce, match="requests wait for this feed already"):
            await stack.enter_async_context(alone.waiting(workspace))
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


async def test_watchers_do_not_take_the_places_of_polls(alone: Wakeups):
    """A canvas with too many windows must not keep the workspace from polling."""
    workspace = some_workspace()
    async with AsyncExitStack() as stack:
        await fill(stack, alone, workspace)

        async with alone.waiting(workspace, is_watcher=True), alone.waiting(some_workspace()):
            pass


async def test_the_stop_wakes_everyone_and_ends_all_waiting(alone: Wakeups, db: Database):
    one, other = some_workspace(), some_workspace()
    async with alone.waiting(one) as a, alone.waiting(other) as b:
        alone.stop()

        assert await is_woken(a)
        assert await is_woken(b)
    async with asyncio.timeout(30):
        page = await make_feed(db, alone).read(one, Query(wait_seconds=60))
    assert not page.rows


async def test_commits_share_a_notification(
    alone: Wakeups, db: Database, connections: Callable[[], Any]
):
    """One notification per commit would cost most of the throughput."""
    connection = await connections()
    workspace = await feed_of_a_workspace(connection)
    async with recorded(connection) as notifications:
        await append(make_feed(db, alone), workspace, count=20)

        await alone.notify_others()
        await alone.notify_others()

    (notification,) = notifications
    assert notification.endswith(f",{workspace}")


async def test_commits_that_are_faster_than_the_notifier_share_its_notifications(
    db: Database, dsn: str, connections: Callable[[], Any]
):
    connection = await connections()
    workspace = await feed_of_a_workspace(connection)
    async with recorded(connection) as notifications, process(db, dsn) as wakeups:
        await append(make_feed(db, wakeups), workspace, count=200)

    assert 1 <= len(notifications) < 200


async def append(feed: Feed, workspace: WorkspaceId, *, count: int) -> None:
    """Append rows from as many writers at once as there are connections."""
    rows = [NewActivity("m", str(number), b"{}") for number in range(count)]
    await asyncio.gather(*(feed.append(workspace, row, now=datetime.now(UTC)) for row in rows))


async def feed_of_a_workspace(connection: Any) -> WorkspaceId:
    workspace = some_workspace()
    await connection.execute("insert into feeds (workspace_id) values ($1)", workspace)
    await connection.execute(
        "create table feed_all partition of feed for values from (minvalue) to (maxvalue)"
    )
    return workspace


async def test_many_workspaces_are_sent_in_notifications_that_fit(
    alone: Wakeups, db: Database, dsn: str, connections: Callable[[], Any]
):
    connection = await connections()
    workspaces = [some_workspace() for _ in range(501)]
    async with AsyncExitStack() as stack:
        notifications = await stack.enter_async_context(recorded(connection))
        there = await stack.enter_async_context(process(db, dsn))
        waiters = [await stack.enter_async_context(there.waiting(each)) for each in workspaces]
        for workspace in workspaces:
            alone.grew(workspace)

        await alone.notify_others()

        assert all([await is_woken(waiter) for waiter in waiters])

    assert len(notifications) == 3


async def test_a_process_ignores_its_own_notifications(db: Database, dsn: str):
    """It has woken its own waiters at the commit; they would look twice for every row."""
    workspace, later = some_workspace(), some_workspace()
    async with (
        process(db, dsn) as here,
        process(db, dsn) as there,
        here.waiting(workspace) as waiter,
        here.waiting(later) as second,
    ):
        here.grew(workspace)
        assert await is_woken(waiter)
        await here.notify_others()
        there.grew(later)  # arrives after it on the same connection
        assert await is_woken(second)

        assert not await is_woken(waiter, 0)


async def test_after_a_lost_connection_everyone_looks_again_and_notifications_arrive_again(
    alone: Wakeups, db: Database, dsn: str, connections: Callable[[], Any]
):
    """Notifications that were sent while nobody listened are lost."""
    connection = await connections()
    workspace = some_workspace()
    async with process(db, dsn) as there, there.waiting(workspace) as waiter:
        assert len(await connection.fetch(KILL_LISTENERS)) == 1

        assert await is_woken(waiter)
        alone.grew(workspace)
        await alone.notify_others()
        assert await is_woken(waiter)


class FailingOnce(Database):
    """A database on which the first notification fails."""

    def __init__(self, db: Database, failure: Exception) -> None:
        super().__init__(db._pool, acquire_timeout_seconds=5)
        self._failures = [failure]

    async def notify(self, channel: str, payload: str) -> None:
        if self._failures:
            raise self._failures.pop()
        await super().notify(channel, payload)


@pytest.mark.parametrize("failure", [DatabaseUnavailable("unavailable"), ZeroDivisionError()])
async def test_a_notification_that_failed_is_sent_again(db: Database, dsn: str, failure: Exception):
    """Whatever the reason: without a notifier, readers at other processes would wait in vain."""
    workspace = some_workspace()
    with structlog.testing.capture_logs() as logged:
        async with (
            process(FailingOnce(db, failure), dsn) as here,
            process(db, dsn) as there,
            there.waiting(workspace) as waiter,
        ):
            here.grew(workspace)

            assert await is_woken(waiter)

    assert [line["event"] for line in logged] == ["notice_failed"]


async def test_malformed_notifications_are_ignored(
    db: Database, dsn: str, connections: Callable[[], Any]
):
    connection = await connections()
    workspace = some_workspace()
    async with process(db, dsn) as there, there.waiting(workspace) as waiter:
        for payload in ("", "x", ",,", f"somebody,nonsense,{workspace}"):
            await connection.execute("select pg_notify($1, $2)", CHANNEL, payload)

        assert await is_woken(waiter)


async def test_the_last_commit_is_notified_before_the_process_ends(
    db: Database, dsn: str, connections: Callable[[], Any]
):
    """A server that is replaced has notified the others of everything that it received."""
    connection = await connections()
    workspace = some_workspace()
    async with recorded(connection) as notifications, process(db, dsn) as wakeups:
        wakeups.grew(workspace)  # the end comes before the notifier can run

    assert [payload.split(",")[1:] for payload in notifications] == [[str(workspace)]]


async def test_a_silent_connection_is_replaced_and_everyone_looks_again(
    alone: Wakeups, db: Database, dsn: str
):
    """It is open, and nothing comes: a NAT has dropped it, or a proxy holds it."""
    workspace = some_workspace()
    async with Link(dsn).listening() as link:
        there = Wakeups(db, Listener(link.dsn, check_seconds=0.2))
        async with there.waiting(workspace) as waiter, notifying(there):
            assert await is_woken(waiter)
            link.silence()

            assert await is_woken(waiter)
            alone.grew(workspace)
            await alone.notify_others()
            assert await is_woken(waiter)


async def test_the_age_of_a_connection_that_works_stays_low(db: Database, dsn: str):
    """A check that was never answered would leave it at the time of the start."""
    listener = Listener(dsn, check_seconds=0.05)
    async with listener.listening(CHANNEL, lambda _payload: None) as lost:
        first = listener.silent_seconds()
        started = time.monotonic()

        await until(lambda: listener.silent_seconds() < time.monotonic() - started)

        assert first >= 0
        assert not lost.is_set()
