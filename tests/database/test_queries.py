"""Every statement in a `queries.sql` is used, and every statement that is used exists."""

import ast
from importlib.resources import files
from pathlib import Path

import pytest

from restante.database import sql

SOURCES = Path(str(files("restante")))
PACKAGES = sorted(f"restante.{path.parent.name}" for path in SOURCES.rglob("queries.sql"))


def used_in(module: Path) -> set[tuple[str, str]]:
    """The statements that a module uses: (package, name)."""
    tree = ast.parse(module.read_text())
    loaded = {
        target.id: package
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and (package := _loaded_package(node.value))
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


def _loaded_package(value: ast.expr) -> str | None:
    """`sql.load("restante.feed")` loads "restante.feed"."""
    if (
        isinstance(value, ast.Call)
        and ast.unparse(value.func) == "sql.load"
        and isinstance(value.args[0], ast.Constant)
    ):
        return str(value.args[0].value)
    return None


USED = {use for module in SOURCES.rglob("*.py") for use in used_in(module)}


@pytest.mark.parametrize("package", PACKAGES)
def test_statements_and_their_users_agree(package: str):
    assert set(sql.load(package)) == {name for loaded, name in USED if loaded == package}


def test_only_files_that_exist_are_loaded():
    assert {package for package, _ in USED} == set(PACKAGES)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_statement_name_is_used_once(package: str):
    """A second statement of that name would silently replace the first."""
    text = files(package).joinpath("queries.sql").read_text()
    names = [line for line in text.splitlines() if line.startswith("-- name:")]

    assert len(names) == len(set(names)) == len(set(sql.load(package)))


def test_a_missing_statement_is_named_in_the_error():
    with pytest.raises(AttributeError, match=r"queries\.sql has no statement 'apend'"):
        _ = sql.load("restante.feed").apend
