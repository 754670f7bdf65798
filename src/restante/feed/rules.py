"""Rows of a feed, its marks, and how messages are stored."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, cast
from uuid import UUID

from restante import wire

RECEIVED = "a2a_receive"
MAX_PAGE = 500
DEFAULT_PAGE = 100
LONGEST_LOOK_BACK_SECONDS = 30 * 24 * 3600
LONGEST_WAIT_SECONDS = 60


@dataclass(frozen=True, slots=True)
class NewActivity:
    """A row to be appended; the commit gives it its seq."""

    method: str
    summary: str
    request_body: bytes  # JSON
    source_id: UUID | None = None
    activity_type: str = RECEIVED
    status: str = "ok"


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


EVERYTHING = Filter()


@dataclass(frozen=True, slots=True)
class Page:
    """Rows, and the marks as they were after the rows were read."""

    rows: Sequence[wire.ActivityRow]
    marks: Marks


def with_kinds(message: Mapping[str, Any]) -> dict[str, Any]:
    """
    A JSON-RPC body whose message parts have a `kind`.

    Older senders call it `type`; a part that has both keeps its `kind`.
    """
    body = dict(message)
    params = body.get("params")
    if isinstance(params, dict):
        body["params"] = _renamed_in(cast("dict[str, Any]", params))
    return _with_parts_renamed(body)


def _renamed_in(params: Mapping[str, Any]) -> dict[str, Any]:
    renamed = _with_parts_renamed(params)
    message = renamed.get("message")
    if isinstance(message, dict):
        renamed["message"] = _with_parts_renamed(cast("dict[str, Any]", message))
    return renamed


def _with_parts_renamed(holder: Mapping[str, Any]) -> dict[str, Any]:
    parts = holder.get("parts")
    if not isinstance(parts, list):
        return dict(holder)
    return {**holder, "parts": [_renamed(part) for part in cast("list[Any]", parts)]}


def _renamed(part: Any) -> Any:
    if not isinstance(part, dict) or "type" not in part or "kind" in part:
        return cast("Any", part)
    return {
        ("kind" if key == "type" else key): value
        for key, value in cast("dict[str, Any]", part).items()
    }
