"""Clusters of Postgres that a test backs up, restores and promotes, apart from any server."""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from processes import wait_until, working_in

from restante.postgres.account import Account, choose_account
from restante.postgres.binaries import choose_binaries

_ADMIN = "restante"


@contextmanager
def running_cluster(root: Path) -> Iterator["Cluster"]:
    """A new cluster that runs meanwhile."""
    cluster = Cluster.create(root)
    cluster.start()
    try:
        yield cluster
    finally:
        cluster.end()


@dataclass(slots=True)
class Cluster:
    """One data directory; what it archives is in `archive`, its socket in `sockets`."""

    root: Path
    account: Account
    bin_dir: Path

    @classmethod
    def create(cls, root: Path) -> "Cluster":
        """A cluster that was never started."""
        account = choose_account(None, owner=None)
        cluster = cls(root, account, choose_binaries(None, major=None).postgres.parent)
        cluster._make_directories()
        cluster.run("initdb", "-D", root / "data", "-U", _ADMIN, "--auth", "trust", "--no-sync")
        return cluster

    def _make_directories(self) -> None:
        for directory in (self.root, self.sockets, self.archive):
            directory.mkdir()
            self.account.take_ownership(directory)

    @property
    def data(self) -> Path:
        return self.root / "data"

    @property
    def sockets(self) -> Path:
        return self.root / "s"

    @property
    def archive(self) -> Path:
        return self.root / "archive"

    @property
    def dsn(self) -> str:
        return self.dsn_of("postgres")

    def dsn_of(self, database: str) -> str:
        return f"postgresql://{_ADMIN}@/{database}?host={self.sockets}"

    def new_database(self, name: str) -> str:
        """Its DSN."""
        self.execute(f"create database {name}")
        return self.dsn_of(name)

    def start(self) -> None:
        """Without syncs: no test turns the machine off."""
        options = f"-c listen_addresses='' -k {self.sockets} -c fsync=off -c archive_mode=on"
        copying = f"-c archive_command='cp %p {self.archive}/%f'"
        log = self.root / "log"
        self.run(
            "pg_ctl", "-s", "-D", self.data, "-l", log, "-w", "-o", f"{options} {copying}", "start"
        )

    def start_again(self) -> None:
        """After its postmaster was killed: its other processes end by themselves."""
        wait_until(lambda: not working_in(self.data), seconds=60, what="the end of its processes")
        # Where nobody reaps the postmaster, its process id looks as if it still ran.
        for lock in (self.data / "postmaster.pid", *self.sockets.glob(".s.PGSQL.*.lock")):
            lock.unlink()
        self.start()

    @property
    def postmaster(self) -> int:
        return int((self.data / "postmaster.pid").read_text().split()[0])

    def stop(self, mode: str = "fast") -> None:
        self.run("pg_ctl", "-s", "-D", self.data, "-w", "-m", mode, "stop")

    def end(self) -> None:
        """Stop it if it runs."""
        if (self.data / "postmaster.pid").exists():
            self.stop("immediate")

    def promote(self) -> None:
        self.run("pg_ctl", "-s", "-D", self.data, "-w", "promote")

    def execute(self, statement: str) -> str:
        return self.run("psql", "-X", "-A", "-t", "-d", self.dsn, "-c", statement)

    def dump(self, to: Path) -> None:
        to.write_text(self.run("pg_dump", "-d", self.dsn))

    def load(self, dump: Path) -> None:
        self.run("psql", "-X", "-q", "-v", "ON_ERROR_STOP=1", "-d", self.dsn, stdin=dump)

    def base_backup(self, root: Path) -> "Cluster":
        """A copy, taken while this one runs, that streams from it when it is started."""
        copy = Cluster(root, self.account, self.bin_dir)
        copy._make_directories()
        words = ("-D", copy.data, "-d", self.dsn, "-X", "stream", "-R", "-c", "fast")
        self.run("pg_basebackup", *words)
        return copy

    def copy_data(self, to: Path) -> None:
        """Copy the data directory of a cluster that does not run."""
        self.run("cp", "-a", self.data, to)

    def put_back(self, copied: Path) -> None:
        shutil.rmtree(self.data)
        self.run("cp", "-a", copied, self.data)

    def run(self, program: str, *words: str | Path, stdin: Path | None = None) -> str:
        """Run one of Postgres's programs, or a command, as its account."""
        path = self.bin_dir / program
        with (stdin or Path("/dev/null")).open("rb") as given:
            done = subprocess.run(
                [path if path.exists() else program, *words],
                stdin=given,
                capture_output=program != "pg_ctl",  # its child keeps the pipes open
                text=True,
                cwd="/",
                timeout=60,
                check=False,
                **self.account.identity,
            )
        assert done.returncode == 0, f"{program}: {done.stderr}"
        return done.stdout
