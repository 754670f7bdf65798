"""
Lines for people: one per file, and how they fit the width of a terminal.

Names come last in a line: wide letters, or letters that are written from right to left, then move
nothing else.  In a pipe there is no width, and nothing is shortened.
"""

import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.cells import cell_len, get_character_cell_size
from rich.console import Console
from rich.text import Text

from restante.text import printable, shown_bytes

_VERB_COLUMNS = 8
_SIZE_COLUMNS = 10  # 1023.9 MiB
_MAX_TAIL = 16  # columns for the end of a shortened name, where its extension is
INDENT_COLUMNS = 8
_WORDS = re.compile(r"(?:`[^`]*`|[^ `]|`)+")
_SEPARATOR = " · "


def shortened(text: str, columns: int) -> str:
    """The text if it fits, otherwise its beginning and its end."""
    if cell_len(text) <= columns:
        return text
    tail_columns = min(max(columns, 0) // 3, _MAX_TAIL)
    tail = _beginning(text[::-1], tail_columns)[::-1]
    return f"{_beginning(text, columns - 1 - tail_columns)}…{tail}"


def _beginning(text: str, columns: int) -> str:
    for place, character in enumerate(text):
        columns -= get_character_cell_size(character)
        if columns < 0:
            return text[:place]
    return text


def file_line(
    verb: str, size: int, name: str, *, renamed: str = "", columns: int | None = None
) -> str:
    """What became of a file: the verb, the size, the name, and its other name if it got one."""
    start = f"{verb:<{_VERB_COLUMNS}}  {shown_bytes(size):>{_SIZE_COLUMNS}}  "
    names = [printable(name)] + ([printable(renamed)] if renamed and renamed != name else [])
    if columns is not None:
        names = _fitted(names, columns - len(start))
    return start + " as ".join(names)


def print_file(console: Console, verb: str, size: int, name: str, *, renamed: str = "") -> None:
    """Print the line of a file, shortened on a terminal, whole elsewhere."""
    columns = console.width if console.is_terminal else None
    line = Text(file_line(verb, size, name, renamed=renamed, columns=columns))
    line.stylize("green", 0, _VERB_COLUMNS)
    console.print(line, soft_wrap=True)


def _fitted(names: Sequence[str], columns: int) -> list[str]:
    """The names within this width together; a short one leaves its room to the other."""
    if len(names) == 1:
        return [shortened(names[0], columns)]
    columns -= len(" as ")
    first, second = (cell_len(name) for name in names)
    half = columns // 2
    room = max(half, columns - second), max(columns - half, columns - first)
    return [shortened(name, wide) for name, wide in zip(names, room, strict=True)]


def fitting(parts: Sequence[str], columns: int, *, order: Sequence[int]) -> str:
    """
    The parts in one line, without those that do not fit.

    `order` lists the parts that may be left out, the first to leave first.
    """
    kept = dict(enumerate(parts))
    for place in order:
        if cell_len(_joined(kept.values())) <= columns:
            break
        kept.pop(place, None)
    return shortened(_joined(kept.values()), columns)


def _joined(parts: Iterable[str]) -> str:
    return _SEPARATOR.join(part for part in parts if part)


def wrapped(line: str, console: Console) -> list[str]:
    """The line; on a terminal in pieces that fit, below a first column of INDENT_COLUMNS."""
    if not console.is_terminal or cell_len(line) <= console.width:
        return [line]
    width = max(console.width - INDENT_COLUMNS, INDENT_COLUMNS)
    pieces = Text(line[INDENT_COLUMNS:]).wrap(console, width)
    heads = [line[:INDENT_COLUMNS]] + [" " * INDENT_COLUMNS] * (len(pieces) - 1)
    return [head + piece.plain.rstrip() for head, piece in zip(heads, pieces, strict=True)]


def sentence_lines(text: str, columns: int) -> list[str]:
    """A text broken at spaces, but not inside of `commands`, which are copied as they are."""
    lines = [""]
    for word in _WORDS.findall(text):
        if lines[-1] and cell_len(f"{lines[-1]} {word}") > columns:
            lines.append(word)
        else:
            lines[-1] += f" {word}" if lines[-1] else word
    return lines


def program() -> str:
    """How a user starts this program again: by its name if the shell finds it, else by its path."""
    started = Path(sys.argv[0])
    found = shutil.which(started.name)
    if found and Path(found).resolve() == started.resolve():
        return started.name
    return os.fspath(started.absolute()) if started.name == "restante" else "restante"


def shell_command(words: Sequence[str]) -> str:
    """A command of this program that can be pasted into a shell."""
    return shlex.join([program(), *words])


def broken_command(command: str, columns: int) -> list[str]:
    """A command in lines of this width, if its words allow, that can be pasted together."""
    lines = [""]
    for word in map(shlex.quote, shlex.split(command)):
        if lines[-1] and len(lines[-1]) + len(word) + len("   \\") > columns:
            lines.append("  ")
        lines[-1] += word if not lines[-1].strip() else f" {word}"
    return [f"{line} \\" for line in lines[:-1]] + lines[-1:]
