"""A file on its way out: its headers, and a body that stops when its reader does."""

import asyncio
import base64
from urllib.parse import quote

import structlog
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from restante.delivery.fetch import Delivery
from restante.delivery.ranges import ByteRange
from restante.delivery.rules import UNKNOWN_TYPE, Upload
from restante.errors import RestanteError

log = structlog.get_logger()


def entity_tag(upload: Upload) -> str:
    """The file's contents never change, so their hash names them."""
    return f'"{upload.sha256.hex()}"'


def disposition(name: str) -> str:
    """An attachment whose name no header can be split with."""
    printable = "".join(character for character in name if character.isprintable())
    escaped = printable.replace("\\", "\\\\").replace('"', '\\"')
    fallback = escaped.encode("ascii", "replace").decode()
    return f"attachment; filename=\"{fallback}\"; filename*=UTF-8''{quote(printable, safe='')}"


def file_headers(upload: Upload) -> dict[str, str]:
    """What is said of a file whether its bytes follow or not."""
    digest = base64.b64encode(upload.sha256).decode()
    return {
        "ETag": entity_tag(upload),
        "Repr-Digest": f"sha-256=:{digest}:",
        "Accept-Ranges": "bytes",
        "Cache-Control": "private, no-cache",
        "Content-Disposition": disposition(upload.name),
        "X-Content-Type-Options": "nosniff",
    }


class Download(Response):
    """
    Streams a file or a range of it.

    After a disconnect a bare `send` succeeds silently, so the reader is watched: when it goes away,
    reading stops at once.  If the bytes end early the connection is broken off, because a short
    body must not pass for a whole one.
    """

    def __init__(self, delivery: Delivery, upload: Upload, wanted: ByteRange | None) -> None:
        whole = ByteRange(0, upload.size - 1)
        self._delivery = delivery
        self._upload = upload
        self._range = wanted or whole
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
        sending = asyncio.create_task(self._send_body(send))
        leaving = asyncio.create_task(until_gone(receive))
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
            # The end of an answer reads as a disconnect too; what follows it is still to be done.
            if self._is_sent or sending.done():
                await sending
        finally:
            for task in (sending, leaving):
                task.cancel()
            await asyncio.gather(sending, leaving, return_exceptions=True)

    async def _send_head(self, send: Send) -> None:
        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )

    async def _send_body(self, send: Send) -> None:
        """The head goes out with the first bytes; until then it may become a refusal."""
        begun = False
        try:
            async for piece in self._delivery.read(
                self._upload, self._range.first, self._range.last
            ):
                if not begun:
                    await self._send_head(send)
                    begun = True
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        except RestanteError as error:
            if not begun:
                raise
            log.warning("fetch_broken_off", file=str(self._upload.file_id), reason=str(error))
            return
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        self._is_sent = True
        if self._range.last == self._upload.size - 1:
            await self._delivery.mark_fetched(self._upload)


async def until_gone(receive: Receive) -> None:
    """Return when the client has gone away; what it still sends is read over."""
    while (await receive())["type"] != "http.disconnect":
        pass
