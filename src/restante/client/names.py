"""
Turns a sender's name for a file into a name for the local disk.

The result is also safe where the file may be copied to: Windows, macOS, a memory stick.  The input
is hostile: a server may send anything.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable

from restante.text import DIRECTION_MARKS, JOINERS, cut, without_invisible

MAX_NAME_BYTES = 255

# More than any filesystem takes; normalising a longer text could be made expensive.
_MAX_CHARACTERS = 1024
_MAX_EXTENSION_BYTES = 32
_MAX_NUMBER = 1000

_FORBIDDEN = re.compile(r'[<>:"|?*\\/]')
_BREAKS = re.compile(r"[\t\n\r]")

# Windows opens a device for these, with any extension, even in a directory.
_DEVICE = re.compile(
    r"(con|prn|aux|nul|com[0-9¹²³]|lpt[0-9¹²³]|conin\$|conout\$|clock\$) *(\..*)?",
    re.IGNORECASE | re.DOTALL,
)


def local_name(name: str, max_bytes: int = MAX_NAME_BYTES) -> str:
    """
    A safe file name, as close to the given one as possible; the same again for its own result.

    It does not start with a dot, because a hidden file such as `.bashrc` can take effect unseen,
    nor with a dash, because `rm *` would read it as a flag.
    """
    text = _visible(_bounded(name.rpartition("/")[2]))
    text = _FORBIDDEN.sub("_", unicodedata.normalize("NFC", text))
    text = text.strip(JOINERS + " ").rstrip(JOINERS + ". ")
    if text[:1] in {".", "-"} or _DEVICE.fullmatch(text):
        text = "_" + text
    return _shortened(text, max_bytes) or "file"


def free_name(name: str, taken: Iterable[str], max_bytes: int = MAX_NAME_BYTES) -> str | None:
    """
    The first of `a.txt`, `a (2).txt`, `a (3).txt` ... that does not exist; None after many.

    Names that differ only in case or normalisation count as the same: they would overwrite each
    other on a disk that does not distinguish them.
    """
    keys = {_caseless(other) for other in taken}
    for number in range(1, _MAX_NUMBER):
        candidate = name if number == 1 else _shortened(name, max_bytes, f" ({number})")
        if _caseless(candidate) not in keys:
            return candidate
    return None


def distinct(names: Iterable[str]) -> list[str]:
    """The names in order; one that an earlier one would hide on some disk gets a number."""
    result, taken, numbers = list[str](), set[str](), Counter[str]()
    for name in names:
        candidate = name
        while _caseless(candidate) in taken:
            numbers[name] += 1
            candidate = _shortened(name, MAX_NAME_BYTES, f" ({numbers[name] + 1})")
        taken.add(_caseless(candidate))
        result.append(candidate)
    return result


def _bounded(name: str) -> str:
    """Without the middle of a very long name; its extension stays."""
    half = _MAX_CHARACTERS // 2
    return name if len(name) <= _MAX_CHARACTERS else name[:half] + name[-half:]


def _visible(text: str) -> str:
    """Without direction marks too: they can make two names look the same."""
    return "".join(
        " " if unicodedata.category(character) == "Zs" else character
        for character in without_invisible(_BREAKS.sub(" ", text))
        if character not in DIRECTION_MARKS
    )


def _caseless(name: str) -> str:
    return unicodedata.normalize(
        "NFC", unicodedata.normalize("NFD", name[:_MAX_CHARACTERS]).casefold()
    )


def _shortened(name: str, max_bytes: int, mark: str = "") -> str:
    """The name with a mark before its extension, cut before the mark if it is too long."""
    stem, extension = _split(name)
    stem_bytes = max_bytes - len((mark + extension).encode())
    if len(stem.encode()) > stem_bytes:
        fitting = stem.encode()[:stem_bytes].decode(errors="ignore")
        stem = cut(stem, len(fitting)).rstrip(". ")
    return stem + mark + extension


def _split(name: str) -> tuple[str, str]:
    stem, dot, extension = name.rpartition(".")
    is_extension = extension and " " not in extension and len(extension) < _MAX_EXTENSION_BYTES
    if not stem or not is_extension or len(extension.encode()) >= _MAX_EXTENSION_BYTES:
        return name, ""
    return stem, dot + extension
