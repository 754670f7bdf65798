"""One type for each kind of id, so that two of them cannot be swapped, and how ids are made."""

import re
import secrets
from datetime import UTC, datetime
from typing import NewType
from uuid import UUID

WorkspaceId = NewType("WorkspaceId", UUID)
FileId = NewType("FileId", UUID)
ActivityId = NewType("ActivityId", UUID)

_HEX = "[0-9a-f]"
_PLAIN = rf"(?:{_HEX}{{32}}|{_HEX}{{8}}(?:-{_HEX}{{4}}){{3}}-{_HEX}{{12}})"
_UUID = re.compile(rf"(?:urn:uuid:)?{_PLAIN}|\{{{_PLAIN}\}}", re.ASCII | re.IGNORECASE)

# An activity id is time-ordered: 48 bits of Unix milliseconds, then random bits.
_RANDOM_BITS = 80


def new_activity_id(now: datetime) -> ActivityId:
    """An id of this millisecond; the feed's partitions are ranges of such ids."""
    milliseconds = int(now.timestamp() * 1000)
    return ActivityId(UUID(int=milliseconds << _RANDOM_BITS | secrets.randbits(_RANDOM_BITS)))


def lowest_activity_id(moment: datetime) -> ActivityId:
    """The first id of this millisecond."""
    return ActivityId(UUID(int=int(moment.timestamp() * 1000) << _RANDOM_BITS))


def moment_of(activity_id: UUID) -> datetime:
    """The millisecond in which an activity id was made."""
    return datetime.fromtimestamp((activity_id.int >> _RANDOM_BITS) / 1000, UTC)


def as_uuid(text: str) -> UUID | None:
    """
    The UUID that a text is, or None: with or without hyphens, in braces, as a URN, in any case.

    Python's own parser also takes hyphens in other places, underscores and blanks.
    """
    return UUID(text.lower()) if _UUID.fullmatch(text) else None
