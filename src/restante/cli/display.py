"""The output of `restante connect`: a live display on a terminal, plain lines elsewhere."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Self
from uuid import UUID

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TransferSpeedColumn,
)
from rich.text import Text

from restante.cli.output import shown_bytes
from restante.errors import RestanteError
from restante.text import printable

if TYPE_CHECKING:
    from restante.client.fetching import WaitingFile


_MAX_BAR_NAME = 60


class Display:
    """One plain line for each event."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last_error = ""
        self.files = 0
        self.bytes = 0

    def line(self, text: str, style: str = "") -> None:
        """Print one line, without markup and without control characters."""
        self._console.print(
            printable(text), style=style, markup=False, emoji=False, highlight=False, soft_wrap=True
        )

    def began(self, url: str, workspace_id: UUID, folder: Path) -> None:
        """The workspace, its folder, and how to send to it."""
        self.line(f"Workspace {workspace_id} at {url}")
        self.line(f"Files appear in {folder}")
        self.line(f"Send one with: restante send {workspace_id} FILE --url {url}", style="dim")

    def warn(self, sentence: str) -> None:
        """A problem that does not stop us."""
        self.line(f"Warning: {sentence}", style="yellow")

    def summary(self) -> None:
        """The totals, at the end."""
        files = "1 file" if self.files == 1 else f"{self.files} files"
        self.line(f"{files} received, {shown_bytes(self.bytes)}.")

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
        self.line(f"received {file.original_name} ({shown_bytes(file.size)}): {path}")

    def gone(self, file: "WaitingFile") -> None:
        """The file was announced but can no longer be fetched."""
        self.line(f"gone: {file.original_name}, it expired or was received before", style="dim")

    def failed(self, what: str, error: RestanteError) -> None:
        """The file or message could not be received; it will be retried."""
        self.line(f"not taken: {what}: {error}", style="red")

    def message(self, method: str, text: str) -> None:
        """A message was received and its command, if any, succeeded."""
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

    def waiting(self, error: RestanteError, seconds: float) -> None:
        """A temporary error; the same one is printed once."""
        if str(error) != self._last_error:
            self.line(f"{error} Trying again, first in {max(seconds, 1):.0f} s.", style="red")
        self._last_error = str(error)

    def connected(self) -> None:
        """The server answers again."""
        if self._last_error:
            self.line("Connected again.", style="green")
        self._last_error = ""


class LiveDisplay(Display):
    """The same lines, above a progress bar for the current file and a line with the totals."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            console=console,
        )
        self._bar: TaskID | None = None
        self._problem = ""
        self._live = Live(console=console, refresh_per_second=8, get_renderable=self._render)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.update("", refresh=True)
        self._live.stop()

    def _render(self) -> RenderableType:
        now = "receiving" if self._bar is not None else "waiting"
        totals = f"{now} · {self.files} files, {shown_bytes(self.bytes)}"
        problem = Text(f" · {printable(self._problem)}" if self._problem else "", style="red")
        line = Text(totals, style="dim", no_wrap=True, overflow="ellipsis").append(problem)
        return Group(self._bars, line) if self._bar is not None else line

    def arriving(self, file: "WaitingFile") -> None:
        self._bar = self._bars.add_task(
            printable(file.original_name, max_length=_MAX_BAR_NAME), total=file.size
        )

    def progress(self, received: int) -> None:
        if self._bar is not None:
            self._bars.update(self._bar, completed=received)

    def failed(self, what: str, error: RestanteError) -> None:
        super().failed(what, error)
        self._problem = f"last error: {error}"

    def waiting(self, error: RestanteError, seconds: float) -> None:
        super().waiting(error, seconds)
        self._problem = f"{error} Again in {max(seconds, 1):.0f} s."

    def connected(self) -> None:
        if self._last_error:
            self._problem = ""
        super().connected()

    def ended(self) -> None:
        if self._bar is not None:
            self._bars.remove_task(self._bar)
        self._bar = None


@contextmanager
def display_for(console: Console) -> Iterator[Display]:
    """A live display on a terminal, plain lines elsewhere."""
    if console.is_terminal and not console.is_dumb_terminal:
        with LiveDisplay(console) as live:
            yield live
    else:
        yield Display(console)
