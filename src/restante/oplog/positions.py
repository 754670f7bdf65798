"""
A position in the op log: era, transaction id, ULID, and the record within the op.

Its text sorts like the position itself, so tables and SQL compare texts.
"""

import re
from dataclasses import dataclass
from uuid import UUID

from restante.oplog import ulids

_TEXT = re.compile(
    r"(?P<era>[0-9a-f]{16})-(?P<xid>[0-9a-f]{16})-(?P<ulid>[0-9A-Z]{26})-(?P<n>[0-9a-f]{8})",
    re.ASCII,
)
_MAX_BIGINT = 2**63 - 1
MAX_N = 2**31 - 1


@dataclass(frozen=True, slots=True, order=True)
class Position:
    """The place of one logged record; everything up to and including it has been read."""

    era: int
    xid: int
    ulid: UUID
    n: int

    def __str__(self) -> str:
        return f"{self.era:016x}-{self.xid:016x}-{ulids.text_of(self.ulid)}-{self.n:08x}"


START = Position(0, 0, ulids.LOWEST, 0)


def parsed(text: str) -> Position | None:
    """The position that a text is; None if it is none."""
    found = _TEXT.fullmatch(text)
    if found is None or (ulid := ulids.parsed(found["ulid"])) is None:
        return None
    position = Position(int(found["era"], 16), int(found["xid"], 16), ulid, int(found["n"], 16))
    if max(position.era, position.xid) > _MAX_BIGINT or position.n > MAX_N:
        return None
    return position
