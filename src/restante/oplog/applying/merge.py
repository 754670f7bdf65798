"""
Merges incoming records into the tracked tables and their log, inside one transaction.

The records are locked, then the facts are read by a fresh statement, then `rules` decides about
each, and what wins is written and logged.  The order matters: a newest op that is read before the
lock may be outdated when the lock is held.  A delete of a record that is not there has nothing to
lock: it is noted, and looked at again later (`settle`).
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from itertools import groupby
from uuid import UUID

from restante.database import sql
from restante.database.pool import Tx
from restante.oplog import positions, rules
from restante.oplog.applying import conflicts, losses, records
from restante.oplog.applying.incoming import Context, Head, Met, Record
from restante.oplog.applying.records import Change, KeysTaken, NewOp
from restante.oplog.positions import Position
from restante.oplog.rules import Incoming, Newest, Verdict
from restante.oplog.tables import TrackedTable

queries = sql.load("restante.oplog.applying", "merge")


@dataclass(slots=True)
class Merged:
    """What became of the records."""

    applied: list[Record] = field(default_factory=list[Record])
    superseded: int = 0
    conflicts: int = 0
    refused: int = 0  # in our name, and not ours
    parked: list[tuple[Met, Verdict]] = field(default_factory=list[tuple[Met, Verdict]])


class MustWait(Exception):
    """The sender must take its snapshot of us before this op can be judged."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.index = index


async def merge(
    tx: Tx, incoming: Sequence[Record], context: Context, *, may_be_new: bool = False
) -> Merged:
    """
    Apply what wins, and log it; conflicts are kept, and what must be parked is returned.

    `may_be_new`: try first whether nothing is known here of any record, which takes less time.  If
    one is there without an op, Postgres refuses it; the caller tries again without this.
    Raises MustWait or KeysTaken; nothing may be committed then.
    """
    groups = await _in_order(tx, _by_table(incoming))
    await records.begin(tx, [group.table for group in groups])
    if may_be_new and len(groups) == 1 and groups[0].creates:
        created = await _created(tx, groups[0], context)
        if created is not None:
            return created
    for group in groups:
        if not group.creates:
            await records.lock(tx, group.table, group.keys, for_delete=group.deletes)
    met = [await _met(tx, group) for group in groups]
    floors = await _floors(tx, groups)
    merged, winners = Merged(), list[_Won]()
    for group, some in zip(groups, met, strict=True):
        table, floor = group.table, floors[group.table.id]
        won, lost = _sorted_out(some, _verdicts(some, floor, context), merged)
        if won:
            winners.append(_Won(table, won, floor.has_parked))
        found = [
            *await losses.unseen(tx, table, lost[Verdict.SUPERSEDED], floor.floor, context),
            *await losses.reported(tx, table, lost[Verdict.REPORT]),
            *await losses.overwritten(tx, table, won, context),
        ]
        merged.conflicts += await conflicts.add(tx, table.name, found, now=context.now)
    await _write(tx, winners, merged)
    # Deferred constraints would fail at the commit, where nobody can tell which record it was.
    await tx.execute(queries.check_constraints)
    return merged


@dataclass(frozen=True, slots=True)
class _Group:
    """The records of one table."""

    table: TrackedTable
    records: list[Record]

    @property
    def keys(self) -> list[str]:
        return [record.key for record in self.records]

    @property
    def creates(self) -> bool:
        """Whether the sender knows its records as new: then there is likely nothing to lock."""
        return all(record.head.action == "c" for record in self.records)

    @property
    def deletes(self) -> bool:
        return any(record.head.action == "d" for record in self.records)


@dataclass(frozen=True, slots=True)
class _Won:
    """The records of one table that are applied, one per key."""

    table: TrackedTable
    met: list[Met]
    has_parked: bool  # ops of the table are parked


def _by_table(incoming: Iterable[Record]) -> list[_Group]:
    groups: dict[int, _Group] = {}
    for record in incoming:
        group = groups.get(record.table.id)
        if group is None:
            group = groups[record.table.id] = _Group(record.table, [])
        group.records.append(record)
    return list(groups.values())


async def _in_order(tx: Tx, groups: list[_Group]) -> list[_Group]:
    """Tables that others refer to by foreign keys come before those."""
    if len(groups) < 2:
        return groups
    by_id = {group.table.id: group for group in groups}
    graph: dict[int, set[int]] = {number: set() for number in by_id}
    for row in await tx.fetch(queries.references, list(by_id)):
        graph[row["referring"]].add(row["referred"])
    try:
        return [by_id[number] for number in TopologicalSorter(graph).static_order()]
    except CycleError:
        return groups


async def _met(tx: Tx, group: _Group) -> list[Met]:
    keys = group.keys
    facts = await records.facts(tx, group.table, keys)
    if group.creates and (present := [at for at, fact in enumerate(facts) if fact.has_record]):
        some = [keys[at] for at in present]
        await records.lock(tx, group.table, some)
        for at, fact in zip(present, await records.facts(tx, group.table, some), strict=True):
            facts[at] = fact
    return [Met(*both) for both in zip(group.records, facts, strict=True)]


@dataclass(frozen=True, slots=True)
class _Floor:
    floor: UUID
    trimmed: Position | None
    has_parked: bool


async def _floors(tx: Tx, groups: Iterable[_Group]) -> dict[int, _Floor]:
    rows = await tx.fetch(queries.floors, [group.table.id for group in groups])
    return {
        row["id"]: _Floor(row["floor"], positions.parsed(row["trimmed"]), row["has_parked"])
        for row in rows
    }


async def _created(tx: Tx, group: _Group, context: Context) -> Merged | None:
    """
    Write and log records of which nothing is known here, without reading anything of each.

    None, and nothing is done, if something is known.  The floor is read once more afterwards: it is
    certain only after the log was looked at.  Raises KeysTaken.
    """
    ops = _new_ops(group.records)
    if ops is None or not await _all_apply(tx, group, context):
        return None
    if await tx.fetch(queries.numbers_used, [group.table.id], list({op.ulid for op in ops})):
        return None
    if not await records.create(tx, group.table, ops):
        return None
    if not await _all_apply(tx, group, context):
        raise KeysTaken
    await records.raise_clock(tx, max(op.ulid for op in ops))
    await tx.execute(queries.check_constraints)
    return Merged(applied=group.records)


def _new_ops(created: Sequence[Record]) -> list[NewOp] | None:
    """The records by op; None if they have different columns."""
    columns = created[0].columns
    if any(record.columns != columns for record in created):
        return None
    by_op = [list(some) for _, some in groupby(created, key=lambda record: record.head.index)]
    return [_new_op(some[0].head, columns, [record.data for record in some]) for some in by_op]


def _new_op(head: Head, columns: frozenset[str], data: list[str]) -> NewOp:
    return NewOp(head.version.ulid, head.origin, head.is_approximate, columns, data)


async def _all_apply(tx: Tx, group: _Group, context: Context) -> bool:
    """Whether all records are applied if the log has no op of their keys."""
    floor = (await _floors(tx, [group]))[group.table.id]
    if floor.has_parked:
        return False
    alike = {(one.head.index, one.is_newest_there): one for one in group.records}
    return all(_verdict(one, None, floor, context) is Verdict.APPLY for one in alike.values())


def _verdicts(judged: Sequence[Met], floor: _Floor, context: Context) -> list[Verdict]:
    """One verdict per record; those of an op with no newest op here are alike."""
    alike: dict[tuple[int, bool], Verdict] = {}
    verdicts: list[Verdict] = []
    for one in judged:
        record, newest = one.record, one.fact.newest
        kind = (record.head.index, record.is_newest_there)
        verdict = alike.get(kind) if newest is None else None
        if verdict is None:
            verdict = _verdict(record, newest, floor, context)
            if newest is None:
                alike[kind] = verdict
        verdicts.append(verdict)
    return verdicts


def _verdict(record: Record, newest: Newest | None, floor: _Floor, context: Context) -> Verdict:
    head = record.head
    has_read_us = floor.trimmed is None or (
        context.server_cursor is not None and context.server_cursor >= floor.trimmed
    )
    is_claimed = context.own.is_claimed(
        head.version, is_approximate=head.is_approximate, unlogged=record.table.unlogged_ulid
    )
    sent = Incoming(
        head.version,
        context.channel,
        head.is_approximate,
        record.is_newest_there,
        has_read_us,
        is_claimed,
    )
    return rules.judge(sent, newest, floor=floor.floor, now=context.now)


def _sorted_out(
    judged: Sequence[Met], verdicts: Sequence[Verdict], merged: Merged
) -> tuple[list[Met], defaultdict[Verdict, list[Met]]]:
    """
    The newest winner of each key, and what lost against the log.

    Raises MustWait for the first op that has to.
    """
    waiting = [
        one.record.head.index
        for one, verdict in zip(judged, verdicts, strict=True)
        if verdict is Verdict.WAIT
    ]
    if waiting:
        raise MustWait(min(waiting))
    winners: dict[str, Met] = {}
    lost: defaultdict[Verdict, list[Met]] = defaultdict(list)
    for one, verdict in zip(judged, verdicts, strict=True):
        match verdict:
            case Verdict.APPLY:
                other = winners.get(one.fact.key)
                if other is None or one.version >= other.version:
                    winners[one.fact.key] = one
                merged.superseded += other is not None
            case Verdict.PARK_FUTURE | Verdict.PARK_FLOOR:
                merged.parked.append((one, verdict))
            case Verdict.REFUSE:
                merged.refused += 1
            case _:
                merged.superseded += 1
                lost[verdict].append(one)
    return list(winners.values()), lost


async def _write(tx: Tx, winners: Sequence[_Won], merged: Merged) -> None:
    """
    Write and log what won, and forget what it makes outdated.

    Records that others refer to are deleted last and written first.
    """
    changes = _changes(winners, await _numbers_used(tx, winners))
    for won, some in reversed(list(zip(winners, changes, strict=True))):
        await records.write(tx, won.table, [one for one in some if one.action == "d"])
    for won, some in zip(winners, changes, strict=True):
        await records.write(tx, won.table, [one for one in some if one.action != "d"])
        await records.append(tx, won.table, some)
        merged.superseded += await _remove_older_parked(tx, won)
        await _note_unsettled(tx, won.table, some)
        merged.applied += [one.record for one in won.met]
    if merged.applied:
        newest = max(record.head.version.ulid for record in merged.applied)
        await records.raise_clock(tx, newest)


async def _numbers_used(tx: Tx, winners: Sequence[_Won]) -> Counter[UUID]:
    """
    Where the numbers of an op go on of which records have arrived before.

    Only its first part begins at 0: a reader of the older protocol ignores a ULID that it has.
    """
    tracked = [won.table.id for won in winners]
    new = list({one.version.ulid for won in winners for one in won.met})
    rows = await tx.fetch(queries.numbers_used, tracked, new)
    return Counter({row["ulid"]: row["next"] for row in rows})


def _changes(winners: Sequence[_Won], used: Counter[UUID]) -> list[list[Change]]:
    """
    What is written and logged, by table.

    The records of an op are numbered anew: parts of it may come in several pages, and what was
    superseded is missing.
    """
    return [[_change(one, used) for one in won.met] for won in winners]


def _change(one: Met, used: Counter[UUID]) -> Change:
    record, fact = one.record, one.fact
    head = record.head
    ulid = head.version.ulid
    n = used[ulid]
    used[ulid] = n + 1
    return Change(
        head.action,
        record.data,
        record.columns,
        fact.key,
        fact.key_hash,
        fact.has_record,
        ulid,
        n,
        head.origin,
        head.is_approximate,
    )


async def _remove_older_parked(tx: Tx, won: _Won) -> int:
    if not won.has_parked:
        return 0
    return await tx.fetchval(
        queries.remove_older_parked,
        won.table.name,
        [one.fact.key_hash for one in won.met],
        [one.fact.key for one in won.met],
        [one.version.ulid for one in won.met],
        [one.version.origin for one in won.met],
    )


async def _note_unsettled(tx: Tx, table: TrackedTable, changes: Sequence[Change]) -> None:
    """A transaction that is still open may have inserted what a delete did not find."""
    absent = [one for one in changes if one.action == "d" and not one.has_record]
    if absent:
        await tx.execute(
            queries.note_unsettled,
            table.id,
            [one.key_hash for one in absent],
            [one.key for one in absent],
            [one.data for one in absent],
        )
