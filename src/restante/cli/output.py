"""How the commands print tables, JSON, byte counts and durations."""

import json
import shutil

import msgspec
import rich.console

from restante.text import shown_bytes

__all__ = ["Console", "json_text", "shown_bytes", "shown_seconds"]


class Console(rich.console.Console):
    """Prints tables and progress; a closed pipe ends the command as it does without a console."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError

    @property
    def size(self) -> rich.console.ConsoleDimensions:
        """The width and height; Rich would take any dumb terminal for one of 80 columns."""
        if not self.is_dumb_terminal:
            return super().size
        return rich.console.ConsoleDimensions(*shutil.get_terminal_size())

    @size.setter
    def size(self, new_size: tuple[int, int]) -> None:
        self._width, self._height = new_size


def json_text(value: object, *, indent: int = -1) -> str:
    """
    The value as JSON, on one line unless `indent` is given.

    Control characters are escaped, so that the output is safe to print on a terminal.
    """
    encoded = msgspec.json.format(msgspec.json.encode(value), indent=indent)
    text = encoded.decode(errors="replace")
    return "".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text)


def shown_seconds(seconds: float) -> str:
    """A duration in a readable unit."""
    for limit, length, unit in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds / 86_400:.1f} days"
