"""
ULIDs: 48 bits of Unix milliseconds and 80 more, as UUIDs in the database and as text on the wire.

Ours carry the hybrid clock: a tick is the milliseconds and a counter of 15 bits.
"""

import re
from datetime import UTC, datetime, timedelta
from uuid import UUID

_ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_VALUES = {letter: value for value, letter in enumerate(_ALPHABET)}
_ULID = re.compile(rf"[0-7][{_ALPHABET}]{{25}}", re.ASCII)
_RANDOM_BITS = 80
_COUNTER_BITS = 15
_TICK_SHIFT = _RANDOM_BITS - _COUNTER_BITS

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

LOWEST = UUID(int=0)
HIGHEST = UUID(int=2**128 - 1)

# The existing program was not yet written then, so no honest ULID is older.
EARLIEST = datetime(2024, 1, 1, tzinfo=UTC)
MAX_AHEAD = timedelta(hours=24)


def parsed(text: str) -> UUID | None:
    """The ULID that a text is, in either case; None if it is none."""
    upper = text.upper() if len(text) == 26 and text.isascii() else ""
    if not _ULID.fullmatch(upper):
        return None
    number = 0
    for letter in upper:
        number = number << 5 | _VALUES[letter]
    return UUID(int=number)


def text_of(ulid: UUID) -> str:
    """The 26 characters, in upper case."""
    number = ulid.int
    return "".join(_ALPHABET[number >> shift & 31] for shift in range(125, -1, -5))


def moment_of(ulid: UUID) -> datetime:
    """
    The millisecond in which a ULID was made.

    One that is later than a datetime can be counts as the latest.
    """
    try:
        return _EPOCH + timedelta(milliseconds=ulid.int >> _RANDOM_BITS)
    except OverflowError:
        return datetime.max.replace(tzinfo=UTC)


def lowest_at(moment: datetime) -> UUID:
    """The first ULID of this millisecond."""
    return UUID(int=max((moment - _EPOCH) // timedelta(milliseconds=1), 0) << _RANDOM_BITS)


def is_plausible(ulid: UUID, *, now: datetime) -> bool:
    """Whether it can have been made by an honest node: after 2024-01-01, at most 24 h ahead."""
    return EARLIEST <= moment_of(ulid) <= now + MAX_AHEAD


def tick_above(ulid: UUID) -> int:
    """The lowest tick of the hybrid clock whose ULIDs are all greater."""
    return (ulid.int >> _TICK_SHIFT) + 1


def milliseconds_of_tick(tick: int) -> int:
    """The Unix milliseconds at which the hybrid clock stands."""
    return tick >> _COUNTER_BITS


def following(ulid: UUID) -> UUID:
    """The next greater one."""
    return UUID(int=ulid.int + 1)
