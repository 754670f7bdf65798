"""The line between a server and its Postgres: it can be cut, half-cut, held and made silent."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from urllib.parse import parse_qs, urlsplit

from endings import stop_listening

_PIECE = 64 * 1024


class Line:
    """One connection through the link."""

    def __init__(self, link: "Link", client: asyncio.StreamWriter) -> None:
        self._link = link
        self._client = client
        self._server: asyncio.StreamWriter | None = None
        self._passing = asyncio.Event()
        self._passing.set()
        self.replied = asyncio.Event()  # a reply has arrived that is held

    async def run(self, from_client: asyncio.StreamReader) -> None:
        from_server, self._server = await asyncio.open_unix_connection(self._link.socket)
        there = asyncio.create_task(self._there(from_client, self._server))
        back = asyncio.create_task(self._back(from_server))
        try:
            await asyncio.wait({there, back}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (there, back):
                task.cancel()
            self._client.close()
            self._server.close()

    async def _there(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while piece := await reader.read(_PIECE):
                self._link.saw(self, piece)
                writer.write(piece)
            await self._passing.wait()  # a line that is half-cut stays open on the other side

    async def _back(self, reader: asyncio.StreamReader) -> None:
        with suppress(OSError):
            while piece := await reader.read(_PIECE):
                if not self._passing.is_set():
                    self.replied.set()
                await self._passing.wait()
                self._client.write(piece)

    def hold(self) -> None:
        """Replies of the server no longer pass; both ends stay open."""
        self._passing.clear()

    def cut(self) -> None:
        """Close both ends."""
        self._client.transport.abort()
        self._passing.set()

    def half_cut(self) -> None:
        """Close the client's end; the server notices nothing."""
        self.hold()
        self._client.transport.abort()


class Link:
    """Listens on TCP for a Postgres that listens on a Unix socket; `dsn` leads through it."""

    def __init__(self, dsn: str) -> None:
        parts = urlsplit(dsn)
        directory, port = parse_qs(parts.query)["host"][0], parse_qs(parts.query)["port"][0]
        self.socket = f"{directory}/.s.PGSQL.{port}"
        self.lines: set[Line] = set()
        self._marker = b""
        self._after = 0
        self._marked: Line | None = None
        self._caught: asyncio.Future[Line] = asyncio.get_running_loop().create_future()
        self.is_open = True
        self.dsn = ""
        self._user, self._database = parts.username or "restante", parts.path

    def catch(self, marker: bytes, *, after: int = 0) -> "asyncio.Future[Line]":
        """
        The line on which these bytes are sent; replies are held from there on.

        Or from so many messages later: the driver sends the text of a statement, then its
        parameters, then perhaps COMMIT, and each time waits for the reply.
        """
        self._marker, self._after, self._marked = marker, after, None
        self._caught = asyncio.get_running_loop().create_future()
        return self._caught

    def saw(self, line: Line, piece: bytes) -> None:
        if self._caught.done():
            return
        if self._marker and self._marker in piece:
            self._marked = line
        if line is self._marked:
            if self._after == 0:
                line.hold()
                self._caught.set_result(line)
            self._after -= 1

    def silence(self) -> None:
        """Every line that is open now stays open, and nothing comes back on it."""
        for line in self.lines:
            line.hold()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self.is_open:
            writer.close()
            return
        line = Line(self, writer)
        self.lines.add(line)
        try:
            await line.run(reader)
        finally:
            self.lines.discard(line)

    @asynccontextmanager
    async def listening(self) -> AsyncIterator["Link"]:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        self.dsn = f"postgresql://{self._user}@127.0.0.1:{port}{self._database}"
        try:
            yield self
        finally:
            await stop_listening(server)
            for line in list(self.lines):
                line.cut()
            await asyncio.sleep(0)
