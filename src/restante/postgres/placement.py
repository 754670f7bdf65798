"""
Where Postgres's account can reach its programs and its files.

What the account cannot reach is copied or placed elsewhere, and never opened up to it.
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
NOTE = "postgres.location"


def existing_home(directory: DataDirectory) -> Path | None:
    """Find the directory that holds this data directory's cluster, None before the first start."""
    home = _noted_home(directory) or directory.path
    return home if (home / CLUSTER).is_dir() else None


def _noted_home(directory: DataDirectory) -> Path | None:
    note = directory.path / NOTE
    if not note.exists():
        return None
    home = Path(note.read_text().strip())
    if not home.is_dir():
        raise PostgresUnusable(
            f"The note {note} says that the database is in {home}, but it is not there."
            " Bring it back, or remove the note to begin with an empty one."
        )
    return home


def fresh_home(directory: DataDirectory, account: Account) -> Path:
    """
    Choose where a new cluster goes: inside the data directory if the account can get there.

    A home elsewhere is noted before anything is in it, so that a crash does not leave it behind,
    and never used twice: whoever removed a data directory does not meet its contents again.
    """
    noted = _noted_home(directory)
    if noted or account.can_enter(directory.path):
        return noted or directory.path
    name = f"{short_hash(str(directory.path))}-{secrets.token_hex(4)}"
    home = SYSTEM_DIRECTORY / "clusters" / name
    make_directories(home)
    draft = directory.path / f"{NOTE}.new"
    draft.write_text(f"{home}\n")
    draft.replace(directory.path / NOTE)
    return home


def check_reachable(home: Path, account: Account) -> None:
    if not account.can_enter(home):
        raise PostgresUnusable(
            f"The account {account.name}, which Postgres runs as, cannot pass through to {home}."
            " Let it (chmod o+x on the directories above), or choose another --data-dir."
        )


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
