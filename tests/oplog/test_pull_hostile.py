"""
Pulling from a peer that speaks our protocol, and is wrong or lies.

What it says is stored only with a whole page, and nothing that it says holds up its reader.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from impostors import http
from oplog.made_up_peers import NOW, Reader, note, op, reading, ulid
from waiting import until

from restante.database.pool import Database
from restante.errors import PeerUnreachable
from restante.oplog import ulids
from restante.oplog.peers import Peer
from restante.oplog.snapshots.taking import Taker

pytestmark = pytest.mark.anyio

SOME_ULID = "01K9ZZZZZZ0000000000000000"
ERA = int(NOW.timestamp() * 1_000_000)
FIRST, SECOND = (f"{ERA:016x}-{n:016x}-{ulid(minutes_ago=90)}-{0:08x}" for n in (1, 2))


@pytest.fixture
async def reader(db: Database) -> AsyncIterator[Reader]:
    async with reading(db) as found:
        yield found


def ours(body: Any, position: str | None, **headers: Any) -> bytes:
    return http(body=body, Restante_Oplog="1", Restante_Next_Position=position, **headers)


async def test_a_body_that_breaks_off_changes_nothing(reader: Reader):
    """Neither the position after it nor the gap that its header announces."""
    await reader.pull(ours([op(90, note("a"))], FIRST))
    whole = ours([op(30, note("b"))], SECOND, Restante_Gap_Tables='["notes"]')

    for broken in (whole[:-20], whole[: whole.index(b"\r\n\r\n") + 4]):
        with pytest.raises(PeerUnreachable):
            await reader.pull(broken)

    assert (await reader.stored())["cursor"] == FIRST
    assert await reader.names() == ["a"]
    assert await reader.sql.fetchval("select count(*) from restante.op_snapshots") == 0

    await reader.pull(whole)

    assert await reader.sql.fetchval("select count(*) from restante.op_snapshots") == 1


@pytest.mark.parametrize("position", [None, "", "garbage", SOME_ULID, "f" * 77, "0"])
async def test_a_page_without_a_readable_end_is_not_applied(reader: Reader, position: str | None):
    """It would be read again and again."""
    with pytest.raises(PeerUnreachable, match="position"):
        await reader.pull(ours([op(30, note("a"))], position))

    assert (await reader.stored())["cursor"] == ""
    assert await reader.names() == []


@pytest.mark.parametrize(
    "era", [1, 10**6, ERA + 10**12, 2**62], ids=["epoch", "1970", "in 11 days", "far future"]
)
async def test_a_position_of_an_impossible_time_is_dropped_and_said(reader: Reader, era: int):
    await reader.pull(ours([op(90, note("a"))], f"{era:016x}{FIRST[16:]}"))
    await reader.pull(ours([op(30, note("b"))], FIRST))

    stored = await reader.stored()
    assert stored["cursor"] == FIRST
    assert "implausible era" in stored["cursor_problem"]
    assert "position" not in reader.asked.query
    assert await reader.names() == ["a", "b"]


@pytest.mark.parametrize("tables", ["garbage", "{}", "[1]", '"notes"', "[" * 500], ids=repr)
async def test_a_gap_that_is_unreadable_is_not_passed_over(reader: Reader, tables: str):
    await reader.pull(ours([op(90, note("a"))], FIRST))

    with pytest.raises(PeerUnreachable):
        await reader.pull(ours([op(30, note("b"))], SECOND, Restante_Gap_Tables=tables))

    assert (await reader.stored())["cursor"] == FIRST
    assert await reader.names() == ["a"]


async def test_a_gap_of_a_table_that_we_do_not_have_is_none(reader: Reader):
    await reader.pull(ours([op(90, note("a"))], FIRST))

    await reader.pull(ours([op(30, note("b"))], SECOND, Restante_Gap_Tables='["other"]'))

    stored = await reader.stored()
    assert (stored["cursor"], stored["gaps"]) == (SECOND, 0)
    assert await reader.names() == ["a", "b"]
    assert await reader.sql.fetchval("select count(*) from restante.op_snapshots") == 0


@pytest.mark.parametrize("cursor", ["garbage", "", "f" * 77, SOME_ULID])
async def test_who_cannot_say_how_far_it_has_read_us_vouches_for_nothing(
    reader: Reader, cursor: str
):
    """Of an op below our floor nobody knows then whether it is older than what we had."""
    floor = ulids.parsed(ulid(minutes_ago=10))
    await reader.sql.execute("update op_tables set floor = $1, trimmed = $2", floor, SECOND)
    reader.answers.append(ours([op(30, note("a"))], FIRST, Restante_Cursor_On_You=cursor))

    await reader.follower._tried(await reader.peer(), reader.state)

    stored = await reader.stored()
    assert "must take its snapshot of this node" in stored["failure"]
    assert (stored["cursor"], await reader.names()) == ("", [])


async def waits_asked_for(reader: Reader, times: int) -> list[str | None]:
    """Follow the peer until it was asked so often; how long it might wait each time."""
    following = asyncio.create_task(reader.follower.follow(reader.other.url))
    await until(lambda: len(reader.other.asked) >= times)
    following.cancel()
    await asyncio.wait([following])
    return [asked.query.get("wait") for asked in reader.other.asked[:times]]


async def test_a_peer_that_failed_is_asked_for_an_answer_before_it_may_wait_for_news(
    reader: Reader,
):
    """Else it is shown as failing for a long poll more, although it can be reached again."""
    fine, failing = ours([], FIRST), http(500)
    reader.answers += [fine, fine, failing, failing, fine, fine, fine]

    waits = await waits_asked_for(reader, 6)

    assert waits == [None, "25", "25", None, None, "25"]


async def test_a_page_of_a_snapshot_does_not_say_that_the_log_can_be_read(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
):
    fine, failing = ours([], FIRST), http(500)
    reader.answers += [fine, fine, failing, fine, fine, fine]
    pages = [7]

    async def step(_taker: Taker, _peer: Peer, _waiting: object) -> int | None:
        return pages.pop() if len(reader.other.asked) == 3 and pages else None

    monkeypatch.setattr(Taker, "step", step)

    waits = await waits_asked_for(reader, 5)

    assert (pages, waits) == ([], [None, "25", "25", None, "25"])
