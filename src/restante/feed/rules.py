"""Rows of a feed, its limits and its marks."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from uuid import UUID

from restante import wire
from restante.errors import FeedFull, RestanteError, ServerFull, TooMuchWritten
from restante.ids import ActivityId

RECEIVED = "a2a_receive"
MAX_PAGE = 500
DEFAULT_PAGE = 100
# A page ends here too, so that a few readers cannot fill the memory; its first row always fits.
MAX_PAGE_BYTES = 2 * 1024 * 1024
# One statement looks at no more rows than this, however few of them a filter lets pass.
ROWS_PER_LOOK = 2000
# A search by a filter looks at so many rows at a time, and lets others take a turn after that.
ROWS_PER_SCAN = 50_000
# A reader without a seq begins anew with each request, so its search goes on for this long.
SCAN_SECONDS = 2.0
# Up to this size an answer is in the buffers of the connection, and no longer ours to bound.
SMALL_ANSWER_BYTES = 64 * 1024
UNBOUNDED = 2**62
# How far the clocks of two servers may be apart: ids and times follow the seqs to within this.
CLOCK_SKEW = timedelta(hours=1)
LONGEST_LOOK_BACK_SECONDS = 30 * 24 * 3600
LONGEST_WAIT_SECONDS = 60
# Times that are further away could not be made into ids.
_BEFORE_ALL_ROWS = datetime(1971, 1, 1, tzinfo=UTC)
_AFTER_ALL_ROWS = datetime(9000, 1, 1, tzinfo=UTC)
_LONGEST_NUMBER = 3  # digits of a limit that may be less than the most
_RFC_3339 = re.compile(
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]+)?(Z|[+-][0-9]{2}:[0-9]{2})"
)


def page_size(sent: str) -> int:
    """How many rows a reader gets; anything but a positive number counts as not sent."""
    digits = sent.removeprefix("+").lstrip("0")
    if not (digits.isascii() and digits.isdigit()):
        return DEFAULT_PAGE
    return min(int(digits), MAX_PAGE) if len(digits) <= _LONGEST_NUMBER else MAX_PAGE


def moment(sent: str) -> datetime | None:
    """
    A time as RFC 3339 has it, which always says its zone; None if it is not one.

    A `+` that was not encoded arrives as a space.
    """
    text = sent.replace(" ", "+").upper()
    if not _RFC_3339.fullmatch(text):
        return None
    try:
        found = datetime.fromisoformat(text).astimezone(UTC)
    except (ValueError, OverflowError):
        return None
    return min(max(found, _BEFORE_ALL_ROWS), _AFTER_ALL_ROWS)


@dataclass(frozen=True, slots=True)
class NewActivity:
    """A row to be appended; the commit gives it its seq."""

    method: str
    summary: str
    request_body: bytes | None  # JSON
    source_id: UUID | None = None
    activity_type: str = RECEIVED
    status: str = "ok"
    response_body: bytes | None = None  # JSON
    digest: UUID | None = None  # of what its sender calls it; such a row is appended once a day

    @property
    def bytes(self) -> int:
        """How much the row counts in its feed."""
        bodies = len(self.request_body or b"") + len(self.response_body or b"")
        return row_bytes(self.method, self.summary) + bodies


# What a row takes beside its text: its other columns and its entries in two indexes.
_ROW_BYTES = 320


def row_bytes(*texts: str) -> int:
    """How much a row with these texts counts in its feed."""
    return _ROW_BYTES + sum(len(text.encode()) for text in texts)


# Acknowledged rows are kept too, until they are trimmed by age or to make room.  They have a limit
# of their own, so that a reader that acknowledges does not find its feed full because of them.
_KEPT_TIMES = 4
# A row is trimmed to make room only after this time, so that a reader can start over.  It also
# bounds how fast rows are replaced: deleted ones take space until a vacuum.
SHORTEST_KEPT = timedelta(hours=1)

_GIB = 1024**3
_MAX_TOTAL_BYTES = 16 * _GIB
_PART_OF_DISK = 4
_SERVER_RETRY_SECONDS = 60


def max_total_bytes(chosen: int | None, *, disk_bytes: int | None) -> int:
    """What all feeds together may hold: unless chosen, a part of the disk if it can be seen."""
    if chosen is not None:
        return chosen
    if disk_bytes is None:
        return _MAX_TOTAL_BYTES
    return min(disk_bytes // _PART_OF_DISK, _MAX_TOTAL_BYTES)


def is_nearly_full(total_bytes: int, max_bytes: int) -> bool:
    """Whether more than three quarters are taken."""
    return 4 * total_bytes > 3 * max_bytes


def server_full() -> ServerFull:
    """The refusal when all feeds together hold as much as they may; it tells no totals."""
    return ServerFull(
        "This server has no room for more messages at the moment.",
        retry_after_seconds=_SERVER_RETRY_SECONDS,
    )


@dataclass(frozen=True, slots=True)
class WriteLimits:
    """How much is written for one workspace in an hour, and how much its feed holds."""

    max_written_bytes: int
    max_feed_bytes: int  # of unacknowledged rows
    kept_times: int = _KEPT_TIMES
    feed_retention: timedelta = timedelta(days=90)
    is_for_others: bool = False  # a refusal then says nothing about the workspace

    def for_source(self, source_id: UUID | None) -> "WriteLimits":
        """Other workspaces may fill half of a feed, so that files can still be announced."""
        if source_id is None:
            return self
        return replace(self, max_feed_bytes=self.max_feed_bytes // 2, is_for_others=True)

    @property
    def max_kept_bytes(self) -> int:
        """How much the feed keeps in all."""
        return self.kept_times * self.max_feed_bytes

    @property
    def for_any_sender(self) -> "WriteLimits":
        """
        Up to here nobody asks who sent the rows.

        It is also what one sender may have in the feed, so that it cannot take all from others:
        half of the unacknowledged bytes, and a quarter of those that are kept.
        """
        if not self.is_for_others:
            return self
        part = self.max_feed_bytes // 2
        return replace(self, max_feed_bytes=part, kept_times=self.kept_times // 2)


UNLIMITED = WriteLimits(max_written_bytes=2**60, max_feed_bytes=2**60)


@dataclass(frozen=True, slots=True)
class Fill:
    """How much is written for a workspace this hour, and how much its feed holds."""

    feed_bytes: int
    unacked_bytes: int
    written_bytes: int
    hour_ends_in_seconds: int
    oldest_row_at: datetime | None

    def refusal(self, limits: WriteLimits, *, feed: int, written: int) -> RestanteError | None:
        """Why that much more is refused; None if there is room for it."""
        if self.unacked_bytes + feed > limits.max_feed_bytes:
            return self._unacked_full(limits)
        if self.kept_excess(limits, feed):
            return self._kept_full(limits)
        if self.written_bytes + written > limits.max_written_bytes:
            return self._too_much_written(limits)
        return None

    def kept_excess(self, limits: WriteLimits, size: int) -> int:
        """How much must go before so much more fits among all rows that the feed keeps."""
        return max(self.feed_bytes + size - limits.max_kept_bytes, 0)

    def fits_anybody(self, limits: WriteLimits, size: int) -> bool:
        """Whether so much more fits, whoever sends it."""
        free = limits.for_any_sender
        return self.unacked_bytes + size <= free.max_feed_bytes and not self.kept_excess(free, size)

    def _unacked_full(self, limits: WriteLimits) -> FeedFull:
        if limits.is_for_others or not self.oldest_row_at:
            return FeedFull(
                "The feed of this workspace is full until it acknowledges rows, or its oldest are "
                "trimmed."
            )
        frees_at = self.oldest_row_at + limits.feed_retention
        return FeedFull(
            f"The feed of this workspace has {self.unacked_bytes} of {limits.max_feed_bytes} "
            "unacknowledged bytes. Acknowledge rows to make room. "
            f"Its oldest rows are trimmed after {frees_at:%Y-%m-%d %H:%M} UTC.",
            feed_bytes=self.unacked_bytes,
            max_bytes=limits.max_feed_bytes,
            frees_at=frees_at.isoformat(),
        )

    def _kept_full(self, limits: WriteLimits) -> FeedFull:
        """
        The oldest rows are acknowledged, or the unacknowledged ones alone would be too many.

        So they leave when they are old enough.
        """
        if limits.is_for_others or not self.oldest_row_at:
            return FeedFull(
                "The feed of this workspace keeps as much as it may. Rows that it has acknowledged "
                "make room an hour after they were stored."
            )
        frees_at = self.oldest_row_at + SHORTEST_KEPT
        return FeedFull(
            f"The feed of this workspace has {self.feed_bytes} of {limits.max_kept_bytes} bytes, "
            "acknowledged rows included. Those make room an hour after they were stored, the "
            f"first of them at {frees_at:%Y-%m-%d %H:%M} UTC.",
            feed_bytes=self.feed_bytes,
            max_bytes=limits.max_kept_bytes,
            frees_at=frees_at.isoformat(),
        )

    def _too_much_written(self, limits: WriteLimits) -> TooMuchWritten:
        wait_seconds = max(self.hour_ends_in_seconds, 1)
        if limits.is_for_others:
            sentence = "No more can be written for this workspace in this hour."
            return TooMuchWritten(sentence, retry_after_seconds=wait_seconds)
        return TooMuchWritten(
            f"{self.written_bytes} bytes were written for this workspace in this hour, aborted and "
            f"acknowledged files included; {limits.max_written_bytes} are allowed.",
            written_bytes=self.written_bytes,
            max_bytes=limits.max_written_bytes,
            retry_after_seconds=wait_seconds,
        )


@dataclass(frozen=True, slots=True)
class SenderPart:
    """The bytes of a feed from one sender: unacknowledged, and those that cannot be trimmed yet."""

    unacked_bytes: int
    held_bytes: int

    def plus(self, size: int) -> "SenderPart":
        return SenderPart(self.unacked_bytes + size, self.held_bytes + size)

    def refusal(self, fill: Fill, limits: WriteLimits, size: int) -> FeedFull | None:
        """
        Why so much more of this sender is refused; None if it is not.

        The part may be a few seconds old, but it is never more than the feed has.
        """
        part = limits.for_any_sender
        if min(self.unacked_bytes, fill.unacked_bytes) + size > part.max_feed_bytes:
            return FeedFull(
                "Too many messages from this sender are unacknowledged; send more when the "
                "workspace has acknowledged some."
            )
        if min(self.held_bytes, fill.feed_bytes) + size > part.max_kept_bytes:
            return FeedFull(
                "This sender has sent as much as the feed of this workspace keeps of one sender. "
                "Messages that the workspace has acknowledged make room an hour after they were "
                "stored."
            )
        return None


@dataclass(frozen=True, slots=True)
class Marks:
    """The seqs of a feed: its newest row, how far it was trimmed, how far it was acknowledged."""

    last_seq: int
    trimmed_seq: int
    acked_seq: int

    @property
    def lowest_seq(self) -> int:
        """The lowest seq that is kept, or the next one if no row is."""
        return self.trimmed_seq + 1

    def all_kept_after(self, seq: int) -> bool:
        """
        Whether a reader that has read up to this seq can go on without missing a row.

        Rows below the trimmed mark are gone.  A seq above the newest is from before a restore; a
        reader that waited for the feed to pass it would miss rows.
        """
        return self.trimmed_seq <= seq <= self.last_seq


@dataclass(frozen=True, slots=True)
class Filter:
    """Which rows of a feed a reader wants."""

    activity_type: str | None = None
    from_agents: bool | None = None  # None: from anyone; False: from the canvas only
    not_before: datetime | None = None
    peer_id: UUID | None = None  # the workspace that sent it, or that it was sent to
    before: datetime | None = None


EVERYTHING = Filter()


@dataclass(frozen=True, slots=True)
class Query:
    """What a reader asks for."""

    since_id: ActivityId | None = None
    since_seq: int | None = None  # not beside since_id
    wanted: Filter = EVERYTHING
    limit: int = DEFAULT_PAGE
    max_bytes: int = MAX_PAGE_BYTES
    # Of the rows beyond this, only the sizes are read.
    read_bytes: int = UNBOUNDED
    wait_seconds: float = 0

    @property
    def small(self) -> "Query":
        """The same without the rows that are read only when there is room for them."""
        return replace(self, read_bytes=SMALL_ANSWER_BYTES)

    def with_room(self, size: int) -> "Query":
        """The same when there is room for so many bytes."""
        return replace(self, read_bytes=size)

    @property
    def needs_room(self) -> bool:
        """Whether rows are read that are large."""
        return self.read_bytes > SMALL_ANSWER_BYTES

    @property
    def is_newest_first(self) -> bool:
        """Whether there is no cursor to go on after."""
        return self.since_id is None and self.since_seq is None

    @property
    def can_go_on(self) -> bool:
        """Whether the reader can go on after an empty page that did not reach the end."""
        return self.since_seq is not None

    @property
    def may_take_long(self) -> bool:
        """Whether it may wait for a row, or search the whole feed."""
        return self.wait_seconds > 0 or self.wanted != EVERYTHING


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Rows that were found and not read, for their size."""

    page_bytes: int  # of all rows that were found
    after_seq: int  # none of them has this seq or a lower one


@dataclass(frozen=True, slots=True)
class Page:
    """Rows, the marks as they were after the rows were read, and where to go on."""

    rows: Sequence[wire.ActivityRow]
    marks: Marks
    read_seq: int  # no row after this one has been looked at
    left_out: LeftOut | None = None

    @property
    def is_empty(self) -> bool:
        """Whether no row was found."""
        return not self.rows and self.left_out is None

    @property
    def has_more(self) -> bool:
        """Whether rows are left to be looked at; a filter may still let none of them pass."""
        return self.read_seq < self.marks.last_seq
