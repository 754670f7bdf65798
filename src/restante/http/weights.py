"""
How costly a JSON body is to decode, counted while it arrives and before it is decoded.

A mebibyte of empty lists takes a hundred times as long to decode as a string of that length, and
the event loop stands still meanwhile.  So a body may have any strings that fit into it, but only so
many values, and only numbers that somebody could mean.
"""

from restante.errors import BadRequest, MessageTooLarge

MAX_VALUES = 25_000
MAX_DIGITS = 309  # the largest float has so many; long integers are decoded in quadratic time

_MAX_QUOTES = 4 * (MAX_VALUES + 1)  # each value may be a string, and have a name
_VALUES = (b",", b"[", b"{")  # each is followed by a value or by the end of an empty container
_TOO_MANY_DIGITS = b"0" * (MAX_DIGITS + 1)
_AS_ZEROS = bytes.maketrans(b"123456789", b"000000000")


class Weight:
    """The values and numbers of a body, piece by piece."""

    def __init__(self) -> None:
        self._values = 0
        self._quotes = 0
        self._in_string = False
        self._backslash = b""  # one at the end of a piece escapes the next piece's first byte
        self._last_outside = b""  # a number may be cut by the end of a piece

    def add(self, piece: bytes) -> None:
        """Count one more piece; raises MessageTooLarge or BadRequest once there is too much."""
        outside = self._outside_of_strings(piece)
        self._values += sum(outside.count(mark) for mark in _VALUES)
        if self._values > MAX_VALUES:
            raise _too_many_values()
        numbers = (self._last_outside + outside).translate(_AS_ZEROS)
        if _TOO_MANY_DIGITS in numbers:
            raise BadRequest(f"The body has a number of more than {MAX_DIGITS} digits.")
        self._last_outside = numbers[-MAX_DIGITS:]

    def _outside_of_strings(self, piece: bytes) -> bytes:
        unescaped = (self._backslash + piece).replace(rb"\\", b"").replace(rb"\"", b"")
        self._backslash = b"\\" if unescaped.endswith(b"\\") else b""
        self._quotes += unescaped.count(b'"')
        if self._quotes > _MAX_QUOTES:  # before it is split: each costs an object
            raise _too_many_values()
        between_quotes = unescaped.split(b'"')
        outside = between_quotes[1 if self._in_string else 0 :: 2]
        self._in_string ^= len(between_quotes) % 2 == 0
        return b"".join(outside)


def _too_many_values() -> MessageTooLarge:
    return MessageTooLarge(f"A JSON body may have {MAX_VALUES} values.", max_values=MAX_VALUES)
