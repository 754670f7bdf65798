"""
Where Postgres's account can reach its programs and its files.

What the account cannot reach is copied or placed elsewhere, and never opened up to it.
"""

import hashlib
import os
import shutil
import stat
import tempfile
from pathlib import Path

from restante.errors import PostgresUnusable
from restante.postgres.account import Account
from restante.postgres.binaries import Binaries
from restante.postgres.datadir import SYSTEM_DIRECTORY, DataDirectory, make_directories

CLUSTER = "postgres"
NOTE = "postgres.location"


def existing_home(directory: DataDirectory) -> Path | None:
    """Find the directory that holds this data directory's cluster, None before the first start."""
    note = directory.path / NOTE
    if note.exists():
        return _noted_home(note)
    homes = [directory.path]
    if os.geteuid() == 0:
        homes.append(home_elsewhere(directory))
    return next((home for home in homes if (home / CLUSTER).is_dir()), None)


def _noted_home(note: Path) -> Path:
    home = Path(note.read_text().strip())
    if not (home / CLUSTER).is_dir():
        raise PostgresUnusable(
            f"The note {note} says that the database is in {home}, but it is not there."
            " Bring it back, or remove the note to begin with an empty one."
        )
    return home


def fresh_home(directory: DataDirectory, account: Account) -> Path:
    """Choose where a new cluster goes: inside the data directory if the account can get there."""
    if account.can_enter(directory.path):
        return directory.path
    home = home_elsewhere(directory)
    make_directories(home)
    return home


def home_elsewhere(directory: DataDirectory) -> Path:
    return SYSTEM_DIRECTORY / "clusters" / short_hash(str(directory.path))


def check_reachable(home: Path, account: Account) -> None:
    if not account.can_enter(home):
        raise PostgresUnusable(
            f"The account {account.name}, which Postgres runs as, cannot pass through to {home}."
            " Let it (chmod o+x on the directories above), or choose another --data-dir."
        )


def note_home(directory: DataDirectory, home: Path) -> None:
    """Remember a home outside the data directory; written only once a whole cluster is there."""
    note = directory.path / NOTE
    if home != directory.path and not note.exists():
        draft = note.with_suffix(".new")
        draft.write_text(f"{home}\n")
        draft.replace(note)


def runnable_by(account: Account, binaries: Binaries) -> Binaries:
    """Return these binaries, or a copy of them that the account can run."""
    if _runs(account, binaries):
        return binaries
    copied = _copy(binaries)
    if not _runs(account, copied):
        raise PostgresUnusable(
            f"The account {account.name}, which Postgres runs as, can run neither the programs in"
            f" {binaries.bin_dir} nor their copy in {copied.bin_dir}."
        )
    return copied


def short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _runs(account: Account, binaries: Binaries) -> bool:
    return all(
        account.can_run(program, "--version") for program in (binaries.postgres, binaries.initdb)
    )


def _copy(binaries: Binaries) -> Binaries:
    install = binaries.bin_dir.parent
    target = SYSTEM_DIRECTORY / "binaries" / _copy_name(binaries)
    if not target.exists():
        _fill(target, install)
    return Binaries(
        target / install.parent.name / install.name / "bin", binaries.major, binaries.minor
    )


def _copy_name(binaries: Binaries) -> str:
    program = binaries.postgres.stat()
    source = f"{binaries.bin_dir} {program.st_size} {program.st_mtime_ns}"
    return f"{binaries.bin_dir.parent.name}-{binaries.version}-{short_hash(source)}"


def _fill(target: Path, install: Path) -> None:
    """Copy an install, and the libraries a wheel keeps beside its package; all of it or nothing."""
    make_directories(target.parent)
    draft = Path(tempfile.mkdtemp(prefix=".new-", dir=target.parent))
    try:
        package = install.parent
        for part in ("bin", "lib", "share"):
            _copy_tree(install / part, draft / package.name / install.name / part)
        libraries = f"{package.name}.libs"
        _copy_tree(package.parent / libraries, draft / libraries)
        _make_readable(draft)
        _put(draft, target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _copy_tree(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target)


def _make_readable(copy: Path) -> None:
    for path in (copy, *copy.rglob("*")):
        runs = path.is_dir() or path.stat().st_mode & stat.S_IXUSR
        path.chmod(0o755 if runs else 0o644)


def _put(draft: Path, target: Path) -> None:
    try:
        draft.rename(target)
    except OSError:
        # Another Restante was first with the same copy.
        if not target.is_dir():
            raise
