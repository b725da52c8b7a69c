"""What mkdocs does for the site beyond rendering docs/: navigation, and files outside of docs/.

The sections and tables of docs/README.md are the navigation. A file of the repository that a page
links to becomes a page below repository/: markdown as it is, anything else as code.
"""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).parents[1]))  # mkdocs loads this file by its path
from scripts.doc_pages import INDEX, ROOT, headings_of, link_to, links_of, read_page, relinked

sys.path.pop(0)

OUTSIDE = "repository"
_ROW = re.compile(r"^\| \[[^\]]+\]\(([^)#]+)\)", re.MULTILINE)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    config.nav = navigation()
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    listed = set(_entries(config.nav or []))
    for name in linked_files():
        uri = site_uri(name)
        level = InclusionLevel.INCLUDED if uri in listed else InclusionLevel.NOT_IN_NAV
        files.append(File.generated(config, uri, content=content_of(name), inclusion=level))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links within docs/ work as they are; those that leave it are led to repository/."""
    del config, files
    name, uri = repository_name(page.file.src_uri), page.file.src_uri
    here = posixpath.dirname(uri)
    rewrite = {}
    for link in links_of(name, markdown):
        if link.path != name and (ROOT / link.path).is_file():
            anchor = f"#{link.anchor}" if link.anchor else ""
            rewrite[link.target] = posixpath.relpath(site_uri(link.path), here or ".") + anchor
    return relinked(name, markdown, rewrite)


def navigation() -> list[Any]:
    """The index itself, then a section for each heading of it that has a table of pages."""
    text = read_page(INDEX)
    found: list[Any] = ["README.md"]
    for part in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        pages = [site_uri(link_to(INDEX, target).path) for target in _ROW.findall(part)]
        if pages:
            found.append({part.splitlines()[0]: pages})
    return found


def linked_files() -> list[str]:
    """Files outside of docs/ that pages link to, and that those link to, if they are markdown."""
    waiting = [path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")]
    seen: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name in seen or not (ROOT / name).is_file():
            continue
        seen.add(name)
        if name.endswith(".md"):
            waiting += [link.path for link in links_of(name)]
    return sorted(name for name in seen if not name.startswith("docs/"))


def site_uri(name: str) -> str:
    """The place of a repository's file in the sources of the site."""
    if name.startswith("docs/"):
        return name.removeprefix("docs/")
    return f"{OUTSIDE}/{name}" if name.endswith(".md") else f"{OUTSIDE}/{name}.md"


def repository_name(uri: str) -> str:
    """The other way round."""
    if not uri.startswith(f"{OUTSIDE}/"):
        return f"docs/{uri}"
    name = uri.removeprefix(f"{OUTSIDE}/")
    return name if (ROOT / name).is_file() else name.removesuffix(".md")


def content_of(name: str) -> str:
    text = read_page(name)
    if name.endswith(".md"):
        return text if headings_of(text) else f"# {name}\n\n{text}"
    language = {".py": "python", ".cpp": "cpp", ".h": "cpp", ".inc": "cpp"}
    return f"# {name}\n\n````{language.get(Path(name).suffix, 'text')}\n{text}\n````\n"


def _entries(nav: Any) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    parts = nav.values() if isinstance(nav, dict) else nav
    return [entry for part in parts for entry in _entries(part)]
