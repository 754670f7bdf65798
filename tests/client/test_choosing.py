"""Which files a user means: paths, directories, patterns."""

import os
import socket
from contextlib import nullcontext
from pathlib import Path

import pytest

from restante.client import choosing
from restante.client.choosing import Chosen
from restante.client.sending import Outgoing
from restante.errors import BadRequest, FileUnreadable, RestanteError


def chosen(*paths: Path) -> Chosen:
    found = Chosen()
    for path in paths:
        found.add(path)
    return found


def files(root: Path, *names: str, content: str = "x") -> Path:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


def names(found: Chosen) -> list[str]:
    return [file.part.name for file in found.outgoing()]


def test_a_directory_stands_for_its_files_by_name(tmp_path: Path):
    """Names have no directories on the wire; the path below the given one is in the name."""
    files(tmp_path, "b.txt", "sub/a.txt", "sub/deep/c.txt", "a.txt", "zoo/a.txt")

    found = chosen(tmp_path)

    shown = ["a.txt", "b.txt", "sub/a.txt", "sub/deep/c.txt", "zoo/a.txt"]
    assert [choice.shown for choice in found.files] == shown
    assert names(found) == [name.replace("/", "_") for name in shown]
    assert not found.skipped


def test_what_a_directory_hides_or_links_to_stays_behind(tmp_path: Path):
    """A token in a hidden file, a link to a secret elsewhere, a pipe that never ends."""
    top = files(tmp_path / "top", "a.txt", ".env", ".git/config")
    files(top, "empty", content="")
    outside = files(tmp_path / "outside", "secret") / "secret"
    (top / "link").symlink_to(outside)
    (top / "loop").symlink_to(top)
    (top / "broken").symlink_to(top / "nothing")
    os.mkfifo(top / "pipe")
    with socket.socket(socket.AF_UNIX) as listening:
        here = Path.cwd()
        os.chdir(top)  # the path of a socket is short
        try:
            listening.bind("socket")
        finally:
            os.chdir(here)

    found = chosen(top)

    assert names(found) == ["a.txt"]
    assert found.skipped == {"hidden": 2, "linked": 3, "special": 2, "empty": 1}
    assert found.shown_skipped() == "skipped 2 hidden, 3 linked, 1 empty, 2 special."


def test_a_link_or_hidden_file_that_is_named_is_sent(tmp_path: Path):
    files(tmp_path, "a.txt", ".env")
    (tmp_path / "link.txt").symlink_to(tmp_path / "a.txt")

    assert names(chosen(tmp_path / "link.txt", tmp_path / ".env")) == ["link.txt", ".env"]


def test_equal_names_are_numbered(tmp_path: Path):
    """In any case of letters: they may arrive on a disk that does not distinguish them."""
    files(tmp_path, "1/a.txt", "2/A.txt", "3/a.txt", "4/sub/x", "4/sub_x")

    found = chosen(*(tmp_path / name for name in ("1/a.txt", "2/A.txt", "3/a.txt", "4")))

    assert names(found) == ["a.txt", "A (2).txt", "a (3).txt", "sub_x", "sub_x (2)"]


def test_a_pattern_stands_for_what_it_matches(tmp_path: Path):
    files(tmp_path, "a.txt", "b.txt", "c.pdf", ".hidden.txt", "sub/d.txt", "sub/more/e.txt")
    files(tmp_path, "empty.txt", content="")

    flat = chosen(tmp_path / "*.txt")

    assert names(flat) == ["a.txt", "b.txt"]
    assert flat.skipped == {"empty": 1}
    assert names(chosen(tmp_path / "**/[de].txt")) == ["d.txt", "e.txt"]
    assert names(chosen(tmp_path / "su?")) == ["d.txt", "more_e.txt"]


def test_a_file_whose_name_is_like_a_pattern_is_that_file(tmp_path: Path):
    files(tmp_path, "[ab].txt", "a.txt", "*.txt")

    assert names(chosen(tmp_path / "[ab].txt")) == ["[ab].txt"]
    assert names(chosen(tmp_path / "*.txt")) == ["*.txt"]


def test_more_files_than_the_limit_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Those that a shell has listed are not counted."""
    monkeypatch.setattr(choosing, "MAX_FOUND", 3)
    files(tmp_path, "1", "2", "sub/3", "sub/4")

    for argument in (tmp_path, tmp_path / "*"):
        with pytest.raises(BadRequest, match="more than 3 files: send them as one") as refused:
            chosen(argument)
        assert str(argument) in str(refused.value)
    assert len(chosen(*[tmp_path / "1"] * 4, tmp_path / "sub").files) == 6


def test_a_deep_tree_of_nothing_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(choosing, "_MAX_VISITED", 5)
    (tmp_path / "1/2/3/4/5/6").mkdir(parents=True)

    with pytest.raises(BadRequest, match="more than"):
        chosen(tmp_path)


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        ("missing", FileUnreadable, "missing is not there."),
        ("*.no", FileUnreadable, "No file matches"),
        ("nothing", BadRequest, "has no files to send."),
        ("hidden", BadRequest, "has no files to send: skipped 1 hidden."),
        ("empty", FileUnreadable, "is empty, and empty files cannot be sent."),
        ("pipe", FileUnreadable, "is a pipe: read it as standard input"),
        ("n" * 300, FileUnreadable, "File name too long."),
        ("a/b", FileUnreadable, "Not a directory."),
        ("loop", FileUnreadable, "Too many levels of symbolic links."),
    ],
)
def test_what_cannot_be_sent_is_refused_with_its_reason(
    tmp_path: Path, name: str, error: type[RestanteError], words: str
):
    files(tmp_path, "a", "hidden/.x")
    files(tmp_path, "empty", content="")
    (tmp_path / "nothing").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "pipe")

    with pytest.raises(error) as refused:
        chosen(tmp_path / name)

    assert words in str(refused.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_directory_without_rights_is_refused(tmp_path: Path):
    top = files(tmp_path, "top/sub/a") / "top"
    (top / "sub").chmod(0)
    try:
        with pytest.raises(FileUnreadable, match="sub cannot be read: Permission denied"):
            chosen(top)
    finally:
        (top / "sub").chmod(0o700)


def test_a_name_that_is_not_utf8_is_sent(tmp_path: Path):
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/a\xff.txt"))
    path.write_text("x")

    assert names(chosen(tmp_path)) == ["a?.txt"]


def test_the_only_file_can_get_another_name(tmp_path: Path):
    one, two = chosen(files(tmp_path, "a") / "a"), chosen(files(tmp_path, "b"))

    one.rename_only("b.txt")

    assert names(one) == ["b.txt"]
    with pytest.raises(BadRequest, match="for one file, and there are 2"):
        two.rename_only("c")


def test_standard_input_keeps_its_place(tmp_path: Path):
    found = chosen(files(tmp_path, "a") / "a")
    found.files.append(choosing.Choice(None, "log.txt"))
    given = Outgoing.of(tmp_path / "a")

    assert found.has_input
    assert [file.part.name for file in found.outgoing(given)] == ["a", "log.txt"]


def test_a_file_that_goes_while_its_directory_is_read_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in ("goes", "stays"):
        (tmp_path / name).write_text("x")

    listed = list(os.scandir(tmp_path))

    def listing(_: Path) -> nullcontext[list[os.DirEntry[str]]]:
        return nullcontext(listed)

    monkeypatch.setattr(os, "scandir", listing)
    (tmp_path / "goes").unlink()
    chosen = Chosen()

    chosen.add(tmp_path)

    assert [choice.shown for choice in chosen.files] == ["stays"]
    assert chosen.skipped == {"vanished": 1}
