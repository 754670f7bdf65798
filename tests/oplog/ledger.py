"""
What the model knows and no node does: every change that was ever made, and which must survive.

A change may lose only to a newer one, or if its loss was reported.
"""

from collections import defaultdict
from dataclasses import dataclass, field

from restante.oplog.rules import OLDEST, Version


@dataclass(frozen=True, slots=True)
class Change:
    """One change of one record, by an application or issued again by a snapshot."""

    number: int
    key: str
    version: Version
    is_delete: bool
    content: int  # the number of the application's own change


@dataclass(slots=True)
class Ledger:
    """All changes of a run, in the order in which they were made."""

    changes: list[Change] = field(default_factory=list[Change])
    reported: set[int] = field(default_factory=set[int])
    _overwritten_by: defaultdict[int, set[int]] = field(
        default_factory=lambda: defaultdict[int, set[int]](set)
    )

    def __getitem__(self, number: int) -> Change:
        return self.changes[number]

    def note(
        self, key: str, version: Version, *, is_delete: bool, again: int | None = None
    ) -> Change:
        """A new change; `again` is the one that it repeats under a newer version."""
        number = len(self.changes)
        content = number if again is None else self.changes[again].content
        change = Change(number, key, version, is_delete, content)
        self.changes.append(change)
        if again is not None:
            self._overwritten_by[again].add(number)
        return change

    def nothing(self, key: str) -> Change:
        """Stands for a record that never was, where one must be logged as absent."""
        return self.note(key, OLDEST, is_delete=True)

    def was_deleted(self, key: str) -> bool:
        """Whether an application has ever deleted it."""
        return any(
            change.key == key and change.is_delete and change.version != OLDEST
            for change in self.changes
        )

    def is_outdated(self, number: int) -> bool:
        """Whether the record was deleted later, and nothing explains why that is lost."""
        winner = self.winner(self[number].key)
        return winner is not None and winner.is_delete and winner.version > self[number].version

    def report(self, number: int | None) -> None:
        """The loss of this change is in a conflict log, or was announced in another way."""
        if number is not None:
            self.reported.add(number)

    def replace(self, old: int | None, new: int | None) -> None:
        """A node held the old one, or received it, and holds the new one now."""
        if old is not None and new is not None and self[new].version > self[old].version:
            self._overwritten_by[old].add(new)

    def merge(self, old: int | None, new: int | None) -> None:
        """Both have left the same record, or none: who loses the new one has lost the old one."""
        if old is not None and new is not None and old != new:
            self._overwritten_by[old].add(new)

    def winner(self, key: str) -> Change | None:
        """The newest change of the key whose loss nothing explains."""
        excused = self._excused()
        left = [
            change
            for change in self.changes
            if change.key == key and change.number not in excused and change.version != OLDEST
        ]
        return max(left, key=lambda change: change.version, default=None)

    def _excused(self) -> set[int]:
        """The reported ones, and what had given way to one of them."""
        excused = set(self.reported)
        while more := {
            old
            for old, newer in self._overwritten_by.items()
            if old not in excused and newer & excused
        }:
            excused |= more
        return excused
