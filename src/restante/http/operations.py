"""
What an operation takes and returns, declared once: handlers decode with it, OpenAPI describes it.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, TypeVar, cast

import msgspec
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response

from restante.errors import BadRequest, MessageTooLarge, RestanteError, UploadTooSlow
from restante.http import surrogates, turns
from restante.http.bodies import declared_length
from restante.http.body_room import BodyRoom
from restante.http.weights import Weight
from restante.ids import as_uuid
from restante.text import printable

Handler = Callable[[Request], Awaitable[Response]]
Caller = Literal[
    "anyone", "workspace", "workspace or admin", "any workspace or admin", "peer", "admin"
]

T = TypeVar("T", bound=msgspec.Struct)

MAX_JSON_BYTES = 1024 * 1024
# Of bodies that are read before a token is checked, and of most others.
SMALL_JSON_BYTES = 16 * 1024
MAX_DEPTH = 100
MAX_QUERY_BYTES = 8192
_CONTAINERS = (dict, list)
_MAX_SENTENCE = 300  # what is wrong may quote a value of any length

# What reading a JSON body can raise, beside BadRequest.
BODY_REFUSALS = (MessageTooLarge, UploadTooSlow)


@dataclass(frozen=True, slots=True)
class JsonPace:
    """How long a JSON body may take to arrive."""

    idle_seconds: float  # without a single byte
    total_seconds: float  # and so much longer as it has bytes, at the slowest speed
    bytes_per_second: float


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
    optional_headers: Mapping[str, str] = field(default_factory=dict[str, str])  # of some answers


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


OnBytes = Callable[[int], Awaitable[None]]


async def _ignore(_size: int) -> None:
    pass


async def json_body(
    request: Request,
    shape: type[T],
    *,
    max_bytes: int = SMALL_JSON_BYTES,
    on_bytes: OnBytes = _ignore,
) -> T:
    """
    Decode the body; raises BadRequest with the field's name, or MessageTooLarge.

    Raises TooManyAtOnce if there is no room for a large one.
    """
    async with _room(request).place(largest_length(request, max_bytes)) as place:

        async def on_piece(size: int) -> None:
            await on_bytes(size)
            await place.grow(size)

        body = await read_limited(request, max_bytes=max_bytes, on_bytes=on_piece)
    return _decoded(body, shape)


def _room(request: Request) -> BodyRoom:
    return request.app.state.body_room


def largest_length(request: Request, max_bytes: int) -> int:
    """The size of the body as it is declared, or the largest that it can have."""
    declared = declared_length(request)
    return max_bytes if declared is None else min(declared, max_bytes)


async def read_limited(
    request: Request,
    *,
    max_bytes: int = MAX_JSON_BYTES,
    on_bytes: OnBytes = _ignore,
) -> bytes:
    """
    The whole body, within the limits of size, weight and time.

    `on_bytes` is called with the size of each piece that arrives.  It may refuse it, or wait.
    """
    body, deadline = _Body(max_bytes, on_bytes), _Deadline(request.app.state.json_pace)
    try:
        async with deadline.total, deadline.idle:
            await _read(request, body, deadline)
            return bytes(body.arrived)
    except TimeoutError as error:
        raise deadline.too_slow() from error


class _Deadline:
    """When a body is too slow: after a pause, or in all."""

    def __init__(self, pace: JsonPace) -> None:
        self._pace = pace
        self._started_at = asyncio.get_running_loop().time()
        self._seconds = pace.total_seconds
        self.idle = asyncio.timeout(pace.idle_seconds)
        self.total = asyncio.timeout(pace.total_seconds)

    def suspend(self) -> None:
        """The sender is not waited for."""
        self.idle.reschedule(None)

    def renew(self, arrived: int) -> None:
        """Wait for more, after this many bytes."""
        self._seconds = self._pace.total_seconds + arrived / self._pace.bytes_per_second
        self.total.reschedule(self._started_at + self._seconds)
        self.idle.reschedule(asyncio.get_running_loop().time() + self._pace.idle_seconds)

    def too_slow(self) -> UploadTooSlow:
        """The refusal, once one of them is over."""
        if self.idle.expired():
            seconds = self._pace.idle_seconds
            return UploadTooSlow(f"Nothing of the body arrived for {seconds:g} s.", seconds=seconds)
        seconds = round(self._seconds, 1)
        return UploadTooSlow(f"The body did not arrive within {seconds:g} s.", seconds=seconds)


class _Body:
    """What has arrived of a body."""

    def __init__(self, max_bytes: int, on_bytes: OnBytes) -> None:
        self.arrived = bytearray()
        self._weight = Weight()
        self._max_bytes = max_bytes
        self._on_bytes = on_bytes

    async def add(self, piece: bytes) -> None:
        await self._on_bytes(len(piece))
        self.arrived += piece
        if len(self.arrived) > self._max_bytes:
            raise MessageTooLarge(
                f"This JSON body may have {self._max_bytes} bytes.", max=self._max_bytes
            )
        self._weight.add(piece)


async def _read(request: Request, body: _Body, deadline: _Deadline) -> None:
    turns.pause()
    async for piece in request.stream():
        deadline.suspend()
        await turns.resume()
        await body.add(piece)
        deadline.renew(len(body.arrived))
        turns.pause()
    await turns.resume()


def _decoded(body: bytes, shape: type[T]) -> T:
    try:
        try:
            return decoded(body, shape)[0]
        except msgspec.ValidationError:
            # The decoder takes two spellings of a UUID only; few clients have others.
            sent, _ = decoded(body, Any)
            if not (ids := _respelled_ids(sent, shape)):
                raise
            return msgspec.convert(sent | ids, shape)
    except msgspec.ValidationError as error:
        raise BadRequest(_sentence(str(error))) from error


def decoded(body: bytes, shape: Any) -> tuple[Any, bytes]:
    """
    What a body says, and the body in which halves of characters are replaced, if it has any.

    Raises BadRequest if it is not JSON, and msgspec's ValidationError if it has another shape.
    """
    try:
        return _parsed(body, shape), body
    except BadRequest:
        if (whole := surrogates.mended(body)) is None:
            raise
    return _parsed(whole, shape), whole


def _parsed(body: bytes, shape: Any) -> Any:
    try:
        return msgspec.json.decode(body, type=shape)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        if isinstance(error, msgspec.ValidationError):
            raise
        raise BadRequest("The body is not valid JSON.") from error


def _respelled_ids(sent: Any, shape: type) -> dict[str, str]:
    """The ids that the shape has and that were sent in another spelling, in the usual one."""
    if not isinstance(sent, dict):
        return {}
    fields = cast("dict[str, Any]", sent)
    return {
        name: str(found)
        for name in _id_fields(shape)
        if isinstance(value := fields.get(name), str)
        and (found := as_uuid(value))
        and str(found) != value
    }


@lru_cache
def _id_fields(shape: type) -> frozenset[str]:
    described = cast("msgspec.inspect.StructType", msgspec.inspect.type_info(shape))
    return frozenset(field.encode_name for field in described.fields if _has_uuid(field.type))


def _has_uuid(described: msgspec.inspect.Type) -> bool:
    if isinstance(described, msgspec.inspect.Metadata):
        return _has_uuid(described.type)
    if isinstance(described, msgspec.inspect.UnionType):
        return any(map(_has_uuid, described.types))
    return isinstance(described, msgspec.inspect.UUIDType)


def parameters(connection: HTTPConnection) -> dict[str, str]:
    """
    The query, parsed unless it is too long; `query_of` is for more than one of them.

    Of several parameters with one name the first counts, as it does for Go's servers.
    """
    if len(connection.scope["query_string"]) > MAX_QUERY_BYTES:
        raise BadRequest(f"The query is too long: at most {MAX_QUERY_BYTES} bytes.")
    return dict(reversed(connection.query_params.multi_items()))


def query_of(request: Request, shape: type[T]) -> T:
    """Decode the query; an empty parameter counts as absent, and unknown ones are ignored."""
    known, sent = _fields(shape), parameters(request)
    given = {name: value for name, value in sent.items() if value and name in known}
    try:
        found = msgspec.convert(given | _respelled_ids(given, shape), shape, strict=False)
    except msgspec.ValidationError as error:
        raise BadRequest(_sentence(str(error))) from error
    for name in given:
        # The text "null" decodes to None, which would silently drop a filter or a cursor.
        if getattr(found, known[name]) is None:
            raise BadRequest(f"{name} is wrong: leave it out instead of sending null.")
    return found


@lru_cache
def _fields(shape: type) -> dict[str, str]:
    return {f.encode_name: f.name for f in msgspec.structs.fields(shape)}


def _sentence(problem: str) -> str:
    """Turn "Invalid enum value 'x' - at `$.delivery_mode`" into a sentence about delivery_mode."""
    what, has_path, path = problem.rpartition(" - at `$")
    if not has_path:
        what, path = problem, ""
    what = printable(what.replace("`", ""), max_length=_MAX_SENTENCE)
    name = path.rstrip("`").lstrip(".")
    return f"{name} is wrong: {what[:1].lower()}{what[1:]}." if name else f"{what}."


def is_too_deep(value: object) -> bool:
    """
    Whether decoded JSON is nested deeper than `MAX_DEPTH`.

    Readers have limits of their own: a feed row that one cannot parse would block it.
    """
    level: list[dict[str, Any] | list[Any]] = [[value]]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for container in level
            for inner in (container.values() if isinstance(container, dict) else container)
            if inner and type(inner) in _CONTAINERS
        ]
        if not level:
            return False
    return True
