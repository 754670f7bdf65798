"""Parses a multipart body as it arrives, and passes its files on piece by piece."""

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from email.message import Message

from multipart import MultipartError, MultipartSegment, ParserLimitReached, PushMultipartParser
from starlette.requests import Request

from restante.delivery.receive import Incoming
from restante.delivery.rules import (
    MAX_FILES_PER_REQUEST,
    MAX_FORM_BYTES,
    MAX_REQUEST_BYTES,
    request_too_large,
)
from restante.errors import RequestTooLarge, TooManyFiles, UploadMalformed, UploadTooSlow

MAX_BODY_BYTES = MAX_REQUEST_BYTES + MAX_FORM_BYTES
_MAX_PARTS = MAX_FILES_PER_REQUEST + 64  # other fields of the form are ignored
_MAX_BOUNDARY = 200
_FIELD = "files"


def declared_length(request: Request) -> int | None:
    """The Content-Length; raises RequestTooLarge before anything is read."""
    text = request.headers.get("content-length", "")
    length = int(text) if text.isascii() and text.isdigit() else None
    if length is not None and length > MAX_BODY_BYTES:
        raise RequestTooLarge(
            f"The request has {length} bytes; {MAX_REQUEST_BYTES} bytes of files are allowed.",
            max=MAX_REQUEST_BYTES,
        )
    return length


async def receive_files(
    request: Request, incoming: Incoming, *, within_seconds: float, idle_seconds: float
) -> None:
    """Receive every part named `files`; raises what is wrong with the body."""
    parser = _parser(request)
    try:
        await _parse(_pieces(request, within_seconds, idle_seconds), parser, incoming)
    except ParserLimitReached as error:
        if "segment count" in str(error):
            raise TooManyFiles(
                f"A request carries at most {MAX_FILES_PER_REQUEST} files.",
                max=MAX_FILES_PER_REQUEST,
            ) from error
        raise _malformed(error) from error
    except MultipartError as error:
        raise _malformed(error) from error


def _parser(request: Request) -> PushMultipartParser:
    header = Message()
    header["Content-Type"] = request.headers.get("content-type", "")
    boundary = header.get_boundary("")
    if header.get_content_type() != "multipart/form-data" or not 0 < len(boundary) <= _MAX_BOUNDARY:
        raise UploadMalformed("Send the files as multipart/form-data, in parts named files.")
    try:
        return PushMultipartParser(boundary, max_segment_count=_MAX_PARTS)
    except MultipartError as error:
        raise _malformed(error) from error


async def _pieces(
    request: Request, within_seconds: float, idle_seconds: float
) -> AsyncIterator[bytes]:
    """The body as it arrives; raises UploadTooSlow if it stands still or takes too long."""
    loop, stream = asyncio.get_running_loop(), aiter(request.stream())
    ends_at = loop.time() + within_seconds
    request.state.body_has_begun = True
    while True:
        seconds = min(ends_at - loop.time(), idle_seconds)
        try:
            # Only the wait for the sender counts as idle, not the time that we take to store.
            async with asyncio.timeout(seconds):
                piece = await anext(stream)
        except StopAsyncIteration:
            return
        except TimeoutError as error:
            raise _too_slow(seconds, within_seconds, idle_seconds) from error
        yield piece


def _too_slow(seconds: float, within_seconds: float, idle_seconds: float) -> UploadTooSlow:
    if seconds < idle_seconds:
        sentence = f"The body did not arrive within {within_seconds:.0f} s."
        return UploadTooSlow(sentence, seconds=round(within_seconds))
    return UploadTooSlow(
        f"No more of the body arrived for {idle_seconds:.0f} s.", seconds=round(idle_seconds)
    )


async def _parse(
    pieces: AsyncIterator[bytes], parser: PushMultipartParser, incoming: Incoming
) -> None:
    """A segment begins a part, bytes are its contents, None ends it; other fields are ignored."""
    received = 0
    async for piece in pieces:
        received += len(piece)
        if received > MAX_BODY_BYTES:
            raise request_too_large()
        now = datetime.now(UTC)
        for event in parser.parse(piece) if piece else ():
            if isinstance(event, MultipartSegment):
                if event.name == _FIELD:
                    types = (value for name, value in event.headerlist if name == "Content-Type")
                    await incoming.begin_file(event.filename or "", next(types, ""), now=now)
            elif incoming.open_file and event is None:
                await incoming.end_file(now=now)
            elif incoming.open_file:
                await incoming.write(bytes(event or b""), now=now)
    parser.close()


def _malformed(error: Exception) -> UploadMalformed:
    return UploadMalformed(f"The multipart body is broken: {str(error).lower().rstrip('.')}.")
