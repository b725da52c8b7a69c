"""`html_of`: a page as one HTML file that needs nothing else, from disk or from anywhere.

The script and the style come from `assets/`, built of the sources in `web/`. The policy in the head
lets the browser run and apply those two, known by their hashes, and load nothing. The data are JSON
in an element that browsers do not run; the script draws them. The same page gives the same bytes.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from html import escape
from importlib.resources import files

from torchweld.pages.page_records import Page

DATA_ID = "torchweld-report"

_TEMPLATE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="generator" content="torchweld">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<header id="top"><p class="brand">torchweld</p><h1>{title}</h1></header>
<main id="main">
<section id="verdict" aria-labelledby="verdict-title">
<h2 id="verdict-title">{verdict}</h2>
<noscript><p>The plots and tables need JavaScript. The data are in this file.</p></noscript>
</section>
</main>
<footer id="foot"><details id="licences"><summary>Licences of what draws this page</summary>
<pre tabindex="0">{licences}</pre></details></footer>
<script type="application/json" id="{data_id}">{data}</script>
<script>{script}</script>
</body>
</html>
"""


def html_of(page: Page) -> str:
    """The page as HTML."""
    style, script = asset("page.css"), asset("page.js")
    return _TEMPLATE.format(
        policy=policy_of(script, style),
        title=escape(page.title),
        verdict=escape(page.verdict),
        style=style,
        script=script,
        licences=escape(asset("licences.txt")),
        data_id=DATA_ID,
        data=embedded(page),
    )


def embedded(page: Page) -> str:
    """JSON that no HTML parser takes for markup: `<` only ever stands in its strings."""
    return page.to_json().replace("<", "\\u003c")


def policy_of(script: str, style: str) -> str:
    """The content security policy: this script, this style, images in the page itself."""
    return (
        f"default-src 'none'; script-src '{hash_of(script)}'; style-src '{hash_of(style)}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )


def hash_of(text: str) -> str:
    """As policies name what they allow."""
    digest = hashlib.sha256(text.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"


@cache
def asset(name: str) -> str:
    """A file of `assets/`."""
    return (files("torchweld.pages") / "assets" / name).read_text("utf-8")
