"""Cursors on third nodes, as a reset takes them over from its reference."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from oplog.meshes import mesh
from oplog.nodes import THIRD, make_peer
from oplog.resets import clock, pair, planned, reset
from oplog.trimmed import make_reader

from restante.oplog import peers, positions
from restante.oplog.peers import Peer
from restante.oplog.positions import Position
from restante.oplog.resetting import seeds
from restante.oplog.resetting.seeds import OwnCursor
from restante.wire.oplog_reset import CURSORS_PATH, CursorOn

pytestmark = pytest.mark.anyio

POSITIONS = [str(Position(n, 1, positions.START.ulid, 0)) for n in (175 * 10**13, 176 * 10**13)]
EARLY, LATE = POSITIONS


def own(**given: Any) -> OwnCursor:
    default: dict[str, Any] = {"cursor": EARLY, "tables": frozenset({"notes"})}
    default["takes_snapshot"] = False
    return OwnCursor(7, THIRD, **(default | given))


def told(**given: Any) -> CursorOn:
    default: dict[str, Any] = {"cursor": LATE, "tables": ["notes"], "has_parked": False}
    default["takes_any_host"] = True
    return CursorOn(host=THIRD, **(default | given))


REFERENCE = Peer(1, "https://reference.example")
SEEDED = {
    "behind": own(),
    "missing": own(cursor=""),
    "unreadable": own(cursor="18423042"),
    "of an implausible time": own(cursor=str(Position(2**62, 1, positions.START.ulid, 0))),
    "of the older protocol": own(cursor="01J00000000000000000000000"),
}


@pytest.mark.parametrize("cursor", SEEDED.values(), ids=SEEDED)
def test_a_cursor_that_is_behind_the_references_becomes_its(cursor: OwnCursor):
    found = seeds.seeded(cursor, told(), REFERENCE, {"notes"}, now=clock())

    assert found is not None
    assert (found.before, found.after, found.why_not) == (cursor.cursor, LATE, "")


@pytest.mark.parametrize(
    "said",
    [
        pytest.param(told(cursor=EARLY), id="as far"),
        pytest.param(told(cursor=""), id="nothing read"),
        pytest.param(told(cursor="18423042"), id="unreadable"),
    ],
)
def test_a_cursor_that_is_as_far_stays(said: CursorOn):
    assert seeds.seeded(own(), said, REFERENCE, {"notes"}, now=clock()) is None


WHOLE = REFERENCE, {"notes"}
REASONS = {
    "a table that it does not read": (own(), told(tables=[]), *WHOLE, "does not read notes"),
    "a table that is not equal": (own(), told(), REFERENCE, set(), "does not read notes"),
    "hosts that it does not take": (own(), told(takes_any_host=False), *WHOLE, "may not pass on"),
    "hosts that we do not take from it": (
        own(),
        told(),
        replace(REFERENCE, relays=frozenset({THIRD})),
        {"notes"},
        "may not pass on",
    ),
    "parked ops": (own(), told(has_parked=True), *WHOLE, "has parked ops of it"),
    "a snapshot": (own(takes_snapshot=True), told(), *WHOLE, "a snapshot is being taken"),
}


@pytest.mark.parametrize(
    ("mine", "said", "reference", "equal", "why"), REASONS.values(), ids=REASONS
)
def test_a_cursor_stays_if_something_might_be_skipped(
    mine: OwnCursor, said: CursorOn, reference: Peer, equal: set[str], why: str
):
    found = seeds.seeded(mine, said, reference, equal, now=clock())

    assert found is not None
    assert found.after == found.before
    assert why in found.why_not


async def test_cursors_on_third_nodes_are_seeded_from_the_reference(cluster: str):
    async with pair(cluster) as (a, b):
        up_to = (await planned(a, b)).up_to
        third = "http://127.0.0.1:1"
        await make_reader(a.db, up_to, third)
        await make_peer(b.db, third)
        await make_peer(b.db, "http://127.0.0.1:2")
        await a.sql.execute("update restante.op_peers set cursor = 'x' where host = $1", third)
        await b.sql.execute(
            "update restante.op_peers set cursor = $2, joined_tables ="
            " (select array_agg(id) from restante.op_tables) where host = $1",
            third,
            LATE,
        )

        plan = await planned(a, b)
        report = await reset(a.db, plan)

        assert [(one.host, one.before, one.after) for one in plan.cursors] == [(third, "x", LATE)]
        assert report.seeded == plan.cursors
        assert (await a.peer(third))["cursor"] == LATE


async def test_a_node_names_only_those_of_the_asked_nodes_that_are_its_peers(
    cluster: str, tmp_path: Path
):
    async with mesh(cluster, tmp_path, 1) as (a,):
        assert a.site is not None
        token = peers.new_token()
        for host in ("http://127.0.0.1:1", "http://127.0.0.1:2"):
            await make_peer(a.db, host)
        await make_peer(a.db, "http://127.0.0.1:3", shown_token=token)
        asked = {"hosts": ["http://127.0.0.1:1", "http://127.0.0.1:3", "http://127.0.0.1:9"]}
        headers = {"Authorization": f"Bearer {token}"}

        async with a.site.http.post(CURSORS_PATH, json=asked, headers=headers) as answer:
            said = await answer.json()
        async with a.site.http.post(CURSORS_PATH, json=asked) as answer:
            assert answer.status == 401

        assert [one["host"] for one in said["cursors"]] == ["http://127.0.0.1:1"]
