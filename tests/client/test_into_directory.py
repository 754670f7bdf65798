"""Which directory a user may choose for received files."""

import stat
from pathlib import Path

import pytest

from restante.client.folder import Folder
from restante.errors import FolderUnusable


def test_an_existing_directory_keeps_its_mode(tmp_path: Path):
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o755)

    Folder.open(tmp_path / "root", shared).close()

    assert stat.S_IMODE(shared.stat().st_mode) == 0o755


@pytest.mark.parametrize("below", [".molecule", ".molecule/restante", ".Molecule/x"])
def test_the_directory_is_not_where_our_own_files_are(tmp_path: Path, below: str):
    """A sender could name a file like our database's journal."""
    with pytest.raises(FolderUnusable, match=r"inside of \.molecule"):
        Folder.open(tmp_path / "root", tmp_path / "root" / below)


def test_a_link_to_our_own_files_is_no_way_there(tmp_path: Path):
    Folder.open(tmp_path / "root").close()
    (tmp_path / "link").symlink_to(tmp_path / "root" / ".molecule" / "restante")

    with pytest.raises(FolderUnusable, match=r"inside of \.molecule"):
        Folder.open(tmp_path / "root", tmp_path / "link")


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ("a file", "Not a directory"),
        ("a link to nothing", "No such file"),
        ("not UTF-8 \udcff", "not UTF-8"),
    ],
)
def test_a_directory_that_cannot_be_used_is_a_sentence(tmp_path: Path, wrong: str, sentence: str):
    (tmp_path / "a file").write_bytes(b"mine")
    (tmp_path / "a link to nothing").symlink_to(tmp_path / "nothing")

    with pytest.raises(FolderUnusable, match=sentence):
        Folder.open(tmp_path / "root", tmp_path / wrong)

    assert not (tmp_path / "nothing").exists()
    assert not (tmp_path / "root").exists()
