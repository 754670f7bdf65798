"""The operator's token is made once, whoever comes first."""

import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from restante.errors import DataDirectoryUnusable
from restante.server import admin_token


def test_processes_that_start_at_once_agree(tmp_path: Path):
    with ThreadPoolExecutor(16) as pool:
        tokens = set(pool.map(admin_token.kept_in, [tmp_path] * 64))

    assert len(tokens) == 1
    assert [each.name for each in tmp_path.iterdir()] == [admin_token.FILE_NAME]


def test_only_its_owner_can_read_it(tmp_path: Path):
    admin_token.kept_in(tmp_path)

    file = tmp_path / admin_token.FILE_NAME
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_two_directories_have_two_tokens(tmp_path: Path):
    tokens: list[str] = []
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        tokens.append(admin_token.kept_in(tmp_path / name))

    assert tokens[0] != tokens[1]
    assert min(map(len, tokens)) >= 32


def test_a_directory_that_cannot_keep_it_is_named(tmp_path: Path):
    with pytest.raises(DataDirectoryUnusable, match=r"admin token cannot be kept in .*admin-token"):
        admin_token.kept_in(tmp_path / "missing")


def test_an_empty_file_is_not_a_token(tmp_path: Path):
    """A disk that was full at the wrong moment must not make the server accept an empty token."""
    (tmp_path / admin_token.FILE_NAME).write_text("\n")

    with pytest.raises(DataDirectoryUnusable, match="is empty"):
        admin_token.kept_in(tmp_path)
