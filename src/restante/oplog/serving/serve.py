"""
Serves pages of the log to other nodes.

A reader says how far it has read: by a position, or by the ULID of the last op that it has.  The
page begins right after that.  If something after it is no longer kept, the reader is told: a gap.
"""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from uuid import UUID

from restante.database.pool import Connection, Database
from restante.errors import BadRequest
from restante.oplog import positions, ulids
from restante.oplog.peers import Reader
from restante.oplog.positions import START, Position
from restante.oplog.serving import log, readers
from restante.oplog.serving.encoding import wire_ulid
from restante.oplog.serving.log import Head, Horizon, Limits, Log, LoggedTable, Record
from restante.oplog.serving.readers import OpenEnds

# An op may reach us a day after it was made, and be served only then.
LATE = timedelta(hours=24)

LIMITS = Limits()

# What is read at once.  A page that fits is answered from memory, and larger ones piece by piece.
WINDOW_RECORDS = 500
WINDOW_BYTES = 512 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What a reader asks for."""

    position: str = ""
    after: str = ""
    is_ours: bool = False  # it is one of our nodes; only then its position counts
    floor: UUID | None = None  # up to there it wants to know which records are the newest
    head: str | None = None  # the end of its own log
    limits: Limits = LIMITS


@dataclass(frozen=True, slots=True)
class Start:
    """Where a page begins."""

    position: Position
    is_first: bool = False  # the reader has nothing yet
    unknown_since: UUID | None = None  # it may lack what was made after this


@dataclass(frozen=True, slots=True)
class End:
    """A position, and the ULID by which a reader of the older protocol knows it."""

    position: Position
    ulid: UUID


class LogChanged(Exception):
    """Records were dropped while they were sent: the answer must not pass as complete."""


@dataclass(frozen=True, slots=True)
class Page:
    """A page: its first records, where it ends, and what its headers say."""

    tables: Sequence[LoggedTable]
    below: Horizon
    start: Start
    records: Sequence[Record]
    last: "End | None"  # the last record that belongs to it
    scanned: "End"  # nothing up to here is left for the reader
    is_limited: bool
    gap_tables: tuple[str, ...] = ()
    new_tables: tuple[str, ...] = ()  # the reader could not see them before
    lowest_kept: UUID | None = None  # in case of a gap; above all that was dropped if nothing is

    @property
    def is_whole(self) -> bool:
        """Whether all its records were read."""
        if self.last is None:
            return True
        return bool(self.records) and self.records[-1].position == self.last.position


async def read(
    db: Database, reader: Reader, ask: Ask, open_ends: OpenEnds, *, now: datetime
) -> Page:
    """
    A page for a reader; raises BadRequest if it says that it is where it cannot be.

    What it asks for confirms what it has, if it has proved who it is.
    """
    async with log.reading(db) as connection:
        below = await log.horizon(connection)
        every = await log.logged_tables(connection)
        visible = Log(connection, [one for one in every if reader.may_see(one.name)], below)
        start = await _start(visible, reader, ask, open_ends, now=now)
        page = await _page(visible, start, ask)
        page = await _with_gap(connection, page, reader, is_ours=ask.is_ours)
    if reader.is_authenticated and reader.peer is not None:
        async with db.connection() as connection:
            confirmed = None if start.is_first else start.position
            await readers.note_confirmed(
                connection, reader.peer.id, confirmed, head=ask.head, now=now
            )
            if start.is_first and reader.peer.shown_later:
                await readers.note_shown(connection, reader.peer.id, None)
    return page


async def note_served(
    db: Database, reader: Reader, ask: Ask, page: Page, open_ends: OpenEnds
) -> None:
    """Must be called before the page is sent: only what was served can be confirmed."""
    if page.scanned.position == START:
        return
    # What the reader has sent itself says nothing new.
    own = ulids.parsed(ask.after)
    ends = {end.ulid: end.position for end in (page.scanned, page.last) if end and end.ulid != own}
    if not reader.is_authenticated or reader.peer is None:
        for ulid, position in ends.items():
            if ulid != position.ulid:
                open_ends.note(reader, ask.limits, ulid, position)
        return
    async with db.connection() as connection:
        await readers.note_served(connection, reader.peer.id, page.scanned.position)
        if ends and not ask.is_ours:
            named = [(ulids.text_of(ulid), position) for ulid, position in ends.items()]
            await readers.note_page_ends(connection, reader.peer.id, named)


async def rest(db: Database, page: Page) -> AsyncGenerator[list[Record]]:
    """
    The records after the first ones of a page, in windows.

    A window without data says how large the next record is.  Raises LogChanged.
    """
    at = page.records[-1].position if page.records else page.start.position
    max_bytes = WINDOW_BYTES
    while page.last is not None and at < page.last.position:
        async with log.reading(db) as connection:
            visible = Log(connection, page.tables, page.below)
            found = await visible.window(at, limit=WINDOW_RECORDS, max_bytes=max_bytes)
        if found and found[0].data is None:
            max_bytes = found[0].size
            yield found[:1]
            continue
        max_bytes, end = WINDOW_BYTES, page.last.position
        records = [one for one in found if one.data is not None and one.position <= end]
        if not records:
            raise LogChanged
        at = records[-1].position
        yield records
    await _check_unchanged(db, page)


async def _check_unchanged(db: Database, page: Page) -> None:
    async with db.connection() as connection:
        now = {table.id: table.trimmed for table in await log.logged_tables(connection)}
    if any(now.get(table.id) != table.trimmed for table in page.tables):
        raise LogChanged


async def outdated(
    db: Database, page: Page, records: Sequence[Record], floor: UUID | None
) -> set[Position]:
    """Which of these records are not the newest of their keys, as far as the reader asks."""
    if floor is None or not any(one.position.ulid <= floor for one in records):
        return set()
    first = records[0].position
    async with log.reading(db) as connection:
        visible = Log(connection, page.tables, page.below)
        # The position right before the first one need not be a record's.
        before = replace(first, n=first.n - 1)
        return await visible.outdated(before, records[-1].position, floor)


async def _start(
    visible: Log, reader: Reader, ask: Ask, open_ends: OpenEnds, *, now: datetime
) -> Start:
    """By the first rule that fits."""
    if ask.position and ask.is_ours:
        position = positions.parsed(ask.position)
        if position is None:
            raise BadRequest("position is wrong: it is no position of an op log.")
        if (position.era, position.xid) <= (visible.below.era, visible.below.xid):
            return Start(position)
        # It was served before the database went back in time, so only the op itself says where.
        return await _of_ulid(visible, position.ulid, ask.limits, now=now)
    if not ask.after:
        return Start(START, is_first=True)
    ulid = ulids.parsed(ask.after)
    if ulid is None:
        raise BadRequest("after is wrong: it must be a ULID.")
    if not reader.is_authenticated or reader.peer is None:
        end = open_ends.find(reader, ask.limits, ulid)
    else:
        end = await readers.page_end(visible.connection, reader.peer.id, ulids.text_of(ulid))
    return Start(end) if end else await _of_ulid(visible, ulid, ask.limits, now=now)


async def _of_ulid(visible: Log, ulid: UUID, limits: Limits, *, now: datetime) -> Start:
    if end := await visible.op_end(ulid, limits):
        return Start(end)
    if not ulids.is_plausible(ulid, now=now):
        raise BadRequest(
            "after is wrong: no op has this ULID, and its time is before 2024 or more than 24 h "
            "ahead. Leave it empty to start over."
        )
    since = ulids.moment_of(ulid) - LATE
    first = await visible.first_arrival(since)
    if first is None:
        head = await log.head(visible.connection, visible.below)
        position = head.position if head else START
    else:
        position = await visible.previous(first)
    return Start(position, unknown_since=ulids.lowest_at(since))


async def _page(visible: Log, start: Start, ask: Ask) -> Page:
    limits = ask.limits
    first = await visible.window(
        start.position, limit=WINDOW_RECORDS, max_bytes=min(WINDOW_BYTES, limits.bytes)
    )
    if _is_all(first, limits):
        last, is_limited = (first[-1].position if first else None), False
    else:
        end = await visible.end(start.position, limits)
        last, is_limited = (end.position, end.is_cut) if end else (None, False)
    records = [one for one in first if one.data is not None and last and one.position <= last]
    ending = None if last is None else await _ending(visible, start, ask, last)
    scanned = ending
    if scanned is None or not is_limited:
        scanned = await _scanned(visible, start, ask, ending)
    return Page(visible.tables, visible.below, start, records, ending, scanned, is_limited)


def _is_all(first: Sequence[Record], limits: Limits) -> bool:
    """Whether a first window has all that there is, and fits into a page."""
    return (
        len(first) < min(WINDOW_RECORDS, limits.ops)
        and all(one.data is not None for one in first)
        and sum(one.size + log.OP_BYTES for one in first) <= limits.bytes
    )


async def _ending(visible: Log, start: Start, ask: Ask, last: Position) -> End:
    """The end of a page, with the ULID that its last op has for a reader of ULIDs."""
    if ask.is_ours:
        return End(last, last.ulid)
    n, is_approximate = await visible.op_start(start.position, last)
    return End(last, wire_ulid(replace(last, n=n), is_approximate=is_approximate))


async def _scanned(visible: Log, start: Start, ask: Ask, ending: End | None) -> End:
    """The end of the log: what is not in the page is gone, or not for this reader."""
    head = await log.head(visible.connection, visible.below)
    ends = [End(one, one.ulid) for one in _trimmed(visible)]
    own = End(start.position, ulids.parsed(ask.after) or start.position.ulid)
    if start.unknown_since is not None:
        ends.append(own)
    if head is not None:
        ends.append(End(head.position, _head_ulid(head, is_ours=ask.is_ours)))
    if start.unknown_since is None:
        ends.append(own)
    if ending is not None:
        ends.append(ending)
    # Of equal ones the last, which has the ULID that the reader knows.
    return max(reversed(ends), key=lambda end: end.position)


def _head_ulid(head: Head, *, is_ours: bool) -> UUID:
    """The ULID of the end of the log, which must not stand for a part of the last op."""
    if is_ours:
        return head.position.ulid
    has_own = head.has_first and not head.is_approximate
    at = replace(head.position, n=0) if has_own else head.position
    return wire_ulid(at, is_approximate=head.is_approximate)


def _trimmed(visible: Log) -> list[Position]:
    """How far each log was trimmed, if nothing below that can still arrive."""
    found = (positions.parsed(table.trimmed) for table in visible.tables)
    return [one for one in found if one is not None and visible.below.is_above(one)]


async def _with_gap(connection: Connection, page: Page, reader: Reader, *, is_ours: bool) -> Page:
    """The page, with the tables of which the reader lacks something: their marks are read now."""
    tables = [one for one in await log.logged_tables(connection) if reader.may_see(one.name)]
    visible = Log(connection, tables, page.below)
    gone = [one for one in tables if _has_gap(one, page.start, is_ours=is_ours)]
    lowest = None
    if not is_ours and not page.start.is_first:
        is_doubtful = page.start.unknown_since is not None and any(one.trimmed for one in tables)
        if gone or is_doubtful:
            lowest = await visible.lowest_ulid()
        if lowest is None and is_doubtful:
            # Nothing is kept: that must not look as if nothing had happened.
            gone = [one for one in tables if one.trimmed]
        if gone and lowest is None:
            lowest = ulids.following(max(one.floor for one in gone))
    new: tuple[str, ...] = ()
    if is_ours and reader.peer is not None and not page.start.is_first:
        new = tuple(one.name for one in tables if one.id in reader.peer.shown_later)
    names = tuple(one.name for one in gone)
    return replace(page, gap_tables=names, new_tables=new, lowest_kept=lowest if gone else None)


def _has_gap(table: LoggedTable, start: Start, *, is_ours: bool) -> bool:
    """Whether something after the start was dropped from the log of this table."""
    if start.is_first:
        # The older protocol has no snapshots: an empty cursor asks for what there is.
        return is_ours and (bool(table.trimmed) or table.taken_snapshot)
    if not table.trimmed:
        return False
    is_unknown = start.unknown_since is not None and table.floor >= start.unknown_since
    return is_unknown or table.trimmed > str(start.position)
