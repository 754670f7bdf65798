"""
Files that the workspace itself uploaded, with an answer for its user.

They are announced in the workspace's feed and are pending as any other, but the user fetches them:
the workspace must neither fetch nor acknowledge them.  Only their rows say so.
"""

from contextlib import suppress

from restante import wire
from restante.client.aio import AsyncClient
from restante.client.calls import Cursor
from restante.client.poller import own_file
from restante.client.progress import Progress
from restante.errors import CursorGone
from restante.ids import ActivityId, FileId


class OwnFiles:
    """Knows which pending files are the workspace's own."""

    def __init__(self, client: AsyncClient, progress: Progress) -> None:
        self._client = client
        self._progress = progress
        self._read_to = Cursor()

    def note(self, row: wire.ActivityRow) -> None:
        """Remember the file of a row, if it is the workspace's own."""
        if file := own_file(row):
            self._progress.record_own(file.file_id)

    async def has(self, file_id: FileId) -> bool:
        """
        Whether a pending file is the workspace's own.

        A file and its row are committed together.  So the row of a file that was listed as pending
        has been noted, or is behind the cursor and can be read now.
        """
        if self._progress.received(file_id) is None and not self._progress.is_own(file_id):
            await self._read_ahead()
        return self._progress.is_own(file_id)

    async def _read_ahead(self) -> None:
        handled = self._progress.cursor() or Cursor()
        at = max(handled, self._read_to, key=lambda cursor: cursor.seq)
        with suppress(CursorGone):
            while rows := await self._rows_after(at):
                for row in rows:
                    self.note(row)
                at = self._read_to = Cursor(rows[-1].seq, ActivityId(rows[-1].id))

    async def _rows_after(self, cursor: Cursor) -> list[wire.ActivityRow]:
        page = await self._client.feed(cursor)
        return [row for row in page.rows if row.seq > cursor.seq]
