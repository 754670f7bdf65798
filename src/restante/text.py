"""
Text of somebody else: what is invisible in it, where it can be cut, how it is printed.

And numbers in words for people.
"""

import re
import unicodedata

# Persian and many emoji need them.
JOINERS = "\u200c\u200d"
# Between left-to-right and right-to-left text: they belong to the spelling of many languages.
DIRECTION_MARKS = "\u061c\u200e\u200f"

# Control characters, line separators, surrogates, and what is invisible or changes the order of the
# text around it.  Joiners and direction marks are not among them.
_INVISIBLE = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\u180e\u200b\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff"
    "\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e007f]"
)
_SKIN_TONES = "\U0001f3fb\U0001f3fc\U0001f3fd\U0001f3fe\U0001f3ff"
_MAX_CLUSTER = 32  # marks on one letter; more are cut apart
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def without_invisible(text: str) -> str:
    """The text as it looks: nothing in it hides, or changes the order of the rest."""
    return _INVISIBLE.sub("", text)


def cut(text: str, max_length: int) -> str:
    """At most this many characters, without a lost accent or half an emoji."""
    end = min(max_length, len(text))
    for place in range(end, max(end - _MAX_CLUSTER, 0), -1):
        if place == len(text) or not _continues(text[place - 1], text[place]):
            return text[:place]
    return text[:end]


def _continues(before: str, character: str) -> bool:
    """Whether a character belongs to the one before it."""
    is_mark = unicodedata.category(character).startswith("M") or character in _SKIN_TONES
    return is_mark or character in JOINERS or before == JOINERS[1]


MAX_QUOTED = 100  # characters of what somebody sent, in a sentence of ours


def printable(text: str, *, max_length: int | None = None) -> str:
    """
    Replace every character that a terminal could interpret, line breaks included, with a space.

    A text longer than `max_length` is cut there and ends with an ellipsis.
    """
    shown = "".join(
        character if character.isprintable() else " " for character in text[:max_length]
    )
    return shown if len(shown) == len(text) else shown + "…"


def number_of(count: int, noun: str) -> str:
    """A number of things, in words for people."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def number_of_files(count: int) -> str:
    """A number of files, in words for people."""
    return number_of(count, "file")


def shown_bytes(size: float) -> str:
    """A byte count in a readable unit."""
    for unit in _UNITS:
        if abs(size) < 1024 or unit == _UNITS[-1]:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError
