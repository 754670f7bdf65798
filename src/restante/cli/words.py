"""The text of a message on the command line: an argument, or standard input."""

import sys

from restante import wire
from restante.errors import BadRequest, MessageTooLarge

STANDARD_INPUT = "-"


def text_given(argument: str | None) -> str:
    """
    The argument; standard input for `-`, and for nothing if it is not a terminal.

    Raises BadRequest if it is empty or not text, MessageTooLarge if it is too long.
    """
    from restante.client.messages import checked_text

    if argument is None and sys.stdin.isatty():
        raise BadRequest("Say something: give a text, or - to read it from standard input.")
    if argument in {None, STANDARD_INPUT}:
        return checked_text(_standard_input())
    return checked_text(argument or "")


def _standard_input() -> str:
    from restante.client.messages import text_from

    raw = sys.stdin.buffer.read(wire.MAX_MESSAGE_BYTES + 1)
    if len(raw) > wire.MAX_MESSAGE_BYTES:
        raise MessageTooLarge(
            f"Standard input has more than {wire.MAX_MESSAGE_BYTES} bytes, the limit of a message: "
            "send it as a file."
        )
    return text_from(raw)
