"""The metrics that existing dashboards and alerts use."""

from collections.abc import AsyncIterator, Iterator

import pytest
from callers import Part
from cluster import cloned
from outsiders import Outsider
from processes import Server, wait_until
from prometheus_client.parser import text_string_to_metric_families

ACTIVITY = "/workspaces/:id/activity"


def samples(url: str, name: str) -> Iterator[tuple[dict[str, str], float]]:
    """The label sets of a sample, with its values."""
    for family in text_string_to_metric_families(Outsider(url).get("/metrics").body.decode()):
        for sample in family.samples:
            if sample.name == name:
                yield dict(sample.labels), sample.value


def test_the_metrics_are_public_prometheus_text(url: str):
    answer = Outsider(url).get("/metrics")

    assert answer.status == 200
    assert answer.headers["Content-Type"].startswith("text/plain; version=")


@pytest.fixture(scope="module")
async def fresh(
    anyio_backend: str, cluster: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[str]:
    """A server that nobody has asked for anything."""
    async with cloned(cluster) as dsn:
        data_dir = tmp_path_factory.mktemp("fresh")
        with Server(data_dir, RESTANTE_DATABASE_URL=dsn) as server:
            yield server.start().address


def test_every_outcome_of_a_sweep_exists_from_the_start(fresh: str):
    found = {
        labels["outcome"]: value
        for labels, value in samples(fresh, "molecule_pending_uploads_swept_total")
    }

    assert found == {"acked": 0, "expired": 0, "error": 0}


def test_resets_and_connections_exist_from_the_start(fresh: str):
    for name in ("molecule_phantom_busy_resets_total", "molecule_websocket_connections_active"):
        assert list(samples(fresh, name)) == [({}, 0)]


def test_requests_are_counted_by_method_pattern_and_status(workspace: Outsider):
    wanted = {"method": "GET", "path": ACTIVITY, "status": "200"}

    def counted() -> float:
        found = samples(workspace.url, "molecule_http_requests_total")
        return sum(value for labels, value in found if labels == wanted)

    before = counted()
    workspace.rows()

    wait_until(lambda: counted() == before + 1, seconds=10, what="the count of the request")


def test_durations_are_a_histogram(workspace: Outsider):
    workspace.rows()

    def bounds() -> set[str]:
        found = samples(workspace.url, "molecule_http_request_duration_seconds_bucket")
        return {
            labels["le"]
            for labels, _ in found
            if (labels["method"], labels["path"]) == ("GET", ACTIVITY)
        }

    wait_until(lambda: "+Inf" in bounds(), seconds=10, what="a bucket of the histogram")


def test_a_path_is_a_pattern_and_never_an_address(workspace: Outsider):
    file_id = workspace.file(Part(name="a-telling-name"))
    workspace.fetch(file_id)
    workspace.get(f"/nowhere/{workspace.token}")

    page = workspace.get("/metrics").body.decode()

    for secret in (workspace.id, file_id, workspace.token, "a-telling-name", "nowhere"):
        assert secret not in page
