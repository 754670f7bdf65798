"""What `restante oplog verify` prints, and how it ends."""

from io import StringIO

import pytest

from restante.cli import oplog_verify
from restante.cli.output import Console
from restante.oplog.verifying.comparison import Progress
from restante.wire.oplog_digests import (
    KeyDifference,
    ResyncReport,
    TableOutcome,
    TableReport,
    UnrepairedKey,
    VerifyReport,
)


def report(*outcomes: TableOutcome, is_caught_up: bool = True) -> VerifyReport:
    tables = [
        TableReport(
            table=f"t{n}",
            outcome=outcome,
            rows_here=n,
            keys=[KeyDifference('["a [b]"]', "missing_here")] if outcome == "differs" else [],
            more_ranges=2 if outcome == "differs" else 0,
            schema=["Only the peer has the column c."],
            reason="" if outcome in {"equal", "differs"} else "A reason.",
        )
        for n, outcome in enumerate(outcomes, 1)
    ]
    return VerifyReport(
        peer="https://b.example",
        is_equal="differs" not in outcomes and "changing" not in outcomes,
        is_caught_up=is_caught_up,
        tables=tables,
        seconds=1.0,
    )


def shown(found: VerifyReport) -> str:
    console = Console(file=StringIO(), width=200)
    oplog_verify.show(console, found)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("outcomes", "code"),
    [
        (("equal", "not_compared"), 0),
        (("equal", "changing"), 1),
        (("changing", "differs"), 3),
    ],
)
def test_the_exit_code_says_what_was_found(outcomes: tuple[TableOutcome, ...], code: int):
    assert oplog_verify._exit_code(report(*outcomes)) == code


def test_each_table_has_a_line_and_what_differs_is_below_it():
    text = shown(report("equal", "differs", "changing", "not_compared", is_caught_up=False))

    assert "t1: equal, 1 record\n    Only the peer has the column c.\n" in text
    assert 't2: not equal, 2 records here, 0 there\n    missing here  ["a [b]"]\n' in text
    assert "    and more keys, in 2 ranges\n" in text
    assert "t3: not decided. A reason.\n" in text
    assert "t4: not compared. A reason.\n" in text
    assert "Not equal to https://b.example, compared in 1.0 s.\n" in text
    assert "some may be on their way" in text
    assert "restante oplog resync https://b.example TABLE" in text


def test_a_resync_lists_the_keys_that_still_differ_with_what_is_known_of_them():
    keys = [UnrepairedKey('["7"]', "missing_here", "A change of it is parked here: why.")]
    whole = ResyncReport(peer="http://b", table="pages", status="complete")
    partly = ResyncReport(
        peer="http://b", table="pages", status="incomplete", keys=keys, more_ranges=2, refused=1
    )

    assert "equal to http://b" in "\n".join(oplog_verify._resync_lines(whole))
    _, listed, more, refused = oplog_verify._resync_lines(partly)
    assert listed == '    missing here  ["7"]  A change of it is parked here: why.'
    assert "2 ranges" in more
    assert refused.startswith("Refused meanwhile: 1 record of the peer.")


def test_an_interrupted_comparison_says_how_to_go_on(capsys: pytest.CaptureFixture[str]):
    progress = Progress()
    progress.begin("my pages", 10)
    progress.note(5, '["it\'s"]')

    with pytest.raises(KeyboardInterrupt), oplog_verify._resumable("https://b.example", progress):
        raise KeyboardInterrupt

    assert capsys.readouterr().err == (
        "To go on where this ended: restante oplog verify https://b.example --table 'my pages' "
        "--after '[\"it'\"'\"'s\"]'\n"
    )


def test_nothing_is_said_if_there_is_nothing_to_go_on_from(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(KeyboardInterrupt), oplog_verify._resumable("https://b", Progress()):
        raise KeyboardInterrupt

    assert capsys.readouterr().err == ""
