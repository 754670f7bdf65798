"""Open connections are bounded: in total, for each address, and for each workspace."""

import asyncio
import resource
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
import structlog
from attacks import assert_refused
from callers import ADMIN, Answer, Caller, Part, Wire, ask, registered, request_head, wire_to
from hypothesis import given, strategies as st
from processes import Server, wait_until
from sites import Site, SiteFactory
from sweeps import make_subjects
from waiting import until
from watchers import is_watched_by, watch

from restante.http.refusal_delays import RefusalDelays
from restante.server import http_limits
from restante.server.connections import ConnectionLimits, Connections
from restante.server.metrics import Metrics

pytestmark = pytest.mark.anyio

HEALTH = request_head("GET", "/health")


async def health(wire: Wire) -> Answer:
    await wire.send(HEALTH)
    return await wire.answer()


def poll(workspace: Caller, *, token: str | None = None) -> bytes:
    path = f"{workspace.path}/activity?since_seq=0&wait=15"
    return request_head("GET", path, token=workspace.token if token is None else token)


@asynccontextmanager
async def polling(workspace: Caller, count: int) -> AsyncIterator[None]:
    """So many polls of a workspace that wait."""
    async with AsyncExitStack() as stack:
        for number in range(count):
            wire = await stack.enter_async_context(wire_to(workspace.site))
            await wire.send(poll(workspace))
            await until(partial(is_watched_by, workspace.site, number + 1))
        yield


async def idle(stack: AsyncExitStack, site: Site, count: int) -> None:
    """Open so many connections that send nothing."""
    before = open_connections(site)
    for _ in range(count):
        await stack.enter_async_context(wire_to(site))
    await until(lambda: open_connections(site) == before + count)


def open_connections(site: Site) -> float:
    return site.state.connections._open


def waiting_for_refusal(site: Site) -> int:
    return site.state.connections._refused


def refused(site: Site, limit: str) -> float:
    return site.state.metrics.connections.refused.labels(limit)._value.get()


def assert_closing_refusal(answer: Answer, status: int, code: str) -> None:
    assert_refused(answer, status)
    assert answer.json["code"] == code
    assert answer.headers["Connection"] == "close"
    assert int(answer.headers["Retry-After"]) > 0


async def test_connections_beyond_the_total_are_refused_until_one_is_closed(
    run_site: SiteFactory,
):
    async with run_site(max_connections=16, max_connections_per_address=0) as site:
        async with AsyncExitStack() as stack:
            await idle(stack, site, 16)

            async with wire_to(site) as wire:
                assert_closing_refusal(await health(wire), 503, "too_many_connections")
                assert await wire.is_closed()
            assert refused(site, "total") == 1

        await until(lambda: open_connections(site) == 0)
        await until(lambda: waiting_for_refusal(site) == 0)
        async with wire_to(site) as wire:
            assert (await health(wire)).status == 200


async def test_refused_connections_that_send_nothing_do_not_pile_up(run_site: SiteFactory):
    async with (
        run_site(max_connections=16, max_connections_per_address=0) as site,
        AsyncExitStack() as stack,
    ):
        wires = [await stack.enter_async_context(wire_to(site)) for _ in range(200)]
        await until(lambda: refused(site, "total") == 184)

        assert open_connections(site) == 16
        assert waiting_for_refusal(site) <= site.state.connections._limits.refused + 1
        for wire in wires[16:]:
            assert await wire.is_closed()


async def test_an_address_is_limited_in_connections_without_a_token(run_site: SiteFactory):
    """The address of a proxy has everybody's connections; the authenticated ones do not count."""
    async with run_site(max_connections_per_address=8) as site:
        workspace = await registered(site)
        async with polling(workspace, 20), AsyncExitStack() as stack:
            await idle(stack, site, 7)  # one more is that of the registration
            async with wire_to(site) as wire:
                assert_closing_refusal(await health(wire), 503, "too_many_connections")
            assert refused(site, "address") == 1


def test_a_connection_counts_until_its_request_has_ended():
    """A client that closes without waiting for its answers is bounded like any other."""
    metrics = Metrics("test", make_subjects()).connections
    connections = Connections(
        ConnectionLimits(total=1, per_address=0, per_workspace=1), metrics, RefusalDelays()
    )
    place = connections.enter("127.0.0.1")
    place.request_began()

    place.leave()
    meanwhile = connections.enter("127.0.0.1").refused_for
    place.request_ended()

    assert meanwhile == "total"
    assert connections.enter("127.0.0.1").refused_for is None


@pytest.mark.parametrize("silent", [60, 200])
async def test_an_address_cannot_use_up_the_total_with_connections_that_are_refused(
    run_site: SiteFactory, silent: int
):
    async with (
        run_site(max_connections=40, max_connections_per_address=4) as site,
        AsyncExitStack() as stack,
    ):
        for _ in range(silent):
            await stack.enter_async_context(wire_to(site))
        await until(lambda: refused(site, "address") == silent - 4)

        assert open_connections(site) == 4
        assert waiting_for_refusal(site) <= site.state.connections._limits.refused + 1
        async with wire_to(site, source="127.0.0.2") as wire:
            assert (await health(wire)).status == 200


@pytest.mark.parametrize("way", ["poll", "events", "ws"])
async def test_requests_of_one_workspace_are_limited_and_no_other_notices(
    run_site: SiteFactory, way: str
):
    async with run_site(max_requests_per_workspace=4) as site:
        busy, other = await registered(site), await registered(site)
        async with AsyncExitStack() as stack:
            if way == "poll":
                await stack.enter_async_context(polling(busy, 4))
            else:
                for _ in range(4):
                    await stack.enter_async_context(watch(busy, way))

            assert_closing_refusal(await busy.ask("GET", "/activity"), 429, "too_many_at_once")
            heartbeat = {"workspace_id": busy.id, "active_tasks": 0, "current_task": ""}
            beat = await ask(
                site,
                "POST",
                "/registry/heartbeat",
                json=heartbeat,
                headers={"Authorization": f"Bearer {busy.token}"},
            )
            message = await busy.message(
                {"method": "message/send", "params": {"message": {"parts": []}}}, to=other
            )
            assert [beat.status, message.status] == [429, 429]
            assert (await other.ask("GET", "/activity")).status == 200
            assert (await ask(site, "GET", f"{busy.path}/activity", headers=ADMIN)).status == 200
            sent = await other.message(
                {"method": "message/send", "params": {"message": {"parts": []}}}, to=busy
            )
            assert sent.status == 200
            assert refused(site, "workspace") == 3

        await until(lambda: is_answered(busy))


async def is_answered(workspace: Caller) -> bool:
    return (await workspace.ask("GET", "/activity")).status == 200


async def test_a_request_without_the_token_is_not_charged_to_the_workspace(run_site: SiteFactory):
    async with run_site(max_requests_per_workspace=1) as site:
        workspace, other = await registered(site), await registered(site)
        async with polling(workspace, 1), wire_to(site) as wire:
            await wire.send(poll(workspace, token=other.token))

            assert (await wire.answer()).status == 401
            assert (await other.ask("GET", "/activity")).status == 200


async def test_every_connection_is_given_back(site: Site):
    """However it ends: idle, refused, aborted in the middle, or upgraded."""
    workspace = await registered(site)
    await site.http.close()
    async with watch_raw(workspace), wire_to(site) as wire:
        await wire.send(poll(workspace))
        await until(lambda: is_watched_by(site, 2))
        wire.close()

    await until(lambda: open_connections(site) == 0)
    assert not site.state.connections._unauthenticated
    assert not site.state.concurrency._running


@asynccontextmanager
async def watch_raw(workspace: Caller) -> AsyncIterator[None]:
    lines = [
        "Connection: Upgrade",
        "Upgrade: websocket",
        "Sec-WebSocket-Version: 13",
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
    ]
    async with wire_to(workspace.site) as wire:
        head = request_head("GET", f"{workspace.path}/ws", token=workspace.token, lines=lines)
        await wire.send(head)
        assert await wire.read(12) == b"HTTP/1.1 101"
        yield
        wire.close()


@given(
    wanted=st.builds(
        ConnectionLimits,
        total=st.integers(16, 10**6),
        per_address=st.integers(0, 10**6),
        per_workspace=st.integers(1, 10**6),
    ),
    open_files=st.integers(0, 10**7),
    pool_size=st.integers(2, 500),
)
def test_the_limits_fit_into_the_open_files(
    wanted: ConnectionLimits, open_files: int, pool_size: int
):
    """And neither one address nor one workspace can use up the total."""
    limits = wanted.within(open_files, pool_size=pool_size)

    assert limits.total <= max(2, min(wanted.total, open_files - pool_size))
    assert limits.total + limits.refused <= max(3, open_files - pool_size)
    assert limits.per_address < limits.total
    assert 0 < limits.per_workspace < limits.total
    assert (limits.per_address == 0) == (wanted.per_address == 0)


async def test_connections_that_run_short_are_logged_once(run_site: SiteFactory):
    async with run_site(max_connections=16, max_connections_per_address=0) as site:
        with structlog.testing.capture_logs() as logged:
            for _ in range(2):
                async with AsyncExitStack() as stack:
                    await idle(stack, site, 15)
                await until(lambda: open_connections(site) == 0)

    warnings = [line for line in logged if line["event"] == "connections_nearly_full"]
    assert [(line["open"], line["limit"]) for line in warnings] == [(13, 16)] * 2


async def test_limits_that_do_not_fit_are_logged_at_startup(run_site: SiteFactory):
    with structlog.testing.capture_logs() as logged:
        async with run_site(max_connections=1_000_000):
            pass

    (warning,) = [line for line in logged if line["event"] == "open_files_too_few"]
    assert warning["accepted"] < warning["open_files"] < warning["max_connections"]


@pytest.fixture
def few_open_files() -> Iterator[int]:
    """Processes that are started now have a low soft limit, and the hard one that this one has."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    yield hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_a_server_raises_its_limit_of_open_files(server: Server, few_open_files: int):
    server.start()

    soft, _ = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
    assert soft == few_open_files


async def test_a_server_without_open_files_left_recovers(server: Server):
    """Accepting fails then; the server must neither end nor stop listening."""
    server.start()
    limits = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (open_files(server) + 4, limits[1]))
    async with AsyncExitStack() as stack:
        for _ in range(50):
            await stack.enter_async_context(wire_to(server.address))

    resource.prlimit(server.pid, resource.RLIMIT_NOFILE, limits)

    wait_until(lambda: server.get("/health")[0] == 200, seconds=30, what="an answer")


def open_files(server: Server) -> int:
    return sum(1 for _ in Path(f"/proc/{server.pid}/fd").iterdir())


async def test_a_connection_is_not_refused_at_once(
    run_site: SiteFactory, monkeypatch: pytest.MonkeyPatch
):
    """Whoever connects again without a pause would cost more than the others."""
    monkeypatch.setattr(http_limits, "_REFUSED_SECONDS", 1000)
    async with (
        run_site(max_connections=16, max_connections_per_address=1) as site,
        wire_to(site),
        wire_to(site) as refused,
    ):
        await until(lambda: waiting_for_refusal(site) == 1)
        await refused.send(HEALTH)
        async with wire_to(site, source="127.0.0.2") as other:
            assert (await health(other)).status == 200
        assert waiting_for_refusal(site) == 1


@pytest.mark.parametrize("pool_size", [2, 8])
async def test_a_workspace_gets_all_of_its_answers_with_a_small_pool(
    run_site: SiteFactory, pool_size: int
):
    """Its share is one connection, or two; no request holds one while it waits for another."""
    async with run_site(pool_size=pool_size, acquire_timeout_seconds=20) as site:
        workspace = await registered(site)

        async def deliver() -> list[int]:
            (file_id,) = await workspace.staged(Part())
            return [
                (await workspace.fetch(file_id)).status,
                (await workspace.ack(file_id)).status,
                (
                    await workspace.message(
                        {"method": "message/send", "params": {"message": {"parts": []}}},
                        to=workspace,
                    )
                ).status,
                (await workspace.read_feed(wait=1)).status,
            ]

        answers = await asyncio.gather(*(deliver() for _ in range(10)))

    assert answers == [[200] * 4] * 10
