"""Reads a multipart body as it streams in, and hands its files over piece by piece."""

import asyncio
from collections.abc import AsyncIterator
from email.message import Message

from multipart import MultipartError, MultipartSegment, ParserLimitReached, PushMultipartParser
from starlette.requests import Request

from restante.delivery.intake import Intake
from restante.delivery.rules import MAX_FILES_PER_REQUEST, MAX_REQUEST_BYTES, MIB
from restante.errors import RequestTooLarge, TooManyFiles, UploadMalformed, UploadTooSlow

# Names, headers and boundaries around the files.
MAX_BODY_BYTES = MAX_REQUEST_BYTES + MIB
_MAX_PARTS = MAX_FILES_PER_REQUEST + 64  # other fields of the form are read over
_MAX_BOUNDARY = 200
_FIELD = "files"

# What is still read of a refused body, so that its sender can hear why.
_DRAIN_BYTES = MAX_BODY_BYTES
_DRAIN_SECONDS = 5.0


def declared_length(request: Request) -> int | None:
    """The length the sender announced; refuses at once what is too long."""
    text = request.headers.get("content-length", "")
    length = int(text) if text.isascii() and text.isdigit() else None
    if length is not None and length > MAX_BODY_BYTES:
        raise RequestTooLarge(
            f"The request has {length} bytes; {MAX_REQUEST_BYTES} bytes of files are allowed.",
            max=MAX_REQUEST_BYTES,
        )
    return length


async def take_files(request: Request, intake: Intake, *, within_seconds: float) -> None:
    """Feed every part named `files` to the intake; raises what is wrong with the body."""
    parser = _parser(request)
    try:
        async with asyncio.timeout(within_seconds):
            async for event in _events(request, parser):
                await _take(intake, event)
    except TimeoutError as error:
        raise UploadTooSlow(
            f"The body did not arrive within {within_seconds:.0f} s.",
            seconds=round(within_seconds),
        ) from error
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


async def _events(
    request: Request, parser: PushMultipartParser
) -> AsyncIterator[MultipartSegment | bytes | None]:
    received = 0
    request.state.body_has_begun = True
    async for piece in request.stream():
        received += len(piece)
        if received > MAX_BODY_BYTES:
            raise RequestTooLarge(
                f"A request carries at most {MAX_REQUEST_BYTES} bytes of files.",
                max=MAX_REQUEST_BYTES,
            )
        if piece:
            for event in parser.parse(piece):
                yield event
    parser.close()


async def _take(intake: Intake, event: MultipartSegment | bytes | None) -> None:
    if isinstance(event, MultipartSegment):
        if event.name == _FIELD:
            await intake.begin_file(event.filename or "", _content_type(event))
    elif event is None:
        if intake.has_file:
            await intake.end_file()
    elif intake.has_file:
        await intake.write(bytes(event))


def _content_type(part: MultipartSegment) -> str:
    return next((value for name, value in part.headerlist if name == "Content-Type"), "")


def _malformed(error: Exception) -> UploadMalformed:
    return UploadMalformed(f"The multipart body is broken: {str(error).lower().rstrip('.')}.")


async def drain(request: Request) -> bool:
    """
    Read on for a moment: a sender that is cut off while sending never sees its refusal.

    Returns whether the body has ended; one that has not must not be read on for ever.
    """
    if _waits_to_be_asked(request):
        return False
    read = 0
    try:
        async with asyncio.timeout(_DRAIN_SECONDS):
            async for piece in request.stream():  # goes on where it was left
                read += len(piece)
                if read > _DRAIN_BYTES:
                    return False
    except TimeoutError:
        return False
    except RuntimeError:  # how a stream says that it had ended before
        return True
    return True


def _waits_to_be_asked(request: Request) -> bool:
    """Whether the sender sends its body only when we begin to read it, and we have not."""
    expected = request.headers.get("expect", "").lower() == "100-continue"
    return expected and not getattr(request.state, "body_has_begun", False)
