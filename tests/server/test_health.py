"""What probes, scrapers and operators see of a running server."""

import asyncio
import re
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import pytest
import structlog
from aiohttp import ClientPayloadError
from prometheus_client.parser import text_string_to_metric_families
from sites import ADMIN_TOKEN, Site, SiteFactory
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from sweeps import make_subjects
from waiting import until

from restante.server.loops import Loop, Loops
from restante.server.metrics import PASS_OUTCOMES, Metrics

pytestmark = pytest.mark.anyio


async def get(site: Site, path: str, **headers: str) -> tuple[int, Any]:
    async with site.http.get(path, headers=headers) as answer:
        return answer.status, await answer.json()


async def test_a_server_that_runs_is_alive_and_ready(site: Site):
    assert await get(site, "/health") == (200, {"status": "ok"})
    assert await get(site, "/ready") == (200, {"status": "ready"})


async def test_a_probe_may_ask_with_head(site: Site):
    for path in ("/health", "/ready", "/metrics"):
        async with site.http.head(path) as answer:
            assert (answer.status, await answer.read()) == (200, b"")


async def test_a_server_without_its_database_is_alive_and_not_ready(
    site: Site, dsn: str, cluster: str, maintenance: Any
):
    name = dsn.partition("?")[0].rpartition("/")[2]
    await maintenance.execute(f"alter database {name} allow_connections false")
    await maintenance.execute(
        "select pg_terminate_backend(pid) from pg_stat_activity where datname = $1", name
    )

    status, body = await get(site, "/ready")

    assert (status, body["code"]) == (503, "not_ready")
    assert re.match(r"The (connection to the )?database ", body["error"])
    assert await get(site, "/health") == (200, {"status": "ok"})

    await maintenance.execute(f"alter database {name} allow_connections true")
    await until(lambda: is_ready(site))


async def is_ready(site: Site) -> bool:
    return await get(site, "/ready") == (200, {"status": "ready"})


@pytest.fixture
async def maintenance(cluster: str) -> AsyncIterator[Any]:
    """A connection to the maintenance database of the cluster."""
    connection = await asyncpg.connect(cluster)
    yield connection
    await connection.close()


async def test_a_missing_migration_is_named(site: Site, connections: Callable[[], Any]):
    """Somebody restored a backup from before the upgrade."""
    connection = await connections()
    await connection.execute("delete from schema_migrations where number = 1")
    await connection.execute(
        "insert into schema_migrations values (9999, 'from_a_newer_release', 'x')"
    )

    status, body = await get(site, "/ready")

    assert (status, body["code"]) == (503, "not_ready")
    assert re.fullmatch(
        r"Migration 0001_pre_\w+ has not run; run `restante migrate`\.", body["error"]
    )


async def test_a_server_that_is_too_old_says_what_to_do(site: Site, connections: Callable[[], Any]):
    """A newer release has finished its upgrade while this process was still running."""
    connection = await connections()
    await connection.execute("update schema_compatibility set oldest_code = 9999")

    status, body = await get(site, "/ready")

    assert (status, body["code"]) == (503, "not_ready")
    assert "Install the newer release" in body["error"]


async def test_a_newer_migration_alone_does_not_make_a_server_unready(
    site: Site, connections: Callable[[], Any]
):
    connection = await connections()
    await connection.execute("insert into schema_migrations values (9999, 'newer', 'x')")

    assert await get(site, "/ready") == (200, {"status": "ready"})


async def test_probes_are_answered_while_background_work_runs(site: Site):
    working = asyncio.Event()

    async def busy() -> None:
        """Runs whenever nothing else does."""
        while True:
            working.set()
            await asyncio.sleep(0)

    loop = Loop("busy", busy, interval_seconds=3600, deadline_seconds=3600)
    async with Loops([loop], site.state.metrics.loops):
        await working.wait()

        assert await get(site, "/health") == (200, {"status": "ok"})
        assert await get(site, "/ready") == (200, {"status": "ready"})


def samples(page: str) -> dict[tuple[str, ...], float]:
    """Every sample by its name and the values of its labels."""
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


async def metrics_of(site: Site) -> dict[tuple[str, ...], float]:
    async with site.http.get("/metrics") as answer:
        assert answer.status == 200
        assert answer.content_type == "text/plain"
        return samples(await answer.text())


@pytest.mark.skipif(not shutil.which("promtool"), reason="promtool is not installed")
@pytest.mark.parametrize("token", ["", ADMIN_TOKEN], ids=["anybody", "the operator"])
async def test_promtool_finds_no_fault_with_the_metrics(site: Site, token: str):
    """Their names, types, units and help follow the conventions of Prometheus."""
    await get(site, "/health")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    async with site.http.get("/metrics", headers=headers) as answer:
        page = await answer.read()

    done = await asyncio.to_thread(
        subprocess.run, ["promtool", "check", "metrics"], input=page, capture_output=True
    )

    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


ANY_NAMESPACE = ("process_", "restante_build_info")


async def test_the_namespace_is_molecule_by_default(site: Site):
    await get(site, "/health")

    names = {name for name, *_ in await metrics_of(site)}

    assert "molecule_http_requests_total" in names
    assert all(name.startswith(("molecule_", *ANY_NAMESPACE)) for name in names)


async def test_the_namespace_can_be_chosen(run_site: SiteFactory):
    async with run_site(metrics_namespace="post") as site:
        names = {name for name, *_ in await metrics_of(site)}

    assert all(name.startswith(("post_", *ANY_NAMESPACE)) for name in names)
    assert any(name.startswith("post_") for name in names)


async def test_the_metrics_are_rendered_once_for_all_who_ask_at_the_same_time():
    """Anybody may ask, and it costs more than any other request without a token."""
    metrics = Metrics("test", make_subjects())
    first = await metrics.page()

    pages = await asyncio.gather(*(metrics.page() for _ in range(50)))

    assert pages[0] is not first
    assert all(page is pages[0] for page in pages)


async def test_every_outcome_of_a_loop_is_shown_as_zero_before_its_first_pass():
    """An alert must distinguish "none" from "missing"."""
    metrics = Metrics("test", make_subjects())

    metrics.loops.expect(["sweep"])

    shown = samples((await metrics.page()).decode())
    for outcome in PASS_OUTCOMES:
        assert shown["test_loop_passes_total", "sweep", outcome] == 0
    assert shown["test_loop_restarts_total", "sweep"] == 0
    assert shown["test_loop_last_success_timestamp_seconds", "sweep"] == 0


async def test_requests_are_counted_by_the_pattern_of_their_route(site: Site):
    await get(site, "/health")
    await get(site, "/health?token=secret")
    await get(site, "/no/such/place/secret")

    shown = await metrics_of(site)

    assert shown["molecule_http_requests_total", "GET", "/health", "200"] == 2
    assert shown["molecule_http_requests_total", "GET", "unmatched", "404"] == 1
    assert not any("secret" in value for labels in shown for value in labels)


async def test_a_made_up_method_is_not_a_label(site: Site):
    """An unauthenticated caller must not be able to fill the memory with label values."""
    async with site.http.request("XYZZY", "/health") as answer:
        assert answer.status in {400, 405}

    shown = await metrics_of(site)

    assert not any("XYZZY" in labels for labels in shown)


async def test_the_callers_request_id_comes_back(site: Site):
    async with site.http.get("/health", headers={"X-Request-ID": "a-1.b_2"}) as answer:
        assert answer.headers["X-Request-ID"] == "a-1.b_2"


@pytest.mark.parametrize("given", [None, "", "two words", 'quote"', "x" * 65, "é"])
async def test_a_request_id_that_is_missing_or_odd_is_replaced(site: Site, given: str | None):
    """It is logged, and must not look like another field or another line."""
    headers = {} if given is None else {"X-Request-ID": given}

    async with site.http.get("/health", headers=headers) as answer:
        assert re.fullmatch("[0-9a-f]{16}", answer.headers["X-Request-ID"])


async def test_an_unknown_path_is_a_json_problem(site: Site):
    status, body = await get(site, "/no/such/place")

    assert status == 404
    assert body == {"error": "There is nothing at this address.", "code": "no_such_route"}


async def test_a_wrong_method_is_a_json_problem(site: Site):
    async with site.http.delete("/health") as answer:
        assert answer.status == 405
        assert "GET" in answer.headers["Allow"]
        assert (await answer.json())["code"] == "method_not_allowed"


async def broken(_request: Request) -> Response:
    raise ZeroDivisionError("secret detail")


async def broken_half_way(_request: Request) -> Response:
    async def body() -> AsyncIterator[bytes]:
        yield b"half"
        raise ZeroDivisionError("secret detail")

    return StreamingResponse(body())


async def test_a_bug_is_internal_in_the_answer_and_has_its_traceback_in_the_log(site: Site):
    site.app.router.routes.append(Route("/broken/{what}", broken))

    with structlog.testing.capture_logs() as logged:
        status, body = await get(site, "/broken/thing", **{"X-Request-ID": "the-one"})

    assert (status, body["code"]) == (500, "internal")
    assert "secret" not in str(body)
    (bug,) = [event for event in logged if event["event"] == "bug"]
    assert isinstance(bug["exc_info"], ZeroDivisionError)


async def test_a_bug_has_a_request_id_and_is_logged_and_counted(site: Site):
    """The caller can name the request, and the operator can find it in the log."""
    site.app.router.routes.append(Route("/broken/{what}", broken))

    with structlog.testing.capture_logs() as logged:
        async with site.http.get("/broken/thing", headers={"X-Request-ID": "the-one"}) as answer:
            assert answer.headers["X-Request-ID"] == "the-one"

    (line,) = [event for event in logged if event["event"] == "request"]
    assert (line["route"], line["status"]) == ("/broken/{what}", 500)
    shown = await metrics_of(site)
    assert shown["molecule_http_requests_total", "GET", "/broken/:what", "500"] == 1


async def test_a_bug_in_the_middle_of_an_answer_closes_the_connection(site: Site):
    """An incomplete answer must not look complete."""
    site.app.router.routes.append(Route("/broken", broken_half_way))

    with structlog.testing.capture_logs() as logged, pytest.raises(ClientPayloadError):
        async with site.http.get("/broken") as answer:
            await answer.read()

    assert [event["event"] for event in logged] == ["bug", "request"]


async def slow_reader(request: Request) -> Response:
    return Response(await request.body())


async def test_a_client_that_disconnects_is_not_a_bug(site: Site):
    site.app.router.routes.append(Route("/slow", slow_reader, methods=["POST"]))
    where = urlsplit(site.url)

    with structlog.testing.capture_logs() as logged:
        _, writer = await asyncio.open_connection(where.hostname, where.port)
        writer.write(b"POST /slow HTTP/1.1\r\nHost: r\r\nContent-Length: 99\r\n\r\nabc")
        await writer.drain()
        writer.close()
        await until(lambda: bool(logged))

    assert [(event["event"], event["status"]) for event in logged] == [("request", 499)]


async def test_every_request_is_logged_on_one_line(site: Site):
    with structlog.testing.capture_logs() as logged:
        await get(site, "/health?token=secret")
        await get(site, "/no/such/place/secret")

    lines = [event for event in logged if event["event"] == "request"]
    shown = ("log_level", "method", "route", "path", "status")
    assert [tuple(each[field] for field in shown) for each in lines] == [
        ("debug", "GET", "/health", "/health", 200),
        ("info", "GET", "unmatched", "/no/such/…", 404),
    ]
    assert all(each["seconds"] >= 0 for each in lines)
    assert "secret" not in str(logged)
