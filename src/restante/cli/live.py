"""The live line below the others on a terminal: how far a transfer is, and how long it takes."""

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from rich.console import Console
from rich.live import Live
from rich.text import Text

from restante.cli.lines import fitting
from restante.cli.output import shown_bytes, shown_seconds
from restante.text import number_of_files, printable

_REFRESHES_PER_SECOND = 8
# Long enough to be steady, short enough to follow a network that becomes slower.
_WINDOW_SECONDS = 15.0
_MIN_SECONDS = 0.5
_MAX_NAME = 60
# What leaves a narrow line first: the name, the bytes, the speed, the percentage.
_LEAST_IMPORTANT_FIRST = (5, 2, 3, 1)


class Speed:
    """Bytes per second over the last seconds."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()

    def note(self, now: float, total: int) -> None:
        """So many bytes have been transferred; fewer than before is a new start."""
        if self._samples and total < self._samples[-1][1]:
            self._samples.clear()
        self._samples.append((now, total))
        while now - self._samples[0][0] > _WINDOW_SECONDS:
            self._samples.popleft()

    def per_second(self, now: float) -> float | None:
        """None while too little is known."""
        if not self._samples or now - self._samples[0][0] < _MIN_SECONDS:
            return None
        first_at, first = self._samples[0]
        return (self._samples[-1][1] - first) / (now - first_at)


@dataclass(frozen=True, slots=True)
class Transfer:
    """How far a transfer of some files is."""

    verb: str
    file: int  # the number of the current one, from 1
    files: int
    done: int
    total: int
    name: str = ""

    def line(self, speed: float | None, columns: int) -> str:
        """The parts that fit this width; the file's number and the remaining time stay longest."""
        left = max(self.total - self.done, 0)
        parts = [
            f"{self.verb} {min(self.file, self.files)} of {number_of_files(self.files)}",
            f"{100 * self.done // self.total if self.total else 100} %",
            f"{shown_bytes(self.done)} of {shown_bytes(self.total)}",
            f"{shown_bytes(speed)}/s" if speed else "",
            f"{shown_seconds(left / speed)} left" if speed else "",
            printable(self.name, max_length=_MAX_NAME),
        ]
        return fitting(parts, columns, order=_LEAST_IMPORTANT_FIRST)


def live_line(console: Console, line: Callable[[int], str]) -> AbstractContextManager[object]:
    """Show what `line` returns for the terminal's width, until the context ends."""

    def render() -> Text:
        return Text(line(console.width), style="dim", no_wrap=True, overflow="ellipsis")

    return Live(
        console=console,
        get_renderable=render,
        refresh_per_second=_REFRESHES_PER_SECOND,
        transient=True,
    )
