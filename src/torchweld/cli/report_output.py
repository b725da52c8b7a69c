"""`--report FILE.html` of the verbs, and what `torchweld report` does with a page."""

from __future__ import annotations

from pathlib import Path

import click

from torchweld.core.errors import TorchweldError
from torchweld.core.files import write_whole
from torchweld.core.number_text import size
from torchweld.core.safe_text import clean
from torchweld.pages.page_html import html_of
from torchweld.pages.page_records import Page

FILE = click.Path(path_type=Path, dir_okay=True)

report_option = click.option(
    "--report", "report_file", type=FILE, metavar="FILE.html", help="Write a page that shows it."
)


def check_page_name(option: str, path: Path | None) -> None:
    """Browsers go by the ending."""
    if path is not None and path.suffix not in (".html", ".htm"):
        raise TorchweldError(f"{option} {path}: the name of a page has to end in .html")


def write_page(page: Page, path: Path) -> None:
    """Writes it, and says so on standard error."""
    text = html_of(page)
    write_whole(path, text)
    said = f"wrote {clean(str(path))}, {size(len(text.encode(errors='backslashreplace')))}"
    click.echo(said, err=True)
