"""Finds the conflicts among records that are being merged; `conflicts` says what is one."""

from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID

from restante.database import sql
from restante.database.pool import Tx
from restante.oplog.applying.conflicts import Conflict, Reason
from restante.oplog.applying.incoming import Context, Met
from restante.oplog.positions import Position
from restante.oplog.rules import Channel, Newest, Version
from restante.oplog.tables import TrackedTable

queries = sql.load("restante.oplog.applying", "losses")


async def unseen(
    tx: Tx, table: TrackedTable, lost: Sequence[Met], floor: UUID, context: Context
) -> list[Conflict]:
    """Incoming changes that are older than ours, and were not here when ours were made."""
    others = [
        one
        for one in lost
        if one.version.ulid > floor
        and one.version.origin != context.own_host
        and _newest(one).version != one.version
    ]
    if not others:
        return []
    versions = [one.version for one in others]
    found = await tx.fetch(queries.first_not_older, table.id, *_arrays(others, versions))
    conflicts: list[Conflict] = []
    for row in found:
        at: int = row["at"]
        one = others[at - 1]
        is_ours = row["host"] == context.own_host
        if is_ours and not _is_same(one, row["data"], is_delete=row["is_delete"]):
            kept = Version(row["ulid"], row["host"])
            data = None if row["is_delete"] else row["data"]
            conflicts.append(_lost_against(one, "unseen", kept, data))
    return conflicts


async def reported(tx: Tx, table: TrackedTable, lost: Sequence[Met]) -> list[Conflict]:
    """Incoming changes that lost against approximate versions."""
    logged = await _newest_ops(tx, table, lost)
    return [
        _lost_against(one, "approximate", _newest(one).version, _logged_data(one, old))
        for one, old in logged
        if not _is_same(one, old.data, is_delete=_newest(one).is_delete)
    ]


async def overwritten(
    tx: Tx, table: TrackedTable, won: Sequence[Met], context: Context
) -> list[Conflict]:
    """Our changes that the sender had not read, and changes under an approximate version."""
    candidates = [one for one in won if one.fact.newest and _may_overwrite(one, context)]
    cursor = context.server_cursor
    found: list[Conflict] = []
    for one, old in await _newest_ops(tx, table, candidates):
        is_approximate = one.record.head.is_approximate
        was_read = cursor is not None and old.position <= cursor
        if was_read and not is_approximate:
            continue
        newest = _newest(one)
        if not _is_same(one, old.data, is_delete=newest.is_delete):
            reason = "approximate" if is_approximate else "overwritten"
            kept, lost = _data(one), _logged_data(one, old)
            found.append(Conflict(one.fact.key, reason, one.version, kept, newest.version, lost))
    return found


def _may_overwrite(one: Met, context: Context) -> bool:
    if one.record.head.is_approximate:
        return True
    is_ours = _newest(one).version.origin == context.own_host != one.version.origin
    return is_ours and context.channel is Channel.PULL


def _lost_against(one: Met, reason: Reason, kept: Version, kept_data: str | None) -> Conflict:
    return Conflict(one.fact.key, reason, kept, kept_data, one.version, _data(one))


def _data(one: Met) -> str | None:
    return None if one.is_delete else one.record.data


def _logged_data(one: Met, old: "_Logged") -> str | None:
    return None if _newest(one).is_delete else old.data


def _is_same(one: Met, data: str, *, is_delete: bool) -> bool:
    if one.is_delete or is_delete:
        return one.is_delete and is_delete
    return one.record.data == data


@dataclass(frozen=True, slots=True)
class _Logged:
    position: Position
    data: str


async def _newest_ops(tx: Tx, table: TrackedTable, met: Sequence[Met]) -> list[tuple[Met, _Logged]]:
    if not met:
        return []
    versions = [_newest(one).version for one in met]
    rows = await tx.fetch(queries.ops_of, table.id, *_arrays(met, versions))
    return [
        (
            met[row["at"] - 1],
            _Logged(Position(row["era"], row["xid"], row["ulid"], row["n"]), row["data"]),
        )
        for row in rows
    ]


def _newest(one: Met) -> Newest:
    assert one.fact.newest is not None  # noqa: S101 - it has met one
    return one.fact.newest


def _arrays(
    met: Sequence[Met], versions: Sequence[Version]
) -> tuple[list[int], list[str], list[UUID], list[str]]:
    return (
        [one.fact.key_hash for one in met],
        [one.fact.key for one in met],
        [version.ulid for version in versions],
        [version.origin for version in versions],
    )
