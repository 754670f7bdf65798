"""A listed proxy is believed about its client; nobody else is."""

from contextlib import AsyncExitStack
from typing import Any

import pytest
import structlog
from callers import register, registered, request_head, wire_to
from hypothesis import given, strategies as st
from sites import Site, SiteFactory
from waiting import until
from watchers import UPGRADE, refused, watch

from restante.errors import SettingsInvalid
from restante.http.forwarded import client_of, is_from_elsewhere, reveal
from restante.http.networks import AddressRanges, address_of
from restante.server.policies import trusted_proxies
from restante.settings import Settings

pytestmark = pytest.mark.anyio

UPGRADE_LINES = tuple(f"{name}: {value}" for name, value in UPGRADE.items())
NEAR = AddressRanges.parsed("10.0.0.0/8, fd00::/8, 127.0.0.1", name="x")


def scope_of(
    *headers: tuple[str, str], peer: str | None = "10.0.0.1", kind: str = "http"
) -> dict[str, Any]:
    sent = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers]
    return {
        "type": kind,
        "client": None if peer is None else (peer, 4711),
        "scheme": kind.replace("websocket", "ws"),
        "headers": [(b"host", b"inside:8080"), *sent],
    }


def host_in(scope: dict[str, Any]) -> bytes:
    (host,) = [value for name, value in scope["headers"] if name == b"host"]
    return host


@pytest.mark.parametrize(
    ("hops", "client"),
    [
        (["198.51.100.7"], "198.51.100.7"),
        (["203.0.113.9", "198.51.100.7"], "198.51.100.7"),
        (["198.51.100.7", "10.2.0.1"], "198.51.100.7"),
        (["203.0.113.9", "198.51.100.7", "10.2.0.1", "fd00::2"], "198.51.100.7"),
        (["10.9.9.9", "10.2.0.1"], "10.9.9.9"),
        ([" 198.51.100.7 "], "198.51.100.7"),
        (["198.51.100.7:51123"], "198.51.100.7"),
        (["2001:db8::7"], "2001:db8::7"),
        (["[2001:db8::7]"], "2001:db8::7"),
        (["[2001:DB8:0::7]:443"], "2001:db8::7"),
        (["::ffff:198.51.100.7"], "198.51.100.7"),
        (["198.51.100.7", "::ffff:10.2.0.1"], "198.51.100.7"),
        ([], "10.0.0.1"),
        ([""], "10.0.0.1"),
        (["198.51.100.7", ""], "10.0.0.1"),
        (["198.51.100.7", "unknown"], "10.0.0.1"),
        (["198.51.100.7", "unknown", "10.2.0.1"], "10.2.0.1"),
        (["fe80::1%eth0"], "10.0.0.1"),
        (["198.51.100.7.evil.example"], "10.0.0.1"),
        (["0x7f.1"], "10.0.0.1"),
        (["999.1.1.1:80"], "10.0.0.1"),
        (["198.51.100.7", *["10.2.0.1"] * 100_000], "10.2.0.1"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_the_client_is_the_last_address_that_is_no_proxy(hops: list[str], client: str):
    assert client_of("10.0.0.1", hops, NEAR) == client


SENT = st.lists(st.text("0123456789.:,[]%af x\x00é", max_size=20), max_size=5)


@given(SENT, st.sampled_from(["198.51.100.7", "2001:db8::7"]))
def test_what_a_client_sends_before_its_own_address_changes_nothing(sent: list[str], client: str):
    """The nearest proxy appends the address that called it."""
    assert client_of("10.0.0.1", [*sent, client], NEAR) == client


@given(SENT)
def test_the_client_is_an_address_whatever_was_sent(sent: list[str]):
    assert address_of(client_of("10.0.0.1", sent, NEAR)) is not None


@pytest.mark.parametrize("peer", ["198.51.100.7", "::1", "fe80::1", "", None])
def test_headers_of_anybody_else_are_ignored(peer: str | None):
    scope = scope_of(
        ("X-Forwarded-For", "192.0.2.1"),
        ("X-Forwarded-Proto", "https"),
        ("X-Forwarded-Host", "evil.example"),
        peer=peer,
    )
    before = dict(scope)

    reveal(scope, NEAR)

    assert scope == before


@pytest.mark.parametrize("kind", ["http", "websocket"])
def test_a_proxy_says_how_it_was_called(kind: str):
    scope = scope_of(
        ("X-Forwarded-For", "198.51.100.7"),
        ("X-Forwarded-Proto", "https"),
        ("X-Forwarded-Host", "restante.example:8443"),
        kind=kind,
    )

    reveal(scope, NEAR)

    assert scope["client"][0] == "198.51.100.7"
    assert scope["scheme"] == {"http": "https", "websocket": "wss"}[kind]
    assert host_in(scope) == b"restante.example:8443"


def test_several_headers_of_a_name_are_one_list():
    """A client may send one of its own, and some proxies add theirs as another line."""
    scope = scope_of(
        ("X-Forwarded-For", "192.0.2.1"),
        ("X-Forwarded-Host", "evil.example"),
        ("X-Forwarded-Proto", "https"),
        ("X-Forwarded-For", "198.51.100.7, 10.2.0.1"),
        ("X-Forwarded-Host", "restante.example"),
        ("X-Forwarded-Proto", "http"),
    )

    reveal(scope, NEAR)

    assert scope["client"][0] == "198.51.100.7"
    assert (host_in(scope), scope["scheme"]) == (b"restante.example", "http")


@pytest.mark.parametrize("host", ["", "a b", "evil.example/path", "x" * 300, "a\x00b", "ä", "[::1"])
@pytest.mark.parametrize("scheme", ["", "javascript", "https:", "\xff"])
def test_garbage_of_a_proxy_is_ignored(host: str, scheme: str):
    scope = scope_of(("X-Forwarded-Host", host), ("X-Forwarded-Proto", scheme))

    reveal(scope, NEAR)

    assert (host_in(scope), scope["scheme"]) == (b"inside:8080", "http")


@pytest.mark.parametrize(
    ("listed", "problem"),
    [
        ("nginx", "'nginx' does not appear to be an IPv4 or IPv6 network"),
        ("10.0.0.1/8", "has host bits set"),
        ("127.0.0.1; 10.0.0.0/8", "does not appear to be"),
        ("0.0.0.0/0", "anybody could choose"),
        ("127.0.0.1, ::/0", "anybody could choose"),
    ],
)
def test_a_wrong_list_is_refused_with_a_sentence(listed: str, problem: str):
    with pytest.raises(SettingsInvalid, match=f"RESTANTE_TRUSTED_PROXIES is wrong: .*{problem}"):
        trusted_proxies(Settings(trusted_proxies=listed))


@pytest.mark.parametrize(
    ("headers", "is_elsewhere"),
    [
        ([], False),
        ([(b"x-forwarded-for", b"127.0.0.1, ::1")], False),
        ([(b"x-real-ip", b"127.0.0.1")], False),
        ([(b"x-forwarded-for", b"198.51.100.7")], True),
        ([(b"x-forwarded-for", b"127.0.0.1, 198.51.100.7")], True),
        ([(b"x-forwarded-for", b"198.51.100.7"), (b"x-forwarded-for", b"127.0.0.1")], True),
        ([(b"x-forwarded-for", b"unknown")], True),
        ([(b"x-real-ip", b"198.51.100.7")], True),
        ([(b"forwarded", b"for=127.0.0.1")], True),
        ([(b"x-forwarded-for", b",".join([b"::1"] * 16))], False),
        ([(b"x-forwarded-for", b",".join([b"::1"] * 17))], True),  # not read, it may be endless
    ],
    ids=str,
)
def test_a_request_of_another_machine_is_recognised(
    headers: list[tuple[bytes, bytes]], is_elsewhere: bool
):
    assert is_from_elsewhere(headers) == is_elsewhere


@pytest.mark.parametrize(
    ("forwarded_for", "status"), [("198.51.100.7", 403), ("127.0.0.1", 200), (None, 200)]
)
async def test_open_registration_is_not_for_clients_of_a_proxy(
    shared_site: Site, forwarded_for: str | None, status: int
):
    """Many proxies call the server by its loopback address, whoever has called them."""
    headers = {"X-Forwarded-For": forwarded_for} if forwarded_for else {}

    answer = await register(shared_site, headers=headers)

    assert answer.status == status


def head(client: str, *lines: str, length: int | None = None, method: str = "GET") -> bytes:
    """The head of a request that a proxy passes on for this client."""
    path = "/health" if method == "GET" else "/registry/register"
    forwarded = f"X-Forwarded-For: {client}"
    return request_head(method, path, length=length, lines=(forwarded, *lines))


def counted(site: Site) -> dict[str, int]:
    """The connections without an authenticated request, by network."""
    return dict(site.state.connections._unauthenticated)


async def test_connections_of_a_listed_proxy_count_for_nobody(run_site: SiteFactory):
    """It keeps many idle ones, for all of its clients."""
    async with (
        run_site(trusted_proxies="127.0.0.1", max_connections_per_address=1) as site,
        AsyncExitStack() as stack,
    ):
        wires = [await stack.enter_async_context(wire_to(site)) for _ in range(3)]
        for wire in wires:
            await wire.send(head("198.51.100.7"))
            assert (await wire.answer()).status == 200

        assert counted(site) == {}


@pytest.mark.parametrize("lines", [(), UPGRADE_LINES], ids=["http", "websocket"])
async def test_a_client_behind_a_proxy_has_its_own_limit(
    run_site: SiteFactory, lines: tuple[str, ...]
):
    """A request whose body does not come takes the place of its client, and of nobody else."""
    async with (
        run_site(trusted_proxies="127.0.0.1", max_connections_per_address=1) as site,
        AsyncExitStack() as stack,
    ):
        slow, same, other = [await stack.enter_async_context(wire_to(site)) for _ in range(3)]
        await slow.send(head("198.51.100.7", method="POST", length=10))
        await until(lambda: counted(site) == {"198.51.100.7": 1})
        await same.send(head("192.0.2.1, 198.51.100.7", *lines))
        refusal = await same.answer()
        await other.send(head("198.51.100.8"))
        neighbour = await other.answer()
        slow.close()
        await until(lambda: counted(site) == {})

    assert (refusal.status, refusal.json["code"]) == (503, "too_many_connections")
    assert refusal.headers["Retry-After"] == "1"
    assert neighbour.status == 200


async def test_an_authenticated_request_does_not_count_for_its_client(run_site: SiteFactory):
    async with run_site(trusted_proxies="127.0.0.1", max_connections_per_address=1) as site:
        caller = await registered(site)
        async with (
            watch(caller, "events", headers={"X-Forwarded-For": "198.51.100.7"}),
            wire_to(site) as wire,
        ):
            await wire.send(head("198.51.100.7"))

            assert (await wire.answer()).status == 200


async def test_somebody_who_is_not_listed_keeps_its_own_address(run_site: SiteFactory):
    async with (
        run_site(trusted_proxies="127.0.0.1", max_connections_per_address=1) as site,
        wire_to(site, source="127.0.0.2") as wire,
    ):
        await wire.send(head("198.51.100.7"))
        await wire.answer()

        assert counted(site) == {"127.0.0.2": 1}


async def test_a_page_of_the_public_host_may_open_a_websocket(run_site: SiteFactory):
    """The proxy calls the server by another name than the browser knows."""
    async with run_site(trusted_proxies="127.0.0.1") as site:
        caller = await registered(site)
        page = {"Origin": "https://restante.example"}
        async with watch(
            caller, "ws", headers={**page, "X-Forwarded-Host": "restante.example"}
        ) as watcher:
            assert not watcher.way.closed

        assert await refused(site, caller.path, "ws", headers=page) == (403, "origin_refused")


async def test_the_log_names_the_client(run_site: SiteFactory):
    """Both with the same headers, from a listed proxy and from somebody else."""
    async with run_site(trusted_proxies="127.0.0.1") as site:
        with structlog.testing.capture_logs() as logged:
            for source in ("127.0.0.1", "127.0.0.2"):
                async with wire_to(site, source=source) as wire:
                    await wire.send(head("192.0.2.1, 198.51.100.7", method="POST", length=0))
                    await wire.answer()

    clients = [line["client"] for line in logged if line["event"] == "request"]
    assert clients == ["198.51.100.7", "127.0.0.2"]
