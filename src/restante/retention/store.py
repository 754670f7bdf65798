"""Sizes of the tables, what keeps their space, growth, and the servers' retention settings."""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from types import MappingProxyType

import msgspec

from restante.database import driver_errors, partitions, sql
from restante.database.pool import Connection, Tx
from restante.text import printable
from restante.wire import PinView

queries = sql.load("restante.retention")

# A shorter transaction keeps hardly any space.
_LONG_TRANSACTION = timedelta(minutes=1)


@dataclass(frozen=True, slots=True)
class RetentionSettings:
    """How long the servers of this database keep acknowledged files and feed rows."""

    ack: timedelta
    feed: timedelta


async def save_settings(connection: Connection, settings: RetentionSettings) -> None:
    """Record the server's settings, for commands that run beside it."""
    await connection.execute(
        queries.save_settings, settings.ack.total_seconds(), settings.feed.total_seconds()
    )


async def saved_settings(connection: Connection) -> RetentionSettings | None:
    """The servers' settings; None if no server has started yet."""
    row = await connection.fetchrow(queries.saved_settings)
    if row is None:
        return None
    return RetentionSettings(
        timedelta(seconds=row["ack_seconds"]), timedelta(seconds=row["feed_seconds"])
    )


@dataclass(frozen=True, slots=True)
class Relation:
    """One table or partition by itself; None bytes: another session has it locked."""

    name: str
    bytes: int | None
    dead_rows: int


async def relations(connection: Connection) -> list[Relation]:
    """Every table and partition in our schema."""
    rows = await connection.fetch(queries.relations)
    measured = await partitions.sizes(connection, [row["name"] for row in rows])
    return [Relation(row["name"], measured[row["name"]], row["dead_rows"]) for row in rows]


async def pins(connection: Connection, *, open_for: timedelta = _LONG_TRANSACTION) -> list[PinView]:
    """Long transactions and replication slots, which keep Postgres from cleaning up."""
    found = [
        PinView(
            who=f"process {row['pid']} ({row['who']})",
            what="an open transaction",
            way_out=f"end it, or: select pg_terminate_backend({row['pid']})",
            bytes=0,
            seconds=row["seconds"],
        )
        for row in await connection.fetch(queries.oldest_transactions, open_for)
    ]
    found += [
        PinView(
            who=f"replication slot {row['who']}",
            what="WAL kept for it" if row["active"] else "WAL kept for it, and nobody reads it",
            way_out="let its reader catch up, or drop the slot",
            bytes=row["bytes"],
            seconds=0.0,
        )
        for row in await connection.fetch(queries.slots)
    ]
    return found


async def in_the_way(connection: Connection, names: Sequence[str]) -> str:
    """Who has a lock on one of these tables, or an old snapshot; empty if nobody is seen."""
    rows = await connection.fetch(queries.in_the_way, names)
    return ", ".join(
        f"{row['who']} ({printable(row['what'])}) since {row['since']:%Y-%m-%d %H:%M:%S}"
        for row in rows
        if row["since"]
    )


async def clock(connection: Connection) -> datetime:
    """The time by the database's clock."""
    return await connection.fetchval(queries.clock)


async def take_sample(
    connection: Connection,
    total_bytes: int,
    by_table: Mapping[str, int] = MappingProxyType({}),
    *,
    now: datetime,
) -> None:
    """Record the total size and that of each table, to measure growth."""
    sizes = msgspec.json.encode(dict(by_table)).decode()
    await connection.execute(queries.take_sample, now, total_bytes, sizes)


async def count_samples(connection: Connection, *, taken_before: datetime) -> int:
    """How many samples are older than that."""
    return await connection.fetchval(queries.count_samples, taken_before)


async def delete_samples(connection: Connection, *, taken_before: datetime, limit: int) -> int:
    """Delete one batch of old samples; returns how many."""
    return await connection.fetchval(queries.delete_samples, taken_before, limit)


async def growth_bytes_per_day(connection: Connection, *, now: datetime) -> float | None:
    """How fast the tables grow; None until the samples cover an hour."""
    return await connection.fetchval(queries.growth, now)


async def growth_by_table(connection: Connection, *, now: datetime) -> dict[str, float]:
    """The same for each table whose size is in the samples."""
    rows = await connection.fetch(queries.growth_by_table, now)
    return {row["name"]: row["bytes_per_day"] for row in rows}


async def directories(connection: Connection) -> list[str]:
    """Where Postgres keeps our files and its WAL, if it runs here and this role may know."""
    row = await connection.fetchrow(queries.directories)
    if row is None or not _runs_here(row["pid"]):
        return []
    data, tablespace = row["data_directory"], row["tablespace"]
    return [data, f"{data}/pg_wal", *([tablespace] if tablespace else [])]


def _runs_here(pid: int) -> bool:
    """Whether there is such a process: at the end of a tunnel, or in a container, there is none."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


async def probe(tx: Tx) -> None:
    """Write a temporary file of 16 MiB and remove it; raises DatabaseFull if there is no room."""
    await tx.execute(queries.keep_little_in_memory)
    await tx.execute(queries.probe)


async def checkpoint(connection: Connection) -> None:
    """
    Let Postgres write a checkpoint, after which it removes WAL; nothing if this role may not.

    One that fails for lack of space is repeated by Postgres itself.
    """
    if await connection.fetchval(queries.may_checkpoint):
        with suppress(driver_errors.INTERNAL):
            await connection.execute(queries.checkpoint)
