"""A request as one line on a terminal; programs get all fields, as JSON."""

import os
import re
import sys
from collections.abc import Mapping
from typing import Any

from rich.cells import cell_len, set_cell_size

from restante.text import printable, shown_bytes, without_invisible

MIN_COLUMNS, MAX_COLUMNS = 60, 100
_NAME_COLUMNS = 16
_ID = re.compile(r"([0-9a-fA-F]{8})-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}")
_COLORS = {2: 32, 3: 32, 4: 33, 5: 31}  # green, yellow, red


def columns() -> int:
    """The width of the terminal, within bounds; it may change at any time."""
    try:
        width = os.get_terminal_size(sys.stderr.fileno()).columns
    except (OSError, ValueError):
        return MAX_COLUMNS
    return max(MIN_COLUMNS, min(MAX_COLUMNS, width))


def request_line(event: Mapping[str, Any], *, width: int, colors: bool) -> str:
    """Time, status, method, path, the workspace's name, bytes, time taken: in so many columns."""
    head = f"{event['timestamp']} {event['status']} {event['method']:<6} "
    size = event["bytes_in"] + event["bytes_out"]
    tail = f" {shown_bytes(size) if size else '':>8} {_taken(event['seconds']):>7}"
    room = width - len(head) - len(tail)
    name_columns = min(_NAME_COLUMNS, room // 3)
    path = _shortened(event["path"], room - name_columns - 1)
    name = _name(event.get("name", ""), name_columns)
    line = f"{head}{path} {name}{tail}"
    return _colored(line, event["status"], len(event["timestamp"]) + 1) if colors else line


def _taken(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 10 else f"{seconds:.0f} s"


def _shortened(path: str, width: int) -> str:
    """Safe to print, and with as much of its ids, its beginning and its middle as fits."""
    path = "".join(c if "!" <= c <= "~" or c == "…" else f"\\x{ord(c):02x}" for c in path)
    without_ids = _ID.sub("…", path)
    # The name says whose it is.
    steps = (_ID.sub(r"\1…", path), without_ids, without_ids.replace("/workspaces/…", "…", 1))
    fitting = next((step for step in steps if len(step) <= width), None)
    return f"{fitting or _without_middle(steps[-1], width):<{width}}"


def _without_middle(path: str, width: int) -> str:
    begin, end = path[: (width - 1) // 2].rstrip("…"), path[-(width // 2) :].lstrip("…")
    return f"{begin}…{end}"


def _name(name: str, width: int) -> str:
    """Some characters are two columns wide."""
    name = printable(without_invisible(name))
    if cell_len(name) > width:
        name = set_cell_size(name, width - 1).rstrip() + "…"
    return set_cell_size(name, width)


def _colored(line: str, status: int, at: int) -> str:
    color = _COLORS.get(status // 100, 0)
    return f"{line[:at]}\x1b[{color}m{line[at : at + 3]}\x1b[0m{line[at + 3 :]}"
