"""
Parses multipart/form-data as it arrives, without I/O.

Senders in the field were written for tolerant parsers, and this one accepts what Go's does.  Line
ends of part heads may be a bare LF, and so may all others if that of the first boundary line is.
Text before the first boundary and blanks after any boundary are skipped.  A header that is not
UTF-8 is Latin-1.  Only the head of a part, or what may be the start of a boundary, waits in memory.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias
from urllib.parse import unquote_to_bytes

from restante.errors import TooManyFiles, UploadMalformed

_MAX_HEAD_BYTES = 16 * 1024
_MAX_PADDING_BYTES = 1024
_BLANKS = b" \t"

_HEADER_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
# Possessive: a part of a header is looked at once, whatever it contains.
_PARAMETER = re.compile(
    r';\s*+(?P<name>[^\s=;"]++)\s*+=\s*+(?:"(?P<quoted>(?:[^"\\]|\\.)*+)"?|(?P<bare>[^;]*+))',
    re.DOTALL,
)
# Only these are escaped by a backslash: in "C:\dir\a.txt" it is a character like any other.
_ESCAPED = re.compile(r'\\([()<>@,;:\\"/\[\]?=])')
_CHARSETS = frozenset({"utf-8", "iso-8859-1"})
# RFC 2046 allows fewer characters and a length of 70; some senders do not keep to it.
_BOUNDARY = re.compile("[ -~]{0,199}[!-~]")
_PERCENT_ENCODED = re.compile(r"(?:[!-$&-~]|%[0-9A-Fa-f]{2})+")


@dataclass(frozen=True, slots=True)
class PartHead:
    """A part begins; its contents follow."""

    field: str
    filename: str | None  # None: it has none; empty: a file field of a browser without a file
    content_type: str


# A part begins, some of its contents, or None: it has ended.
Event: TypeAlias = PartHead | bytes | None


def boundary_of(content_type: str) -> bytes | None:
    """The boundary of a form, from its Content-Type; None if it is another type or has none."""
    kind, _, _ = content_type.partition(";")
    if kind.strip().lower() != "multipart/form-data":
        return None
    boundary = _parameters(content_type).get("boundary", "")
    return boundary.encode() if _BOUNDARY.fullmatch(boundary) else None


class FormParser:
    """Turns the pieces of a body into events."""

    def __init__(self, boundary: bytes, *, max_parts: int) -> None:
        self._dashed = b"--" + boundary
        self._delimiter = b"\r\n" + self._dashed  # after the contents of a part
        self._max_parts = max_parts
        self._parts = 0
        # The first boundary begins a line, or the body.
        self._buffer = b"\n"
        self._at = 0  # what comes before in the buffer is done
        self._lines: list[bytes] = []  # of the head that is being read
        self._head_bytes = 0
        self._step = self._skip_preamble

    def feed(self, piece: bytes) -> Iterator[Event]:
        """More of the body; consume all events before the next call.  Raises UploadMalformed."""
        self._buffer += piece
        while (events := self._step()) is not None:
            yield from events
        self._buffer, self._at = self._buffer[self._at :], 0

    def close(self) -> None:
        """The body has ended; raises UploadMalformed if it is incomplete."""
        if self._step != self._skip_epilogue:
            raise _malformed("it ends before its last boundary")

    # Each step moves on in the buffer, and returns None if it needs more bytes.

    def _skip_preamble(self) -> Sequence[Event] | None:
        start = b"\n" + self._dashed
        found = self._buffer.find(start, self._at)
        if found < 0:
            self._at = max(self._at, len(self._buffer) - len(start) + 1)
            return None
        self._at = found + len(start)
        self._step = self._end_boundary_line
        return []

    def _end_boundary_line(self) -> Sequence[Event] | None:
        """What follows a boundary: two dashes end the form, the end of the line begins a part."""
        after = self._buffer[self._at : self._at + 2]
        if after in {b"", b"-"}:
            return None
        if after == b"--":
            self._step = self._skip_epilogue
            return []
        end = self._buffer.find(b"\n", self._at, self._at + _MAX_PADDING_BYTES)
        if end < 0 and len(self._buffer) - self._at < _MAX_PADDING_BYTES:
            return None
        padding = self._buffer[self._at : end]
        if end < 0 or padding.removesuffix(b"\r").strip(_BLANKS):
            return self._refuse_boundary()
        self._begin_part(is_bare=not padding.endswith(b"\r"))
        self._at, self._step = end + 1, self._read_head
        return []

    def _refuse_boundary(self) -> Sequence[Event]:
        """Before the first part it may be text like any other."""
        if self._parts:
            raise _malformed("unexpected bytes after a boundary")
        self._step = self._skip_preamble
        return []

    def _begin_part(self, *, is_bare: bool) -> None:
        if not self._parts and is_bare:
            self._delimiter = b"\n" + self._dashed
        self._parts += 1
        if self._parts > self._max_parts:
            raise TooManyFiles(f"A form has at most {self._max_parts} parts.", max=self._max_parts)
        self._lines, self._head_bytes = [], 0

    def _read_head(self) -> Sequence[Event] | None:
        end = self._buffer.find(b"\n", self._at)
        size = (len(self._buffer) if end < 0 else end + 1) - self._at
        if self._head_bytes + size > _MAX_HEAD_BYTES:
            raise _malformed("the head of a part is too long")
        if end < 0:
            return None
        line = self._buffer[self._at : end].removesuffix(b"\r")
        self._at, self._head_bytes = end + 1, self._head_bytes + size
        if line:
            self._add_line(line)
            return []
        self._step = self._begin_contents
        return [_head(self._lines)]

    def _add_line(self, line: bytes) -> None:
        if line[:1] not in {b" ", b"\t"}:
            self._lines.append(line)
        elif self._lines:
            self._lines[-1] += b" " + line.strip(_BLANKS)
        else:
            raise _malformed("the head of a part begins with a continued line")

    def _begin_contents(self) -> Sequence[Event] | None:
        """The line end of the head is enough before a boundary, if the part is empty."""
        start = self._buffer[self._at : self._at + len(self._dashed)]
        ends = self._ends_part(self._at + len(self._dashed)) if start == self._dashed else False
        if ends is None or (start != self._dashed and self._dashed.startswith(start)):
            return None
        if not ends:
            self._step = self._read_contents
            return []
        self._at += len(self._dashed)
        self._step = self._end_boundary_line
        return [None]

    def _read_contents(self) -> Sequence[Event] | None:
        data, delimiter = self._buffer, self._delimiter
        found = data.find(delimiter, self._at)
        while found >= 0:
            ends = self._ends_part(found + len(delimiter))
            if ends is None:
                return self._take(found)
            if ends:
                contents = self._take(found) or ()
                self._at, self._step = found + len(delimiter), self._end_boundary_line
                return [*contents, None]
            found = data.find(delimiter, found + 1)
        # The first byte of a delimiter is in none of its other places.
        start = data.rfind(delimiter[:1], max(self._at, len(data) - len(delimiter) + 1))
        is_start = start >= 0 and delimiter.startswith(data[start:])
        return self._take(start if is_start else len(data))

    def _ends_part(self, at: int) -> bool | None:
        """Whether what follows a boundary makes it one; None: that needs more bytes."""
        after = self._buffer[at : at + 2]
        if after in {b"", b"-"}:
            return None
        return after == b"--" or after[:1] in {b" ", b"\t", b"\r", b"\n"}

    def _take(self, end: int) -> Sequence[Event] | None:
        """Contents up to here, if there are any."""
        contents = self._buffer[self._at : end]
        self._at = end
        return [contents] if contents else None

    def _skip_epilogue(self) -> None:
        self._at = len(self._buffer)


def _malformed(what: str) -> UploadMalformed:
    return UploadMalformed(f"The multipart body is broken: {what}.")


def _head(lines: Sequence[bytes]) -> PartHead:
    """A part without the disposition `form-data` has no field, and is ignored."""
    headers: dict[bytes, str] = {}
    for line in lines:
        name, colon, value = line.partition(b":")
        if not colon or not _HEADER_NAME.fullmatch(name.rstrip(_BLANKS)):
            raise _malformed("the head of a part has a line that is not a header")
        headers.setdefault(name.rstrip(_BLANKS).lower(), _decoded(value).strip())
    kind, _, _ = (disposition := headers.get(b"content-disposition", "")).partition(";")
    parameters = _parameters(disposition) if kind.strip().lower() == "form-data" else {}
    filename = _extended(parameters.get("filename*", ""))
    if filename is None and "filename" in parameters:
        filename = _without_percents(parameters["filename"])
    field = _without_percents(parameters.get("name", ""))
    return PartHead(field, filename, headers.get(b"content-type", ""))


def _decoded(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def _parameters(header: str) -> dict[str, str]:
    """The parameters behind the first value, by their names in lower case; the first one counts."""
    found: dict[str, str] = {}
    for match in _PARAMETER.finditer(header):
        quoted, bare = match["quoted"], match["bare"]
        value = bare.strip() if quoted is None else _ESCAPED.sub(r"\1", quoted)
        found.setdefault(match["name"].lower(), value)
    return found


def _without_percents(value: str) -> str:
    """Browsers encode these three characters of a name, and no others."""
    return value.replace("%22", '"').replace("%0D", "\r").replace("%0A", "\n")


def _extended(value: str) -> str | None:
    """The value of an extended parameter (RFC 5987), or None if it is malformed."""
    charset, _, rest = value.partition("'")
    _language, has_charset, encoded = rest.partition("'")
    if not has_charset or charset.lower() not in _CHARSETS:
        return None
    if not _PERCENT_ENCODED.fullmatch(encoded):
        return None
    try:
        return unquote_to_bytes(encoded).decode(charset)
    except UnicodeDecodeError:
        return None
