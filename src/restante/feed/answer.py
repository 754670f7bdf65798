"""The HTTP response that waits for a page of a feed and streams it."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from restante import wire
from restante.feed.rules import SMALL_ANSWER_BYTES, Page, Query
from restante.feed.service import Feed
from restante.http import turns
from restante.http.disconnect import disconnected, while_connected
from restante.http.problems import json_response
from restante.ids import WorkspaceId


class PageAnswer(Response):
    """
    A page of a feed as a JSON array.

    Refusals are raised before the answer begins.  A large page is encoded row by row while the
    reader drains it, and has one of the workspace's places until then.
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

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reading = self._feed.read(self._workspace_id, self._query)
        if self._query.may_take_long:
            page = await while_connected(reading, disconnected(receive))
        else:
            page = await reading
        if page.body_bytes <= SMALL_ANSWER_BYTES:
            await self._check_again()
            await json_response(page.rows, headers=_headers(page))(scope, receive, send)
            return
        with self._feed.large_answers.place(self._workspace_id, page.body_bytes):
            await self._check_again()
            self.headers.update(_headers(page))
            await while_connected(self._send(page.rows, send), disconnected(receive))

    async def _check_again(self) -> None:
        if self._query.wait_seconds:  # a token may be revoked while its request waits
            await self._recheck()

    async def _send(self, rows: Sequence[wire.ActivityRow], send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        places = self._feed.large_answers
        for piece in _pieces(rows):
            turns.pause()
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            await asyncio.sleep(places.pause_after(self._workspace_id, len(piece)))
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
