"""Loads the named statements of a subject's SQL files."""

import re
from collections.abc import Iterator
from importlib.resources import files
from types import SimpleNamespace

_NAME = re.compile(r"^-- name: (?P<name>\w+)\n", re.MULTILINE)


class Statements(SimpleNamespace):
    """The statements of one file, as attributes; a name that is not there fails at once."""

    def __getattr__(self, name: str) -> str:
        raise AttributeError(f"there is no statement {name!r}")

    def __iter__(self) -> Iterator[str]:
        return iter(vars(self))


def load(package: str, noun: str = "queries") -> Statements:
    """Read `<noun>.sql` of a package: each statement stands under its `-- name:` line."""
    text = files(package).joinpath(f"{noun}.sql").read_text()
    _, *parts = _NAME.split(text)
    return Statements(**dict(zip(parts[::2], map(str.strip, parts[1::2]), strict=True)))


def quoted(identifier: str) -> str:
    """An identifier from our own catalogue, quoted for a statement."""
    return '"' + identifier.replace('"', '""') + '"'
