"""What `restante oplog reset` prints, and how it ends."""

from datetime import UTC, datetime
from io import StringIO
from typing import Any

import msgspec
import pytest

from restante.cli import oplog_reset
from restante.cli.output import Console
from restante.oplog.resetting.plan import Wanted
from restante.wire.oplog_digests import TableOutcome, TableReport, VerifyReport
from restante.wire.oplog_reset import PeerLoss, ResetPlan, ResetReport, ResetTable, SeededCursor

PEER = "https://b.example"


def plan(*outcomes: TableOutcome, **given: Any) -> ResetPlan:
    tables = [TableReport(table=f"t{n}", outcome=one) for n, one in enumerate(outcomes, 1)]
    verified = VerifyReport(peer=PEER, is_equal=True, is_caught_up=True, tables=tables, seconds=1.0)
    default: dict[str, Any] = {"tables": [], "peers": [], "cursors": [], "refusals": []}
    return ResetPlan(peer=PEER, verified=verified, up_to="", **(default | given))


REPORT = ResetReport(
    peer=PEER,
    tables=["t1"],
    ops=7,
    partitions=2,
    bytes=4096,
    filesystem_bytes=8192,
    evicted=[],
    seeded=[],
    left=[],
    seconds=1.0,
)
LEFT = msgspec.structs.replace(REPORT, left=["ops_1: Another session has locked it."])


@pytest.mark.parametrize(
    ("found", "report", "code"),
    [
        pytest.param(plan("equal"), None, 0, id="planned"),
        pytest.param(plan("equal"), REPORT, 0, id="done"),
        pytest.param(plan("equal"), LEFT, 4, id="not all"),
        pytest.param(plan("equal", refusals=["No."]), None, 4, id="refused"),
        pytest.param(plan("equal", "differs", refusals=["No."]), None, 3, id="differs"),
        pytest.param(plan("changing", refusals=["No."]), None, 1, id="undecided"),
    ],
)
def test_the_exit_code_says_what_was_found(found: ResetPlan, report: ResetReport | None, code: int):
    assert oplog_reset._exit_code(found, report) == code


def printed(show: Any, *values: Any, **named: Any) -> str:
    console = Console(file=StringIO(), width=200)
    show(console, *values, **named)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def loss(**given: Any) -> PeerLoss:
    default: dict[str, Any] = {
        "host": "https://c.example",
        "standing": "readable",
        "tables": ["t1"],
        "ops": 10_000,
        "bytes": 5_000_000,
        "is_more": True,
        "since": datetime(2026, 1, 2, 3, 4, tzinfo=UTC),
        "has_read": False,
        "takes_snapshot": True,
        "is_accepted": True,
    }
    return PeerLoss(**(default | given))


def test_a_plan_names_tables_losses_and_cursors_and_ends_with_the_command():
    found = plan(
        "equal",
        "not_compared",
        tables=[
            ResetTable(name="t1", is_reset=True, ops=12, bytes=4096, partitions=1),
            ResetTable(name="t2", is_reset=False, why_not="The peer does not track it."),
        ],
        peers=[loss(), loss(takes_snapshot=False), loss(standing="evicted"), loss(has_read=True)],
        cursors=[
            SeededCursor(host="https://d.example", before="", after="p2"),
            SeededCursor(host="https://e.example", before="p1", after="p1", why_not="it parks"),
        ],
    )
    command = oplog_reset._command(PEER, Wanted(tables=["my pages"], evicts=True))

    lines = printed(oplog_reset._show_plan, found, command=command).splitlines()

    assert lines[:2] == [
        "t1: about 12 ops in 1 partition, 4.0 KiB",
        "t2: stays as it is. The peer does not track it.",
    ]
    assert lines[2].startswith(
        "https://c.example has not read more than 10000 ops of t1 since 2026-01-02 03:04 ("
    )
    assert lines[2].endswith("): it takes a snapshot then")
    assert lines[3].endswith(": it never gets them")
    assert lines[4].endswith(": it was evicted already")
    assert lines[5].endswith("has read everything, but this node has not read its log")
    assert lines[6:] == [
        "The cursor on https://d.example: from nothing to p2",
        "The cursor on https://e.example stays as it is: it parks.",
        "4.0 KiB would come back. Nothing was changed yet.",
        f"To do it: restante oplog reset --from {PEER} --table 'my pages' --evict --yes",
    ]


def test_a_refusal_lists_the_reasons_and_no_command():
    text = printed(oplog_reset._show_plan, plan("equal", refusals=["A.", "B."]), command="x")

    assert text == "Refused; nothing was changed:\n  A.\n  B.\n"


FREE = {
    8192: "The filesystem has 8.0 KiB more free than before.",
    -8192: "The filesystem has 8.0 KiB less free than before: others write to it.",
    None: "The filesystem cannot be seen from here: these are sizes of files.",
}


@pytest.mark.parametrize("free", FREE, ids=str)
def test_the_report_says_what_the_filesystem_has_back(free: int | None):
    report = msgspec.structs.replace(LEFT, filesystem_bytes=free, evicted=["https://c.example"])

    assert printed(oplog_reset._show_report, report).splitlines() == [
        "https://c.example was evicted.",
        "Dropped about 7 ops in 2 partitions, 4.0 KiB of files, in 1.0 s.",
        FREE[free],
        "Not done: ops_1: Another session has locked it.",
        "The same command goes on from here.",
    ]
