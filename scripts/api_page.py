"""Writes docs/api.md from the docstrings: `python scripts/api_page.py`; a test holds it up to date.

The names are those of `torchweld.__all__`, each under the room that it lives in. Signatures, fields
and their comments are read from the sources, so the page is the same on every Python and torch.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_origin

import torchweld
from torchweld.core import record_fields
from torchweld.core.saved_records import SavedRecord

PAGE = Path(__file__).parents[1] / "docs" / "api.md"
WIDTH = 100

# Room -> heading, in the order of the page.
ROOMS = {
    "plans": "Weld a model",
    "welds": "Find, weld by hand, undo",
    "ops": "The kernels",
    "profiles": "Profiles",
    "findings": "Findings",
    "timing": "Comparing by time",
    "numerics": "Comparing numbers",
    "core": "Inputs, layers, errors",
}
START = """# API reference

Every public name of `torchweld`, usually imported as `tw`, from the docstrings of the sources. This
page is written by `python scripts/api_page.py`; do not edit it. The [index](README.md) has a page
for each subject, with examples.
"""
SAVED = """
## Saved records

Plans, profiles, comparisons and diffs are plain data that saves and loads; nothing in a file is
executed.
"""
# "name:  text" of a docstring, with its indented next lines.
_ENTRY = re.compile(r"^(\w+(?:, \w+)*): +(\S.*(?:\n +\S.*)*)$", re.MULTILINE)
# Bounds of a field are for files; the page shows the plain type.
_PLAIN = {
    name: alias.__origin__.__name__
    for name, alias in vars(record_fields).items()
    if get_origin(alias) is Annotated
}
_PAGE_NAME = re.compile(r"\bdocs/(\w+\.md)\b")


@dataclass(frozen=True, kw_only=True)
class Docstring:
    """Its prose, and what its "name: text" lines say."""

    prose: str
    entries: dict[str, str]


def page() -> str:
    parts = [START]
    for room, title in ROOMS.items():
        names = [name for name in torchweld.__all__ if room_of(name) == room]
        parts.append(f"\n## {title}\n")
        parts += ["\n".join(section(name)) for name in sorted(names, key=str.lower)]
    parts += [SAVED, *(f"- {member}" for member in members(SavedRecord))]
    return "\n".join(parts).rstrip() + "\n"


def room_of(name: str) -> str:
    return torchweld._MODULE_OF[name].partition(".")[0]


def section(name: str) -> Iterator[str]:
    value = getattr(torchweld, name)
    if inspect.isclass(value):
        yield f"### `class tw.{name}`\n"  # tw.Plan and tw.plan would have one anchor
        yield from of_class(value)
    else:
        yield f"### `tw.{name}`\n"
        yield from of_function(tree_of(value), f"tw.{name}")


def of_function(node: ast.FunctionDef, name: str) -> Iterator[str]:
    yield code(signature(node, name))
    said = docstring(node)
    yield f"{said.prose}\n"
    if said.entries:
        yield "\n".join(f"- `{key}`: {text}" for key, text in said.entries.items()) + "\n"


def of_class(kind: type[Any]) -> Iterator[str]:
    """Constructor, docstring, fields, then properties and methods."""
    node = tree_of(kind)
    made = [one for one in node.body if getattr(one, "name", "") == "__init__"]
    if made:
        yield code(signature(made[0], f"tw.{kind.__name__}"))
    said = docstring(node)
    yield f"{said.prose}\n"
    listed = [f"- {field}" for field in fields(kind, said.entries)]
    listed += [f"- {member}" for member in members(kind)]
    if issubclass(kind, SavedRecord):
        listed.append("- `.save`, `.load` and the others of [saved records](#saved-records)")
    if listed:
        yield "\n".join(listed) + "\n"


def fields(kind: type[Any], entries: dict[str, str]) -> Iterator[str]:
    """Declared fields with type, default and what the docstring or a comment says of each."""
    source = textwrap.dedent(inspect.getsource(kind)).splitlines()
    by_name = {name: text for names, text in entries.items() for name in names.split(", ")}
    for node in tree_of(kind).body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        name, kept = node.target.id, type_text(node.annotation)
        if name.startswith("_") or kept.startswith("ClassVar"):
            continue
        default = f" = {ast.unparse(node.value)}" if node.value is not None else ""
        text = by_name.get(name) or comment_of(source, node)
        yield f"`{name}: {kept}{default}`" + (f": {text}" if text else "")


def comment_of(source: list[str], node: ast.AnnAssign) -> str:
    """The comment beside a field, or on the lines above it."""
    line = source[(node.end_lineno or node.lineno) - 1]
    beside = line[node.end_col_offset :].partition("#")[2].strip()
    above: list[str] = []
    for earlier in reversed(source[: node.lineno - 1]):
        if not earlier.strip().startswith("#"):
            break
        above.insert(0, earlier.strip().lstrip("# "))
    return linked(beside or " ".join(above))


def members(kind: type[Any]) -> Iterator[str]:
    """Public properties and methods with the first paragraph of their docstrings."""
    for node in tree_of(kind).body:
        if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
            continue
        marks = {ast.unparse(mark) for mark in node.decorator_list}
        if node.name == "problems" or any(mark.endswith(".setter") for mark in marks):
            continue  # `problems` is what loading asks
        first = docstring(node).prose.partition("\n\n")[0]
        arguments = "" if "property" in marks else f"({parameters(node)})"
        yield f"`.{node.name}{arguments}{returned(node)}`" + (f": {first}" if first else "")


def docstring(node: ast.FunctionDef | ast.ClassDef) -> Docstring:
    prose, entries = [], {}
    for part in (ast.get_docstring(node) or "").split("\n\n"):
        if _ENTRY.match(part):
            found = _ENTRY.findall(part)
            entries.update({key: linked(" ".join(said.split())) for key, said in found})
        elif part:
            prose.append(linked(" ".join(part.split())))
    return Docstring(prose="\n\n".join(prose), entries=entries)


def linked(text: str) -> str:
    """Names of pages as links."""
    return _PAGE_NAME.sub(r"[\1](\1)", text)


def signature(node: ast.FunctionDef, name: str) -> str:
    """`name(...) -> type`, on one line, or with a line for each parameter."""
    result = "" if node.name == "__init__" else returned(node)
    whole = f"{name}({parameters(node)}){result}"
    if len(whole) <= WIDTH:
        return whole
    lines = "".join(f"    {one},\n" for one in each_parameter(node))
    return f"{name}(\n{lines}){result}"


def returned(node: ast.FunctionDef) -> str:
    return f" -> {type_text(node.returns)}" if node.returns is not None else ""


def parameters(node: ast.FunctionDef) -> str:
    return ", ".join(each_parameter(node))


def each_parameter(node: ast.FunctionDef) -> Iterator[str]:
    """All but self and cls, as the source has them."""
    given = node.args
    plain = [*given.posonlyargs, *given.args]
    defaults: list[ast.expr | None] = [None] * (len(plain) - len(given.defaults))
    for i, (one, default) in enumerate(zip(plain, [*defaults, *given.defaults], strict=True)):
        if one.arg not in ("self", "cls"):
            yield shown(one, default)
        if i + 1 == len(given.posonlyargs) and one.arg != "self":
            yield "/"
    if given.vararg is not None:
        yield f"*{shown(given.vararg, None)}"
    elif given.kwonlyargs:
        yield "*"
    for one, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        yield shown(one, default)
    if given.kwarg is not None:
        yield f"**{shown(given.kwarg, None)}"


def shown(one: ast.arg, default: ast.expr | None) -> str:
    kept = f": {type_text(one.annotation)}" if one.annotation is not None else ""
    if default is None:
        return f"{one.arg}{kept}"
    return f"{one.arg}{kept}{' = ' if kept else '='}{ast.unparse(default)}"


def type_text(node: ast.expr) -> str:
    """A type without the bounds that a file is held to."""
    text = re.sub(r"Annotated\[(.*), Length\([^)]*\)\]", r"\1", ast.unparse(node))
    return re.sub(r"\w+", lambda word: _PLAIN.get(word[0], word[0]), text)


def tree_of(value: Any) -> Any:
    """The definition of a function or class."""
    source = textwrap.dedent(inspect.getsource(inspect.unwrap(value)))
    return ast.parse(source).body[0]


def code(text: str) -> str:
    return f"```text\n{text}\n```\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    sys.stdout.write(f"wrote {PAGE.name}\n")
