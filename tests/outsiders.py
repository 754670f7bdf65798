"""
Clients that were written for the existing server: the standard library, and nothing of ours.

They know the addresses, the headers and the JSON of the protocol, and no more.
"""

import http.client
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BufferedIOBase
from typing import Any, NamedTuple, Self
from urllib.parse import urlencode, urlsplit
from uuid import uuid4

from callers import FORM, Part, form


class Reply(NamedTuple):
    """A complete answer."""

    status: int
    headers: Message  # names in any case
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> str:
        """The sentence of a refusal."""
        return self.json["error"]


@dataclass(frozen=True, slots=True)
class Outsider:
    """One program: the server that it calls, and whose token it sends."""

    url: str
    token: str = ""
    id: str = ""  # of its workspace

    @property
    def path(self) -> str:
        return f"/workspaces/{self.id}"

    def with_token(self, token: str) -> Self:
        return replace(self, token=token)

    def ask(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> Reply:
        """One request on a connection of its own."""
        own = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        with closing(self.connect()) as connection:
            connection.request(method, path, body, {**own, **(headers or {})})
            return reply(connection)

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=20)

    def get(self, path: str, **query: Any) -> Reply:
        return self.ask("GET", f"{path}?{urlencode(query)}" if query else path)

    def post(self, path: str, body: Any, headers: Mapping[str, str] | None = None) -> Reply:
        """Post JSON; bytes are sent as they are."""
        sent = body if isinstance(body, bytes) else json.dumps(body).encode()
        kind = {"Content-Type": "application/json"}
        return self.ask("POST", path, sent, {**kind, **(headers or {})})

    def register(self, **body: Any) -> Reply:
        """Register; a poll workspace unless said otherwise, and without what is `...`."""
        given = {"id": self.id, "delivery_mode": "poll", "agent_card": {"name": "old client"}}
        sent = {name: value for name, value in (given | body).items() if value is not ...}
        return self.post("/registry/register", sent)

    def upload(self, *parts: Part, to: "Outsider | None" = None, **headers: str) -> Reply:
        """Upload files as parts of a form; a header's name is written with _ for -."""
        return self.upload_raw(form(*parts), to=to, **headers)

    def upload_raw(self, body: bytes, *, to: "Outsider | None" = None, **headers: str) -> Reply:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        path = f"{(to or self).path}/chat/uploads"
        return self.ask("POST", path, body, {"Content-Type": FORM, **named})

    def file(self, *parts: Part) -> str:
        """Upload one file; returns its id."""
        answer = self.upload(*(parts or (Part(),)))
        assert answer.status == 200, answer.body
        return answer.json["files"][0]["uri"].rpartition("/")[2]

    def feed(self, **query: Any) -> Reply:
        return self.get(f"{self.path}/activity", **query)

    def rows(self, **query: Any) -> list[dict[str, Any]]:
        answer = self.feed(**query)
        assert answer.status == 200, answer.body
        return answer.json

    def send(self, body: Any, *, to: "Outsider", **headers: str) -> Reply:
        """Send a message; a header's name is written with _ for -."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.post(f"{to.path}/a2a", body, named)

    def fetch(self, file_id: str) -> Reply:
        return self.get(f"{self.path}/pending-uploads/{file_id}/content")

    def ack(self, file_id: str) -> Reply:
        return self.ask("POST", f"{self.path}/pending-uploads/{file_id}/ack")


def reply(connection: http.client.HTTPConnection) -> Reply:
    """Read the answer on a connection."""
    answer = connection.getresponse()
    return Reply(answer.status, answer.headers, answer.read())


def newcomer(url: str) -> Outsider:
    """A program with an id that is not registered yet."""
    return Outsider(url, id=str(uuid4()))


def joined(server: str, /, **body: Any) -> Outsider:
    """A registered workspace."""
    stranger = newcomer(server)
    answer = stranger.register(**body)
    assert answer.status == 200, answer.body
    return stranger.with_token(answer.json["auth_token"])


def message(text: str = "hello", **fields: Any) -> dict[str, Any]:
    """A message as newer clients send it, with a new messageId."""
    said = {"role": "user", "messageId": str(uuid4()), "parts": [{"kind": "text", "text": text}]}
    params = {"message": said | fields}
    return {"jsonrpc": "2.0", "id": "1", "method": "message/send", "params": params}


class Delivered(NamedTuple):
    """A request that a push workspace was sent."""

    path: str
    headers: Message
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Callback(ThreadingHTTPServer):
    """A push workspace: it records what it is sent, and answers with `status` and `answer`."""

    status = 200
    answer = b'{"files": []}'

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Recording)
        self.delivered: list[Delivered] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Recording(BaseHTTPRequestHandler):
    server: Callback  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_POST(self) -> None:
        body = _chunks(self.rfile) if "Transfer-Encoding" in self.headers else self._body()
        self.server.delivered.append(Delivered(self.path, self.headers, body))
        self.send_response(self.server.status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(self.server.answer)))
        self.end_headers()
        self.wfile.write(self.server.answer)

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers["Content-Length"]))

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Nothing on the terminal of a test."""


def _chunks(stream: BufferedIOBase) -> bytes:
    """A chunked body."""
    body = b""
    while size := int(stream.readline(), 16):
        body += stream.read(size)
        stream.readline()
    return body


@contextmanager
def callback() -> Iterator[Callback]:
    """A push workspace that listens on this machine."""
    with Callback() as server:
        serving = threading.Thread(target=server.serve_forever, args=(0.01,))
        serving.start()
        try:
            yield server
        finally:
            server.shutdown()
            serving.join()
