"""Senders that record their requests and answers, to compare with what a workspace receives."""

import asyncio
import hashlib
import json
import random
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from aiohttp import ClientError, ClientSession, ClientTimeout
from processes import Server

MIB = 1024 * 1024
PIECE = 128 * 1024
BOUNDARY = "a-boundary-that-is-in-no-file"

# There was no answer: the upload is stored completely or not at all.
LOST = 0
UNAVAILABLE = 503

_RANDOM_BYTES = random.Random("Restante").randbytes(9 * MIB)


@dataclass(frozen=True, slots=True)
class File:
    """A file to send; its name is unique in the test."""

    name: str
    content: bytes
    mimetype: str = "application/pdf"

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()


@dataclass(slots=True)
class Request:
    """One upload and its answer."""

    files: Sequence[File]
    key: str | None
    is_chunked: bool = False  # its length is not announced
    status: int = LOST
    answer: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    @property
    def is_confirmed(self) -> bool:
        return self.status == 200

    @property
    def names(self) -> list[str]:
        return [file.name for file in self.files]


def some_size(chance: random.Random) -> int:
    """Mostly small, some around the size of a written piece, some far above it."""
    kind = chance.random()
    if kind < 0.5:
        return chance.choice([1, 10, 1000, 10_000, 60_000])
    if kind < 0.8:
        return chance.choice([MIB // 4, MIB, 2 * MIB]) + chance.randint(-1, 1)
    return chance.randint(1, 8 * MIB)


def some_request(chance: random.Random) -> Request:
    """One to five files, with and without a key and an announced length."""
    files: list[File] = []
    for _ in range(chance.randint(1, 5)):
        size = some_size(chance)
        start = chance.randrange(len(_RANDOM_BYTES) - size)
        files.append(File(f"{uuid4().hex}.pdf", _RANDOM_BYTES[start : start + size]))
    key = str(uuid4()) if chance.random() < 0.5 else None
    return Request(files, key, is_chunked=chance.random() < 0.2)


def _body(files: Sequence[File]) -> bytes:
    parts: list[bytes] = []
    for file in files:
        head = (
            f"--{BOUNDARY}\r\n"
            f'Content-Disposition: form-data; name="files"; filename="{file.name}"\r\n'
            f"Content-Type: {file.mimetype}\r\n\r\n"
        )
        parts += [head.encode(), file.content, b"\r\n"]
    return b"".join([*parts, f"--{BOUNDARY}--\r\n".encode()])


async def _pieces(body: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(body), PIECE):
        yield body[start : start + PIECE]


class Mailbox:
    """A workspace that polls: files are sent to it, and it reads its feed."""

    def __init__(self, http: ClientSession, workspace_id: str, token: str) -> None:
        self.http = http
        self.id = workspace_id
        self.path = f"/workspaces/{workspace_id}"
        self.headers = {"Authorization": f"Bearer {token}"}

    def at(self, http: ClientSession) -> "Mailbox":
        """The same workspace at another server, or at the same one after it was restarted."""
        return Mailbox(http, self.id, self.headers["Authorization"].removeprefix("Bearer "))

    async def send(self, request: Request) -> Request:
        """Send an upload and record its answer, or that there was none."""
        body = _body(request.files)
        headers = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"}
        if request.key:
            headers["Idempotency-Key"] = request.key
        if not request.is_chunked:
            headers["Content-Length"] = str(len(body))
        try:
            async with self.http.post(
                self.path + "/chat/uploads", data=_pieces(body), headers=self.headers | headers
            ) as answer:
                text = await answer.text()
        except (ClientError, OSError, TimeoutError):
            request.status = LOST
            return request
        request.status = answer.status
        if request.is_confirmed:
            request.answer = json.loads(text)["files"]
        return request

    async def send_message(self, text: str) -> None:
        body = {
            "jsonrpc": "2.0",
            "method": "message/send",
            "params": {"message": {"parts": [{"kind": "text", "text": text}]}},
        }
        async with self.http.post(self.path + "/a2a", json=body, headers=self.headers) as answer:
            assert answer.status == 200, await answer.text()

    async def rows(self, **query: str) -> list[dict[str, Any]]:
        """A page of the feed."""
        async with self.http.get(
            self.path + "/activity", params=query, headers=self.headers
        ) as answer:
            assert answer.status == 200, await answer.text()
            return await answer.json()

    async def whole_feed(self) -> list[dict[str, Any]]:
        """Every row, oldest first, by following the cursor from the newest page's oldest row."""
        newest = await self.rows(limit="500")
        assert len(newest) < 500, "more rows than the test was made for"
        return newest[::-1]

    async def waiting(self) -> list[dict[str, Any]]:
        """The list of pending uploads."""
        async with self.http.get(
            self.path + "/pending-uploads", params={"limit": "500"}, headers=self.headers
        ) as answer:
            assert answer.status == 200, await answer.text()
            return (await answer.json())["uploads"]

    async def sha256_of(self, file_id: str) -> str:
        """Fetch a file; returns its digest."""
        digest = hashlib.sha256()
        async with self.http.get(
            f"{self.path}/pending-uploads/{file_id}/content", headers=self.headers
        ) as answer:
            assert answer.status == 200, await answer.text()
            async for piece in answer.content.iter_any():
                digest.update(piece)
        return digest.hexdigest()


def session_with(server: Server) -> ClientSession:
    """A session with the running server; after a restart its address is another one."""
    return ClientSession(server.address, timeout=ClientTimeout(total=30))


async def registered(http: ClientSession) -> Mailbox:
    """A new workspace."""
    workspace_id = str(uuid4())
    body = {"id": workspace_id, "delivery_mode": "poll", "agent_card": {"name": "test"}}
    async with http.post("/registry/register", json=body) as answer:
        assert answer.status == 200, await answer.text()
        return Mailbox(http, workspace_id, (await answer.json())["auth_token"])


class Senders:
    """Several concurrent senders, each with one request after the other, until stopped."""

    def __init__(self, mailbox: Mailbox, chance: random.Random, count: int) -> None:
        self.requests: list[Request] = []
        self._mailbox = mailbox
        self._stop = False
        self._answered = asyncio.Condition()
        seeds = [chance.getrandbits(64) for _ in range(count)]
        self._tasks = [asyncio.create_task(self._send(random.Random(seed))) for seed in seeds]

    async def _send(self, chance: random.Random) -> None:
        while not self._stop:
            request = some_request(chance)
            self.requests.append(request)
            await self._mailbox.send(request)
            async with self._answered:
                self._answered.notify_all()
            if request.status == LOST:
                return

    async def answered(self, count: int) -> None:
        """Wait until so many requests were confirmed."""
        async with self._answered:
            await self._answered.wait_for(lambda: self._confirmed() >= count)

    def _confirmed(self) -> int:
        return sum(request.is_confirmed for request in self.requests)

    async def stop(self) -> None:
        """Begin no further request, and wait for the running ones."""
        self._stop = True
        await asyncio.gather(*self._tasks)


async def followed(
    mailbox: Mailbox, first_id: str, is_last: Callable[[dict[str, Any]], bool], *, wait: str
) -> list[dict[str, Any]]:
    """Follow the feed by its cursor until a certain row."""
    seen: list[dict[str, Any]] = []
    cursor = first_id
    while not (seen and is_last(seen[-1])):
        page = await mailbox.rows(since_id=cursor, limit="7", wait=wait)
        seen += page
        cursor = page[-1]["id"] if page else cursor
    return seen
