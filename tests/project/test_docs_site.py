"""The site that `make docs` builds: no warning, nothing from elsewhere, nothing of this machine."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest
from scripts.doc_pages import ROOT, docs_files

if importlib.util.find_spec("mkdocs") is None or importlib.util.find_spec("material") is None:
    pytest.skip("mkdocs is not installed: pip install 'torchweld[docs]'", allow_module_level=True)

# Attributes that a browser loads from by itself; an <a href> waits for a click.
LOADS = {"src", "srcset", "poster", "data", "action"}
ELSEWHERE = re.compile(r"\s*(?:[a-z]+:)?//", re.IGNORECASE)


def build(folder: Path, config: Path = ROOT / "mkdocs.yml") -> subprocess.CompletedProcess[str]:
    """Builds the site as `make docs` does, into another folder. Proxies lead nowhere.

    Not with --quiet: then warnings are not counted, and nothing is strict.
    """
    nowhere = dict.fromkeys(("http_proxy", "https_proxy", "ALL_PROXY"), "http://127.0.0.1:9")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    return subprocess.run(
        [*command, "--config-file", str(config), "--site-dir", str(folder)],
        env={**os.environ, **nowhere, "NO_MKDOCS_2_WARNING": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build(folder)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return folder


class Loads(HTMLParser):
    """What a page loads, where its links lead, and its ids."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value:
                self.ids.add(value)
            if name == "href" and tag == "a":
                self.links.append(value or "")
            elif name in LOADS or name == "href":
                self.loads.append(value or "")
            elif name == "style":
                self.loads += re.findall(r"url\(([^)]*)\)", value or "")


def pages(site: Path) -> dict[Path, Loads]:
    found = {path: Loads(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}
    assert len(found) > 30
    return found


def test_there_is_a_page_for_every_page(site: Path) -> None:
    names = {
        path.relative_to(ROOT / "docs").with_suffix(".html").as_posix() for path in docs_files()
    }
    names = names - {"README.html"} | {"index.html", "repository/DESIGN.html"}
    assert {name for name in names if not (site / name).is_file()} == set()


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    for path, page in pages(site).items():
        assert [one for one in page.loads if ELSEWHERE.match(one)] == [], path.name
    for path in site.rglob("*.css"):
        text = path.read_text(encoding="utf-8")
        loads = re.findall(r"url\(([^)]*)\)|@import\s+(\S+)", text)
        assert [one for pair in loads for one in pair if ELSEWHERE.match(one.strip("\"'"))] == []
    assert Loads('<link href="//x.org/a.css"><p style="background: url(b)">').loads == [
        *("//x.org/a.css", "b")
    ]


def test_scripts_ask_for_nothing_from_elsewhere(site: Path) -> None:
    """The theme's script knows hosts of badges; it asks them only for a page with a repository."""
    known = {"api.github.com", "gitlab.com"}
    hosts = set()
    for path in site.rglob("*.js"):
        text = path.read_text(encoding="utf-8")
        hosts |= set(re.findall(r"(?:fetch|import|ajax)\w*\(\s*[`\"']https?://([^/`\"']+)", text))
    assert hosts <= known
    for path, page in pages(site).items():
        text = path.read_text(encoding="utf-8")
        assert "md-source__repository" not in text, path.name
        assert page.loads


def test_links_lead_to_files_and_anchors_of_the_site(site: Path) -> None:
    """Pages that are opened from disk have no server that would look for index.html."""
    found = pages(site)
    for path, page in found.items():
        for link in page.links:
            if path.name == "404.html" or ELSEWHERE.match(link) or link.startswith("mailto:"):
                continue
            name, anchor = urldefrag(unquote(link))
            target = (path.parent / name).resolve() if name else path
            assert target.is_file(), f"{path.relative_to(site)}: {link}"
            if anchor and target.suffix == ".html":
                assert anchor in found[target].ids, f"{path.relative_to(site)}: {link}"


def test_nothing_names_this_machine(site: Path) -> None:
    here = [str(ROOT), str(site), str(Path.home()), os.uname().nodename, sys.prefix]
    here = [word for word in here if len(word) > 4]
    for path in [*site.rglob("*.html"), *site.rglob("*.json"), *site.rglob("*.js")]:
        text = path.read_text(encoding="utf-8")
        assert [word for word in here if word in text] == [], path.name


def test_search_works_without_a_server(site: Path) -> None:
    """The index is a script beside the JSON, since pages opened from disk may not fetch files."""
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    assert (
        (site / "search" / "search_index.js").read_text(encoding="utf-8").startswith("var __index")
    )
    found = {one["location"].partition("#")[0] for one in index["docs"]}
    assert {"refusals.html", "api.html", "repository/DESIGN.html"} <= found
    page = (site / "index.html").read_text(encoding="utf-8")
    assert "assets/iframe-worker.js" in page


@pytest.mark.parametrize(
    ("text", "complaint"),
    [("[x](nothing.md)", "nothing.md"), ("[x](install.md#no-such)", "no-such")],
)
def test_a_broken_link_fails_the_build(tmp_path: Path, text: str, complaint: str) -> None:
    """A copy of the docs has one; else nobody would notice if --strict stopped working."""
    for name in ("docs", "scripts", "src", "examples", "csrc"):
        (tmp_path / name).mkdir()
    (tmp_path / "docs" / "README.md").write_text(
        "# Index\n\n## Start\n\n| page | |\n|---|---|\n| [install.md](install.md) | how |\n"
    )
    (tmp_path / "docs" / "install.md").write_text(f"# Install\n\n{text}\n")
    for name in ("mkdocs.yml", "scripts/site_hooks.py", "scripts/doc_pages.py"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    (tmp_path / "docs" / "assets").mkdir()
    (tmp_path / "docs" / "assets" / "iframe-worker.js").write_text("")
    done = build(tmp_path / "site", tmp_path / "mkdocs.yml")
    assert done.returncode != 0
    assert complaint in done.stderr
