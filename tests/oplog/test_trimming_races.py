"""
Ops are dropped while they are read, at every moment between two statements of the reader.

A reader gets all of them or hears that some are gone.  Whoever judges by them finds the op, or the
floor that it left behind.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from uuid import UUID

import pytest
from msgspec import Raw
from oplog.captured import log_of
from oplog.droppers import Dropper, Work, at_every_moment, dropper
from oplog.nodes import OWN, PEER, make_peer, op, pull_from, ulid_at
from oplog.trimmed import DAY, age, last_position, make_pages, make_wide, now, sweep_of, write
from oplog.turns import Turns
from sweeps import state_of

from restante.database import partitions
from restante.database.pool import Database
from restante.errors import SnapshotGone, TableBusy
from restante.oplog import tables, ulids
from restante.oplog.applying.apply import apply_page
from restante.oplog.peers import Peer, Reader
from restante.oplog.positions import START, Position
from restante.oplog.serving import serve
from restante.oplog.serving.readers import OpenEnds
from restante.oplog.serving.serve import Ask, Page
from restante.oplog.snapshots import snapshot, taking_page
from restante.oplog.snapshots.taking_entries import Snapshot, Taking
from restante.oplog.tables import OPS
from restante.oplog.tracking import capture
from restante.oplog.trimming import drops, picture
from restante.oplog.trimming.drops import Drop
from restante.oplog.trimming.fates import Cause, Fate
from restante.oplog.trimming.limits import Limits
from restante.wire import oplog as wire

pytestmark = pytest.mark.anyio


def asked(peer: Peer, after: Position) -> Callable[[Database], Awaitable[Page]]:
    async def read(db: Database) -> Page:
        ask = Ask(position=str(after), is_ours=True)
        return await serve.read(db, Reader(peer, False), ask, OpenEnds(), now=now())

    return read


async def test_a_page_has_all_ops_or_a_gap_whenever_they_are_dropped(
    db: Database, connections: Callable[[], Any]
):
    connection, dropping = await connections(), await connections()
    pages, peer = await make_pages(db), await make_peer(db)
    await write(connection, 1, 2)
    await age(connection, pages, 200 * DAY)
    places = [START, await last_position(connection, pages)]

    async def read(on: Database) -> Page:
        return await asked(peer, places[-2])(on)

    async def made(number: int) -> Dropper:
        name = await _name_of_last(connection)
        if number:
            await write(connection, 1, 2)
            name = await age(connection, pages, (200 - number) * DAY)
            places.append(await last_position(connection, pages))
        return await dropper(dropping, connection, name)

    gaps = 0

    async def check(page: Page) -> None:
        nonlocal gaps
        gaps += bool(page.gap_tables)
        assert page.gap_tables == ("pages",) or len(page.records) == 2

    moments = await at_every_moment(read, made, check, db)

    assert 0 < gaps < moments


async def _name_of_last(connection: Any) -> str:
    return await connection.fetchval("select tableoid::regclass::text from restante.ops limit 1")


@pytest.mark.parametrize("how", ["truncated", "cut"])
async def test_a_page_has_all_ops_or_a_gap_when_the_partition_in_use_is_emptied_or_cut(
    db: Database, connections: Callable[[], Any], monkeypatch: pytest.MonkeyPatch, how: str
):
    """A reader that has begun to read it is waited for, and then it stays as it is."""
    monkeypatch.setattr(drops, "_TRIES", 0)
    connection, acting = await connections(), await connections()
    await make_pages(db)
    peer = await make_peer(db)
    await write(connection, 1, 2)
    counting = Turns(db)
    await asked(peer, START)(counting.as_database)
    dropped = 0

    async def act() -> None:
        nonlocal dropped
        found = await partitions.partitions_of(acting, [OPS])
        seen = await picture.look(acting, found, Limits(), now=now())
        (log,) = seen.logs
        piece = next(one for one in log.decided.pieces if one.last)
        fate = Fate(Cause.DORMANT, None if how == "truncated" else now())
        drop, work = Drop(log, piece.partition, fate, 2, 0, now()), Work(acting, now())
        try:
            if how == "truncated":
                assert await drops.contents(drop, piece.last, work) is None  # pyright: ignore[reportArgumentType]
            else:
                assert await drops.older_part(drop, most=None, work=work) is None
        except TableBusy:
            return
        dropped += 1

    for moment in range(counting.statements + 1):
        await write(connection, 1, 2)
        after = (await _trimmed(connection)) or START
        before = [one.ulid for one in await log_of(connection)]
        turns = Turns(db)
        turns.before(moment, act)
        page = await asked(peer, after)(turns.as_database)
        await turns.end()

        got = [one.position.ulid for one in page.records]
        assert page.gap_tables == ("pages",) or got == before
    assert 0 < dropped < counting.statements + 1
    assert await acting.fetchval("select count(*) from pg_class where relname ~ '_99....$'") == 0


async def _trimmed(connection: Any) -> Position | None:
    table = await tables.find(connection, "pages")
    assert table is not None
    return table.trimmed


@pytest.mark.parametrize("kind", ["records", "deletes", "missing"])
async def test_a_snapshot_has_versions_or_a_floor_above_them_whenever_they_are_dropped(
    db: Database, connections: Callable[[], Any], kind: str
):
    connection, dropping = await connections(), await connections()
    pages, peer = await make_pages(db), await make_peer(db)
    await write(connection, 1, 2)
    await connection.execute("delete from public.pages where id = 2")
    await age(connection, pages, 200 * DAY)
    started = await snapshot.begin(db, peer, wire.SnapshotRequest("pages"), now=now())

    async def read(on: Database) -> wire.SnapshotPage | None:
        try:
            if kind == "missing":
                keys = wire.SnapshotKeysRequest("pages", started.start, [Raw(b'{"id":2}')])
                return await snapshot.missing(on, peer, keys, now=now())
            phase: Any = kind
            request = wire.SnapshotPageRequest("pages", started.start, phase)
            return await snapshot.page(on, peer, request, now=now())
        except SnapshotGone:
            return None

    newest = list[UUID]()

    async def made(number: int) -> Dropper:
        name = await _name_of_last(connection) if not number else ""
        if number:
            await write(connection, 1, 2)
            await connection.execute("delete from public.pages where id = 2")
            name = await age(connection, pages, (200 - number) * DAY)
        logged = await log_of(connection)
        newest[:] = [max(one.ulid for one in logged)]
        return await dropper(dropping, connection, name)

    async def check(page: wire.SnapshotPage | None) -> None:
        if page is None:
            return
        versions = {one.ulid for one in page.entries}
        assert page.floor >= ulids.text_of(newest[0]) or all(versions)
        assert page.entries or kind == "deletes"
        assert page.entries or page.floor >= ulids.text_of(newest[0])

    await at_every_moment(read, made, check, db)


async def test_an_older_op_never_wins_whenever_the_newer_one_is_dropped(
    db: Database, connections: Callable[[], Any]
):
    """The sender has not read what we drop: it must take its snapshot first."""
    connection, dropping = await connections(), await connections()
    pages, peer = await make_pages(db), await make_peer(db)
    await write(connection, 1)
    await age(connection, pages, 200 * DAY)
    older: Sequence[Any] = [op("update", {"id": 1, "text": "older"}, table="pages")]

    async def read(on: Database) -> None:
        await connection.execute("update op_peers set cursor = '' where id = $1", peer.id)
        position = older[0].position
        await apply_page(
            on, older, pull_from(peer), expected_cursor="", end_cursor=position, now=now()
        )

    async def made(number: int) -> Dropper:
        name = await _name_of_last(connection)
        if number:
            await write(connection, 1)
            name = await age(connection, pages, (200 - number) * DAY)
        return await dropper(dropping, connection, name)

    async def check(_: None) -> None:
        assert await connection.fetchval("select text from public.pages") == "x"

    await at_every_moment(read, made, check, db)


# What else happens to a log while a part of it goes


def _in_between(monkeypatch: pytest.MonkeyPatch, happens: Callable[[], Awaitable[Any]]) -> None:
    """Between the copy of what stays and its use."""
    often = drops._often  # pyright: ignore[reportPrivateUsage]

    async def after_it(attempt: Any) -> Any:
        await happens()
        return await often(attempt)

    monkeypatch.setattr(drops, "_often", after_it)


async def test_ops_that_resume_has_dropped_do_not_come_back_with_a_cut(
    db: Database, connections: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
):
    connection = await connections()
    _, wide = await make_wide(db, connection)

    async def resume() -> None:
        await capture.pause(db, "pages", now=now())
        await capture.resume(db, "pages", host=None, now=now())

    _in_between(monkeypatch, resume)
    report = await sweep_of(db).run(now=now())

    assert "meanwhile" in str(
        [one.reason for one in report.postponed if one.step.partition == wide]
    )
    assert await log_of(connection) == []
    assert await _copies(connection) == 0


async def test_a_table_that_is_untracked_during_a_cut_leaves_nothing_behind(
    db: Database, connections: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
):
    connection = await connections()
    pages, _ = await make_wide(db, connection)
    _in_between(monkeypatch, lambda: capture.untrack(db, "pages"))

    await sweep_of(db).run(now=now())
    # The sweep was at work, so its log is dropped by the next pass.
    await capture.leftovers.drop(db)

    assert (
        await connection.fetchval(
            "select count(*) from pg_class where relname ~ ('^ops_' || $1::text)", str(pages)
        )
        == 0
    )


async def _copies(connection: Any) -> int:
    return await connection.fetchval("select count(*) from pg_class where relname ~ '_99....$'")


async def test_a_newer_part_never_goes_before_an_older_one(
    db: Database, connections: Callable[[], Any]
):
    """Otherwise an old op of a record would pass for its newest."""
    connection, writer = await connections(), await connections()
    pages = await make_pages(db)
    await write(connection, 1)
    first = await age(connection, pages, 21 * DAY)
    await write(connection, 1)
    second = await age(connection, pages, 20 * DAY)

    async with writer.transaction():
        # Somebody still writes to the older one, so it cannot be sealed.
        await writer.execute(f"lock table restante.{first} in row exclusive mode")
        report = await sweep_of(db).run(now=now())

    reasons = {one.step.partition: one.reason for one in report.postponed}
    assert reasons.keys() == {first, second}
    assert "lock" in reasons[first]
    assert reasons[second] == f"{first} is older, and goes first"
    await sweep_of(db).run(now=now())
    assert await state_of(connection, first) == await state_of(connection, second) == "gone"


async def test_nothing_of_a_log_goes_while_a_part_of_it_cannot_be_looked_at(
    db: Database, connections: Callable[[], Any]
):
    connection, holder = await connections(), await connections()
    pages = await make_pages(db)
    await write(connection, 1)
    first = await age(connection, pages, 21 * DAY)
    await write(connection, 1)
    second = await age(connection, pages, 20 * DAY)

    async with holder.transaction():
        await holder.execute(f"lock table restante.{first} in access exclusive mode")
        plan = await sweep_of(db).plan(now=now())

    assert [step for step in plan.steps if step.partition] == []
    (held,) = [one for one in plan.held if one.partition == second]
    assert held.why == f"{first} is locked by another session"


async def test_a_snapshot_is_judged_by_the_marks_that_hold_when_it_is_compared(
    db: Database, connections: Callable[[], Any]
):
    """Our newest op goes while a page is on its way: what the server has may be older."""
    connection, dropping = await connections(), await connections()
    pages, peer = await make_pages(db), await make_peer(db)
    await write(connection, 1, text="ours")
    name = await age(connection, pages, 20 * DAY)
    table = await tables.find(connection, "pages")
    assert table is not None
    one = Snapshot(
        peer.id,
        table.id,
        "records",
        False,
        "",
        str(START),
        PEER,
        frozenset({"id", "text"}),
        ulids.LOWEST,
        "",
        None,
        0,
        0,
    )
    taking = Taking(peer, table, one, OWN, ulids.LOWEST, now())
    older = ulids.text_of(ulid_at(0))
    sent = [wire.SnapshotEntry(Raw(b'{"id":1,"text":"theirs"}'), older, 0, PEER, False, False)]

    dropper_of_it = await dropper(dropping, connection, name)
    await dropper_of_it.raise_marks()
    await dropper_of_it.detach()
    async with db.transaction() as tx:
        taken = await taking_page.take(tx, taking, sent)

    # Nobody can say which is newer, so what loses is reported, and others hear of it.
    assert taken.conflicts == 1
    (logged,) = await log_of(connection)
    assert logged.ulid >= dropper_of_it.last.ulid
    await dropper_of_it.finish()
