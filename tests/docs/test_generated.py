"""The generated parts of the documents are up to date."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from restante.errors import RestanteError

DOCS = Path(__file__).parents[2] / "docs"
HINT = "is not up to date; run `make docs`"


def _loaded(path: Path) -> ModuleType:
    """A script that is not in a package."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


generate = _loaded(DOCS / "generate.py")


@pytest.mark.parametrize(
    ("page", "table"),
    [("operations.md", generate.error_table), ("protocol.md", generate.answer_table)],
)
def test_the_table_of_error_codes_is_up_to_date(page: str, table: Callable[[], str]):
    written = (DOCS / page).read_text()

    assert written == generate.replaced(written, table()), f"docs/{page} {HINT}"


def test_the_meaning_of_a_code_is_the_docstring_of_its_class():
    meanings = {found.code: found.meaning for found in generate.codes()}

    for error in RestanteError.__subclasses__():
        if error.__module__ == "restante.errors" and error.code not in generate.CLIENT_CODES:
            assert meanings[error.code] == " ".join((error.__doc__ or "").split())
            assert meanings[error.code].endswith(".")


def test_there_is_no_advice_for_a_code_that_does_not_exist():
    assert set(generate.ADVICE) == {found.code for found in generate.codes()}
