"""Peers push single ops: accepted in their own name only, and never needed."""

import json
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from oplog.nodes import NOW, PEER, THIRD, op, rows, tracked, ulid_at
from sites import Site

from restante.oplog import peers
from restante.wire.oplog import Op

if TYPE_CHECKING:
    from restante.oplog.callbacks import AppliedOp

pytestmark = pytest.mark.anyio


async def token_of(site: Site, host: str = PEER, **given: Any) -> str:
    async with site.state.db.connection() as connection:
        added = await peers.add(connection, host, peers.Changes(**given), now=NOW)
    assert added.token is not None
    return added.token


async def track(site: Site, name: str = "items") -> None:
    async with site.state.db.connection() as connection:
        await tracked(connection, name)


async def items(site: Site) -> list[Any]:
    async with site.state.db.connection() as connection:
        return await rows(connection)


def body_of(one: Op) -> bytes:
    sent = {name: getattr(one, name) for name in ("ulid", "host", "action", "table", "transient")}
    return json.dumps(sent | {"data": [json.loads(bytes(record)) for record in one.data]}).encode()


async def pushed(site: Site, body: bytes, **headers: str) -> tuple[int, bytes]:
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{site.url}/internal/crud/push", data=body, headers=headers) as answer,
    ):
        return answer.status, await answer.read()


async def with_token(site: Site, token: str, one: Op) -> int:
    status, _ = await pushed(site, body_of(one), Authorization=f"Bearer {token}")
    return status


async def test_an_op_is_applied_and_answered_with_nothing(site: Site):
    await track(site)
    token = await token_of(site)

    answer = await pushed(
        site, body_of(op("create", {"id": 1, "name": "a"})), Authorization=f"Bearer {token}"
    )

    assert answer == (200, b"")
    assert await items(site) == [(1, "a", None)]


async def test_without_a_peers_token(site: Site):
    await track(site)
    one = op("create", {"id": 1})

    assert (await pushed(site, body_of(one)))[0] == 401
    assert await with_token(site, "0" * 64, one) == 401
    assert await items(site) == []


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"table": "unknown"}, 406),
        ({"table": "secret"}, 406),
        ({"host": THIRD}, 422),
        ({"ulid": "no ulid"}, 422),
        ({"ulid": "00000000000000000000000000"}, 422),
        ({"ulid": "7ZZZZZZZZZZZZZZZZZZZZZZZZZ"}, 422),
        ({"action": "drop"}, 422),
        ({"data": [5]}, 422),
        ({"data": [{"name": "without a key"}]}, 422),
        ({"data": {"id": 1}}, 422),
    ],
)
async def test_what_is_refused(site: Site, change: dict[str, Any], status: int):
    await track(site)
    await track(site, "secret")
    token = await token_of(site, tables=["items"])
    sent = json.loads(body_of(op("create", {"id": 1}))) | change

    answer = await pushed(site, json.dumps(sent).encode(), Authorization=f"Bearer {token}")

    assert answer[0] == status
    assert await items(site) == []


async def test_malformed_json(site: Site):
    token = await token_of(site)

    assert (await pushed(site, b'{"ulid": ', Authorization=f"Bearer {token}"))[0] == 400


async def test_a_removed_peer_is_refused_at_once(site: Site):
    await track(site)
    token = await token_of(site)
    async with site.state.db.connection() as connection:
        await peers.remove(connection, PEER)

    assert await with_token(site, token, op("create", {"id": 1})) == 401


async def test_an_older_push_is_taken_and_changes_nothing(site: Site):
    """Pushes arrive in any order."""
    await track(site)
    token = await token_of(site)
    await with_token(site, token, op("update", {"id": 1, "name": "new"}, at=2))

    status = await with_token(site, token, op("update", {"id": 1, "name": "old"}, at=1))

    assert status == 200
    assert await items(site) == [(1, "new", None)]


async def test_a_push_below_the_floor_is_left_to_the_pull(site: Site):
    await track(site)
    token = await token_of(site)
    async with site.state.db.connection() as connection:
        await connection.execute("update op_tables set floor = $1", ulid_at(9))

    status = await with_token(site, token, op("create", {"id": 1}, at=1))

    assert status == 200
    assert await items(site) == []


async def test_a_transient_op_reaches_callbacks_and_no_table(site: Site):
    await track(site)
    token = await token_of(site)
    heard: list[AppliedOp] = []
    callbacks = site.state.oplog.callbacks
    callbacks.on("items", heard.append)

    status = await with_token(site, token, op("create", {"id": 1}, transient=True))
    await callbacks.call_waiting()

    assert status == 200
    assert await items(site) == []
    assert [(one.records, one.transient) for one in heard] == [(('{"id": 1}',), True)]
