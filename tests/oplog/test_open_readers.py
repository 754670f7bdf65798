"""Readers without a token: what they read, and that no peer notices when they use its name."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from oplog.logs import PEER, Page, Reader, add_table, append, old_reader, own_reader, peer_row
from oplog.test_serve import limited
from sites import Site, SiteFactory

from restante.oplog import ulids
from restante.wire import oplog as wire

pytestmark = pytest.mark.anyio

Connections = Any

NAMED = {"User-Agent": f"mediorum {PEER}"}


@pytest.fixture
async def site(run_site: SiteFactory) -> AsyncIterator[Site]:
    async with run_site(ops_open_to="127.0.0.1") as running:
        yield running


async def every_page(reader: Reader) -> list[Page]:
    pages = [await reader.read()]
    while pages[-1].is_limited:
        assert len(pages) < 50
        pages.append(await reader.read(after=pages[-1].ulids[-1]))
    return pages


async def test_nobody_moves_a_peer_by_its_name(site: Site, connections: Connections):
    """With a position at the end of the log, and the ULID that the peer sends next."""
    connection = await connections()
    table = await add_table(connection, "files")
    first = await append(connection, table, {"id": 1})
    victim, probe = await old_reader(site), await own_reader(site, "http://probe.example")
    await victim.read()
    missing = [await append(connection, table, {"id": n}) for n in range(2, 5)]
    head = (await probe.read()).headers[wire.NEXT_POSITION]
    era, xid, rest = head.split("-", 2)
    beyond = f"{era}-{int(xid, 16) + 1:0{len(xid)}x}-{rest}"
    before = dict(await peer_row(site.state.db))

    for headers in (NAMED, NAMED | {wire.OPLOG_VERSION: "1"}):
        for position in (head, beyond):
            for after in (first, missing[-1], ""):
                await Reader(site, None, headers).read(position=position, after=after)
    between = dict(await peer_row(site.state.db))
    page = await victim.read(after=first)

    assert between == before
    assert page.ulids == missing


async def test_a_position_counts_only_with_the_header_of_our_nodes(
    site: Site, connections: Connections
):
    """A peer of the older protocol that sends one is where its ULID is."""
    connection = await connections()
    table = await add_table(connection, "files")
    sent = [await append(connection, table, {"id": n}) for n in range(3)]
    old, ours = await old_reader(site), await own_reader(site, "http://own.example")
    head = (await ours.read()).headers[wire.NEXT_POSITION]

    misled = await old.read(position=head, after=sent[0])
    again = await old.read(after=sent[0])

    assert misled.ulids == again.ulids == sent[1:]


async def test_the_name_of_a_peer_spends_nothing_of_its_rate(site: Site, connections: Connections):
    connection = await connections()
    table = await add_table(connection, "files")
    for n in range(10):
        await append(connection, table, {"id": n})
    peer = await old_reader(site, max_ops_per_minute=4)
    impostor = Reader(site, None, NAMED)

    statuses = [(await impostor.read()).status for _ in range(3)]
    page = await peer.read()

    assert statuses == [200, 200, 429]
    assert (page.status, len(page.ops)) == (200, 4)


async def test_an_op_that_is_larger_than_a_page_reaches_readers_without_a_token(
    site: Site, connections: Connections
):
    """Two of one network, who read in turns with pages of other sizes."""
    connection = await connections()
    table = await add_table(connection, "files")
    await append(connection, table, {"id": -1})
    await append(connection, table, *({"id": n, "x": "y" * 100} for n in range(1000)))
    await append(connection, table, {"id": -2})
    limited(site, bytes=40_000)
    named, stranger = Reader(site, None, NAMED), Reader(site, None, {"User-Agent": "curl"})
    await old_reader(site, max_bytes_per_minute=30_000_000)

    for reader in (named, stranger):
        pages = await every_page(reader)
        every = [one for page in pages for one in page.ulids]

        assert [one["id"] for page in pages for one in page.records] == [-1, *range(1000), -2]
        assert len(every) == len(set(every))


async def test_records_that_share_a_ulid_reach_readers_without_a_token(
    site: Site, connections: Connections
):
    connection = await connections()
    table = await add_table(connection, "files")
    floor = ulids.lowest_at(await connection.fetchval("select now()"))
    for n in range(6):
        await append(connection, table, {"id": n}, ulid=floor, approximate=True)
    limited(site, ops=2)
    reader = Reader(site, None, {"User-Agent": "curl"})

    pages = await every_page(reader)
    end = await reader.read(after=pages[-1].ulids[-1])

    assert [one["id"] for page in pages for one in page.records] == [*range(6)]
    assert end.ops == []
    assert end.headers[wire.LAST_SCANNED_ULID] == pages[-1].ulids[-1]


async def test_a_node_of_ours_without_a_token_is_served_as_an_older_one(
    site: Site, connections: Connections
):
    """It could take no snapshot, and what this node has read of a peer is not for everybody."""
    connection = await connections()
    table = await add_table(connection, "files")
    sent = await append(connection, table, {"id": 1})
    await old_reader(site)
    await connection.execute("update restante.op_peers set cursor = 'here'")

    page = await Reader(site, None, NAMED | {wire.OPLOG_VERSION: "1"}).read()

    assert page.ulids == [sent]
    assert "position" not in page.ops[0]
    assert not {wire.OPLOG_VERSION, wire.NEXT_POSITION, wire.CURSOR_ON_YOU} & {*page.headers}
