"""
Snapshots, taker's side: makes a table equal to a peer's, page by page.

Each page is one transaction together with its progress, so it goes on after any crash of either
side.  First come the keys that the server has deleted, then its records, then the records that
only we have, and our own deletes that are older than the server's floor.  When all tables are
complete, the peer's log is read from the position at which the first of them began.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from graphlib import CycleError, TopologicalSorter
from typing import Literal
from uuid import UUID

import msgspec
import structlog
from msgspec import Raw

from restante.database import sql
from restante.database.pool import Connection, Database, Row, Tx
from restante.errors import PeerUnreachable, SnapshotGone, TableBusy, TableNotTracked
from restante.oplog import cursors, positions, records, snapshot, tables, taking_page, ulids
from restante.oplog.peers import Peer
from restante.oplog.positions import Position
from restante.oplog.remote import Remote
from restante.oplog.tables import TrackedTable
from restante.wire import oplog as wire

log = structlog.get_logger()

queries = sql.load("restante.oplog", "taking")

_Step = Callable[[Peer, "Snapshot", TrackedTable], Awaitable[None]]
Phase = Literal["new", "deletes", "records", "leftovers", "own_deletes", "done"]

_MAX_ASKED_BYTES = 2 * 1024 * 1024
_HTTP_NOT_FOUND = 404


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A snapshot that is being taken, and how far it is."""

    peer_id: int
    table_id: int
    phase: Phase
    is_for_gap: bool
    after: str
    start: str
    host: str  # the server's
    columns: frozenset[str]  # the server's
    floor: UUID  # the largest that the server has told
    floor_origin: str
    server_cursor: Position | None  # how far the server had read us when it began
    records: int
    begun: int


async def want(
    connection: Connection,
    peer: Peer,
    wanted: Iterable[TrackedTable],
    *,
    is_for_gap: bool,
    now: datetime,
) -> None:
    """Take snapshots of these tables before anything else is read from the peer."""
    ids = [table.id for table in wanted]
    await connection.execute(queries.want, peer.id, ids, is_for_gap, now)


@dataclass(frozen=True, slots=True)
class Taker:
    """Takes the snapshots that are wanted from one peer."""

    db: Database
    remote: Remote
    own_host: str
    clock: Callable[[], datetime]

    async def advance(self, peer: Peer) -> bool:
        """
        Take the next page of what is wanted from the peer; False if nothing is.

        Raises PeerUnreachable, and TableBusy: the same page is taken again later.
        """
        async with self.db.connection() as connection:
            pending = await _pending(connection, peer)
            known = {table.id: table for table in await tables.all_tables(connection)}
        if not pending:
            return False
        for one in pending:
            if one.phase != "done":
                await self._continue(peer, one, known.get(one.table_id))
                return True
        await self._settle(peer)
        return True

    async def _continue(self, peer: Peer, one: Snapshot, table: TrackedTable | None) -> None:
        if table is None or table.is_missing:
            await self._forget(one)
            return
        if table.state == "paused":
            raise TableBusy(f"Capture of {table.name} is paused here, so no snapshot is taken.")
        try:
            await self._step(one.phase)(peer, one, table)
        except SnapshotGone as error:
            async with self.db.connection() as connection:
                await connection.execute(queries.restart, one.peer_id, one.table_id, self.clock())
            log.warning("snapshot_restarted", peer=peer.host, table=table.name, begun=one.begun)
            raise PeerUnreachable(
                f"The peer no longer keeps the snapshot of {table.name}; it begins again."
            ) from error

    def _step(self, phase: Phase) -> "_Step":
        steps: dict[str, _Step] = {
            "new": self._begin,
            "deletes": self._deletes,
            "records": self._records,
            "leftovers": self._leftovers,
            "own_deletes": self._own_deletes,
        }
        return steps[phase]

    async def _begin(self, peer: Peer, one: Snapshot, table: TrackedTable) -> None:
        try:
            started = await self.remote.begin_snapshot(peer, table.name)
        except PeerUnreachable as error:
            if error.facts.get("peer_code") != TableNotTracked.code:
                raise
            log.warning("snapshot_refused", peer=peer.host, table=table.name)
            await self._forget(one)
            return
        if positions.parsed(started.start) is None or not started.host:
            raise PeerUnreachable("The start of its snapshot is unreadable.")
        cursor = positions.parsed(started.cursor_on_you or "")
        async with self.db.connection() as connection:
            await connection.execute(
                queries.began,
                one.peer_id,
                one.table_id,
                started.start,
                started.host,
                started.columns,
                str(cursor) if cursor else None,
                self.clock(),
            )
        log.info("snapshot_begun", peer=peer.host, table=table.name, start=started.start)

    async def _deletes(self, peer: Peer, one: Snapshot, table: TrackedTable) -> None:
        page = await self._page(peer, one, table, "deletes")
        following = ("records", "") if page.next is None else ("deletes", page.next)
        await self._take(peer, one, table, page, following)

    async def _records(self, peer: Peer, one: Snapshot, table: TrackedTable) -> None:
        page = await self._page(peer, one, table, "records")
        following = ("leftovers", "") if page.next is None else ("records", page.next)
        await self._take(peer, one, table, page, following)

    async def _leftovers(self, peer: Peer, one: Snapshot, table: TrackedTable) -> None:
        keys = await taking_page.own_keys(self.db, table, one.after)
        asked = _fitting(keys)
        following = ("leftovers", asked[-1]) if asked else ("own_deletes", "")
        await self._ask(peer, one, table, asked, following)

    async def _own_deletes(self, peer: Peer, one: Snapshot, table: TrackedTable) -> None:
        """Those above the server's floor are newer than anything that it has forgotten."""
        async with self.db.transaction(readonly=True) as tx:
            deletes, following = await snapshot.deletes_of(tx, table, one.after)
        highest = ulids.text_of(one.floor)
        old = [bytes(entry.data).decode() for entry in deletes if entry.ulid <= highest]
        then = ("own_deletes", following) if following else ("done", "")
        await self._ask(peer, one, table, old, then)

    async def _ask(
        self,
        peer: Peer,
        one: Snapshot,
        table: TrackedTable,
        keys: Sequence[str],
        following: tuple[str, str],
    ) -> None:
        """Ask which of our keys the server lacks, and decide about those."""
        page = wire.SnapshotPage([], ulids.text_of(one.floor), one.floor_origin)
        while asked := _fitting(keys):
            keys = keys[len(asked) :]
            raw = [Raw(key.encode()) for key in asked]
            request = wire.SnapshotKeysRequest(table.name, one.start, raw)
            lacking = await self.remote.snapshot_missing(peer, request)
            page = msgspec.structs.replace(lacking, entries=page.entries + lacking.entries)
        await self._take(peer, one, table, page, following)

    async def _page(
        self, peer: Peer, one: Snapshot, table: TrackedTable, phase: Literal["deletes", "records"]
    ) -> wire.SnapshotPage:
        request = wire.SnapshotPageRequest(table.name, one.start, phase, one.after)
        return await self.remote.snapshot_page(peer, request)

    async def _take(
        self,
        peer: Peer,
        one: Snapshot,
        table: TrackedTable,
        page: wire.SnapshotPage,
        following: tuple[str, str],
    ) -> None:
        """Decide about a page and note the progress, in one transaction."""
        floor = ulids.parsed(page.floor)
        if floor is None:
            raise PeerUnreachable("The floor of its snapshot is unreadable.")
        told = replace(
            one,
            floor=max(one.floor, floor),
            floor_origin=page.floor_origin if floor > one.floor else one.floor_origin,
        )
        phase, after = following
        async with self.db.transaction() as tx:
            taking = taking_page.Taking(peer, table, told, self.own_host, floor)
            await taking_page.take(
                tx, taking, page.entries, has_records=one.phase == "records", now=self.clock()
            )
            if phase == "done":
                await _adopt_floor(tx, told)
            moved = await tx.fetchval(
                queries.progressed,
                one.peer_id,
                one.table_id,
                one.start,
                one.phase,
                one.after,
                phase,
                after,
                len(page.entries),
                self.clock(),
                told.floor,
                told.floor_origin,
            )
            if not moved:
                raise SnapshotGone(f"The snapshot of {table.name} was begun again here.")
        if phase == "done":
            log.info(
                "snapshot_taken",
                peer=peer.host,
                table=table.name,
                entries=one.records + len(page.entries),
            )

    async def _settle(self, peer: Peer) -> None:
        """All tables are complete: read the log on from the first start."""
        is_first = cursors.loaded(peer.cursor, now=self.clock()).position is None
        async with self.db.connection() as connection:
            cursor = await connection.fetchval(queries.settle, peer.id, is_first, self.clock())
        log.info("snapshots_complete", peer=peer.host, cursor=cursor)

    async def _forget(self, one: Snapshot) -> None:
        async with self.db.connection() as connection:
            await connection.execute(queries.forget, one.peer_id, one.table_id)


async def _adopt_floor(tx: Tx, one: Snapshot) -> None:
    """What the server has dropped is unknown here too, and our clock is above it."""
    await tx.execute(queries.adopt_floor, one.table_id, one.floor, one.floor_origin)
    await records.raise_clock(tx, one.floor)


async def _pending(connection: Connection, peer: Peer) -> list[Snapshot]:
    """What is wanted from the peer; tables that others refer to come first."""
    rows = await connection.fetch(queries.pending, peer.id)
    if not rows:
        return []
    found = {row["table_id"]: _snapshot(row) for row in rows}
    graph: dict[int, set[int]] = {table_id: set() for table_id in found}
    for row in await connection.fetch(queries.references):
        if row["child"] in found and row["parent"] in found:
            graph[row["child"]].add(row["parent"])
    try:
        return [found[table_id] for table_id in TopologicalSorter(graph).static_order()]
    except CycleError:
        return list(found.values())


def _snapshot(row: Row) -> Snapshot:
    return Snapshot(
        row["peer_id"],
        row["table_id"],
        row["phase"],
        row["is_for_gap"],
        row["after"],
        row["start"],
        row["host"],
        frozenset(row["columns"]),
        row["floor"],
        row["floor_origin"],
        positions.parsed(row["server_cursor"] or ""),
        row["records"],
        row["begun"],
    )


def _fitting(keys: Sequence[str]) -> list[str]:
    """As many of the keys as one request may have, and at least one."""
    total, fitting = 0, list[str]()
    for key in keys[: snapshot.MAX_ASKED_KEYS]:
        total += len(key.encode())
        if fitting and total > _MAX_ASKED_BYTES:
            break
        fitting.append(key)
    return fitting
