"""The HTTP response that waits for a page of the log and streams it."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from restante.errors import TooManyAtOnce
from restante.http import turns
from restante.http.disconnect import aborted, disconnected, while_connected
from restante.oplog import peers, tables, ulids
from restante.oplog.node import LARGE_RECORDS_BYTES, Node
from restante.oplog.peers import Reader
from restante.oplog.serving import serve
from restante.oplog.serving.encoding import PageEncoder
from restante.oplog.serving.log import Record
from restante.oplog.serving.serve import Ask, LogChanged, Page
from restante.wire import oplog as wire

_PIECE_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a reader, which is authenticated again whenever it has waited."""

    ask: Ask
    wait_seconds: float
    authenticate: Callable[[], Awaitable[Reader]]
    clock: Callable[[], datetime]


class PageAnswer(Response):
    """
    A page of the log as a JSON array.

    A large page is read piece by piece while the reader drains it, so it holds no connection and
    little memory.  If some of it is dropped meanwhile, the connection is aborted: a short answer
    must not pass as whole.
    """

    media_type = "application/json"

    def __init__(self, node: Node, request: Request) -> None:
        super().__init__()
        del self.headers["content-length"]
        self._node = node
        self._request = request
        self._has_begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_head = scope["method"] == "HEAD"
        try:
            await while_connected(self._answer(send, is_head=is_head), disconnected(receive))
        except (LogChanged, TooManyAtOnce):
            if not self._has_begun:
                raise
            await aborted(scope, receive)

    async def _answer(self, send: Send, *, is_head: bool) -> None:
        reader, page = await self._page()
        ask, db = self._request.ask, self._node.db
        if reader.peer is not None:
            self._node.rates.check(reader.peer, reader.network)
        self.headers.update(await self._answer_headers(reader, page))
        if is_head:
            await self._start(send)
            await self._send(send, b"", more=False)
            return
        await serve.note_served(db, reader, ask, page, self._node.open_ends)
        encoder = PageEncoder(page.tables, is_ours=ask.is_ours)
        piece = await self._encoded(encoder, page, page.records)
        size = len(piece)
        if page.is_whole:
            piece += encoder.end()
            self.headers["Content-Length"] = str(len(piece))
            await self._start(send)
            await self._send(send, piece, more=False)
        else:
            await self._start(send)
            size += await self._stream(send, encoder, page, piece)
        if reader.peer is not None:
            self._node.rates.spend(reader.peer, reader.network, ops=encoder.ops, size=size)

    async def _page(self) -> tuple[Reader, Page]:
        """The page; an empty one is answered when the time is over."""
        request, loop = self._request, asyncio.get_running_loop()
        ends_at = loop.time() + request.wait_seconds
        reader, page = await self._read()
        if page.last is not None or page.gap_tables or not request.wait_seconds:
            return reader, page
        async with self._node.watcher.waiting() as waiting:
            while True:
                reader, page = await self._read()
                left = 0 if waiting.is_over else ends_at - loop.time()
                if page.last is not None or page.gap_tables or left <= 0:
                    return reader, page
                turns.pause()
                await waiting.next(left)
                await turns.resume()

    async def _read(self) -> tuple[Reader, Page]:
        # A token may be revoked while its request waits, or other tables be allowed.
        reader = await self._request.authenticate()
        ask, now = self._request.ask, self._request.clock()
        page = await serve.read(self._node.db, reader, ask, self._node.open_ends, now=now)
        return reader, page

    async def _stream(self, send: Send, encoder: PageEncoder, page: Page, piece: bytes) -> int:
        await self._send(send, piece, more=True)
        size = 0
        async with aclosing(serve.rest(self._node.db, page)) as windows, AsyncExitStack() as room:
            async for records in windows:
                if records[0].data is None:  # it comes next, and needs room
                    large = min(records[0].size, LARGE_RECORDS_BYTES)
                    place = await room.enter_async_context(self._node.room.place(large))
                    await place.grow(large)
                    continue
                piece = await self._encoded(encoder, page, records)
                size += len(piece)
                await self._send(send, piece, more=True)
                await room.aclose()
        await self._send(send, encoder.end(), more=False)
        return size

    async def _encoded(self, encoder: PageEncoder, page: Page, records: Sequence[Record]) -> bytes:
        outdated = await serve.outdated(self._node.db, page, records, self._request.ask.floor)
        return encoder.add(records, outdated)

    async def _start(self, send: Send) -> None:
        self._has_begun = True
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})

    async def _send(self, send: Send, piece: bytes, *, more: bool) -> None:
        """In pieces, so that a slow reader buffers little."""
        turns.pause()
        view = memoryview(piece)
        for start in range(0, len(piece) - _PIECE_BYTES, _PIECE_BYTES):
            part = bytes(view[start : start + _PIECE_BYTES])
            await send({"type": "http.response.body", "body": part, "more_body": True})
        end = (len(piece) - 1) // _PIECE_BYTES * _PIECE_BYTES if piece else 0
        await send({"type": "http.response.body", "body": bytes(view[end:]), "more_body": more})
        await turns.resume()

    async def _answer_headers(self, reader: Reader, page: Page) -> dict[str, str]:
        headers = {"Cache-Control": "no-store"}
        if reader.is_authenticated:
            headers[wire.OPLOG_VERSION] = "1"
        if page.scanned.ulid != ulids.LOWEST:
            headers[wire.LAST_SCANNED_ULID] = ulids.text_of(page.scanned.ulid)
        if page.is_limited:
            headers[wire.LIMITED] = "true"
        if self._request.ask.is_ours:
            headers |= self._own_headers(page)
            async with self._node.db.connection() as connection:
                headers[wire.NODE_HOST] = await tables.own_host(connection)
                has_read = await peers.read_from(connection, reader.peer.id) if reader.peer else ""
            if has_read:
                headers[wire.CURSOR_ON_YOU] = has_read
        elif page.gap_tables:
            headers[wire.RETENTION_GAP] = "true"
            headers[wire.AVAILABLE_MIN_ULID] = ulids.text_of(page.lowest_kept or UUID(int=0))
        return headers

    def _own_headers(self, page: Page) -> dict[str, str]:
        headers = {
            wire.NEXT_POSITION: str(page.scanned.position),
            wire.SERVER_TIME: str(int(self._request.clock().timestamp() * 1000)),
        }
        if page.gap_tables:
            headers[wire.GAP_TABLES] = json.dumps(page.gap_tables)
        if page.new_tables:
            headers[wire.NEW_TABLES] = json.dumps(page.new_tables)
        return headers
