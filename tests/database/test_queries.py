"""Every statement in a file of SQL is used, and every statement that is used exists."""

import ast
from importlib.resources import files
from pathlib import Path

import pytest

from restante.database import sql

SOURCES = Path(str(files("restante")))
OTHER_SQL = {"schema"}  # for readers
FILES = sorted(
    (".".join(("restante", *path.relative_to(SOURCES).parent.parts)), path.stem)
    for path in SOURCES.rglob("*.sql")
    if path.stem not in OTHER_SQL and path.parent.name != "migrations"
)


def used_in(module: Path) -> set[tuple[tuple[str, str], str]]:
    """The statements that a module uses: the file, and the name in it."""
    tree = ast.parse(module.read_text())
    loaded = {
        target.id: file
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and (file := _loaded_file(node.value))
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


def _loaded_file(value: ast.expr) -> tuple[str, str] | None:
    """`sql.load("restante.feed")` loads "queries" of "restante.feed"."""
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "sql.load":
        package, noun = [*map(ast.literal_eval, value.args), "queries"][:2]
        return package, noun
    return None


USED = {use for module in SOURCES.rglob("*.py") for use in used_in(module)}


@pytest.mark.parametrize(("package", "noun"), FILES)
def test_statements_and_their_users_agree(package: str, noun: str):
    assert set(sql.load(package, noun)) == {
        name for loaded, name in USED if loaded == (package, noun)
    }


def test_only_files_that_exist_are_loaded():
    assert {file for file, _ in USED} == set(FILES)


@pytest.mark.parametrize(("package", "noun"), FILES)
def test_a_statement_name_is_used_once(package: str, noun: str):
    """A second statement of that name would silently replace the first."""
    text = files(package).joinpath(f"{noun}.sql").read_text()
    names = [line for line in text.splitlines() if line.startswith("-- name:")]

    assert len(names) == len(set(names)) == len(set(sql.load(package, noun)))


def test_a_missing_statement_is_named_in_the_error():
    with pytest.raises(AttributeError, match="there is no statement 'apend'"):
        _ = sql.load("restante.feed").apend
