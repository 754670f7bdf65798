"""
What a workspace has received so far, kept on disk so that a crash at any instant loses nothing.

A file is noted before it gets its name, so a later run can tell whether it was placed, even if
somebody has taken it away since.  Only the newest files are remembered.
"""

import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Self
from uuid import UUID

from restante.client.calls import Cursor
from restante.errors import FolderFull, FolderInUse, FolderUnusable
from restante.ids import ActivityId, FileId

REMEMBERED_FILES = 10_000

_CURSOR_TABLE = """
create table if not exists cursor (
    only_row integer primary key check (only_row = 1), seq integer not null, id text
)"""
_FILES_TABLE = """
create table if not exists files (
    number integer primary key autoincrement,
    file_id text not null unique,
    name text not null,
    state text not null
)"""


class State(StrEnum):
    """How far a file has come."""

    PLACING = "placing"  # it is whole, and is being given its name
    HANDLED = "handled"  # its command has succeeded
    ACKED = "acked"  # the server knows that we have it


@dataclass(frozen=True, slots=True)
class Received:
    """A file that came to its name."""

    name: str
    state: State


class Progress:
    """The cursor and the files, in one small database."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self._path = path
        self._connection = connection

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open it for this process alone; raises FolderInUse if another one has it."""
        with _sentences(path), ExitStack() as opened:
            connection = sqlite3.connect(path, timeout=0, isolation_level=None)
            opened.enter_context(closing(connection))
            connection.execute("pragma locking_mode = exclusive")
            connection.execute("pragma journal_mode = wal")
            connection.execute("pragma synchronous = full")
            connection.execute("begin exclusive")
            connection.execute(_CURSOR_TABLE)
            connection.execute(_FILES_TABLE)
            connection.execute("commit")
            opened.pop_all()
        return cls(path, connection)

    def close(self) -> None:
        """Let others have it."""
        self._connection.close()

    def cursor(self) -> Cursor | None:
        """How far the feed has been handled, None if never."""
        row = self._row("select seq, id from cursor")
        with _sentences(self._path):
            return Cursor(row[0], ActivityId(UUID(row[1])) if row[1] else None) if row else None

    def keep_cursor(self, cursor: Cursor) -> None:
        """Note how far the feed has been handled."""
        row_id = str(cursor.id) if cursor.id else None
        self._write("insert or replace into cursor values (1, ?, ?)", cursor.seq, row_id)

    def received(self, file_id: FileId) -> Received | None:
        """What is known of a file."""
        row = self._row("select name, state from files where file_id = ?", str(file_id))
        with _sentences(self._path):
            return Received(row[0], State(row[1])) if row else None

    def note(self, file_id: FileId, name: str, state: State) -> None:
        """Note how far a file has come, and forget what is long past."""
        noted = (name, state, str(file_id))
        # Not an insert with `on conflict`: that would spend a number each time.
        if not self._write("update files set name = ?, state = ? where file_id = ?", *noted):
            self._write("insert into files (name, state, file_id) values (?, ?, ?)", *noted)
        if state is State.ACKED:
            self._write(
                "delete from files where state = 'acked' "
                "and number <= (select max(number) from files) - ?",
                REMEMBERED_FILES,
            )

    def check_room(self) -> None:
        """
        Raise FolderFull when too many files are here that no command has taken.

        What is unfinished is never forgotten, or it would come again; so there is an end to it.
        """
        row = self._row("select count(*) from files where state <> 'acked'")
        if row and row[0] >= REMEMBERED_FILES:
            raise FolderFull(
                f"{row[0]} files have arrived that their command has not taken; no more are "
                "fetched until it takes some."
            )

    def _row(self, statement: str, *values: object) -> tuple[Any, ...] | None:
        with _sentences(self._path):
            return self._connection.execute(statement, values).fetchone()

    def _write(self, statement: str, *values: object) -> int:
        with _sentences(self._path):
            return self._connection.execute(statement, values).rowcount


@contextmanager
def _sentences(path: Path) -> Iterator[None]:
    try:
        yield
    except (sqlite3.Error, ValueError) as error:
        name = getattr(error, "sqlite_errorname", "")
        if name.startswith("SQLITE_BUSY"):
            raise FolderInUse(
                f"Another program receives into {path.parent.parent.parent} already: "
                "end it, or use another folder."
            ) from error
        if name in {"SQLITE_FULL", "SQLITE_IOERR_WRITE", "SQLITE_IOERR_SHMSIZE"}:
            raise FolderFull(f"There is no room left for {path}: free some space.") from error
        raise FolderUnusable(
            f"{path} cannot be used: {error}. If it is damaged, move it away: what still waits "
            "is found again."
        ) from error
