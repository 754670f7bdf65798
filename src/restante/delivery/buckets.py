"""The statements of the sweep and of the status page: due uploads, live bytes, and moving files."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from restante import wire
from restante.database import sql
from restante.database.pool import Connection, Row
from restante.database.spans import Span
from restante.ids import FileId, WorkspaceId

queries = sql.load("restante.delivery")

_SHOWN = 20
_SILENT_SHOWN = 5
_STATES = wire.UploadStates.__struct_fields__


async def count_due(
    connection: Connection, *, acked_before: datetime, expired_before: datetime, limit: int
) -> Mapping[str, int]:
    """How many uploads a sweep would delete, acknowledged and expired, each up to the limit."""
    row = await connection.fetchrow(queries.due_uploads, acked_before, expired_before, limit)
    return dict(row or {})


async def delete_due(
    connection: Connection, *, acked_before: datetime, expired_before: datetime, limit: int
) -> Mapping[str, int]:
    """Delete one batch of what is due; returns how many, acknowledged and expired."""
    row = await connection.fetchrow(queries.delete_due, acked_before, expired_before, limit)
    return dict(row or {})


@dataclass(frozen=True, slots=True)
class LiveFiles:
    """The files of a bucket that are not due, and the workspace that has most of their bytes."""

    files: int = 0
    bytes: int = 0
    workspace_id: WorkspaceId | None = None
    workspace_bytes: int = 0
    since: datetime | None = None
    until: datetime | None = None


NO_FILES = LiveFiles()


async def live_in(
    connection: Connection,
    spans: Sequence[Span],
    *,
    acked_before: datetime,
    now: datetime,
    limit: int,
) -> dict[int, LiveFiles]:
    """The live files of each bucket that has any, by its number from 1, counted up to the limit."""
    starts, ends = [span.start for span in spans], [span.end for span in spans]
    rows = await connection.fetch(queries.live_in, starts, ends, acked_before, now, limit)
    return {row["number"]: _live(row) for row in rows}


def _live(row: Row) -> LiveFiles:
    return LiveFiles(
        int(row["files"]),
        row["bytes"],
        WorkspaceId(row["workspace_id"]),
        row["held_bytes"],
        row["since"],
        row["until"],
    )


async def arriving_in(connection: Connection, spans: Sequence[Span]) -> dict[int, int]:
    """How many uploads are still arriving in each bucket that has any, by its number from 1."""
    starts, ends = [span.start for span in spans], [span.end for span in spans]
    rows = await connection.fetch(queries.arriving_in, starts, ends)
    return {row["number"]: row["uploads"] for row in rows}


async def is_bucket_in_use(connection: Connection, span: Span) -> bool:
    """Whether any upload has its bytes in this bucket, or is arriving in it."""
    return bool(await connection.fetchval(queries.is_bucket_in_use, span.start, span.end))


@dataclass(frozen=True, slots=True)
class StoredFile:
    """Where the bytes of an upload are."""

    workspace_id: WorkspaceId
    file_id: FileId
    bucket: datetime
    size: int


async def files_in(connection: Connection, span: Span, limit: int) -> list[StoredFile]:
    """Uploads whose bytes are in this bucket."""
    rows = await connection.fetch(queries.files_in, span.start, span.end, limit)
    return [StoredFile(**row) for row in rows]


async def move_file(
    connection: Connection, workspace_id: WorkspaceId, file_id: FileId, *, to: datetime
) -> int | None:
    """Move one file's bytes to another bucket; returns its size, None if it is locked or gone."""
    return await connection.fetchval(queries.move_file, workspace_id, file_id, to)


# The steps of moving a large file.  Between two of them the pass may end, or the server.


async def begin_move(
    connection: Connection, file: StoredFile, *, to: datetime, kept: timedelta
) -> datetime:
    """
    Keep a bucket for the copy of a file, for so long without progress; returns which.

    That is the one of a move that was begun before, unless its copy is no longer kept.
    """
    key = file.workspace_id, file.file_id
    bucket = await connection.fetchval(queries.begin_move, *key, to, kept)
    if bucket != to and not await connection.fetchval(queries.is_kept, bucket, *key):
        await connection.execute(queries.release, file.file_id)
        bucket = await connection.fetchval(queries.begin_move, *key, to, kept)
    return bucket


async def copied_chunks(connection: Connection, file: StoredFile, *, to: datetime) -> int:
    """How many chunks of a file were copied before."""
    return await connection.fetchval(queries.copied_chunks, to, file.workspace_id, file.file_id)


async def copy_chunks(
    connection: Connection, file: StoredFile, seqs: range, *, kept: timedelta
) -> None:
    """Copy these chunks to the bucket that is kept for them, from now on for so long."""
    key = file.workspace_id, file.file_id, file.bucket
    await connection.execute(queries.copy_chunks, *key, seqs.start, seqs.stop, kept)


async def end_move(connection: Connection, file: StoredFile) -> int | None:
    """The copy is complete; returns the size of the file, None if it is locked or gone."""
    return await connection.fetchval(queries.end_move, file.workspace_id, file.file_id, file.bucket)


@dataclass(frozen=True, slots=True)
class UploadTotals:
    """What one scan of the uploads has found."""

    states: wire.UploadStates
    bytes: int
    live_bytes: Mapping[int, int]  # by the number of the bucket, from 1
    workspaces: Sequence[wire.WorkspaceSpaceView]  # those with most unacknowledged bytes
    silent: Sequence[wire.PinView]  # workspaces that do not fetch


async def upload_totals(
    connection: Connection, bucket_starts: Sequence[datetime], *, now: datetime
) -> UploadTotals:
    """Count uploads in all, by workspace, and by bucket; the starts must be in order."""
    rows = await connection.fetch(queries.upload_totals, now, bucket_starts, _SHOWN, _SILENT_SHOWN)
    in_buckets = [row for row in rows if row["is_bucket"]]
    of_workspaces = [row for row in rows if not row["is_bucket"]]
    silent = sorted(of_workspaces, key=lambda row: row["silent_place"])[:_SILENT_SHOWN]
    return UploadTotals(
        states=wire.UploadStates(
            **{state: sum(row[state] for row in in_buckets) for state in _STATES}
        ),
        bytes=sum(row["bytes"] for row in in_buckets),
        live_bytes={row["bucket_number"]: row["live_bytes"] for row in in_buckets},
        workspaces=[_workspace(row) for row in of_workspaces if row["place"] <= _SHOWN],
        silent=[_silent(row, now) for row in silent if row["silent_files"]],
    )


def _workspace(row: Row) -> wire.WorkspaceSpaceView:
    states = wire.UploadStates(**{state: row[state] for state in _STATES})
    return wire.WorkspaceSpaceView(
        row["workspace_id"], states, row["waiting_bytes"], row["waiting_since"], row["bytes"]
    )


def _silent(row: Row, now: datetime) -> wire.PinView:
    return wire.PinView(
        who=f"workspace {row['workspace_id']}",
        what=f"{row['silent_files']} files that it does not fetch",
        way_out=f"connect it, `restante uploads expire` its files, or wait until "
        f"{row['silent_until']:%Y-%m-%d %H:%M}",
        bytes=row["silent_bytes"],
        seconds=(now - row["silent_since"]).total_seconds(),
        workspace_id=row["workspace_id"],
    )
