"""Measures the tables and finds what holds their space."""

from datetime import datetime

from restante.core.space import Lag, Pin, States, TableSpace, WorkspaceSpace
from restante.ids import WorkspaceId
from restante.store import leaves, sql
from restante.store.database import Row, Tx

queries = sql.load("space")

_SHOWN = 20


async def tables(connection: Tx) -> list[TableSpace]:
    """Every table of ours with its leaves, the largest first."""
    return [TableSpace(**dict(row)) for row in await connection.fetch(queries.tables)]


async def live_bytes(connection: Tx) -> int:
    """The bytes of all files that are still there."""
    return await connection.fetchval(queries.live_bytes)


async def states(connection: Tx, *, now: datetime) -> States:
    """How many uploads are in each state."""
    row = await connection.fetchrow(queries.upload_states, now)
    assert row is not None  # noqa: S101 - an aggregate has one row
    return States(**dict(row))


async def workspaces_active(connection: Tx) -> int:
    """How many workspaces there are that were not removed."""
    return await connection.fetchval(queries.workspaces_active)


async def workspaces(connection: Tx, *, now: datetime) -> list[WorkspaceSpace]:
    """The workspaces with most bytes waiting."""
    rows = await connection.fetch(queries.states_by_workspace, now, _SHOWN)
    return [_workspace(row) for row in rows]


def _workspace(row: Row) -> WorkspaceSpace:
    states = States(row["never_fetched"], row["fetched"], row["acked"], row["expired"])
    return WorkspaceSpace(
        WorkspaceId(row["workspace_id"]), states, row["waiting_bytes"], row["waiting_since"]
    )


async def lags(connection: Tx) -> list[Lag]:
    """The workspaces furthest behind in their feeds."""
    rows = await connection.fetch(queries.lags, _SHOWN)
    return [Lag(WorkspaceId(row["workspace_id"]), row["behind"]) for row in rows]


async def pins(connection: Tx, *, now: datetime) -> list[Pin]:
    """Sessions, slots and workspaces that hold back what could be cleaned up."""
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
    found += [
        Pin(
            who=f"workspace {row['workspace_id']}",
            what=f"{row['files']} files that it does not fetch",
            way_out=f"connect it, remove it, or wait until {row['until']:%Y-%m-%d %H:%M}",
            bytes=row["bytes"],
            seconds=row["seconds"],
        )
        for row in await connection.fetch(queries.silent_workspaces, now)
    ]
    return found


async def lead_seconds(connection: Tx, *, now: datetime) -> dict[str, float]:
    """How far ahead of the clock each partitioned table has leaves."""
    by_name = {table.name: table for table in (leaves.CHUNKS, leaves.FEED)}
    lead = dict.fromkeys(by_name, 0.0)
    for row in await connection.fetch(queries.lead):
        name = row["table_name"]
        end = leaves.span_of(by_name[name], row["bounds"]).end
        lead[name] = max(lead[name], (end - now).total_seconds())
    return lead


async def take_sample(connection: Tx, total_bytes: int, *, now: datetime) -> None:
    """Remember how much there is, to see it grow."""
    await connection.execute(queries.take_sample, now, total_bytes)


async def growth_bytes_per_day(connection: Tx, *, now: datetime) -> float | None:
    """How fast the tables grow; None until the samples cover an hour."""
    return await connection.fetchval(queries.growth, now)


async def data_directory(connection: Tx) -> str | None:
    """Where Postgres keeps its files, if this role may know."""
    return await connection.fetchval(queries.data_directory)
