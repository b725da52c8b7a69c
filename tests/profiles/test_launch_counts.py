"""The leaf rule: work counts once, where it is done."""

from __future__ import annotations

import pytest

from torchweld.core.errors import NotMeasuredError
from torchweld.profiles.attributing import compiled_regions
from torchweld.profiles.attributing.compiled_regions import Region
from torchweld.profiles.attributing.launch_counts import COUNTERS, Node, counts_of, launches_of

KEY = "fkey"
CALL = f"## Call CompiledFxGraph {KEY} ##"


def tree(text: str) -> list[Node]:
    """One node a line, indented under the one around it; [in brackets] a range."""
    nodes: list[Node] = []
    depths: list[int] = []
    for line in filter(str.strip, text.splitlines()):
        depth, name = len(line) - len(line.lstrip()), line.strip()
        parent = next((i for i in range(len(nodes) - 1, -1, -1) if depths[i] < depth), -1)
        is_op = not name.startswith("[")
        nodes.append(
            Node(name=name.strip("[]"), parent=parent, is_op=is_op, start_us=float(len(nodes)))
        )
        depths.append(depth)
    return nodes


def leaves(text: str) -> list[tuple[str, str]]:
    return [(launch.counter, launch.name) for launch in launches_of(tree(text))]


def test_what_runs_inside_work_belongs_to_it() -> None:
    linear = """
        aten::linear
          aten::t
            aten::transpose
          aten::addmm
            aten::expand
            aten::copy_
    """
    assert leaves(linear) == [("metadata", "aten::t"), ("linear", "aten::addmm")]
    assert leaves("aten::clone\n  aten::empty_like\n  aten::copy_") == [("copies", "aten::clone")]


def test_what_passes_on_counts_nothing_itself() -> None:
    assert leaves("aten::contiguous") == []
    assert leaves("aten::contiguous\n  aten::clone") == [("copies", "aten::clone")]
    assert leaves("AddmmBackward0\n  aten::mm") == [("linear", "aten::mm")]
    assert leaves("[mine::range]") == []


def test_a_view_that_turns_out_to_copy_is_a_copy() -> None:
    assert leaves("aten::reshape\n  aten::view") == [("metadata", "aten::view")]
    found = leaves("aten::reshape\n  aten::clone\n  aten::_unsafe_view")
    assert found == [("copies", "aten::clone"), ("metadata", "aten::_unsafe_view")]


def test_a_fused_op_that_runs_products_inside_is_not_fused() -> None:
    assert leaves("torchweld::chain\n  aten::empty") == [("fused", "torchweld::chain")]
    composed = "torchweld::chain\n  aten::addmm\n  aten::gelu\n  aten::addmm"
    assert [counter for counter, _ in leaves(composed)] == ["linear", "pointwise", "linear"]


def test_attention_made_of_products_is_shown_as_such() -> None:
    one = "aten::_scaled_dot_product_flash_attention_for_cpu\n  aten::empty"
    assert [counter for counter, _ in leaves(one)] == ["attention"]
    parts = "aten::_scaled_dot_product_attention_math\n  aten::bmm\n  aten::_softmax\n  aten::bmm"
    assert [counter for counter, _ in leaves(parts)] == ["bmm", "norms", "bmm"]


def test_an_op_of_an_unknown_library_counts_whatever_it_runs() -> None:
    assert leaves("mylib::wonder\n  aten::empty") == [("other", "mylib::wonder")]
    assert leaves("mylib::wonder\n  aten::relu") == [("other", "mylib::wonder")]
    assert leaves("mylib::wonder\n  aten::mm\n  aten::relu") == [
        ("other", "mylib::wonder"),
        ("linear", "aten::mm"),
        ("pointwise", "aten::relu"),
    ]


def test_work_of_the_compiler_is_not_the_models() -> None:
    compiling = "_compile.compile_inner (dynamo_timed)\n  aten::addmm\naten::relu"
    assert leaves(compiling) == [("pointwise", "aten::relu")]


def test_the_gradient_that_backward_begins_with_is_part_of_backward() -> None:
    text = """
        aten::ones_like
        aten::sum
        aten::ones_like
          aten::empty_like
          aten::fill_
        autograd::engine::evaluate_function: SumBackward0
    """
    phases = [(launch.name, launch.phase) for launch in launches_of(tree(text))]
    assert phases == [
        ("aten::ones_like", "forward"),
        ("aten::sum", "forward"),
        ("aten::ones_like", "backward"),
    ]


@pytest.fixture
def region(monkeypatch: pytest.MonkeyPatch) -> Region:
    found = Region(kernels=("cpp_fused_gelu_0", "cpp_fused_add_1"), externs=("aten::addmm",))
    monkeypatch.setitem(compiled_regions._known, KEY, found)
    return found


def test_a_compiled_graph_launches_its_kernels_and_the_ops_seen_in_it(region: Region) -> None:
    found = leaves(f"[{CALL}]\n  aten::addmm\n    aten::copy_\naten::relu")
    assert found == [
        ("fused", "cpp_fused_gelu_0"),
        ("fused", "cpp_fused_add_1"),
        ("linear", "aten::addmm"),
        ("pointwise", "aten::relu"),
    ]


def test_kernels_that_the_profiler_did_see_are_not_counted_twice(region: Region) -> None:
    shown = f"[{CALL}]\n  aten::addmm\n  graph_0_cpp_fused_gelu_0\n  cpp_fused_add_1"
    assert sorted(counter for counter, _ in leaves(shown)) == ["fused", "fused", "linear"]


def test_a_graph_that_ran_out_of_sight_is_not_counted_at_all(region: Region) -> None:
    with pytest.raises(NotMeasuredError, match="calls aten::addmm, but the profiler saw nothing"):
        leaves(f"[{CALL}]")


def test_a_graph_that_nothing_is_known_about_is_not_counted_at_all() -> None:
    with pytest.raises(NotMeasuredError, match=r"compiled graph elsewhere.*aot_eager"):
        leaves("[## Call CompiledFxGraph elsewhere ##]")


def test_all_work_is_the_sum_and_views_are_none() -> None:
    nodes = tree("aten::mm\naten::t\naten::empty\naten::gelu\naten::bmm\naten::embedding")
    counts = counts_of(launches_of(nodes))
    assert counts.keys() == COUNTERS.keys()
    assert {name: n for name, n in counts.items() if n} == {
        "linear": 1,
        "bmm": 1,
        "pointwise": 1,
        "gathers": 1,
        "ops": 4,
        "metadata": 1,
        "allocations": 1,
    }
