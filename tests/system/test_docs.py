"""The documentation builds without warnings and network access, and its code runs as printed."""

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from support.pages import printed as pages
from support.paths import ROOT
from support.waiting import PATIENCE

pytestmark = pytest.mark.usefixtures("kinds_restored", "as_users_run")
PAGES = sorted([*(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "howto").glob("*.md")])
SURROUNDINGS = {
    **{name: value for name, value in os.environ.items() if name != "PCNET_ENGINE"},
    "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    "NO_MKDOCS_2_WARNING": "1",
}


SHOWN = {page.stem for page in PAGES if "print(" in page.read_text(encoding="utf-8")}
"""Pages whose code prints something, and which must show it."""


def blocks(page):
    return pages.blocks(page.read_text(encoding="utf-8"))


def test_there_is_code_to_run():
    assert sum(len(blocks(page)) for page in PAGES) > 30
    kinds = {block.language for page in PAGES for block in blocks(page)}
    assert kinds == {"python", "sh", "text", "yaml"}  # and no other kind


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: page.stem)
def test_code_prints_what_is_shown(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PCNET_ENGINE", raising=False)  # as readers run it; compiled, long runs are quicker
    before, shown = None, 0
    for block, printed in pages.run(page.read_text(encoding="utf-8"), page.stem, SURROUNDINGS, PATIENCE):
        if block.language == "text":
            different = pages.difference(before, block.code)
            assert different is None, f"{different}\n(python docs/printed.py {page.name} renews it)"
            shown += 1
        before = printed
    assert shown or page.stem not in SHOWN


class Needs(HTMLParser):
    """What a page loads by itself: scripts, styles and pictures, but not links that a reader may follow."""

    def __init__(self, text):
        super().__init__()
        self.found = set()
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        if tag in ("script", "img", "iframe"):
            self.found.add(given.get("src"))
        if tag == "link" and given.get("rel") not in ("canonical", "prev", "next"):
            self.found.add(given.get("href"))


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=SURROUNDINGS, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_the_site_builds_without_warnings_and_loads_nothing_from_the_network(site):
    pages = [path for path in site.rglob("*.html") if path.name != "404.html"]
    assert len(pages) >= len(PAGES) + 10
    for path in pages:
        for need in Needs(path.read_text(encoding="utf-8")).found - {None}:
            if not need.startswith("data:"):
                assert not re.match(r"(\w+:)?//", need), f"{path.name} loads {need}"
                assert (path.parent / need.partition("?")[0].partition("#")[0]).exists(), f"{path.name} misses {need}"
    for path in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import)\s*['\"]?(\w+:)?//", path.read_text(encoding="utf-8")), path.name


def test_the_reference_covers_all_public_names(site):
    import pcnet

    documented = "".join(path.read_text(encoding="utf-8") for path in (site / "reference").glob("*.html"))
    for name in pcnet.__all__:
        thing = getattr(pcnet, name)
        if not hasattr(thing, "__path__"):  # of a package, its parts are documented
            assert re.search(rf'id="pcnet[\w.]*\.{thing.__name__.rpartition(".")[2]}"', documented), name


def test_pictures_are_used_and_small():
    others = [ROOT / "README.md", ROOT / "mkdocs.yml"]
    text = "".join(page.read_text(encoding="utf-8") for page in [*PAGES, *others])
    pictures = list((ROOT / "docs" / "pictures").iterdir())
    assert len(pictures) >= 15
    for picture in pictures:
        assert f"pictures/{picture.name}" in text, picture.name
        assert picture.stat().st_size < 300_000, picture.name  # twice as fine as pages show them
