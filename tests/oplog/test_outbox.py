"""Pushes are best effort: bounded, in order, and never in the way of anything."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import UTC, datetime
from typing import Any, TypeAlias

import msgspec
import pytest
from impostors import Asked, Impostor, Said, http, impostor
from msgspec import Raw
from oplog.meshes import NOTES
from waiting import until

from restante.database.pool import Database
from restante.oplog import peers, ulids
from restante.oplog.peers import Changes
from restante.oplog.pulling import outbox
from restante.oplog.pulling.outbox import Outbox
from restante.oplog.remote import Remote
from restante.oplog.serving.watch import Watcher
from restante.oplog.tracking import capture
from restante.oplog.tracking.capture import Wanted
from restante.wire.oplog import Op

pytestmark = pytest.mark.anyio

NOW = datetime.now(UTC)

Running: TypeAlias = Callable[..., AbstractAsyncContextManager[Outbox]]


def transient(name: str, table: str = "notes") -> Op:
    record = Raw(msgspec.json.encode({"id": name}))
    ulid = ulids.text_of(ulids.lowest_at(NOW))
    return Op(ulid, "http://own.example", "create", table, [record], transient=True)


async def add(db: Database, other: Impostor, *, protocol: str, **given: Any) -> None:
    async with db.connection() as connection:
        added = await peers.add(connection, other.url, Changes(**given), now=NOW)
        await connection.execute(
            "update op_peers set protocol = $2 where id = $1", added.peer.id, protocol
        )


def clock() -> datetime:
    return NOW


@asynccontextmanager
async def running(db: Database, *, is_ours: bool = True) -> AsyncIterator[Outbox]:
    async with Remote.opened(own_host="http://own.example", clock=clock) as remote:
        box = Outbox(db, Watcher(db))
        task = asyncio.create_task(box.run(remote, lambda _peer: is_ours))
        yield box
        task.cancel()
        await asyncio.wait({task})


def names(other: Impostor) -> list[str]:
    return [msgspec.json.decode(asked.body)["data"][0]["id"] for asked in other.asked]


async def test_a_transient_op_goes_to_all_who_may_see_its_table(db: Database):
    async with impostor(lambda _: http()) as a, impostor(lambda _: http()) as b, running(db) as box:
        await add(db, a, protocol="restante")
        await add(db, b, protocol="ulid", tables=["others"])

        count = await box.send_transient(transient("x"))
        await until(lambda: _is(box.sent, 1))

        assert count == 1
        assert [asked.path for asked in a.asked] == ["/internal/crud/push"]
        assert msgspec.json.decode(a.asked[0].body)["transient"] is True
        assert b.asked == []


async def test_what_cannot_be_sent_is_counted_and_not_tried_again(db: Database):
    answers: list[Said] = [http(500), None, http()]
    async with impostor(lambda _: answers.pop(0)) as other, running(db) as box:
        await add(db, other, protocol="restante")

        for name in ("a", "b", "c"):
            await box.send_transient(transient(name))
        await until(lambda: _is(box.sent, 1))

        assert (box.failed, names(other)) == (2, ["a", "b", "c"])


async def test_a_peer_that_takes_no_pushes_is_left_alone(db: Database):
    async with impostor(lambda _: http(401)) as other, running(db) as box:
        await add(db, other, protocol="ulid")

        await box.send_transient(transient("a"))
        await until(lambda: _is(box.failed, 1))
        await box.send_transient(transient("b"))

        assert box.dropped == 1
        assert names(other) == ["a"]


async def test_a_queue_forgets_its_oldest_op(db: Database, monkeypatch: pytest.MonkeyPatch):
    """A peer that does not answer costs a bounded amount of memory."""
    monkeypatch.setattr(outbox, "MAX_OPS", 2)
    is_open = asyncio.Event()

    async def slow(_asked: Asked) -> bytes:
        await is_open.wait()
        return http()

    async with impostor(slow) as other, running(db) as box:
        await add(db, other, protocol="restante")
        await box.send_transient(transient("first"))
        await until(lambda: _is(len(other.asked), 1))

        for name in ("a", "b", "c"):
            await box.send_transient(transient(name))
        is_open.set()
        await until(lambda: _is(box.sent, 3))

        assert (box.dropped, names(other)) == (1, ["first", "b", "c"])


async def test_fresh_ops_of_this_node_are_pushed_to_a_peer_without_long_polls(
    db: Database, connections: Any
):
    sql = await connections()
    await sql.execute(NOTES)
    started = await capture.track(db, Wanted("public.notes"), host="http://own.example", now=NOW)
    await sql.execute("insert into public.notes values ('before')")
    async with impostor(lambda _: http()) as a, impostor(lambda _: http()) as b, running(db) as box:
        await add(db, a, protocol="ulid")
        await add(db, b, protocol="restante")
        await until(lambda: _is_following(box, sql))

        await sql.execute("insert into public.notes values ('x'), ('y')")
        await until(lambda: _has(a, "x"))

        pushed = msgspec.json.decode(a.asked[-1].body)
        assert [record["id"] for record in pushed["data"]] == ["x", "y"]
        assert pushed["table"] == started.table.name
        assert b.asked == []


async def test_of_several_servers_one_pushes_the_log(db: Database, connections: Any):
    sql = await connections()
    await sql.execute(NOTES)
    await capture.track(db, Wanted("public.notes"), host="http://own.example", now=NOW)
    async with impostor(lambda _: http()) as other, running(db, is_ours=False) as box:
        await add(db, other, protocol="ulid")

        await sql.execute("insert into public.notes values ('x')")
        await box.send_transient(transient("last"))
        await until(lambda: _is(box.sent, 1))

        assert names(other) == ["last"]


async def _is(found: object, expected: object) -> bool:
    return found == expected


async def _has(other: Impostor, name: str) -> bool:
    return name in names(other)


async def _is_following(box: Outbox, sql: Any) -> bool:
    """Write until something is pushed: the outbox begins at the end of the log as it finds it."""
    await sql.execute("insert into public.notes values (gen_random_uuid())")
    return box.sent > 0
