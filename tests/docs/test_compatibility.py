"""The page about compatibility names tests that exist, all of them, and addresses that exist."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from itertools import groupby
from pathlib import Path

import pytest
from starlette.routing import Route, WebSocketRoute

from restante.server.app import ROUTES

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
PAGE = (ROOT / "docs/compatibility.md").read_text()
STATEMENT = re.compile(r"^\| (\w+)-(\d+) \| (.+) \| `([\w/]+\.py)::(\w+)` \|$", re.MULTILINE)
STATEMENTS: list[tuple[str, str, str, str, str]] = STATEMENT.findall(PAGE)
ADDRESSES = re.findall(r"^\| `([A-Z]+) (/\S+)` \|", PAGE, re.MULTILINE)


@cache
def defined(file: Path) -> frozenset[str]:
    """The tests of a file."""
    found = ast.parse(file.read_text()).body
    functions = (one for one in found if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef))
    return frozenset(one.name for one in functions if one.name.startswith("test_"))


def served() -> Iterator[tuple[str, str]]:
    for route in ROUTES:
        if isinstance(route, WebSocketRoute):
            yield "GET", route.path
        elif isinstance(route, Route):
            yield from ((method, route.path) for method in route.methods or ())


def test_every_line_of_a_section_is_a_statement_with_a_test():
    checked = PAGE.partition("## What is checked")[2]

    rows = [line for line in checked.splitlines() if re.match(r"\| \w+-", line)]

    assert len(rows) == len(STATEMENTS) > 100


def test_statements_are_numbered_in_order():
    for section, lines in groupby(STATEMENTS, key=lambda line: line[0]):
        numbers = [int(line[1]) for line in lines]
        assert numbers == list(range(1, len(numbers) + 1)), section
    sections = [section for section, _ in groupby(line[0] for line in STATEMENTS)]
    assert len(sections) == len(set(sections))


@pytest.mark.parametrize(
    ("file", "test"), [line[3:] for line in STATEMENTS], ids=[f"{s[0]}-{s[1]}" for s in STATEMENTS]
)
def test_a_named_test_exists(file: str, test: str):
    assert test in defined(TESTS / file)


def test_every_test_of_the_folder_is_named():
    named = {(file, test) for *_, file, test in STATEMENTS}

    for file in sorted((TESTS / "compatibility").glob("test_*.py")):
        path = f"compatibility/{file.name}"
        assert defined(file) <= {test for named_file, test in named if named_file == path}


def test_every_address_of_the_existing_server_is_served():
    assert len(ADDRESSES) >= 15
    assert set(ADDRESSES) <= set(served())
