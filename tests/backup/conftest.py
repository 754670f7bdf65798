"""Restored clusters are synced to disk: in memory that takes a tenth of the time."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import fastest_place


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that Postgres's account can pass through, in memory if there is room."""
    with tempfile.TemporaryDirectory(
        prefix="restante-", dir=fastest_place(), ignore_cleanup_errors=True
    ) as name:
        Path(name).chmod(0o711)
        yield Path(name)
