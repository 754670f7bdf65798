"""What is refused before anything is looked up."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from msgspec import Raw
from oplog.nodes import NOW, OWN, PEER, THIRD, op

from restante.oplog import ulids
from restante.oplog.applying import boundary
from restante.oplog.applying.boundary import Boundary, Refusal
from restante.oplog.peers import Peer

BORDER = Boundary(Peer(1, PEER, relays=frozenset({THIRD})), OWN, {"items", "others"}, NOW)


@pytest.mark.parametrize("ulid", ["", "x", "0" * 25, "8" + "0" * 25, "U" * 26, "é" * 26, "0" * 27])
def test_unreadable_ulids(ulid: str):
    sent = op("create", {"id": 1})
    sent.ulid = ulid

    assert BORDER.refusal(sent, origin=PEER) is Refusal.ULID


@pytest.mark.parametrize(
    ("moment", "refusal"),
    [
        (ulids.EARLIEST, None),
        (ulids.EARLIEST - timedelta(milliseconds=1), Refusal.TIME),
        (NOW + timedelta(hours=23, minutes=59), None),
        (NOW + timedelta(hours=24, seconds=1), Refusal.TIME),
    ],
)
def test_ulids_of_impossible_times(moment: Any, refusal: Refusal | None):
    sent = op("create", {"id": 1})
    sent.ulid = ulids.text_of(ulids.lowest_at(moment))

    assert BORDER.refusal(sent, origin=PEER) is refusal


@pytest.mark.parametrize(
    ("origin", "refusal"),
    [
        (PEER, None),
        (THIRD, None),
        (OWN, None),
        ("https://fourth.example", Refusal.HOST),
        ("", Refusal.HOST),
        ("x" * 256, Refusal.HOST),
    ],
)
def test_a_peer_speaks_for_itself_and_those_that_it_relays(origin: str, refusal: Refusal | None):
    assert BORDER.refusal(op("create", {"id": 1}), origin=origin) is refusal


def test_tables_that_are_unknown_or_not_the_peers():
    restricted = replace(BORDER, sender=Peer(1, PEER, tables=frozenset({"others"})))

    assert BORDER.refusal(op("create", table="x"), origin=PEER) is Refusal.TABLE
    assert restricted.refusal(op("create"), origin=PEER) is Refusal.FORBIDDEN_TABLE
    assert restricted.refusal(op("create", table="others"), origin=PEER) is None


@pytest.mark.parametrize("record", [b"5", b"[]", b"null", b'"x"', b"{", b'{"a":"\xff"}', b""])
def test_records_that_are_no_objects(record: bytes):
    assert boundary.decoded(Raw(record)) is Refusal.DATA


def test_the_fields_of_a_record_stay_json():
    """A float would lose digits."""
    sent = b'{"n": 1.2300000000000000000000000000001, "s": "\\u00e9"}'

    found = boundary.decoded(Raw(sent))

    assert not isinstance(found, Refusal)
    text, fields = found
    assert text == sent.decode()
    assert bytes(fields["n"]) == b"1.2300000000000000000000000000001"


def test_a_record_that_is_too_large(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(boundary, "MAX_RECORD_BYTES", 5)

    assert boundary.decoded(Raw(b'{"a":1}')) is Refusal.TOO_LARGE
