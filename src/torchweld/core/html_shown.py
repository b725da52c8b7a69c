"""Records that show themselves as HTML: in a notebook, or as a whole page.

The one place below `pages` that imports it, and only when it is asked to show something.
"""

from __future__ import annotations


class ShownInNotebooks:
    """The base of a result that a notebook shows as a sentence and a small table."""

    def _repr_html_(self) -> str:
        from torchweld.pages.notebook_html import snippet_of

        return snippet_of(self)


class ShownAsPage(ShownInNotebooks):
    """The base of a result that makes a whole page, as `torchweld report` writes it."""

    def to_html(self) -> str:
        """One HTML file that needs nothing else; write it to report.html and open it."""
        from torchweld.pages.notebook_html import whole_page

        return whole_page(self)
