"""What standard input gives: the text of a message, or a file to send."""

import sys
import tempfile
from typing import TYPE_CHECKING

from restante import wire
from restante.errors import BadRequest, FileTooLarge, FileUnreadable, MessageTooLarge

if TYPE_CHECKING:
    from contextlib import ExitStack

    from restante.client.sending import Outgoing

STANDARD_INPUT = "-"
_PIECE_BYTES = 256 * 1024


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


def stored_input(max_bytes: int, until: "ExitStack") -> "Outgoing":
    """
    Standard input as a file that can be read again, kept until the end of `until`.

    An upload says its length first, and is repeated after a lost connection.
    """
    from restante.client.sending import Outgoing

    stored = until.enter_context(tempfile.NamedTemporaryFile())  # noqa: SIM115 - by `until`
    size = 0
    try:
        while piece := sys.stdin.buffer.read(_PIECE_BYTES):
            size += len(piece)
            if size > max_bytes:
                raise FileTooLarge(
                    f"Standard input has more than {max_bytes} bytes, the server's limit for a "
                    "file."
                )
            stored.write(piece)
        stored.flush()
    except OSError as error:
        where = tempfile.gettempdir()
        raise FileUnreadable(f"Standard input cannot be stored in {where}: {error}.") from error
    if not size:
        raise BadRequest("Standard input is empty, and empty files cannot be sent.")
    return Outgoing.of(stored.name)
