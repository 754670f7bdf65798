"""
Builds the documentation as a site, without the internet: `make docs`.

The pages are the Markdown files of this repository as they are, and those in `pages/`.  They are
collected into one directory, because on the site `README.md` is beside `docs/client.md`; their
links are changed accordingly.  A link to a page that does not exist is an error, as is a page that
is not in the navigation, which is in `pages/index.md`.
"""  # noqa: INP001 - a script beside the documents, not a package

import io
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cyclopts import App

SITE = Path(__file__).parent
DOCS = SITE.parent
ROOT = DOCS.parent
OUTPUT = ROOT / "build/docs"

# What is not in `docs/`, and its name on the site.
_ELSEWHERE = {
    "README.md": "start.md",
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "docs/decisions": "decisions/index.md",
    "docs/runbooks": "runbooks/index.md",
}
_LINK = re.compile(r"(?<=\]\()[^)\s]+(?=\))")
_CODE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)


def main() -> None:
    """Build the site; ends with exit code 1 and Sphinx's sentences if something is wrong."""
    output = Path(sys.argv[1]) if len(sys.argv) > 1 else OUTPUT
    sys.exit(build(output))


def build(output: Path) -> int:
    """Collect the pages in `output/pages` and build them into `output/site`."""
    from sphinx.cmd.build import build_main  # noqa: PLC0415 - a test imports this file

    shutil.rmtree(output, ignore_errors=True)
    pages, site = output / "pages", output / "site"
    collect(pages)
    words = ["--fail-on-warning", "--quiet", "--doctree-dir", str(output / "doctrees")]
    return build_main([*words, str(pages), str(site)])


def collect(pages: Path) -> None:
    """Write all pages of the site into a directory, with the configuration of Sphinx."""
    shutil.copytree(SITE / "pages", pages)
    shutil.copy(SITE / "conf.py", pages)
    shutil.copy(DOCS / "recording.svg", pages)
    for path in sources():
        page = pages / place_of(path)
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(with_links_of_the_site(path, pages))
    (pages / "commands.md").write_text("\n".join(commands_page()))


def sources() -> Iterator[Path]:
    """The Markdown files of the repository that are pages of the site."""
    yield from (path for path in map(ROOT.joinpath, _ELSEWHERE) if path.is_file())
    yield from (path for path in sorted(DOCS.rglob("*.md")) if SITE not in path.parents)


def place_of(path: Path) -> PurePosixPath:
    """Where a page is on the site."""
    inside = path.relative_to(ROOT).as_posix()
    return PurePosixPath(_ELSEWHERE.get(inside, inside.removeprefix("docs/")))


def with_links_of_the_site(path: Path, pages: Path) -> str:
    """The text of a page; files that it links to, and that are no pages, are copied."""

    def changed(found: re.Match[str]) -> str:
        return _changed_link(found[0], path, pages)

    parts = _CODE.split(path.read_text())
    # Every other part is code.
    parts[::2] = [_LINK.sub(changed, part) for part in parts[::2]]
    return "".join(parts)


def _changed_link(link: str, path: Path, pages: Path) -> str:
    file, hash_, anchor = link.partition("#")
    target = Path(os.path.normpath(path.parent / file))
    if not file or not target.exists():
        return link  # another site's, or one that Sphinx complains about
    if target.suffix == ".md" or target.relative_to(ROOT).as_posix() in _ELSEWHERE:
        place = place_of(target)
    else:
        place = PurePosixPath("files") / target.name
        (pages / place).parent.mkdir(exist_ok=True)
        shutil.copy(target, pages / place)
    return os.path.relpath(place, place_of(path).parent) + hash_ + anchor


def commands_page() -> Iterator[str]:
    """What every command says about itself with `--help`."""
    from restante.cli.main import app  # noqa: PLC0415 - a test imports this file

    yield "# Commands\n\nWhat `restante --help` says, for every command."
    for words in _commands(app, ()):
        yield f"\n## {' '.join(('restante', *words))}\n\n```text\n{_help(app, words)}```"


def _commands(group: "App", above: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for name in group:
        if not name.startswith("-"):
            yield (*above, name)
            yield from _commands(group[name], (*above, name))


def _help(app: "App", words: tuple[str, ...]) -> str:
    from rich.console import Console  # noqa: PLC0415 - a test imports this file

    written = io.StringIO()
    console = Console(file=written, width=88, color_system=None)
    app([*words, "--help"], console=console, result_action="return_value")
    return re.sub(r" +$", "", written.getvalue().lstrip("\n"), flags=re.MULTILINE)


if __name__ == "__main__":
    main()
