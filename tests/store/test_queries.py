"""Every statement in `queries/` is used, and every statement that is used is there."""

import ast
from importlib.resources import files
from pathlib import Path

import pytest

from restante.store import sql

SOURCES = Path(str(files("restante")))
NOUNS = sorted(path.stem for path in (SOURCES / "store" / "queries").glob("*.sql"))


def used_in(module: Path) -> set[tuple[str, str]]:
    """The statements that a module takes from what it has loaded: (noun, name)."""
    tree = ast.parse(module.read_text())
    loaded = {
        target.id: noun
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and (noun := _loaded_noun(node.value))
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    return {
        (loaded[node.value.id], node.attr)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in loaded
    }


def _loaded_noun(value: ast.expr) -> str | None:
    """`sql.load("feed")` loads "feed"."""
    if (
        isinstance(value, ast.Call)
        and ast.unparse(value.func) == "sql.load"
        and isinstance(value.args[0], ast.Constant)
    ):
        return str(value.args[0].value)
    return None


USED = {use for module in SOURCES.rglob("*.py") for use in used_in(module)}


@pytest.mark.parametrize("noun", NOUNS)
def test_statements_and_their_users_agree(noun: str):
    assert set(sql.load(noun)) == {name for loaded, name in USED if loaded == noun}


def test_only_files_that_exist_are_loaded():
    assert {noun for noun, _ in USED} == set(NOUNS)


@pytest.mark.parametrize("noun", NOUNS)
def test_a_name_is_given_once(noun: str):
    """The second one would silently replace the first."""
    text = (SOURCES / "store" / "queries" / f"{noun}.sql").read_text()
    names = [line for line in text.splitlines() if line.startswith("-- name:")]

    assert len(names) == len(set(names)) == len(set(sql.load(noun)))


def test_a_statement_that_is_not_there_is_named():
    with pytest.raises(AttributeError, match=r"queries/feed\.sql has no statement 'apend'"):
        _ = sql.load("feed").apend
