"""
Where the bytes are: what an object store would have to offer to hold them instead.

Bytes are put before anything points at them, and found again through the upload that does.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from datetime import datetime
from itertools import takewhile
from typing import Protocol

from restante.database import sql
from restante.database.pool import Database
from restante.delivery.rules import Chunk, Upload
from restante.ids import WorkspaceId

queries = sql.load("restante.delivery")

# About 1 MiB per statement: it is statements that cost, not rows.
WINDOW_CHUNKS = 4


class Blobs(Protocol):
    """Keeps the bytes of uploads, in chunks."""

    async def put(
        self, workspace_id: WorkspaceId, bucket: datetime, chunks: Sequence[Chunk]
    ) -> None:
        """Keep these chunks.  Nobody can see them yet."""
        ...

    async def put_last(
        self, workspace_id: WorkspaceId, bucket: datetime, chunks: Sequence[Chunk], /
    ) -> Sequence[Chunk]:
        """Keep the last chunks; returns those that the publishing statement is to carry itself."""
        ...

    def read(self, upload: Upload, first_chunk: int, last_chunk: int) -> AsyncIterator[bytes]:
        """The chunks in order.  Ends early if they are not, or no longer, where the upload says."""
        ...


class PostgresBlobs:
    """Bytes as chunk rows in the bucket of their hour."""

    def __init__(self, db: Database) -> None:
        self._db = db

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

    async def put_last(
        self, _workspace_id: WorkspaceId, _bucket: datetime, chunks: Sequence[Chunk], /
    ) -> Sequence[Chunk]:
        """They ride in the publishing statement, which saves a small request a round trip."""
        return chunks

    async def read(self, upload: Upload, first_chunk: int, last_chunk: int) -> AsyncIterator[bytes]:
        """One window is read while the one before is on its way to the client."""
        ahead = asyncio.ensure_future(self._window(upload, first_chunk, last_chunk))
        try:
            for window in range(first_chunk, last_chunk + 1, WINDOW_CHUNKS):
                chunks = await ahead
                following = window + WINDOW_CHUNKS
                ahead = asyncio.ensure_future(self._window(upload, following, last_chunk))
                for chunk in chunks:
                    yield chunk
                if len(chunks) < min(WINDOW_CHUNKS, last_chunk + 1 - window):
                    return
        finally:
            ahead.cancel()
            ahead.add_done_callback(_forget)

    async def _window(self, upload: Upload, first: int, last: int) -> list[bytes]:
        if first > last:
            return []
        end = min(first + WINDOW_CHUNKS - 1, last)
        async with self._db.connection() as connection:
            rows = await connection.fetch(
                queries.read_chunks, upload.bucket, upload.workspace_id, upload.file_id, first, end
            )
        unbroken = takewhile(lambda pair: pair[0] == pair[1]["seq"], enumerate(rows, first))
        return [row["bytes"] for _, row in unbroken]


def _forget(ahead: "asyncio.Future[list[bytes]]") -> None:
    """Nobody waits for it any more; not even for its failure."""
    if not ahead.cancelled():
        ahead.exception()
