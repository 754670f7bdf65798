"""Tables and labelled lines of plain text that fit the terminal, whatever the text in them is."""

import shutil
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TypeAlias
from uuid import UUID

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

from restante.text import printable

Names: TypeAlias = Mapping[UUID, str]  # what to call workspaces
NAME_CELLS = 40  # of a name in a sentence

_GAP = "  "
_LEAST_CELLS = 8  # of the last column, however narrow the terminal is
_MARKS_PER_CELL = 4  # a letter can have any number of them, and they take no room


def terminal_width() -> int | None:
    """How many columns standard output has; None if it is no terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def within(text: str, cells: int) -> str:
    """The text without anything that a terminal interprets, cut to so many cells."""
    text = printable(text)
    if cell_len(text) <= cells and len(text) <= cells * _MARKS_PER_CELL:
        return text
    return set_cell_size(text[: cells * _MARKS_PER_CELL], cells - 1).rstrip() + "…"


def print_table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: Sequence[int] = (),
    below: Mapping[int, str] = MappingProxyType({}),
    indent: int = 0,
) -> None:
    """
    Print aligned columns; those with the numbers `right` end together.

    Below the rows with these numbers there is a line of their own, for what must not be cut.

    The last column has what others have written, such as names.  It is last because text from right
    to left would move what follows it.  On a terminal it is cut to what is left of the width; in a
    pipe nothing is cut.
    """
    fixed = [max(cell_len(row[number]) for row in (head, *rows)) for number in range(len(head) - 1)]
    width = terminal_width()
    left = None
    if width is not None:
        left = max(width - indent - sum(fixed) - len(_GAP) * len(fixed), _LEAST_CELLS)
    for place, row in enumerate((head, *rows)):
        cells = [
            _padded(cell, size, is_right=number in right)
            for number, (cell, size) in enumerate(zip(row, fixed, strict=False))
        ]
        last = printable(row[-1]) if left is None else within(row[-1], left)
        print(" " * indent + _GAP.join([*cells, last]).rstrip())
        if place - 1 in below:
            print(f"{_GAP}{below[place - 1]}")


def _padded(text: str, cells: int, *, is_right: bool) -> str:
    pad = " " * (cells - cell_len(text))
    return pad + text if is_right else text + pad


def print_labelled(lines: Sequence[tuple[str, str]]) -> None:
    """Print a label and a text per line; a long text goes on below itself."""
    size = max(len(label) for label, _ in lines)
    for label, text in lines:
        for number, part in enumerate(wrapped(text, indent=size + len(_GAP))):
            print(f"{label if number == 0 else '':{size}}{_GAP}{part}".rstrip())


def wrapped(text: str, *, indent: int = 0) -> list[str]:
    """The text in lines that fit the terminal beside the indent; whole in a pipe."""
    width = terminal_width()
    if width is None:
        return [text]
    lines = Text(text).wrap(Console(), max(width - indent, _LEAST_CELLS), overflow="fold")
    return [line.plain.rstrip() for line in lines]


def print_sentence(text: str) -> None:
    """Print a sentence, broken between words on a terminal."""
    print("\n".join(wrapped(text)))
