"""
Snapshots, taker's side: makes a table equal to a peer's, page by page.

Each page is one transaction together with its progress, so it goes on after any crash of either
side.  First come the keys that the server has deleted, then its records, then our own deletes that
are older than the server's floor, and the records that only we have.  These are last, because
another peer may bring back a key that we had deleted meanwhile.  When all tables are complete that
do not fail, the peer's log is read from the position at which the first of them began.  One that
fails goes on later, and then the log is read again from where that one began.
"""

from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Literal

import msgspec
import structlog
from msgspec import Raw

from restante.database.pool import Database
from restante.errors import (
    PeerUnreachable,
    RestanteError,
    SnapshotGone,
    StatementTimedOut,
    TableBusy,
)
from restante.oplog import positions, tables, ulids
from restante.oplog.applying import boundary
from restante.oplog.applying.parking import ParkedFull
from restante.oplog.applying.records import KeysTaken
from restante.oplog.peers import Peer, normalised_host
from restante.oplog.remote import Remote, is_about_all
from restante.oplog.snapshots import progress, snapshot, taking_entries, taking_page
from restante.oplog.snapshots.taking_entries import Phase, Snapshot, Taking
from restante.oplog.snapshots.taking_page import RecordFault
from restante.oplog.tables import TrackedTable
from restante.text import printable
from restante.wire import oplog as wire

log = structlog.get_logger()

_Step = Callable[[Peer, Snapshot, TrackedTable], Awaitable[None]]

_MAX_ASKED_BYTES = 2 * 1024 * 1024
# How often a page is tried again because a record appeared meanwhile.
_TRIES = 3
# A part of this size is not halved to find the record that somebody has locked.
_SMALL_PART = 50
_BUSY = (TableBusy, StatementTimedOut)
_NO_SNAPSHOTS = (404, 405)
_KEPT_OUT = "A trigger or a rule of the table keeps the record out of it."


class TableFailed(Exception):
    """The snapshot of one table cannot go on; those of others may."""

    def __init__(self, one: Snapshot, table: str, error: Exception) -> None:
        super().__init__(str(error))
        self.table_id = one.table_id
        self.table = table
        self.has_begun = one.phase != "new"
        self.error = error

    @property
    def is_unexpected(self) -> bool:
        return not isinstance(self.error, RestanteError)


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
        try:
            return await self.step(peer) is not None
        except TableFailed as failed:
            raise failed.error from failed.error.__cause__

    async def step(self, peer: Peer, waiting: Collection[int] = ()) -> int | None:
        """
        The same without the tables that wait; returns the table, and None if nothing is to be done.

        Raises TableFailed, and PeerUnreachable if any other table would fail as well.
        """
        async with self.db.connection() as connection:
            pending = await progress.pending(connection, peer)
            known = {table.id: table for table in await tables.all_tables(connection)}
        for one in pending:
            if one.phase != "done" and one.table_id not in waiting:
                await self._tried(peer, one, known.get(one.table_id))
                return one.table_id
        done = [one.table_id for one in pending if one.phase == "done"]
        if not done:
            return None
        await self._settle(peer)
        return done[0]

    async def _tried(self, peer: Peer, one: Snapshot, table: TrackedTable | None) -> None:
        try:
            await self._continue(peer, one, table)
        except Exception as error:
            if isinstance(error, PeerUnreachable) and is_about_all(error):
                raise
            raise TableFailed(one, table.name if table else "", error) from error

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
                await progress.restart(connection, one, now=self.clock())
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
            if error.facts.get("status") in _NO_SNAPSHOTS:
                # It does not track the table, or has become a node that knows no snapshots.
                log.warning("snapshot_refused", peer=peer.host, table=table.name)
                await self._forget(one)
            raise
        host = normalised_host(started.host)
        if positions.parsed(started.start) is None or not boundary.is_host(host):
            raise PeerUnreachable("The start of its snapshot is unreadable.")
        if not peer.may_relay(host):
            raise PeerUnreachable(
                f"Its snapshot is in the name of {printable(host)}, for which it may not speak."
            )
        cursor = positions.parsed(started.cursor_on_you or "")
        if table.id in peer.shown_later:
            cursor = None  # whatever it has read of us, this table was not part of it
        async with self.db.connection() as connection:
            await progress.begin(
                connection, one, started, host=host, cursor=cursor, now=self.clock()
            )
        log.info("snapshot_begun", peer=peer.host, table=table.name, start=started.start)

    async def _deletes(self, peer: Peer, one: Snapshot, table: TrackedTable) -> None:
        page = await self._page(peer, one, table, "deletes")
        following = ("records", "") if page.next is None else ("deletes", page.next)
        await self._take(peer, one, table, page, following)

    async def _records(self, peer: Peer, one: Snapshot, table: TrackedTable) -> None:
        page = await self._page(peer, one, table, "records")
        following = ("own_deletes", "") if page.next is None else ("records", page.next)
        await self._take(peer, one, table, page, following)

    async def _own_deletes(self, peer: Peer, one: Snapshot, table: TrackedTable) -> None:
        """Those above the server's floor are newer than anything that it has forgotten."""
        async with self.db.transaction(readonly=True) as tx:
            deletes, following = await snapshot.deletes_of(tx, table, one.after)
        highest = ulids.text_of(one.floor)
        old = [bytes(entry.data).decode() for entry in deletes if entry.ulid <= highest]
        then = ("own_deletes", following) if following else ("leftovers", "")
        await self._ask(peer, one, table, old, then)

    async def _leftovers(self, peer: Peer, one: Snapshot, table: TrackedTable) -> None:
        keys = await taking_page.own_keys(self.db, table, one.after)
        asked = _fitting(keys)
        following = ("leftovers", asked[-1]) if asked else ("done", "")
        await self._ask(peer, one, table, asked, following)

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
        floor = taking_entries.floor_of(page, table, now=self.clock())
        told = one
        if floor > one.floor:
            origin = taking_entries.floor_origin_of(page, peer, one, own_host=self.own_host)
            told = replace(one, floor=floor, floor_origin=origin)
        taking = Taking(peer, table, told, self.own_host, floor, self.clock())
        try:
            await self._commit(taking, one, page.entries, following)
        except (RecordFault, *_BUSY):
            await self._take_halves(taking, one, page.entries)
            await self._commit(taking, one, [], following)
        if following[0] == "done":
            log.info("snapshot_taken", peer=peer.host, table=table.name, entries=one.records)

    async def _take_halves(
        self, taking: Taking, one: Snapshot, entries: Sequence[wire.SnapshotEntry]
    ) -> None:
        """
        Halve a page until what Postgres refuses is alone, and park that.

        Raises TableBusy if a small part is locked.
        """
        todo = [entries]
        while todo:
            part = todo.pop()
            try:
                await self._commit(taking, one, part, None)
            except RecordFault as fault:
                if len(part) > 1:
                    todo += _halves(part)
                else:
                    await self._park(taking, one, part[0], fault)
            except _BUSY:
                if len(part) <= _SMALL_PART:
                    raise
                todo += _halves(part)

    async def _park(
        self, taking: Taking, one: Snapshot, entry: wire.SnapshotEntry, fault: RecordFault
    ) -> None:
        try:
            async with self.db.transaction() as tx:
                parked = await taking_page.park(tx, taking, entry, fault)
                await progress.count(tx, one, parked)
        except ParkedFull as error:
            raise _parked_full() from error

    async def _commit(
        self,
        taking: Taking,
        one: Snapshot,
        entries: Sequence[wire.SnapshotEntry],
        following: tuple[str, str] | None,
    ) -> None:
        """One transaction; raises RecordFault.  Only with what follows it is progress."""
        for _ in range(_TRIES):
            try:
                return await self._commit_once(taking, one, entries, following)
            except KeysTaken:
                continue
        raise RecordFault("other", _KEPT_OUT)

    async def _commit_once(
        self,
        taking: Taking,
        one: Snapshot,
        entries: Sequence[wire.SnapshotEntry],
        following: tuple[str, str] | None,
    ) -> None:
        try:
            async with self.db.transaction() as tx:
                taken = await taking_page.take(tx, taking, entries)
                await progress.count(tx, one, taken)
                if following:
                    await progress.note(tx, taking, one, len(entries), following)
        except ParkedFull as error:
            raise _parked_full() from error

    async def _settle(self, peer: Peer) -> None:
        """What is complete is settled: the log is read on from the first start."""
        async with self.db.connection() as connection:
            cursor = await progress.settle(connection, peer, now=self.clock())
        log.info("snapshots_complete", peer=peer.host, cursor=cursor)

    async def _forget(self, one: Snapshot) -> None:
        async with self.db.connection() as connection:
            await progress.forget(connection, one)


def _parked_full() -> TableBusy:
    return TableBusy("There is no room for more parked ops; retry or discard some of them.")


def _halves(part: Sequence[wire.SnapshotEntry]) -> list[Sequence[wire.SnapshotEntry]]:
    """The first half comes last: it is taken next."""
    middle = len(part) // 2
    return [part[middle:], part[:middle]]


def _fitting(keys: Sequence[str]) -> list[str]:
    """As many of the keys as one request may have, and at least one."""
    total, fitting = 0, list[str]()
    for key in keys[: snapshot.MAX_ASKED_KEYS]:
        total += len(key.encode())
        if fitting and total > _MAX_ASKED_BYTES:
            break
        fitting.append(key)
    return fitting
