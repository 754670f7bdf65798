"""
The file of a backup: a tar archive whose members carry their own digest.

A member is named `<part>/<number>-<sha256>`.  The numbers count all members, so a reader notices at
once what is damaged, missing or out of order, also from a pipe.  A part is cut into pieces, because
its size is not known before it ends; `tar -xO` puts the pieces together again.
"""

import hashlib
import re
import tarfile
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import IO, NamedTuple

import msgspec

from restante.backup import rules
from restante.backup.rules import About, End
from restante.errors import BackupUnusable
from restante.text import shown_bytes

ABOUT, DATABASE, FILES, END = "about", "database", "files", "end"

PIECE_BYTES = 8 * 1024 * 1024
_MAX_MEMBER_BYTES = 64 * 1024 * 1024
_NAME = re.compile(r"(?P<part>[a-z]+)/(?P<number>\d{8})-(?P<digest>[0-9a-f]{64})")
_BLOCK = 512
_ENDING = bytes(2 * _BLOCK)

_NOT_A_BACKUP = "This is not a backup of Restante: `restante backup` makes one."
_CUT_OFF = "The backup is incomplete: it ends in the middle. Copy it again, or use another."


class Member(NamedTuple):
    """One piece of a part."""

    part: str
    content: bytes


class Writer:
    """Writes the members of a backup, in order."""

    def __init__(self, write: Callable[[bytes], object], *, taken_at: datetime) -> None:
        self._write = write
        self._mtime = int(taken_at.timestamp())
        self._members = 0
        self.bytes = 0

    def about(self, backup: About) -> None:
        self._add(ABOUT, msgspec.json.format(msgspec.json.encode(backup), indent=2))

    def part(self, name: str) -> "Pieces":
        """What takes the bytes of a part; close it before the next one begins."""
        return Pieces(lambda piece: self._add(name, piece))

    def end(self) -> None:
        self._add(END, msgspec.json.encode(End(self._members, self.bytes)))
        self._out(_ENDING)

    def _add(self, part: str, content: bytes) -> None:
        digest = hashlib.sha256(content).hexdigest()
        header = tarfile.TarInfo(f"{part}/{self._members:08}-{digest}")
        header.size, header.mode, header.mtime = len(content), 0o600, self._mtime
        self._members += 1
        self._out(header.tobuf(tarfile.USTAR_FORMAT) + content + bytes(-len(content) % _BLOCK))

    def _out(self, data: bytes) -> None:
        self._write(data)
        self.bytes += len(data)


class Pieces:
    """Cuts a stream of bytes into members of one size."""

    def __init__(self, add: Callable[[bytes], None]) -> None:
        self._add = add
        self._buffer = bytearray()

    def write(self, data: bytes) -> None:
        self._buffer += data
        while len(self._buffer) >= PIECE_BYTES:
            self._add(bytes(self._buffer[:PIECE_BYTES]))
            del self._buffer[:PIECE_BYTES]

    def close(self) -> None:
        if self._buffer:
            self._add(bytes(self._buffer))


class Reader:
    """Reads the members of a backup, and checks each before anybody sees it."""

    def __init__(self, file: IO[bytes], *, on_read: Callable[[int], None] | None = None) -> None:
        self._file = file
        self._on_read = on_read
        self._members = 0
        self._next: Member | None = None
        self.bytes = 0

    def about(self) -> About:
        """The first member; raises BackupUnusable if this is something else."""
        member = self._read()
        if member.part != ABOUT:
            raise BackupUnusable(_NOT_A_BACKUP)
        return rules.about(member.content)

    def part(self, name: str) -> Iterator[bytes]:
        """The pieces of a part, to its end."""
        while True:
            member = self._next or self._read()
            if member.part != name:
                self._next = member
                return
            self._next = None
            yield member.content

    def end(self) -> None:
        """Raise BackupUnusable unless all was read and nothing is missing."""
        member = self._next or self._read()
        if member.part != END:
            raise BackupUnusable(f"The backup has a part that is not expected: {member.part}.")

    def _read(self) -> Member:
        before = End(self._members, self.bytes)
        header = self._header()
        name = _NAME.fullmatch(header.name)
        if name is None or not 0 <= header.size <= _MAX_MEMBER_BYTES:
            raise self._damaged()
        content = self._exactly(header.size)
        self._exactly(-header.size % _BLOCK)
        is_intact = hashlib.sha256(content).hexdigest() == name["digest"]
        if not is_intact or int(name["number"]) != before.members:
            raise self._damaged()
        if name["part"] == END and rules.end(content) != before:
            raise self._damaged()
        self._members += 1
        if self._on_read:
            self._on_read(self.bytes)
        return Member(name["part"], content)

    def _header(self) -> tarfile.TarInfo:
        block = self._exactly(_BLOCK)
        try:
            return tarfile.TarInfo.frombuf(block, "utf-8", "strict")
        except (tarfile.HeaderError, UnicodeDecodeError) as error:
            raise self._damaged() from error

    def _exactly(self, size: int) -> bytes:
        try:
            data = self._file.read(size) if size else b""
        except OSError as error:
            raise BackupUnusable(f"The backup cannot be read: {error.strerror}.") from error
        self.bytes += len(data)
        if len(data) < size:
            raise BackupUnusable(_CUT_OFF if self._members else _NOT_A_BACKUP)
        return data

    def _damaged(self) -> BackupUnusable:
        if not self._members:
            return BackupUnusable(_NOT_A_BACKUP)
        return BackupUnusable(
            f"The backup is damaged, at about {shown_bytes(self.bytes)}. Copy it again, or use "
            "another."
        )
