"""Bytes as chunk rows in Postgres, in the bucket of their hour."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from datetime import datetime
from itertools import takewhile

from restante.database import sql
from restante.database.pool import Database
from restante.delivery.blobs import WINDOW_CHUNKS
from restante.delivery.rules import Chunk, Upload
from restante.ids import WorkspaceId

queries = sql.load("restante.delivery")


class PostgresBlobs:
    """Implements `Blobs`."""

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

    async def read(self, upload: Upload, first_chunk: int, last_chunk: int) -> AsyncIterator[bytes]:
        """Read one window ahead while the previous one is sent to the client."""
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
            ahead.add_done_callback(_ignore_result)

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


def _ignore_result(ahead: "asyncio.Future[list[bytes]]") -> None:
    """Retrieve the exception, so that the event loop does not log it."""
    if not ahead.cancelled():
        ahead.exception()
