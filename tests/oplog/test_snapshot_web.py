"""Snapshots over HTTP: who may take one, and what is refused."""

from datetime import UTC, datetime
from typing import Any

import pytest
from oplog.meshes import NOTES
from sites import ADMIN_TOKEN, Site

from restante.oplog import peers
from restante.oplog.peers import Changes
from restante.oplog.tracking import capture
from restante.oplog.tracking.capture import Wanted

pytestmark = pytest.mark.anyio

SNAPSHOT = "/internal/oplog/snapshot"
NOW = datetime.now(UTC)


async def ask(site: Site, path: str, body: Any, token: str | None) -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    async with site.http.post(path, json=body, headers=headers) as answer:
        return answer.status, await answer.json()


@pytest.fixture
async def token(site: Site, connections: Any) -> str:
    """Of a peer that may see `notes`, which has a record."""
    sql = await connections()
    await sql.execute(NOTES)
    await sql.execute("insert into public.notes values ('a', 'x')")
    db = site.state.db
    await capture.track(db, Wanted("public.notes"), host=None, now=NOW)
    async with db.connection() as connection:
        added = await peers.add(
            connection, "http://peer.example", Changes(tables=["notes"]), now=NOW
        )
    assert added.token is not None
    return added.token


async def test_a_peer_takes_a_snapshot(site: Site, token: str):
    _, began = await ask(site, SNAPSHOT, {"table": "notes"}, token)
    request = {"table": "notes", "start": began["start"], "phase": "records", "after": ""}
    status, page = await ask(site, f"{SNAPSHOT}/page", request, token)
    _, last = await ask(site, f"{SNAPSHOT}/page", request | {"after": page["next"]}, token)
    asked = {"table": "notes", "start": began["start"], "keys": [{"id": "a"}, {"id": "b"}]}
    _, missing = await ask(site, f"{SNAPSHOT}/missing", asked, token)

    assert status == 200
    assert began["columns"] == ["id", "body", "size"]
    assert page["entries"] == [{"data": {"id": "a", "body": "x", "size": None}}]
    assert (last["entries"], last["next"]) == ([], None)
    assert [entry["data"] for entry in missing["entries"]] == [{"id": "b"}]


@pytest.mark.parametrize("shown", [None, "wrong", ADMIN_TOKEN])
async def test_others_are_refused(site: Site, token: str, shown: str | None):
    """The operator's token is no peer's."""
    assert token != shown
    for path, body in (
        (SNAPSHOT, {"table": "notes"}),
        (f"{SNAPSHOT}/page", {"table": "notes", "start": "x", "phase": "records"}),
        (f"{SNAPSHOT}/missing", {"table": "notes", "start": "x", "keys": []}),
    ):
        status, _ = await ask(site, path, body, shown)
        assert status == 401


async def test_a_removed_peer_is_refused_at_once(site: Site, token: str):
    _, began = await ask(site, SNAPSHOT, {"table": "notes"}, token)
    async with site.state.db.connection() as connection:
        await peers.remove(connection, "http://peer.example")

    request = {"table": "notes", "start": began["start"], "phase": "records"}
    status, _ = await ask(site, f"{SNAPSHOT}/page", request, token)

    assert status == 401


@pytest.mark.parametrize("table", ["others", "op_peers", 'notes"; drop table notes; --', ""])
async def test_a_table_that_it_may_not_see_does_not_exist(site: Site, token: str, table: str):
    status, said = await ask(site, SNAPSHOT, {"table": table}, token)

    assert (status, said["code"]) == (404, "table_not_tracked")


async def test_a_start_that_is_not_pinned_is_gone(site: Site, token: str):
    await ask(site, SNAPSHOT, {"table": "notes"}, token)

    for start in ("", "garbage", f"{'0' * 16}-{'0' * 16}-{'0' * 26}-{'0' * 8}"):
        request = {"table": "notes", "start": start, "phase": "records"}
        status, said = await ask(site, f"{SNAPSHOT}/page", request, token)
        assert (status, said["code"]) == (410, "snapshot_gone")


async def test_reading_the_log_ends_the_snapshot(site: Site, token: str):
    """What is pinned for a peer that has gone on is not kept."""
    _, began = await ask(site, SNAPSHOT, {"table": "notes"}, token)
    headers = {"Authorization": f"Bearer {token}", "Restante-Oplog": "1"}
    async with site.http.get("/internal/crud/sweep", headers=headers) as answer:
        assert answer.status == 200

    request = {"table": "notes", "start": began["start"], "phase": "records"}
    status, _ = await ask(site, f"{SNAPSHOT}/page", request, token)

    assert status == 410


@pytest.mark.parametrize("after", ["garbage", "[]", "{", '{"id": []}x', "null"])
async def test_a_place_that_is_none_is_refused(site: Site, token: str, after: str):
    _, began = await ask(site, SNAPSHOT, {"table": "notes"}, token)
    for phase in ("deletes", "records"):
        request = {"table": "notes", "start": began["start"], "phase": phase, "after": after}
        status, said = await ask(site, f"{SNAPSHOT}/page", request, token)
        assert (status, said["code"]) == (400, "bad_request")


async def test_too_many_keys_at_once_are_refused(site: Site, token: str):
    _, began = await ask(site, SNAPSHOT, {"table": "notes"}, token)
    asked = {"table": "notes", "start": began["start"], "keys": [{"id": "x"}] * 1001}

    status, _ = await ask(site, f"{SNAPSHOT}/missing", asked, token)

    assert status == 400
