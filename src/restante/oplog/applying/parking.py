"""Keeps ops that cannot be applied now, with the reason, within a bound."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from restante.database import driver_errors, pool, sql
from restante.database.pool import SCHEMA, Tx
from restante.oplog.applying import records
from restante.oplog.applying.incoming import Record
from restante.text import printable

queries = sql.load("restante.oplog.applying", "parking")

# What is parked is kept until it can be applied or somebody discards it, so it is bounded by
# taking no more: the peer's log is then not read on.  A peer may have half of what the others have
# left, so that no number of peers takes all the room of another one.
MAX_BYTES = 1024**3
MAX_BYTES_OF_A_PEER = MAX_BYTES // 4
LEAST_BYTES_OF_A_PEER = 1024**2

_MAX_SENTENCE = 500


class ParkedFull(Exception):
    """There is no room for more parked ops of this peer; nothing may be committed."""


@dataclass(frozen=True, slots=True)
class Parked:
    """One record that is to wait; a key that cannot be computed is not known."""

    record: Record
    key: str | None
    key_hash: int | None
    reason: str
    sentence: str


async def with_keys(tx: Tx, some: Sequence[Record], reason: str, sentence: str) -> list[Parked]:
    """
    Records of one table with their keys, unless the key is what is wrong with one.

    By its key a parked op is found and removed when a newer one is applied.
    """
    if not some:
        return []
    table = some[0].table
    await records.begin(tx, [table])
    try:
        async with pool.transaction(tx):
            facts = await records.facts(tx, table, [one.key for one in some])
    except driver_errors.FROM_THE_DRIVER as error:
        if driver_errors.record_fault(error, own_schema=SCHEMA) is None:
            raise
        if len(some) == 1:
            return [Parked(some[0], None, None, reason, sentence)]
        middle = len(some) // 2
        return [
            *await with_keys(tx, some[:middle], reason, sentence),
            *await with_keys(tx, some[middle:], reason, sentence),
        ]
    return [
        Parked(one, fact.key, fact.key_hash, reason, sentence)
        for one, fact in zip(some, facts, strict=True)
    ]


async def park(tx: Tx, peer_id: int, parked: Sequence[Parked], *, now: datetime) -> None:
    """Keep them; one that is kept already gets the new reason.  Raises ParkedFull."""
    if not parked:
        return
    bounds = (MAX_BYTES, MAX_BYTES_OF_A_PEER, LEAST_BYTES_OF_A_PEER)
    if await tx.fetchval(queries.is_full, peer_id, *bounds):
        raise ParkedFull
    await tx.execute(
        queries.park,
        peer_id,
        now,
        [one.record.table.name for one in parked],
        [one.record.head.version.ulid for one in parked],
        [one.record.head.version.origin for one in parked],
        [one.record.head.action for one in parked],
        [one.record.head.is_approximate for one in parked],
        [one.key_hash for one in parked],
        [one.key for one in parked],
        [one.reason for one in parked],
        [printable(one.sentence, max_length=_MAX_SENTENCE) for one in parked],
        "[" + ",".join(one.record.data for one in parked) + "]",
    )
