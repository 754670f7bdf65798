"""`restante oplog parked` and `conflicts` say what waits, and why."""

import json
from datetime import UTC, datetime

import pytest
from msgspec import Raw

from restante.cli import oplog_parked
from restante.cli.output import json_text
from restante.errors import BadRequest
from restante.oplog.applying.conflicts import Listed
from restante.oplog.applying.parked import ParkedOp

NOW = datetime(2026, 11, 17, 12, tzinfo=UTC)


def parked(key: str | None = "[1]") -> ParkedOp:
    return ParkedOp(
        17,
        "items\x1b[31m",
        "foreign_key",
        'Key (parent)=(99) is not present in table "parents".',
        "create",
        key,
        Raw(b'{"id":1}'),
        "01KA0000000000000000000000",
        "https://a.example",
        None,
        NOW,
        NOW,
        3,
    )


def test_a_parked_change_is_shown_with_its_reason(capsys: pytest.CaptureFixture[str]):
    oplog_parked._print_parked([parked()])  # pyright: ignore[reportPrivateUsage]

    shown = capsys.readouterr().out
    assert shown.startswith("17  foreign_key: create of items")
    assert "Key (parent)=(99) is not present" in shown
    assert "from a removed peer; parked 2026-11-17 12:00:00, tried 3 times" in shown
    assert "\x1b" not in shown


@pytest.mark.parametrize(("is_delete", "shown"), [(True, "deleted"), (False, "not kept")])
def test_both_versions_of_a_conflict_are_shown(
    capsys: pytest.CaptureFixture[str], is_delete: bool, shown: str
):
    one = Listed(
        5,
        NOW,
        "items",
        "[1]",
        "unseen",
        "01KA0000000000000000000002",
        "https://a.example",
        Raw(b'{"id":1,"name":"ours"}'),
        kept_is_delete=False,
        lost_ulid="01KA0000000000000000000001",
        lost_host="https://b.example",
        lost=None,
        lost_is_delete=is_delete,
    )

    oplog_parked._print_conflicts([one])  # pyright: ignore[reportPrivateUsage]

    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "5  2026-11-17 12:00:00 UTC  unseen: items [1]"
    assert lines[1].endswith('of https://a.example: {"id":1,"name":"ours"}')
    assert lines[2].endswith(f"of https://b.example: {shown}")


@pytest.mark.parametrize(("ids", "every"), [((), False), ((1,), True)])
def test_numbers_or_all(ids: tuple[int, ...], every: bool):
    with pytest.raises(BadRequest, match="or say --all"):
        oplog_parked.discard(*ids, every=every)


def test_the_json_has_the_record_as_it_is():
    assert json.loads(json_text([parked(None)], indent=2))[0]["data"] == {"id": 1}
