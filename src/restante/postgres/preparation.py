"""Prepares everything that Postgres needs: account, binaries, cluster, socket directory."""

from dataclasses import dataclass
from pathlib import Path

from restante.postgres import cluster, placement
from restante.postgres.account import Account, choose_account
from restante.postgres.binaries import Binaries, choose_binaries
from restante.postgres.datadir import DataDirectory
from restante.postgres.sockets import socket_directory


@dataclass(frozen=True, slots=True)
class Installation:
    """What one embedded Postgres consists of; it stays the same when Postgres is restarted."""

    home: Path
    binaries: Binaries
    account: Account
    sockets: Path

    @property
    def cluster(self) -> Path:
        return self.home / placement.CLUSTER


async def prepare(
    directory: DataDirectory, bin_dir: Path | None, account_name: str | None
) -> Installation:
    """Choose account, binaries and directories, and create what is missing."""
    home = placement.existing_home(directory)
    owner = (home / placement.CLUSTER).stat().st_uid if home else None
    account = choose_account(account_name, owner=owner)
    major = cluster.major_of(home / placement.CLUSTER) if home else None
    binaries = placement.runnable_by(account, choose_binaries(bin_dir, major=major))
    home = home or placement.new_home(directory, account)
    placement.check_reachable(home, account)
    cluster.remove_drafts(home)
    if major is None:
        await cluster.create(home, binaries, account)
        # Children of a killed initdb may have written for a moment longer.
        cluster.remove_drafts(home)
    cluster.write_access_rules(home, account)
    return Installation(home, binaries, account, socket_directory(home, account))
