"""The wheel has the product and nothing else; the source archive has all that it is made from."""

import contextlib
import re
import tarfile
import zipfile
from collections.abc import Iterator
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
from hatchling import build

from restante import __version__

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src"
NAME = f"restante-{__version__}"
METADATA = f"{NAME}.dist-info/METADATA"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two directories, each with a wheel and a source archive."""
    places = [tmp_path_factory.mktemp("built") for _ in range(2)]
    with pytest.MonkeyPatch.context() as patch, contextlib.chdir(ROOT):
        patch.setenv("SOURCE_DATE_EPOCH", "1700000000")
        for place in places:
            build.build_wheel(str(place))
            build.build_sdist(str(place))
    return places


@pytest.fixture
def wheel(built: list[Path]) -> Iterator[zipfile.ZipFile]:
    (found,) = built[0].glob("*.whl")
    with zipfile.ZipFile(found) as opened:
        yield opened


def metadata(wheel: zipfile.ZipFile) -> Message:
    return Parser().parsestr(wheel.read(METADATA).decode())


def test_the_wheel_has_every_file_of_the_product_and_no_other(wheel: zipfile.ZipFile):
    product = {
        str(path.relative_to(SOURCES))
        for path in SOURCES.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }

    found = {name for name in wheel.namelist() if not name.startswith(f"{NAME}.dist-info/")}

    assert found == product
    assert {"restante/py.typed", "restante/database/schema.sql"} <= found


def test_the_wheel_says_what_it_needs_and_where_it_runs(wheel: zipfile.ZipFile):
    """A laptop installs neither a Postgres nor a web server."""
    fields = metadata(wheel)

    needed = fields.get_all("Requires-Dist", [])
    always = {re.split(r"[<>=!~ ;]", one)[0] for one in needed if "extra ==" not in one}
    assert always == {"aiohttp", "cyclopts", "msgspec", "rich"}
    assert fields.get_all("Provides-Extra") == ["server"]
    assert fields["Requires-Python"] == ">=3.11"
    assert fields["License-Expression"] == "Apache-2.0"
    assert "Typing :: Typed" in fields.get_all("Classifier", [])


def test_the_wheel_brings_the_command(wheel: zipfile.ZipFile):
    entry_points = wheel.read(f"{NAME}.dist-info/entry_points.txt").decode()

    assert "restante = restante.cli.main:main" in entry_points


def test_the_source_archive_can_be_worked_on(built: list[Path]):
    with tarfile.open(built[0] / f"{NAME}.tar.gz") as opened:
        names = {name.removeprefix(f"{NAME}/") for name in opened.getnames()}

    needed = {"Makefile", "LICENSE", "README.md", "pyproject.toml", ".ci/run", "docs/operations.md"}
    assert needed | {"requirements.lock", "requirements-dev.lock", "deploy/Dockerfile"} <= names
    assert {str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("*.py")} <= names
    assert not [name for name in names if re.match(r"\.venv|\.git/|dist/|.*__pycache__", name)]


def test_two_builds_are_the_same_bytes(built: list[Path]):
    """Whoever builds the release again can compare it with what was published."""
    one, two = ({path.name: path.read_bytes() for path in place.iterdir()} for place in built)

    assert len(one) == 2
    assert one == two


@pytest.mark.parametrize(
    ("badge", "field", "said"),
    [
        ("license", "License-Expression", "license: {}"),
        ("python", "Requires-Python", "python: {}"),
    ],
)
def test_the_badges_say_what_the_package_says(
    wheel: zipfile.ZipFile, badge: str, field: str, said: str
):
    written = metadata(wheel)[field]
    shown = re.sub(r"^>=(.+)$", r"\1+", written)

    assert f"<title>{said.format(shown)}</title>" in (ROOT / f"docs/badges/{badge}.svg").read_text()
