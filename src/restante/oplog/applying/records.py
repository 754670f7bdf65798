"""
Tracked tables as an applier sees them: lock records, read their versions, write them, log them.

Every function works on many records of one table with a fixed number of statements.  Records stay
JSON text, and Postgres turns them into rows and computes their keys.  Names of the user's tables
and columns appear in statements only quoted; everything else is a parameter.

The order of use is `begin`, `lock`, `facts`, a decision, `write` and `append`, `raise_clock`.  The
facts come from a statement that begins after the locks are held, because a change that held a lock
until then is visible only to such a statement.  Records of which nothing is known here need neither
lock nor facts: `create` looks, writes and logs.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from uuid import UUID

import msgspec
from msgspec import Raw

from restante.database import sql
from restante.database.pool import Tx
from restante.oplog import ulids
from restante.oplog.applying import statements
from restante.oplog.applying.statements import target_of
from restante.oplog.rules import Action, Newest, Version
from restante.oplog.tables import TrackedTable

queries = sql.load("restante.oplog.applying", "records")

# Below Postgres's default deadlock_timeout: in a deadlock with the application we are the ones
# that give up.
LOCK_TIMEOUT_MILLISECONDS = 800


class KeysTaken(Exception):
    """A record that was not there is there now: look again.  Nothing may be committed."""


@dataclass(frozen=True, slots=True)
class Fact:
    """What this node has of one key."""

    key: str
    key_hash: int
    newest: Newest | None
    has_record: bool


@dataclass(frozen=True, slots=True)
class Change:
    """
    One record to write, to log, or both.

    `columns` are the names that its data has: others keep their value or get their default.
    """

    action: Action
    data: str
    columns: frozenset[str]
    key: str
    key_hash: int
    has_record: bool
    ulid: UUID
    n: int
    origin: int  # the host's number
    is_approximate: bool = False
    old_hash: int | None = None


@dataclass(frozen=True, slots=True)
class NewOp:
    """An op that creates records, all with the same columns."""

    ulid: UUID
    origin: int  # the host's number
    is_approximate: bool
    columns: frozenset[str]
    data: Sequence[str]


def key_of(table: TrackedTable, fields: Mapping[str, Raw]) -> str | None:
    """The JSON object of a record's key columns; None if one of them is missing or null."""
    parts: list[str] = []
    for column, name in zip(table.key_columns, _names(table.key_columns), strict=True):
        value = fields.get(column)
        if value is None or bytes(value) == b"null":
            return None
        parts.append(f"{name}:{bytes(value).decode()}")
    return "{" + ",".join(parts) + "}"


@lru_cache(maxsize=1000)
def _names(columns: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(msgspec.json.encode(column).decode() for column in columns)


async def begin(tx: Tx, tables: Iterable[TrackedTable]) -> None:
    """
    Make the settings of a transaction that applies changes to these tables.

    Waits for locks are short, and values have one text form only.  The tables' schemas are searched
    as their triggers expect it.  The transaction has its id from now on, so that the horizon stays
    below it.
    """
    schemas = dict.fromkeys(table.schema_name for table in tables)
    path = ", ".join(map(sql.quoted, dict.fromkeys([*schemas, "public", "pg_temp"])))
    await tx.execute(queries.begin, path, str(LOCK_TIMEOUT_MILLISECONDS))


async def lock(
    tx: Tx, table: TrackedTable, keys: Sequence[str], *, for_delete: bool = False
) -> None:
    """
    Lock the records that exist, in the order of their keys.

    Records that are not deleted stay open for foreign keys that refer to them.
    """
    await tx.fetchval(statements.of_keys(target_of(table)).lock[for_delete], _array(keys))


async def facts(tx: Tx, table: TrackedTable, keys: Sequence[str]) -> list[Fact]:
    """
    The canonical key, the newest op and the presence of each record, in the order of the keys.

    Of two ops with one ULID the one of the greater host is the newest.
    """
    found: dict[int, Fact] = {}
    for row in await tx.fetch(statements.of_keys(target_of(table)).facts, _array(keys)):
        at, key, key_hash, ulid, host, is_delete, is_approximate, has_record = row
        newest = None
        if ulid is not None:
            newest = Newest(Version(ulid, host), is_delete, is_approximate)
            other = found.get(at)
            if other and other.newest and other.newest.version > newest.version:
                continue
        found[at] = Fact(key, key_hash, newest, has_record)
    return [found[at] for at in range(1, len(keys) + 1)]


async def write(tx: Tx, table: TrackedTable, changes: Sequence[Change]) -> None:
    """
    Change the table; at most one change per key, with the records locked.

    Raises KeysTaken if a record that was not there has been inserted meanwhile.
    """
    if not changes:
        return
    target = target_of(table)
    await delete(tx, table, [one.data for one in changes if one.action == "d" and one.has_record])
    await _capture_nothing_of(tx, table)
    for columns, data in _by_columns(changes, has_record=True):
        if statement := statements.update(target, columns):
            await tx.execute(statement, _array(data))
    for columns, data in _by_columns(changes, has_record=False):
        status = await tx.execute(statements.insert(target, columns), _array(data))
        if status != f"INSERT 0 {len(data)}":
            raise KeysTaken


async def create(tx: Tx, table: TrackedTable, ops: Sequence[NewOp]) -> bool:
    """
    Write and log records that are new here, by one statement; all ops have the same columns.

    Returns False, and has done nothing, if the log may have an op of one of the keys.  If one of
    the records is there, or two of them have the same key, Postgres refuses them.  Raises KeysTaken
    if a trigger has kept one out.
    """
    used, numbers = Counter[UUID](), list[int]()
    for op in ops:
        first = used[op.ulid]
        used[op.ulid] += len(op.data)
        numbers += range(first, used[op.ulid])
    await _capture_nothing_of(tx, table)
    written = await tx.fetchval(
        statements.create(target_of(table), ops[0].columns),
        _array([one for op in ops for one in op.data]),
        ",".join([str(at) for at, op in enumerate(ops, 1) for _ in op.data]),
        ",".join(map(str, numbers)),
        table.id,
        [op.ulid for op in ops],
        [op.origin for op in ops],
        [op.is_approximate for op in ops],
    )
    if written is not None and written != len(numbers):
        raise KeysTaken
    return written is not None


async def delete(tx: Tx, table: TrackedTable, keys: Sequence[str]) -> None:
    """Delete the records with these keys, which are JSON objects."""
    if keys:
        await _capture_nothing_of(tx, table)
        await tx.execute(statements.of_keys(target_of(table)).delete, _array(keys))


async def _capture_nothing_of(tx: Tx, table: TrackedTable) -> None:
    """
    Keep the table's own capture silent: what is written to it now is logged by `append`.

    What that causes in other tracked tables, by a cascade or a trigger, is captured as a change of
    this node.  Otherwise it would stay unknown to the peers, which may have caused something else.
    """
    await tx.execute(queries.capture_nothing_of, str(table.id))


def _by_columns(
    changes: Sequence[Change], *, has_record: bool
) -> Iterable[tuple[frozenset[str], list[str]]]:
    """The records to update or to insert: those with the same columns take one statement."""
    groups: defaultdict[frozenset[str], list[str]] = defaultdict(list)
    for change in changes:
        if change.action != "d" and change.has_record is has_record:
            groups[change.columns].append(change.data)
    return groups.items()


async def append(tx: Tx, table: TrackedTable, changes: Sequence[Change]) -> None:
    """Log the changes, as part of this transaction."""
    heads: dict[tuple[UUID, int, Action, bool], int] = {}
    of: list[int] = []
    for one in changes:
        head = (one.ulid, one.origin, one.action, one.is_approximate)
        of.append(heads.setdefault(head, len(heads) + 1))
    await tx.execute(
        queries.append,
        table.id,
        [ulid for ulid, _, _, _ in heads],
        [origin for _, origin, _, _ in heads],
        [action for _, _, action, _ in heads],
        [is_approximate for _, _, _, is_approximate in heads],
        ",".join(map(str, of)),
        ",".join([str(one.n) for one in changes]),
        ",".join([str(one.key_hash) for one in changes]),
        ",".join(["" if one.old_hash is None else str(one.old_hash) for one in changes]),
        msgspec.json.encode([one.key for one in changes]).decode(),
        _array([one.data for one in changes]),
    )


async def raise_clock(tx: Tx, ulid: UUID) -> None:
    """From now on this node's changes are newer than the ULID."""
    await tx.fetchval(queries.raise_clock, ulids.tick_above(ulid))


def _array(records: Sequence[str]) -> str:
    """One text for all: the driver is several times as slow with an array of values."""
    return "[" + ",".join(records) + "]"
