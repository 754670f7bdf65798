"""Files and messages for workspaces that can be called: streamed through, and the answer back."""

import asyncio
import json
import socket
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit
from uuid import UUID, uuid4

import pytest
import structlog
from aiohttp import ClientError, ClientPayloadError, web
from sites import ADMIN_TOKEN, Site, SiteFactory

pytestmark = pytest.mark.anyio

MIB = 1024 * 1024
FORM = "multipart/form-data; boundary=xyzzy"
BODY = b'--xyzzy\r\nContent-Disposition: form-data; name="files"\r\n\r\nhello\r\n--xyzzy--\r\n'
MESSAGE = b'{"jsonrpc": "2.0", "method": "message/send", "id": 1, "params": {"x": "\xc3\xa9"}}'
UNREACHABLE = {"error": "workspace unreachable", "code": "workspace_unreachable"}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def receiver(handler: Handler) -> AsyncIterator[str]:
    """A workspace that can be called, at the address that this gives."""
    app = web.Application(client_max_size=100 * MIB)
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def raw_receiver(answer: bytes) -> AsyncIterator[str]:
    """A workspace that says exactly this once it has seen a request, and hangs up."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@dataclass(frozen=True, slots=True)
class Workspace:
    """A registered push workspace."""

    id: UUID
    token: str
    secret: str

    @property
    def uploads(self) -> str:
        return f"/workspaces/{self.id}/chat/uploads"

    @property
    def messages(self) -> str:
        return f"/workspaces/{self.id}/a2a"

    @property
    def auth(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}"}


async def registered(site: Site, url: str, mode: str = "push") -> Workspace:
    chosen = uuid4()
    given = {"id": str(chosen), "delivery_mode": mode, "url": url, "agent_card": {"name": "w"}}
    async with site.http.post("/registry/register", json=given) as answer:
        assert answer.status == 200
        got = await answer.json()
    return Workspace(chosen, got["auth_token"], got.get("inbound_secret", ""))


async def upload(site: Site, to: Workspace, body: Any = BODY, **headers: str) -> tuple[int, bytes]:
    sent = {**to.auth, "Content-Type": FORM, **headers}
    async with site.http.post(to.uploads, data=body, headers=sent) as answer:
        return answer.status, await answer.read()


async def tell(site: Site, to: Workspace) -> tuple[int, bytes]:
    sent = {**to.auth, "Content-Type": "application/json"}
    async with site.http.post(to.messages, data=MESSAGE, headers=sent) as answer:
        return answer.status, await answer.read()


async def test_a_file_is_handed_through_and_the_answer_back(run_site: SiteFactory):
    seen: list[tuple[str, dict[str, str], bytes]] = []

    async def ingest(request: web.Request) -> web.Response:
        seen.append((request.path, dict(request.headers), await request.read()))
        return web.json_response({"files": []}, status=201)

    async with run_site(push_to_private=True) as site, receiver(ingest) as url:
        workspace = await registered(site, url + "/base/")
        sent = {**workspace.auth, "Content-Type": FORM}
        async with site.http.post(workspace.uploads, data=BODY, headers=sent) as answer:
            assert (answer.status, await answer.json()) == (201, {"files": []})
            assert answer.headers["Content-Type"] == "application/json; charset=utf-8"
            assert answer.headers["X-Content-Type-Options"] == "nosniff"

    ((path, headers, body),) = seen
    assert path == "/base/internal/chat/uploads/ingest"
    assert headers["Authorization"] == f"Bearer {workspace.secret}"
    assert headers["Content-Type"] == FORM
    assert headers["Content-Length"] == str(len(BODY))
    assert "Transfer-Encoding" not in headers
    assert body == BODY


async def test_a_message_is_posted_to_the_address_itself(run_site: SiteFactory):
    seen: list[tuple[str, dict[str, str], bytes]] = []

    async def take(request: web.Request) -> web.Response:
        seen.append((request.path_qs, dict(request.headers), await request.read()))
        return web.json_response({"jsonrpc": "2.0", "id": 1, "result": {}})

    async with run_site(push_to_private=True) as site, receiver(take) as url:
        workspace = await registered(site, url + "/agent?v=1")
        status, body = await tell(site, workspace)

    assert (status, json.loads(body)) == (200, {"jsonrpc": "2.0", "id": 1, "result": {}})
    ((path, headers, received),) = seen
    assert (path, received) == ("/agent?v=1", MESSAGE)
    assert headers["Authorization"] == f"Bearer {workspace.secret}"
    assert headers["Content-Type"] == "application/json"
    assert headers["Content-Length"] == str(len(MESSAGE))


@pytest.mark.parametrize("call", [upload, tell])
async def test_every_status_is_relayed(run_site: SiteFactory, call: Any):
    statuses = [200, 201, 204, 304, 401, 413, 429, 500, 503]
    wanted = iter(statuses)

    async def take(request: web.Request) -> web.Response:
        await request.read()
        status = next(wanted)
        return web.Response(status=status, body=None if status in {204, 304} else b"as it is")

    async with run_site(push_to_private=True) as site, receiver(take) as url:
        workspace = await registered(site, url)

        for status in statuses:
            expected = b"" if status in {204, 304} else b"as it is"
            assert await call(site, workspace) == (status, expected)


async def test_headers_about_the_connection_and_cookies_are_not_relayed(run_site: SiteFactory):
    cookies: list[str | None] = []

    async def take(request: web.Request) -> web.Response:
        cookies.append(request.headers.get("Cookie"))
        headers = {"Set-Cookie": "a=b", "X-Own": "x", "Keep-Alive": "timeout=5", "Retry-After": "7"}
        return web.Response(status=503, headers=headers)

    async with run_site(push_to_private=True) as site, receiver(take) as url:
        workspace = await registered(site, url)
        await tell(site, workspace)
        sent = {**workspace.auth, "Content-Type": "application/json"}
        async with site.http.post(workspace.messages, data=MESSAGE, headers=sent) as answer:
            assert answer.headers["Retry-After"] == "7"
            assert not {"Set-Cookie", "X-Own", "Keep-Alive"} & set(answer.headers)

    assert cookies == [None, None]


async def test_the_first_bytes_arrive_before_the_last_are_sent(run_site: SiteFactory):
    """And the answer's first bytes come back before its last: nothing is held."""
    begun, answered, size = asyncio.Event(), asyncio.Event(), 20 * MIB
    received = 0

    async def ingest(request: web.Request) -> web.StreamResponse:
        nonlocal received
        async for piece in request.content.iter_any():
            begun.set()
            received += len(piece)
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"first,")
        await answered.wait()
        await response.write(b"last")
        return response

    async def sent() -> AsyncIterator[bytes]:
        piece = bytes(64 * 1024)
        yield piece
        await begun.wait()
        for _ in range(size // len(piece) - 1):
            yield piece

    async with run_site(push_to_private=True) as site, receiver(ingest) as url:
        workspace = await registered(site, url)
        headers = {**workspace.auth, "Content-Type": FORM}
        tracemalloc.start()
        try:
            async with site.http.post(workspace.uploads, data=sent(), headers=headers) as answer:
                assert await answer.content.readany() == b"first,"
                _, peak = tracemalloc.get_traced_memory()
                answered.set()
                assert await answer.read() == b"last"
        finally:
            tracemalloc.stop()

    assert received == size
    assert peak < 4 * MIB  # sender, server and receiver together


async def test_a_workspace_that_stops_reading_stops_the_sender(run_site: SiteFactory):
    """Nothing piles up meanwhile, and after the time-out the sender hears of it."""
    test_is_over = asyncio.Event()

    async def ingest(_request: web.Request) -> web.Response:
        await test_is_over.wait()
        return web.Response()

    async with (
        run_site(push_to_private=True, push_timeout_seconds=0.3) as site,
        receiver(ingest) as url,
    ):
        workspace = await registered(site, url)
        tracemalloc.start()
        try:
            status, body = await upload(site, workspace, in_pieces(48 * MIB))
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
            test_is_over.set()

    assert (status, json.loads(body)) == (502, UNREACHABLE)
    assert peak < 4 * MIB


async def in_pieces(size: int) -> AsyncIterator[bytes]:
    piece = bytes(64 * 1024)
    for _ in range(size // len(piece)):
        yield piece


@pytest.mark.parametrize("call", [upload, tell])
async def test_nobody_at_the_address(run_site: SiteFactory, call: Any):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    async with run_site(push_to_private=True) as site:
        workspace = await registered(site, f"http://127.0.0.1:{port}/?key=hidden")

        with structlog.testing.capture_logs() as logged:
            status, body = await call(site, workspace)

    assert (status, json.loads(body)) == (502, UNREACHABLE)
    (failure,) = [event for event in logged if event["event"] == "push_failed"]
    assert failure["workspace"] == str(workspace.id)
    assert "refused" in failure["reason"].lower()
    assert workspace.secret not in str(logged)
    assert workspace.token not in str(logged)
    assert "hidden" not in str(logged)


async def test_a_name_that_is_not_found(run_site: SiteFactory, names: dict[str, str]):
    async with run_site(push_to_private=True) as site:
        workspace = await registered(site, "http://nowhere.test/")

        with structlog.testing.capture_logs() as logged:
            status, body = await tell(site, workspace)

    assert (status, json.loads(body)) == (502, UNREACHABLE)
    assert [e["reason"] for e in logged if e["event"] == "push_failed"] == [
        "the name was not found"
    ]


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Names below .test and their addresses."""
    known: dict[str, str] = {}
    resolve = socket.getaddrinfo

    def getaddrinfo(host: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(host, str) and host.endswith(".test"):
            if host not in known:
                raise socket.gaierror(socket.EAI_NONAME, "no such name")
            host = known[host]
        return resolve(host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return known


@pytest.mark.parametrize("call", [upload, tell])
async def test_a_workspace_that_hangs_is_given_up(run_site: SiteFactory, call: Any):
    given_up = asyncio.Event()

    async def hang(request: web.Request) -> web.Response:
        await request.read()
        try:
            await asyncio.Event().wait()
        finally:
            given_up.set()
        return web.Response()

    async with (
        run_site(push_to_private=True, push_timeout_seconds=0.2) as site,
        receiver(hang) as url,
    ):
        workspace = await registered(site, url)

        status, body = await call(site, workspace)

        assert (status, json.loads(body)) == (502, UNREACHABLE)
        await asyncio.wait_for(given_up.wait(), 10)


async def test_a_slow_sender_does_not_count_against_the_workspace(run_site: SiteFactory):
    """The time-out is about the workspace; how long a body may take is another limit."""
    timeout_seconds = 0.2

    async def ingest(request: web.Request) -> web.Response:
        return web.Response(body=await request.read())

    async def sent() -> AsyncIterator[bytes]:
        yield b"a"
        await asyncio.sleep(timeout_seconds * 2)  # what is tested is that time passes
        yield b"b"

    async with (
        run_site(push_to_private=True, push_timeout_seconds=timeout_seconds) as site,
        receiver(ingest) as url,
    ):
        workspace = await registered(site, url)

        assert await upload(site, workspace, sent()) == (200, b"ab")


NO_ANSWERS = [
    b"",
    b"HTTP/1.1 200 OK\r\nContent-Le",
    b"SSH-2.0-OpenSSH_9.6\r\n",
    b"HTTP/1.1 999 Odd\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nX: " + b"x" * 100_000 + b"\r\n\r\n",
]


async def test_what_is_no_answer_is_unreachable(run_site: SiteFactory):
    async with run_site(push_to_private=True) as site:
        for answer in NO_ANSWERS:
            async with raw_receiver(answer) as url:
                workspace = await registered(site, url)

                status, body = await tell(site, workspace)

            assert (answer, status, json.loads(body)) == (answer, 502, UNREACHABLE)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nonly this",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\nonly this\r\n",
    ],
)
@pytest.mark.parametrize("call", [upload, tell])
async def test_an_answer_that_breaks_off_breaks_off(
    run_site: SiteFactory, call: Any, answer: bytes
):
    """Half an answer must never look like a whole one."""
    async with run_site(push_to_private=True) as site, raw_receiver(answer) as url:
        workspace = await registered(site, url)

        with structlog.testing.capture_logs() as logged, pytest.raises(ClientPayloadError):
            await call(site, workspace)

    names = [event["event"] for event in logged]
    assert "push_failed" in names
    assert "bug" not in names


async def test_an_answer_that_stalls_breaks_off(run_site: SiteFactory):
    async def stall(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"half")
        await asyncio.Event().wait()
        return response

    async with (
        run_site(push_to_private=True, push_timeout_seconds=0.2) as site,
        receiver(stall) as url,
    ):
        workspace = await registered(site, url)

        with pytest.raises(ClientPayloadError):
            await tell(site, workspace)


async def test_redirects_are_not_followed(run_site: SiteFactory):
    calls: list[str] = []

    async def redirect(request: web.Request) -> web.Response:
        calls.append(request.path)
        return web.Response(status=307, headers={"Location": "/elsewhere"})

    async with run_site(push_to_private=True) as site, receiver(redirect) as url:
        workspace = await registered(site, url)
        sent = {**workspace.auth, "Content-Type": "application/json"}
        async with site.http.post(
            workspace.messages, data=MESSAGE, headers=sent, allow_redirects=False
        ) as answer:
            assert answer.status == 307
            assert "Location" not in answer.headers

    assert calls == ["/"]


async def test_proxies_of_the_environment_are_not_used(
    run_site: SiteFactory, monkeypatch: pytest.MonkeyPatch
):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")

    async def take(_request: web.Request) -> web.Response:
        return web.Response(body=b"directly")

    async with run_site(push_to_private=True) as site, receiver(take) as url:
        workspace = await registered(site, url)

        assert await tell(site, workspace) == (200, b"directly")


PRIVATE_HOSTS = [
    "127.0.0.1",
    "localhost",
    "LOCALHOST",
    "inside.test",
    "127.1",
    "2130706433",
    "017700000001",
    "0x7f000001",
    "0x7f.1",
    "0177.0.0.1",
    "0.0.0.0",
    "10.0.0.1",
    "169.254.169.254",
    "[::ffff:127.0.0.1]",
    "[64:ff9b::7f00:1]",
    "[::1]",
    "[fd00::1]",
]


@pytest.mark.parametrize("call", [upload, tell])
async def test_private_addresses_are_not_called(
    run_site: SiteFactory, names: dict[str, str], call: Any
):
    """However they are spelled, and whatever name leads to them."""
    names["inside.test"] = "127.0.0.1"
    called = asyncio.Event()

    async def take(_request: web.Request) -> web.Response:
        called.set()
        return web.Response()

    async with run_site() as site, receiver(take) as url:
        for host in PRIVATE_HOSTS:
            workspace = await registered(site, f"http://{host}:{urlsplit(url).port}")

            status, body = await call(site, workspace)

            assert (host, status, json.loads(body)["code"]) == (host, 502, "address_refused")

    assert not called.is_set()


async def test_what_guards_a_clouds_secrets_is_not_called_even_where_private_is_allowed(
    run_site: SiteFactory,
):
    async with run_site(push_to_private=True) as site:
        workspace = await registered(site, "http://169.254.169.254/latest/meta-data")

        status, body = await tell(site, workspace)

    assert (status, json.loads(body)["code"]) == (502, "address_refused")


async def test_the_address_that_was_checked_is_the_one_that_is_called(
    run_site: SiteFactory, monkeypatch: pytest.MonkeyPatch
):
    """A name that leads outside at first and inside a moment later leads nowhere."""
    looked_up: list[str] = []
    connected: list[str] = []
    resolve, connect = socket.getaddrinfo, socket.socket.connect

    def rebinding(host: Any, *args: Any, **kwargs: Any) -> Any:
        if host == "rebinding.test":
            looked_up.append(host)
            host = "1.1.1.1" if len(looked_up) == 1 else "127.0.0.1"
        return resolve(host, *args, **kwargs)

    def noted(self: socket.socket, address: Any) -> None:
        if self.family != socket.AF_UNIX and address[0] == "1.1.1.1":
            connected.append(address[0])
            raise ConnectionRefusedError(111, "Connection refused")
        connect(self, address)

    async def take(_request: web.Request) -> web.Response:
        connected.append("inside")
        return web.Response()

    monkeypatch.setattr(socket, "getaddrinfo", rebinding)
    monkeypatch.setattr(socket.socket, "connect", noted)
    async with run_site() as site, receiver(take) as url:
        workspace = await registered(site, f"http://rebinding.test:{urlsplit(url).port}")
        first, _ = await tell(site, workspace)
        status, body = await tell(site, workspace)

    assert first == 502
    assert connected == ["1.1.1.1"]
    assert looked_up == ["rebinding.test"] * 2
    assert (status, json.loads(body)["code"]) == (502, "address_refused")


async def test_every_workspace_has_a_secret_of_its_own(run_site: SiteFactory):
    seen: list[str] = []

    async def take(request: web.Request) -> web.Response:
        seen.append(request.headers["Authorization"])
        return web.Response()

    async with run_site(push_to_private=True) as site, receiver(take) as url:
        one, other = await registered(site, url), await registered(site, url)
        await tell(site, one)
        await upload(site, other)
        await tell(site, one)

    assert one.secret != other.secret
    assert seen == [f"Bearer {secret}" for secret in (one.secret, other.secret, one.secret)]
    assert not {one.secret, other.secret} & {one.token, other.token}


@asynccontextmanager
async def half_sent(
    site: Site, workspace: Workspace, length: int, body: bytes
) -> AsyncIterator[asyncio.StreamReader]:
    """A sender who begins a request and hangs up at the end of this."""
    where = urlsplit(site.url)
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    head = (
        f"POST {workspace.uploads} HTTP/1.1\r\nHost: r\r\nContent-Type: {FORM}\r\n"
        f"Authorization: Bearer {workspace.token}\r\nContent-Length: {length}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    await writer.drain()
    try:
        yield reader
    finally:
        writer.close()
        await writer.wait_closed()


@pytest.mark.parametrize("stage", ["sending", "waiting", "reading"])
async def test_a_sender_that_goes_away_ends_the_call(run_site: SiteFactory, stage: str):
    begun, ended = asyncio.Event(), asyncio.Event()

    async def ingest(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        try:
            await request.content.readexactly(3)
            if stage == "reading":
                await response.prepare(request)
                await response.write(b"half")
            begun.set()
            if stage == "sending":
                await request.content.readexactly(1)  # what never comes
            await asyncio.Event().wait()
        finally:
            ended.set()
        return response

    async with run_site(push_to_private=True) as site, receiver(ingest) as url:
        workspace = await registered(site, url)
        length = 9 if stage == "sending" else 3

        with structlog.testing.capture_logs() as logged:
            async with half_sent(site, workspace, length, b"abc") as reader:
                await asyncio.wait_for(begun.wait(), 10)
                if stage == "reading":
                    await reader.readuntil(b"half")
                assert not ended.is_set()
            await asyncio.wait_for(ended.wait(), 10)

    assert "bug" not in [event["event"] for event in logged]


async def test_the_end_of_the_server_ends_the_call(run_site: SiteFactory):
    begun, ended = asyncio.Event(), asyncio.Event()

    async def hang(request: web.Request) -> web.Response:
        await request.read()
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return web.Response()

    async with receiver(hang) as url:
        async with run_site(push_to_private=True) as site:
            workspace = await registered(site, url)
            asking = asyncio.create_task(tell(site, workspace))
            await begun.wait()
        await asyncio.wait_for(ended.wait(), 10)
        with suppress(ClientError):
            await asking


async def test_a_request_that_is_too_large_is_refused_before_anybody_is_called(
    run_site: SiteFactory,
):
    async with run_site(push_to_private=True) as site:
        workspace = await registered(site, "http://127.0.0.1:1")

        length = {"Content-Length": str(52 * MIB)}
        status, body = await upload(site, workspace, in_pieces(52 * MIB), **length)

    assert status == 413
    assert json.loads(body)["max"] == 50 * MIB


async def test_a_body_of_unknown_length_is_cut_off_when_it_grows_too_large(run_site: SiteFactory):
    broken = asyncio.Event()

    async def ingest(request: web.Request) -> web.Response:
        try:
            async for _ in request.content.iter_any():
                pass
        except BaseException:
            broken.set()
            raise
        return web.Response()

    async with run_site(push_to_private=True) as site, receiver(ingest) as url:
        workspace = await registered(site, url)

        status, body = await upload(site, workspace, in_pieces(52 * MIB))

        assert (status, json.loads(body)["code"]) == (413, "request_too_large")
        await asyncio.wait_for(broken.wait(), 10)


async def test_a_sender_has_only_so_much_time(run_site: SiteFactory):
    broken = asyncio.Event()

    async def ingest(request: web.Request) -> web.Response:
        try:
            await request.read()
        except BaseException:
            broken.set()
            raise
        return web.Response()

    async with (
        run_site(
            push_to_private=True, upload_grace_seconds=0.2, upload_min_bytes_per_second=10**9
        ) as site,
        receiver(ingest) as url,
    ):
        workspace = await registered(site, url)
        async with half_sent(site, workspace, 9, b"abc") as reader:
            assert b" 408 " in await reader.readline()
            await asyncio.wait_for(broken.wait(), 10)


async def test_an_answer_before_the_end_of_the_body_is_relayed(run_site: SiteFactory):
    """A workspace that refuses a large file need not read it."""

    async def refuse(_request: web.Request) -> web.Response:
        return web.json_response({"error": "too large"}, status=413)

    async with run_site(push_to_private=True) as site, receiver(refuse) as url:
        workspace = await registered(site, url)

        status, body = await upload(site, workspace, in_pieces(20 * MIB))

    assert (status, json.loads(body)) == (413, {"error": "too large"})


async def test_an_early_answer_does_not_end_the_body(run_site: SiteFactory):
    """A workspace may begin to answer while it still reads."""
    answered = asyncio.Event()

    async def echo(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        async for piece in request.content.iter_any():
            await response.write(piece)
        return response

    async def sent() -> AsyncIterator[bytes]:
        yield b"one,"
        await answered.wait()
        yield b"two"

    async with run_site(push_to_private=True) as site, receiver(echo) as url:
        workspace = await registered(site, url)
        headers = {**workspace.auth, "Content-Type": FORM}
        async with site.http.post(workspace.uploads, data=sent(), headers=headers) as answer:
            assert await answer.content.readany() == b"one,"
            answered.set()
            assert await answer.read() == b"two"


async def test_a_workspace_that_is_made_push_gets_its_secret_from_the_operator(
    run_site: SiteFactory,
):
    admin = {"Authorization": f"Bearer {ADMIN_TOKEN}"}
    seen: list[str] = []

    async def take(request: web.Request) -> web.Response:
        seen.append(request.headers["Authorization"])
        return web.Response()

    async with run_site(push_to_private=True) as site, receiver(take) as url:
        workspace = await registered(site, url, mode="poll")
        token = f"/admin/workspaces/{workspace.id}/token"
        async with site.http.post(token, headers=admin) as answer:
            assert set(await answer.json()) == {"auth_token"}
        change = {"delivery_mode": "push", "url": url}
        async with site.http.patch(
            f"/workspaces/{workspace.id}", json=change, headers=admin
        ) as answer:
            assert answer.status == 200
        async with site.http.post(token, headers=admin) as answer:
            issued = await answer.json()
        again = Workspace(workspace.id, issued["auth_token"], issued["inbound_secret"])
        assert (await tell(site, again))[0] == 200

    assert workspace.secret == ""
    assert seen == [f"Bearer {again.secret}"]


async def test_a_workspace_that_turns_to_push_by_itself_is_told_its_secret(run_site: SiteFactory):
    async with run_site() as site:
        workspace = await registered(site, "http://w.test", mode="poll")
        renewal = {"id": str(workspace.id), "delivery_mode": "push", "agent_card": {"name": "w"}}

        answers: list[dict[str, Any]] = []
        for _ in range(2):
            async with site.http.post(
                "/registry/register", json=renewal, headers=workspace.auth
            ) as answer:
                answers.append(await answer.json())

    assert set(answers[0]) == {"status", "delivery_mode", "inbound_secret"}
    assert set(answers[1]) == {"status", "delivery_mode"}
