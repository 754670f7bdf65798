"""What must be there before Postgres starts: an account, programs, a cluster, a socket."""

from dataclasses import dataclass
from pathlib import Path

from restante.postgres import cluster, placement
from restante.postgres.account import Account, choose_account
from restante.postgres.binaries import Binaries, choose_binaries
from restante.postgres.datadir import DataDirectory
from restante.postgres.sockets import socket_directory


@dataclass(frozen=True, slots=True)
class Site:
    """Everything that stays the same from one start of the server to the next."""

    home: Path
    binaries: Binaries
    account: Account
    sockets: Path

    @property
    def cluster(self) -> Path:
        return self.home / placement.CLUSTER


async def prepare(directory: DataDirectory, bin_dir: Path | None, account_name: str | None) -> Site:
    """Decide who runs which Postgres where, and make what is missing for it."""
    home = placement.existing_home(directory)
    owner = (home / placement.CLUSTER).stat().st_uid if home else None
    account = choose_account(account_name, owner=owner)
    major = cluster.major_of(home / placement.CLUSTER) if home else None
    binaries = placement.runnable_by(account, choose_binaries(bin_dir, major=major))
    home = home or placement.fresh_home(directory, account)
    placement.check_reachable(home, account)
    cluster.remove_drafts(home)
    if major is None:
        await cluster.create(home, binaries, account)
        # What a killed initdb had started may have gone on writing for a moment.
        cluster.remove_drafts(home)
    cluster.write_access_rules(home, account)
    return Site(home, binaries, account, socket_directory(home, account))
