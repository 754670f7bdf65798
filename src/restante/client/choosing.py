"""
Which files a user means: paths, directories with the files in them, patterns.

A directory is for files that are meant to be seen.  Hidden files, links, and what is no file stay
behind and are counted: they are settings, secrets, or lead out of the directory.
"""

import glob
import os
import stat
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from restante.client.names import distinct
from restante.client.sending import Outgoing
from restante.errors import BadRequest, FileUnreadable

if TYPE_CHECKING:
    from collections.abc import Iterator

# In directories and by patterns: more are better sent as one archive.
MAX_FOUND = 1000
# A tree of empty directories has no files to count.
_MAX_VISITED = 100_000


@dataclass(frozen=True, slots=True)
class Choice:
    """A file, and the name to show: its own, or its path below the directory that was given."""

    path: Path | None  # None: standard input
    shown: str


@dataclass(slots=True)
class Chosen:
    """The files in the order of the arguments, and why how many others were skipped."""

    files: list[Choice] = field(default_factory=list[Choice])
    skipped: Counter[str] = field(default_factory=Counter[str])
    _found: int = 0
    _visited: int = 0

    def add(self, argument: Path) -> None:
        """
        Add a file, all in a directory, or all that match; what exists is not a pattern.

        Raises BadRequest for an empty directory and for too many files, and FileUnreadable.
        """
        if glob.has_magic(str(argument)) and not os.path.lexists(argument):
            found = glob.iglob(str(argument), recursive=True)  # noqa: PTH207 - absolute ones too
            matches = sorted(islice(found, MAX_FOUND + 1))
            if not matches:
                raise FileUnreadable(f"No file matches {argument}.")
            for match in matches:
                self._add_path(Path(match), found_by=argument)
        else:
            self._add_path(argument)

    def _add_path(self, path: Path, *, found_by: Path | None = None) -> None:
        found = _stat(path)
        if stat.S_ISDIR(found.st_mode):
            self._add_directory(path, found_by or path)
        elif found_by and not (stat.S_ISREG(found.st_mode) and found.st_size):
            self.skipped["empty" if stat.S_ISREG(found.st_mode) else "special"] += 1
        else:
            refuse_unfit(path)
            self._add_file(Choice(path, path.name), found_by)

    def _add_directory(self, top: Path, found_by: Path) -> None:
        before = len(self.files)
        directories = [top]
        while directories:
            directory = directories.pop()
            below: list[Path] = []
            for entry in self._entries(directory):
                if entry.is_dir(follow_symlinks=False):
                    below.append(Path(entry.path))
                else:
                    path = Path(entry.path)
                    self._add_file(Choice(path, path.relative_to(top).as_posix()), found_by)
            directories += reversed(below)
        if len(self.files) == before:
            skipped = f": skipped {_counts(self.skipped)}" if self.skipped else ""
            raise BadRequest(f"{top} has no files to send{skipped}.")

    def _entries(self, directory: Path) -> "Iterator[os.DirEntry[str]]":
        """The files and directories in a directory, by name, without those to be skipped."""
        try:
            with os.scandir(directory) as found:
                entries = sorted(found, key=lambda entry: entry.name)
        except OSError as error:
            raise FileUnreadable(f"{directory} cannot be read: {error.strerror}.") from error
        for entry in entries:
            self._visited += 1
            if self._visited > _MAX_VISITED:
                raise _too_many(directory)
            if reason := _looked_at(entry):
                self.skipped[reason] += 1
            else:
                yield entry

    def _add_file(self, choice: Choice, found_by: Path | None) -> None:
        self._found += found_by is not None
        if found_by is not None and self._found > MAX_FOUND:
            raise _too_many(found_by)
        self.files.append(choice)

    def outgoing(self, standard_input: Outgoing | None = None) -> list[Outgoing]:
        """The files under names that differ on every disk; raises FileUnreadable."""
        names = distinct(_name(choice.shown) for choice in self.files)
        sources = (choice.path or standard_input for choice in self.files)
        return [
            Outgoing.of(source).named(name)
            for source, name in zip(sources, names, strict=True)
            if source is not None
        ]

    @property
    def has_input(self) -> bool:
        """Whether standard input is one of the files."""
        return any(choice.path is None for choice in self.files)

    def rename_only(self, name: str) -> None:
        """Give another name to the only file; raises BadRequest if there are several."""
        if len(self.files) != 1:
            raise BadRequest(f"--name is for one file, and there are {len(self.files)}.")
        self.files = [replace(self.files[0], shown=name)]

    def shown_skipped(self) -> str:
        """What was skipped, in words for people."""
        return f"skipped {_counts(self.skipped)}."


def _name(shown: str) -> str:
    """A name for the wire, which has no directories, and no bytes that are not UTF-8."""
    return shown.replace("/", "_").encode(errors="replace").decode()


def refuse_unfit(path: Path) -> None:
    """Raise FileUnreadable for what is not a file, or is an empty one: no server takes it."""
    found = _stat(path)
    if stat.S_ISFIFO(found.st_mode):
        raise FileUnreadable(f"{path} is a pipe: read it as standard input, with - and --name.")
    if not stat.S_ISREG(found.st_mode):
        raise FileUnreadable(f"{path} is not a file.")
    if not found.st_size:
        raise FileUnreadable(f"{path} is empty, and empty files cannot be sent.")


def _stat(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except FileNotFoundError as error:
        raise FileUnreadable(f"{path} is not there.") from error
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise FileUnreadable(f"{path} cannot be read: {reason}.") from error


def _looked_at(entry: "os.DirEntry[str]") -> str | None:
    """Why it is skipped, if it is; it may go while the others are listed, or be closed to us."""
    try:
        return _reason_to_skip(entry)
    except FileNotFoundError:
        return "vanished"
    except OSError as error:
        raise FileUnreadable(f"{entry.path} cannot be read: {error.strerror}.") from error


def _reason_to_skip(entry: "os.DirEntry[str]") -> str | None:
    if entry.name.startswith("."):
        return "hidden"
    if entry.is_symlink():
        return "linked"
    if entry.is_dir():
        return None
    if not entry.is_file():
        return "special"
    return None if entry.stat().st_size else "empty"


def _counts(skipped: Counter[str]) -> str:
    return ", ".join(f"{count} {why}" for why, count in skipped.items())


def _too_many(argument: Path) -> BadRequest:
    return BadRequest(
        f"{argument} has more than {MAX_FOUND} files: send them as one, for example with "
        "`tar -c DIRECTORY | restante send WORKSPACE - --name files.tar`."
    )
