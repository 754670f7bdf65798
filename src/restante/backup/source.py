"""The embedded database that is backed up: the running one, or one that is started for it."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from restante.errors import BackupFailed
from restante.postgres import DataDirectory, cluster, placement, postgres_for
from restante.postgres.binaries import choose_binaries
from restante.retention.rules import reserve_of
from restante.server import admin_token


@dataclass(frozen=True, slots=True)
class Source:
    """What a backup is made of."""

    dsn: str
    cluster: Path
    bin_dir: Path  # of the same major version
    token: str | None

    def reserve(self, chosen: int | None) -> int:
        """What a backup leaves free on the disk of the cluster."""
        disk = os.statvfs(self.cluster)
        return reserve_of(disk.f_blocks * disk.f_frsize, chosen)


@asynccontextmanager
async def opened(
    directory: DataDirectory, *, bin_dir: Path | None = None, account: str | None = None
) -> AsyncIterator[Source]:
    """The database of this directory; raises BackupFailed if there is none."""
    home = placement.existing_home(directory)
    if home is None:
        raise BackupFailed(
            f"There is no database in {directory.path} yet. Name the server's --data-dir."
        )
    files = home / placement.CLUSTER
    binaries = choose_binaries(bin_dir, major=cluster.major_of(files))
    async with postgres_for(directory, bin_dir=bin_dir, account=account) as dsn:
        yield Source(dsn, files, binaries.bin_dir, _token(directory))


def _token(directory: DataDirectory) -> str | None:
    file = directory.path / admin_token.FILE_NAME
    return (file.read_text().strip() or None) if file.exists() else None
