"""The names and labels of the metrics that existing dashboards use."""

import platform
import re
from collections import Counter
from typing import Any
from uuid import uuid4

import pytest
from callers import ADMIN, Part, ask, registered
from prometheus_client.parser import text_string_to_metric_families
from sites import Site
from starlette.routing import Route

from restante import __version__
from restante.server.app import ROUTES

pytestmark = pytest.mark.anyio

Samples = dict[tuple[str, ...], float]
BUILD_INFO = "restante_build_info"
REQUESTS = "molecule_http_requests_total"
SECONDS = "molecule_http_request_duration_seconds_total"
ACTIVITY = "/workspaces/:id/activity"


async def page(site: Site) -> str:
    answer = await ask(site, "GET", "/metrics")
    assert answer.status == 200
    assert answer.headers["Content-Type"].startswith("text/plain")
    return answer.body.decode()


async def families(site: Site) -> list[Any]:
    return list(text_string_to_metric_families(await page(site)))


async def samples(site: Site, name: str, *labels: str) -> Samples:
    """The samples of this name, by the values of these labels."""
    found = [sample for family in await families(site) for sample in family.samples]
    return {
        tuple(sample.labels[label] for label in labels): sample.value
        for sample in found
        if sample.name == name and set(labels) == set(sample.labels) - {"le"}
    }


async def by_request(site: Site, name: str) -> Samples:
    return await samples(site, name, "method", "path", "status")


async def test_requests_are_counted_by_method_path_and_status(site: Site):
    caller = await registered(site)
    (file_id,) = await caller.staged()
    await caller.read_feed()
    await caller.read_feed(source="robot")
    await caller.ack(file_id)

    counted = await by_request(site, REQUESTS)

    assert counted["GET", ACTIVITY, "200"] == 1
    assert counted["GET", ACTIVITY, "400"] == 1
    assert counted["POST", "/workspaces/:id/chat/uploads", "200"] == 1
    assert counted["POST", "/workspaces/:id/pending-uploads/:file_id/ack", "200"] == 1
    assert counted["POST", "/registry/register", "200"] == 1
    assert f"# TYPE {REQUESTS} counter" in await page(site)


async def test_durations_are_a_histogram_by_method_and_path(site: Site):
    caller = await registered(site)
    await caller.read_feed()

    name = "molecule_http_request_duration_seconds"
    counts = await samples(site, f"{name}_count", "method", "path")

    assert counts["GET", ACTIVITY] == 1
    assert f"# TYPE {name} histogram" in await page(site)


async def test_the_sum_of_the_durations_is_a_counter_by_status_too(site: Site):
    """Beside the histogram, whose own sum has no status."""
    caller = await registered(site)
    before = await by_request(site, SECONDS)
    await caller.read_feed(wait="0.05")
    await caller.read_feed(source="robot")

    after = await by_request(site, SECONDS)

    assert before["GET", ACTIVITY, "200"] == before["GET", ACTIVITY, "400"] == 0
    assert after["GET", ACTIVITY, "200"] >= 0.05
    assert 0 < after["GET", ACTIVITY, "400"] < after["GET", ACTIVITY, "200"]
    sums = await samples(site, "molecule_http_request_duration_seconds_sum", "method", "path")
    both = after["GET", ACTIVITY, "200"] + after["GET", ACTIVITY, "400"]
    assert sums["GET", ACTIVITY] == pytest.approx(both)
    assert f"# TYPE {SECONDS} counter" in await page(site)


async def test_no_metric_is_described_twice(site: Site):
    """A scrape fails as a whole when it is; here two names differ by `_total` only."""
    described = Counter(re.findall(r"^# (?:TYPE|HELP) \w+", await page(site), re.MULTILINE))
    lines = Counter(line.rpartition(" ")[0] for line in (await page(site)).splitlines())

    assert set(described.values()) == {1}
    assert [line for line, count in lines.items() if count > 1 and not line.startswith("#")] == []


async def test_every_route_and_status_that_is_known_is_there_from_the_start(site: Site):
    """An alert can tell none from missing, and a rate sees the first request."""
    counted, seconds = await by_request(site, REQUESTS), await by_request(site, SECONDS)
    document = (await ask(site, "GET", "/openapi.json")).json

    expected = {
        (
            method.upper(),
            path.replace("{workspace_id}", ":id").replace("{file_id}", ":file_id"),
            status,
        )
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
        for status in operation["responses"]
        if status.isdigit()
    }
    assert ("GET", ACTIVITY, "410") in expected
    assert expected <= set(counted)
    assert {("GET", "unmatched", "404"), ("POST", "unmatched", "307")} <= set(counted)
    assert {("OPTIONS", "unmatched", status) for status in ("204", "403")} <= set(counted)
    assert set(counted) == set(seconds)
    assert not any(counted[one] for one in expected)
    swept = await samples(site, "molecule_pending_uploads_swept_total", "outcome")
    assert swept == {("acked",): 0, ("expired",): 0, ("error",): 0}
    assert await samples(site, "molecule_phantom_busy_resets_total") == {(): 0}


async def test_a_path_label_is_a_pattern_and_never_a_url(site: Site):
    """Ids and tokens in a label would fill the memory and leak."""
    caller = await registered(site)
    (file_id,) = await caller.staged(Part(name="a-telling-name"))
    await caller.fetch(file_id)
    await caller.fetch(str(uuid4()))
    await ask(site, "GET", f"/nowhere/{caller.token}")
    await ask(site, "GET", f"/workspaces/{caller.id}/activity/", allow_redirects=False)
    await ask(site, "PUT", f"/workspaces/{caller.id}", headers=ADMIN)

    shown = await page(site)
    paths = {path for _, path, _ in await by_request(site, REQUESTS)}

    for secret in (caller.id, file_id, caller.token, "a-telling-name", "nowhere", "{workspace_id}"):
        assert secret not in shown
    segments = {route.path.count("/") for route in ROUTES if isinstance(route, Route)}
    assert all(path == "unmatched" or path.count("/") in segments for path in paths)
    assert {name for path in paths for name in re.findall(r":\w+", path)} == {":id", ":file_id"}


async def test_watchers_are_counted_from_the_start(site: Site):
    assert await samples(site, "molecule_websocket_connections_active") == {(): 0}
    assert "# TYPE molecule_websocket_connections_active gauge" in await page(site)


async def test_every_metric_is_in_the_namespace_and_explained(site: Site):
    for family in await families(site):
        assert family.name.startswith(("molecule_", "process_")) or family.name == BUILD_INFO
        assert family.documentation.strip()


async def test_the_release_and_the_process_are_among_them(site: Site):
    found = await samples(site, BUILD_INFO, "version", "python")

    assert found == {(__version__, platform.python_version()): 1}
    assert (await samples(site, "process_open_fds"))[()] > 3
