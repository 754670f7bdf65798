"""Messages: which of them are repetitions, and the row of what an agent tells its user."""

import hashlib
from datetime import datetime, timedelta
from uuid import UUID

import msgspec

from restante import wire
from restante.database.spans import floor
from restante.feed.rules import CLOCK_SKEW, NewActivity
from restante.text import printable

_SUMMARY_CHARACTERS = 80
# For so long a message with the same id is a repetition.
REMEMBERED = timedelta(days=1)
ID_SLOT = timedelta(hours=6)


def id_slots(now: datetime) -> tuple[datetime, datetime]:
    """
    The slots in which the id of a message is remembered; often both are the same.

    Two messages at the same time share one, although they may be at both sides of a slot's end and
    the clocks of their servers differ: near the end, an id is in the next slot too.
    """
    return floor(now, ID_SLOT), floor(now + CLOCK_SKEW, ID_SLOT)


def remembered_since(now: datetime) -> tuple[datetime, datetime]:
    """Since when ids are remembered: the time, and its slot."""
    return now - REMEMBERED, floor(now - REMEMBERED, ID_SLOT)


def digest_of(sender: UUID | None, method: str, message_id: str) -> UUID:
    """
    What tells a message to one workspace from all others; the canvas (None) is a sender too.

    The parts cannot run into each other: a method that is stored has no line breaks.
    """
    named = f"{sender or 'canvas'}\n{method}\n{message_id}"
    return UUID(bytes=hashlib.sha256(named.encode()).digest()[:16])


def notification(sent: wire.Notification) -> NewActivity:
    """
    The row for what an agent tells its user.

    It has no source: together with the messages of the canvas it is their conversation.
    """
    files = [{"kind": "file", "file": one} for one in sent.attachments or ()]
    return NewActivity(
        method=wire.NOTIFY,
        summary="Agent message: " + printable(sent.message[:_SUMMARY_CHARACTERS]),
        request_body=None,
        response_body=msgspec.json.encode({"result": sent.message, "parts": files}),
    )
