"""The account that Postgres runs under: ours, or as root an unprivileged one that exists."""

import os
import pwd
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from restante.errors import PostgresUnusable

# What a program needs to find its libraries and speak English; none of our secrets.
INHERITED = ("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")


class Identity(TypedDict, total=False):
    """The arguments that make subprocess start a program as somebody else."""

    user: int
    group: int
    extra_groups: Sequence[int]


@dataclass(frozen=True, slots=True)
class Account:
    """An operating-system account by name and number."""

    name: str
    uid: int
    gid: int

    @property
    def is_ours(self) -> bool:
        return self.uid == os.geteuid()

    @property
    def identity(self) -> Identity:
        if self.is_ours:
            return {}
        return {"user": self.uid, "group": self.gid, "extra_groups": []}

    def give(self, path: Path) -> None:
        """Make the account the owner of something that we have just made."""
        if not self.is_ours:
            os.chown(path, self.uid, self.gid, follow_symlinks=False)

    def can_run(self, *command: str | Path) -> bool:
        """Whether the command succeeds for this account; trying it covers ACLs and the like."""
        try:
            done = subprocess.run(
                command,
                check=False,
                cwd="/",
                env=plain_environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                **self.identity,
            )
        except OSError:
            return False
        return done.returncode == 0

    def can_enter(self, path: Path) -> bool:
        return self.is_ours or self.can_run("/bin/sh", "-c", 'test -x "$1"', "sh", path)


def plain_environment() -> dict[str, str]:
    kept = {name: os.environ[name] for name in INHERITED if name in os.environ}
    return kept | {"LC_ALL": "C"}


def choose_account(configured: str | None, *, owner: int | None) -> Account:
    """
    Say who runs Postgres.

    `owner` is the user id that a cluster from an earlier start belongs to; it decides, since
    Postgres serves only what its own account owns.
    """
    account = _account_for_root(configured, owner) if os.geteuid() == 0 else _ourselves(configured)
    if owner is not None and owner != account.uid:
        raise PostgresUnusable(
            f"The database belongs to {_name_of(owner)}, but Postgres would run as {account.name}."
            f" Run Restante as {_name_of(owner)}, or choose another --data-dir."
        )
    return account


def _ourselves(configured: str | None) -> Account:
    try:
        entry = pwd.getpwuid(os.geteuid())
    except KeyError:
        raise PostgresUnusable(
            f"This process runs as user id {os.geteuid()}, which has no entry in /etc/passwd,"
            " and Postgres does not start without one. Run Restante as a user that has an entry."
        ) from None
    if configured is not None and configured != entry.pw_name:
        raise PostgresUnusable(
            f"Only root can run Postgres as the account {configured}; this is {entry.pw_name}."
        )
    return _from(entry)


def _account_for_root(configured: str | None, owner: int | None) -> Account:
    entry = _named(configured) if configured is not None else _existing(owner)
    if entry is None:
        raise PostgresUnusable(
            f"There is no account {configured or 'postgres or nobody'} here for Postgres, which"
            " refuses to be root. Name one that exists, or run Restante as an ordinary user."
        )
    if entry.pw_uid == 0:
        raise PostgresUnusable(
            f"Postgres does not run as {entry.pw_name}. Name an unprivileged account for it."
        )
    return _from(entry)


def _existing(owner: int | None) -> pwd.struct_passwd | None:
    if owner:
        return _numbered(owner)
    return _named("postgres") or _named("nobody")


def _named(name: str) -> pwd.struct_passwd | None:
    try:
        return pwd.getpwnam(name)
    except KeyError:
        return None


def _numbered(uid: int) -> pwd.struct_passwd | None:
    try:
        return pwd.getpwuid(uid)
    except KeyError:
        return None


def _name_of(uid: int) -> str:
    entry = _numbered(uid)
    return entry.pw_name if entry else f"user id {uid}"


def _from(entry: pwd.struct_passwd) -> Account:
    return Account(entry.pw_name, entry.pw_uid, entry.pw_gid)
