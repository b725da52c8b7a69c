"""Ops inside ops: who does the work, who counts, and that everybody counts alike."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from tests.support.made_profiles import Builder
from torch import Tensor, nn

from torchweld.ops.fused_mlp import FusedMLP
from torchweld.profiles.accounting.time_account import account
from torchweld.profiles.attributing.attribution import attribute
from torchweld.profiles.attributing.op_nesting import launching, leaves, working
from torchweld.profiles.expecting.expectation import check_profile, expect
from torchweld.profiles.recording.torch_profiler import record

TREES = [
    # names with their parents; who does work; who counts as a launch
    ("aten::linear:-1 aten::t:0 aten::addmm:0 aten::copy_:2", "2 3", "2"),
    ("aten::clone:-1 aten::empty_like:0 aten::copy_:0", "2", "0"),
    ("aten::to:-1 aten::_to_copy:0 aten::empty_strided:1 aten::copy_:1", "3", "1"),
    ("aten::mean:-1 aten::sum:0 aten::div_:0", "1 2", "0"),
    ("aten::sum:-1 aten::as_strided:0 aten::fill_:0", "0 2", "0"),
    ("aten::embedding:-1 aten::index_select:0", "1", "0"),
    ("aten::_embedding_bag:-1 aten::arange:0 aten::sub_:0", "0 1 2", "0"),
    ("aten::index:-1 aten::nonzero:0", "0 1", "0"),
    ("aten::mse_loss:-1 aten::mean:0 aten::sum:1", "0 2", "0"),
    ("aten::zeros:-1 aten::empty:0 aten::zero_:0 aten::fill_:2", "3", "0"),
    ("aten::convolution:-1 aten::_convolution:0 aten::mkldnn_convolution:1", "2", "0"),
    ("aten::masked_fill:-1 aten::clone:0 aten::copy_:1 aten::masked_fill_:0", "2 3", "0"),
    ("aten::_foreach_add_:-1 aten::add_:0 aten::add_:0", "1 2", "0"),
    ("torchweld::chain:-1 aten::empty:0", "0", "0"),
    ("torchweld::chain:-1 aten::addmm:0 aten::gelu:0 aten::addmm:0", "1 2 3", "1 2 3"),
    ("aten::_fused_rms_norm:-1 aten::pow:0 aten::mean:0 aten::mul:0", "1 2 3", "0"),
    ("AddmmBackward0:-1 aten::mm:0 aten::mm:0", "1 2", "1 2"),
    ("mylib::op:-1", "0", "0"),
    ("mylib::op:-1 aten::mm:0", "1", "0 1"),
    ("mylib::op:-1 aten::addmm:0 aten::copy_:1 aten::relu:0", "1 2 3", "0 1 3"),
    ("mylib::op:-1 aten::clone:0 aten::copy_:1 aten::any:0", "2 3", "0"),
    ("mylib::op:-1 mylib::inner:0 aten::triu:1", "2", "0"),
    ("aten::linalg_inv:-1 aten::linalg_inv_ex:0 aten::gt:1 aten::all:1", "2 3", "1"),
    ("mylib::op:-1 aten::copy_:0", "0 1", "0"),
    ("aten::mv:-1 aten::addmv_:0", "1", "1"),
    ("aten::lift_fresh:-1 aten::clone:0 aten::copy_:1", "2", "1"),
    ("step (dynamo_timed):-1 aten::mm:0 aten::mm:-1", "2", "2"),
    ("mylib::op:-1 step (dynamo_timed):0 aten::mm:1", "0", "0"),
]


@pytest.mark.parametrize(("tree", "works", "launches"), TREES)
def test_who_does_the_work_of_ops_inside_ops(tree: str, works: str, launches: str) -> None:
    pairs = [row.rsplit(":", 1) for row in tree.replace(" (", "(").split()]
    names, parents = [name for name, _ in pairs], [int(parent) for _, parent in pairs]
    assert [i for i, does in enumerate(working(names, parents)) if does] == [
        int(i) for i in works.split()
    ]
    assert [i for i, counts in enumerate(launching(names, parents)) if counts] == [
        int(i) for i in launches.split()
    ]


def test_a_compiled_graph_hides_its_kernels_unless_they_show() -> None:
    call = "## Call CompiledFxGraph fabc ##"
    assert working([call, "aten::mm"], [-1, 0]) == [True, True]
    assert launching([call, "aten::mm"], [-1, 0]) == [False, True]
    assert working([call, "graph_0_cpp_fused_gelu_0", "aten::mm"], [-1, 0, 0]) == [
        False,
        True,
        True,
    ]


def test_ranges_pass_on_whatever_they_are_called() -> None:
    names, parents = ["mylib::range", "aten::mm"], [-1, 0]
    assert leaves(names, parents, [False, True]) == [False, True]
    assert leaves(names[:1], parents[:1], [False]) == [False]
    assert leaves(names[:1], parents[:1], [True]) == [True]


def test_views_and_allocations_are_leaves_that_launch_nothing() -> None:
    names = ["aten::t", "aten::transpose", "aten::empty_like", "aten::empty"]
    parents = [-1, 0, -1, 2]
    assert leaves(names, parents, [True] * 4) == [True, False, True, False]
    assert launching(names, parents) == [False] * 4


@pytest.mark.parametrize("name", ["svd", "qr", "eigh"])
def test_a_factorisation_is_one_op_of_another_kind(name: str) -> None:
    x = torch.eye(7) + 0.1
    with expect(other=1, ops=1):
        getattr(torch.linalg, name)(x)


def test_the_check_of_a_factorisations_result_is_no_work_of_its_own() -> None:
    x = torch.eye(7) + 0.1
    with expect(other=1, pointwise=0, fills=0):
        torch.linalg.inv(x)
    with expect(other=1, linear=0):
        torch.linalg.solve(x, x)


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "mlp": lambda: (nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)), torch.ones(3, 8)),
    "fused": lambda: (FusedMLP((8, 16, 4)), torch.ones(3, 8)),
    "layer": lambda: (nn.TransformerEncoderLayer(8, 2, 16), torch.ones(2, 3, 8)),
    "recurrent": lambda: (nn.LSTM(8, 4), torch.ones(2, 3, 8)),
    "image": lambda: (nn.Sequential(nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3)), torch.ones(2, 2, 5, 5)),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("training", [False, True])
def test_account_expectation_and_profile_count_the_same(name: str, training: bool) -> None:
    model, x = MODELS[name]()
    model.train(training)

    def run() -> None:
        with torch.set_grad_enabled(training):
            y = model(x)
            y = y if isinstance(y, Tensor) else y[0]
            if training:
                F.mse_loss(y, torch.zeros_like(y)).backward()

    run()
    with expect(backward=True) as e:
        run()
    made = Builder()
    made.ops = list(attribute(record(run)).ops)
    for op in made.ops:
        op.module = 0
    profile = made.build()
    count = account(profile).modules[0].launches
    assert count == e.counts["ops"] > 0
    assert check_profile(profile, {"ops": count}, backward=True).holds
