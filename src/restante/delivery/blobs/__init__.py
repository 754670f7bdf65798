"""Where the bytes of files are kept: the interface, and one module for each kind of store."""

from collections.abc import AsyncIterator, Sequence
from datetime import datetime
from typing import Protocol

from restante.delivery.rules import Chunk, Upload
from restante.ids import WorkspaceId

# Written by one statement, about 1 MiB: statements cost more than rows.
WINDOW_CHUNKS = 4


class Blobs(Protocol):
    """
    Stores the bytes of uploads, in chunks.

    Bytes are stored before anything refers to them, and are found through the upload that does.
    """

    async def put(
        self, workspace_id: WorkspaceId, bucket: datetime, chunks: Sequence[Chunk]
    ) -> None:
        """Store these chunks.  Nothing refers to them yet."""
        ...

    def read(self, upload: Upload, first_chunk: int, last_chunk: int) -> AsyncIterator[bytes]:
        """The chunks in order.  Ends early if they are not, or no longer, where the upload says."""
        ...
