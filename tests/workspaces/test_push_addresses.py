"""Only allowed addresses of push workspaces are called, by whatever name, redirect or proxy."""

import asyncio
import json
import socket
from typing import Any
from urllib.parse import urlsplit

import pytest
import structlog
from aiohttp import web
from pushes import MESSAGE, UNREACHABLE, receiver, registered, send_message, upload
from sites import SiteFactory

pytestmark = pytest.mark.anyio


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Host names below .test and their addresses; others do not resolve."""
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


async def test_a_host_name_that_does_not_resolve_is_unreachable(
    run_site: SiteFactory, names: dict[str, str]
):
    async with run_site(push_to_private=True) as site:
        workspace = await registered(site, "http://nowhere.test/")

        with structlog.testing.capture_logs() as logged:
            status, body = await send_message(site, workspace)

    assert (status, json.loads(body)) == (502, UNREACHABLE)
    assert [e["reason"] for e in logged if e["event"] == "push_failed"] == [
        "the host name does not resolve"
    ]


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

        assert await send_message(site, workspace) == (200, b"directly")


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


@pytest.mark.parametrize("call", [upload, send_message])
async def test_private_addresses_are_not_called(
    run_site: SiteFactory, names: dict[str, str], call: Any
):
    """In whatever spelling, and by whatever host name."""
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


async def test_cloud_metadata_services_are_not_called_even_where_private_addresses_are(
    run_site: SiteFactory,
):
    async with run_site(push_to_private=True) as site:
        workspace = await registered(site, "http://169.254.169.254/latest/meta-data")

        status, body = await send_message(site, workspace)

    assert (status, json.loads(body)["code"]) == (502, "address_refused")


async def test_the_address_that_was_checked_is_the_one_that_is_called(
    run_site: SiteFactory, monkeypatch: pytest.MonkeyPatch
):
    """DNS rebinding: a name resolves to a public address first and to a private one later."""
    looked_up: list[str] = []
    connected: list[str] = []
    resolve, connect = socket.getaddrinfo, socket.socket.connect

    def rebinding(host: Any, *args: Any, **kwargs: Any) -> Any:
        if host == "rebinding.test":
            looked_up.append(host)
            host = "1.1.1.1" if len(looked_up) == 1 else "127.0.0.1"
        return resolve(host, *args, **kwargs)

    def record(self: socket.socket, address: Any) -> None:
        if self.family != socket.AF_UNIX and address[0] == "1.1.1.1":
            connected.append(address[0])
            raise ConnectionRefusedError(111, "Connection refused")
        connect(self, address)

    async def take(_request: web.Request) -> web.Response:
        connected.append("inside")
        return web.Response()

    monkeypatch.setattr(socket, "getaddrinfo", rebinding)
    monkeypatch.setattr(socket.socket, "connect", record)
    async with run_site() as site, receiver(take) as url:
        workspace = await registered(site, f"http://rebinding.test:{urlsplit(url).port}")
        first, _ = await send_message(site, workspace)
        status, body = await send_message(site, workspace)

    assert first == 502
    assert connected == ["1.1.1.1"]
    assert looked_up == ["rebinding.test"] * 2
    assert (status, json.loads(body)["code"]) == (502, "address_refused")
