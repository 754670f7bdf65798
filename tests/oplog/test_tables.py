"""The tracked tables and the hosts, as other parts of the op log find them."""

import asyncio
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pytest

from restante.database.pool import Database, Tx
from restante.errors import TooManyHosts
from restante.oplog import peers, positions, tables, ulids
from restante.oplog.peers import Changes
from restante.oplog.tables import Column

pytestmark = pytest.mark.anyio

ADD = """
insert into op_tables (name, schema_name, table_name, key_columns, key_map, state, changed_at)
values ($1, $2, $3, $4, $5, 'tracked', now()) returning id
"""


async def test_a_table_is_found_with_its_columns(tx: Tx):
    await tx.execute(
        "create table public.pages (id text primary key, body numeric(8, 2) not null default 1,"
        " twice numeric generated always as (body * 2) stored,"
        " seq bigint generated always as identity)"
    )
    await tx.execute("alter table public.pages add gone int; alter table public.pages drop gone")
    table_id = await tx.fetchval(ADD, "pages", "public", "pages", ["id"], '{"Id": "id"}')

    found = await tables.find(tx, "pages")

    assert found is not None
    assert (found.id, found.name, found.key_columns) == (table_id, "pages", ("id",))
    assert found.relation == '"public"."pages"'
    assert found.key_map == {"Id": "id"}
    assert (found.floor, found.trimmed, found.state) == (ulids.LOWEST, None, "tracked")
    assert found.columns == (
        Column("id", "text", is_nullable=False),
        Column("body", "numeric(8,2)", is_nullable=False, has_default=True),
        Column("twice", "numeric", is_generated=True),
        Column("seq", "bigint", is_nullable=False, has_default=True, is_identity=True),
    )
    assert not found.is_missing


async def test_a_table_that_was_dropped_is_missing_and_no_error(tx: Tx):
    await tx.execute(ADD, "pages", "public", "pages", ["id"], "{}")

    (found,) = await tables.all_tables(tx)

    assert found.is_missing


async def test_a_table_that_nobody_tracks_is_not_found(tx: Tx):
    assert await tables.find(tx, "pages") is None
    assert await tables.all_tables(tx) == []


async def test_the_mark_of_what_was_trimmed_is_a_position(tx: Tx):
    mark = positions.Position(5, 7, UUID(int=9), 3)
    await tx.execute(ADD, "pages", "public", "pages", ["id"], "{}")
    await tx.execute("update op_tables set trimmed = $1", str(mark))

    (found,) = await tables.all_tables(tx)

    assert found.trimmed == mark


# Hosts -------------------------------------------------------------------------------------------


async def test_a_node_without_a_name_makes_one_up_and_keeps_it(tx: Tx):
    first = await tables.own_host(tx)

    assert first.startswith("urn:uuid:")
    assert await tables.own_host(tx) == first
    assert await tables.identify(tx, None) == first


async def test_a_node_is_given_a_name_later(tx: Tx):
    """Ops that were made under the old name keep it."""
    old = await tables.own_host(tx)
    old_id = await tables.host_id(tx, old)

    await tables.identify(tx, "https://node.example")

    assert await tables.own_host(tx) == "https://node.example"
    assert await tables.host_id(tx, old) == old_id


async def test_a_host_keeps_its_number(tx: Tx):
    first = await tables.host_id(tx, "https://a.example")

    assert await tables.host_id(tx, "https://b.example") != first
    assert await tables.host_id(tx, "https://a.example") == first


async def test_two_sessions_that_meet_a_new_host_agree_on_its_number(
    db: Database, connections: Any
):
    first, second = await connections(), await connections()
    async with first.transaction():
        one = await tables.host_id(first, "https://a.example")
        other = asyncio.create_task(tables.host_id(second, "https://a.example"))
        await asyncio.sleep(0)

    assert await other == one


async def test_hosts_are_bounded(tx: Tx):
    """A hostile peer that invents hosts does not fill a table."""
    await tx.execute(
        "insert into op_hosts (host, added_by)"
        " select 'https://' || n, 1 + n % 20 from generate_series(1, 1000) as n"
    )

    with pytest.raises(TooManyHosts, match="1000 hosts"):
        await tables.host_id(tx, "https://one-more.example", peer_id=21)
    assert await tables.host_id(tx, "https://7", peer_id=21) > 0
    assert await tables.identify(tx, "https://ourselves.example")


async def test_a_peer_that_invents_hosts_takes_no_room_of_others(tx: Tx):
    for n in range(tables.MAX_HOSTS_OF_A_PEER):
        await tables.host_id(tx, f"https://{n}.example", peer_id=1)

    with pytest.raises(TooManyHosts, match="100 are taken from one peer"):
        await tables.host_id(tx, "https://one-more.example", peer_id=1)
    assert await tables.host_id(tx, "https://one-more.example", peer_id=2) > 0


async def test_there_is_room_for_every_host_that_the_operator_has_named(tx: Tx):
    """As a peer, or as one whose ops a peer may pass on."""
    for n in range(tables.MAX_HOSTS_OF_A_PEER):
        await tables.host_id(tx, f"https://{n}.example", peer_id=1)
    changes = Changes(relays=["https://relayed.example"])
    await peers.add(tx, "https://peer.example", changes, now=datetime.now(UTC))

    assert await tables.host_id(tx, "https://peer.example", peer_id=1) > 0
    assert await tables.host_id(tx, "https://relayed.example", peer_id=1) > 0
