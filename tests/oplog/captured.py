"""Tables whose changes are captured, what was logged of them, and the log replayed."""

import json
from datetime import UTC, datetime
from typing import Any, NamedTuple
from uuid import UUID

from restante.database.pool import Connection, Database
from restante.oplog.tracking import capture
from restante.oplog.tracking.capture import Started, Wanted

OWN = "https://own.example"


async def track(db: Database, table: str = "pages", **wanted: Any) -> Started:
    """Track a table, as the command does."""
    return await capture.track(db, Wanted(table, **wanted), host=OWN, now=datetime.now(UTC))


class Logged(NamedTuple):
    """One record in the log."""

    action: str
    key: Any
    data: Any
    ulid: UUID
    n: int
    old_hash: int | None
    host: str


async def log_of(connection: Connection, table: str = "pages") -> list[Logged]:
    """What was logged of a table, in the order of positions."""
    rows = await connection.fetch(
        "select action::text, key, data::text, ulid, n, old_hash, host"
        "  from restante.ops join restante.op_hosts on op_hosts.id = origin"
        " where table_id = (select id from restante.op_tables where name = $1)"
        " order by era, xid, ulid, n",
        table,
    )
    return [Logged(row[0], json.loads(row[1]), json.loads(row[2]), *row[3:]) for row in rows]


async def changes_of(connection: Connection, table: str = "pages") -> list[tuple[str, Any]]:
    """Action and data of each record in the log."""
    return [(one.action, one.data) for one in await log_of(connection, table)]


async def records_of(connection: Connection, table: str = "public.pages") -> list[Any]:
    """The contents of a table, as JSON objects."""
    rows = await connection.fetch(f"select row_to_json(t.*)::text from {table} as t")
    return sorted((json.loads(row[0]) for row in rows), key=_sorted_text)


def _sorted_text(record: Any) -> str:
    return json.dumps(record, sort_keys=True)


async def replayed(connection: Connection, table: str = "pages") -> list[Any]:
    """The contents that a peer has: the newest op of each key, by ULID alone."""
    newest: dict[str, Logged] = {}
    for one in sorted(await log_of(connection, table), key=lambda one: one.ulid):
        newest[json.dumps(one.key)] = one
    return sorted((one.data for one in newest.values() if one.action != "d"), key=_sorted_text)
