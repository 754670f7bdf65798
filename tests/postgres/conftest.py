"""Data directories for real clusters, and real processes that own them."""

import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from restante.postgres import DataDirectory, EmbeddedPostgres, placement

OWNER = Path(__file__).with_name("owner.py")

Connect = Callable[[str], Any]


class Owner:
    """Another Python process that owns a data directory and runs its Postgres."""

    def __init__(self, directory: Path, uid: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, OWNER, directory, str(uid)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ready(self) -> tuple[str, int]:
        """Wait until its Postgres is ready; returns the DSN and the pid."""
        dsn, pid = self.line().split()
        return dsn, int(pid)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)

    def close(self) -> None:
        self.process.communicate(timeout=30)


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that the Postgres account can reach, unlike the directories of pytest."""
    with tempfile.TemporaryDirectory(prefix="restante-", ignore_cleanup_errors=True) as name:
        Path(name).chmod(0o711)
        yield Path(name)


@pytest.fixture
def directory(place: Path) -> DataDirectory:
    return DataDirectory.open(place / "data")


@pytest.fixture
async def postgres(directory: DataDirectory) -> AsyncIterator[EmbeddedPostgres]:
    """A Postgres that is not started yet; it is stopped after the test."""
    postgres = EmbeddedPostgres(directory)
    yield postgres
    await postgres.stop()


@pytest.fixture
def owned_by() -> Iterator[Callable[..., Owner]]:
    """Starts owner processes, and ends them after the test."""
    with ExitStack() as stack:

        def start(directory: Path, *, uid: int | None = None) -> Owner:
            owner = Owner(directory, os.geteuid() if uid is None else uid)
            stack.callback(owner.close)
            return owner

        yield start


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    """Opens connections, and closes them after the test."""
    opened: list[Any] = []

    async def connect(dsn: str) -> Any:
        opened.append(await asyncpg.connect(dsn))
        return opened[-1]

    yield connect
    for connection in opened:
        connection.terminate()


@pytest.fixture
def as_root(monkeypatch: pytest.MonkeyPatch, place: Path) -> Path:
    """Root's directory in the filesystem for copies and clusters, replaced by a temporary one."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to switch to another account")
    monkeypatch.setattr(placement, "SYSTEM_DIRECTORY", place / "system")
    return place / "system"
