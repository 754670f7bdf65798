"""The operating-system account that runs Postgres; as root, an existing unprivileged one."""

import os
import pwd
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from restante.errors import PostgresUnusable

# Passed on to Postgres. Everything else is dropped, because it may contain secrets.
INHERITED = ("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")


class Identity(TypedDict, total=False):
    """The arguments of `subprocess` to run a program as another user."""

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

    def take_ownership(self, path: Path) -> None:
        """Make the account the owner of a path that we have just created."""
        if not self.is_ours:
            os.chown(path, self.uid, self.gid, follow_symlinks=False)

    def can_run(self, *command: str | Path) -> bool:
        """Whether the command succeeds as this account; running it covers ACLs too."""
        try:
            done = subprocess.run(
                command,
                check=False,
                cwd="/",
                env=minimal_environment(),
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


def minimal_environment() -> dict[str, str]:
    inherited = {name: os.environ[name] for name in INHERITED if name in os.environ}
    return inherited | {"LC_ALL": "C"}


def choose_account(configured: str | None, *, owner: int | None) -> Account:
    """
    Choose the account that runs Postgres.

    `owner` is the user id that owns an existing cluster. Only that account can run it, because
    Postgres must own its data directory.
    """
    account = (
        _account_for_root(configured, owner) if os.geteuid() == 0 else _current_account(configured)
    )
    if owner is not None and owner != account.uid:
        raise PostgresUnusable(
            f"The database belongs to {_user_name(owner)}, but Postgres would run as"
            f" {account.name}. Run Restante as {_user_name(owner)}, or choose another --data-dir."
        )
    return account


def _current_account(configured: str | None) -> Account:
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
    entry = _entry_by_name(configured) if configured is not None else _default_entry(owner)
    if entry is None:
        raise PostgresUnusable(
            f"Postgres does not run as root, and there is no account"
            f" {configured or 'postgres or nobody'}. Name an existing account with"
            " --postgres-account, or run Restante as an ordinary user."
        )
    if entry.pw_uid == 0:
        raise PostgresUnusable(
            f"Postgres does not run as {entry.pw_name}. Name an unprivileged account with"
            " --postgres-account."
        )
    return _from(entry)


def _default_entry(owner: int | None) -> pwd.struct_passwd | None:
    if owner:
        return _entry_by_uid(owner)
    return _entry_by_name("postgres") or _entry_by_name("nobody")


def _entry_by_name(name: str) -> pwd.struct_passwd | None:
    try:
        return pwd.getpwnam(name)
    except KeyError:
        return None


def _entry_by_uid(uid: int) -> pwd.struct_passwd | None:
    try:
        return pwd.getpwuid(uid)
    except KeyError:
        return None


def _user_name(uid: int) -> str:
    entry = _entry_by_uid(uid)
    return entry.pw_name if entry else f"user id {uid}"


def _from(entry: pwd.struct_passwd) -> Account:
    return Account(entry.pw_name, entry.pw_uid, entry.pw_gid)
