"""Forwards requests to push-mode workspaces and relays their answers."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from uuid import UUID

import structlog
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from restante import wire
from restante.errors import (
    OutcomeUnknown,
    RequestTooLarge,
    RestanteError,
    UploadTooSlow,
    WorkspaceUnreachable,
)
from restante.http import turns
from restante.http.bodies import pieces
from restante.http.disconnect import disconnected, while_connected
from restante.workspaces import auth
from restante.workspaces.push import Answer, Push
from restante.workspaces.rules import Workspace, is_repetition

log = structlog.get_logger()

ATTEMPT_MEANING = (
    "The number of this attempt, if an earlier one may have arrived. Above 1, nothing is forwarded "
    "to a workspace in push mode."
)
_FORWARDED = ("Content-Type", "Content-Length")


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """What is checked of a body that is forwarded: its length and its speed."""

    max_bytes: int
    too_large: RequestTooLarge
    within_seconds: Callable[[int], float]  # in all, by how many bytes have arrived
    idle_seconds: float


def upload(request: Request, workspace: Workspace, limits: BodyLimits) -> Response:
    """Forward a body as it arrives."""
    push: Push = request.app.state.push
    body = _Body(request, workspace, limits)
    headers = {name: request.headers[name] for name in _FORWARDED if name in request.headers}
    longest = limits.within_seconds(limits.max_bytes)
    call = push.upload(workspace, body, headers=headers, within_seconds=longest)
    return _Relay(body, call)


def message(
    request: Request, workspace: Workspace, body: bytes, *, sender: UUID | None
) -> Response:
    """Forward a message that has arrived and been checked; the operator's has no sender."""
    push: Push = request.app.state.push
    call = push.message(workspace, body, sender=sender)
    return _Relay(_Body(request, workspace, None), call)


def refuse_repetition(request: Request) -> None:
    """Raise OutcomeUnknown for a repeated attempt: the workspace would act on it a second time."""
    if is_repetition(request.headers.get(wire.ATTEMPT)):
        raise outcome_unknown()


def outcome_unknown() -> OutcomeUnknown:
    """Nothing is kept of what is forwarded, so nobody can look it up."""
    return OutcomeUnknown(
        "The workspace is called directly, and whether an attempt reached it is not known.",
        delivery_mode="push",
    )


def log_refusal(workspace: Workspace, refusal: RestanteError) -> None:
    """One line per refused upload, in poll mode and in push mode."""
    log.info("upload_refused", workspace=str(workspace.id), code=refusal.code, **refusal.facts)


class _Body:
    """A request's body as it arrives; at most one piece is read ahead."""

    def __init__(self, request: Request, workspace: Workspace, limits: BodyLimits | None) -> None:
        self._request = request
        self._workspace = workspace
        self._limits = limits  # None: it has been read
        self._pieces: asyncio.Queue[bytes | None] = asyncio.Queue()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while (piece := await self._pieces.get()) is not None:
            self._pieces.task_done()
            yield piece

    def answered(self) -> None:
        """The workspace has answered, so it was seen."""
        auth.access(self._request).seen.note(self._workspace.id)

    async def receive(self) -> None:
        """Read until the client has gone; raises what is wrong with the body."""
        if self._limits:
            try:
                await self._read(self._limits)
            except (UploadTooSlow, RequestTooLarge) as refusal:
                log_refusal(self._workspace, refusal)
                raise
        await disconnected(self._request.receive)

    async def _read(self, limits: BodyLimits) -> None:
        received, began_at = 0, asyncio.get_running_loop().time()
        async for piece in pieces(
            self._request,
            within_seconds=limits.within_seconds,
            idle_seconds=limits.idle_seconds,
        ):
            received += len(piece)
            if received > limits.max_bytes:
                raise limits.too_large
            if piece:
                self._pieces.put_nowait(piece)
                await self._forwarded(began_at + limits.within_seconds(received))
        self._pieces.put_nowait(None)

    async def _forwarded(self, ends_at: float) -> None:
        """Wait until the workspace takes what has arrived."""
        try:
            async with asyncio.timeout_at(ends_at):
                await self._pieces.join()
        except TimeoutError as error:
            log.warning(
                "push_failed", workspace=str(self._workspace.id), reason="it reads too slowly"
            )
            raise WorkspaceUnreachable("workspace unreachable") from error


class _Relay(Response):
    """
    Calls the workspace and relays its answer.

    When the client goes away, the call ends at once.  A failure before the answer has begun becomes
    an answer of ours; a later one closes the connection, because a short answer must not look
    complete.
    """

    def __init__(self, body: _Body, call: AbstractAsyncContextManager[Answer]) -> None:
        super().__init__()
        self._body = body
        self._call = call
        self._has_begun = False

    async def __call__(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        turns.pause()
        try:
            await while_connected(self._relay(send), self._body.receive())
        except RestanteError:
            if self._has_begun:
                return
            raise
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _relay(self, send: Send) -> None:
        """Send all of the answer except its end."""
        async with self._call as answer:
            self._body.answered()
            headers = {**answer.headers, "X-Content-Type-Options": "nosniff"}
            encoded = [_encoded(name, value) for name, value in headers.items()]
            self._has_begun = True
            await send({"type": "http.response.start", "status": answer.status, "headers": encoded})
            async for piece in answer.pieces:
                await send({"type": "http.response.body", "body": piece, "more_body": True})


def _encoded(name: str, value: str) -> tuple[bytes, bytes]:
    return name.lower().encode(), value.encode("utf-8", "surrogateescape")
