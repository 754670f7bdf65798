"""
Hostile load, one attack at a time, as a program of its own.

    python -m bench.hostile polls <Running as JSON>

It prints a line when the attack has begun, and attacks until its standard input closes; then it
prints how many answers it got, by status.  It runs at a low priority: what it needs of a processor
is not what is measured.
"""

import asyncio
import os
import secrets
import sys
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from urllib.error import HTTPError
from uuid import UUID

import asyncpg
import msgspec
import uvloop

from bench import http
from bench.server import Running, Workspace
from restante.delivery.rules import MAX_FILE_BYTES

KIB = 1024
MIB = 1024 * KIB
NICENESS = 10

# Not the address of the quiet client: each address may have a limited number of connections.
ADDRESS = "127.0.0.2"

_FEED_ROWS = 200_000
_PUSH_PLACES = 8
_LAST_CHUNK = b"\r\n0\r\n\r\n"

Attack = Callable[[Running], Awaitable[None]]

answers: Counter[str] = Counter()


class Flood(asyncio.Protocol):
    """Sends a request, again as soon as it is answered, and connects again when it is closed."""

    def __init__(self, port: int, request: bytes) -> None:
        self._port = port
        self._request = request
        self._connecting: asyncio.Task[object] | None = None
        self._begin()

    def _begin(self) -> None:
        self._head = b""
        self._left = 0
        self._is_in_chunks = False
        self._end = b""

    async def connect(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            with suppress(OSError):
                await loop.create_connection(
                    lambda: self, "127.0.0.1", self._port, local_addr=(ADDRESS, 0)
                )
                return
            await asyncio.sleep(0.01)

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride] - a TCP connection has no other
        self.transport = transport
        self._begin()
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        while data:
            if self._is_in_chunks:
                self._end = (self._end + data)[-len(_LAST_CHUNK) :]
                self._is_in_chunks, data = self._end != _LAST_CHUNK, b""
            elif self._left:
                taken = min(self._left, len(data))
                self._left -= taken
                data = data[taken:]
            else:
                head, is_whole, rest = (self._head + data).partition(b"\r\n\r\n")
                self._head, data = (b"", rest) if is_whole else (head, b"")
                if not is_whole:
                    return
                self._left = _length(head)
                self._is_in_chunks = b"chunked" in head.lower()
                answers[head[9:12].decode()] += 1
            if not self._left and not self._is_in_chunks:
                self.transport.write(self._request)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the name is asyncio's
        answers["closed"] += 1
        self._connecting = asyncio.get_running_loop().create_task(self.connect())


class Unread(Flood):
    """Sends a request and reads nothing of its answer."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self.transport.pause_reading()


def _length(head: bytes) -> int:
    _, found, rest = head.lower().partition(b"content-length:")
    return int(rest.partition(b"\r\n")[0]) if found else 0


async def flood(
    server: Running, *requests: bytes, connections: int, way: type[Flood] = Flood
) -> None:
    """Open so many connections and keep all of them busy."""
    floods = [way(server.port, requests[i % len(requests)]) for i in range(connections)]
    await asyncio.gather(*(one.connect() for one in floods))


def _activity(workspace: Workspace, query: str = "") -> bytes:
    return http.request("GET", f"/workspaces/{workspace.id}/activity{query}", workspace.token)


def _message(workspace: Workspace, size: int = 1) -> bytes:
    body = http.message(b"m" * size)
    return http.request("POST", f"/workspaces/{workspace.id}/a2a", workspace.token, body)


def _uploads(workspace: Workspace) -> str:
    return f"/workspaces/{workspace.id}/chat/uploads"


async def nothing(_server: Running) -> None:
    """No request at all, only a busy processor: what the others cannot fall below."""

    def spin() -> None:
        while True:
            pass

    threading.Thread(target=spin, daemon=True).start()


async def polls(server: Running) -> None:
    """1,000 connections poll one workspace, without a pause."""
    await flood(server, _activity(server.register()), connections=1000)


async def filtered_reads(server: Running) -> None:
    """50 readers ask for a type that none of 200,000 rows has."""
    workspace = server.register()
    await _fill_feed(server, workspace)
    await flood(server, _activity(workspace, "?type=none&limit=500"), connections=50)


async def _fill_feed(server: Running, workspace: Workspace) -> None:
    """By SQL, because a rate limit keeps a sender from doing it within the time of a benchmark."""
    connection = await asyncpg.connect(server.dsn, server_settings={"search_path": "restante"})
    await connection.execute(
        """
        insert into feed (id, workspace_id, seq, activity_type, method, summary, request_body,
                          status, created_at)
        select (lpad(to_hex((extract(epoch from now()) * 1000)::bigint), 12, '0')
                || lpad(to_hex(seq), 20, '0'))::uuid,
               $1, seq, 'a2a_receive', 'message/send', 'filling', '{}', 'ok', now()
          from generate_series(1, $2::bigint) seq
        """,
        workspace.id,
        _FEED_ROWS,
    )
    await connection.execute(
        "update feeds set last_seq = $2 where workspace_id = $1", workspace.id, _FEED_ROWS
    )
    await connection.close()


async def wrong_tokens(server: Running) -> None:
    """100 requests in flight with a wrong token, for a workspace with a large card."""
    known = _with_large_card(server)
    # Of the right form, and each another one: anything else is refused without a look-up.
    wrong = [_activity(Workspace(known.id, secrets.token_urlsafe(32))) for _ in range(100)]
    await flood(server, *wrong, connections=len(wrong))


def _with_large_card(server: Running) -> Workspace:
    """A workspace with the largest card that the server takes, at most 1 MB."""
    for size in (1_000_000, 250_000, 60_000, 15_000):
        with suppress(HTTPError):
            return server.register(agent_card={"name": "large", "text": "x" * size})
    return server.register()


async def stalled_pushes(server: Running) -> None:
    """256 messages for workspaces that take a call and never answer it."""
    requests: list[bytes] = []
    for _ in range(_PUSH_PLACES):
        place = await asyncio.start_server(_never_answers, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{place.sockets[0].getsockname()[1]}/"
        requests.append(_message(server.register(delivery_mode="push", url=url)))
    await flood(server, *requests, connections=256)


async def _never_answers(_reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
    await asyncio.Event().wait()


async def declared_uploads(server: Running) -> None:
    """1,600 connections declare more than a server takes, to the last KiB, and send nothing."""
    workspace = server.register()
    whole = http.upload(_uploads(workspace), workspace.token, b"")
    head = whole.partition(b"\r\n\r\n")[0] + b"\r\n\r\n"
    for declared, connections in ((50 * MIB, 1320), (MIB, 120), (10 * KIB, 160)):
        sizes = b"Content-Length: %d" % _length(head), b"Content-Length: %d" % declared
        await flood(server, head.replace(*sizes), connections=connections)
        await asyncio.sleep(2)  # the smaller ones fill what the larger ones leave


async def aborted_uploads(server: Running) -> None:
    """32 connections send 3 MiB of an upload and abort it, again and again."""
    workspace = server.register()
    whole = http.upload(_uploads(workspace), workspace.token, os.urandom(4 * MIB))

    async def abort_again_and_again() -> None:
        while True:
            with suppress(OSError):
                connection = await http.Connection.open(server.port, address=ADDRESS)
                connection.writer.write(whole[: 3 * MIB])
                await connection.writer.drain()
                connection.writer.transport.abort()
                answers["aborted"] += 1

    _begin(abort_again_and_again, 32)


_running: list[asyncio.Task[None]] = []


def _begin(client: Callable[[], Awaitable[None]], count: int) -> None:
    async def run() -> None:
        await client()

    _running.extend(asyncio.create_task(run()) for _ in range(count))


async def large_messages(server: Running) -> None:
    """200 messages of 1 MiB, then 8 readers who ask for all of them in one answer."""
    workspace = server.register()
    for _ in range(200):
        connection = await http.Connection.open(server.port, address=ADDRESS)
        with suppress(OSError, EOFError):  # it may be refused before it has arrived
            status, _ = await connection.ask(_message(workspace, MIB - KIB))
            answers[str(status)] += 1
        connection.close()
    await flood(server, _activity(workspace, "?limit=500"), connections=8)


async def endless_trailers(server: Running) -> None:
    """4 chunked requests that end with trailers without an end."""
    workspace = server.register()
    chunked = http.request("POST", f"/workspaces/{workspace.id}/a2a", workspace.token)
    head = chunked.replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    trailers = b"X-Trailer: endless\r\n" * 8000

    async def send_trailers() -> None:
        while True:
            with suppress(OSError):
                connection = await http.Connection.open(server.port, address=ADDRESS)
                connection.writer.write(head + b"2\r\n{}\r\n0\r\n")
                while True:
                    connection.writer.write(trailers)
                    await connection.writer.drain()
            answers["closed"] += 1

    _begin(send_trailers, 4)


async def long_content_types(server: Running) -> None:
    """16 connections send uploads with a Content-Type of almost 64 KiB."""
    workspace = server.register()
    plain = http.upload(_uploads(workspace), workspace.token, b"content")
    long = plain.replace(b"multipart/form-data;", b"multipart/form-data;" + b'a="\\";' * 10_000, 1)
    await flood(server, long, connections=16)


async def stalled_downloads(server: Running) -> None:
    """500 connections fetch a file of 25 MiB and read nothing of it."""
    workspace = server.register()
    connection = await http.Connection.open(server.port, address=ADDRESS)
    content = os.urandom(MAX_FILE_BYTES)
    _, body = await connection.ask(http.upload(_uploads(workspace), workspace.token, content))
    file_id = UUID(msgspec.json.decode(body)["files"][0]["uri"].rpartition("/")[2])
    path = f"/workspaces/{workspace.id}/pending-uploads/{file_id}/content"
    await flood(server, http.request("GET", path, workspace.token), connections=500, way=Unread)


async def small_uploads(server: Running) -> None:
    """32 connections send files of 1 KiB, without a pause."""
    workspace = server.register()
    request = http.upload(_uploads(workspace), workspace.token, os.urandom(KIB))
    await flood(server, request, connections=32)


async def wake_ups(server: Running) -> None:
    """500 long polls for a type that never comes, and messages that wake them."""
    workspace = server.register()
    await flood(server, _activity(workspace, "?since_seq=0&type=none&wait=60"), connections=500)
    await flood(server, _message(workspace), connections=4)


ATTACKS: dict[str, Attack] = {
    attack.__name__: attack
    for attack in (
        nothing,
        polls,
        filtered_reads,
        wrong_tokens,
        stalled_pushes,
        declared_uploads,
        aborted_uploads,
        large_messages,
        endless_trailers,
        long_content_types,
        stalled_downloads,
        small_uploads,
        wake_ups,
    )
}


async def main(attack: Attack, server: Running) -> None:
    await attack(server)
    print("begun", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    print(msgspec.json.encode(answers).decode(), flush=True)
    os._exit(0)  # the attack goes on until the end


if __name__ == "__main__":
    os.nice(NICENESS)
    uvloop.run(main(ATTACKS[sys.argv[1]], msgspec.json.decode(sys.argv[2], type=Running)))
