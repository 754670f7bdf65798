"""Receives the files of a multipart body as it arrives."""

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime

from starlette.requests import Request

from restante.delivery.forms import FormParser, PartHead, boundary_of
from restante.delivery.receive import Incoming
from restante.delivery.rules import MAX_FILES_PER_REQUEST, ReceivePolicy
from restante.errors import RequestTooLarge, UploadMalformed
from restante.http import turns
from restante.http.bodies import declared_length

_MAX_PARTS = MAX_FILES_PER_REQUEST + 64  # other fields of the form are ignored
_FIELD = "files"

# Other requests get their turn after so many bytes: the heads of hostile parts take milliseconds.
_SLICE_BYTES = 16 * 1024


def accepted_length(request: Request, policy: ReceivePolicy) -> int | None:
    """The Content-Length, if any; raises RequestTooLarge before anything is read."""
    length = declared_length(request)
    if length is not None and length > policy.max_body_bytes:
        allowed = policy.max_request_bytes
        raise RequestTooLarge(
            f"The request has {length} bytes; {allowed} bytes of files are allowed.", max=allowed
        )
    return length


async def receive_files(
    request: Request, body: AsyncIterator[bytes], incoming: Incoming, policy: ReceivePolicy
) -> None:
    """Receive every part named `files`; raises what is wrong with the body."""
    form, received = _Form(_parser(request), incoming), 0
    async for piece in body:
        received += len(piece)
        if received > policy.max_body_bytes:
            raise incoming.body_too_large()
        for at in range(0, len(piece), _SLICE_BYTES):
            await turns.resume()
            await form.receive(piece[at : at + _SLICE_BYTES])
            await asyncio.sleep(0)
    form.parser.close()


def _parser(request: Request) -> FormParser:
    boundary = boundary_of(request.headers.get("content-type", ""))
    if boundary is None:
        raise UploadMalformed("Send the files as multipart/form-data, in parts named files.")
    return FormParser(boundary, max_parts=_MAX_PARTS)


class _Form:
    """Passes the files of a form on, and ignores its other fields."""

    def __init__(self, parser: FormParser, incoming: Incoming) -> None:
        self.parser = parser
        self._incoming = incoming
        self._is_blank = False  # the part is a file field in which no file was chosen

    async def receive(self, piece: bytes) -> None:
        now, incoming = datetime.now(UTC), self._incoming
        for event in self.parser.feed(piece):
            if isinstance(event, PartHead):
                await self._begin(event, now=now)
            elif event is None:
                if incoming.open_file:
                    await incoming.end_file(now=now)
            elif incoming.open_file:
                await incoming.write(event, now=now)
            elif self._is_blank:
                raise _nameless()

    async def _begin(self, part: PartHead, *, now: datetime) -> None:
        is_file = part.field == _FIELD
        if is_file and part.filename is None:
            raise _nameless()
        # Browsers send such a part without contents, and a file must not get lost.
        self._is_blank = is_file and not part.filename
        if is_file and part.filename:
            await self._incoming.begin_file(part.filename, part.content_type, now=now)


def _nameless() -> UploadMalformed:
    return UploadMalformed("A part named files has no filename.")
