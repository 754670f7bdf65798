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
from restante.errors import RequestTooLarge, TooManyFiles, UploadMalformed
from restante.http import turns
from restante.http.bodies import pieces

MAX_BODY_BYTES = MAX_REQUEST_BYTES + MAX_FORM_BYTES
_MAX_PARTS = MAX_FILES_PER_REQUEST + 64  # other fields of the form are ignored
_MAX_BOUNDARY = 200
_MAX_CONTENT_TYPE = 500  # the email package parses it in quadratic time
_FIELD = "files"

# Other requests get their turn after so many bytes: the headers of hostile parts take milliseconds.
_SLICE_BYTES = 16 * 1024


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
    body = pieces(request, within_seconds=within_seconds, idle_seconds=idle_seconds)
    try:
        await _parse(body, parser, incoming)
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
    boundary = _boundary(request.headers.get("content-type", ""))
    if not 0 < len(boundary) <= _MAX_BOUNDARY:
        raise UploadMalformed("Send the files as multipart/form-data, in parts named files.")
    try:
        return PushMultipartParser(boundary, max_segment_count=_MAX_PARTS)
    except MultipartError as error:
        raise _malformed(error) from error


def _boundary(content_type: str) -> str:
    """The boundary of a form; empty if it has none, or if it is no form."""
    if len(content_type) > _MAX_CONTENT_TYPE:
        return ""
    header = Message()
    header["Content-Type"] = content_type
    is_form = header.get_content_type() == "multipart/form-data"
    return header.get_boundary("") if is_form else ""


async def _parse(
    body: AsyncIterator[bytes], parser: PushMultipartParser, incoming: Incoming
) -> None:
    received = 0
    async for piece in body:
        received += len(piece)
        if received > MAX_BODY_BYTES:
            raise request_too_large()
        for at in range(0, len(piece), _SLICE_BYTES):
            await turns.resume()
            await _parse_slice(parser, piece[at : at + _SLICE_BYTES], incoming)
            await asyncio.sleep(0)
    parser.close()


async def _parse_slice(parser: PushMultipartParser, piece: bytes, incoming: Incoming) -> None:
    """A segment begins a part, bytes are its contents, None ends it; other fields are ignored."""
    now = datetime.now(UTC)
    for event in parser.parse(piece):
        if isinstance(event, MultipartSegment):
            if event.name == _FIELD:
                types = (value for name, value in event.headerlist if name == "Content-Type")
                await incoming.begin_file(event.filename or "", next(types, ""), now=now)
        elif incoming.open_file and event is None:
            await incoming.end_file(now=now)
        elif incoming.open_file:
            await incoming.write(bytes(event or b""), now=now)


def _malformed(error: MultipartError) -> UploadMalformed:
    """The parser's own words; of an error with a cause the first part, without the exception."""
    if any(isinstance(part, UnicodeDecodeError) for part in error.args):
        return UploadMalformed("The headers of a part, such as its file name, must be UTF-8.")
    words = str(error.args[0]).lower().rstrip(".")
    return UploadMalformed(f"The multipart body is broken: {words}.")
