"""The output of `restante connect`."""

from collections.abc import Callable
from io import StringIO
from pathlib import Path
from uuid import uuid4

import pytest
from rich.console import Console

from restante.cli.display import Display, LiveDisplay, display_for
from restante.client.fetching import WaitingFile
from restante.errors import FileCorrupt, ServerUnreachable
from restante.ids import FileId

FILE = WaitingFile(FileId(uuid4()), "a.txt", "text/plain", 2048)
LOST = ServerUnreachable("The server is away.")


def seen_in(show: Callable[[Display], None], **console: object) -> str:
    """The output in a pipe, or on a terminal with `force_terminal`."""
    written = StringIO()
    with display_for(Console(file=written, width=60, **console)) as display:  # pyright: ignore[reportArgumentType]
        show(display)
    return written.getvalue()


def test_a_pipe_gets_plain_lines_that_are_not_wrapped():
    """Users grep them and copy paths from them."""
    path = Path("/a/rather/long/path/that/is/longer/than/forty/columns/a.txt")

    def show(display: Display) -> None:
        display.arriving(FILE)
        display.progress(1024)
        display.delivered(FILE, path)
        display.failed("b.txt", FileCorrupt("It is damaged."))
        display.gone(FILE)
        display.missed(3)
        display.skipped(4)
        display.restored(5)
        display.again(FILE)
        display.summary()

    assert seen_in(show).splitlines() == [
        f"received a.txt (2.0 KiB): {path}",
        "not taken: b.txt: It is damaged.",
        "gone: a.txt, it expired or was received before",
        "3 feed rows were deleted before they were read.",
        (
            "4 feed rows were skipped: this workspace has acknowledged them before. "
            "The folder's own mark is older; it may be from a backup."
        ),
        (
            "The server's feed is older than this folder; it was restored from a backup. "
            "Continuing after the last acknowledged row: up to 5 rows come again."
        ),
        (
            "again: a.txt was received before and is pending again: it was reopened, or the server "
            "was restored from a backup"
        ),
        "1 file received, 2.0 KiB.",
    ]


@pytest.mark.parametrize(
    "text", ["[red]not red[/red]", ":smile:", "{task.fields}", "[link=x]y[/link]", "100% {}"]
)
def test_markup_in_messages_is_shown_literally(text: str):
    assert seen_in(lambda display: display.message("message/send", text)) == (
        f"message message/send: {text}\n"
    )


@pytest.mark.parametrize("is_terminal", [False, True])
def test_control_characters_are_not_printed(is_terminal: bool):
    evil = "\x1b]0;owned\x07\x9b2J\u202e\r\nsecond"

    def show(display: Display) -> None:
        display.message(evil, evil)
        display.said(evil)
        display.failed(evil, FileCorrupt(evil))
        display.waiting(ServerUnreachable(evil), 1)

    seen = seen_in(show, force_terminal=is_terminal, no_color=True, _environ={"TERM": "xterm"})

    assert "owned" in seen
    assert [code for code in ("\x1b]", "\x07", "\x9b", "\u202e") if code in seen] == []


def test_a_repeated_error_is_printed_once_and_so_is_its_end():
    """A night without a network prints two lines."""

    def show(display: Display) -> None:
        display.connected()
        for _ in range(3):
            display.waiting(LOST, 1.2)
        display.waiting(ServerUnreachable("Something else."), 2)
        display.connected()
        display.connected()
        display.waiting(LOST, 1)

    assert seen_in(show).splitlines() == [
        "The server is away. Trying again, first in 1 s.",
        "Something else. Trying again, first in 2 s.",
        "Connected again.",
        "The server is away. Trying again, first in 1 s.",
    ]


def test_a_terminal_gets_a_live_display_unless_it_is_dumb():
    terminal = Console(file=StringIO(), force_terminal=True, _environ={"TERM": "xterm"})
    dumb = Console(file=StringIO(), force_terminal=True, _environ={"TERM": "dumb"})

    with display_for(terminal) as live, display_for(dumb) as plain:
        assert type(live) is LiveDisplay
        assert type(plain) is Display


def test_the_live_display_shows_totals_and_the_last_error():
    def show(display: Display) -> None:
        display.arriving(FILE)
        display.progress(1024)
        display.ended()
        display.delivered(FILE, Path("/a.txt"))
        display.arriving(FILE)
        display.ended()
        display.failed("a.txt", FileCorrupt("It is damaged."))
        display.message("message/send", "hello")

    seen = seen_in(show, force_terminal=True, no_color=True, _environ={"TERM": "xterm"})

    assert "received a.txt (2.0 KiB): /a.txt" in seen
    assert "waiting · 1 files, 2.0 KiB" in seen
    assert "last error: It i" in seen
