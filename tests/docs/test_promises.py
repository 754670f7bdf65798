"""Each promise names tests, and each of them exists."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SECTIONS = re.split(r"^## ", (ROOT / "docs/promises.md").read_text(), flags=re.MULTILINE)[1:]
NAMED = [
    (file, test)
    for section in SECTIONS
    for file, test in re.findall(r"^- `(tests/[\w/]+\.py)::(\w+)`$", section, re.MULTILINE)
]


def test_there_are_ten_promises_and_each_names_its_tests():
    assert [section.split(".")[0] for section in SECTIONS] == [str(n) for n in range(1, 11)]
    assert all("- `tests/" in section for section in SECTIONS)


@pytest.mark.parametrize(("file", "test"), NAMED, ids=[test for _, test in NAMED])
def test_a_named_test_exists(file: str, test: str):
    tree = ast.parse((ROOT / file).read_text())

    defined = {n.name for n in tree.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}
    assert test in defined
