"""What is known of a peer between two pages, and when its snapshots are tried again.  Pure."""

from collections.abc import Collection
from dataclasses import dataclass, field
from datetime import datetime
from uuid import UUID

from restante.oplog.snapshots.taking import TableFailed

# So often a snapshot is tried again before the log is read on without its table.  Reading the log
# ends a snapshot that has begun, so it is not given up for a record that is locked for a moment.
_SNAPSHOT_TRIES = 5
_MAX_SNAPSHOT_PAUSE_SECONDS = 600.0
# A gap ends when the other tables were read beyond it, unless a transaction there holds them up.
_LONGEST_GAP_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Pace:
    """How often a peer is asked."""

    pull_seconds: float = 10.0  # a peer that cannot wait itself
    wait_seconds: int = 25
    first_backoff_seconds: float = 0.5
    max_backoff_seconds: float = 60.0


@dataclass(slots=True)
class FailingSnapshot:
    """A table whose snapshot could not go on."""

    reason: str = ""
    tries: int = 0  # since it last went on
    rounds: int = 0  # how often the log was read on without it
    again_at: float = 0.0  # of the loop's clock


@dataclass(slots=True)
class State:
    """What is known of a peer between two pages, and may be forgotten."""

    failures: int = 0  # since something last succeeded
    has_answered: bool = False  # the last page that was asked for came
    resume_after: UUID | None = None  # the last page was full, and ended here
    bytes_per_op: float | None = None
    asked_at: datetime | None = None  # when the last page was asked for
    gap_since: float | None = None  # by the loop's clock: the other tables are read first
    snapshots: dict[int, FailingSnapshot] = field(default_factory=dict[int, FailingSnapshot])

    @property
    def failure(self) -> str | None:
        """What is wrong although the log is read."""
        reasons = [one.reason for one in self.snapshots.values() if one.tries]
        return " ".join(reasons) or None

    def is_in_gap(self, now: float) -> bool:
        """Whether other tables are to be read on before the snapshots of those with a gap."""
        if self.gap_since is not None and now - self.gap_since >= _LONGEST_GAP_SECONDS:
            self.gap_since = None
        return self.gap_since is not None

    def note_gap(self, now: float, *, has_gap: bool) -> None:
        """Whether the last page had one."""
        if not has_gap:
            self.gap_since = None
        elif self.gap_since is None:
            self.gap_since = now

    def waiting_tables(self, now: float) -> set[int]:
        """The tables whose snapshots are not tried now."""
        return {table_id for table_id, one in self.snapshots.items() if one.again_at > now}

    def snapshot_went_on(self, table_id: int) -> None:
        if table_id in self.snapshots:
            self.snapshots[table_id].tries = 0

    def snapshot_failed(self, failed: TableFailed, reason: str, pace: Pace, now: float) -> None:
        """Try it again later and later."""
        one = self.snapshots.setdefault(failed.table_id, FailingSnapshot())
        one.reason = f"The snapshot of {failed.table} fails: {reason}"
        one.tries += 1
        seconds = pace.first_backoff_seconds * 2 ** min(one.tries - 1, 20)
        longest_seconds = pace.max_backoff_seconds
        if one.tries >= _SNAPSHOT_TRIES and failed.has_begun:
            # It begins again from nothing, which costs more than another attempt.
            seconds = longest_seconds * 2 ** min(one.rounds, 20)
            longest_seconds = max(longest_seconds, _MAX_SNAPSHOT_PAUSE_SECONDS)
            one.rounds += 1
        one.again_at = now + min(seconds, longest_seconds)

    def next_snapshot_at(self, pending: Collection[int], *, is_first: bool) -> float | None:
        """When to try the next of those that wait; None: the log may be read on without them."""
        self.snapshots = {key: one for key, one in self.snapshots.items() if key in pending}
        soon = [one for one in self.snapshots.values() if one.tries < _SNAPSHOT_TRIES]
        if not soon and not (self.snapshots and is_first):
            return None
        return min(one.again_at for one in soon or self.snapshots.values())
