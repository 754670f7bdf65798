"""Alert rules and the dashboard use metrics that exist, and every alert says what to do."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from server.oplog_looks import STATUS as SOME_STATUS
from sweeps import make_subjects

from restante.server.metrics import Metrics
from restante.settings import Settings

ROOT = Path(__file__).parents[2]
RULES = ROOT / "ops/alerts.yml"
CASES = Path(__file__).with_name("alerts.test.yml")
OPERATIONS = (ROOT / "docs/operations.md").read_text()

NAMESPACE = Settings().metrics_namespace
NAME = re.compile(rf"\b(?:{NAMESPACE}|process)_\w+|\brestante_build_info\b")
MATCHERS = re.compile(rf"({NAMESPACE}_\w+){{([^}}]*)}}")
GROUPED = re.compile(rf"by \(([^)]*)\) \((?:\w+\()*[^a-z]*({NAMESPACE}_\w+)")

ALERTS: list[dict[str, Any]] = [
    rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]
]
DASHBOARD = json.loads((ROOT / "ops/dashboard.json").read_text())


def panels() -> Iterator[dict[str, Any]]:
    return (panel for panel in DASHBOARD["panels"] if panel["type"] != "row")


def expressions() -> list[str]:
    shown = [target["expr"] for panel in panels() for target in panel["targets"]]
    return [alert["expr"] for alert in ALERTS] + shown


def samples() -> dict[str, set[str]]:
    """The series of a scrape, each with the names of its labels."""
    metrics = Metrics(NAMESPACE, make_subjects())
    metrics.loops.expect(["sweep"])
    metrics.requests.expect("GET", "/", [200])
    metrics.space.bytes.labels("chunks")
    metrics.workspaces.uploads.labels("some", "acked")
    metrics.workspaces.lag.labels("some")
    metrics.workspaces.written.labels("some")
    metrics.workspaces.feed_bytes.labels("some")
    for gauge in (metrics.oplog.lag_ops, metrics.oplog.lag_bytes, metrics.oplog.lag_seconds):
        gauge.labels("some", "in")
    for by_peer in (metrics.oplog.skew, metrics.oplog.failing, metrics.oplog.differences):
        by_peer.labels("some")
    for by_peer in (metrics.trimming.floor_lag, metrics.trimming.pinned_bytes):
        by_peer.labels("some")
    metrics.trimming.cut_off_age.labels("some")
    metrics.trimming.dropped.saw(SOME_STATUS)
    for name in ("applied", "superseded", "conflicts", "gaps", "outbox_dropped"):
        metrics.oplog.totals.saw(name, {"some": 0})
    return {
        sample.name: set(sample.labels)
        for registry in (metrics.registry, metrics.operator_registry)
        for family in registry.collect()
        for sample in family.samples
    }


@pytest.mark.parametrize("expression", expressions())
def test_the_metrics_of_an_expression_exist(expression: str):
    known, used = samples(), NAME.findall(expression)

    assert used
    assert set(used) <= set(known)
    for name, matchers in MATCHERS.findall(expression):
        assert set(re.findall(r"(\w+)[=!]", matchers)) <= known[name]
    for labels, name in GROUPED.findall(expression):
        assert set(re.findall(r"\w+", labels)) <= known[name]


def test_every_metric_of_deliveries_and_space_is_on_the_dashboard():
    shown = {name for panel in panels() for name in NAME.findall(json.dumps(panel))}
    own = {name for name in samples() if not name.endswith(("_created", "_count", "_sum"))}

    assert own <= shown


def test_panels_do_not_overlap_and_say_what_they_show():
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, panel["title"]
        assert panel["title"]
        assert panel["description"].endswith(".")
        taken |= cells


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_every_alert_says_what_to_do_in_its_rule_and_in_the_guide(alert: dict[str, Any]):
    summary, description = (alert["annotations"][name] for name in ("summary", "description"))
    rows = re.findall(rf"^\| `{alert['alert']}` \| (.+) \| (.+) \|$", OPERATIONS, re.MULTILINE)

    assert summary.endswith(".")
    assert re.search(r"\b(Run|Look|Search)\b", description)
    assert alert["labels"]["severity"] in {"warning", "critical"}
    assert len(rows) == 1


def test_no_alert_is_documented_that_does_not_exist():
    written = set(re.findall(r"`(Restante[A-Z]\w+)`", OPERATIONS))

    assert written == {alert["alert"] for alert in ALERTS}


@pytest.mark.skipif(not shutil.which("promtool"), reason="promtool is not installed")
@pytest.mark.parametrize("words", [("check", "rules", RULES), ("test", "rules", CASES)])
def test_promtool_accepts_the_rules(words: tuple[str | Path, ...]):
    """The rules are well-formed, and fire when they should and not otherwise."""
    done = subprocess.run(
        ["promtool", *words],
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
