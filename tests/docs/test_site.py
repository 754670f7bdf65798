"""The documentation is built as a site, its links lead somewhere, and it needs no other site."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).parents[2]
LINK = re.compile(r'<(\w+)\b[^>]*? (?:href|src)="([^"]+)"')
ANCHOR = re.compile(r' id="([^"]+)"')
LOADED_BY_STYLE = re.compile(r"(?:@import\s+|url\(\s*)['\"]?([^)'\";]+)")
ELSEWHERE = re.compile(r"(?!data:)[a-z]+:|//")

Pages = dict[Path, str]


def missing(pages: Pages) -> set[str]:
    """Documents that are no page of the site."""
    documents = (ROOT / "docs").glob("*.md"), (ROOT / "docs/decisions").glob("*.md")
    names = {path.stem for paths in documents for path in paths}
    return (names | {"start", "python", "commands"}) - {page.stem for page in pages}


def broken_links(pages: Pages) -> Iterator[str]:
    """Links to pages and anchors that do not exist."""
    anchors = {page: set(ANCHOR.findall(text)) for page, text in pages.items()}
    for page, text in pages.items():
        for _, link in set(LINK.findall(text)):
            file, _, anchor = unquote(link).partition("#")
            if ELSEWHERE.match(link):
                continue
            target = (page.parent / file.partition("?")[0]).resolve() if file else page
            if not target.exists() or (anchor and anchor not in anchors.get(target, {anchor})):
                yield f"{page.name}: {link}"


def loaded_from_elsewhere(site: Path, pages: Pages) -> list[str]:
    """What a browser would ask other sites for when it shows a page."""
    by_page = [link for text in pages.values() for tag, link in LINK.findall(text) if tag != "a"]
    styles = [path.read_text() for path in site.rglob("*.css")]
    by_style = [link for text in styles for link in LOADED_BY_STYLE.findall(text)]
    return [link for link in by_page + by_style if ELSEWHERE.match(link)]


# One test, because each worker of a parallel run would build the site again.
@pytest.mark.timeout(300)
def test_the_site_is_whole_and_needs_no_other(tmp_path: Path):
    """It works without the internet, and tells nobody who reads it; a warning fails the build."""
    words = [sys.executable, ROOT / "docs/site/build.py", tmp_path]

    done = subprocess.run(words, capture_output=True, text=True, check=False)

    assert (done.returncode, done.stderr) == (0, "")
    site = tmp_path / "site"
    pages = {path: path.read_text() for path in sorted(site.rglob("*.html"))}
    assert missing(pages) == set()
    assert set(broken_links(pages)) == set()
    assert loaded_from_elsewhere(site, pages) == []
    index = (site / "searchindex.js").read_text()
    for word in ("send_fil", "acknowledg", "restante_port", "Python reference"):
        assert word in index
    reference = re.sub(r"<[^>]+>", "", (site / "python.html").read_text())
    assert "Send files in one request: the workspace gets all of them or none." in reference
    assert "files: Several[Source]" in reference
    assert "to: AnyId" in reference
