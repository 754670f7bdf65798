"""Bytes as chunk rows in Postgres, in the bucket of their hour."""

from collections.abc import AsyncIterator, Sequence
from datetime import datetime

from restante.database import sql
from restante.database.pool import Database
from restante.delivery.blobs import BEGUN_WAIT_SECONDS
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

    async def read(
        self, upload: Upload, first_chunk: int, last_chunk: int, *, has_begun: bool
    ) -> AsyncIterator[bytes]:
        """
        One chunk at a time, and none ahead: what is read waits in memory for a slow client.

        The next one is read while the kernel still sends the one before.
        """
        for seq in range(first_chunk, last_chunk + 1):
            wait = BEGUN_WAIT_SECONDS if has_begun else None
            async with self._db.connection(wait_seconds=wait) as connection:
                chunk = await connection.fetchval(
                    queries.read_chunk, upload.bucket, upload.workspace_id, upload.file_id, seq
                )
            if chunk is None:
                return
            has_begun = True
            yield chunk
