"""The admin token is generated once, even by concurrent processes."""

import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from restante.errors import DataDirectoryUnusable
from restante.server import admin_token


def test_concurrent_processes_get_the_same_token(tmp_path: Path):
    with ThreadPoolExecutor(16) as pool:
        tokens = set(pool.map(admin_token.stored_in, [tmp_path] * 64))

    assert len(tokens) == 1
    assert [each.name for each in tmp_path.iterdir()] == [admin_token.FILE_NAME]


def test_only_the_owner_can_read_the_token(tmp_path: Path):
    admin_token.stored_in(tmp_path)

    file = tmp_path / admin_token.FILE_NAME
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_two_directories_have_different_tokens(tmp_path: Path):
    tokens: list[str] = []
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        tokens.append(admin_token.stored_in(tmp_path / name))

    assert tokens[0] != tokens[1]
    assert min(map(len, tokens)) >= 32


def test_a_missing_directory_is_an_error_that_names_it(tmp_path: Path):
    with pytest.raises(DataDirectoryUnusable, match=r"cannot be stored in .*admin-token"):
        admin_token.stored_in(tmp_path / "missing")


def test_an_empty_file_is_not_a_token(tmp_path: Path):
    """A full disk may leave an empty file; the server must not accept an empty token."""
    (tmp_path / admin_token.FILE_NAME).write_text("\n")

    with pytest.raises(DataDirectoryUnusable, match="is empty"):
        admin_token.stored_in(tmp_path)
