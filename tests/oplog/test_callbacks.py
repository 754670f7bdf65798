"""The application hears of what peers changed, after the commit, and cannot stop it."""

import pytest
from oplog.nodes import NOW, PEER, make_peer, op, pull_from, tracked

from restante.database.pool import Database
from restante.oplog.applying.apply import apply_page
from restante.oplog.callbacks import AppliedOp, Callbacks
from restante.wire import EvictedPeer

pytestmark = pytest.mark.anyio


def heard_op(table: str = "items", size: int = 1) -> AppliedOp:
    return AppliedOp(table, "create", ("x" * size,), "0", PEER)


async def test_what_was_applied_is_heard_and_what_lost_is_not(db: Database):
    async with db.connection() as connection:
        await tracked(connection)
    callbacks, heard = Callbacks(), list[AppliedOp]()
    callbacks.on("items", heard.append)

    await apply_page(
        db,
        [op("update", {"id": 1}, {"id": 2}, at=2), op("update", {"id": 1}, at=1)],
        pull_from(await make_peer(db)),
        expected_cursor="",
        end_cursor="x",
        now=NOW,
        callbacks=callbacks,
    )
    await callbacks.call_waiting()

    assert [(one.action, one.records, one.host) for one in heard] == [
        ("update", ('{"id": 1}', '{"id": 2}'), PEER)
    ]


async def test_a_failing_callback_is_counted_and_the_next_one_called():
    callbacks, heard = Callbacks(), list[AppliedOp]()

    async def fail(_op: AppliedOp) -> None:
        raise ValueError("a bug of the application")

    callbacks.on(None, fail)
    callbacks.on("items", heard.append)
    callbacks.put(heard_op())
    callbacks.put(heard_op())

    await callbacks.call_waiting()

    assert (callbacks.failed, len(heard)) == (2, 2)


async def test_what_does_not_fit_is_dropped_and_counted():
    callbacks = Callbacks(max_waiting_bytes=2000)
    callbacks.on(None, lambda _op: None)

    for _ in range(3):
        callbacks.put(heard_op(size=500))

    assert callbacks.dropped == 1


async def test_an_evicted_peer_is_heard_of_and_a_failing_callback_is_counted():
    callbacks, heard = Callbacks(), list[EvictedPeer]()

    def fail(_evicted: EvictedPeer) -> None:
        raise ValueError("a bug of the application")

    callbacks.on_eviction(fail)
    callbacks.on_eviction(heard.append)
    evicted = EvictedPeer(peer=PEER, table="items", cause="cap_age", ops=7, bytes=70)
    callbacks.put_eviction(evicted)

    await callbacks.call_waiting()

    assert heard == [evicted]
    assert callbacks.failed == 1
