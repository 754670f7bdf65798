"""Every command, setting, metric, error code, log event and make target is documented."""

import importlib
import pkgutil
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cyclopts import App
from starlette.routing import Route
from sweeps import make_subjects

import restante.server
from restante.cli.main import app
from restante.errors import RestanteError
from restante.http import problems
from restante.secret_files import FILE_VARIABLES
from restante.server.app import ROUTES
from restante.server.metrics import Metrics
from restante.settings import CLIENT_VARIABLES, COMMAND_VARIABLES, Settings, variable

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src/restante").rglob("*.py"))
DOCS = [path for path in (ROOT / "docs").rglob("*.md") if "site" not in path.parts]
PAGES = sorted([*ROOT.glob("*.md"), *DOCS])

README = (ROOT / "README.md").read_text()
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
OPERATIONS = (ROOT / "docs/operations.md").read_text()
CLIENT = (ROOT / "docs/client.md").read_text()
LIBRARY = (ROOT / "docs/library.md").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()

TARGETS = frozenset(re.findall(r"^([a-z]+):.*## ", MAKEFILE, re.MULTILINE))
LOG_CALL = re.compile(
    r"\blog\.(?:debug|info|warning|error|exception|critical)\(\s*\"(\w+)\"|\)\(\"(\w+)\", severity="
)
LINK = re.compile(r"(?<!!)\[[^]]*\]\(([^)\s]+)\)")
SHELL_BLOCK = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE_CODE = re.compile(r"`([^`\n]+)`")
OUR_ADDRESS = re.compile(r"https?://127\.0\.0\.1:\d+([^\s\"'?)]*)")
SOME_UUID = "00000000-0000-0000-0000-000000000000"


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def commands(group: App = app, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every command that runs something, as its words after `restante`."""
    for name in group:
        if not name.startswith("-"):
            inner = list(commands(group[name], (*above, name)))
            yield from inner or [(*above, name)]


def metric_names() -> list[str]:
    metrics = Metrics(Settings().metrics_namespace, make_subjects())
    families = [*metrics.registry.collect(), *metrics.operator_registry.collect()]
    return [f.name + ("_total" if f.type == "counter" else "") for f in families]


def error_classes() -> list[type[RestanteError]]:
    for module in pkgutil.walk_packages(restante.__path__, "restante."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    ours = {found for found in _below(RestanteError) if found.__module__.startswith("restante.")}
    return sorted(ours, key=lambda found: found.__name__)


def _below(base: type[RestanteError]) -> Iterator[type[RestanteError]]:
    for child in base.__subclasses__():
        yield child
        yield from _below(child)


def answered_codes() -> frozenset[str]:
    """The codes of answers that have no class of their own."""
    return frozenset(re.findall(r"\"code\": \"(\w+)\"", Path(problems.__file__).read_text())) | {
        *problems._HTTP_CODES.values()
    }


def log_events() -> frozenset[str]:
    found = (LOG_CALL.findall(path.read_text()) for path in SOURCES)
    return frozenset(name for calls in found for pair in calls for name in pair if name)


def row(name: str) -> list[str]:
    """The cells of the only table row in the guides that begins with this name."""
    guides = OPERATIONS + CLIENT + LIBRARY
    lines = re.findall(rf"^\| `{re.escape(name)}` \|(.*)\|$", guides, re.MULTILINE)
    assert len(lines) == 1, f"the guides have {len(lines)} table lines for {name}, not one"
    return [cell.strip() for cell in lines[0].split(" | ")]


def slug(heading: str) -> str:
    return re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-")


def shell_commands(page: str) -> Iterator[str]:
    """The lines of the shell blocks of a page, without comments, continued lines joined."""
    for block in SHELL_BLOCK.findall(page):
        for line in block.replace("\\\n", " ").splitlines():
            text = re.sub(r"(^|\s)#.*", "", line).strip()
            if text:
                yield text


def written_commands(page: str) -> Iterator[list[str]]:
    """The commands in a page that begin with make or restante."""
    for text in (*shell_commands(page), *INLINE_CODE.findall(page)):
        for part in re.split(r"&&|\|\||[;|(]", text):
            words = part.replace(".venv/bin/", "").split()
            if words and words[0] in {"make", "restante"}:
                yield words


@pytest.mark.parametrize("words", sorted(commands()), ids=" ".join)
def test_every_command_is_documented_and_shows_an_example(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
):
    typed = " ".join(("restante", *words))

    app([*words, "--help"], result_action="return_value")

    shown = " ".join(capsys.readouterr().out.split())
    assert f"Example: {typed}" in shown
    assert typed in README + OPERATIONS + CLIENT


@pytest.mark.parametrize("field", msgspec.structs.fields(Settings), ids=lambda field: field.name)
def test_every_setting_is_documented_with_its_default(field: Any):
    default, meaning = row(variable(field.name))[:2]

    assert default == ("unset" if field.default is None else f"`{plain(field.default)}`")
    assert meaning


def plain(value: object) -> str:
    """A value as an operator would write it: 5 for 5.0, true and false for booleans."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.15g}" if isinstance(value, float) else str(value)


def test_no_setting_is_documented_that_does_not_exist():
    written = set(re.findall(r"\bRESTANTE_[A-Z_]+\b", README + OPERATIONS + CONTRIBUTING + CLIENT))
    settings = {variable(name) for name in Settings.__struct_fields__}

    assert written <= settings | CLIENT_VARIABLES | COMMAND_VARIABLES | FILE_VARIABLES


@pytest.mark.parametrize("name", sorted(CLIENT_VARIABLES | COMMAND_VARIABLES))
def test_every_variable_of_the_client_is_documented(name: str):
    assert f"`{name}`" in CLIENT


@pytest.mark.parametrize("name", sorted(FILE_VARIABLES))
def test_every_variable_for_a_secret_in_a_file_is_documented(name: str):
    assert f"`{name}`" in OPERATIONS


@pytest.mark.parametrize("name", metric_names())
def test_every_metric_is_documented_with_its_meaning_and_what_to_do(name: str):
    _labels, meaning, what_to_do = row(name)

    assert meaning
    assert what_to_do


@pytest.mark.parametrize("error", error_classes(), ids=lambda error: error.__name__)
def test_every_error_code_is_documented_with_its_status(error: type[RestanteError]):
    status, meaning = row(error.code)[:2]

    assert meaning
    if error in problems.STATUS:
        assert status == str(problems.STATUS[error])


@pytest.mark.parametrize("code", sorted(answered_codes()))
def test_every_code_of_an_answer_is_documented(code: str):
    assert row(code)


def test_error_codes_are_unique():
    codes = [error.code for error in error_classes()]

    assert sorted(codes) == sorted(set(codes))


@pytest.mark.parametrize("event", sorted(log_events()))
def test_every_log_event_is_documented(event: str):
    assert row(event)


@pytest.mark.parametrize("target", sorted(TARGETS))
def test_every_make_target_is_documented(target: str):
    assert f"`make {target}`" in README + CONTRIBUTING


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_have_a_target(page: Path):
    for link in LINK.findall(page.read_text()):
        if re.match(r"[a-z]+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), f"{named(page)} links to {link}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
            assert anchor in map(slug, headings), f"{named(page)} links to {link}"


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_written_commands_exist(page: Path):
    known = {" ".join(words[: i + 1]) for words in commands() for i in range(len(words))}
    for tool, *rest in written_commands(page.read_text()):
        words = [word for word in rest if re.fullmatch(r"[a-z][a-z-]*", word)]
        if tool == "make":
            assert set(words) <= TARGETS, f"{named(page)} says: make {' '.join(rest)}"
        elif words and words[0] == rest[0]:
            assert words[0] in known, f"{named(page)} says: restante {' '.join(rest)}"


def test_the_readme_uses_only_paths_that_exist():
    paths = [path for text in shell_commands(README) for path in OUR_ADDRESS.findall(text)]

    assert paths
    for path in filter(None, paths):
        filled = re.sub(r"\$\{?\w+\}?|<\w+>", SOME_UUID, path)
        assert any(isinstance(one, Route) and one.path_regex.match(filled) for one in ROUTES), path


@pytest.mark.parametrize("part", ["cli", "client", "oplog"])
def test_the_architecture_names_every_file(part: str):
    page = (ROOT / "ARCHITECTURE.md").read_text()
    files = {path.stem for path in (ROOT / "src/restante" / part).glob("[!_]*.py")} - {"main"}

    named_there = set(re.findall(r"[\w.-]+", " ".join(INLINE_CODE.findall(page))))
    assert files - {name.removesuffix(".py") for name in named_there} == set()


@pytest.mark.parametrize("name", ["requirements.lock", "requirements-dev.lock"])
def test_a_lock_file_names_no_address(name: str):
    """Where packages come from is a setting of the machine."""
    lock = (ROOT / name).read_text()

    assert "://" not in lock
    assert not re.search(r"^\s*--(?!hash=)", lock, re.MULTILINE)
    packages = re.findall(r"^[\w.-]+==.*\n(.*)", lock, re.MULTILINE)
    assert all(line.startswith("    --hash=") for line in packages)


def test_servers_run_the_versions_that_are_tested():
    serving, tested = (locked(name) for name in ("requirements.lock", "requirements-dev.lock"))

    assert serving.items() <= tested.items()
    assert "uvicorn" in serving
    assert "pytest" not in serving


def locked(name: str) -> dict[str, str]:
    """The version of each package in a lock file."""
    return dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / name).read_text(), re.MULTILINE))


def test_every_module_of_the_server_is_kept_from_importing_the_wiring():
    """The contract has to name them one by one, so a new one is easily forgotten."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (contract,) = [
        one for one in contracts["contracts"] if one["name"] == "Only entry points know the wiring"
    ]
    modules = {module.name for module in pkgutil.iter_modules(restante.server.__path__)}

    expected = {f"restante.server.{name}" for name in modules - {"wiring"}}
    assert expected <= set(contract["source_modules"])
