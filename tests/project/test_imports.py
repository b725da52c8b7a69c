"""The rooms of the package: who may import whom, and one name for each thing.

Imports are read from the sources, so a forbidden one inside a function counts too. Only imports
under `if TYPE_CHECKING:` do not count.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import torchweld

PACKAGE = Path(torchweld.__file__).parent
TESTS = Path(__file__).parents[1]

# Each room with the rooms that it may import. A room imports only rooms that stand above it here.
ROOMS = {
    "core": "",
    "machine": "core",
    "timing": "core machine",
    "ops": "core machine",
    "numerics": "core ops",
    "models": "core machine",
    "profiles": "core machine timing ops",
    "findings": "core profiles",
    "welds": "core ops numerics",
    "plans": "core machine timing ops numerics profiles findings welds",
    "history": "core machine timing",
    "bench": "core machine timing ops numerics models profiles welds plans",
    "gates": "core machine timing numerics models profiles welds plans history bench",
    "report": "core machine profiles findings welds plans history bench gates",
    "pages": "core machine timing numerics profiles findings welds plans history bench gates "
    "report",
    "cli": "core machine timing ops models profiles findings plans history bench gates report "
    "pages",
}
# Below welds and profiles, the same once more: a folder imports only folders that stand before it.
# What lies directly in the room stands before all of them. In plans, the same for its modules.
SUBROOMS = {
    "plans": (
        *("earlier_plans", "plan", "known_speeds", "measurement_cache", "plan_options"),
        *("block_calls", "alike_blocks", "time_budget"),
        *(
            "choice_verifying",
            "choice_timing",
            "kernel_choice",
            "group_tuning",
            "flops_share",
            "speed_ceiling",
            "whole_model",
        ),
        *("plan_fitting", "planner"),
    ),
    "welds": ("cloning", "tracing", "recognising", "guarding", "finding", "swapping"),
    "profiles": ("attributing", "accounting", "traces", "recording", "expecting"),
}
# What points upwards: `print(plan)` shows the report of it, and results show themselves as HTML.
DOORS = {("plans.plan", "report"), ("core.html_shown", "pages")}
# The front door composes; it imports public names when they are first used.
FRONT = ("__init__", "__main__")
# Folders of tests that are not rooms.
OTHER_TESTS = {"behaviours", "benchmarks", "data", "project", "support", "traces"}


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


def read_imports(package: Path) -> dict[str, set[str]]:
    """Module of ours ("welds.finding.find") -> dotted names below torchweld that it imports."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)
        holder = ".".join(["torchweld", *parts[:-1]])
        names = imported_names(ast.parse(path.read_text()), holder)
        found[name] = {n.removeprefix("torchweld.") for n in names if n.startswith("torchweld.")}
    return found


def misplaced(imports: dict[str, set[str]]) -> list[str]:
    """Every import that points the wrong way, in words."""
    found = []
    for module, names in imports.items():
        room = module.partition(".")[0]
        if room in FRONT:
            continue
        if room not in ROOMS:
            found.append(f"{module} lies in no room: put it into one of {', '.join(ROOMS)}")
            continue
        for name in sorted(names):
            other = name.partition(".")[0]
            if other in ("_C", room) or (module, other) in DOORS:
                continue
            if other not in ROOMS:
                found.append(f"{module} imports {name} through the front door")
            elif other not in ROOMS[room].split():
                found.append(f"{module} imports {name}: {room} may import {ROOMS[room] or 'none'}")
        found += misplaced_inside(module, room, names)
    return found


def misplaced_inside(module: str, room: str, names: set[str]) -> list[str]:
    """The same among the folders of one room."""
    order = SUBROOMS.get(room, ())

    def rank(name: str) -> int:
        below = name.split(".")[1:2]
        return order.index(below[0]) if below and below[0] in order else -1

    own = [name for name in sorted(names) if name.startswith(f"{room}.")]
    return [
        f"{module} imports {name}: {room} stands in the order {', '.join(order)}"
        for name in own
        if rank(name) > rank(module) and module != room
    ]


def test_imports_point_one_way() -> None:
    imports = read_imports(PACKAGE)
    assert imports["cli.main"], "the command line imports nothing: the walk is blind"
    assert misplaced(imports) == []


def test_who_reads_single_backends_is_known() -> None:
    """DESIGN.md names them. Everybody else goes by what backends say about themselves."""
    singles = {path.stem for path in (PACKAGE / "ops" / "backends").glob("*_backend*.py")}
    readers = {
        (module, name.removeprefix("ops.backends.").partition(".")[0])
        for module, names in read_imports(PACKAGE).items()
        for name in names
        if name.startswith("ops.backends.") and not module.startswith("ops")
    }
    assert {(module, name) for module, name in readers if name in singles} == {
        ("bench.bench_participants", "torch_backend"),
        ("bench.block_truth", "reference_backend"),
        ("bench.runtimes.torch_runtimes", "compile_backend"),
        ("bench.runtimes.torchweld_runtimes", "reference_backend"),
        ("numerics.numerical_rule", "reference_backend"),
        ("numerics.sum_scales", "reference_backend"),
        ("welds.swapping.safety_net", "reference_backend"),
    }


def test_the_table_of_rooms_has_no_circle() -> None:
    order = list(ROOMS)
    for room, allowed in ROOMS.items():
        assert all(order.index(other) < order.index(room) for other in allowed.split()), room


@pytest.mark.parametrize(
    ("files", "complaint"),
    [
        ({"core/errors.py": "from torchweld.machine import hardware"}, "core may import none"),
        ({"ops/a.py": "import torchweld.report"}, "ops may import core machine"),
        ({"ops/a.py": "from ..report import x"}, "ops may import core machine"),
        ({"plans/a.py": "def f():\n    from torchweld.cli import main"}, "plans may import"),
        ({"plans/a.py": "from torchweld import FusedMLP"}, "through the front door"),
        ({"extra.py": ""}, "lies in no room"),
        ({"welds/tracing/a.py": "from torchweld.welds.finding import find"}, "in the order"),
        ({"welds/weld_marks.py": "from torchweld.welds.swapping import swap"}, "in the order"),
        ({"plans/kernel_choice.py": "from torchweld.plans.planner import plan"}, "in the order"),
    ],
)
def test_the_walk_sees_each_kind_of_misplaced_import(
    tmp_path: Path, files: dict[str, str], complaint: str
) -> None:
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (found,) = misplaced(read_imports(tmp_path))
    assert complaint in found


def test_plans_draws_the_order_that_its_modules_stand_in() -> None:
    order = SUBROOMS["plans"]
    assert {path.stem for path in (PACKAGE / "plans").glob("*.py")} == {*order, "__init__"}
    text = ast.get_docstring(ast.parse((PACKAGE / "plans" / "__init__.py").read_text())) or ""
    drawn = re.findall(r"\w+", text.partition("a test holds this:")[2])
    assert [word for word in drawn if word in order] == list(order)


def test_the_walk_leaves_type_checking_imports_alone(tmp_path: Path) -> None:
    text = "if TYPE_CHECKING:\n    from torchweld.report import x\nfrom torchweld._C import isa\n"
    (tmp_path / "ops").mkdir()
    (tmp_path / "ops" / "a.py").write_text(text)
    assert misplaced(read_imports(tmp_path)) == []


def test_no_class_name_occurs_twice() -> None:
    names = Counter(
        node.name
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    )
    assert [name for name, count in names.items() if count > 1] == []


def test_benchmarks_have_class_names_of_their_own() -> None:
    def names(folder: Path) -> set[str]:
        trees = (ast.parse(path.read_text()) for path in folder.rglob("*.py"))
        return {n.name for tree in trees for n in ast.walk(tree) if isinstance(n, ast.ClassDef)}

    own = names(TESTS.parent / "benchmarks")
    assert "TrustCase" in own
    assert own & names(PACKAGE) == set()


def test_no_file_name_occurs_twice() -> None:
    names = Counter(path.name for path in PACKAGE.rglob("*.py") if path.stem != "__init__")
    assert [name for name, count in names.items() if count > 1] == []


def test_no_room_hides_a_public_name() -> None:
    rooms = {path.name for path in PACKAGE.iterdir() if path.is_dir()}
    assert rooms & set(torchweld.__all__) == set()


def test_the_tests_mirror_the_rooms() -> None:
    folders = {path.relative_to(TESTS).parts[0] for path in TESTS.glob("*/**/test_*.py")}
    assert folders - OTHER_TESTS == set(ROOMS)
    assert [path.name for path in TESTS.glob("test_*.py")] == []


def test_importing_torchweld_imports_nothing_heavy_but_torch() -> None:
    code = (
        "import sys, torch.utils.flop_counter; "  # torch's own, which imports Triton if it is there
        "before = set(sys.modules); import torchweld; "
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


def test_only_welds_changes_the_class_of_a_module() -> None:
    """Welding assigns `__class__`; whoever else does so changes a model behind its back."""
    found = [
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if '"__class__"' in path.read_text() or ".__class__ =" in path.read_text()
    ]
    assert found
    assert [name for name in found if not name.startswith("welds/")] == []
