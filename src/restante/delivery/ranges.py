"""Byte ranges and entity tags of HTTP."""

import re
from dataclasses import dataclass

from restante.errors import RangeNotSatisfiable

# Longer headers are not parsed: a range needs few characters, and nobody has so many versions.
_MAX_RANGE = 100
_MAX_TAGS = 4096

_SINGLE = re.compile(
    r"bytes=\s*(?P<first>\d{0,19})-(?P<last>\d{0,19})\s*", re.IGNORECASE | re.ASCII
)


@dataclass(frozen=True, slots=True)
class ByteRange:
    """From the first byte to the last, both included."""

    first: int
    last: int

    @property
    def length(self) -> int:
        return self.last - self.first + 1


def wanted_range(header: str | None, size: int) -> ByteRange | None:
    """
    The one range a client asks for, or None for the whole file.

    A range that cannot be parsed, or several at once, counts as none, as RFC 9110 allows.  Raises
    RangeNotSatisfiable for a range that begins after the end.
    """
    match = _SINGLE.fullmatch(header or "") if len(header or "") <= _MAX_RANGE else None
    if match is None or match["first"] == match["last"] == "":
        return None
    if match["first"] == "":
        length = int(match["last"])
        return _checked(ByteRange(max(size - length, 0), size - 1), size)
    first = int(match["first"])
    last = min(int(match["last"]), size - 1) if match["last"] else size - 1
    if match["last"] and int(match["last"]) < first:
        return None
    return _checked(ByteRange(first, last), size)


def _checked(found: ByteRange, size: int) -> ByteRange:
    if found.first >= size or found.length <= 0:
        raise RangeNotSatisfiable(
            f"The file has {size} bytes; the range is outside of it.", size=size
        )
    return found


def matches_tag(header: str | None, tag: str) -> bool:
    """Whether an If-None-Match or If-Range header names this entity tag; one too long does not."""
    if len(header or "") > _MAX_TAGS:
        return False
    given = [part.strip().removeprefix("W/") for part in (header or "").split(",")]
    return tag in given or given == ["*"]
