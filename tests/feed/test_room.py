"""A feed that keeps as much as it may trims its oldest acknowledged rows before it refuses any."""

import asyncio
import random
from datetime import timedelta
from itertools import count
from typing import Any
from uuid import UUID, uuid4

import pytest
from factories import HOUR, NOW, make_feed, make_message, make_parts, make_workspace, until_blocked
from sweeps import make_old_feed, utc_now

from restante.database.pool import Database
from restante.errors import CursorGone, FeedFull, TableBusy
from restante.feed import store
from restante.feed.rules import NewActivity, WriteLimits
from restante.feed.service import Feed, Query
from restante.ids import WorkspaceId

pytestmark = pytest.mark.anyio

MIB = 1024**2
LIMITS = WriteLimits(max_written_bytes=100 * MIB, max_feed_bytes=40_000)
KEPT_FOR_OTHERS = 4 * LIMITS.max_feed_bytes // 2


@pytest.fixture
def db(db_with_partitions: Database) -> Database:
    return db_with_partitions


@pytest.fixture
async def connection(db: Database, connections: Any) -> Any:
    return await connections()


@pytest.fixture
async def workspace_id(connection: Any) -> WorkspaceId:
    return await make_workspace(connection)


def message(sender: UUID | None, size: int = 1000) -> NewActivity:
    return NewActivity("message/send", "x" * size, b"{}", source_id=sender)


async def send(feed: Feed, workspace_id: WorkspaceId, sender: UUID | None, times: int = 1) -> None:
    """Messages that the workspace acknowledges at once."""
    for _ in range(times):
        appended = await feed.append(workspace_id, message(sender), now=utc_now())
        await feed.acknowledge(workspace_id, appended.seq or 0)


async def fill(feed: Feed, workspace_id: WorkspaceId) -> int:
    """Many senders fill what others may keep, and all of it is acknowledged; how many rows."""
    for sent in count():
        try:
            await send(feed, workspace_id, uuid4())
        except FeedFull:
            return sent
    raise AssertionError


async def age(connection: Any, by: timedelta = 2 * HOUR, *, up_to: int = 10**9) -> None:
    await connection.execute(
        "update feed set created_at = created_at - $1::interval where seq <= $2", by, up_to
    )


async def are_counters_exact(connection: Any) -> bool:
    return await connection.fetchval(
        "select bool_and(feed_bytes = kept and unacked_bytes = unacked) from feeds, lateral ("
        "    select coalesce(sum(bytes), 0) as kept,"
        "           coalesce(sum(bytes) filter (where seq > settled_seq), 0) as unacked"
        "      from feed where feed.workspace_id = feeds.workspace_id and seq > trimmed_seq"
        ") as found"
    )


async def seqs(connection: Any) -> list[int]:
    return [row["seq"] for row in await connection.fetch("select seq from feed order by seq")]


async def test_old_acknowledged_rows_make_room_for_messages(
    db: Database, connection: Any, workspace_id: WorkspaceId
):
    """Senders cannot keep others out of a feed whose workspace handles everything."""
    feed = make_feed(db, limits=LIMITS)
    sent = await fill(feed, workspace_id)
    await age(connection)

    appended = await feed.append(workspace_id, message(uuid4()), now=NOW)

    left, seq = await seqs(connection), sent + 1
    assert appended.seq == seq
    assert left == list(range(left[0], seq + 1))
    assert 1 < left[0] < seq / 4  # the oldest go, and not many more than necessary
    assert await are_counters_exact(connection)


async def test_old_acknowledged_rows_make_room_for_files(
    db: Database, connection: Any, workspace_id: WorkspaceId
):
    feed, parts = make_feed(db, limits=LIMITS), make_parts(db, limits=LIMITS)
    with pytest.raises(FeedFull):
        await send(feed, workspace_id, None, times=10**6)
    await age(connection)

    with pytest.raises(TableBusy):  # there is room now
        await parts.stage(workspace_id, *[b"x"] * 3)
    await parts.stage(workspace_id, *[b"x"] * 3)

    assert await are_counters_exact(connection)


async def test_young_and_unacknowledged_rows_are_never_trimmed(
    db: Database, connection: Any, workspace_id: WorkspaceId
):
    feed = make_feed(db, limits=LIMITS)
    sent = await fill(feed, workspace_id)
    await connection.execute("update feeds set acked_seq = 10")
    await age(connection, up_to=5)
    await connection.execute("update feeds set feed_bytes = feed_bytes + 1000000")

    with pytest.raises(FeedFull):
        await feed.append(workspace_id, message(uuid4()), now=NOW)
    await age(connection)
    with pytest.raises(FeedFull):
        await feed.append(workspace_id, message(uuid4()), now=NOW)

    assert await seqs(connection) == list(range(11, sent + 1))


async def test_a_refusal_says_what_makes_room_and_when(
    db: Database, connection: Any, workspace_id: WorkspaceId
):
    """All is acknowledged, so it must not ask for acknowledgements."""
    feed = make_feed(db, limits=LIMITS)
    await fill(feed, workspace_id)

    with pytest.raises(FeedFull) as for_sender:
        await feed.append(workspace_id, message(uuid4()), now=NOW)
    with pytest.raises(FeedFull) as for_operator:
        await send(feed, workspace_id, None, times=10**6)

    assert str(for_sender.value) == (
        "The feed of this workspace keeps as much as it may. Rows that it has acknowledged make "
        "room an hour after they were stored."
    )
    assert for_sender.value.facts == {}
    oldest = await connection.fetchval("select min(created_at) from feed")
    assert for_operator.value.facts["frees_at"] == (oldest + HOUR).isoformat()


async def test_one_sender_has_a_quarter_of_what_others_may_keep(
    db: Database, connection: Any, workspace_id: WorkspaceId
):
    feed, eager = make_feed(db, limits=LIMITS), uuid4()

    with pytest.raises(FeedFull, match="keeps of one sender"):
        await send(feed, workspace_id, eager, times=10**6)
    taken = await connection.fetchval("select feed_bytes from feeds")
    await send(feed, workspace_id, uuid4(), times=10)

    assert KEPT_FOR_OTHERS // 4 - 2000 < taken <= KEPT_FOR_OTHERS // 4


async def test_the_part_of_one_sender_is_free_again_after_an_hour(
    db: Database, connection: Any, workspace_id: WorkspaceId
):
    """Or the only sender of a workspace that handles everything would be refused for ever."""
    sender = uuid4()
    with pytest.raises(FeedFull, match="keeps of one sender"):
        await send(make_feed(db, limits=LIMITS), workspace_id, sender, times=10**6)

    await make_old_feed(connection, workspace_id, days=5, up_to=10**6)

    await send(make_feed(db, limits=LIMITS), workspace_id, sender, times=10)


# At once -----------------------------------------------------------------------------------------


async def test_the_counters_stay_exact_whoever_trims_appends_and_acknowledges_at_once(
    db: Database, connection: Any, workspace_id: WorkspaceId, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(store, "_ROWS_PER_DELETION", 3)
    monkeypatch.setattr(store, "_ROWS_PER_ACK", 2)
    limits = WriteLimits(max_written_bytes=100 * MIB, max_feed_bytes=4000)
    feeds = [make_feed(db, limits=limits) for _ in range(2)]
    chance = random.Random(1)

    async def append(feed: Feed) -> None:
        for _ in range(40):
            row = message(None, chance.randrange(500))
            try:
                await feed.append(workspace_id, row, now=NOW)
            except (FeedFull, TableBusy):
                async with db.connection() as other:
                    await age(other)

    async def acknowledge(feed: Feed) -> None:
        for _ in range(60):
            await feed.acknowledge(workspace_id, 10**9)

    await asyncio.gather(*(act(feed) for feed in feeds for act in (append, acknowledge)))

    trimmed, last = await connection.fetchrow("select trimmed_seq, last_seq from feeds")
    assert trimmed > 0
    assert await seqs(connection) == list(range(trimmed + 1, last + 1))
    assert await are_counters_exact(connection)


async def test_a_second_trim_waits_for_the_first_and_goes_on_after_it(
    db: Database, connection: Any, workspace_id: WorkspaceId, connections: Any
):
    """Both begin when the same rows are the oldest; none is subtracted twice."""
    for number in range(6):
        await store.append(connection, workspace_id, make_message(str(number)), now=NOW)
    await store.acknowledge(connection, workspace_id, 6)
    other, watcher = await connections(), await connections()
    trimming = connection.transaction()
    await trimming.start()
    await store.lock(connection, workspace_id)
    second = asyncio.create_task(trim(other, workspace_id))
    await until_blocked(watcher, other)
    rows = await store.trim_oldest(connection, workspace_id, stored_before=NOW + HOUR)
    await trimming.commit()

    assert (rows, await second) == (6, 0)
    assert await are_counters_exact(connection)


async def trim(connection: Any, workspace_id: WorkspaceId) -> int:
    async with connection.transaction():
        await store.lock(connection, workspace_id)
        return await store.trim_oldest(connection, workspace_id, stored_before=NOW + HOUR)


async def test_a_reader_that_pages_meanwhile_gets_every_row_or_an_error(
    db: Database, connection: Any, workspace_id: WorkspaceId, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(store, "_ROWS_PER_DELETION", 2)
    feed = make_feed(db)
    for number in range(60):
        await store.append(connection, workspace_id, make_message(str(number)), now=NOW)
    await store.acknowledge(connection, workspace_id, 50)

    async def trim_all() -> None:
        async with db.connection() as other:
            while await trim(other, workspace_id):
                pass

    async def read_all() -> None:
        """Read on after each page; start over where the reader is told to."""
        seq = 0
        while seq < 60:
            try:
                page = await feed.read(workspace_id, Query(since_seq=seq, limit=3))
            except CursorGone as gone:
                seq = int(gone.facts["lowest_seq"] or 0) - 1
                continue
            assert [row.seq for row in page.rows] == list(range(seq + 1, seq + 1 + len(page.rows)))
            seq = page.rows[-1].seq

    await asyncio.gather(read_all(), read_all(), trim_all())

    assert await seqs(connection) == list(range(51, 61))
