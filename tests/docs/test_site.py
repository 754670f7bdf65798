"""The documentation is built as a site, its links lead somewhere, and it needs no other site."""

import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import pytest

pytestmark = pytest.mark.timeout(300)

ROOT = Path(__file__).parents[2]
LINK = re.compile(r'<(\w+)\b[^>]*? (?:href|src)="([^"]+)"')
ANCHOR = re.compile(r' id="([^"]+)"')
LOADED_BY_STYLE = re.compile(r"(?:@import\s+|url\(\s*)['\"]?([^)'\";]+)")
ELSEWHERE = re.compile(r"(?!data:)[a-z]+:|//")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; a warning, such as a link to a missing page, fails the build."""
    output = tmp_path_factory.mktemp("docs")
    words = [sys.executable, ROOT / "docs/site/build.py", output]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return output / "site"


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, str]:
    return {path: path.read_text() for path in sorted(site.rglob("*.html"))}


def test_every_document_is_a_page(pages: dict[Path, str]):
    documents = {path.stem for path in (ROOT / "docs").glob("*.md")}
    decisions = {path.stem for path in (ROOT / "docs/decisions").glob("*.md")}

    assert documents | decisions | {"start", "python", "commands"} <= {page.stem for page in pages}


def test_links_and_anchors_lead_somewhere(pages: dict[Path, str]):
    anchors = {page: set(ANCHOR.findall(text)) for page, text in pages.items()}
    broken: set[str] = set()
    for page, text in pages.items():
        for _, link in set(LINK.findall(text)):
            file, _, anchor = unquote(link).partition("#")
            if ELSEWHERE.match(link):
                continue
            target = (page.parent / file.partition("?")[0]).resolve() if file else page
            if not target.exists() or (anchor and anchor not in anchors.get(target, {anchor})):
                broken.add(f"{page.name}: {link}")

    assert broken == set()


def test_nothing_is_loaded_from_elsewhere(site: Path, pages: dict[Path, str]):
    """The site works without the internet, and tells nobody who reads it."""
    loaded = [
        link
        for text in pages.values()
        for tag, link in LINK.findall(text)
        if tag != "a" and ELSEWHERE.match(link)
    ]
    styles = [
        link
        for path in site.rglob("*.css")
        for link in LOADED_BY_STYLE.findall(path.read_text())
        if ELSEWHERE.match(link)
    ]

    assert loaded + styles == []


def test_the_search_knows_the_words_of_the_reference(site: Path):
    index = (site / "searchindex.js").read_text()

    for word in ("send_fil", "acknowledg", "RESTANTE_PORT".lower(), "Python reference"):
        assert word in index


def test_the_reference_is_written_from_the_docstrings(site: Path):
    page = re.sub(r"<[^>]+>", "", (site / "python.html").read_text())

    assert "Send files in one request: the workspace gets all of them or none." in page
    assert "files: Several[Source]" in page
    assert "to: AnyId" in page
