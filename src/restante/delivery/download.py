"""The HTTP response that streams a file or a range of it."""

import base64
from datetime import UTC, datetime
from urllib.parse import quote

import structlog
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from restante.database.pool import Database
from restante.delivery import fetch
from restante.delivery.blobs import Blobs
from restante.delivery.ranges import ByteRange
from restante.delivery.rules import UNKNOWN_TYPE, Upload
from restante.errors import RestanteError
from restante.http import turns
from restante.http.disconnect import disconnected, while_connected
from restante.workspaces.auth import Permission

log = structlog.get_logger()


def entity_tag(upload: Upload) -> str:
    """A file's contents never change, so their hash identifies them."""
    return f'"{upload.sha256.hex()}"'


def disposition(name: str, display_name: str) -> str:
    """The Content-Disposition of an attachment; no name can break the header."""
    clean = "".join(character for character in name if character.isprintable())
    escaped = clean.replace("\\", "\\\\").replace('"', '\\"')
    fallback = escaped.encode("ascii", "replace").decode()
    shown = quote(display_name.encode("utf-8", "replace"), safe="")
    return f"attachment; filename=\"{fallback}\"; filename*=UTF-8''{shown}"


def file_headers(upload: Upload) -> dict[str, str]:
    """The headers of every answer about a file, with or without its bytes."""
    digest = base64.b64encode(upload.sha256).decode()
    return {
        "ETag": entity_tag(upload),
        "Repr-Digest": f"sha-256=:{digest}:",
        "Accept-Ranges": "bytes",
        "Cache-Control": "private, no-cache",
        "Content-Disposition": disposition(upload.name, upload.display_name),
        "X-Content-Type-Options": "nosniff",
    }


class Download(Response):
    """
    Streams a file or a range of it.

    Reading stops at once when the client goes away, and soon after its token was revoked.  If the
    bytes end early, the connection is closed, because a short body must not look complete.
    """

    def __init__(
        self,
        db: Database,
        blobs: Blobs,
        upload: Upload,
        wanted: ByteRange | None,
        permission: Permission,
    ) -> None:
        self._db = db
        self._blobs = blobs
        self._upload = upload
        self._range = wanted or ByteRange(0, upload.size - 1)
        self._permission = permission
        self._is_sent = False
        headers = file_headers(upload)
        headers["Content-Type"] = upload.mimetype or UNKNOWN_TYPE
        headers["Content-Length"] = str(self._range.length)
        if wanted:
            headers["Content-Range"] = f"bytes {wanted.first}-{wanted.last}/{upload.size}"
        super().__init__(status_code=206 if wanted else 200, headers=headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "HEAD":
            await self._send_head(send)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return
        try:
            await while_connected(self._send_body(send), disconnected(receive))
        except ClientDisconnect:
            # The end of an answer looks like a disconnect too.
            if not self._is_sent:
                return
        if self._is_sent and self._range.last == self._upload.size - 1:
            await fetch.mark_fetched(self._db, self._upload, now=datetime.now(UTC))

    async def _send_head(self, send: Send) -> None:
        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )

    async def _send_body(self, send: Send) -> None:
        """The head is sent with the first bytes; until then an error can become an answer."""
        has_begun = False
        try:
            async for piece in fetch.read(
                self._db,
                self._blobs,
                self._upload,
                self._range.first,
                self._range.last,
                now=datetime.now(UTC),
            ):
                if not has_begun:
                    await self._send_head(send)
                    has_begun = True
                await send({"type": "http.response.body", "body": piece, "more_body": True})
                turns.pause()
                # An empty piece waits like any other, until the client has taken the one before.
                await send({"type": "http.response.body", "body": b"", "more_body": True})
                await turns.resume()
                await self._permission.check()
        except RestanteError as error:
            if not has_begun:
                raise
            log.warning("fetch_broken_off", file=str(self._upload.file_id), reason=str(error))
            return
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        self._is_sent = True
