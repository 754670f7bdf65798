"""The status of the op log: lag in both directions, and what holds it up."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from waiting import until

from restante.database.pool import Connection, Database
from restante.oplog import status, ulids
from restante.oplog.looks import differences
from restante.oplog.positions import Position
from restante.wire import EvictedPeer
from restante.wire.oplog_digests import ColumnDescription, NodeDescription, TableDescription
from restante.wire.oplog_status import Lag

pytestmark = pytest.mark.anyio

NOW = datetime.now(UTC)

TRACK = """
insert into op_tables (name, schema_name, table_name, key_columns, state, changed_at)
values ($1, 'public', $1, '{id}', $2, now()) returning id
"""


async def tracked(connection: Connection, name: str, state: str = "tracked") -> int:
    """A table with a log whose partition reaches two hours ahead."""
    await connection.execute(f"create table public.{name} (id int primary key)")
    table_id = await connection.fetchval(TRACK, name, state)
    await connection.execute(
        f"create table ops_{table_id} partition of ops for values in ({table_id})"
        " partition by range (arrived_at)"
    )
    span = f"from ('{NOW - timedelta(days=1)}') to ('{NOW + timedelta(hours=2)}')"
    await connection.execute(
        f"create table ops_{table_id}_a partition of ops_{table_id} for values {span}"
    )
    return table_id


async def log_ops(connection: Connection, table_id: int, count: int, *, age: timedelta) -> None:
    """Of one transaction each, the first of them number 1."""
    await connection.execute(
        "insert into ops select $1, $2, 5, n, op_ulid(n, '00000000000000ff'), 1, 1, 'c', false,"
        " n, null, '[' || n || ']', '{\"id\": 1}' from generate_series(1, $3::bigint) n",
        table_id,
        NOW - age,
        count,
    )


def position_of(n: int) -> str:
    return str(Position(5, n, ulids.UUID(int=(n << 65) + 0xFF), 1))


async def add_peer(connection: Connection, host: str, **columns: Any) -> None:
    names = ["host", "added_at", *columns]
    places = ", ".join(f"${n + 1}" for n in range(len(names)))
    await connection.execute(
        f"insert into op_peers ({', '.join(names)}) values ({places})",
        *(host, NOW, *columns.values()),
    )


async def test_a_table_shows_its_state_its_size_and_how_far_ahead_it_has_partitions(db: Database):
    async with db.connection() as connection:
        await tracked(connection, "pages")
        await tracked(connection, "parts", "paused")
        await tracked(connection, "gone")
        await connection.execute("drop table public.gone")
        await connection.execute("update op_tables set floor = $1", ulids.lowest_at(NOW))

    seen = await status.look(db, now=NOW)

    assert [(one.name, one.state) for one in seen.tables] == [
        ("gone", "missing"),
        ("pages", "tracked"),
        ("parts", "paused"),
    ]
    assert {one.partitions for one in seen.tables} == {1}
    assert all(7100 < (one.ahead_seconds or 0) <= 7200 for one in seen.tables)
    assert all(one.bytes > 0 for one in seen.tables)
    assert seen.tables[0].floor_at == NOW.replace(microsecond=NOW.microsecond // 1000 * 1000)


async def test_what_a_peer_has_not_confirmed_is_counted_by_rows_bytes_and_age(db: Database):
    async with db.connection() as connection:
        table_id = await tracked(connection, "pages")
        hidden = await tracked(connection, "hidden")
        await log_ops(connection, table_id, 30, age=timedelta(minutes=10))
        await log_ops(connection, hidden, 5, age=timedelta(hours=3))
        await add_peer(connection, "http://b", tables=["pages"], confirmed=position_of(20))
        await add_peer(connection, "http://c", confirmed=position_of(30))

    first, second = (await status.look(db, now=NOW)).peers

    assert (first.waiting.ops, first.waiting.is_more) == (10, False)
    assert first.waiting.bytes > 0
    assert first.waiting.seconds == 600
    assert second.waiting == Lag()


async def test_counting_stops_at_a_limit(db: Database, monkeypatch: pytest.MonkeyPatch):
    """A peer that was away for a month must not make the status slow."""
    monkeypatch.setattr(status, "MAX_COUNTED", 50)
    async with db.connection() as connection:
        await log_ops(connection, await tracked(connection, "pages"), 60, age=timedelta(hours=1))
        await add_peer(connection, "http://b")

    (peer,) = (await status.look(db, now=NOW)).peers

    assert (peer.waiting.ops, peer.waiting.is_more) == (50, True)


async def test_what_a_peer_said_of_us_is_shown(db: Database):
    async with db.connection() as connection:
        await add_peer(connection, "http://b", failing_since=NOW, failure="It does not answer.")
        peer_id = await connection.fetchval("select id from op_peers")
        await status.note_look(connection, peer_id, Lag(7, 700, 1.5), ["x differs."], now=NOW)

    (peer,) = (await status.look(db, now=NOW)).peers

    assert peer.behind == Lag(7, 700, 1.5)
    assert peer.schema_differences == ["x differs."]
    assert (peer.failing_since, peer.failure) == (NOW, "It does not answer.")


async def is_the_oldest(writer: Any) -> bool:
    """Other tests on the same cluster have transactions that are older, and soon end."""
    return await writer.fetchval(
        "select pg_snapshot_xmin(pg_current_snapshot()) = pg_current_xact_id()"
        " and not exists (select from pg_prepared_xacts)"
    )


async def test_the_transaction_that_holds_up_the_horizon_is_named(db: Database, connections: Any):
    """What commits after it began cannot be served until it ends."""
    writer = await connections()
    await writer.execute("set application_name = 'nightly load'")
    await writer.execute("begin")
    await writer.execute("select pg_current_xact_id()")
    await until(lambda: is_the_oldest(writer))

    seen = await status.look(db, now=NOW)
    await writer.execute("rollback")
    after = await status.look(db, now=NOW)

    assert seen.horizon is not None
    assert seen.horizon.pid == writer.get_server_pid()
    assert seen.horizon.who.endswith("nightly load")
    assert seen.horizon.state == "idle in transaction"
    assert seen.horizon.query_started_at is not None
    assert after.horizon is None or after.horizon.pid != writer.get_server_pid()


async def test_a_clock_that_was_dragged_ahead_is_shown(db: Database):
    now = datetime.now(UTC)
    ahead = ulids.tick_above(ulids.lowest_at(now + timedelta(minutes=4)))
    async with db.connection() as connection:
        await connection.execute("select op_tick(1, $1)", ahead)

    assert 239 < (await status.look(db, now=now)).clock_ahead_seconds <= 240


async def test_rows_of_all_writers_are_counted_as_appended(db: Database, connections: Any):
    """Triggers append in the sessions of the application."""
    appended = status.Appended()
    async with db.connection() as connection:
        table_id = await tracked(connection, "pages")
        first = await appended.since_last_look(connection)
        await log_ops(connection, table_id, 25, age=timedelta())
        await connection.execute("select pg_stat_force_next_flush()")

        assert first == 0
        assert await appended.since_last_look(connection) == 25
        assert await appended.since_last_look(connection) == 0


def test_a_restart_of_the_statistics_does_not_count_backwards():
    assert status._grown({1: 100, 2: 50, 3: 7}, {1: 110, 2: 5, 4: 3}) == 10 + 5 + 3


async def test_what_was_refused_is_known_by_its_reason(db: Database):
    async with db.connection() as connection:
        await add_peer(connection, "https://b.example", refused_by='{"time": 2}')

    (peer,) = (await status.look(db, now=NOW)).peers

    assert peer.refused_by == {"time": 2}


def described(*columns: str, key: str = "id") -> NodeDescription:
    table = TableDescription(
        name="pages",
        state="tracked",
        columns=[ColumnDescription(name, "text") for name in columns],
        key_columns=[key],
        order="",
        rows=0,
    )
    return NodeDescription(host="", head="", cursor="", tables=[table])


def test_differences_of_the_schemas_are_named_within_bounds():
    many = [f"c{n:03}" for n in range(50)]

    assert differences(described("a"), described("a")) == []
    assert differences(described("a"), described("a", key="a")) == [
        "pages: The primary key is (id) here and (a) there."
    ]
    assert differences(described(*many), described())[-1] == "And 30 more differences."


async def test_an_eviction_is_an_event_once_and_none_from_before_the_first_look(db: Database):
    """Whichever server, or command, has evicted the peer."""
    lost = '{"table": "pages", "cause": "cap_bytes", "ops": 7, "bytes": 70}'
    evict = (
        "update op_peers set evictions = evictions + 1, evicted_at = $2, eviction = $3"
        " where host = $1"
    )
    evictions = status.Evictions()
    async with db.connection() as connection:
        await add_peer(connection, "http://b", evictions=3)
        await add_peer(connection, "http://c")
        before = evictions.since_last_look(await status.look(db, now=NOW))
        await connection.execute(evict, "http://c", NOW, lost)

    (event,) = evictions.since_last_look(await status.look(db, now=NOW))

    assert before == []
    assert (event.event, event.timestamp) == ("OPLOG_PEER_EVICTED", NOW)
    assert event.payload == EvictedPeer(
        peer="http://c", table="pages", cause="cap_bytes", ops=7, bytes=70
    )
    assert evictions.since_last_look(await status.look(db, now=NOW)) == []
