"""Bounds what delivery stores: uploads, their bytes, reservations, and remembered answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from restante.database import partitions
from restante.database.partitions import Partition, PartitionedTable
from restante.database.pool import Connection
from restante.delivery import buckets, quotas, rules, store
from restante.delivery.buckets import NO_FILES, LiveFiles, StoredFile
from restante.delivery.rules import CHUNK_BYTES
from restante.retention.subjects import (
    OUT_OF_TIME,
    Account,
    PartitionSubject,
    RowSubject,
    Work,
)
from restante.wire import HeldSpace, PlanStep

MOVE_FILES = "move live files"
DROP_BUCKET = "drop a bucket"

CHUNKS = PartitionedTable(
    "chunks",
    bound_of=datetime.isoformat,
    moment_of=datetime.fromisoformat,
    # A bucket is written once and dropped whole: there is never anything to vacuum.
    options="with (autovacuum_enabled = off, toast.autovacuum_enabled = off)",
)

# Files are moved out of a bucket when no more than this part of it is live.
_MOVE_BELOW = 0.3
_DUE_COUNTED = 100_000
_FILES_COUNTED = 10_000
# Less is not worth a line.
_NAMED_FROM_BYTES = 1024 * 1024
_FILES_PER_LOOK = 100
# Copied by one statement.  One for a whole file of several GiB would run into its timeout, again in
# every pass, and hold back the vacuum of all tables.
_STEP_CHUNKS = 64


class DueUploads(RowSubject):
    """Upload rows: acknowledged ones after their retention, unacknowledged ones once expired."""

    name = "uploads"
    tables = ("uploads",)
    action = "delete uploads"
    outcomes = ("acked", "expired")
    empties_partitions = True

    def __init__(self, *, ack_retention: timedelta) -> None:
        self._ack_retention = max(ack_retention, timedelta(0))

    async def count_due(self, connection: Connection, *, now: datetime) -> Mapping[str, int]:
        acked_before = now - self._ack_retention
        return await buckets.count_due(
            connection, acked_before=acked_before, expired_before=now, limit=_DUE_COUNTED
        )

    async def delete_due(self, connection: Connection, *, now: datetime) -> Mapping[str, int]:
        acked_before = now - self._ack_retention
        return await buckets.delete_due(
            connection, acked_before=acked_before, expired_before=now, limit=self.batch_size
        )


class ExpiredReservations(RowSubject):
    """Room that was reserved by uploads that never ended, as after a crash."""

    name = "reservations"
    tables = ("reservations",)
    action = "release reservations"
    outcomes = ("reservations",)
    is_prompt = True

    async def count_due(self, connection: Connection, *, now: datetime) -> Mapping[str, int]:
        due = await quotas.count_expired_reservations(connection, now=now, limit=_DUE_COUNTED)
        return {"reservations": due}

    async def delete_due(self, connection: Connection, *, now: datetime) -> Mapping[str, int]:
        released = await quotas.release_expired(connection, now=now, limit=self.batch_size)
        return {"reservations": released}


class ExpiredAnswers(RowSubject):
    """Answers that are remembered for idempotency keys."""

    name = "answers"
    tables = ("answers",)
    action = "delete answers"
    outcomes = ("answers",)
    is_prompt = True

    async def count_due(self, connection: Connection, *, now: datetime) -> Mapping[str, int]:
        due = await store.count_expired_answers(connection, now=now, limit=_DUE_COUNTED)
        return {"answers": due}

    async def delete_due(self, connection: Connection, *, now: datetime) -> Mapping[str, int]:
        deleted = await store.delete_expired_answers(connection, now=now, limit=self.batch_size)
        return {"answers": deleted}


@dataclass(frozen=True, slots=True)
class BucketContents:
    """What keeps a bucket from being dropped."""

    live: LiveFiles = NO_FILES
    all_counted: bool = True  # False: there are more live files than were counted
    arriving: int = 0  # uploads that are still being received into it


class Buckets(PartitionSubject[BucketContents]):
    """The bytes of files, in partitions by hour."""

    name = "buckets"
    tables = ("chunks",)

    def __init__(
        self,
        *,
        width: timedelta,
        ack_retention: timedelta,
        sweep_interval: timedelta = timedelta(0),
    ) -> None:
        self.table = CHUNKS
        self.width = width
        self._ack_retention = max(ack_retention, timedelta(0))
        self._copies_kept = rules.copies_kept(sweep_interval)

    async def contents(
        self, connection: Connection, past: Sequence[Partition], *, now: datetime, closely: bool
    ) -> Mapping[str, BucketContents]:
        limit = _FILES_COUNTED if closely else 1
        past = [one for one in past if one.span]
        spans = [one.span for one in past if one.span]
        live = await buckets.live_in(
            connection, spans, acked_before=now - self._ack_retention, now=now, limit=limit
        )
        arriving = await buckets.arriving_in(connection, spans)
        return {
            one.name: BucketContents(
                live=live.get(number, NO_FILES),
                all_counted=live.get(number, NO_FILES).files < limit,
                arriving=arriving.get(number, 0),
            )
            for number, one in enumerate(past, start=1)
        }

    def decide(
        self, partition: Partition, contents: BucketContents | None, *, now: datetime
    ) -> Sequence[PlanStep] | HeldSpace:
        """Drop it; or move its few live files and drop it; or say who keeps it."""
        if contents is None or partition.span is None:
            return []
        name, size, live = partition.name, partition.bytes, contents.live
        unused = max(size - live.bytes, 0) if contents.all_counted else 0
        if not self.is_past(partition, now=now):
            return _open(partition, partition.span.end, unused, self.name)
        if contents.arriving:
            why = f"{contents.arriving} uploads are still arriving in it"
            return HeldSpace(name, size, why, subject=self.name, reclaimable_bytes=unused)
        if live.files == 0:
            return [PlanStep(DROP_BUCKET, name, 0, size, "no live file is in it", self.name)]
        # The size of a locked partition is unknown; the planner names it and does nothing with it.
        if contents.all_counted and (partition.is_locked or live.bytes <= _MOVE_BELOW * size):
            why = f"{live.bytes} of {size} bytes are live"
            moved = "its live files have moved"
            return [
                PlanStep(MOVE_FILES, name, live.files, -live.bytes, why, self.name),
                PlanStep(DROP_BUCKET, name, 0, size, moved, self.name),
            ]
        return _held(partition, live, unused, self.name)

    def is_looked_at(self, partition: Partition, *, now: datetime) -> bool:
        """The open one too: what was deleted in it comes back later, and the plan says when."""
        return partition.span is None or partition.span.start <= now

    async def carry_out(self, step: PlanStep, partition: Partition, work: Work) -> str | None:
        assert partition.span is not None  # noqa: S101 - it is attached
        if step.action == MOVE_FILES:
            return await _move_files(partition, work, copies_kept=self._copies_kept)
        # Once it is sealed nothing can come in, and what the look finds is final.
        await partitions.seal(work.connection, partition.name)
        if await buckets.is_bucket_in_use(work.connection, partition.span):
            return "live files are still in it"
        await work.detach_and_drop(partition)
        return None

    async def account(
        self, connection: Connection, found: Sequence[Partition], *, now: datetime
    ) -> Account:
        its = sorted(
            (one.span.start, one.name) for one in found if one.table == self.table.name and one.span
        )
        totals = await buckets.upload_totals(connection, [start for start, _ in its], now=now)
        return Account(
            live_bytes={name: totals.live_bytes.get(n, 0) for n, (_, name) in enumerate(its, 1)},
            live_total=totals.bytes,
            pins=totals.silent,
            fields={"uploads": totals.states, "workspaces": totals.workspaces},
        )


def _open(
    partition: Partition, until: datetime, unused: int, subject: str
) -> Sequence[PlanStep] | HeldSpace:
    """A bucket that files still arrive in; worth a line if much of it is not used any more."""
    if unused < _NAMED_FROM_BYTES:
        return []
    why = f"new files go into it until {until:%H:%M} UTC"
    return HeldSpace(
        partition.name,
        partition.bytes,
        why,
        until=until,
        subject=subject,
        reclaimable_bytes=unused,
    )


def _held(partition: Partition, live: LiveFiles, unused: int, subject: str) -> HeldSpace:
    return HeldSpace(
        partition.name,
        partition.bytes,
        f"{live.files} live files are in it",
        live.workspace_id,
        live.workspace_bytes,
        live.since,
        live.until,
        subject=subject,
        reclaimable_bytes=unused,
    )


async def _move_files(partition: Partition, work: Work, *, copies_kept: timedelta) -> str | None:
    """Move the files of a bucket to the current one, until none is left."""
    assert partition.span is not None  # noqa: S101 - it is attached
    to = rules.bucket_of(work.now)
    while found := await buckets.files_in(work.connection, partition.span, _FILES_PER_LOOK):
        moved = 0
        for file in found:
            if work.is_out_of_time:
                return OUT_OF_TIME
            size = await _move(file, to, work, copies_kept)
            moved += size or 0
            work.moved(size or 0)
        if not moved:
            return (
                OUT_OF_TIME if work.is_out_of_time else "the files that are left in it are locked"
            )
    return None


async def _move(file: StoredFile, to: datetime, work: Work, copies_kept: timedelta) -> int | None:
    """Move one file; returns its size, None if it is locked, or if the time is over before."""
    connection = work.connection
    if file.size <= _STEP_CHUNKS * CHUNK_BYTES:
        return await buckets.move_file(connection, file.workspace_id, file.file_id, to=to)
    to = await buckets.begin_move(connection, file, to=to, kept=copies_kept)
    copied, chunks = await buckets.copied_chunks(connection, file, to=to), file.size / CHUNK_BYTES
    while copied < chunks:
        if work.is_out_of_time:
            return None
        step = range(copied, copied + _STEP_CHUNKS)
        await buckets.copy_chunks(connection, file, step, kept=copies_kept)
        copied += _STEP_CHUNKS
    return await buckets.end_move(connection, file)
