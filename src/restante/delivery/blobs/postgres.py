"""Bytes as chunk rows in Postgres, in the bucket of their hour."""

import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime

from restante.database import sql
from restante.database.pool import Database
from restante.delivery.blobs import BEGUN_WAIT_SECONDS, WINDOW_CHUNKS
from restante.delivery.rules import Chunk, Upload
from restante.ids import WorkspaceId

queries = sql.load("restante.delivery")

_QUICK_SECONDS = 0.1
_MAX_AHEAD = 128  # 32 MiB in this process
_MAX_AHEAD_OF_WORKSPACE = 32


class PostgresBlobs:
    """Implements `Blobs`."""

    def __init__(self, db: Database) -> None:
        self._db = db
        # Chunks that were read before their clients have taken the ones before.
        self._ahead = Counter[WorkspaceId]()

    async def put(
        self, workspace_id: WorkspaceId, bucket: datetime, chunks: Sequence[Chunk]
    ) -> None:
        async with self._db.connection() as connection:
            await connection.execute(
                queries.put_chunks,
                bucket,
                workspace_id,
                [chunk.file_id for chunk in chunks],
                [chunk.seq for chunk in chunks],
                [chunk.bytes for chunk in chunks],
            )

    async def read(
        self, upload: Upload, first_chunk: int, last_chunk: int, *, has_begun: bool
    ) -> AsyncIterator[bytes]:
        """
        A chunk at a time, and a few by one statement for a client that takes them quickly.

        What is read waits in memory for a slow client.  So nothing is read ahead for that one, and
        a limited number of chunks for all others.
        """
        seq, count = first_chunk, 1
        while seq <= last_chunk:
            until = min(seq + count, last_chunk + 1)
            wait = BEGUN_WAIT_SECONDS if has_begun else None
            with self._reading_ahead(upload.workspace_id, until - seq - 1):
                chunks = await self._read(upload, range(seq, until), wait)
                began_at = time.monotonic()
                for chunk in chunks:
                    yield chunk
            if len(chunks) < until - seq:
                return
            seq, has_begun = until, True
            is_quick = time.monotonic() - began_at < _QUICK_SECONDS
            may_read_ahead = is_quick and self._has_room(upload.workspace_id)
            count = min(count * 2, WINDOW_CHUNKS) if may_read_ahead else 1

    async def _read(
        self, upload: Upload, seqs: range, wait_seconds: float | None
    ) -> Sequence[bytes]:
        """As many of them as there are, up to the first that is missing."""
        of_file = upload.bucket, upload.workspace_id, upload.file_id
        async with self._db.connection(wait_seconds=wait_seconds) as connection:
            rows = await connection.fetch(queries.read_chunks, *of_file, seqs.start, seqs.stop)
        return [row["bytes"] for row, seq in zip(rows, seqs, strict=False) if row["seq"] == seq]

    def _has_room(self, workspace_id: WorkspaceId) -> bool:
        of_workspace = self._ahead[workspace_id] + WINDOW_CHUNKS <= _MAX_AHEAD_OF_WORKSPACE
        return of_workspace and self._ahead.total() + WINDOW_CHUNKS <= _MAX_AHEAD

    @contextmanager
    def _reading_ahead(self, workspace_id: WorkspaceId, count: int) -> Iterator[None]:
        self._ahead[workspace_id] += count
        try:
            yield
        finally:
            self._ahead[workspace_id] -= count
            if not self._ahead[workspace_id]:
                del self._ahead[workspace_id]
