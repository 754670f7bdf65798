"""Paging back through a feed by time, as a chat history does."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from callers import Caller, Part, registered
from sites import Site

from restante.ids import new_activity_id

pytestmark = pytest.mark.anyio

PART = {"kind": "text", "text": "hello"}
HELLO = {"jsonrpc": "2.0", "method": "message/send", "params": {"message": {"parts": [PART]}}}
NOON = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)


@pytest.fixture
async def caller(site: Site) -> Caller:
    return await registered(site)


@pytest.fixture
async def connection(connections: Any) -> Any:
    return await connections()


def seqs(rows: list[dict[str, Any]]) -> list[int]:
    return [row["seq"] for row in rows]


async def history(caller: Caller, **query: Any) -> list[list[int]]:
    """The seqs of all pages, read as a chat does: with the time of the oldest row it has."""
    pages, before = list[list[int]](), {}
    while rows := await caller.feed(**query, **before):
        pages.append(seqs(rows))
        assert len(pages) < 50, pages
        before = {"before_ts": rows[-1]["created_at"]}
    return pages


async def made_at(connection: Any, caller: Caller, *times: datetime) -> None:
    """Give the rows of a feed these times, in the order of their seqs."""
    for seq, at in enumerate(times, start=1):
        await connection.execute(
            "update feed set id = $1, created_at = $2 where workspace_id = $3 and seq = $4",
            new_activity_id(at), at, caller.id, seq,
        )  # fmt: skip


async def test_rows_older_than_a_time_come_newest_first(caller: Caller, connection: Any):
    await caller.staged(*[Part()] * 4)
    times = [NOON + timedelta(seconds=n) for n in range(4)]
    await made_at(connection, caller, *times)

    for before, expected in (
        (times[0], []),
        (times[2], [2, 1]),
        (times[2] + timedelta(microseconds=1), [3, 2, 1]),
        (times[3] + timedelta(days=1), [4, 3, 2, 1]),
        (times[0] - timedelta(days=400), []),
    ):
        assert seqs(await caller.feed(before_ts=before.isoformat())) == expected, before


@pytest.mark.parametrize("limit", [1, 2, 3, 7])
async def test_every_row_of_an_upload_is_seen_once_wherever_a_page_ends(caller: Caller, limit: int):
    """They are stored in one moment."""
    await caller.staged(*[Part()] * 5)
    await caller.staged(Part())
    await caller.staged(*[Part()] * 4)

    pages = await history(caller, limit=limit)

    assert [seq for page in pages for seq in page] == list(range(10, 0, -1))
    assert all(len(page) == limit for page in pages[:-1])
    assert len({row["created_at"] for row in await caller.feed()}) == 10


async def test_rows_that_were_committed_out_of_the_order_of_their_times_are_seen_once(
    caller: Caller, connection: Any
):
    """The clock of one server is ahead, or a slow commit comes last."""
    await caller.staged(*[Part()] * 6)
    late = [NOON + timedelta(milliseconds=n) for n in (0, 900, 100, 1200, 2, 1)]
    await made_at(connection, caller, *late)

    for limit in (1, 2, 4):
        pages = await history(caller, limit=limit)
        assert [seq for page in pages for seq in page] == [6, 5, 4, 3, 2, 1], limit


async def test_rows_of_one_time_from_the_previous_release_are_all_seen(
    caller: Caller, connection: Any
):
    """Some of them twice, as a reader has only their time; and it never stays at one page."""
    await caller.staged(*[Part()] * 9)
    times = [NOON + timedelta(seconds=second) for second in (0, 1, 1, 2, 2, 2, 2, 3, 3)]
    await made_at(connection, caller, *times)

    for limit in (4, 5, 6):
        pages = await history(caller, limit=limit)
        assert {seq for page in pages for seq in page} == set(range(1, 10)), limit
    assert await history(caller, limit=1)


async def test_a_time_works_together_with_every_filter(caller: Caller, connection: Any):
    agent, other = await registered(caller.site), await registered(caller.site)
    for _ in range(3):
        await caller.staged()
        await agent.message(HELLO, to=caller)
        await other.message(HELLO, to=caller)
    rows = {row["seq"]: row for row in await caller.feed()}

    async def before(seq: int, **query: Any) -> list[int]:
        return seqs(await caller.feed(before_ts=rows[seq]["created_at"], **query))

    assert await before(7, source="agent", limit=3) == [6, 5, 3]
    assert await before(8, source="canvas") == [7, 4, 1]
    assert await before(8, peer_id=agent.id) == [5, 2]
    assert await before(6, type="a2a_receive", limit=2) == [5, 4]
    assert await before(6, type="a2a_send") == []
    assert await before(9, since_secs=60, peer_id=other.id) == [6, 3]
    assert await history(caller, peer_id=agent.id, limit=2) == [[8, 5], [2]]
    await connection.execute("update feed set created_at = now() - interval '2 days' where seq < 4")
    assert await before(6, since_secs=3600) == [5, 4]


async def test_with_a_cursor_the_rows_after_it_that_are_older_come_oldest_first(caller: Caller):
    await caller.staged(*[Part()] * 6)
    rows = {row["seq"]: row for row in await caller.feed()}
    times = {seq: row["created_at"] for seq, row in rows.items()}

    async def between(first: int, last: int, **query: Any) -> list[int]:
        return seqs(await caller.feed(since_id=rows[first]["id"], before_ts=times[last], **query))

    assert await between(2, 5) == [3, 4]
    assert await between(2, 5, limit=1) == [3]
    assert await between(2, 3) == []
    assert await between(5, 2) == []
    assert seqs(await caller.feed(since_seq=4, before_ts="2999-01-01T00:00:00Z")) == [5, 6]
    answer = await caller.read_feed(since_seq=2, before_ts=times[3])
    assert answer.headers["X-Restante-Read-Seq"] == "6"


async def test_a_lost_cursor_is_gone_with_a_time_too(caller: Caller):
    await caller.staged()

    answer = await caller.read_feed(
        since_id=new_activity_id(NOON), before_ts="2000-01-01T00:00:00Z"
    )

    assert answer.status == 410


@pytest.mark.parametrize(
    "text",
    [
        "2001-01-01T10:00:00Z",
        "2001-01-01t10:00:00z",
        "2001-01-01T10:00:00+00:00",
        "2001-01-01T10:00:00-08:00",
        "2001-01-01T10:00:00.5Z",
        "2001-01-01T10:00:00.123456789+05:30",
        "1969-12-31T23:59:59Z",
    ],
)
async def test_a_time_is_written_as_in_rfc_3339(caller: Caller, text: str):
    await caller.staged()

    assert await caller.feed(before_ts=text) == []
    assert len(await caller.feed(before_ts=text.replace("2001", "2999"))) == ("2001" in text)


async def test_a_plus_that_was_not_encoded_is_a_plus(caller: Caller):
    """It arrives as a space."""
    await caller.staged()

    for text in ("2999-01-01T10:00:00+00:00", "2999-01-01T10:00:00%2B00:00"):
        async with caller.site.http.get(
            f"{caller.site.url}{caller.path}/activity?before_ts={text}",
            headers={"Authorization": f"Bearer {caller.token}"},
        ) as answer:
            assert (answer.status, len(await answer.json())) == (200, 1)


async def test_any_other_time_is_a_400(caller: Caller):
    await caller.staged()

    for wrong in (
        "x", "null", "0", "1700000000", "2001-01-01", "2001-01-01T10:00:00", "2001-01-01 10:00:00Z",
        "2001-13-01T10:00:00Z", "2001-02-30T10:00:00Z", "2001-01-01T25:00:00Z", "20010101T100000Z",
        "2001-01-01T10:00Z", "2001-01-01T10:00:00,5Z", "2001-W01-1T10:00:00Z",
        "0000-01-01T10:00:00Z", "2001-01-01T10:00:00+99:00", "2001-01-01T10:00:00Z0",
        "\u0662001-01-01T10:00:00Z", "\0",
    ):  # fmt: skip
        answer = await caller.read_feed(before_ts=wrong)
        assert answer.status == 400, wrong
        assert "before_ts" in answer.json["error"]


async def test_nobody_waits_for_rows_of_the_past(caller: Caller):
    """New rows are not older; the answer would come a minute later, and empty."""
    answer = await caller.read_feed(before_ts="2001-01-01T10:00:00Z", wait=60)

    assert (answer.status, answer.json) == (200, [])
