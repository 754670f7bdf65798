"""The output of `restante send`: a line for each file, a live line on a terminal, a summary."""

import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate

from rich.console import Console

from restante import wire
from restante.cli.lines import print_file
from restante.cli.live import Speed, Transfer, live_line
from restante.cli.output import shown_bytes, shown_seconds
from restante.text import number_of_files


class SentLines:
    """Shows some files on their way; `names` are those that the user knows."""

    def __init__(
        self,
        console: Console,
        names: Sequence[str],
        sizes: Sequence[int],
        *,
        is_quiet: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console
        self._names = names
        self._ends = list(accumulate(sizes))
        self._is_quiet = is_quiet
        self._clock = clock
        self._began_at = clock()
        self._speed = Speed()
        self._accepted = self._accepted_bytes = self._sent = 0

    @contextmanager
    def live(self) -> Iterator[None]:
        """Show the live line, if this is a terminal."""
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            with live_line(self._console, self.line):
                yield
        else:
            yield

    def line(self, columns: int) -> str:
        """The live line for now."""
        total = self._ends[-1]
        place = min(bisect_right(self._ends, self._sent), len(self._ends) - 1)
        transfer = Transfer(
            "sending", place + 1, len(self._ends), self._sent, total, self._names[place]
        )
        return transfer.line(self._speed.per_second(self._clock()), columns)

    def sent(self, size: int) -> None:
        """So many bytes of this request were sent; a retry starts again at 0."""
        before = self._ends[self._accepted - 1] if self._accepted else 0
        self._sent = before + size
        self._speed.note(self._clock(), self._sent)

    def accepted(self, count: int, files: Sequence[wire.StagedFile]) -> None:
        """A request with so many files has succeeded; the server calls them so."""
        names = self._names[self._accepted : self._accepted + count]
        self._accepted += count
        for name, file in zip(names, files, strict=False):
            self._accepted_bytes += file.size
            renamed = file.display_name or file.name  # a server of before sends only the name
            if not self._is_quiet:
                print_file(self._console, "sent", file.size, name, renamed=renamed)

    def summary(self) -> None:
        """The totals, at the end; nothing if no file was sent."""
        if not self._accepted or self._is_quiet:
            return
        count, all_files = self._accepted, len(self._names)
        files = number_of_files(count) if count == all_files else f"{count} of {all_files} files"
        seconds = self._clock() - self._began_at
        took = f" in {shown_seconds(seconds)}" if seconds >= 1 else ""
        text = f"{files} sent, {shown_bytes(self._accepted_bytes)}{took}."
        self._console.print(text, highlight=False, soft_wrap=True)
