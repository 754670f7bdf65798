"""
Ops are dropped while parked ops are tried again, or nodes are compared, at every moment between two
of their statements.
"""

import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import asyncpg
import pytest
from oplog.droppers import Dropper, Work, at_every_moment, dropper
from oplog.nodes import make_peer, ulid_at
from oplog.trimmed import DAY, age, last_position, make_pages, now, write
from oplog.turns import Turns

from restante.database import partitions
from restante.database.pool import Database
from restante.errors import TableBusy
from restante.oplog.applying import parked
from restante.oplog.peers import Peer
from restante.oplog.tables import OPS
from restante.oplog.trimming import drops, picture
from restante.oplog.trimming.drops import Drop
from restante.oplog.trimming.fates import Cause, Fate
from restante.oplog.trimming.limits import Limits
from restante.oplog.verifying.comparison import Here

pytestmark = pytest.mark.anyio


async def park(connection: Any, peer: Peer, key: int) -> None:
    """An op of an hour ago, with which nothing is wrong any more."""
    await connection.execute(
        "insert into restante.op_parked (peer_id, table_name, ulid, origin, action, key_hash, key,"
        " data, data_hash, reason, sentence, parked_at, tried_at)"
        " select $1, 'pages', $2, $3, 'u', hashtextextended(key, 0), key, $4, $5, 'check', '',"
        " now(), now() from (select json_build_array($5::integer)::text as key) as one",
        peer.id,
        ulid_at(key),
        peer.host,
        json.dumps({"id": key, "text": "parked"}),
        key,
    )


async def drop_all(connection: Any) -> None:
    """Empty the partition in use; raises TableBusy if somebody reads it."""
    found = await partitions.partitions_of(connection, [OPS])
    (log,) = (await picture.look(connection, found, Limits(), now=now())).logs
    for piece in log.decided.pieces:
        if piece.last is not None:
            drop = Drop(log, piece.partition, Fate(Cause.DORMANT), 1, 0, now())
            assert await drops.contents(drop, piece.last, Work(connection, now())) is None


async def test_a_retry_never_reverts_a_newer_change_whenever_its_op_is_dropped(
    db: Database, connections: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
):
    """The newer op takes the parked one away, and is gone itself when the retry looks for it."""
    monkeypatch.setattr(drops, "_TRIES", 0)
    connection, application = await connections(), await connections()
    await make_pages(db)
    peer = await make_peer(db)
    await application.execute("set lock_timeout = '50ms'")
    await park(connection, peer, 0)
    counting = Turns(db)
    await parked.retry(counting.as_database, None, now=now())
    outcomes = set[str]()

    for moment in range(counting.statements + 1):
        key, written, dropped = moment + 1, False, False
        await park(connection, peer, key)

        async def change(key: int = key) -> None:
            nonlocal written, dropped
            # The record, or the log, may be locked by the retry: then the retry was first.
            with suppress(asyncpg.LockNotAvailableError, TableBusy):
                await write(application, key, text="newer")
                written = True
                await drop_all(connection)
                dropped = True

        turns = Turns(db)
        turns.before(moment, change)
        await parked.retry(turns.as_database, None, now=now())
        await turns.end()

        text = await connection.fetchval("select text from public.pages where id = $1", key)
        assert text == ("newer" if written else "parked"), moment
        outcomes.add("dropped" if dropped else "locked")
        await connection.execute("delete from restante.op_parked")
    assert outcomes == {"dropped", "locked"}


async def test_what_was_dropped_is_behind_the_head_of_the_log_whenever_it_goes(
    db: Database, connections: Callable[[], Any]
):
    """Whoever has not read it has other records, and is waited for until it has a snapshot."""
    connection, dropping = await connections(), await connections()
    pages, peer = await make_pages(db), await make_peer(db)
    await write(connection, 1)
    name = await age(connection, pages, 200 * DAY)
    last = await last_position(connection, pages)

    async def describe(on: Database) -> str:
        return (await Here(on, peer.id, None).describe()).head

    async def made(number: int) -> Dropper:
        nonlocal name, last
        if number:
            await write(connection, 1)
            name = await age(connection, pages, (200 - number) * DAY)
            last = await last_position(connection, pages)
        return await dropper(dropping, connection, name)

    async def check(head: str) -> None:
        assert head == str(last)

    await at_every_moment(describe, made, check, db)
