"""
Records the picture in the README from a real run, as an SVG: `make recording`.

A server, a laptop and a sender run in three terminals of tmux, which must be installed.  What is
on their screens is noted whenever it changes.  In the picture every line is a text that is visible
from its first moment to its last: no scripts, no fonts from elsewhere.  Pauses are shortened.
"""  # noqa: INP001 - a script beside the documents, not a package

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from rich.console import Console
from rich.style import Style
from rich.text import Text

PICTURE = Path(__file__).parent / "recording.svg"
BIN = Path(sys.executable).parent
URL = "http://127.0.0.1:8080"

COLUMNS = 70
_LOOK_EVERY_SECONDS = 0.04
_WORD_SECONDS = 0.15
_LONGEST_PAUSE_SECONDS = 0.7
_HOLD_SECONDS = 5

# Of the picture, in pixels.
_FONT, _ADVANCE, _LINE = 14, 8.4, 19
_PADDING, _TITLE, _GAP = 16, 34, 14

_BACKGROUND, _BORDER, _BAR = "#10161d", "#2c3743", "#18212b"
_TEXT, _DIM = "#d7dee7", "#7d8a99"
# The eight of a terminal, in their order.
_COLOURS = [_DIM, "#f47067", "#4cc38a", "#dfb35b", "#6cb6ff", "#d59cf0", "#56d4dd", _TEXT]


# Recording


@dataclass
class Terminal:
    """A shell in a terminal, and what was on its screen, by time."""

    name: str
    title: str
    rows: int
    screens: list[tuple[float, list[str]]] = field(default_factory=list)

    def start(self, directory: Path) -> None:
        size = ["-x", str(COLUMNS), "-y", str(self.rows)]
        shell = r"exec env PS1='\[\e[32m\]$\[\e[0m\] ' bash --norc"
        _tmux("new-session", "-d", "-s", self.name, *size, "-c", str(directory), shell)
        _tmux("set-option", "-t", self.name, "status", "off")

    def look(self, now: float) -> None:
        """Note the screen if it has changed."""
        shown = _tmux("capture-pane", "-p", "-e", "-t", self.name).split("\n")[: self.rows]
        if not self.screens or self.screens[-1][1] != shown:
            self.screens.append((now, shown))

    def press(self, *keys: str) -> None:
        _tmux("send-keys", "-t", self.name, *keys)

    def says(self, text: str) -> bool:
        return any(text in Text.from_ansi(line).plain for line in self.screens[-1][1])

    @property
    def is_idle(self) -> bool:
        """Whether the shell waits for a command."""
        lines = [Text.from_ansi(line).plain.rstrip() for line in self.screens[-1][1]]
        return bool(used := [line for line in lines if line]) and used[-1].endswith("$")


def _tmux(*words: str) -> str:
    run = ["tmux", "-L", "restante-recording", "-f", os.devnull, *words]
    return subprocess.run(run, capture_output=True, text=True, check=True).stdout


class Stage:
    """All terminals, played by one script."""

    def __init__(self) -> None:
        self.server = Terminal("server", "a server: one process, one Postgres", 6)
        self.laptop = Terminal("laptop", "a laptop: no open port, no public address", 20)
        self.sender = Terminal("sender", "anybody else", 7)
        self.terminals = [self.server, self.laptop, self.sender]

    def until(self, is_so: Callable[[], bool], seconds: float = 60) -> None:
        """Watch all screens until something is so."""
        end = time.monotonic() + seconds
        while True:
            for terminal in self.terminals:
                terminal.look(time.monotonic())
            if is_so():
                return
            if time.monotonic() > end:
                screens = ["\n".join(terminal.screens[-1][1]) for terminal in self.terminals]
                raise SystemExit("This took too long:\n" + "\n".join(screens))
            time.sleep(_LOOK_EVERY_SECONDS)

    def wait(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        self.until(lambda: time.monotonic() > end)

    def type(self, terminal: Terminal, command: str) -> None:
        self.until(lambda: terminal.is_idle)
        for word in re.findall(r"\S+ ?", command):
            terminal.press("-l", "--", word)
            self.wait(_WORD_SECONDS)
        self.wait(0.3)
        terminal.press("Enter")


def play(stage: Stage) -> None:
    """What is shown: a file that arrives at once, and one that waits for the laptop."""
    server, laptop, sender = stage.terminals
    stage.type(server, "restante serve")
    stage.until(lambda: server.says("is ready"))
    stage.type(laptop, f"restante connect {URL} --into inbox --name laptop")
    stage.until(lambda: laptop.says("inbox") and laptop.says("Workspace"))
    stage.type(sender, "restante send laptop report.pdf")
    stage.until(lambda: laptop.says("report.pdf") and sender.is_idle)
    stage.wait(0.8)
    laptop.press("C-c")
    stage.type(sender, "restante send laptop photos.zip")
    stage.until(lambda: laptop.is_idle and sender.is_idle)
    stage.wait(0.8)
    stage.type(laptop, "restante connect --into inbox")
    stage.until(lambda: laptop.says("photos.zip"))
    stage.wait(0.8)


@contextmanager
def _terminals(stage: Stage) -> Iterator[None]:
    """Shells that know `restante`, with a server of their own, in a directory with two files."""
    with tempfile.TemporaryDirectory(prefix="demo-") as name:
        directory = Path(name)
        directory.chmod(0o711)  # the embedded Postgres may run as another user
        (directory / "report.pdf").write_bytes(os.urandom(1_300_000))
        (directory / "photos.zip").write_bytes(os.urandom(18_000_000))
        os.environ |= {
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "HOME": name,
            "TERM": "xterm-256color",
            "RESTANTE_DATA_DIR": f"{name}/server",
            "HISTFILE": os.devnull,
            "RESTANTE_LOG_LEVEL": "warning",  # not a line for each request
        }
        _start_once()
        try:
            for terminal in stage.terminals:
                terminal.start(directory)
            yield
            for terminal in (stage.laptop, stage.server):
                terminal.press("C-c")
            stage.until(lambda: stage.laptop.is_idle and stage.server.is_idle)
        finally:
            _tmux("kill-server")


def _start_once() -> None:
    """Create the database, so that the recording shows the start of every other day."""
    serve = [BIN / "restante", "serve"]
    with subprocess.Popen(serve, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None  # noqa: S101 - for the type checker
        while line := process.stdout.readline():
            if b"is ready" in line:
                break
        else:
            raise SystemExit("The server does not start; is the port 8080 in use?")
        process.terminate()


# Drawing


@dataclass(frozen=True)
class Line:
    """A line of a screen: where it is, and from when to when."""

    terminal: int
    row: int
    text: str
    begin: float
    end: float | None


def lines_of(terminals: list[Terminal]) -> tuple[list[Line], float]:
    """Every line that was ever on a screen, with pauses shortened; and how long it all takes."""
    moments = sorted({moment for terminal in terminals for moment, _ in terminal.screens})
    shortened = _shortened(moments)
    found: list[Line] = []
    for number, terminal in enumerate(terminals):
        for row in range(terminal.rows):
            history = [(shortened[at], screen[row]) for at, screen in terminal.screens]
            found += _line_history(number, row, history)
    return found, shortened[moments[-1]] + _HOLD_SECONDS


def _shortened(moments: list[float]) -> dict[float, float]:
    at, before = 0.0, moments[0]
    shortened: dict[float, float] = {}
    for moment in moments:
        at += min(moment - before, _LONGEST_PAUSE_SECONDS)
        shortened[moment] = at
        before = moment
    return shortened


def _line_history(terminal: int, row: int, history: list[tuple[float, str]]) -> Iterator[Line]:
    changes = [
        (at, text)
        for number, (at, text) in enumerate(history)
        if number == 0 or text != history[number - 1][1]
    ]
    for number, (at, text) in enumerate(changes):
        end = changes[number + 1][0] if number + 1 < len(changes) else None
        if Text.from_ansi(text).plain.strip():
            yield Line(terminal, row, text, at, end)


def picture(terminals: list[Terminal]) -> str:
    """The SVG: what stays to the end is visible without animation, too."""
    lines, seconds = lines_of(terminals)
    width = round(COLUMNS * _ADVANCE + 2 * _PADDING)
    tops: list[int] = []
    height = 0
    for terminal in terminals:
        tops.append(height)
        height += _TITLE + terminal.rows * _LINE + _PADDING + _GAP
    body = [_card(terminal, top, width) for terminal, top in zip(terminals, tops, strict=True)]
    body += [_drawn(line, number, tops[line.terminal]) for number, line in enumerate(lines)]
    styles = [_animation(line, number, seconds) for number, line in enumerate(lines)]
    size = f'viewBox="0 0 {width} {height - _GAP}" width="{width}"'
    return _SVG.format(
        size=size, label=_LABEL, styles="\n".join(styles), body="\n".join(body), colour=_TEXT
    )


_SVG = """\
<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{label}">
<style>
text {{
  font: 14px ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  fill: {colour};
  white-space: pre;
}}
.gone {{ visibility: hidden; }}
@media (prefers-reduced-motion: no-preference) {{
{styles}
}}
</style>
{body}
</svg>
"""
_LABEL = (
    "Three terminals. A server starts. A laptop connects and receives a file. While the laptop is"
    " away another file is sent; it waits, and arrives when the laptop is back."
)


def _card(terminal: Terminal, top: int, width: int) -> str:
    height = _TITLE + terminal.rows * _LINE + _PADDING
    bar = f"M.5 {top + _TITLE - 6}.5h{width - 1}"
    dots = "".join(
        f'<circle cx="{_PADDING + 5 + 16 * number}" cy="{top + 15}" r="4.5" fill="{_BORDER}"/>'
        for number in range(3)
    )
    return (
        f'<rect x=".5" y="{top + 0.5}" width="{width - 1}" height="{height - 1}" rx="9"'
        f' fill="{_BACKGROUND}" stroke="{_BORDER}"/><path d="{bar}" stroke="{_BORDER}"/>{dots}'
        f'<text x="{width / 2}" y="{top + 20}" text-anchor="middle" style="font-size: 13px;'
        f' fill: {_DIM}">{escape(terminal.title)}</text>'
    )


def _drawn(line: Line, number: int, top: int) -> str:
    y = top + _TITLE + _FONT + line.row * _LINE
    kind = f"l{number}" if line.end is None else f"l{number} gone"
    return f'<g class="{kind}">{"".join(_runs(line.text, y))}</g>'


def _runs(line: str, y: int) -> Iterator[str]:
    """The pieces of a line that look alike, each at its own column and with its own width."""
    console = Console(width=COLUMNS, color_system="truecolor", force_terminal=True)
    column = 0
    for segment in Text.from_ansi(line).render(console):
        text = segment.text.rstrip("\n")
        if text.strip():
            lead = len(text) - len(text.lstrip())
            shown = text.strip()
            x = round(_PADDING + (column + lead) * _ADVANCE, 1)
            length = round(len(shown) * _ADVANCE, 1)
            yield (
                f'<text x="{x}" y="{y}" textLength="{length}"{_looks(segment.style)}>'
                f"{escape(shown)}</text>"
            )
        column += len(text)


def _looks(style: Style | None) -> str:
    if style is None:
        return ""
    fill = _DIM if style.dim else _colour(style.color.number if style.color else None)
    weight = ' font-weight="bold"' if style.bold else ""
    return (f' style="fill: {fill}"' if fill else "") + weight


def _colour(number: int | None) -> str:
    if number is None:
        return ""
    # Of the 256 colours, only those of progress bars are used.
    return _COLOURS[number % 8] if number < 16 else _COLOURS[2]


def _animation(line: Line, number: int, seconds: float) -> str:
    """Visible between two moments; the animation starts again after the last one."""
    begin = round(line.begin / seconds * 100, 2)
    end = 100 if line.end is None else round(line.end / seconds * 100, 2)
    hidden = "visibility: hidden"
    steps = "" if begin == 0 else f"0% {{ {hidden} }} "
    steps += f"{begin}% {{ visibility: visible }} "
    steps += "100% { visibility: visible }" if end == 100 else f"{end}%, 100% {{ {hidden} }}"
    return (
        f"@keyframes k{number} {{ {steps} }}"
        f" .l{number} {{ animation: k{number} {seconds:.2f}s step-end infinite }}"
    )


def main() -> None:
    """Record, and write the picture."""
    if not shutil.which("tmux"):
        raise SystemExit("Recording needs tmux: apt-get install tmux")
    stage = Stage()
    with _terminals(stage):
        play(stage)
        drawn = picture(stage.terminals)
    PICTURE.write_text(drawn)


if __name__ == "__main__":
    main()
