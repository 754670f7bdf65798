"""What a person sees while files arrive: a live display on a terminal, plain lines elsewhere."""

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

from restante.cli.sizes import shown_bytes
from restante.errors import RestanteError
from restante.text import printable

if TYPE_CHECKING:
    from restante.client.fetching import WaitingFile


class Display:
    """Plain lines, one for each thing that happens."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last_error = ""
        self.files = 0
        self.bytes = 0

    def line(self, text: str, style: str = "") -> None:
        """One line; what others wrote is shown as it is and cannot steer the terminal."""
        self._console.print(
            printable(text), style=style, markup=False, emoji=False, highlight=False, soft_wrap=True
        )

    def began(self, url: str, workspace_id: UUID, folder: Path) -> None:
        """What the sender has to know, and where to look."""
        self.line(f"Workspace {workspace_id} at {url}")
        self.line(f"Files appear in {folder}")
        self.line(f"Send one with: restante send {workspace_id} FILE --url {url}", style="dim")

    def warn(self, sentence: str) -> None:
        """Something that works, and should not stay so."""
        self.line(f"Warning: {sentence}", style="yellow")

    def summary(self) -> None:
        """What came, in the end."""
        self.line(f"{self.files} files received, {shown_bytes(self.bytes)}.")

    def arriving(self, file: "WaitingFile") -> None:
        """A file is about to come."""

    def progress(self, received: int) -> None:
        """Some of it has come."""

    def ended(self) -> None:
        """It has come, or comes no further now."""

    def delivered(self, file: "WaitingFile", path: Path) -> None:
        """It is on disk, and the server knows."""
        self.files += 1
        self.bytes += file.size
        self.line(f"received {file.name} ({shown_bytes(file.size)}): {path}")

    def gone(self, file: "WaitingFile") -> None:
        """It was announced, and waits no more."""
        self.line(f"gone: {file.name}, it expired or was taken before", style="dim")

    def failed(self, what: str, error: RestanteError) -> None:
        """It could not be taken, and will be tried again."""
        self.line(f"not taken: {what}: {error}", style="red")

    def message(self, method: str, text: str) -> None:
        """A message was handed on, or has nobody to be handed to."""
        self.line(f"message {method}: {text}")

    def missed(self, rows: int) -> None:
        """The server deleted rows before they were read."""
        self.line(f"{rows} rows of the feed were deleted before they were read.", style="red")

    def said(self, line: str) -> None:
        """What a command printed."""
        self.line(f"  {line}", style="dim")

    def waiting(self, error: RestanteError, seconds: float) -> None:
        """Something is in the way for now; the same thing is said once."""
        if str(error) != self._last_error:
            self.line(f"{error} Trying again, first in {max(seconds, 1):.0f} s.", style="red")
        self._last_error = str(error)

    def connected(self) -> None:
        """The server answers."""
        if self._last_error:
            self.line("Connected again.", style="green")
        self._last_error = ""


class LiveDisplay(Display):
    """The same lines above a bar for the file that is arriving and a line that sums up."""

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
        self._trouble = ""
        self._live = Live(console=console, refresh_per_second=8, get_renderable=self._picture)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.update("", refresh=True)
        self._live.stop()

    def _picture(self) -> RenderableType:
        now = "receiving" if self._bar is not None else "waiting"
        sums = f"{now} · {self.files} files, {shown_bytes(self.bytes)}"
        trouble = Text(f" · {printable(self._trouble)}" if self._trouble else "", style="red")
        line = Text(sums, style="dim", no_wrap=True, overflow="ellipsis").append(trouble)
        return Group(self._bars, line) if self._bar is not None else line

    def arriving(self, file: "WaitingFile") -> None:
        self._bar = self._bars.add_task(file.name, total=file.size)

    def progress(self, received: int) -> None:
        if self._bar is not None:
            self._bars.update(self._bar, completed=received)

    def failed(self, what: str, error: RestanteError) -> None:
        super().failed(what, error)
        self._trouble = f"last error: {error}"

    def waiting(self, error: RestanteError, seconds: float) -> None:
        super().waiting(error, seconds)
        self._trouble = f"{error} Again in {max(seconds, 1):.0f} s."

    def connected(self) -> None:
        if self._last_error:
            self._trouble = ""
        super().connected()

    def ended(self) -> None:
        if self._bar is not None:
            self._bars.remove_task(self._bar)
        self._bar = None


@contextmanager
def display_for(console: Console) -> Iterator[Display]:
    """The display that fits where the output goes."""
    if console.is_terminal and not console.is_dumb_terminal:
        with LiveDisplay(console) as live:
            yield live
    else:
        yield Display(console)
