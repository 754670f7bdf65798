"""The HTTP response that waits for a page of a feed and streams it."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from restante import wire
from restante.errors import TooManyAtOnce
from restante.feed.readers import LargeRoom
from restante.feed.rules import SMALL_ANSWER_BYTES, LeftOut, Page, Query
from restante.feed.service import Feed
from restante.http import turns
from restante.http.disconnect import aborted, disconnected, while_connected
from restante.http.problems import json_response
from restante.ids import WorkspaceId


class PageAnswer(Response):
    """
    A page of a feed as a JSON array.

    Refusals are raised before the answer begins.  A large page is read when there is room for it,
    and encoded row by row while the reader drains it.  A slow reader gives way to those who wait
    for room: its connection is aborted, because a short answer must not pass as whole.
    """

    media_type = "application/json"

    def __init__(
        self,
        feed: Feed,
        workspace_id: WorkspaceId,
        query: Query,
        recheck: Callable[[], Awaitable[object]],
    ) -> None:
        super().__init__()
        del self.headers["content-length"]
        self._feed = feed
        self._workspace_id = workspace_id
        self._query = query
        self._recheck = recheck
        self._has_begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reading = self._feed.read(self._workspace_id, self._query.small)
        if self._query.may_take_long:
            page = await while_connected(reading, disconnected(receive))
        else:
            page = await reading
        if page.left_out is None:
            await self._check_again()
            await json_response(page.rows, headers=_headers(page))(scope, receive, send)
        else:
            await self._answer_large(page.left_out, scope, receive, send)

    async def _answer_large(
        self, left_out: LeftOut, scope: Scope, receive: Receive, send: Send
    ) -> None:
        try:
            await while_connected(self._read_and_send(left_out, send), disconnected(receive))
        except TooManyAtOnce as error:
            if not self._has_begun:
                raise TooManyAtOnce(
                    "Too many large rows of feeds are being sent; try again later.", **error.facts
                ) from error
            scope["app"].state.metrics.connections.cut_off.labels("slow_reader").inc()
            await aborted(scope, receive)

    async def _read_and_send(self, left_out: LeftOut, send: Send) -> None:
        async with LargeRoom(self._feed.large_answers) as room:
            page = await self._feed.read_large(self._workspace_id, self._query, left_out, room)
            await self._check_again()
            self.headers.update(_headers(page))
            with self._feed.answer_rate.sending(self._workspace_id):
                await self._send(page.rows, send)

    async def _check_again(self) -> None:
        if self._query.wait_seconds:  # a token may be revoked while its request waits
            await self._recheck()

    async def _send(self, rows: Sequence[wire.ActivityRow], send: Send) -> None:
        self._has_begun = True
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        rate = self._feed.answer_rate
        for piece in _pieces(rows):
            turns.pause()
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            await asyncio.sleep(rate.pause_after(self._workspace_id, len(piece)))
            await turns.resume()
        await send({"type": "http.response.body", "body": b"]", "more_body": False})


def _pieces(rows: Sequence[wire.ActivityRow]) -> Iterator[bytes]:
    """The array without its end; a large row is cut, so that a slow reader buffers little of it."""
    piece = bytearray(b"[")
    for number, row in enumerate(rows):
        if number:
            piece += b","
        encoded = memoryview(msgspec.json.encode(row))
        for start in range(0, len(encoded), SMALL_ANSWER_BYTES):
            piece += encoded[start : start + SMALL_ANSWER_BYTES]
            if len(piece) > SMALL_ANSWER_BYTES:
                yield bytes(piece)
                piece.clear()
    yield bytes(piece)


def _headers(page: Page) -> dict[str, str]:
    """Enough for a reader to notice a gap, and to go on."""
    return {
        wire.LOWEST_SEQ: str(page.marks.lowest_seq),
        wire.LATEST_SEQ: str(page.marks.last_seq),
        wire.ACKED_SEQ: str(page.marks.acked_seq),
        wire.READ_SEQ: str(page.read_seq),
    }
