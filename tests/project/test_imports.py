"""Dependencies point one way, and importing torchweld stays cheap.

The imports are read from the sources, so a forbidden one inside a function counts too; only what
stands under `if TYPE_CHECKING:` does not.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import torchweld

PACKAGE = Path(torchweld.__file__).parent

# Data types and errors: they import nothing of ours but each other, never anything that computes.
FOUNDATIONS = {
    "texts": set(),
    "errors": {"texts"},
    "interrupts": set(),
    "arguments": {"errors"},
    "cpuinfo": set(),
    "torch_probes": set(),
    "hardware": {"errors", "cpuinfo", "files", "records", "torch_probes"},
    "fingerprints": {"hardware", "records"},
    "not_measured": set(),
    "load": {"not_measured"},
    "records": {"errors", "not_measured", "texts"},
    "files": {"errors", "arguments"},
    "speeds": {"records"},
    "saved": {"errors", "files", "records"},
    "figures": set(),
}
# Joined only by what composes them; a report shows profiles, so it knows what they are.
STRANGERS = ("kernels", "discovery", "profiler", "report")
ALLOWED = {("report", "profiler")}
# What may compose: the front door and the command line.
ROOTS = ("__init__", "__main__", "cli")


def imported_names(tree: ast.AST, package: str) -> Iterator[str]:
    """Dotted names of what `tree`, a module of `package`, imports when it runs."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for other in node.orelse:
                yield from imported_names(other, package)
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)
        else:
            yield from imported_names(node, package)


def part_of(dotted: str, parts: set[str]) -> str | None:
    """The part of torchweld a dotted name belongs to; a public name belongs to the front door."""
    head, _, rest = dotted.partition(".")
    if head != "torchweld":
        return None
    name = rest.partition(".")[0]
    if name == "_C":  # compiled: no Python of ours in it
        return None
    return name if name in parts else "__init__"


def read_graph(package: Path) -> dict[str, set[str]]:
    """Part -> parts it imports. A part is a module or a package directly under torchweld."""
    files = sorted(package.rglob("*.py"))
    parts = {path.relative_to(package).parts[0].removesuffix(".py") for path in files}
    graph: dict[str, set[str]] = {part: set() for part in parts}
    for path in files:
        inside = path.relative_to(package)
        part = inside.parts[0].removesuffix(".py")
        holder = ".".join(["torchweld", *inside.parts[:-1]])
        found = {
            part_of(name, parts) for name in imported_names(ast.parse(path.read_text()), holder)
        }
        graph[part] |= {other for other in found if other is not None and other != part}
    return graph


def find_cycle(graph: dict[str, set[str]]) -> list[str]:
    """Some circle of imports, or nothing."""
    done: set[str] = set()

    def walk(part: str, trail: list[str]) -> list[str]:
        if part in trail:
            return [*trail[trail.index(part) :], part]
        if part in done:
            return []
        for other in sorted(graph.get(part, ())):
            if circle := walk(other, [*trail, part]):
                return circle
        done.add(part)
        return []

    return next((circle for part in sorted(graph) if (circle := walk(part, []))), [])


def violations(graph: dict[str, set[str]]) -> list[str]:
    found = [
        f"{part} imports {other}: it is a foundation, and may import {sorted(allowed) or 'nothing'}"
        for part, allowed in FOUNDATIONS.items()
        for other in sorted(graph.get(part, set()) - allowed)
    ]
    found += [
        f"{part} imports {other}: these two are joined only by what composes them"
        for part in STRANGERS
        for other in sorted(graph.get(part, set()) & set(STRANGERS))
        if (part, other) not in ALLOWED
    ]
    found += [
        f"{part} imports {other}, which stands above it"
        for part in sorted(graph)
        if part not in ROOTS
        for other in sorted(graph[part] & set(ROOTS))
    ]
    below = {part: others for part, others in graph.items() if part not in ROOTS}
    if circle := find_cycle(below):
        found.append("imports go round: " + " -> ".join(circle))
    return found


def test_dependencies_point_one_way() -> None:
    graph = read_graph(PACKAGE)
    assert {"errors", "hardware", "cli", "kernels"} <= graph.keys()
    assert graph["cli"], "the command line imports nothing: the walk is blind"
    assert violations(graph) == []


def tree(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


@pytest.mark.parametrize(
    ("files", "complaint"),
    [
        ({"errors.py": "from torchweld import hardware", "hardware.py": ""}, "foundation"),
        ({"kernels/a.py": "import torchweld.report", "report.py": ""}, "joined only"),
        ({"kernels/a.py": "from ..report import x", "report.py": ""}, "joined only"),
        ({"plan.py": "def f():\n    from torchweld.cli import main", "cli/main.py": ""}, "above"),
        ({"plan.py": "from torchweld import FusedMLP", "modules.py": ""}, "above"),
        ({"a.py": "from torchweld import b", "b.py": "from . import a"}, "a -> b -> a"),
    ],
)
def test_the_walk_sees_each_kind_of_violation(
    tmp_path: Path, files: dict[str, str], complaint: str
) -> None:
    found = violations(read_graph(tree(tmp_path, files)))
    assert len(found) == 1
    assert complaint in found[0]


def test_the_walk_leaves_type_checking_imports_alone(tmp_path: Path) -> None:
    text = "if TYPE_CHECKING:\n    from torchweld.report import x\nfrom torchweld._C import isa\n"
    assert violations(read_graph(tree(tmp_path, {"kernels/a.py": text, "report.py": ""}))) == []


def test_importing_torchweld_imports_nothing_heavy_but_torch() -> None:
    code = (
        "import sys, torch; before = set(sys.modules); import torchweld; "
        "print(*sorted(set(sys.modules) - before))"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True
    )
    new = done.stdout.split()
    packages = {name.partition(".")[0] for name in new} - set(sys.stdlib_module_names)
    assert packages <= {"torchweld", "torch"}
    assert not [name for name in new if name.startswith(("torch._dynamo", "torch._inductor"))]


def prints_or_exits(source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name in {"print", "exit", "quit", "sys.exit", "os._exit", "click.echo"}:
                found.append(f"line {node.lineno}: {name}")
    return found


def test_only_the_command_line_prints_or_exits() -> None:
    assert prints_or_exits("if x:\n    print(1)") == ["line 2: print"]
    files = [path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).parts[0] != "cli"]
    found = {path.name: prints_or_exits(path.read_text()) for path in files}
    assert {name: calls for name, calls in found.items() if calls} == {}
