"""A minimal HTTP client: requests are built beforehand, answers are not parsed beyond the head."""

import asyncio
from dataclasses import dataclass
from typing import Self

_BOUNDARY = "restante-bench"


@dataclass(slots=True)
class Connection:
    """One persistent connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @classmethod
    async def open(cls, port: int, *, address: str = "127.0.0.1") -> Self:
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", port, limit=4 * 1024 * 1024, local_addr=(address, 0)
        )
        return cls(reader, writer)

    async def ask(self, request: bytes) -> tuple[int, bytes]:
        """Send a request and read the whole answer."""
        status, length = await self.ask_head(request)
        return status, await self.reader.readexactly(length)

    async def ask_head(self, request: bytes) -> tuple[int, int]:
        """Send a request and read the head of the answer; returns status and length."""
        self.writer.write(request)
        await self.writer.drain()
        return await self.head()

    async def head(self) -> tuple[int, int]:
        """Read the head of an answer; returns status and length."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        start = head.lower().index(b"content-length:") + len(b"content-length:")
        return int(head[9:12]), int(head[start : head.index(b"\r\n", start)])

    async def skip(self, length: int) -> None:
        """Read a body and discard it."""
        while length:
            length -= len(await self.reader.read(min(length, 1024 * 1024)))

    def close(self) -> None:
        self.writer.close()


def request(method: str, path: str, token: str, body: bytes = b"", *headers: str) -> bytes:
    """A request as bytes."""
    lines = [
        f"{method} {path} HTTP/1.1",
        "Host: 127.0.0.1",
        f"Authorization: Bearer {token}",
        f"Content-Length: {len(body)}",
        *headers,
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def message(text: bytes = b"") -> bytes:
    """The body of a message."""
    parts = b'[{"kind": "text", "text": "%s"}]' % text
    return (
        b'{"jsonrpc": "2.0", "method": "message/send", "params": {"message": {"parts": %s}}}'
        % parts
    )


def upload(path: str, token: str, content: bytes) -> bytes:
    """A multipart upload of one file as bytes."""
    head = (
        f"--{_BOUNDARY}\r\n"
        'Content-Disposition: form-data; name="files"; filename="bench.bin"\r\n'
        "Content-Type: application/octet-stream\r\n\r\n"
    )
    body = head.encode() + content + f"\r\n--{_BOUNDARY}--\r\n".encode()
    kind = f"Content-Type: multipart/form-data; boundary={_BOUNDARY}"
    return request("POST", path, token, body, kind)
