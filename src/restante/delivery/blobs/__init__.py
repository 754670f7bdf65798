"""Where the bytes of files are kept: the interface, and one module for each kind of store."""

from collections.abc import AsyncIterator, Sequence
from datetime import datetime
from typing import Protocol

from restante.delivery.rules import Chunk, Upload
from restante.ids import WorkspaceId

# Written by one statement, about 1 MiB: statements cost more than rows.
WINDOW_CHUNKS = 4

# An answer that has begun cannot be refused any more, only cut off.  A workspace may fetch hundreds
# of files through its few connections: each read takes milliseconds, so all get their turn, though
# not within the time that a new request waits.
BEGUN_WAIT_SECONDS = 60.0


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

    def read(
        self, upload: Upload, first_chunk: int, last_chunk: int, *, has_begun: bool
    ) -> AsyncIterator[bytes]:
        """
        The chunks in order.  Ends early if they are not, or no longer, where the upload says.

        Waits up to BEGUN_WAIT_SECONDS for every chunk, the first one only if the answer has begun.
        """
        ...
