"""Measures the tables and finds what holds their space."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

import asyncpg

from restante.database import sql
from restante.database.pool import Row, Tx
from restante.ids import WorkspaceId
from restante.retention.account import Lag, Pin, States, WorkspaceSpace

queries = sql.load("restante.retention")

_SHOWN = 20
_SILENT_SHOWN = 5
_STATES = ("never_fetched", "fetched", "acked", "expired")
_SIZE_LOCK_TIMEOUT = "50ms"


async def sizes(connection: Tx, names: Sequence[str]) -> dict[str, int | None]:
    """
    What each table takes, as the filesystem sees it; 0 if it is gone.

    None for one that somebody has locked against everybody: it is hardly waited for, because who
    has locked it may be waiting for us.
    """
    try:
        return await _measured(connection, names)
    except asyncpg.LockNotAvailableError:
        return {name: await _size_if_free(connection, name) for name in names}


async def _size_if_free(connection: Tx, name: str) -> int | None:
    try:
        return (await _measured(connection, [name]))[name]
    except asyncpg.LockNotAvailableError:
        return None


async def _measured(connection: Tx, names: Sequence[str]) -> dict[str, int | None]:
    """In a transaction of its own, or a part of the one that is open: giving up ends no more."""
    async with connection.transaction():
        await connection.execute(queries.give_up_at_once, _SIZE_LOCK_TIMEOUT)
        rows = await connection.fetch(queries.sizes, names)
    return {row["name"]: row["bytes"] for row in rows}


@dataclass(frozen=True, slots=True)
class Relation:
    """One table or leaf by itself; None bytes: somebody has locked it."""

    name: str
    bytes: int | None
    dead_rows: int


async def relations(connection: Tx) -> list[Relation]:
    """Every table and every leaf of ours."""
    rows = await connection.fetch(queries.tables)
    measured = await sizes(connection, [row["name"] for row in rows])
    return [Relation(row["name"], measured[row["name"]], row["dead_rows"]) for row in rows]


@dataclass(frozen=True, slots=True)
class Uploads:
    """What one pass over the uploads has found."""

    states: States
    bytes: int
    live_bytes: Mapping[int, int]  # by the number of the bucket, from 1
    workspaces: Sequence[WorkspaceSpace]  # those with most bytes waiting
    silent: Sequence[Pin]  # workspaces that do not fetch


async def uploads(connection: Tx, buckets: Sequence[datetime], *, now: datetime) -> Uploads:
    """Count them in all, by workspace, and by bucket, whose beginnings come in order."""
    rows = await connection.fetch(queries.uploads, now, buckets, _SHOWN, _SILENT_SHOWN)
    in_buckets = [row for row in rows if row["is_bucket"]]
    of_workspaces = [row for row in rows if not row["is_bucket"]]
    silent = sorted(of_workspaces, key=lambda row: row["silent_place"])[:_SILENT_SHOWN]
    return Uploads(
        states=States(**{state: sum(row[state] for row in in_buckets) for state in _STATES}),
        bytes=sum(row["bytes"] for row in in_buckets),
        live_bytes={row["bucket_number"]: row["live_bytes"] for row in in_buckets},
        workspaces=[_workspace(row) for row in of_workspaces if row["place"] <= _SHOWN],
        silent=[_silent(row, now) for row in silent if row["silent_files"]],
    )


def _states(row: Row) -> States:
    return States(row["never_fetched"], row["fetched"], row["acked"], row["expired"])


def _workspace(row: Row) -> WorkspaceSpace:
    return WorkspaceSpace(
        WorkspaceId(row["workspace_id"]), _states(row), row["waiting_bytes"], row["waiting_since"]
    )


def _silent(row: Row, now: datetime) -> Pin:
    return Pin(
        who=f"workspace {row['workspace_id']}",
        what=f"{row['silent_files']} files that it does not fetch",
        way_out=f"connect it, remove it, or wait until {row['silent_until']:%Y-%m-%d %H:%M}",
        bytes=row["silent_bytes"],
        seconds=(now - row["silent_since"]).total_seconds(),
    )


async def workspaces_active(connection: Tx) -> int:
    """How many workspaces there are that were not removed."""
    return await connection.fetchval(queries.workspaces_active)


async def lags(connection: Tx) -> list[Lag]:
    """The workspaces furthest behind in their feeds."""
    rows = await connection.fetch(queries.lags, _SHOWN)
    return [Lag(WorkspaceId(row["workspace_id"]), row["behind"]) for row in rows]


async def pins(connection: Tx) -> list[Pin]:
    """Sessions and slots that hold back what could be cleaned up."""
    found = [
        Pin(
            who=f"process {row['pid']} ({row['who']})",
            what="an open transaction",
            way_out=f"end it, or: select pg_terminate_backend({row['pid']})",
            seconds=row["seconds"],
        )
        for row in await connection.fetch(queries.oldest_transactions)
    ]
    found += [
        Pin(
            who=f"replication slot {row['who']}",
            what="log kept for it" if row["active"] else "log kept for it, and nobody reads it",
            way_out="let its reader catch up, or drop the slot",
            bytes=row["bytes"],
        )
        for row in await connection.fetch(queries.slots)
    ]
    return found


async def take_sample(connection: Tx, total_bytes: int, *, now: datetime) -> None:
    """Remember how much there is, to see it grow."""
    await connection.execute(queries.take_sample, now, total_bytes)


async def growth_bytes_per_day(connection: Tx, *, now: datetime) -> float | None:
    """How fast the tables grow; None until the samples cover an hour."""
    return await connection.fetchval(queries.growth, now)


async def data_directory(connection: Tx) -> str | None:
    """Where Postgres keeps its files, if this role may know."""
    return await connection.fetchval(queries.data_directory)
