"""The names and labels of the metrics that existing dashboards use."""

from typing import Any
from uuid import uuid4

import pytest
from callers import ADMIN, Part, ask, registered
from prometheus_client.parser import text_string_to_metric_families
from sites import Site
from starlette.routing import Route

from restante.server.app import ROUTES

pytestmark = pytest.mark.anyio


async def families(site: Site) -> dict[str, Any]:
    page = await ask(site, "GET", "/metrics")
    assert page.status == 200
    assert page.headers["Content-Type"].startswith("text/plain")
    return {family.name: family for family in text_string_to_metric_families(page.body.decode())}


async def test_requests_are_counted_by_method_path_and_status(site: Site):
    caller = await registered(site)
    await caller.staged()
    await caller.read_feed()
    await caller.read_feed(limit=0)

    found = (await families(site))["molecule_http_requests"]

    counted = {
        (sample.labels["method"], sample.labels["path"], sample.labels["status"]): sample.value
        for sample in found.samples
        if sample.name == "molecule_http_requests_total"
    }
    activity = "/workspaces/{workspace_id}/activity"
    assert counted["GET", activity, "200"] == 1
    assert counted["GET", activity, "400"] == 1
    assert counted["POST", "/workspaces/{workspace_id}/chat/uploads", "200"] == 1
    assert counted["POST", "/registry/register", "200"] == 1
    assert found.type == "counter"


async def test_durations_are_a_histogram_by_method_and_path(site: Site):
    caller = await registered(site)
    await caller.read_feed()

    found = (await families(site))["molecule_http_request_duration_seconds"]

    assert found.type == "histogram"
    counts = {
        (sample.labels["method"], sample.labels["path"]): sample.value
        for sample in found.samples
        if sample.name.endswith("_count")
    }
    assert counts["GET", "/workspaces/{workspace_id}/activity"] == 1


async def test_a_path_label_is_a_pattern_and_never_a_url(site: Site):
    """Ids and tokens in a label would fill the memory and leak."""
    caller = await registered(site)
    (file_id,) = await caller.staged(Part(name="a-telling-name"))
    await caller.fetch(file_id)
    await caller.fetch(str(uuid4()))
    await ask(site, "GET", f"/nowhere/{caller.token}")
    await ask(site, "PUT", f"/workspaces/{caller.id}", headers=ADMIN)

    page = (await ask(site, "GET", "/metrics")).body.decode()
    patterns = {route.path for route in ROUTES if isinstance(route, Route)} | {"unmatched"}

    for secret in (caller.id, file_id, caller.token, "a-telling-name", "nowhere"):
        assert secret not in page
    found = (await families(site))["molecule_http_requests"]
    assert {sample.labels["path"] for sample in found.samples} <= patterns


async def test_watchers_are_counted_from_the_start(site: Site):
    found = (await families(site))["molecule_websocket_connections_active"]

    assert (found.type, [sample.value for sample in found.samples]) == ("gauge", [0])


async def test_every_metric_is_in_the_namespace_and_explained(site: Site):
    for name, family in (await families(site)).items():
        assert name.startswith("molecule_")
        assert family.documentation.strip()
