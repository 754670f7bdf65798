"""How far both sides have read each other, as the requests of a peer tell it step by step."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from oplog.nodes import make_peer, tracked

from restante.database.pool import Database
from restante.oplog.peers import Peer
from restante.oplog.positions import Position
from restante.oplog.serving import readers

pytestmark = pytest.mark.anyio

NOW = datetime(2026, 11, 17, 12, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
ERA = round(datetime(2026, 1, 1, tzinfo=UTC).timestamp() * 1_000_000)


def at(xid: int, era: int = ERA) -> Position:
    return Position(era, xid, UUID(int=0), 0)


@dataclass
class Reader:
    """A peer as our tables know it."""

    db: Database
    peer: Peer
    now: datetime = NOW

    async def confirms(self, position: Position | None, *, head: Position | str | None) -> str:
        """It asks for what follows a position, a minute after it last did; returns `passed`."""
        self.now += MINUTE
        text = None if head is None else str(head)
        async with self.db.connection() as connection:
            await readers.note_confirmed(
                connection, self.peer.id, position, head=text, now=self.now
            )
        return (await self.row())["passed"]

    async def is_served(self, position: Position) -> None:
        async with self.db.connection() as connection:
            await readers.note_served(connection, self.peer.id, position)

    async def is_read(self, cursor: Position | str) -> None:
        """We have read its log up to here."""
        await self.set(cursor=str(cursor))

    async def set(self, **columns: Any) -> None:
        async with self.db.connection() as connection:
            for name, value in columns.items():
                await connection.execute(
                    f"update op_peers set {name} = $2 where id = $1", self.peer.id, value
                )

    async def row(self) -> Any:
        async with self.db.connection() as connection:
            return await connection.fetchrow("select * from op_peers where id = $1", self.peer.id)


@pytest.fixture
async def reader(db: Database) -> Reader:
    """It was served much."""
    one = Reader(db, await make_peer(db))
    await one.is_served(at(1000))
    return one


async def want_snapshot(reader: Reader, **columns: Any) -> int:
    """We wait for a snapshot of a table of the peer."""
    async with reader.db.connection() as connection:
        table = await tracked(connection)
        await connection.execute(
            "insert into op_snapshots (peer_id, table_id, phase, is_for_gap, is_new, read_to,"
            "  started_at, progressed_at) values ($1, $2, 'new', false, $3, $4, $5, $5)",
            reader.peer.id,
            table.id,
            columns.get("is_new", False),
            columns.get("read_to"),
            NOW,
        )
        return table.id


async def test_ops_are_passed_only_when_we_have_read_what_the_peer_wrote_before(reader: Reader):
    assert await reader.confirms(at(10), head=at(5)) == ""
    assert await reader.confirms(at(20), head=at(6)) == ""

    await reader.is_read(at(4))
    assert await reader.confirms(at(30), head=at(7)) == ""

    await reader.is_read(at(5))
    assert await reader.confirms(at(40), head=at(8)) == str(at(10))

    # What it has read meanwhile counts from the last request on, with the head that it had then.
    await reader.is_read(at(7))
    assert await reader.confirms(at(50), head=at(9)) == str(at(10))
    await reader.is_read(at(8))
    assert await reader.confirms(at(50), head=at(9)) == str(at(40))


async def test_a_peer_passes_no_more_than_it_was_served(db: Database):
    reader = Reader(db, await make_peer(db))
    await reader.is_served(at(10))
    await reader.is_read(at(5))
    await reader.confirms(at(99), head=at(5))

    assert await reader.confirms(at(99), head=at(5)) == str(at(10))


@pytest.mark.parametrize("back_to", [at(7), None], ids=["earlier", "start"])
async def test_a_reader_that_goes_back_takes_its_mark_with_it(
    reader: Reader, back_to: Position | None
):
    await reader.is_read(at(5))
    await reader.confirms(at(10), head=at(5))
    assert await reader.confirms(at(20), head=at(5)) == str(at(10))

    await reader.is_read(at(6))
    assert await reader.confirms(back_to, head=at(6)) == (str(back_to) if back_to else "")
    # What it was about to pass before no longer counts.
    assert await reader.confirms(at(15), head=at(6)) in {str(back_to), ""}
    assert (await reader.row())["passed"] < str(at(15))


async def test_a_peer_without_heads_has_passed_what_it_had_read_before_a_whole_pull(
    reader: Reader,
):
    """By the time: it began after the confirmation, by more than two clocks may differ."""
    await reader.confirms(at(10), head=None)
    confirmed_at = reader.now

    await reader.set(read_all_at=confirmed_at - MINUTE)
    assert await reader.confirms(at(20), head=None) == ""
    await reader.set(read_all_at=confirmed_at + MINUTE / 2)
    assert await reader.confirms(at(20), head=None) == ""
    await reader.set(read_all_at=confirmed_at + MINUTE)
    assert await reader.confirms(at(20), head=None) == str(at(10))


async def test_an_empty_log_of_the_peer_is_read_when_a_pull_has_read_all(reader: Reader):
    await reader.confirms(at(10), head="")
    assert await reader.confirms(at(10), head="") == ""

    await reader.set(read_all_at=reader.now)

    assert await reader.confirms(at(10), head="") == str(at(10))


async def test_a_peer_that_has_read_nothing_passes_nothing(db: Database):
    reader = Reader(db, await make_peer(db))
    await reader.is_read(at(99))

    assert await reader.confirms(None, head=at(5)) == ""
    assert await reader.confirms(None, head=at(5)) == ""


async def test_what_we_skip_of_a_table_that_waits_for_its_snapshot_is_not_read(reader: Reader):
    await want_snapshot(reader, read_to=str(at(4)))
    await reader.is_read(at(99))

    await reader.confirms(at(10), head=at(5))
    assert await reader.confirms(at(20), head=at(5)) == ""


async def test_of_a_table_that_is_new_here_nothing_is_read(reader: Reader):
    await want_snapshot(reader, is_new=True)
    await reader.is_read(at(99))

    await reader.confirms(at(10), head=at(5))
    assert await reader.confirms(at(20), head=at(5)) == ""


async def test_an_era_that_begins_at_the_peer_or_here_is_above_what_was_before(reader: Reader):
    await reader.is_read(at(900))
    await reader.confirms(at(10), head=at(5, ERA + 1))
    assert await reader.confirms(at(20), head=at(5, ERA + 1)) == ""

    await reader.is_read(at(5, ERA + 1))
    await reader.is_served(at(1, ERA + 2))
    assert await reader.confirms(at(1, ERA + 2), head=at(6, ERA + 1)) == str(at(10))
    await reader.is_read(at(6, ERA + 1))
    assert await reader.confirms(at(1, ERA + 2), head=at(6, ERA + 1)) == str(at(1, ERA + 2))


# Eviction and return


@pytest.mark.parametrize(("reached", "returns"), [(49, False), (50, True), (60, True)])
async def test_an_evicted_peer_has_returned_when_it_lacks_nothing_that_was_dropped(
    reader: Reader, reached: int, returns: bool
):
    async with reader.db.connection() as connection:
        table = await tracked(connection)
        await connection.execute(
            "update op_tables set trimmed = $2 where id = $1", table.id, str(at(50))
        )
    await reader.set(evicted_at=NOW, passed=str(at(7)))

    await reader.confirms(at(reached), head=at(5))

    row = await reader.row()
    assert (row["evicted_at"] is None) == returns
    # It must pass everything anew: what it read before it was evicted says nothing of its changes.
    assert row["passed"] == ("" if returns else str(at(7)))


@pytest.mark.parametrize(("visible", "returns"), [(["items"], False), (["others"], True)])
async def test_only_tables_that_it_may_see_keep_an_evicted_peer_out(
    db: Database, visible: list[str], returns: bool
):
    reader = Reader(db, await make_peer(db, tables=visible))
    await reader.is_served(at(1000))
    async with db.connection() as connection:
        table = await tracked(connection)
        await connection.execute(
            "update op_tables set trimmed = $2 where id = $1", table.id, str(at(50))
        )
    await reader.set(evicted_at=NOW)

    await reader.confirms(at(10), head=at(5))

    assert ((await reader.row())["evicted_at"] is None) == returns


async def test_the_end_of_a_snapshot_serves_its_start_and_gives_a_respite(db: Database):
    reader = Reader(db, await make_peer(db))
    async with db.connection() as connection:
        for number, start in ((1, at(30)), (2, at(20))):
            await connection.execute(
                "insert into op_pins values ($1, $2, $3, now())", reader.peer.id, number, str(start)
            )
        await readers.end_snapshots(connection, reader.peer.id, now=NOW)

    row = await reader.row()
    assert row["served"] == str(at(20))
    assert row["spared_until"] == NOW + readers.SPARED

    async with db.connection() as connection:
        await readers.end_snapshots(connection, reader.peer.id, now=NOW + MINUTE)
    assert (await reader.row())["spared_until"] == NOW + readers.SPARED
