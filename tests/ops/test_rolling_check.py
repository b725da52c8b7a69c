"""Changes of weights that leave no trace: what is caught at once, within 1,000 calls, and never.

The table of docs/op.md is held here row by row. Small blocks, so that 1,000 calls take no time; the
bound itself is held for blocks of every size on the look alone.
"""

from __future__ import annotations

import ctypes
import functools
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from tests.support.helpers import ISAS, kernel_runs
from tests.support.mlps import INPUT as X
from tests.support.mlps import by_hand, packed_mlp, packs, result
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack

import torchweld as tw
from torchweld import ops
from torchweld.core.blocks import parse_spec
from torchweld.ops.backends import BACKENDS, Form
from torchweld.ops.backends.weight_watch import WeightWatch, _Rolling

pytestmark = [
    pytest.mark.skipif(not ISAS, reason="no compiled kernels on this machine"),
    pytest.mark.usefixtures("one_thread"),
]

DOCS = Path(__file__).parents[2] / "docs" / "op.md"
Change = Callable[[tw.FusedMLP], object]


@torch.no_grad()
def in_place(mlp: tw.FusedMLP) -> None:
    mlp.up.weight[3, 5] += 2.0


def optimizer_step(mlp: tw.FusedMLP, **how: Any) -> None:
    optimizer = torch.optim.AdamW(mlp.parameters(), lr=0.1, **how)
    mlp(X).square().sum().backward()
    optimizer.step()


@torch.no_grad()
def load(mlp: tw.FusedMLP, **how: bool) -> None:
    mlp.load_state_dict({name: value + 0.1 for name, value in mlp.state_dict().items()}, **how)


def replace_parameter(mlp: tw.FusedMLP) -> None:
    mlp.up.weight = nn.Parameter(torch.randn_like(mlp.up.weight))


def replace_data(mlp: tw.FusedMLP) -> None:
    mlp.up.weight.data = torch.randn_like(mlp.up.weight.data)


def edit_an_eighth(mlp: tw.FusedMLP) -> None:
    mlp.up.weight.data[8:16] += 1.0


def scattered(mlp: tw.FusedMLP) -> None:
    """Five elements in a hundred."""
    weight = mlp.up.weight.data
    weight[torch.rand_like(weight) < 0.05] += 3.0


def swap_rows(mlp: tw.FusedMLP) -> None:
    weight = mlp.up.weight.data
    weight[[3, 40]] = weight[[40, 3]]


def one_element(mlp: tw.FusedMLP) -> None:
    mlp.up.weight.data[3, 5] += 2.0


def one_bias_element(mlp: tw.FusedMLP) -> None:
    mlp.up.bias.data[3] += 2.0


def through_numpy(mlp: tw.FusedMLP) -> None:
    mlp.down.weight.detach().numpy()[2, 3] += 2.0


def through_dlpack(mlp: tw.FusedMLP) -> None:
    from_dlpack(mlp.down.weight.detach())[2, 3] += 2.0


def through_storage(mlp: tw.FusedMLP) -> None:
    mlp.down.weight.untyped_storage()[11:12].fill_(0x40)


def through_a_pointer(mlp: tw.FusedMLP) -> None:
    at = mlp.down.weight.data_ptr() + 4 * 37
    ctypes.c_float.from_address(at).value += 2.0


@torch.no_grad()
def preserving_the_version(mlp: tw.FusedMLP) -> None:
    weight = mlp.down.weight
    with torch.autograd.grad_mode._unsafe_preserve_version_counter(weight):
        weight[2, 3] += 2.0


def from_another_process(mlp: tw.FusedMLP) -> None:
    """The weight lies in a file that is mapped here: see `shared`."""
    write = "import sys, struct; f = open(sys.argv[1], 'r+b'); f.seek(4 * 37); f.write(struct.pack"
    path = vars(mlp.up.weight)["file_name"]
    subprocess.run([sys.executable, "-c", write + "('f', 9.0)); f.close()", path], check=True)


def there_and_back(mlp: tw.FusedMLP) -> None:
    """Calls in between may be served by the old weights."""
    before = mlp.up.weight.data[3, 5].item()
    mlp.up.weight.data[3, 5] += 2.0
    result(mlp)
    mlp.up.weight.data[3, 5] = before


# The first cell of each row of the table.
ROWS: dict[str, list[Change]] = {
    "in-place ops, `nn.init`, even of one element": [
        in_place,
        lambda mlp: nn.init.normal_(mlp.up.weight),
    ],
    "steps of optimizers": [optimizer_step, lambda mlp: optimizer_step(mlp, foreach=True)],
    "steps of `fused=True` optimizers, which count no version": [
        lambda mlp: optimizer_step(mlp, fused=True)
    ],
    "`load_state_dict`, copying or assigning": [load, lambda mlp: load(mlp, assign=True)],
    "a parameter or a Linear replaced, `p.data = …`, `.to()`": [
        replace_parameter,
        replace_data,
        lambda mlp: setattr(mlp, "up", nn.Linear(31, 64)),
        lambda mlp: mlp.bfloat16().float(),
    ],
    "through `.data` or numpy, all of a tensor, or an eighth of its rows or columns": [
        lambda mlp: mlp.up.weight.data.add_(0.1),
        lambda mlp: numpy.add(mlp.up.bias.detach().numpy(), 1, out=mlp.up.bias.detach().numpy()),
        edit_an_eighth,
    ],
    "through `.data`, scattered elements, two rows swapped, one element of a weight or a bias": [
        scattered,
        swap_rows,
        one_element,
        one_bias_element,
    ],
    "one element through numpy, dlpack, the storage, a pointer": [
        through_numpy,
        through_dlpack,
        through_storage,
        through_a_pointer,
    ],
    "one element inside `torch.autograd._unsafe_preserve_version_counter`": [
        preserving_the_version
    ],
    "one element by another process, through shared memory or a mapped file": [
        from_another_process
    ],
    "an edit of the last four kinds that is undone before it is met": [there_and_back],
}
AT_ONCE, WITHIN, NEVER = "at once", "within 1,000 calls", "never"


def table() -> dict[str, str]:
    lines = DOCS.read_text().partition("| the weights are changed by |")[2].splitlines()[2:]
    rows: dict[str, str] = {}
    for line in lines:
        if not line.startswith("|"):
            break
        row, caught = (cell.strip() for cell in line.strip("|").split(" | "))
        rows[row] = caught
    return rows


def test_the_table_has_these_rows_and_no_others() -> None:
    rows = table()
    assert list(rows) == list(ROWS)
    assert set(rows.values()) == {AT_ONCE, WITHIN, NEVER}


@pytest.fixture
def mlp(request: pytest.FixtureRequest, tmp_path: Path) -> tw.FusedMLP:
    mlp = packed_mlp("two")
    name = str(tmp_path / "weight")
    shared = torch.from_file(name, shared=True, size=64 * 31, dtype=torch.float32).view(64, 31)
    shared.copy_(mlp.up.weight.detach())
    mlp.up.weight.data = shared
    vars(mlp.up.weight)["file_name"] = name
    result(mlp)
    return mlp


@pytest.mark.parametrize(
    ("row", "change"),
    [
        pytest.param(row, change, id=f"{row}-{i}")
        for row, changes in ROWS.items()
        for i, change in enumerate(changes)
    ],
)
def test_what_the_table_says(mlp: tw.FusedMLP, row: str, change: Change) -> None:
    caught = table()[row]
    before, made = result(mlp), packs(mlp)
    change(mlp)
    with torch.no_grad():
        expected = by_hand(mlp, X)
    if caught == NEVER:
        for _ in range(1000):
            assert torch.equal(result(mlp), before)
        assert packs(mlp) == made
        return
    assert not torch.allclose(expected, before, atol=1e-4), "the change is too small to be seen"
    for _ in range(1 if caught == AT_ONCE else 1000):
        y = result(mlp)
    torch.testing.assert_close(y, expected)
    assert packs(mlp) == made + 1


@pytest.mark.parametrize("change", [scattered, swap_rows, one_bias_element, through_numpy])
def test_without_packing_nothing_is_stale(change: Change) -> None:
    """The strict way: weights are read where they lie."""
    mlp = tw.FusedMLP((31, 64, 16), packing=False).eval()
    with torch.no_grad():
        mlp(X)
        change(mlp)
        with kernel_runs("natural"):
            torch.testing.assert_close(mlp(X), by_hand(mlp, X))


def test_a_compiled_graph_finds_it_too() -> None:
    pack, spec = ops.compiled.Pack(), "gelu/b;identity/b"
    tensors = [torch.randn(64, 31), torch.randn(64), torch.randn(16, 64), torch.randn(16)]
    kept = torch.ops.torchweld.chain_kept.default
    kept(X, tensors, spec, pack.number)
    tensors[2].data[7, 9] += 5.0
    for _ in range(1000):
        y = kept(X, tensors, spec, pack.number)
    torch.testing.assert_close(y, torch.ops.torchweld.chain(X, tensors, spec))
    assert pack.times == 2


def test_many_threads_look_at_one_copy() -> None:
    mlp = packed_mlp("two")
    failures: list[BaseException] = []

    def serve() -> None:
        try:
            for _ in range(400):
                result(mlp)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=serve) for _ in range(4)]
    for thread in threads:
        thread.start()
    scattered(mlp)
    for thread in threads:
        thread.join()
    assert not failures
    for _ in range(1000):
        result(mlp)
    with torch.no_grad():
        torch.testing.assert_close(result(mlp), by_hand(mlp, X))


def test_a_storage_that_was_resized_is_not_read() -> None:
    mlp = packed_mlp("two")
    storage = mlp.up.weight.untyped_storage()
    for size in (0, 64, storage.nbytes() - 4):
        storage.resize_(size)
        with torch.no_grad(), pytest.raises(ValueError, match="its storage holds only"):
            mlp(X)
        with torch.no_grad(), pytest.raises(ValueError, match="its storage holds only"):
            torch.ops.torchweld.pack([mlp.up.weight.detach()], "gelu")
    storage.resize_(64 * 31 * 4)
    nn.init.normal_(mlp.up.weight)
    with torch.no_grad():
        torch.testing.assert_close(result(mlp), by_hand(mlp, X))


# ---- the look alone ----

Maker = Callable[[list[Tensor]], Callable[[], bool]]
LOOKS: dict[str, Maker] = {
    "compiled": lambda tensors: ops.compiled.Rolling(tensors).unchanged,
    "in Python": lambda tensors: _Rolling(tensors).unchanged,
}


def finds(look: Callable[[], bool], calls: int) -> bool:
    return not all(look() for _ in range(calls))


@pytest.mark.parametrize("make", LOOKS.values(), ids=LOOKS)
@pytest.mark.parametrize(
    ("shapes", "calls"),
    [
        pytest.param([(1,)], 1000, id="one element"),
        pytest.param([(64, 64), (64,)] * 3, 1000, id="three layers"),
        pytest.param([(3,)] * 300, 1000, id="many small tensors"),
        pytest.param([(5, 7), (7,)] * 800, 1000, id="more tensors than calls"),
        pytest.param([(700, 600)], 1000, id="1.7 MB"),
        pytest.param([(2048, 1024), (1024,), (1024, 2040), (1,)], 1000, id="16 MB"),
        pytest.param([(2048, 3072), (3072,)], 1501, id="24 MB"),
    ],
)
def test_all_of_a_block_is_seen_in_time(
    shapes: list[tuple[int, ...]], calls: int, make: Maker
) -> None:
    tensors = [torch.randn(shape) for shape in shapes]
    look = make(tensors)
    assert not finds(look, 2 * calls)
    for tensor in (tensors[0], tensors[-1]):
        for index in {0, tensor.numel() // 3, tensor.numel() - 1}:
            before = tensor.view(-1)[index].item()
            tensor.view(-1)[index] = -before
            assert finds(look, calls), (tensor.shape, index)
            tensor.view(-1)[index] = before
            assert not finds(look, calls)


def odd_tensors() -> dict[str, Tensor]:
    return {
        "transposed": torch.randn(40, 24).t(),
        "rows apart": torch.randn(40, 48)[:, :24],
        "every other row": torch.randn(80, 24)[::2],
        "every other column": torch.randn(40, 48)[:, ::2],
        "apart both ways": torch.randn(80, 48)[::2, ::3],
        "one column": torch.randn(40, 9)[:, 4:5],
        "a bias apart": torch.randn(90)[::3],
        "expanded": torch.randn(24).expand(40, 24),
        "expanded columns": torch.randn(40, 1).expand(40, 24),
        "bf16": torch.randn(41, 23).bfloat16(),
        "fp16 transposed": torch.randn(41, 23).half().t(),
        "fp64": torch.randn(7, 5).double(),
    }


@pytest.mark.parametrize("kind", odd_tensors())
@pytest.mark.parametrize("make", LOOKS.values(), ids=LOOKS)
def test_any_layout_is_seen_element_by_element(kind: str, make: Maker) -> None:
    tensor = odd_tensors()[kind]
    where: list[tuple[int, ...]] = [(i,) for i in range(tensor.shape[0])]
    if tensor.dim() == 2:
        where = [(i * 7 % tensor.shape[0], i % tensor.shape[1]) for i in range(30)]
    for index in where:
        look = make([tensor])
        assert not finds(look, 200)
        tensor[index] *= -1
        assert finds(look, 1000), index


def test_signs_do_not_cancel() -> None:
    """Rows of ±1 that change places: only the highest bit of some words differs."""
    weight = torch.where(torch.rand(64, 64) < 0.5, -1.0, 1.0)
    for distance in range(1, 64):
        look = ops.compiled.Rolling([weight]).unchanged
        assert not torch.equal(weight[0], weight[distance])
        weight[[0, distance]] = weight[[distance, 0]]
        assert finds(look, 1000), distance


def test_copies_of_the_backends_are_looked_at_too() -> None:
    tensors = [torch.randn(64, 31), torch.randn(64)]
    block = Form.of("chain", parse_spec("gelu/b"), tensors)
    for backend in BACKENDS:
        mode = backend.abilities.packed_mode
        if mode is not None and not backend.unavailable():
            with torch.no_grad():
                run = backend.build(block, tensors, mode.name)
                run(X)
                tensors[0].data[3, 5] += 4.0
                for _ in range(1000):
                    y = run(X)
                expected = torch.ops.torchweld.chain(X, tensors, "gelu/b")
            named = functools.partial("{}: {}".format, mode.name)
            torch.testing.assert_close(y, expected, msg=named)


def test_a_watch_of_views_reads_no_contents() -> None:
    tensor = torch.randn(64, 64)
    watch = WeightWatch([tensor], contents=False)
    tensor.data[3, 3] += 1.0
    assert not finds(watch.unchanged, 1000)
