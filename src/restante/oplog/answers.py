"""
What peers answer, decoded within bounds: pages of their logs and of snapshots, and headers.

Everything raises PeerUnreachable for what is not as it should be.
"""

import asyncio
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TypeVar

import msgspec
from msgspec import Raw

from restante.errors import PeerUnreachable
from restante.wire import oplog as wire

T = TypeVar("T")

# What a page may hold; ours and those of the existing program have less.
_MAX_OPS = 20_000
_MAX_RECORDS = 1_000_000
_MAX_VALUES = 10_000_000
# It takes a few milliseconds at most to decode.
_SMALL_BODY_BYTES = 256 * 1024

_OPS = msgspec.json.Decoder(list[wire.Op])
_OP = msgspec.json.Decoder(wire.Op)


async def in_thread_if_large(decode: Callable[[bytes], T], body: bytes) -> T:
    """Decode a body; a large one takes tenths of a second, in which others have their turns."""
    if len(body) <= _SMALL_BODY_BYTES:
        return decode(body)
    return await asyncio.to_thread(decode, body)


def ops(body: bytes) -> tuple[list[wire.Op], int]:
    """
    The ops, and how many have another shape; raises PeerUnreachable if it is no array.

    Values are counted before they are decoded: a page of commas would take gigabytes.
    """
    _check_values(body)
    found, unreadable = _readable(body)
    if len(found) + unreadable > _MAX_OPS or sum(len(op.data) for op in found) > _MAX_RECORDS:
        raise PeerUnreachable(
            f"Its answer has more than {_MAX_OPS} ops, or more than {_MAX_RECORDS} records."
        )
    for op in found:
        op.data = [_unquoted(record) for record in op.data]
    return found, unreadable


def _unquoted(record: Raw) -> Raw:
    """A record that is JSON to Postgres only travels as a string."""
    if not bytes(record).startswith(b'"'):
        return record
    return Raw(msgspec.json.decode(record, type=str).encode())


def _check_values(body: bytes) -> None:
    if sum(body.count(mark) for mark in (b",", b"[", b"{")) > _MAX_VALUES:
        raise PeerUnreachable(f"Its answer has more than {_MAX_VALUES} values.")


def snapshot_page(body: bytes) -> wire.SnapshotPage:
    """A page of a snapshot, with the same bound."""
    _check_values(body)
    page = decoded(body, wire.SnapshotPage)
    for entry in page.entries:
        entry.data = _unquoted(entry.data)
    return page


def _readable(body: bytes) -> tuple[list[wire.Op], int]:
    try:
        return _OPS.decode(body), 0
    except (msgspec.ValidationError, UnicodeDecodeError, RecursionError):
        pass  # one of them is to blame
    except msgspec.DecodeError as error:
        raise _not_json() from error
    readable = list[wire.Op]()
    raw = decoded(body, list[Raw])
    for one in raw:
        try:
            readable.append(_OP.decode(one))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            continue
    return readable, len(raw) - len(readable)


def decoded(body: bytes, shape: type[T]) -> T:
    """Any other answer."""
    try:
        return msgspec.json.decode(body, type=shape)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _not_json() from error


def _not_json() -> PeerUnreachable:
    return PeerUnreachable("Its answer is not the JSON that was asked for, or breaks off.")


def tables_of(said: Mapping[str, str], header: str) -> list[str]:
    """The tables that a header lists; one that is unreadable must not be overlooked."""
    text = said.get(header)
    return decoded(text.encode(), list[str]) if text else []


def skew_seconds(said: Mapping[str, str], now: datetime) -> float | None:
    """How far the peer's clock was ahead when its answer began to arrive."""
    try:
        if milliseconds := said.get(wire.SERVER_TIME):
            return (
                datetime.fromtimestamp(int(milliseconds) / 1000, UTC).timestamp() - now.timestamp()
            )
        if date := said.get("Date"):
            # It has whole seconds, so on average half of one is missing.
            return parsedate_to_datetime(date).timestamp() + 0.5 - now.timestamp()
    except (ValueError, OverflowError, OSError):
        return None
    return None
