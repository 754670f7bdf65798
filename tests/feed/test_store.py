"""The feed on several connections: seqs are dense and in commit order; pages, cursors, filters."""

import asyncio
import json
from dataclasses import replace
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
from factories import (
    NOW,
    Content,
    counters,
    make_batch,
    make_message,
    make_workspace,
    rows_after,
    until_blocked,
)

from restante.database.pool import Connection, Database
from restante.delivery import store as uploads
from restante.feed import store as feed
from restante.feed.rules import EVERYTHING, Filter, Marks
from restante.ids import ActivityId, WorkspaceId

pytestmark = pytest.mark.anyio


@pytest.fixture
async def workspace_id(db_with_partitions: Database) -> WorkspaceId:
    async with db_with_partitions.connection() as connection:
        return await make_workspace(connection)


@pytest.fixture
async def three(workspace_id: WorkspaceId, connections: Any) -> list[Any]:
    """Two writers and one reader."""
    return [await connections() for _ in range(3)]


async def seqs(reader: Connection, workspace_id: WorkspaceId) -> list[int]:
    rows = (await feed.rows_after(reader, workspace_id, EVERYTHING, rows_after(0))).rows
    return [row.seq for row in rows]


async def append(
    connection: Connection, workspace_id: WorkspaceId, text: str = "hello"
) -> int | None:
    appended = await feed.append(connection, workspace_id, make_message(text), now=NOW)
    return appended.seq if appended else None


async def test_the_second_writer_waits_for_the_commit_of_the_first(
    three: list[Any], workspace_id: WorkspaceId
):
    """Promise 3: a row is never visible before one with a lower seq."""
    first, second, reader = three
    transaction = first.transaction()
    await transaction.start()
    assert await append(first, workspace_id) == 1
    later = second.transaction()
    await later.start()
    waiting = asyncio.create_task(append(second, workspace_id))
    await until_blocked(reader, second)

    before = await seqs(reader, workspace_id)
    await transaction.commit()
    seq = await waiting
    between = await seqs(reader, workspace_id)
    await later.commit()

    assert (before, seq, between) == ([], 2, [1])
    assert await seqs(reader, workspace_id) == [1, 2]


async def test_a_rolled_back_row_leaves_no_gap_in_the_seqs(
    three: list[Any], workspace_id: WorkspaceId
):
    first, second, reader = three
    transaction = first.transaction()
    await transaction.start()
    await append(first, workspace_id)
    waiting = asyncio.create_task(append(second, workspace_id))
    await until_blocked(reader, second)

    await transaction.rollback()

    assert await waiting == 1
    assert await seqs(reader, workspace_id) == [1]


async def test_files_and_messages_share_one_order(three: list[Any], workspace_id: WorkspaceId):
    """A message waits for the commit of the three files that were published before it."""
    first, second, reader = three
    transaction = first.transaction()
    await transaction.start()
    files = make_batch(workspace_id, Content(), Content(), Content())
    assert await uploads.publish(first, files) == 3
    waiting = asyncio.create_task(append(second, workspace_id))
    await until_blocked(reader, second)

    assert await seqs(reader, workspace_id) == []
    await transaction.commit()

    assert await waiting == 4
    assert await seqs(reader, workspace_id) == [1, 2, 3, 4]


async def test_a_publication_that_waited_takes_the_seqs_after_the_row_it_waited_for(
    three: list[Any], workspace_id: WorkspaceId
):
    first, second, reader = three
    transaction = first.transaction()
    await transaction.start()
    await append(first, workspace_id)
    files = make_batch(workspace_id, Content(name="a"), Content(name="b"))
    waiting = asyncio.create_task(uploads.publish(second, files))
    await until_blocked(reader, second)

    await transaction.commit()

    assert await waiting == 3
    rows = (await feed.rows_after(reader, workspace_id, EVERYTHING, rows_after(1))).rows
    assert [(row.seq, row.summary) for row in rows] == [
        (2, "chat_upload_receive: a"),
        (3, "chat_upload_receive: b"),
    ]


async def test_the_row_of_a_file_has_all_that_is_needed_to_fetch_it(
    three: list[Any], workspace_id: WorkspaceId
):
    content = Content(b"12345", name="a.txt")

    await uploads.publish(three[0], make_batch(workspace_id, content))

    (row,) = (
        await feed.newest_rows(three[0], workspace_id, EVERYTHING, rows_after(0, limit=2))
    ).rows
    assert (row.activity_type, row.method, row.status, row.source_id) == (
        "a2a_receive",
        "chat_upload_receive",
        "ok",
        None,
    )
    assert row.summary == "chat_upload_receive: a.txt"
    assert json.loads(bytes(row.request_body)) == {
        "file_id": str(content.id),
        "name": "a.txt",
        "display_name": "a.txt",
        "mimeType": "text/plain",
        "size": 5,
        "uri": f"platform-pending:{workspace_id}/{content.id}",
    }


async def test_one_workspace_does_not_wait_for_another(three: list[Any], workspace_id: WorkspaceId):
    first, second, _ = three
    other = await make_workspace(second)
    async with first.transaction():
        await append(first, workspace_id)

        await second.execute("set lock_timeout = '5s'")
        assert await append(second, other) == 1


async def test_many_writers_leave_a_dense_feed(
    db_with_partitions: Database, workspace_id: WorkspaceId
):
    async def write(number: int) -> int | None:
        async with db_with_partitions.connection() as connection:
            if number % 2:
                return await append(connection, workspace_id)
            files = make_batch(workspace_id, Content(), Content())
            return await uploads.publish(connection, files)

    last = await asyncio.gather(*(write(number) for number in range(60)))

    async with db_with_partitions.connection() as reader:
        assert await seqs(reader, workspace_id) == list(range(1, 91))
        assert (await counters(reader, workspace_id)).last_seq == max(seq or 0 for seq in last)


async def test_a_workspace_without_a_feed_gets_no_row(three: list[Any]):
    nobody = WorkspaceId(uuid4())

    assert await append(three[0], nobody) is None
    assert await three[0].fetchval("select count(*) from feed") == 0
    assert await feed.marks(three[0], nobody) is None
    assert await feed.cursor(three[0], nobody, None) is None
    assert await feed.acknowledge(three[0], nobody, 1) is None


async def test_the_acknowledged_mark_only_moves_forward_and_never_past_the_newest_row(
    three: list[Any], workspace_id: WorkspaceId
):
    """A stale or repeated acknowledgement is ignored; one too high stops at the newest row."""
    connection = three[0]
    for _ in range(3):
        await append(connection, workspace_id)

    moved = [await feed.acknowledge(connection, workspace_id, seq) for seq in (2, 1, 2, 99, 0)]

    assert moved == [2, 2, 2, 3, 3]
    assert await feed.marks(connection, workspace_id) == Marks(3, 0, 3)


async def test_a_cursor_is_found_only_in_its_own_feed(three: list[Any], workspace_id: WorkspaceId):
    connection = three[0]
    other = await make_workspace(connection)
    await append(connection, workspace_id)
    (row,) = (
        await feed.newest_rows(connection, workspace_id, EVERYTHING, rows_after(0, limit=1))
    ).rows
    row_id = ActivityId(row.id)

    found = [
        await feed.cursor(connection, workspace_id, row_id),
        await feed.cursor(connection, other, row_id),
        await feed.cursor(connection, workspace_id, ActivityId(uuid4())),
        await feed.cursor(connection, workspace_id, None),
    ]

    assert [cursor and cursor.seq for cursor in found] == [1, None, None, None]


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (EVERYTHING, [1, 2, 3]),
        (Filter(activity_type="a2a_receive"), [1, 2, 3]),
        (Filter(activity_type="something else"), []),
        (Filter(from_agents=True), [2]),
        (Filter(from_agents=False), [1, 3]),
        (Filter(not_before=NOW), [3]),
        (Filter(from_agents=False, not_before=NOW - timedelta(seconds=60)), [1, 3]),
    ],
)
async def test_filters_select_the_same_rows_in_both_directions(
    three: list[Any], workspace_id: WorkspaceId, wanted: Filter, expected: list[int]
):
    connection = three[0]
    sent = [(None, -60), (uuid4(), -1), (None, 0)]
    for source_id, seconds in sent:
        row = replace(make_message(), source_id=source_id)
        await feed.append(connection, workspace_id, row, now=NOW + timedelta(seconds=seconds))

    after = (await feed.rows_after(connection, workspace_id, wanted, rows_after(0))).rows
    newest = (await feed.newest_rows(connection, workspace_id, wanted, rows_after(0))).rows

    assert [row.seq for row in after] == expected
    assert [row.seq for row in newest] == expected[::-1]


async def test_a_page_has_at_most_as_many_rows_as_the_limit(
    three: list[Any], workspace_id: WorkspaceId
):
    connection = three[0]
    for _ in range(5):
        await append(connection, workspace_id)

    after = (
        await feed.rows_after(connection, workspace_id, EVERYTHING, rows_after(1, limit=2))
    ).rows
    newest = (
        await feed.newest_rows(connection, workspace_id, EVERYTHING, rows_after(0, limit=2))
    ).rows

    assert [row.seq for row in after] == [2, 3]
    assert [row.seq for row in newest] == [5, 4]
