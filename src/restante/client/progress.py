"""
What a workspace has received so far, in SQLite, so that a crash at any time loses nothing.

A file is recorded before it gets its name.  So a later run knows whether it was placed, even if it
has been moved away since.  Only the newest files are remembered.
"""

import re
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Self
from uuid import UUID

from restante.client.calls import Cursor
from restante.errors import FolderFull, FolderInUse, FolderUnusable
from restante.ids import ActivityId, FileId

MAX_FILES = 10_000

_CURSOR_TABLE = """
create table if not exists cursor (
    only_row integer primary key check (only_row = 1), seq integer not null, id text
)"""
_FILES_TABLE = """
create table if not exists files (
    number integer primary key autoincrement,
    file_id text not null unique,
    name text not null,
    state text not null,
    directory text not null default ''
)"""
# Databases of earlier releases lack the column, and those releases ignore it.
_DIRECTORY_COLUMN = "alter table files add column directory text not null default ''"
_UPDATE = "update files set name = ?, state = ?, directory = ? where file_id = ?"
_INSERT = "insert into files (name, state, directory, file_id) values (?, ?, ?, ?)"

_ANSWER_TABLE = """
create table if not exists answer (
    only_row integer primary key check (only_row = 1),
    message_id text not null,
    text text not null,
    since_seq integer not null
)"""

# A file is placed beside the others; any other name was not written by us, and leads elsewhere.
_PLAIN_NAME = re.compile(r"(?!\.\.?$)[^/\0]+")


class State(StrEnum):
    """The state of a received file."""

    PLACING = "placing"  # complete, and about to get its name
    HANDLED = "handled"  # its command, if there is one, has succeeded
    ACKED = "acked"  # acknowledged to the server


@dataclass(frozen=True, slots=True)
class Received:
    """A file whose name has been chosen."""

    name: str
    state: State
    directory: str = ""  # absolute; empty for the folder's own

    def now(self, state: State) -> "Received":
        """The same file in another state."""
        return replace(self, state=state)


@dataclass(frozen=True, slots=True)
class Answer:
    """What the command said about a message, and the end of the feed before it is sent."""

    message_id: UUID  # the id of the message's row
    text: str
    since: Cursor


class Progress:
    """The cursor, the files, and an answer that is being sent, in one small database."""

    def __init__(self, path: Path, connection: sqlite3.Connection, max_files: int) -> None:
        self._path = path
        self._connection = connection
        self._max_files = max_files

    @classmethod
    def open(cls, path: Path, *, max_files: int = MAX_FILES) -> Self:
        """Open the database for this process only; raises FolderInUse if another has it open."""
        with _translated_errors(path), ExitStack() as opened:
            # Steps that write to the disk run in other threads, one after the other.
            connection = sqlite3.connect(
                path, timeout=0, isolation_level=None, check_same_thread=False
            )
            opened.enter_context(closing(connection))
            connection.execute("pragma locking_mode = exclusive")
            connection.execute("pragma journal_mode = wal")
            connection.execute("pragma synchronous = full")
            connection.execute("begin exclusive")
            connection.execute(_CURSOR_TABLE)
            connection.execute(_FILES_TABLE)
            connection.execute(_ANSWER_TABLE)
            if "directory" not in _columns(connection, "files"):
                connection.execute(_DIRECTORY_COLUMN)
            connection.execute("commit")
            opened.pop_all()
        return cls(path, connection, max_files)

    def close(self) -> None:
        """Close the database, so that another process can open it."""
        self._connection.close()

    def cursor(self) -> Cursor | None:
        """How far the feed has been handled, None at first."""
        row = self._row("select seq, id from cursor")
        with _translated_errors(self._path):
            return Cursor(row[0], ActivityId(UUID(row[1])) if row[1] else None) if row else None

    def keep_cursor(self, cursor: Cursor) -> None:
        """Record how far the feed has been handled."""
        row_id = str(cursor.id) if cursor.id else None
        self._write("insert or replace into cursor values (1, ?, ?)", cursor.seq, row_id)

    def answer_to(self, message_id: UUID) -> Answer | None:
        """The answer to a message whose command has succeeded, None if there is none."""
        row = self._row("select text, since_seq from answer where message_id = ?", str(message_id))
        return Answer(message_id, row[0], Cursor(row[1])) if row else None

    def keep_answer(self, answer: Answer) -> None:
        """Record an answer before it is sent, in the place of the last one."""
        self._write(
            "insert or replace into answer values (1, ?, ?, ?)",
            str(answer.message_id),
            answer.text,
            answer.since.seq,
        )

    def received(self, file_id: FileId) -> Received | None:
        """The record of a file, None if there is none."""
        row = self._row("select name, state, directory from files where file_id = ?", str(file_id))
        if row is None or not _PLAIN_NAME.fullmatch(str(row[0])):
            return None
        with _translated_errors(self._path):
            return Received(row[0], State(row[1]), str(row[2]))

    def record(self, file_id: FileId, file: Received) -> Received:
        """Record the state of a file; delete the oldest records of acknowledged files."""
        values = (file.name, file.state, file.directory, str(file_id))
        # Not `insert ... on conflict`: that would use up a number each time.
        if not self._write(_UPDATE, *values):
            self._write(_INSERT, *values)
        if file.state is State.ACKED:
            self._write(
                "delete from files where state = 'acked' "
                "and number <= (select max(number) from files) - ?",
                self._max_files,
            )
        return file

    def check_room(self) -> None:
        """
        Raise FolderFull when too many received files have not been acknowledged.

        Their records are never deleted, because the files would be fetched again.
        """
        row = self._row("select count(*) from files where state <> 'acked'")
        if row and row[0] >= self._max_files:
            raise FolderFull(
                f"The command has failed for {row[0]} received files; no more are fetched until it "
                "succeeds for some."
            )

    def _row(self, statement: str, *values: object) -> tuple[Any, ...] | None:
        with _translated_errors(self._path):
            return self._connection.execute(statement, values).fetchone()

    def _write(self, statement: str, *values: object) -> int:
        with _translated_errors(self._path):
            return self._connection.execute(statement, values).rowcount


def _columns(connection: sqlite3.Connection, table: str) -> set[str]:
    return {row[1] for row in connection.execute(f"pragma table_info({table})")}


@contextmanager
def _translated_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (sqlite3.Error, ValueError) as error:
        name = getattr(error, "sqlite_errorname", "")
        if name.startswith("SQLITE_BUSY"):
            raise FolderInUse(
                f"Another program is receiving into {path.parent.parent.parent}: "
                "stop it, or use another folder."
            ) from error
        if name in {"SQLITE_FULL", "SQLITE_IOERR_WRITE", "SQLITE_IOERR_SHMSIZE"}:
            raise FolderFull(f"There is no space left for {path}: free some space.") from error
        raise FolderUnusable(
            f"{path} cannot be used: {error}. If it is damaged, move it away: pending uploads are "
            "then fetched again."
        ) from error
