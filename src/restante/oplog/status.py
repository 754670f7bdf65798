"""
The state of the op log: its tables, its peers in both directions, and what holds it up.

Cheap enough to be asked for every few seconds: counts stop at a limit, sizes come from the
catalogue.
"""

from collections.abc import Mapping
from datetime import datetime

import msgspec

from restante.database import sql
from restante.database.pool import Connection, Database, Row
from restante.oplog import positions, tables, ulids
from restante.wire import EvictedPeer, NodeEvent
from restante.wire.oplog_status import (
    Eviction,
    HorizonHolder,
    Kept,
    Lag,
    LogTable,
    OplogStatus,
    PeerStatus,
    SnapshotStatus,
)

queries = sql.load("restante.oplog", "status")

_eviction = msgspec.json.Decoder(Eviction)

MAX_COUNTED = 10_000
_MOST_KEPT_COUNTED = 100_000


async def look(db: Database, *, now: datetime) -> OplogStatus:
    """Everything, read without a transaction: each part is of its own moment."""
    async with db.connection() as connection:
        conflicts = await connection.fetchrow(queries.conflicts)
        holder = await connection.fetchrow(queries.horizon_holder)
        kept = await connection.fetchrow(queries.kept, _MOST_KEPT_COUNTED)
        assert conflicts is not None  # noqa: S101 - a count
        return OplogStatus(
            host=await tables.own_host(connection),
            clock_ahead_seconds=await _clock_ahead(connection, now=now),
            tables=[_table(row) for row in await connection.fetch(queries.tables, now)],
            peers=[
                await _peer(connection, row, now=now)
                for row in await connection.fetch(queries.peers)
            ],
            snapshots=[
                SnapshotStatus(**dict(row)) for row in await connection.fetch(queries.snapshots)
            ],
            parked={row["reason"]: row["ops"] for row in await connection.fetch(queries.parked)},
            conflicts=conflicts["kept"],
            conflicts_since=conflicts["since"],
            horizon=HorizonHolder(**dict(holder)) if holder else None,
            kept=Kept(**dict(kept)) if kept else None,
        )


async def _clock_ahead(connection: Connection, *, now: datetime) -> float:
    ticks = await connection.fetchval(queries.clock)
    milliseconds = ulids.milliseconds_of_tick(ticks)
    return round(max(milliseconds / 1000 - now.timestamp(), 0.0), 3)


def _table(row: Row) -> LogTable:
    has_floor = row["floor"] != ulids.LOWEST
    return LogTable(
        name=row["name"],
        state=row["state"],
        ops=row["ops"],
        bytes=row["bytes"],
        floor=ulids.text_of(row["floor"]) if has_floor else "",
        floor_at=ulids.moment_of(row["floor"]) if has_floor else None,
        partitions=row["partitions"],
        ahead_seconds=row["ahead_seconds"],
        dropped_ops=row["dropped_ops"],
        dropped_bytes=row["dropped_bytes"],
        dropped_at=row["dropped_at"],
        dormant_ops=row["dormant_ops"],
    )


async def _peer(connection: Connection, row: Row, *, now: datetime) -> PeerStatus:
    behind = None
    if row["remote_lag_ops"] is not None:
        count = row["remote_lag_ops"]
        behind = Lag(
            count,
            row["remote_lag_bytes"] or 0,
            row["remote_lag_seconds"] or 0.0,
            is_more=count >= MAX_COUNTED,
        )
    same = {name: row[name] for name in PeerStatus.__struct_fields__ if name in row}
    if row["eviction"] is not None:
        same["eviction"] = _eviction.decode(row["eviction"])
    visible = row["tables"]
    waiting = await waiting_for(connection, visible, row["confirmed"], now=now)
    same["refused_by"] = msgspec.json.decode(row["refused_by"], type=dict[str, int])
    return PeerStatus(**same, behind=behind, waiting=waiting)


async def waiting_for(
    connection: Connection, visible: list[str] | None, confirmed: str, *, now: datetime
) -> Lag:
    """What of our log a peer has not confirmed, of the tables that it may see."""
    position = positions.parsed(confirmed) or positions.START
    ids = await connection.fetchval(queries.visible_tables, visible)
    row = await connection.fetchrow(
        queries.waiting,
        ids or [],
        position.era,
        position.xid,
        position.ulid,
        position.n,
        now,
        MAX_COUNTED + 1,
    )
    assert row is not None  # noqa: S101 - a count
    return Lag(
        min(row["ops"], MAX_COUNTED),
        row["bytes"],
        round(max(row["seconds"], 0.0), 3),
        is_more=row["ops"] > MAX_COUNTED,
    )


async def not_read_by(connection: Connection, table: str, *, now: datetime) -> list[str]:
    """The peers that may see a table, and have not confirmed all that is logged of it."""
    return [
        row["host"]
        for row in await connection.fetch(queries.peers)
        if (row["tables"] is None or table in row["tables"])
        and (await waiting_for(connection, [table], row["confirmed"], now=now)).ops
    ]


async def waiting_for_peer(connection: Connection, peer_id: int, *, now: datetime) -> Lag | None:
    """The same for the peer with this number; None if it was removed."""
    row = await connection.fetchrow(queries.confirmed_by, peer_id)
    if row is None:
        return None
    return await waiting_for(connection, row["tables"], row["confirmed"], now=now)


class Appended:
    """How many rows the log got, also from writers that are not ours, since the first look."""

    def __init__(self) -> None:
        self._seen: dict[int, int] | None = None

    async def since_last_look(self, connection: Connection) -> int:
        """Partitions that were dropped meanwhile take a few rows with them that are not counted."""
        rows = await connection.fetch(queries.appended)
        now = {row["partition"]: row["rows"] for row in rows}
        before, self._seen = self._seen, now
        return 0 if before is None else _grown(before, now)


def _grown(before: Mapping[int, int], now: Mapping[int, int]) -> int:
    """Statistics start over after a crash, and then count from 0."""
    return sum(
        rows - before.get(partition, 0) if rows >= before.get(partition, 0) else rows
        for partition, rows in now.items()
    )


class Evictions:
    """The peers that were evicted, by whichever server, since the first look."""

    def __init__(self) -> None:
        self._seen: dict[str, int] | None = None

    def since_last_look(self, found: OplogStatus) -> list[NodeEvent]:
        """One event for each of them."""
        before, self._seen = self._seen, {peer.host: peer.evictions for peer in found.peers}
        if before is None:
            return []
        return [_evicted(one) for one in found.peers if one.evictions > before.get(one.host, 0)]


def _evicted(peer: PeerStatus) -> NodeEvent:
    lost = peer.eviction or Eviction(table="", cause="", ops=0, bytes=0)
    payload = EvictedPeer(peer=peer.host, **msgspec.structs.asdict(lost))
    # It may have returned meanwhile.
    moment = peer.evicted_at or peer.confirmed_at
    assert moment is not None  # noqa: S101 - one of them is set then
    return NodeEvent("OPLOG_PEER_EVICTED", "", moment, payload)


async def note_look(
    connection: Connection,
    peer_id: int,
    behind: Lag,
    schema_differences: list[str],
    *,
    now: datetime,
) -> None:
    """Store what a peer said of us: how far we are behind it, and how the tables differ."""
    await connection.execute(
        queries.note_look,
        peer_id,
        behind.ops,
        behind.bytes,
        behind.seconds,
        now,
        schema_differences,
    )
