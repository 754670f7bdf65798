"""Creates the cluster atomically and restricts access to our own accounts."""

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
    """The major version of Postgres that created the cluster."""
    try:
        return int((cluster / "PG_VERSION").read_text())
    except (FileNotFoundError, ValueError):
        raise PostgresUnusable(
            f"{cluster} is not a Postgres database: it has no readable PG_VERSION."
            " Move it elsewhere, or choose another --data-dir."
        ) from None


async def create(home: Path, binaries: Binaries, account: Account) -> None:
    """Create a cluster with the database `restante`; a crash leaves only a draft directory."""
    draft = Path(tempfile.mkdtemp(prefix=DRAFT, dir=home))
    try:
        account.take_ownership(draft)
        await _initdb(draft, binaries, account)
        await _create_database(draft, binaries, account)
        publish(draft, home)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    log.info("postgres_created", version=binaries.version, directory=str(home / CLUSTER))


def remove_drafts(home: Path) -> None:
    for draft in home.glob(f"{CLUSTER}.new*"):
        shutil.rmtree(draft, ignore_errors=True)


def write_access_rules(home: Path, account: Account) -> None:
    """Allow peer authentication for this user, the Postgres account and root."""
    users = {"root", account.name, pwd.getpwuid(os.geteuid()).pw_name}
    rules = "".join(f'restante "{user}" restante\n' for user in sorted(users))
    for name, text in (("postgres.hba", HBA), ("postgres.ident", rules)):
        _write_if_changed(home / name, text)


def _write_if_changed(path: Path, text: str) -> None:
    """Skip an unchanged file, so that a full disk does not truncate it."""
    if not path.exists() or path.read_text() != text:
        path.write_text(text)
        path.chmod(0o644)


async def _initdb(draft: Path, binaries: Binaries, account: Account) -> None:
    authentication = ["--auth-local=peer", "--auth-host=reject"]
    format_ = ["--username=restante", "--encoding=UTF8", "--locale=C", "--data-checksums"]
    command = [binaries.initdb, "--pgdata", draft, *format_, *authentication, "--no-instructions"]
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
            f"The database cannot be created. Postgres reports: {child.output.last_error}"
        )


def publish(draft: Path, home: Path) -> None:
    """Give a complete cluster its name, durably."""
    draft.rename(home / CLUSTER)
    handle = os.open(home, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
