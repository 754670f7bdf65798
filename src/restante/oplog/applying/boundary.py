"""
What is refused of an incoming op before anything is looked up: pure checks, pulled or pushed.

A refused op is counted with its reason, and the rest of its page goes on.
"""

import json
from collections.abc import Container
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Protocol, cast
from uuid import UUID

import msgspec
from msgspec import Raw

from restante.oplog import ulids
from restante.wire.oplog import Op

# A page has at most 64 MiB.  A record larger than this would take several times its size.
MAX_RECORD_BYTES = 32 * 1024 * 1024
MAX_HOST = 255

_FIELDS = msgspec.json.Decoder(dict[str, Raw])

Fields = dict[str, Raw]


class Refusal(StrEnum):
    """Why an op, or a record of it, is not taken."""

    ULID = "ulid"  # it cannot be read
    TIME = "time"  # before 2024-01-01, or more than 24 h ahead
    TABLE = "table"  # it is not tracked here
    FORBIDDEN_TABLE = "forbidden_table"  # the peer may not send it
    HOST = "host"  # not the peer's to speak for
    OWN_NAME = "own_name"  # in our name, of a time of which we know all that we made
    DATA = "data"  # no JSON object, or without its key
    TOO_LARGE = "too_large"


class Sender(Protocol):
    """What a peer may send."""

    def may_see(self, table: str) -> bool: ...
    def may_relay(self, origin: str) -> bool: ...


@dataclass(frozen=True, slots=True)
class Boundary:
    """What is taken from one sender."""

    sender: Sender
    own_host: str
    tables: Container[str]
    now: datetime

    def refusal(self, op: Op, *, origin: str) -> Refusal | None:
        """
        Why an op is refused as a whole; None if it is not.

        `origin` is its host, normalised.  Our own ops may come back from anybody: after a restore
        only others still have them.  Those that cannot be ours are refused when they are judged.
        """
        if (ulid := ulids.parsed(op.ulid)) is None:
            return Refusal.ULID
        if not ulids.is_plausible(ulid, now=self.now):
            return Refusal.TIME
        if not is_host(origin):
            return Refusal.HOST
        if origin != self.own_host and not self.sender.may_relay(origin):
            return Refusal.HOST
        if op.table not in self.tables:
            return Refusal.TABLE
        return None if self.sender.may_see(op.table) else Refusal.FORBIDDEN_TABLE


def is_host(origin: str) -> bool:
    """Whether a node can have this name."""
    return 0 < len(origin) <= MAX_HOST and "\0" not in origin


def decoded(record: Raw) -> tuple[str, Fields] | Refusal:
    """A record as text, and its fields as JSON texts; or why it is refused."""
    sent = bytes(record)
    if len(sent) > MAX_RECORD_BYTES:
        return Refusal.TOO_LARGE
    try:
        return sent.decode(), _FIELDS.decode(sent)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _decoded_loosely(sent)


def _decoded_loosely(sent: bytes) -> tuple[str, Fields] | Refusal:
    """A record with halves of surrogate pairs, which Postgres takes in columns of type json."""
    try:
        text = sent.decode()
        fields = json.loads(text)
    except (ValueError, RecursionError):
        return Refusal.DATA
    if not isinstance(fields, dict):
        return Refusal.DATA
    named = cast("dict[str, object]", fields)
    return text, {name: Raw(json.dumps(value).encode()) for name, value in named.items()}


def ulid_of(op: Op) -> UUID:
    """The ULID of an op that was not refused."""
    ulid = ulids.parsed(op.ulid)
    assert ulid is not None  # noqa: S101 - it was checked
    return ulid
