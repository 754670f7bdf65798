"""
What an operation takes and returns, declared once: handlers decode with it, OpenAPI describes it.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, cast

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from restante.errors import BadRequest, MessageTooLarge, RestanteError, UploadTooSlow

Handler = Callable[[Request], Awaitable[Response]]
Caller = Literal["anyone", "workspace", "workspace or admin", "any workspace or admin", "admin"]

T = TypeVar("T", bound=msgspec.Struct)

MAX_JSON_BYTES = 1024 * 1024
MAX_DEPTH = 100
_JSON_SECONDS = 30

# What reading a JSON body can raise, beside BadRequest.
BODY_REFUSALS = (MessageTooLarge, UploadTooSlow)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One method of one route, as its callers see it."""

    summary: str
    caller: Caller
    details: str = ""  # what a caller should know beyond the summary
    reads_token: bool = False  # anyone may call, and a token says who does
    query: type[msgspec.Struct] | None = None
    body: type[msgspec.Struct] | None = None
    files: bool = False  # the body is multipart with parts named `files`
    answers: Mapping[int, Any] = field(
        default_factory=dict[int, Any]
    )  # status to type, media type, or None where there is no body
    # What is refused and why; a bare status stands for every error that has it.
    refusals: Sequence[int | type[RestanteError]] = ()
    headers: Mapping[str, str] = field(default_factory=dict[str, str])  # request headers it reads
    answer_headers: Mapping[str, str] = field(default_factory=dict[str, str])


_described: dict[Handler, Operation] = {}


def operation(**described: Any) -> Callable[[Handler], Handler]:
    """Describe a handler."""

    def describe(handler: Handler) -> Handler:
        _described[handler] = Operation(**described)
        return handler

    return describe


def operation_of(handler: object) -> Operation | None:
    """How a handler was described."""
    return _described.get(cast("Handler", handler))


async def json_body(request: Request, shape: type[T]) -> T:
    """Decode the body; raises BadRequest with the field's name, or MessageTooLarge."""
    return _decoded(await read_limited(request), shape)


async def read_limited(request: Request) -> bytes:
    """The whole body, within the limits of size and time."""
    try:
        async with asyncio.timeout(_JSON_SECONDS):
            return await _read(request)
    except TimeoutError as error:
        raise UploadTooSlow(
            f"The body did not arrive within {_JSON_SECONDS} s.", seconds=_JSON_SECONDS
        ) from error


async def _read(request: Request) -> bytes:
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_JSON_BYTES:
            raise MessageTooLarge(
                f"A JSON body may have {MAX_JSON_BYTES} bytes.", max=MAX_JSON_BYTES
            )
    return bytes(body)


def _decoded(body: bytes, shape: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=shape)
    except msgspec.ValidationError as error:
        raise BadRequest(_sentence(str(error))) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest("The body is not valid JSON.") from error


def query_of(request: Request, shape: type[T]) -> T:
    """Decode the query; unknown parameters are ignored."""
    known = {f.encode_name: f.name for f in msgspec.structs.fields(shape)}
    given = {name: value for name, value in request.query_params.items() if name in known}
    try:
        found = msgspec.convert(given, shape, strict=False)
    except msgspec.ValidationError as error:
        raise BadRequest(_sentence(str(error))) from error
    for name in given:
        # The text "null" decodes to None, which would silently drop a filter or a cursor.
        if getattr(found, known[name]) is None:
            raise BadRequest(f"{name} is wrong: leave it out instead of sending null.")
    return found


def _sentence(problem: str) -> str:
    """Turn "Invalid enum value 'x' - at `$.delivery_mode`" into a sentence about delivery_mode."""
    what, _, path = problem.partition(" - at `$")
    what = what.replace("`", "")
    name = path.rstrip("`").lstrip(".")
    return f"{name} is wrong: {what[:1].lower()}{what[1:]}." if name else f"{what}."


def is_too_deep(value: object) -> bool:
    """
    Whether decoded JSON is nested deeper than `MAX_DEPTH`.

    Readers have limits of their own: a feed row that one cannot parse would block it.
    """
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [inner for container in level for inner in _inside(container)]
        if not level:
            return False
    return True


def _inside(container: object) -> Iterable[object]:
    if isinstance(container, dict):
        return cast("dict[str, object]", container).values()
    return cast("list[object]", container) if isinstance(container, list) else ()
