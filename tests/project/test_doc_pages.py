"""What pages say exists: links, anchors, files, names, verbs, options, targets of make."""

from __future__ import annotations

import importlib
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path

import click
import pytest
from scripts import api_page, doc_commands, doc_pages
from scripts.doc_pages import INDEX, ROOT, Fence, fences_of, links_of, read_page

import torchweld
from torchweld.cli.main import cli
from torchweld.core.activations import ACTIVATIONS
from torchweld.findings import RULES
from torchweld.models import MODELS
from torchweld.ops.backends import BACKENDS
from torchweld.profiles.attributing.launch_counts import COUNTERS

PAGES = doc_pages.page_names()
SHOWN = [page for page in PAGES if page != "CHANGELOG.md"]  # which has names of the past
LANGUAGES = {"python", "bash", "console", "text", "yaml", "cpp"}
MARKS = {"not run", "before", "raises", "printed", "quick", "output", "source"}


def fences(*languages: str) -> list[Fence]:
    found = [fence for page in SHOWN for fence in fences_of(page)]
    return [fence for fence in found if not languages or fence.language in languages]


def missing(page: str) -> list[str]:
    """Links of a page that lead nowhere, in words."""
    found = []
    for link in links_of(page):
        path = ROOT / link.path
        if not path.exists():
            found.append(f"{link.place}: there is no {link.path}")
        elif link.anchor and link.anchor not in doc_pages.anchors_of(path.read_text()):
            found.append(f"{link.place}: {link.path} has no heading for #{link.anchor}")
    return found


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_somewhere(page: str) -> None:
    assert missing(page) == []


def test_a_link_that_leads_nowhere_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "# A\n[x](nothing.md) [y](op.md#no-such) `[z](code.md)` [w](op.md#training) [v](#a)"
    monkeypatch.setattr(doc_pages, "read_page", lambda page: text)
    assert missing("docs/made_up.md") == [
        "docs/made_up.md:2: there is no docs/nothing.md",
        "docs/made_up.md:2: docs/op.md has no heading for #no-such",
        "docs/made_up.md:2: there is no docs/made_up.md",
    ]


@pytest.mark.parametrize("page", SHOWN)
def test_headings_have_different_anchors(page: str) -> None:
    """The second of two alike is called differently by code hosts and by the site."""
    text = read_page(page)
    names = Counter(
        re.sub(r"[^\w\- ]", "", name.lower()) for _, name in doc_pages.headings_of(text)
    )
    assert [name for name, count in names.items() if count > 1] == []


def test_the_index_has_every_page_once() -> None:
    listed = Counter(link.path for link in links_of(INDEX) if link.path.startswith("docs/"))
    pages = {path.relative_to(ROOT).as_posix() for path in doc_pages.docs_files()} - {INDEX}
    assert pages - set(listed) == set(), "add a row to docs/README.md"
    assert {page: count for page, count in listed.items() if count > 1} == {}


def test_blocks_say_their_language_and_marks_are_known() -> None:
    found = fences()
    assert [fence.place for fence in found if fence.language not in LANGUAGES] == []
    for fence in found:
        for mark in fence.marks:
            assert mark.partition(":")[0] in MARKS, fence.place
        assert fence.mark("not run") is None or len(fence.mark("not run") or "") > 10, (
            f"{fence.place}: say why it is not run"
        )


@pytest.mark.parametrize("page", PAGES)
def test_lists_and_tables_begin_where_the_site_sees_them(page: str) -> None:
    """After an empty line, and not indented by less than four: code hosts are more lenient."""
    lines = doc_pages.prose_of(read_page(page)).splitlines()
    for number, (before, line) in enumerate(pairwise(lines), 2):
        starts = re.match(r"- |\| ", line)
        follows = re.match(r" *(- |\d+\. |\||#)|  |$", before)
        assert not starts or follows, f"{page}:{number}"
        assert not re.match(r" {1,3}\|", line), f"{page}:{number}"


def test_every_fence_is_seen() -> None:
    """A block that the reader misses would not be checked at all."""
    for page in PAGES:
        ticks = len(re.findall(r"^ *```", read_page(page), flags=re.MULTILINE))
        assert ticks == 2 * len(fences_of(page)), page


# --- commands ---------------------------------------------------------------


def options_of(command: click.Command) -> set[str]:
    return {
        name
        for one in command.params
        if isinstance(one, click.Option)
        for name in (*one.opts, *one.secondary_opts)
    } | {*("-h", "--help")}


def parse(words: list[str]) -> None:
    """Parses a command line as torchweld does before anything runs. Wrong usage raises."""
    command, rest = cli.commands[words[0]], words[1:]
    with command.make_context(words[0], [*rest]):
        pass
    if isinstance(command, click.Group) and rest:
        with command.commands[rest[0]].make_context(rest[0], rest[1:]):
            pass


def complaint(words: list[str]) -> str:
    """What is wrong with a command; empty if nothing is."""
    name, rest = words[0], words[1:]
    if name == "torchweld":
        try:
            parse(rest)
        except (click.ClickException, KeyError) as error:
            return str(error)
    elif name == "make":
        targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
        asked = {word for word in rest if "=" not in word}
        return f"no target {', '.join(sorted(asked - targets))}" if asked - targets else ""
    elif name == "python" and rest[0].endswith(".py"):
        script = ROOT / rest[0]
        if not script.is_file():
            return "" if rest[0] == "train.py" else f"no script {rest[0]}"  # the user's own
        unknown = {
            word for word in rest if word.startswith("--") and word not in script.read_text()
        }
        return f"no option {', '.join(sorted(unknown))}" if unknown else ""
    elif name not in ("python", "pip", "git", "cd"):
        return f"{name} is not a command that these pages know"
    return ""


@pytest.mark.parametrize("page", SHOWN)
def test_what_the_page_shows_can_be_typed(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Verbs, options and the form of their values; nothing runs."""
    for folder in ("work", "main"):
        (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path / "work")
    for fence in fences_of(page):
        if fence.language not in doc_commands.LANGUAGES:
            continue
        found = doc_commands.commands_of(fence)
        assert found, f"{fence.place} has no command"
        for words in found:
            for name in words:
                if name.endswith((".json", ".json.gz")) and "/" not in name:
                    Path(name).touch()
            assert complaint(words) == "", f"{fence.place}: {' '.join(words)}"


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("torchweld fuse gpt --qick", "--qick"),
        ("torchweld fuze gpt", "fuze"),
        ("torchweld history compare main~1", "parameter: b"),
        ("torchweld bench --rows 1 --seconds many", "many"),
        ("make demo prest", "prest"),
        ("python benchmarks/no_such.py", "no_such"),
        ("python benchmarks/models.py --piers", "--piers"),
        ("TORCHWELD=0 sudo something", "sudo"),
    ],
)
def test_a_command_that_cannot_be_typed_is_seen(line: str, wrong: str) -> None:
    fence = Fence(page="x", line=1, language="bash", text=f"cd x && {line}  # why\n", marks=())
    first, second = doc_commands.commands_of(fence)
    assert complaint(first) == ""
    assert wrong in complaint(second)


@pytest.mark.parametrize("page", SHOWN)
def test_commands_in_the_text_exist(page: str) -> None:
    """`torchweld verb --option` between words: the verb and its options."""
    for line, span in doc_pages.code_spans_of(page):
        words = span.split()
        if words[:1] != ["torchweld"] or len(words) < 2 or not words[1].isalpha():
            continue
        verb = cli.commands.get(words[1])
        assert verb is not None, f"{page}:{line}: {span}"
        allowed = options_of(verb)
        if isinstance(verb, click.Group):
            allowed |= {name for one in verb.commands.values() for name in options_of(one)}
        unknown = {word for word in words if word.startswith("--")} - allowed
        assert unknown == set(), f"{page}:{line}: {span}"


@pytest.mark.parametrize("verb", sorted(cli.commands))
def test_a_verb_has_a_page_with_all_its_options(verb: str) -> None:
    text = read_page(f"docs/{verb}.md")
    command = cli.commands[verb]
    verbs = [command, *(command.commands.values() if isinstance(command, click.Group) else ())]
    options = {name for one in verbs for name in options_of(one)} - {"-h", "--help"}
    told = set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", text))
    assert sorted(options - told) == [], f"docs/{verb}.md does not tell them"
    assert f"`torchweld {verb}" in text.splitlines()[0]
    assert "exit code" in text.lower()


# --- names ------------------------------------------------------------------


def is_there(dotted: str) -> bool:
    """Whether `torchweld.a.b` can be imported, or is an attribute of what can."""
    value: object = torchweld
    path = "torchweld"
    for part in dotted.split(".")[1:]:
        path = f"{path}.{part}"
        try:
            value = importlib.import_module(path)
        except ModuleNotFoundError:
            if not hasattr(value, part):
                return False
            value = getattr(value, part)
    return True


@pytest.mark.parametrize("page", SHOWN)
def test_names_in_the_text_exist(page: str) -> None:
    for line, span in doc_pages.code_spans_of(page):
        for name in re.findall(r"(?<![\w.`/-])tw\.(\w+)", span):
            assert name in torchweld.__all__ or name == "ops", f"{page}:{line}: {span}"
        if re.fullmatch(r"torchweld(\.\w+)+(\(.*)?", span) and "torch.ops" not in span:
            name = span.partition("(")[0]
            assert name.endswith((".md", ".json")) or is_there(name), f"{page}:{line}: {span}"


@pytest.mark.parametrize("page", SHOWN)
def test_files_in_the_text_exist(page: str) -> None:
    pattern = r"(?:src|csrc|tests|benchmarks|examples|scripts|docs)/[\w./-]+\.\w+"
    for line, span in doc_pages.code_spans_of(page):
        if re.fullmatch(pattern, span):
            assert (ROOT / span).exists(), f"{page}:{line}: {span}"


def first_cells(page: str, heading: str = "") -> set[str]:
    """The code that rows of tables begin with, on a page or in one section of it."""
    text = read_page(page)
    if heading:
        section = text.partition(f"## {heading}\n")[2]
        text = re.split(r"^## ", section, maxsplit=1, flags=re.MULTILINE)[0]
    return set(re.findall(r"^\| `([\w-]+)`", text, re.MULTILINE))


def test_lists_of_names_are_complete() -> None:
    """What the code has more of, a page has to tell."""
    for page in ("docs/op.md", "DESIGN.md"):
        (found,) = re.findall(r"Activations:\s+`([^`]+)`", read_page(page))
        assert found.split() == list(ACTIVATIONS), page
    assert first_cells("docs/backends.md") >= {backend.name for backend in BACKENDS}
    assert first_cells("docs/targets.md", "Built-in models") == set(MODELS)
    assert first_cells("docs/expect.md", "The counters") == set(COUNTERS)
    sources = (ROOT / "src" / "torchweld" / "findings").glob("*.py")
    rules = {name for path in sources for name in re.findall(r'rule="([^"]+)"', path.read_text())}
    assert len(rules) == len(RULES)
    assert first_cells("docs/diagnosis.md") >= rules


def test_the_reference_is_what_the_docstrings_say() -> None:
    assert read_page("docs/api.md") == api_page.page(), "run: python scripts/api_page.py"
    assert {api_page.room_of(name) for name in torchweld.__all__} == set(api_page.ROOMS)


# ---- where to look ----


def unknown_files(text: str) -> list[str]:
    """Names of files in a page that no file has, or that more than one has; `*` may match many."""
    named = re.findall(r"`([\w./*]+\.(?:py|cpp|h|cuh|cu|inc|ts))`", text)
    folders = [ROOT / name for name in ("src", "csrc", "web", "tests", "docs", "scripts")]
    found = []
    for name in dict.fromkeys(named):
        files = [*ROOT.glob(name), *(path for folder in folders for path in folder.rglob(name))]
        if not files or ("*" not in name and len(set(files)) > 1):
            found.append(name)
    return found


def test_design_names_files_that_a_reader_finds() -> None:
    assert unknown_files(read_page("DESIGN.md")) == []
    assert unknown_files("`ops/gone.py` `__init__.py` `plans/plan.py` `none_*.ts`") == [
        *("ops/gone.py", "__init__.py", "none_*.ts"),
    ]
