"""Which events a row of a feed becomes for those who watch it."""

from typing import TypeAlias

import msgspec
from msgspec import Raw, Struct

from restante import wire

RowEvent: TypeAlias = wire.Event | wire.AgentEvent
WatchedEvent: TypeAlias = RowEvent | wire.NodeEvent


class _Part(Struct, frozen=True):
    file: wire.Attachment | None = None


class _Answer(Struct, frozen=True):
    result: str
    parts: list[_Part] = []


_decoder = msgspec.json.Decoder(_Answer)


def events_of(row: wire.ActivityRow, name: str) -> list[RowEvent]:
    """
    The events of a row, for a workspace with this name.

    The last one is of the row itself: a watcher that has seen it has seen all.
    """
    logged = wire.Event("ACTIVITY_LOGGED", row.workspace_id, row.created_at, row)
    answer = _answer(row)
    if answer is None:
        return [logged]
    files = [part.file for part in answer.parts if part.file]
    message = wire.AgentMessage(answer.result, row.workspace_id, name, files)
    return [wire.AgentEvent("AGENT_MESSAGE", row.workspace_id, row.created_at, message), logged]


def may_be_answer(row: wire.ActivityRow) -> bool:
    """Whether a name is needed for the events of this row."""
    return row.method == wire.NOTIFY and row.response_body != Raw(b"null")


def _answer(row: wire.ActivityRow) -> _Answer | None:
    """What the agent says; a message that somebody sends with this method has no such body."""
    if not may_be_answer(row):
        return None
    try:
        return _decoder.decode(row.response_body)
    except msgspec.MsgspecError:
        return None
