"""Pages of the op log as other nodes get them over HTTP."""

import asyncio
import base64
import json
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pytest
from oplog.logs import (
    ORIGIN,
    PEER,
    Reader,
    add_table,
    append,
    is_served,
    old_reader,
    own_reader,
    peer_row,
    positions_of,
    trim,
)
from sites import Site, SiteFactory
from waiting import until

from restante.database.pool import Database
from restante.oplog import peers, ulids
from restante.oplog.serving import serve
from restante.oplog.serving.log import Limits
from restante.oplog.serving.readers import OpenEnds
from restante.wire import oplog as wire

pytestmark = pytest.mark.anyio

Connections = Any


def limited(site: Site, **limits: int) -> None:
    """Let pages of this site be small."""
    site.app.state.oplog = replace(site.state.oplog, page_limits=Limits(**limits))


async def test_an_op_has_the_shape_that_the_existing_program_reads(
    site: Site, connections: Connections
):
    connection = await connections()
    table = await add_table(connection, "files")
    ulid = await append(connection, table, {"id": 1, "size": 1.50}, {"id": 2}, action="c")
    reader = await old_reader(site)

    page = await reader.read(after="")

    assert page.ops == [
        {
            "ulid": ulid,
            "host": ORIGIN,
            "action": "create",
            "table": "files",
            "data": [{"id": 1, "size": 1.50}, {"id": 2}],
            "transient": False,
        }
    ]
    assert page.headers["Cache-Control"] == "no-store"
    assert page.headers[wire.LAST_SCANNED_ULID] == ulid
    assert wire.NEXT_POSITION not in page.headers
    assert not page.has_gap
    assert not page.is_limited


async def test_our_own_nodes_also_get_positions(site: Site, connections: Connections):
    connection = await connections()
    table = await add_table(connection, "files")
    await append(connection, table, {"id": 1}, {"id": 2}, action="d", approximate=True)
    reader = await own_reader(site)

    page = await reader.read()
    again = await reader.read(position=page.headers[wire.NEXT_POSITION])

    assert page.ops[0]["position"] == page.headers[wire.NEXT_POSITION]
    assert page.ops[0]["approximate"] is True
    assert "newest" not in page.ops[0]
    assert int(page.headers[wire.SERVER_TIME]) > 0
    assert again.ops == []
    assert again.headers[wire.NEXT_POSITION] == page.headers[wire.NEXT_POSITION]


async def test_numbers_and_names_keep_their_text(site: Site, connections: Connections):
    """A number that a float cannot hold arrives as it was written."""
    connection = await connections()
    table = await add_table(connection, "files", key_map={"results": "transcode_results"})
    await append(connection, table, {"id": 1})
    await connection.execute(
        "update restante.ops set data = $1",
        '{"id": 12345678901234567890.123456789012345678901, "transcode_results": "\\u0000"}',
    )
    old = await old_reader(site)

    async with site.http.get(
        "/internal/crud/sweep", headers={"Authorization": f"Bearer {old.token}"}
    ) as answer:
        translated = await answer.text()
    ours = await own_reader(site, "http://own.example")
    page = await ours.read()

    assert '{"id":12345678901234567890.123456789012345678901,"results":"\\u0000"}' in translated
    assert "transcode_results" in page.records[0]


async def test_ops_of_a_transaction_in_flight_hold_back_later_ones(
    site: Site, connections: Connections
):
    first, second = await connections(), await connections()
    table = await add_table(first, "files")
    reader, old = await own_reader(site), await old_reader(site, "http://old.example")
    slow = first.transaction()
    await slow.start()
    early = await append(first, table, {"id": 1})
    late = await append(second, table, {"id": 2}, is_held_up=True)

    before = await reader.read()
    before_old = await old.read()
    await slow.commit()
    await until(lambda: is_served(second))
    after = await reader.read()

    assert before.ops == before_old.ops == []
    assert after.ulids == [early, late]


async def test_a_page_ends_after_so_many_ops(site: Site, connections: Connections):
    connection = await connections()
    table = await add_table(connection, "files")
    sent = [await append(connection, table, {"id": n}, {"id": -n}) for n in range(1, 8)]
    limited(site, ops=3)
    reader, old = await own_reader(site), await old_reader(site, "http://old.example")

    pages, old_pages = [await reader.read()], [await old.read()]
    while pages[-1].is_limited:
        pages.append(await reader.read(position=pages[-1].headers[wire.NEXT_POSITION]))
        old_pages.append(await old.read(after=old_pages[-1].ulids[-1]))

    for found in (pages, old_pages):
        assert [len(page.ops) for page in found] == [3, 3, 1]
        assert [ulid for page in found for ulid in page.ulids] == sent
        assert found[0].headers[wire.LAST_SCANNED_ULID] == found[0].ulids[-1]
    assert not old_pages[-1].is_limited
    assert len((await reader.read(limit=2)).ops) == 2


async def test_a_page_ends_after_so_many_bytes(site: Site, connections: Connections):
    """What is compressed counts with the size that it has on the wire."""
    connection = await connections()
    table = await add_table(connection, "files")
    sent = [await append(connection, table, {"id": n, "x": "y" * 30_000}) for n in range(6)]
    limited(site, bytes=100_000)
    old = await old_reader(site)

    first = await old.read()
    second = await old.read(after=first.ulids[-1])

    assert first.ulids == sent[:3]
    assert second.ulids == sent[3:]
    assert first.is_limited
    assert not second.is_limited


async def test_a_large_page_is_streamed_whole(site: Site, connections: Connections):
    """Records of 10 MB, ops of many records, and many ops in one answer."""
    connection = await connections()
    table = await add_table(connection, "files")
    sent = [await append(connection, table, *({"id": n} for n in range(1300)))]
    sent += [
        await append(connection, table, {"id": 1, "x": "y" * 10_000_000}),
        await append(connection, table, *({"id": n, "x": "z" * 500} for n in range(2000))),
    ]
    sent += [await append(connection, table, {"id": n}) for n in range(50)]

    for reader in (await own_reader(site), await old_reader(site, "http://old.example")):
        page = await reader.read()

        assert page.ulids == sent
        assert [len(op["data"]) for op in page.ops] == [1300, 1, 2000, *[1] * 50]
        assert not page.is_limited


async def test_an_op_that_is_larger_than_a_page_is_split_and_every_part_has_its_own_ulid(
    site: Site, connections: Connections
):
    """A node of the existing program takes a ULID that it has seen for an op that it has."""
    connection = await connections()
    table = await add_table(connection, "files")
    before = await append(connection, table, {"id": -1})
    ulid = await append(connection, table, *({"id": n, "x": "y" * 100} for n in range(1000)))
    after = await append(connection, table, {"id": -2})
    limited(site, bytes=40_000)
    anonymous = Reader(site, None, {"User-Agent": "mediorum http://unknown.example"})
    old, ours = await old_reader(site), await own_reader(site, "http://own.example")

    seen, cursor = [], ""
    while not seen or seen[-1].is_limited:
        seen.append(await old.read(after=cursor))
        cursor = seen[-1].ulids[-1]
    # What was remembered of the pages is not needed to go on after the first part.
    async with site.state.db.connection() as database:
        await database.execute("update op_peers set page_ends = '{}'")
    second = await old.read(after=ulid)
    own = [await ours.read()]
    while own[-1].is_limited:
        own.append(await ours.read(position=own[-1].headers[wire.NEXT_POSITION]))

    assert [record["id"] for page in seen for record in page.records] == [-1, *range(1000), -2]
    every = [one for page in seen for one in page.ulids]
    assert len(every) == len(set(every)) > 4
    assert every[:2] == [before, ulid]
    assert every[-1] == after
    assert second.ops == seen[2].ops
    assert [record["id"] for page in own for record in page.records] == [-1, *range(1000), -2]
    assert {one for page in own for one in page.ulids} == {before, ulid, after}
    assert (await anonymous_read(anonymous)).status == 401


async def anonymous_read(reader: Reader) -> Any:
    return await reader.read()


async def test_records_that_share_a_ulid_reach_a_reader_of_ulids(
    site: Site, connections: Connections
):
    """What a snapshot brought without a version has the ULID of the floor."""
    connection = await connections()
    table = await add_table(connection, "files")
    floor = ulids.lowest_at(await connection.fetchval("select now()"))
    for n in range(6):
        await append(connection, table, {"id": n}, ulid=floor, approximate=True)
    limited(site, ops=2)
    old = await old_reader(site)

    pages = [await old.read()]
    while pages[-1].is_limited:
        pages.append(await old.read(after=pages[-1].ulids[-1]))

    assert [record["id"] for page in pages for record in page.records] == [*range(6)]
    assert len({one for page in pages for one in page.ulids}) == 6


async def test_a_peer_sees_only_its_tables(site: Site, connections: Connections):
    """Neither records nor the length of a page show the others."""
    connection = await connections()
    seen, hidden = await add_table(connection, "files"), await add_table(connection, "secrets")
    for n in range(5):
        await append(connection, hidden, {"id": n, "x": "secret"})
        await append(connection, seen, {"id": n})
    last = await append(connection, hidden, {"id": 9})
    limited(site, ops=4)
    old = await old_reader(site, tables=["files"])
    ours = await own_reader(site, "http://own.example", tables=["files", "absent"])
    none = await own_reader(site, "http://none.example", tables=["absent"])

    page, rest = await old.read(), await ours.read(limit=100)
    moved = await old.read(after=page.ulids[-1])
    empty = await none.read()

    assert len(page.ops) == 4
    assert len(moved.ops) == 1
    assert moved.headers[wire.LAST_SCANNED_ULID] == last
    assert {op["table"] for op in [*page.ops, *rest.ops]} == {"files"}
    assert empty.ops == []
    assert empty.headers[wire.LAST_SCANNED_ULID] == last
    assert empty.headers[wire.NEXT_POSITION].split("-")[2] == last


async def test_an_empty_page_moves_a_reader_past_what_it_may_not_see(
    site: Site, connections: Connections
):
    connection = await connections()
    seen, hidden = await add_table(connection, "files"), await add_table(connection, "secrets")
    await append(connection, hidden, {"id": 1}, {"id": 2})
    old = await old_reader(site, tables=["files"])

    empty = await old.read()
    scanned = empty.headers[wire.LAST_SCANNED_ULID]
    ulid = await append(connection, seen, {"id": 1})
    page = await old.read(after=scanned)

    assert empty.ops == []
    assert page.ulids == [ulid]
    assert not page.has_gap


async def test_what_a_peer_sends_confirms_what_it_was_served_and_no_more(
    site: Site, connections: Connections
):
    connection = await connections()
    table = await add_table(connection, "files")
    for n in range(3):
        await append(connection, table, {"id": n})
    probe, reader = await own_reader(site, "http://probe.example"), await own_reader(site)
    first, _, third = positions_of(await probe.read())

    async def confirmed() -> str:
        return (await peer_row(site.state.db))["confirmed"]

    await reader.read(position=third)
    unserved = await confirmed()
    await reader.read(limit=1)
    await reader.read(position=third, limit=1)
    one_served = await confirmed()
    await reader.read(position=first, head=third)
    lower = await confirmed()
    await reader.read(position=third)
    everything = await confirmed()
    await reader.read()
    from_the_start = await confirmed()

    assert (unserved, lower, everything, from_the_start) == ("", first, third, "")
    assert one_served in {first, third}  # what it asked from counts as served, nothing beyond
    assert (await peer_row(site.state.db))["peer_head"] == third


async def test_readers_without_a_token_read_and_confirm_nothing(
    run_site: SiteFactory, connections: Connections
):
    connection = await connections()
    table = await add_table(connection, "files")
    for n in range(3):
        await append(connection, table, {"id": n})
    async with run_site(ops_open_to="10.0.0.0/8, 127.0.0.1") as site:
        limited(site, ops=2)
        await old_reader(site)
        named = Reader(site, None, {"User-Agent": f"mediorum {PEER.upper()}/"})
        stranger = Reader(site, None, {"User-Agent": "curl"})

        page = await named.read()
        rest = await named.read(after=page.ulids[-1])
        same = await stranger.read(after=page.ulids[-1])
        wrong = await Reader(site, "0" * 64).read()

    row = await connection.fetchrow("select * from restante.op_peers")
    assert len(page.ops) == 2
    assert rest.ops == same.ops
    assert (row["confirmed"], row["served"], row["confirmed_at"]) == ("", "", None)
    assert row["page_ends"] == []
    assert wrong.status == 401


async def test_a_token_is_taken_as_bearer_or_as_password(site: Site, connections: Connections):
    """The existing program puts it into the address of its peer, and Go makes it Basic."""
    await add_table(await connections(), "files")
    old = await old_reader(site)

    def basic(text: str) -> dict[str, str]:
        return {"Authorization": "Basic " + base64.b64encode(text.encode()).decode()}

    async def status(headers: dict[str, str]) -> int:
        async with site.http.get("/internal/crud/sweep", headers=headers) as answer:
            return answer.status

    assert await status(basic(f"any name:{old.token}")) == 200
    assert await status(basic(f":{old.token}")) == 200
    assert await status(basic(f"{old.token}:")) == 401
    assert await status({"Authorization": "Basic !!!"}) == 401
    assert await status({"Authorization": f"Bearer {old.token}x"}) == 401
    assert await status({}) == 401


async def test_a_waiting_reader_is_woken_by_a_commit(site: Site, connections: Connections):
    writer, other = await connections(), await connections()
    table = await add_table(writer, "files")
    reader = await own_reader(site)
    start = (await reader.read()).headers[wire.NEXT_POSITION]
    slow = writer.transaction()
    await slow.start()
    await append(writer, table, {"id": 1})
    await append(other, table, {"id": 2}, is_held_up=True)

    waiting = asyncio.create_task(reader.read(position=start, wait=15))
    done, _ = await asyncio.wait({waiting}, timeout=0.3)
    await slow.commit()
    loop = asyncio.get_running_loop()
    committed_at = loop.time()
    page = await waiting

    assert not done
    assert [record["id"] for record in page.records] == [1, 2]
    assert loop.time() - committed_at < 5


async def test_a_wait_ends_with_an_empty_page(site: Site, connections: Connections):
    await add_table(await connections(), "files")
    reader = await own_reader(site)

    page = await reader.read(wait=0.1)

    assert page.ops == []
    assert site.state.oplog.watcher._looking is None


async def test_a_peer_that_is_removed_while_it_waits_is_refused(
    site: Site, connections: Connections
):
    connection = await connections()
    table = await add_table(connection, "files")
    reader = await own_reader(site)

    waiting = asyncio.create_task(reader.read(wait=15))
    await asyncio.wait({waiting}, timeout=0.1)
    await connection.execute("delete from restante.op_peers")
    await append(connection, table, {"id": 1})

    assert (await waiting).status == 401


async def test_a_peer_with_a_rate_waits_until_it_may_go_on(site: Site, connections: Connections):
    connection = await connections()
    table = await add_table(connection, "files")
    for n in range(10):
        await append(connection, table, {"id": n})
    slow = await own_reader(site, max_ops_per_minute=4)
    heavy = await own_reader(site, "http://heavy.example", max_bytes_per_minute=1000)
    other = await own_reader(site, "http://other.example")

    first = await slow.read()
    second = await slow.read(position=first.headers[wire.NEXT_POSITION])
    refused = await slow.read(position=second.headers[wire.NEXT_POSITION])

    assert len(first.ops) == len(second.ops) == 4
    assert refused.status == 429
    assert int(refused.headers["Retry-After"]) > 30
    assert (await heavy.read()).is_limited
    assert len((await other.read()).ops) == 10


async def test_what_is_not_the_newest_is_marked_for_those_who_ask(
    site: Site, connections: Connections
):
    connection = await connections()
    table = await add_table(connection, "files")
    first = await append(connection, table, {"id": 1}, {"id": 2})
    await append(connection, table, {"id": 1})
    reader = await own_reader(site)

    asked, unasked = await reader.read(floor=first), await reader.read()
    below = await reader.read(floor=ulids.text_of(UUID(int=1)))

    assert asked.ops[0]["newest"] == [False, True]
    assert "newest" not in asked.ops[1]
    assert "newest" not in unasked.ops[0]
    assert "newest" not in below.ops[0]


async def test_the_cursor_on_the_reader_is_told(site: Site, connections: Connections):
    connection = await connections()
    await add_table(connection, "files")
    reader = await own_reader(site)

    before = await reader.read()
    await connection.execute("update restante.op_peers set cursor = 'here'")
    after = await reader.read()

    assert wire.CURSOR_ON_YOU not in before.headers
    assert after.headers[wire.CURSOR_ON_YOU] == "here"


async def test_a_node_tells_its_peers_about_itself(site: Site, connections: Connections):
    connection = await connections()
    await connection.execute("create table public.files (id integer primary key, name text)")
    table = await add_table(connection, "files")
    await add_table(connection, "secrets")
    ulid = await append(connection, table, {"id": 1})
    reader = await own_reader(site, tables=["files"])

    async with site.http.get(
        "/internal/oplog/status", headers={"Authorization": f"Bearer {reader.token}"}
    ) as answer:
        told = json.loads(await answer.read())

    assert [one["name"] for one in told["tables"]] == ["files"]
    assert told["tables"][0]["columns"] == [
        {"name": "id", "type": "integer"},
        {"name": "name", "type": "text"},
    ]
    assert told["head"].split("-")[2] == ulid
    assert told["host"].startswith("urn:uuid:")


async def test_a_page_that_loses_records_while_it_is_sent_is_not_whole(
    db: Database, connections: Connections
):
    """DROP TABLE ignores the snapshots of readers, and a short page would hide a gap."""
    connection = await connections()
    table, other = await add_table(connection, "files"), await add_table(connection, "others")
    ulid = await append(connection, table, *({"id": n} for n in range(2000)))
    await append(connection, other, {"id": 1})
    reader = peers.Reader(None, is_authenticated=False)
    page = await serve.read(db, reader, serve.Ask(), OpenEnds(), now=datetime.now(UTC))

    await trim(connection, table, up_to=ulid)

    assert not page.is_whole
    with pytest.raises(serve.LogChanged):
        async for _ in serve.rest(db, page):
            pass


async def test_a_head_request_confirms_nothing_new(site: Site, connections: Connections):
    connection = await connections()
    table = await add_table(connection, "files")
    await append(connection, table, *({"id": n} for n in range(2000)))
    reader = await own_reader(site)

    async with site.http.head(
        "/internal/crud/sweep",
        headers={"Authorization": f"Bearer {reader.token}", wire.OPLOG_VERSION: "1"},
    ) as answer:
        assert answer.status == 200
        assert wire.NEXT_POSITION in answer.headers

    assert (await peer_row(site.state.db))["served"] == ""
