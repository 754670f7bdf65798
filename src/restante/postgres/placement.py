"""
Where to put binaries and cluster so that the Postgres account can reach them.

What it cannot reach is copied or placed elsewhere. Existing permissions are never widened.
"""

import hashlib
import secrets
import shutil
import stat
import tempfile
from pathlib import Path

from restante.errors import PostgresUnusable
from restante.postgres.account import Account
from restante.postgres.binaries import Binaries
from restante.postgres.datadir import SYSTEM_DIRECTORY, DataDirectory, make_directories

CLUSTER = "postgres"
LOCATION_FILE = "postgres.location"


def existing_home(directory: DataDirectory) -> Path | None:
    """The directory that holds the cluster, None before the first start."""
    home = _recorded_home(directory) or directory.path
    return home if (home / CLUSTER).is_dir() else None


def _recorded_home(directory: DataDirectory) -> Path | None:
    file = directory.path / LOCATION_FILE
    if not file.exists():
        return None
    home = Path(file.read_text().strip())
    if not home.is_dir():
        raise PostgresUnusable(
            f"{file} says that the database is in {home}, but it is not there."
            f" Restore it, or remove {file} to start with an empty database."
        )
    return home


def new_home(directory: DataDirectory, account: Account) -> Path:
    """
    Choose the directory for a new cluster: the data directory if the account can reach it.

    Another directory is recorded before it is used, so that a crash does not leak it. It gets a
    unique name: a data directory that was removed and created again starts empty.
    """
    recorded = _recorded_home(directory)
    if recorded or account.can_enter(directory.path):
        return recorded or directory.path
    name = f"{short_hash(str(directory.path))}-{secrets.token_hex(4)}"
    home = SYSTEM_DIRECTORY / "clusters" / name
    make_directories(home)
    draft = directory.path / f"{LOCATION_FILE}.new"
    draft.write_text(f"{home}\n")
    draft.replace(directory.path / LOCATION_FILE)
    return home


def check_reachable(home: Path, account: Account) -> None:
    if not account.can_enter(home):
        raise PostgresUnusable(
            f"The account {account.name}, which runs Postgres, cannot reach {home}."
            " Run chmod o+x on the directories above it, or choose another --data-dir."
        )


def runnable_by(account: Account, binaries: Binaries) -> Binaries:
    """Return these binaries, or a copy of them that the account can run."""
    if _can_run(account, binaries):
        return binaries
    copied = _copy(binaries)
    if not _can_run(account, copied):
        raise PostgresUnusable(
            f"The account {account.name}, which runs Postgres, can run neither the binaries in"
            f" {binaries.bin_dir} nor their copy in {copied.bin_dir}."
        )
    return copied


def short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _can_run(account: Account, binaries: Binaries) -> bool:
    return all(
        account.can_run(program, "--version") for program in (binaries.postgres, binaries.initdb)
    )


def _copy(binaries: Binaries) -> Binaries:
    install = binaries.bin_dir.parent
    target = SYSTEM_DIRECTORY / "binaries" / _copy_name(binaries)
    if not target.exists():
        _copy_installation(target, install)
    return Binaries(
        target / install.parent.name / install.name / "bin", binaries.major, binaries.minor
    )


def _copy_name(binaries: Binaries) -> str:
    program = binaries.postgres.stat()
    source = f"{binaries.bin_dir} {program.st_size} {program.st_mtime_ns}"
    return f"{binaries.bin_dir.parent.name}-{binaries.version}-{short_hash(source)}"


def _copy_installation(target: Path, install: Path) -> None:
    """Copy an installation and the shared libraries of its wheel, atomically."""
    make_directories(target.parent)
    draft = Path(tempfile.mkdtemp(prefix=".new-", dir=target.parent))
    try:
        package = install.parent
        for part in ("bin", "lib", "share"):
            _copy_tree(install / part, draft / package.name / install.name / part)
        libraries = f"{package.name}.libs"
        _copy_tree(package.parent / libraries, draft / libraries)
        _make_readable(draft)
        _publish(draft, target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _copy_tree(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target)


def _make_readable(copy: Path) -> None:
    for path in (copy, *copy.rglob("*")):
        is_executable = path.is_dir() or path.stat().st_mode & stat.S_IXUSR
        path.chmod(0o755 if is_executable else 0o644)


def _publish(draft: Path, target: Path) -> None:
    try:
        draft.rename(target)
    except OSError:
        # Another process has published the same copy.
        if not target.is_dir():
            raise
