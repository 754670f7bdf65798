"""Lines that fit a terminal, and commands that can be pasted."""

import shlex
from io import StringIO

import pytest
from hypothesis import given, strategies as st
from rich.cells import cell_len
from rich.console import Console

from restante.cli.lines import (
    broken_command,
    file_line,
    fitting,
    sentence_lines,
    shortened,
    wrapped,
)
from restante.cli.live import Speed, Transfer


@given(st.text(max_size=200), st.integers(1, 120))
def test_a_shortened_text_is_not_wider_than_asked(text: str, columns: int):
    assert cell_len(shortened(text, columns)) <= columns


@given(st.text(max_size=300), st.text(max_size=300), st.sampled_from([60, 80, 120]))
def test_the_line_of_a_file_fits_whatever_its_names_are(name: str, renamed: str, columns: int):
    line = file_line("received", 2**60, name, renamed=renamed, columns=columns)

    assert cell_len(line) <= columns
    assert line.isprintable()


@pytest.mark.parametrize(
    ("name", "renamed", "shown"),
    [
        ("a.txt", "", "a.txt"),
        ("a.txt", "a.txt", "a.txt"),
        ("a.txt", "b.txt", "a.txt as b.txt"),
        ("x" * 40 + ".tar.gz", "", "x" * 25 + "…" + "x" * 5 + ".tar.gz"),
        ("a.txt", "x" * 40 + ".txt", "a.txt as " + "x" * 19 + "…" + "x" * 5 + ".txt"),
        ("x" * 40, "y" * 40, "x" * 11 + "…" + "x" * 5 + " as " + "y" * 11 + "…" + "y" * 5),
    ],
)
def test_a_long_name_keeps_its_beginning_and_its_extension(name: str, renamed: str, shown: str):
    line = file_line("sent", 1, name, renamed=renamed, columns=60)

    assert line == f"sent             1 B  {shown}"


def test_parts_leave_a_narrow_line_in_the_given_order():
    parts = ["first", "second", "", "third"]

    shown = [fitting(parts, columns, order=(1, 3)) for columns in (30, 20, 16, 10, 4)]

    assert shown == ["first · second · third", "first · third", "first · third", "first", "fi…t"]


@given(st.lists(st.text("ab '\"\\$", min_size=1, max_size=30), min_size=1, max_size=12))
def test_a_command_in_several_lines_is_the_same_command(words: list[str]):
    command = shlex.join(words)

    pasted = "\n".join(broken_command(command, 40)).replace(" \\\n", " ")  # as a shell reads it
    assert shlex.split(pasted) == words


def test_a_long_row_is_wrapped_below_its_first_column():
    line = "     1  " + "word " * 20
    terminal = Console(file=StringIO(), force_terminal=True, width=60)

    first, *others = wrapped(line, terminal)

    assert first == "     1  " + " ".join(["word"] * 10)
    assert others == ["        " + " ".join(["word"] * 10)]
    assert wrapped(line, Console(file=StringIO(), width=60)) == [line]


def test_a_sentence_is_broken_at_spaces_but_not_in_commands():
    text = "If it has moved, run `restante connect http://new.example --moved`; otherwise wait."

    assert sentence_lines(text, 40) == [
        "If it has moved, run",
        "`restante connect http://new.example --moved`;",
        "otherwise wait.",
    ]
    assert " ".join(sentence_lines("one ` two", 4)) == "one ` two"


# Speed


def test_the_speed_is_that_of_the_last_seconds():
    speed = Speed()
    assert speed.per_second(0) is None

    for second in range(10):
        speed.note(second, second * 1000)
    for second in range(10, 40):
        speed.note(second, 9000 + (second - 9) * 10)

    assert speed.per_second(39) == 10
    speed.note(40, 0)  # a retry
    assert speed.per_second(40) is None


def test_a_transfer_without_bytes_is_complete():
    assert Transfer("sending", 1, 1, 0, 0).line(None, 60) == (
        "sending 1 of 1 file · 100 % · 0 B of 0 B"
    )
