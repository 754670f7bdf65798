"""The output of `restante connect`."""

from collections.abc import Callable
from io import StringIO
from pathlib import Path
from uuid import UUID, uuid4

import pytest
from rich.cells import cell_len
from rich.console import Console

from restante.cli.display import Display, LiveDisplay, display_for
from restante.client.fetching import WaitingFile
from restante.errors import FileCorrupt, FolderFull, ServerUnreachable
from restante.ids import FileId

FILE = WaitingFile(FileId(uuid4()), "a.txt", "text/plain", 2048)
LOST = ServerUnreachable("The server is away.")
XTERM = {"TERM": "xterm"}


def seen_in(show: Callable[[Display], None], width: int = 60, **console: object) -> str:
    """The output in a pipe, or on a terminal with `force_terminal`."""
    written = StringIO()
    with display_for(Console(file=written, width=width, **console)) as display:  # pyright: ignore[reportArgumentType]
        show(display)
    return written.getvalue()


def test_a_pipe_gets_plain_lines_that_are_not_wrapped():
    """Users grep them."""
    path = Path("/a/b") / ("0" * 32 + "-a.txt")

    def show(display: Display) -> None:
        display.queued(2, 4096)
        display.arriving(FILE)
        display.progress(1024)
        display.delivered(FILE, path)
        display.queued(1, 2048)
        display.failed("b.txt", FileCorrupt("It is damaged."))
        display.queued(0, 0)
        display.queued(1, 2048)
        display.delivered(FILE, Path("a.txt"))
        display.gone(FILE)
        display.missed(3)
        display.skipped(4)
        display.restored(5)
        display.again(FILE)
        display.message("message/send", "hello")
        display.summary()

    assert seen_in(show).splitlines() == [
        "2 files are waiting, 4.0 KiB.",
        f"received     2.0 KiB  a.txt as {path.name}",
        "not taken: b.txt: It is damaged.",
        "received     2.0 KiB  a.txt",
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
        "message message/send: hello",
        "2 files received, 4.0 KiB. 1 message.",
    ]


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_lines_of_a_terminal_fit_its_width(width: int):
    def show(display: Display) -> None:
        display.began("http://127.0.0.1:8080", UUID(int=1), Path("/home/ana/inbox"), "日本 " * 60)
        display.hint(f"restante send {UUID(int=1)} --message hello --dir /home/ana/inbox")
        display.warn("http://example.org is not encrypted: others on the network can read it.")
        display.skipped(4)
        display.again(FILE)
        display.waiting(ServerUnreachable("A long reason. " * 8), 3)
        for name in ("x" * 200, "日本" * 60, "שלום " * 40, "e\u0301" * 120):
            file = WaitingFile(FileId(uuid4()), "a", "", 2**40, name)
            display.delivered(file, Path(f"{name} (2)"))

    dumb = {"TERM": "dumb"}
    seen = seen_in(show, width, height=40, force_terminal=True, no_color=True, _environ=dumb)

    assert [line for line in seen.splitlines() if cell_len(line) > width] == []


def test_a_terminal_does_not_show_the_digits_before_a_name():
    def show(display: Display) -> None:
        display.delivered(FILE, Path("0" * 32 + "-a.txt"))
        display.delivered(FILE, Path("a (2).txt"))

    seen = seen_in(show, force_terminal=True, no_color=True, _environ={"TERM": "dumb"})

    assert seen.splitlines() == [
        "received     2.0 KiB  a.txt",
        "received     2.0 KiB  a.txt as a (2).txt",
    ]


@pytest.mark.parametrize(
    "text", ["[red]not red[/red]", ":smile:", "{task.fields}", "[link=x]y[/link]", "100% {}"]
)
def test_markup_in_messages_and_names_is_shown_literally(text: str):
    def show(display: Display) -> None:
        display.message("message/send", text)
        display.delivered(WaitingFile(FileId(uuid4()), "a", "", 1, text), Path("a"))

    assert seen_in(show).splitlines() == [
        f"message message/send: {text}",
        f"received         1 B  {text} as a",
    ]


@pytest.mark.parametrize("is_terminal", [False, True])
def test_control_characters_are_not_printed(is_terminal: bool):
    evil = "\x1b]0;owned\x07\x9b2J\u202e\r\nsecond"

    def show(display: Display) -> None:
        display.message(evil, evil)
        display.said(evil)
        display.failed(evil, FileCorrupt(evil))
        display.waiting(ServerUnreachable(evil), 1)
        display.connected()
        file = WaitingFile(FileId(uuid4()), "a", "", 1, evil)
        display.arriving(file)
        display.delivered(file, Path("a" + evil))

    seen = seen_in(show, force_terminal=is_terminal, no_color=True, _environ=XTERM)

    assert "owned" in seen
    assert [code for code in ("\x1b]", "\x07", "\x9b", "\u202e") if code in seen] == []


def test_a_repeated_error_is_printed_once_and_so_is_its_end():
    """A night without a network prints two lines."""

    def show(display: Display) -> None:
        display.connected()
        for _ in range(3):
            display.waiting(LOST, 1.2)
        display.waiting(FolderFull("The disk is full."), 2)
        display.connected()
        display.connected()
        display.waiting(LOST, 1)
        display.connected()

    assert seen_in(show).splitlines() == [
        "Offline: The server is away. Trying again.",
        "Paused: The disk is full. Trying again.",
        "Going on.",
        "Offline: The server is away. Trying again.",
        "Online again.",
    ]


def test_a_terminal_gets_a_live_display_unless_it_is_dumb():
    terminal = Console(file=StringIO(), force_terminal=True, _environ=XTERM)
    dumb = Console(file=StringIO(), force_terminal=True, _environ={"TERM": "dumb"})

    with display_for(terminal) as live, display_for(dumb) as plain:
        assert type(live) is LiveDisplay
        assert type(plain) is Display


# The live line


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def connecting(clock: Clock) -> LiveDisplay:
    return LiveDisplay(Console(file=StringIO(), force_terminal=True, _environ=XTERM), clock)


@pytest.fixture
def live(connecting: LiveDisplay) -> LiveDisplay:
    connecting.began("http://127.0.0.1:8080", UUID(int=1), Path("/home/ana/inbox"))
    return connecting


def test_the_live_line_does_not_wait_for_files_before_the_server_has_answered(
    connecting: LiveDisplay,
):
    before = connecting.live(60)
    connecting.began("http://127.0.0.1:8080", UUID(int=1), Path("/home/ana/inbox"))

    assert (before, connecting.live(60)) == ("connecting", "waiting · 0 files, 0 B received")


def test_the_live_line_has_the_queue_and_the_remaining_time(live: LiveDisplay, clock: Clock):
    mib = 1024 * 1024
    first, second = (WaitingFile(FileId(uuid4()), f"{n}.bin", "", 10 * mib) for n in "12")
    live.queued(5, 50 * mib)
    live.arriving(first)
    clock.now += 1
    live.progress(10 * mib)
    live.ended()
    live.delivered(first, Path("1.bin"))
    live.queued(4, 40 * mib)
    live.arriving(second)
    clock.now += 1
    live.progress(5 * mib)

    lines = [live.live(columns) for columns in (20, 60, 80, 120)]

    assert lines == [
        "receiving 2 o…s left",
        "receiving 2 of 5 files · 30 % · 7.5 MiB/s · 5 s left",
        "receiving 2 of 5 files · 30 % · 15.0 MiB of 50.0 MiB · 7.5 MiB/s · 5 s left",
        ("receiving 2 of 5 files · 30 % · 15.0 MiB of 50.0 MiB · 7.5 MiB/s · 5 s left · 2.bin"),
    ]


def test_the_live_line_says_offline_and_counts_down(live: LiveDisplay, clock: Clock):
    live.delivered(FILE, Path("a.txt"))
    idle = live.live(60)
    live.waiting(LOST, 3)
    shown = list[str]()
    for _ in range(4):
        shown.append(live.live(60))
        clock.now += 1
    live.connected()

    assert shown == [
        "offline · trying again in 3 s · The server is away.",
        "offline · trying again in 2 s · The server is away.",
        "offline · trying again in 1 s · The server is away.",
        "offline · trying again · The server is away.",
    ]
    assert idle == live.live(60) == "waiting · 1 file, 2.0 KiB received"


def test_an_empty_queue_starts_the_count_again(live: LiveDisplay, clock: Clock):
    live.queued(2, 4096)
    live.queued(0, 0)
    live.queued(1, 2048)
    live.arriving(FILE)
    clock.now += 1
    live.progress(1024)

    assert live.live(60) == "receiving 1 of 1 file · 50 % · 1.0 KiB/s · 1 s left"
