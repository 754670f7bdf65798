"""
One page of a snapshot, inside a transaction: lock the keys, compare, decide, write and log.

What changes is logged here too, under the record's version, so that those who read from us hear of
it.  What loses, and may not have been known to the server, is kept as a conflict.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import structlog

from restante.database import driver_errors, sql
from restante.database.pool import SCHEMA, Database, Row, Tx
from restante.errors import PeerUnreachable
from restante.oplog import positions, rules, tables, ulids
from restante.oplog.applying import conflicts, merge, parking, records
from restante.oplog.applying.boundary import Refusal
from restante.oplog.applying.conflicts import Conflict
from restante.oplog.applying.records import Change
from restante.oplog.positions import Position
from restante.oplog.rules import (
    Action,
    Newest,
    Outcome,
    OwnName,
    SnapshotPair,
    SnapshotSides,
    Verdict,
    Version,
)
from restante.oplog.snapshots import snapshot, taking_entries
from restante.oplog.snapshots.taking_entries import EARLIEST, Entry, Taking
from restante.oplog.tables import TrackedTable
from restante.wire import oplog as wire

log = structlog.get_logger()

queries = sql.load("restante.oplog.snapshots", "taking")

# Records under a version that is not their own are numbered from here, apart from those of the op.
_FIRST_NUMBER = 2**30
_AHEAD = "Its time is more than five minutes ahead: the clock of the node that made it is wrong."
# The two ways in which capture hashes the old row of a change.
_RECORD_HASH = "hash_record_extended({0}.*, 0)"
_TEXT_HASH = "hashtextextended(cast(({0}.*) as text), 0)"
_NOTHING_READ = Position(-1, -1, ulids.LOWEST, -1)


@dataclass(frozen=True, slots=True)
class _Own:
    """What we have of the same key."""

    key: str
    key_hash: int
    pair: SnapshotPair
    data: str | None
    hash: int | None


async def own_keys(db: Database, table: TrackedTable, after: str) -> list[str]:
    """The keys of our records beyond a key, as JSON objects; not all of them at once."""
    statement = queries.own_keys.format(
        names_and_keys=snapshot.key_object(table),
        relation=table.relation,
        above=snapshot.above(table, is_first=not after),
        keys=snapshot.keys_of(table),
    )
    async with db.transaction(readonly=True) as tx:
        await snapshot.make_canonical(tx, table)
        rows = await tx.fetch(statement, after or None, snapshot.MAX_ASKED_KEYS)
    return [row["key"] for row in rows]


class RecordFault(Exception):
    """Postgres refuses a record of the page; nothing may be committed."""

    def __init__(self, reason: str, sentence: str) -> None:
        super().__init__(sentence)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Taken:
    """What became of a page."""

    applied: int = 0
    refused: int = 0
    parked: int = 0
    conflicts: int = 0


async def take(tx: Tx, taking: Taking, sent: Sequence[wire.SnapshotEntry]) -> Taken:
    """
    Decide about each key, write what is taken, and log it.

    What the server's clock has made ahead of ours waits until then, as it does when it comes by
    the log.  Raises PeerUnreachable for a page that is unreadable, RecordFault, KeysTaken, and
    ParkedFull.
    """
    checked = taking_entries.checked(taking, sent)
    entries = [one for one in checked if not taking_entries.is_ahead(one, taking.now)]
    ahead = [one for one in checked if taking_entries.is_ahead(one, taking.now)]
    refused = len(sent) - len(checked)
    applied = claimed = found = 0
    try:
        if entries:
            applied, claimed, found = await _taken(tx, taking, entries)
    except driver_errors.FROM_THE_DRIVER as error:
        reason = driver_errors.record_fault(error, own_schema=SCHEMA)
        if reason is None:
            raise
        raise RecordFault(reason, driver_errors.full_reason(error)) from error
    await _park(tx, taking, ahead, Verdict.PARK_FUTURE, _AHEAD)
    return Taken(applied, refused + claimed, len(ahead), found)


async def park(tx: Tx, taking: Taking, sent: wire.SnapshotEntry, fault: RecordFault) -> Taken:
    """Keep an entry that Postgres refuses as an op that is tried again; raises ParkedFull."""
    await _park(tx, taking, taking_entries.checked(taking, [sent]), fault.reason, str(fault))
    return Taken(parked=1)


async def _park(
    tx: Tx, taking: Taking, entries: Sequence[Entry], reason: str, sentence: str
) -> None:
    waiting = [taking_entries.as_op(taking, one) for one in entries]
    parked = await parking.with_keys(tx, waiting, reason, sentence)
    await parking.park(tx, taking.peer.id, parked, now=taking.now)


async def _taken(tx: Tx, taking: Taking, entries: Sequence[Entry]) -> tuple[int, int, int]:
    """How many were changed, how many are not ours, and how many conflicts there were."""
    name = await tables.own_name(tx)
    # Before `begin`, after which only the tables' own schemas are searched.
    hosts = await _hosts(tx, taking, entries)
    await records.begin(tx, [taking.table])
    await tx.execute(queries.plan_by_index)
    keys = [entry.key for entry in entries]
    await records.lock(tx, taking.table, keys, for_delete=not taking.has_records)
    own = await _compared(tx, taking, entries, hosts[taking.progress.host])
    sides = await _sides(tx, taking)
    decided = [
        _Decided(entry, mine, rules.judge_snapshot(mine.pair, sides))
        for entry, mine in zip(entries, own, strict=True)
        if not _is_claimed(taking, name, mine.pair)
    ]
    applied = await _write(tx, taking, decided, hosts)
    found = [conflict for one in decided if (conflict := _conflict(one, sides))]
    new_conflicts = await conflicts.add(tx, taking.table.name, found, now=taking.now)
    versions = [one.entry.newest.version.ulid for one in decided if one.entry.newest]
    if versions:
        await records.raise_clock(tx, max(versions))
    await tx.execute(queries.check_constraints)
    claimed = len(entries) - len(decided)
    if claimed:
        log.warning(
            "ops_refused",
            peer=taking.peer.host,
            table=taking.table.name,
            records={Refusal.OWN_NAME: claimed},
        )
    return applied, claimed, new_conflicts


def _is_claimed(taking: Taking, name: OwnName, pair: SnapshotPair) -> bool:
    """
    Whether the server has a change in our name that we did not make, or have lost.

    A repair takes it: the operator knows why it is there.
    """
    if pair.server is None or taking.progress.is_repair:
        return False
    version = pair.server.version
    return (
        name.is_claimed(
            version,
            is_approximate=pair.server.is_approximate,
            unlogged=taking.table.unlogged_ulid,
        )
        and version.ulid > taking.table.floor
        and (pair.own is None or version > pair.own.version)
    )


async def _sides(tx: Tx, taking: Taking) -> SnapshotSides:
    """Read after our newest ops: what was dropped before them is below this floor."""
    row = await tx.fetchrow(snapshot.queries.marks, taking.table.id)
    if row is None:
        return taking.sides
    trimmed = positions.parsed(row["trimmed"])
    return replace(taking, table=replace(taking.table, floor=row["floor"], trimmed=trimmed)).sides


async def _compared(tx: Tx, taking: Taking, entries: Sequence[Entry], server: int) -> list[_Own]:
    table, read = taking.table, taking.progress.server_cursor or _NOTHING_READ
    row_hash = _RECORD_HASH if await tx.fetchval(queries.hashes_records, table.id) else _TEXT_HASH
    columns = tuple(sorted(taking.columns))
    statement = _statement(table.relation, table.log, table.key_columns, columns, row_hash)
    data = "[" + ",".join(entry.data for entry in entries) + "]"
    rows = await tx.fetch(statement, data, read.era, read.xid, read.ulid, read.n, server)
    own = [_own(row, entry) for row, entry in zip(rows, entries, strict=True)]
    if len({mine.key for mine in own}) < len(own):
        raise PeerUnreachable(f"Two of its keys of {table.name} are one key here.")
    return own


def _own(row: Row, entry: Entry) -> _Own:
    newest = None
    if row["ulid"] is not None:
        version = Version(row["ulid"], row["host"])
        newest = Newest(version, row["is_delete"], row["approximate"])
    has_record = row["has_record"]
    if entry.has_record and has_record:
        is_same = row["is_same_record"]
    else:
        is_same = entry.has_record == has_record
    pair = SnapshotPair(
        server=entry.newest,
        own=newest,
        server_has_record=entry.has_record,
        own_has_record=has_record,
        is_same=is_same,
        has_unsent=row["unsent_action"] is not None,
        is_unsent_on_server_record=_is_on_server_record(row, entry),
    )
    return _Own(
        row["key"],
        row["key_hash"],
        pair,
        row["own"] if has_record else None,
        row["own_hash"] if has_record else None,
    )


def _is_on_server_record(row: Row, entry: Entry) -> bool:
    """Whether our first change that the server has not read was made to what the server has."""
    old_hash = row["unsent_old_hash"]
    if not entry.has_record:
        return row["unsent_action"] == "c" and old_hash is None
    return old_hash is not None and old_hash == row["server_hash"]


@lru_cache(maxsize=1000)
def _statement(
    relation: str, log: str, keys: tuple[str, ...], columns: tuple[str, ...], row_hash: str
) -> str:
    ours, theirs = (
        f"row({', '.join(f'{alias}.{sql.quoted(name)}' for name in columns)})::text"
        for alias in ("t", "s")
    )
    quoted = [sql.quoted(name) for name in keys]
    values = ", ".join(f"s.{key}" for key in quoted)
    return queries.compare.format(
        relation=relation,
        log=log,
        first_key=quoted[0],
        same_columns=f"{ours} = {theirs}",
        own_hash=row_hash.format("t"),
        server_hash=row_hash.format("s"),
        server_keys=values,
        same_key=" and ".join(f"t.{key} = s.{key}" for key in quoted),
        newest=snapshot.queries.newest.format(log=log, values=values),
    )


@dataclass(frozen=True, slots=True)
class _Decided:
    entry: Entry
    own: _Own
    verdict: rules.SnapshotVerdict

    @property
    def is_taken(self) -> bool:
        return self.verdict.outcome is Outcome.TAKE

    @property
    def action(self) -> Action:
        """What is logged: the state of the record afterwards."""
        stays = self.entry.has_record if self.is_taken else self.own.data is not None
        if not stays:
            return "d"
        return "u" if self.own.data is not None else "c"

    @property
    def data(self) -> str:
        if self.action == "d":
            return self.entry.key
        return self.entry.data if self.is_taken else self.own.data or ""


async def _hosts(tx: Tx, taking: Taking, entries: Sequence[Entry]) -> dict[str, int]:
    """The numbers of all hosts under which something may be logged; raises TooManyHosts."""
    named = {entry.newest.version.origin for entry in entries if entry.newest}
    every = sorted(named | {taking.sides.server, taking.sides.taker})
    return {host: await tables.host_id(tx, host, peer_id=taking.peer.id) for host in every}


async def _write(tx: Tx, taking: Taking, decided: Sequence[_Decided], hosts: dict[str, int]) -> int:
    """How many records were changed."""
    written, logged = list[Change](), list[Change]()
    for number, one in enumerate(decided, _FIRST_NUMBER + taking.progress.records):
        change = _change(taking, one, number, hosts)
        if one.is_taken and not one.own.pair.is_same:
            written.append(change)
        if one.verdict.version:
            logged.append(change)
    await records.write(tx, taking.table, written)
    if logged:
        await records.append(tx, taking.table, logged)
        await _settle(tx, taking.table, logged, {number: host for host, number in hosts.items()})
    return len(written)


async def _settle(
    tx: Tx, table: TrackedTable, logged: Sequence[Change], hosts: dict[int, str]
) -> None:
    """Forget what is parked and older, and note deletes that may have missed an open insert."""
    await tx.fetchval(
        merge.queries.remove_older_parked,
        table.name,
        [one.key_hash for one in logged],
        [one.key for one in logged],
        [one.ulid for one in logged],
        [hosts[one.origin] for one in logged],
    )
    absent = [one for one in logged if one.action == "d" and not one.has_record]
    if absent:
        await tx.execute(
            merge.queries.note_unsettled,
            table.id,
            [one.key_hash for one in absent],
            [one.key for one in absent],
            [one.data for one in absent],
        )


def _change(taking: Taking, one: _Decided, number: int, hosts: dict[str, int]) -> Change:
    version, server = one.verdict.version, one.entry.newest
    is_its_own = server is not None and version == server.version
    return Change(
        one.action,
        one.data,
        taking.columns,
        one.own.key,
        one.own.key_hash,
        one.own.data is not None,
        max(version.ulid, EARLIEST) if version else ulids.LOWEST,
        one.entry.n if is_its_own else number,
        hosts[version.origin] if version else 0,
        one.verdict.is_approximate,
        one.own.hash,
    )


def _conflict(one: _Decided, sides: SnapshotSides) -> Conflict | None:
    """Both versions, if the decision may have lost one that somebody made."""
    pair = one.own.pair
    if not one.verdict.reports or (pair.own is None and not pair.own_has_record):
        return None
    theirs = pair.server.version if pair.server else Version(sides.server_floor, sides.server)
    ours = pair.own.version if pair.own else Version(sides.own_floor, sides.taker)
    server_data = one.entry.data if one.entry.has_record else None
    if one.is_taken:
        kept = one.verdict.version or theirs
        return Conflict(one.own.key, "approximate", kept, server_data, ours, one.own.data)
    return Conflict(one.own.key, "approximate", ours, one.own.data, theirs, server_data)
