"""
Changes of tracked tables from Python, for applications that embed Restante.

They are plain statements on the caller's own connection and transaction, which the triggers capture
like those of any other writer.  A connection of any driver pool that speaks like asyncpg's will do;
its search path does not matter.  What the database refuses is raised as the driver raises it.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec

from restante.database import sql
from restante.database.pool import Connection, Tx
from restante.errors import BadRequest, TableNotTracked
from restante.oplog import tables, ulids
from restante.oplog.tables import TrackedTable
from restante.text import printable
from restante.wire.oplog import ActionName, Op

queries = sql.load("restante.oplog", "api")

Record = Mapping[str, Any]  # by the names of columns; values as JSON has them
Send = Callable[[Op], Awaitable[int]]


async def create(tx: Tx, table: str, records: Sequence[Record]) -> int:
    """
    Insert records; columns that one does not name have their defaults.  Returns how many.

    `table` is the name that peers use.  Raises TableNotTracked, and BadRequest for a column that
    the table does not have.
    """
    found = await _tracked(tx, table)
    count = 0
    for names, group in _by_columns(found, records).items():
        if not names:
            raise BadRequest("A record without any column cannot be created.")
        columns = ", ".join(map(sql.quoted, names))
        statement = queries.insert.format(relation=found.relation, columns=columns)
        count += _count(await tx.execute(statement, _json(group)))
    return count


async def update(tx: Tx, table: str, records: Sequence[Record]) -> int:
    """
    Set the named columns of the records with these keys; others stay.  Returns how many existed.

    Peers get the whole records.  Raises as `create`, and BadRequest for a record without its key.
    """
    found = await _tracked(tx, table)
    count = 0
    for names, group in _by_columns(found, records).items():
        _check_key(found, names)
        changes = ", ".join(
            f"{sql.quoted(name)} = r.{sql.quoted(name)}"
            for name in names
            if name not in found.key_columns
        )
        if not changes:
            raise BadRequest("An update names a column beside the key.")
        statement = queries.update.format(
            relation=found.relation, changes=changes, same_key=_same_key(found)
        )
        count += _count(await tx.execute(statement, _json(group)))
    return count


async def delete(tx: Tx, table: str, keys: Sequence[Record]) -> int:
    """Delete the records with these keys; returns how many existed.  Raises as `update`."""
    found = await _tracked(tx, table)
    count = 0
    for names, group in _by_columns(found, keys).items():
        _check_key(found, names)
        statement = queries.delete.format(relation=found.relation, same_key=_same_key(found))
        count += _count(await tx.execute(statement, _json(group)))
    return count


async def transient(
    connection: Connection,
    table: str,
    records: Sequence[Record],
    *,
    send: Send,
    action: ActionName = "update",
) -> int:
    """
    Tell the callbacks of the peers something that changes no table and is kept nowhere.

    Best effort: a peer that is away does not hear of it.  `send` is what hands an op to the peers,
    such as `Outbox.send_transient`; returns for how many peers it was queued.
    """
    found = await _tracked(connection, table)
    ulid = await connection.fetchval(queries.next_ulid)
    host = await tables.own_host(connection)
    data = [msgspec.Raw(msgspec.json.encode(record)) for record in records]
    return await send(Op(ulids.text_of(ulid), host, action, found.name, data, transient=True))


async def _tracked(connection: Connection, table: str) -> TrackedTable:
    found = await tables.find(connection, table)
    if found is None or found.is_missing:
        raise TableNotTracked(f"{printable(table)} is not tracked; run `restante oplog track`.")
    return found


def _by_columns(
    table: TrackedTable, records: Sequence[Record]
) -> dict[tuple[str, ...], list[Record]]:
    """The records by the columns that they name."""
    groups: dict[tuple[str, ...], list[Record]] = {}
    known = {column.name for column in table.columns if not column.is_generated}
    for record in records:
        if unknown := record.keys() - known:
            raise BadRequest(
                f"{printable(table.name)} has no column {printable(min(unknown))} to write to."
            )
        groups.setdefault(tuple(sorted(record)), []).append(record)
    return groups


def _check_key(table: TrackedTable, names: Sequence[str]) -> None:
    if missing := [name for name in table.key_columns if name not in names]:
        raise BadRequest(f"A record of {printable(table.name)} needs its key {missing[0]}.")


def _same_key(table: TrackedTable) -> str:
    return " and ".join(f"t.{sql.quoted(key)} = r.{sql.quoted(key)}" for key in table.key_columns)


def _json(records: Sequence[Record]) -> str:
    return msgspec.json.encode(records).decode()


def _count(status: str) -> int:
    """How many rows a statement changed, by what the server answered."""
    return int(status.rpartition(" ")[2])
