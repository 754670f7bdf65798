"""
The edges of the log: what was trimmed, empty logs, and cursors that nobody can have.

A gap is announced only if something after the reader's position is gone.
"""

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from oplog.logs import (
    Page,
    Reader,
    add_table,
    append,
    is_served,
    old_reader,
    own_reader,
    trim,
)
from sites import Site
from waiting import until

from restante.oplog import positions, ulids
from restante.oplog.positions import Position
from restante.wire import oplog as wire

pytestmark = pytest.mark.anyio

Connections = Any


def ulid_at(moment: datetime) -> str:
    return ulids.text_of(UUID(int=ulids.lowest_at(moment).int + 7))


def min_of(page: Page) -> UUID:
    found = ulids.parsed(page.headers[wire.AVAILABLE_MIN_ULID])
    assert found
    return found


@pytest.fixture
async def log(site: Site, connections: Connections) -> "Log":
    """Five ops of one table, of which readers have read some."""
    connection = await connections()
    table = await add_table(connection, "files")
    sent = [await append(connection, table, {"id": n}) for n in range(5)]
    return Log(site, connection, table, sent)


class Log:
    def __init__(self, site: Site, connection: Any, table: int, sent: list[str]) -> None:
        self.site = site
        self.connection = connection
        self.table = table
        self.sent = sent

    async def trim(self, number: int) -> None:
        await trim(self.connection, self.table, up_to=self.sent[number])


async def test_an_old_reader_at_or_above_the_trimmed_mark_has_no_gap(log: Log):
    """It is told of a gap by ULID if it cannot be known that it has everything."""
    old = await old_reader(log.site)
    read = [await old.read(limit=n + 1) for n in range(5)]
    await log.trim(2)

    below = await old.read(after=read[1].ulids[-1])
    at = await old.read(after=read[2].ulids[-1])
    above = await old.read(after=read[3].ulids[-1])

    assert [page.has_gap for page in (below, at, above)] == [True, False, False]
    assert below.headers[wire.AVAILABLE_MIN_ULID] == log.sent[3]
    assert [page.ulids for page in (below, at, above)] == [log.sent[3:], log.sent[3:], log.sent[4:]]


async def test_our_own_reader_hears_which_tables_have_a_gap(log: Log):
    ours = await own_reader(log.site)
    at = [op["position"] for op in (await ours.read()).ops]
    other = await add_table(log.connection, "others")
    await append(log.connection, other, {"id": 1})
    await log.trim(2)
    mark = positions.parsed(at[2])
    assert mark

    def moved(n: int) -> str:
        return str(Position(mark.era, mark.xid, UUID(int=mark.ulid.int + n), 0))

    pages = [await ours.read(position=one) for one in (at[1], moved(-1), at[2], moved(1), at[3])]

    gaps = [page.headers.get(wire.GAP_TABLES) for page in pages]
    assert gaps == ['["files"]', '["files"]', None, None, None]
    assert [len(page.ops) for page in pages] == [3, 3, 3, 3, 2]


async def test_tables_that_a_reader_may_not_see_make_no_gap(log: Log):
    old = await old_reader(log.site, tables=["others"])
    ours = await own_reader(log.site, "http://own.example", tables=["others"])
    others = await add_table(log.connection, "others")
    await append(log.connection, others, {"id": 1})
    first = await ours.read(limit=1)
    await log.trim(4)

    for page in (await old.read(after=log.sent[0]), await old.read(after=ulid_at(now()))):
        assert not page.has_gap
    again = await ours.read(position=str(positions.START))

    assert wire.GAP_TABLES not in again.headers
    assert again.ops == first.ops


async def test_an_empty_cursor_and_an_empty_log_are_no_gap(site: Site, connections: Connections):
    connection = await connections()
    table = await add_table(connection, "files")
    old = await old_reader(site)
    ours = await own_reader(site, "http://own.example")

    never_used = [await old.read(), await old.read(after=ulid_at(now()))]
    ours_never_used = await ours.read()
    ulid = await append(connection, table, {"id": 1})
    await append(connection, table, {"id": 2})
    await trim(connection, table, up_to=ulid)
    trimmed = [await old.read(), await old.read(after="")]

    assert not any(page.has_gap for page in [*never_used, *trimmed])
    assert never_used[0].ops == []
    assert wire.LAST_SCANNED_ULID not in never_used[0].headers
    assert wire.GAP_TABLES not in ours_never_used.headers
    assert len(trimmed[0].ops) == 1


async def test_first_contact_of_our_node_needs_a_snapshot_of_what_is_not_whole(log: Log):
    """The log from its start would lack what was trimmed, or came by a snapshot."""
    for name in ("taken", "whole"):
        await add_table(log.connection, name)
    await log.connection.execute(
        "update restante.op_tables set taken_snapshot = true where name = 'taken'"
    )
    await log.trim(0)
    ours = await own_reader(log.site)

    page = await ours.read()

    assert page.headers[wire.GAP_TABLES] == '["files", "taken"]'


async def test_a_cursor_on_an_emptied_log_is_a_gap(log: Log):
    """Nothing is kept: that must not look as if nothing had happened."""
    old, ours = await old_reader(log.site), await own_reader(log.site, "http://own.example")
    stranger = await old_reader(log.site, "http://stranger.example")
    early, all_of_it = await old.read(limit=2), await ours.read()
    await log.trim(4)

    gap = await old.read(after=early.ulids[-1])
    unknown = await stranger.read(after=log.sent[4])
    much_later = await stranger.read(after=ulid_at(now() + timedelta(hours=23)))
    own_gap = await ours.read(position=all_of_it.ops[1]["position"])
    own_whole = await ours.read(position=all_of_it.ops[4]["position"])

    floor = ulids.parsed(log.sent[4])
    assert floor
    for page in (gap, unknown, much_later):
        assert page.ops == []
        assert page.has_gap
        assert min_of(page) > floor
        assert ulids.is_plausible(min_of(page), now=now())
    assert own_gap.headers[wire.GAP_TABLES] == '["files"]'
    assert wire.GAP_TABLES not in own_whole.headers


async def test_a_reader_gets_over_a_gap(log: Log):
    """The same gap is not announced again to a reader that goes on as it was told."""
    old, ours = await old_reader(log.site), await own_reader(log.site, "http://own.example")
    early, first = await old.read(limit=1), await ours.read(limit=1)
    await log.trim(4)

    gap = await old.read(after=early.ulids[-1])
    own_gap = await ours.read(position=first.headers[wire.NEXT_POSITION])
    after_gap = await old.read(after=gap.headers[wire.LAST_SCANNED_ULID])
    own_after = await ours.read(position=own_gap.headers[wire.NEXT_POSITION])
    ulid = await append(log.connection, log.table, {"id": 9})
    later = await old.read(after=gap.headers[wire.LAST_SCANNED_ULID])

    assert gap.has_gap
    assert not after_gap.has_gap
    assert wire.GAP_TABLES not in own_after.headers
    assert later.ulids == [ulid]


@pytest.mark.parametrize(
    "after",
    [
        "7ZZZZZZZZZZZZZZZZZZZZZZZZZ",  # the year 10889
        "00000000000000000000000000",
        ulid_at(datetime(2023, 12, 31, tzinfo=UTC)),
        pytest.param(ulid_at(datetime.now(UTC) + timedelta(hours=25)), id="in 25 hours"),
        "8ZZZZZZZZZZZZZZZZZZZZZZZZZ",
        "garbage",
        "x" * 26,
        "'; drop table ops; --",
        "\u0130" * 26,
        "1" * 5000,
    ],
)
async def test_a_cursor_that_nobody_can_have_is_refused(log: Log, after: str):
    old = await old_reader(log.site)

    page = await old.read(after=after)
    kept = await old.read()

    assert page.status == 400
    assert len(kept.ops) == 5


@pytest.mark.parametrize(
    "query",
    [
        {"position": "garbage"},
        {"position": "0" * 77},
        {"position": f"{'f' * 16}-{'f' * 16}-7ZZZZZZZZZZZZZZZZZZZZZZZZZ-{'f' * 8}"},
        {"floor": "garbage"},
        {"head": "garbage"},
        {"wait": "-1"},
        {"wait": "61"},
        {"wait": "nan"},
        {"limit": "0"},
        {"limit": "x"},
    ],
)
async def test_other_impossible_values_are_refused(log: Log, query: dict[str, str]):
    ours = await own_reader(log.site)

    assert (await ours.read(**query)).status == 400


async def test_a_position_that_was_served_before_a_restore_is_found_by_its_op(log: Log):
    """The clock may have been behind after it, so that our era is lower than the reader's."""
    ours = await own_reader(log.site)
    last = positions.parsed((await ours.read()).ops[2]["position"])
    assert last
    ahead = Position(last.era + 10**12, 5, last.ulid, last.n)
    lost = Position(last.era + 10**12, 5, UUID(int=last.ulid.int + 1), 0)

    found = await ours.read(position=str(ahead))
    unknown = await ours.read(position=str(lost))

    assert found.ulids == log.sent[3:]
    assert unknown.ulids == log.sent  # everything of the last 24 hours
    assert wire.GAP_TABLES not in unknown.headers


async def test_an_unknown_ulid_goes_back_a_day(log: Log):
    """What arrived before that was read; nothing else can be told from the ULID."""
    old = await old_reader(log.site)
    await log.connection.execute(
        "update restante.ops set arrived_at = arrived_at - interval '25 hours' where ulid <= $1",
        ulids.parsed(log.sent[1]),
    )

    page = await old.read(after=ulid_at(now()))
    none = await old.read(after=ulid_at(now() + timedelta(hours=23)))

    # From the last transaction before, because some of it may have arrived later.
    assert page.ulids == none.ulids == log.sent[1:]
    assert not page.has_gap


async def test_an_unknown_ulid_has_a_gap_if_what_was_dropped_reaches_that_far(log: Log):
    old = await old_reader(log.site)
    await log.trim(1)
    first_kept = ulids.parsed(log.sent[2])
    assert first_kept

    near = await old.read(after=ulid_at(now()))
    dropped = await old.read(after=log.sent[0])
    await log.connection.execute(
        "update restante.op_tables set floor = $1", ulids.lowest_at(now() - timedelta(hours=30))
    )
    await log.connection.execute("update restante.op_tables set trimmed = $1", str(positions.START))
    far = await old.read(after=ulid_at(now()))

    assert near.has_gap
    assert dropped.has_gap
    assert min_of(near) == first_kept
    assert not far.has_gap


async def test_readers_of_old_eras_go_on(log: Log):
    """After a restart a new era begins; positions of the old one are still good."""
    ours = await own_reader(log.site)
    before = await ours.read(limit=2)
    era = await log.connection.fetchval("select last_value from restante.op_era")
    await log.connection.execute("select setval('restante.op_era', $1)", era + 1)
    ulid = await append(log.connection, log.table, {"id": 9})

    after = await ours.read(position=before.headers[wire.NEXT_POSITION])

    assert after.ulids == [*log.sent[2:], ulid]


async def test_a_prepared_transaction_holds_back_the_era_before_a_restart(
    log: Log, connections: Connections
):
    """It survives the restart, and then its ops appear in an era that looked complete."""
    ours, other = await own_reader(log.site), await connections()
    await log.connection.execute("begin")
    prepared = await append(log.connection, log.table, {"id": 6})
    await log.connection.execute("prepare transaction 'slow'")
    before = await append(other, log.table, {"id": 7}, is_held_up=True)
    await other.execute(
        "select setval('restante.op_era', (extract(epoch from clock_timestamp()) * 1e6)::bigint)"
    )
    after = await append(other, log.table, {"id": 8}, is_held_up=True)

    held = await ours.read()
    await other.execute("commit prepared 'slow'")
    await until(lambda: is_served(other))
    rest = await ours.read(position=held.headers[wire.NEXT_POSITION])

    assert held.ulids == log.sent
    assert rest.ulids == [prepared, before, after]


async def test_strangers_learn_nothing(log: Log):
    page = await Reader(log.site, None).read(after=log.sent[0])

    assert page.status == 401
    assert wire.LAST_SCANNED_ULID not in page.headers


def now() -> datetime:
    return datetime.now(UTC)
