"""What callers pass: ids as text, and several files where one path would be taken apart."""

from collections.abc import Iterable, Iterator, Mapping
from io import IOBase
from os import PathLike
from typing import Protocol, TypeVar
from uuid import UUID

from restante.errors import BadRequest
from restante.ids import FileId, WorkspaceId, as_uuid

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

# An id as the SDK returns it, or as a program has it in a file or a variable.
AnyId = UUID | str


class Listed(Protocol[T_co]):
    """
    A list, a tuple or a set, but no `str`.

    For type checkers a `str` is a sequence of `str`, so that one path would be taken for many.  It
    is no `Listed`, because it can be asked only whether it contains a `str`.
    """

    def __contains__(self, value: object, /) -> bool: ...
    def __iter__(self) -> Iterator[T_co]: ...
    def __len__(self) -> int: ...


# Several of something: a list, or what `Path.glob` returns.
Several = Listed[T] | Iterator[T]


def several(given: Several[T], what: str) -> list[T]:
    """The list of what was given; raises TypeError for a single one."""
    if _is_one(given):
        raise TypeError(f"{what} must be a list, even for a single one: [{given!r}].")
    return list(given)


def _is_one(given: object) -> bool:
    """Whether it is not several.  Type checkers refuse that, but not every program is checked."""
    is_one = isinstance(given, str | bytes | PathLike | Mapping | IOBase)
    return is_one or not isinstance(given, Iterable)


def workspace_id_of(given: AnyId) -> WorkspaceId:
    """A workspace's id; raises BadRequest for a text that is none."""
    return WorkspaceId(_uuid(given, "a workspace"))


def file_id_of(given: AnyId) -> FileId:
    """A file's id; raises BadRequest for a text that is none."""
    return FileId(_uuid(given, "a file"))


def _uuid(given: AnyId, whose: str) -> UUID:
    found = given if isinstance(given, UUID) else as_uuid(given)
    if found is None:
        raise BadRequest(f"{given!r} is not the id of {whose}: an id is a UUID.")
    return found
