"""Loads the named statements of `queries/<noun>.sql`."""

import re
from collections.abc import Iterator
from importlib.resources import files

_NAME = re.compile(r"^-- name: (?P<name>\w+)\n", re.MULTILINE)


class Statements:
    """The statements of one file, as attributes; a name that is not there fails at once."""

    def __init__(self, noun: str, by_name: dict[str, str]) -> None:
        self._noun = noun
        self._by_name = by_name

    def __getattr__(self, name: str) -> str:
        try:
            return self._by_name[name]
        except KeyError:
            raise AttributeError(f"queries/{self._noun}.sql has no statement {name!r}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)


def load(noun: str) -> Statements:
    """Read a file of statements, each under its `-- name:` line."""
    text = files("restante.store").joinpath("queries", f"{noun}.sql").read_text()
    _, *parts = _NAME.split(text)
    return Statements(noun, dict(zip(parts[::2], map(str.strip, parts[1::2]), strict=True)))


def quoted(identifier: str) -> str:
    """An identifier from our own catalogue, as it stands in a statement."""
    return '"' + identifier.replace('"', '""') + '"'
