"""What a query of the feed tolerates, and what it refuses."""

from typing import Any
from uuid import UUID, uuid4

import pytest
from callers import ADMIN, Caller, Part, ask, registered
from sites import Site

pytestmark = pytest.mark.anyio

PART = {"kind": "text", "text": "hello"}
HELLO = {"jsonrpc": "2.0", "method": "message/send", "params": {"message": {"parts": [PART]}}}

PARAMETERS = [
    "since_id", "since_seq", "type", "source", "since_secs", "peer_id", "before_ts", "limit",
    "wait", "include",
]  # fmt: skip


@pytest.fixture
async def caller(site: Site) -> Caller:
    return await registered(site)


def seqs(rows: list[dict[str, Any]]) -> list[int]:
    return [row["seq"] for row in rows]


async def test_a_hundred_rows_unless_asked_and_five_hundred_at_most(caller: Caller):
    """A larger number counts as 500, and anything that is no positive integer as the default."""
    for _ in range(9):
        await caller.staged(*[Part(b"x")] * 64)

    assert len(await caller.feed()) == 100
    for limit, rows in ((1, 1), ("007", 7), (499, 499), (500, 500)):
        assert len(await caller.feed(limit=limit)) == rows, limit
    for limit in (501, 1000, 10**30, "9" * 5000):
        assert len(await caller.feed(limit=limit)) == 500, limit
    for limit in (
        0,
        "000",
        -1,
        "ten",
        "",
        "1.5",
        "1e2",
        "nan",
        "null",
        " 5",
        "5 ",
        "\u0665",
        "0x5",
    ):
        assert len(await caller.feed(limit=limit)) == 100, limit
    assert len(await caller.feed(since_seq=0, limit="x")) == 100


async def test_an_empty_parameter_counts_as_absent(caller: Caller):
    agent = await registered(caller.site)
    await caller.staged(*[Part()] * 2)
    await agent.message(HELLO, to=caller)

    for empty in (*({name: ""} for name in PARAMETERS), dict.fromkeys(PARAMETERS, "")):
        assert seqs(await caller.feed(**empty)) == [3, 2, 1], empty
    rows = await caller.ask("GET", "/activity?type&since_id&limit=2")
    assert seqs(rows.json) == [3, 2]


async def test_empty_parameters_are_absent_on_the_other_routes_too(caller: Caller):
    await caller.staged()

    listed = await caller.waiting(after="", limit="")
    workspaces = await ask(caller.site, "GET", "/admin/workspaces?after=&limit=", headers=ADMIN)
    kept = await caller.ask("DELETE", "?confirm=")

    assert len(listed.json["uploads"]) == 1
    assert [one["id"] for one in workspaces.json["workspaces"]] == [caller.id]
    assert kept.status == 400


async def test_unknown_parameters_are_ignored(caller: Caller):
    await caller.staged()

    assert len(await caller.feed(include="peer_info", order="asc", _="1700000000")) == 1


async def test_rows_exchanged_with_a_peer_are_those_from_it_or_to_it(
    caller: Caller, connections: Any
):
    peer, other = await registered(caller.site), await registered(caller.site)
    for sender in (peer, other, peer):
        await sender.message(HELLO, to=caller)
    await caller.staged()
    await (await connections()).execute("update feed set target_id = $1 where seq = 2", peer.id)

    assert seqs(await caller.feed(peer_id=peer.id)) == [3, 2, 1]
    assert seqs(await caller.feed(peer_id=other.id)) == [2]
    assert seqs(await caller.feed(peer_id=peer.id, since_seq=1, limit=1)) == [2]
    assert seqs(await caller.feed(peer_id=peer.id, source="agent", type="a2a_receive")) == [3, 2, 1]
    # What a workspace has received was sent to it.
    assert seqs(await caller.feed(peer_id=caller.id)) == [4, 3, 1]
    assert await caller.feed(peer_id=uuid4()) == []


async def test_a_peer_that_is_not_a_uuid_is_a_400(caller: Caller):
    for wrong in ("x", "null", f"{uuid4()}0", "\0", " "):
        answer = await caller.read_feed(peer_id=wrong)
        assert answer.status == 400, wrong
        assert "peer_id" in answer.json["error"]


def spellings(an_id: str) -> list[str]:
    return [
        an_id.upper(), UUID(an_id).hex, f"{{{an_id}}}", f"urn:uuid:{an_id}", f"URN:UUID:{an_id}",
    ]  # fmt: skip


async def test_an_id_may_be_spelled_in_other_ways_and_is_answered_in_one(caller: Caller):
    peer = await registered(caller.site)
    await peer.message(HELLO, to=caller)
    (file_id,) = await caller.staged()
    rows = await caller.feed()

    for ours, row, file, theirs in zip(
        *map(spellings, (caller.id, rows[1]["id"], file_id, peer.id)), strict=True
    ):
        respelled = Caller(caller.site, ours, caller.token)
        assert await respelled.feed(since_id=row, limit=1) == rows[:1]
        assert rows[1] in await respelled.feed(peer_id=theirs)
        assert (await respelled.fetch(file)).body == b"hello"
        mark = {"acked_seq": 1, "acked_id": row}
        assert (await respelled.ask("POST", "/activity/ack", json=mark)).status == 200
        sent = await peer.message(HELLO, to=respelled, X_Workspace_ID=theirs)
        assert sent.status == 200
    assert {row["source_id"] for row in await caller.feed(source="agent")} == {peer.id}
    assert {row["workspace_id"] for row in await caller.feed()} == {caller.id}


async def test_an_id_in_a_body_may_be_spelled_in_other_ways(site: Site):
    for number in range(5):
        parent = str(uuid4())
        workspace_id = str(uuid4())
        workspace = await registered(site, id=spellings(workspace_id)[number])
        beat = {"workspace_id": spellings(workspace_id)[number]}
        headers = {"Authorization": f"Bearer {workspace.token}"}
        path = f"/workspaces/{workspace_id}"
        change = {"parent_id": spellings(parent)[number]}

        beaten = await ask(site, "POST", "/registry/heartbeat", json=beat, headers=headers)
        changed = await ask(site, "PATCH", path, json=change, headers=ADMIN)

        assert (beaten.status, changed.status) == (200, 200)
        shown = (await ask(site, "GET", f"/admin{path}", headers=ADMIN)).json
        assert (shown["id"], shown["parent_id"]) == (workspace_id, parent)


async def test_what_is_no_id_stays_a_400(caller: Caller):
    for wrong in ("x", f"{uuid4()}0", f"{{{uuid4()}", f"uuid:{uuid4()}", f"{uuid4()}_"):
        workspace = Caller(caller.site, wrong, caller.token)
        assert (await workspace.read_feed()).json["error"] == "invalid workspace ID"
        file = await caller.fetch(wrong)
        assert (file.status, file.json["error"]) == (400, "invalid file_id")
        body = {"id": wrong, "agent_card": {"name": "x"}}
        refused = await ask(caller.site, "POST", "/registry/register", json=body, headers=ADMIN)
        assert (refused.status, refused.json["error"]) == (400, "id is wrong: invalid UUID.")
