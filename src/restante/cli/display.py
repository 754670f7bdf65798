"""The output of `restante connect`: a live line on a terminal, plain lines elsewhere."""

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import UUID

from rich.console import Console
from rich.text import Text

from restante.cli.lines import broken_command, fitting, print_file
from restante.cli.live import Speed, Transfer, live_line
from restante.cli.output import shown_bytes, shown_seconds
from restante.errors import RestanteError
from restante.text import number_of_files, printable

if TYPE_CHECKING:
    from restante.client.fetching import WaitingFile

# The protocol's form of a name; the digits say nothing to a person.
_WITH_DIGITS = re.compile(r"[0-9a-f]{32}-.+", re.DOTALL)


class Display:
    """One plain line for each event."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last_error = ""
        self._is_offline = False
        self._waiting_files = 0
        self.files = 0
        self.bytes = 0
        self.messages = 0

    def line(self, text: str, style: str = "") -> None:
        """Print a text without markup and control characters; a terminal breaks it at spaces."""
        self._console.print(
            printable(text),
            style=style,
            markup=False,
            emoji=False,
            highlight=False,
            soft_wrap=not self._console.is_terminal,
        )

    def began(self, url: str, workspace_id: UUID, folder: Path, name: str | None = None) -> None:
        """The workspace, its server and its folder; the name if this run has given it."""
        if name:
            self.line(f"Workspace {name}")
        self.line(f"{'Its id is' if name else 'Workspace'} {workspace_id}")
        self.line(f"Server {url}")
        self.line(f"Files appear in {folder}")

    def hint(self, command: str) -> None:
        """A command to try, which can be copied."""
        self.line("Try it in another terminal:")
        is_broken = self._console.is_terminal
        width = self._console.width - 2
        for line in broken_command(command, width) if is_broken else [command]:
            self._console.print(Text(printable(f"  {line}")), soft_wrap=True)

    def warn(self, sentence: str) -> None:
        """A problem that does not stop us."""
        self.line(f"Warning: {sentence}", style="yellow")

    def summary(self) -> None:
        """The totals, at the end."""
        messages = {0: "", 1: " 1 message."}.get(self.messages, f" {self.messages} messages.")
        self.line(f"{number_of_files(self.files)} received, {shown_bytes(self.bytes)}.{messages}")

    def queued(self, files: int, size: int) -> None:
        """How many files wait, and their bytes; several are announced when they come."""
        if files > 1 and not self._waiting_files:
            self.line(f"{files} files are waiting, {shown_bytes(size)}.")
        self._waiting_files = files

    def arriving(self, file: "WaitingFile") -> None:
        """A download begins."""

    def progress(self, received: int) -> None:
        """How many bytes of the file have arrived."""

    def ended(self) -> None:
        """The download ended, complete or not."""

    def delivered(self, file: "WaitingFile", path: Path) -> None:
        """The file is on disk and acknowledged."""
        self.files += 1
        self.bytes += file.size
        is_for_people = not self._console.is_terminal or not _WITH_DIGITS.fullmatch(path.name)
        renamed = path.name if is_for_people else ""
        print_file(self._console, "received", file.size, file.original_name, renamed=renamed)

    def gone(self, file: "WaitingFile") -> None:
        """The file was announced but can no longer be fetched."""
        self.line(f"gone: {file.original_name}, it expired or was received before", style="dim")

    def failed(self, what: str, error: RestanteError) -> None:
        """The file or message could not be received; it will be retried."""
        self.line(f"not taken: {what}: {error}", style="red")

    def message(self, method: str, text: str) -> None:
        """A message was received and its command, if any, succeeded."""
        self.messages += 1
        self.line(f"message {method}: {text}")

    def answered(self, text: str) -> None:
        """What the command of the message printed was sent as the answer."""
        self.line(f"answered: {text}")

    def missed(self, rows: int) -> None:
        """The server deleted feed rows before we read them."""
        self.line(f"{rows} feed rows were deleted before they were read.", style="red")

    def skipped(self, rows: int) -> None:
        """Our own mark is older than the one on the server."""
        self.line(
            f"{rows} feed rows were skipped: this workspace has acknowledged them before. "
            "The folder's own mark is older; it may be from a backup.",
            style="yellow",
        )

    def restored(self, repeated: int) -> None:
        """The server's feed ends before our mark, or has other rows."""
        self.line(
            "The server's feed is older than this folder; it was restored from a backup. "
            f"Continuing after the last acknowledged row: up to {repeated} rows come again.",
            style="yellow",
        )

    def again(self, file: "WaitingFile") -> None:
        """A file that was acknowledged, and then removed from the folder, is pending again."""
        self.line(
            f"again: {file.original_name} was received before and is pending again: it was "
            "reopened, or the server was restored from a backup",
            style="yellow",
        )

    def said(self, line: str) -> None:
        """A line of a command's output."""
        self.line(f"  {line}", style="dim")

    def waiting(self, error: RestanteError, seconds: float) -> None:  # noqa: ARG002 - the live line's
        """A temporary error; the same one is printed once."""
        from restante.client.retry import is_retryable

        if str(error) != self._last_error:
            self._is_offline = is_retryable(error)
            self.line(f"{self._state.capitalize()}: {error} Trying again.", style="red")
        self._last_error = str(error)

    @property
    def _state(self) -> str:
        return "offline" if self._is_offline else "paused"

    def connected(self) -> None:
        """The server answers again."""
        if self._last_error:
            self.line("Online again." if self._is_offline else "Going on.", style="green")
        self._last_error = ""


class LiveDisplay(Display):
    """The same lines, above one with the current state."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(console)
        self._clock = clock
        self._speed = Speed()
        self._has_begun = False
        self._name: str | None = None
        self._received = self._size = 0  # of the current file
        # Since nothing was waiting.
        self._done_files = self._done_bytes = self._waiting_bytes = 0
        self._retry_at = 0.0

    def live(self, columns: int) -> str:
        """The line for now."""
        if not self._has_begun:
            return fitting(["connecting"], columns, order=())
        if self._last_error:
            left = max(self._retry_at - self._clock(), 0)
            again = f"trying again in {shown_seconds(left)}" if left >= 0.5 else "trying again"
            return fitting([self._state, again, self._last_error], columns, order=(2,))
        if self._waiting_files or self._name is not None:
            return self._transfer.line(self._speed.per_second(self._clock()), columns)
        totals = f"{number_of_files(self.files)}, {shown_bytes(self.bytes)} received"
        return fitting(["waiting", totals], columns, order=(1,))

    def began(self, url: str, workspace_id: UUID, folder: Path, name: str | None = None) -> None:
        super().began(url, workspace_id, folder, name)
        self._has_begun = True

    @property
    def _transfer(self) -> Transfer:
        return Transfer(
            verb="receiving",
            file=self._done_files + 1,
            files=self._done_files + max(self._waiting_files, 1),
            done=self._done_bytes + self._received,
            total=self._done_bytes + max(self._waiting_bytes, self._size),
            name=self._name or "",
        )

    def queued(self, files: int, size: int) -> None:
        gone = self._waiting_files - files
        if files == 0:
            self._done_files = self._done_bytes = self._received = self._size = 0
        elif gone > 0:
            self._done_files += gone
            self._done_bytes += max(self._waiting_bytes - size, 0)
            self._received = 0
        self._waiting_files, self._waiting_bytes = files, size

    def arriving(self, file: "WaitingFile") -> None:
        self._name, self._received, self._size = file.original_name, 0, file.size
        self._speed.note(self._clock(), self._done_bytes)

    def progress(self, received: int) -> None:
        self._received = received
        self._speed.note(self._clock(), self._done_bytes + received)

    def ended(self) -> None:
        self._name = None

    def waiting(self, error: RestanteError, seconds: float) -> None:
        super().waiting(error, seconds)
        self._retry_at = self._clock() + seconds


@contextmanager
def display_for(console: Console) -> Iterator[Display]:
    """A live display on a terminal, plain lines elsewhere."""
    if console.is_terminal and not console.is_dumb_terminal:
        display = LiveDisplay(console)
        with live_line(console, display.live):
            yield display
    else:
        yield Display(console)
