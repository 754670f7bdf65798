"""Requests that are handed through to push-mode workspaces, and the answers on their way back."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager

import structlog
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from restante.delivery import multipart
from restante.delivery.download import until_gone
from restante.delivery.rules import MAX_REQUEST_BYTES
from restante.errors import (
    RequestTooLarge,
    RestanteError,
    UploadTooSlow,
    WorkspaceUnreachable,
)
from restante.http.problems import on_restante_error
from restante.server.context import context
from restante.workspaces.push import Answer
from restante.workspaces.rules import Workspace

log = structlog.get_logger()

_HANDED_ON = ("Content-Type", "Content-Length")


async def upload(request: Request, workspace: Workspace) -> Response:
    """Hand the body through; only its length and its pace are our business."""
    here = context(request)
    try:
        declared = multipart.declared_length(request)
    except RestanteError as refusal:
        _note_refusal(workspace, refusal)
        return await _refused(request, refusal)
    length = multipart.MAX_BODY_BYTES if declared is None else declared
    within_seconds = here.delivery.staging.time_allowed(length).total_seconds()
    body = _Body(request, workspace, within_seconds=within_seconds)
    headers = {name: request.headers[name] for name in _HANDED_ON if name in request.headers}
    call = here.push.upload(workspace, body, headers=headers, within_seconds=within_seconds)
    return _Relay(request, body, call)


async def message(request: Request, workspace: Workspace, body: bytes) -> Response:
    """Hand a message through that has arrived and been checked."""
    call = context(request).push.message(workspace, body)
    return _Relay(request, _Body(request, workspace, is_over=True), call)


async def _refused(request: Request, refusal: RestanteError) -> Response:
    """For a body that is still on its way: if it does not end soon, its connection does."""
    answer = await on_restante_error(request, refusal)
    if isinstance(refusal, UploadTooSlow) or not await multipart.drain(request):
        answer.headers["Connection"] = "close"
    return answer


def _note_refusal(workspace: Workspace, refusal: RestanteError) -> None:
    log.info("upload_refused", workspace=str(workspace.id), code=refusal.code, **refusal.facts)


class _Body:
    """A request's body as it arrives: one piece is read ahead, no more."""

    def __init__(
        self,
        request: Request,
        workspace: Workspace,
        *,
        within_seconds: float = 0,
        is_over: bool = False,
    ) -> None:
        self._request = request
        self._workspace = workspace
        self._within_seconds = within_seconds
        self._pieces: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._sender_is_due = True
        self.is_over = is_over

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while (piece := await self._pieces.get()) is not None:
            self._pieces.task_done()
            yield piece

    async def arrive(self) -> None:
        """Read on until the sender has gone away; raises what is wrong with the body."""
        if not self.is_over:
            try:
                async with asyncio.timeout(self._within_seconds):
                    await self._read()
            except TimeoutError as error:
                raise self._late() from error
            except RequestTooLarge as refusal:
                _note_refusal(self._workspace, refusal)
                raise
        await until_gone(self._request.receive)

    async def _read(self) -> None:
        received = 0
        self._request.state.body_has_begun = True
        while not self.is_over:
            self._sender_is_due = False
            await self._pieces.join()
            self._sender_is_due = True
            news = await self._request.receive()
            if news["type"] == "http.disconnect":
                raise ClientDisconnect
            piece = news.get("body", b"")
            received += len(piece)
            if received > multipart.MAX_BODY_BYTES:
                raise RequestTooLarge(
                    f"A request carries at most {MAX_REQUEST_BYTES} bytes of files.",
                    max=MAX_REQUEST_BYTES,
                )
            self.is_over = not news.get("more_body", False)
            if piece:
                self._pieces.put_nowait(piece)
        self._pieces.put_nowait(None)

    def _late(self) -> RestanteError:
        if not self._sender_is_due:
            log.warning(
                "push_failed", workspace=str(self._workspace.id), reason="it takes too slowly"
            )
            return WorkspaceUnreachable("workspace unreachable")
        seconds = self._within_seconds
        refusal = UploadTooSlow(
            f"The body did not arrive within {seconds:.0f} s.", seconds=round(seconds)
        )
        _note_refusal(self._workspace, refusal)
        return refusal


class _Relay(Response):
    """
    Calls the workspace and passes its answer on.

    The sender is watched all the while: when it goes away, the call ends at once.  Before the
    answer has begun a failure is raised, and becomes an answer of ours; afterwards the connection
    is broken off, because a short answer must not pass for a whole one.
    """

    def __init__(
        self, request: Request, body: _Body, call: AbstractAsyncContextManager[Answer]
    ) -> None:
        super().__init__()
        self._request = request
        self._body = body
        self._call = call
        self._has_begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._relay(send)
        except RestanteError as refusal:
            if self._has_begun:
                return
            if self._body.is_over:
                raise
            answer = await _refused(self._request, refusal)
            await answer(scope, receive, send)
            return
        if not self._body.is_over:  # the workspace has answered without reading everything
            await multipart.drain(self._request)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _relay(self, send: Send) -> None:
        """Send all of the answer but its end."""
        answering = asyncio.create_task(self._pass_on(send))
        arriving = asyncio.create_task(self._body.arrive())
        try:
            await asyncio.wait({answering, arriving}, return_when=asyncio.FIRST_COMPLETED)
            if arriving.done():
                await arriving
                raise ClientDisconnect
            await answering
        finally:
            for task in (answering, arriving):
                task.cancel()
            await asyncio.gather(answering, arriving, return_exceptions=True)

    async def _pass_on(self, send: Send) -> None:
        async with self._call as answer:
            headers = {**answer.headers, "X-Content-Type-Options": "nosniff"}
            if not self._body.is_over:
                headers["Connection"] = "close"  # the rest of it is nobody's next request
            encoded = [_encoded(name, value) for name, value in headers.items()]
            self._has_begun = True
            await send({"type": "http.response.start", "status": answer.status, "headers": encoded})
            async for piece in answer.pieces:
                await send({"type": "http.response.body", "body": piece, "more_body": True})


def _encoded(name: str, value: str) -> tuple[bytes, bytes]:
    return name.lower().encode(), value.encode("utf-8", "surrogateescape")
