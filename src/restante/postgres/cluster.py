"""A cluster: made whole or not at all, and open to nobody but our own accounts."""

import os
import pwd
import shutil
import tempfile
from pathlib import Path

import structlog

from restante.errors import PostgresUnusable
from restante.postgres.account import Account
from restante.postgres.binaries import Binaries
from restante.postgres.child import Child
from restante.postgres.placement import CLUSTER

log = structlog.stdlib.get_logger(__name__)

DRAFT = f"{CLUSTER}.new."
HBA = "local all restante peer map=restante\n"


def major_of(cluster: Path) -> int:
    """Read which major version of Postgres made the cluster."""
    try:
        return int((cluster / "PG_VERSION").read_text())
    except (FileNotFoundError, ValueError):
        raise PostgresUnusable(
            f"{cluster} is not a Postgres database: it has no readable PG_VERSION."
            " Move it away, or choose another --data-dir."
        ) from None


async def create(home: Path, binaries: Binaries, account: Account) -> None:
    """Make a cluster with the database `restante`; a crash leaves a draft for the next start."""
    draft = Path(tempfile.mkdtemp(prefix=DRAFT, dir=home))
    try:
        account.give(draft)
        await _initdb(draft, binaries, account)
        await _create_database(draft, binaries, account)
        _put(draft, home)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    log.info("postgres_created", version=binaries.version, directory=str(home / CLUSTER))


def remove_drafts(home: Path) -> None:
    for draft in home.glob(f"{CLUSTER}.new*"):
        shutil.rmtree(draft, ignore_errors=True)


def write_access_rules(home: Path, account: Account) -> None:
    """Let in this user, Postgres's account and root, by files that only we can write."""
    users = {"root", account.name, pwd.getpwuid(os.geteuid()).pw_name}
    rules = "".join(f'restante "{user}" restante\n' for user in sorted(users))
    for name, text in (("postgres.hba", HBA), ("postgres.ident", rules)):
        _write_once(home / name, text)


def _write_once(path: Path, text: str) -> None:
    """Write only what is new, so that a full disk does not empty a file that was right."""
    if not path.exists() or path.read_text() != text:
        path.write_text(text)
        path.chmod(0o644)


async def _initdb(draft: Path, binaries: Binaries, account: Account) -> None:
    rules = ["--auth-local=peer", "--auth-host=reject"]
    form = ["--username=restante", "--encoding=UTF8", "--locale=C", "--data-checksums"]
    command = [binaries.initdb, "--pgdata", draft, *form, *rules, "--no-instructions"]
    await _finish(Child.spawn(command, account))


async def _create_database(draft: Path, binaries: Binaries, account: Account) -> None:
    command = [binaries.postgres, "--single", "-D", draft, "-c", "exit_on_error=on", "postgres"]
    await _finish(Child.spawn(command, account, stdin=b"create database restante\n"))


async def _finish(child: Child) -> None:
    try:
        status = await child.wait()
    finally:
        await child.end()
    if status != 0:
        raise PostgresUnusable(
            f"The database for Restante cannot be made. Postgres says: {child.said.complaint}"
        )


def _put(draft: Path, home: Path) -> None:
    draft.rename(home / CLUSTER)
    handle = os.open(home, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
