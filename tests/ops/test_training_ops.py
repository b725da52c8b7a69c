"""The ops of training by themselves: schemas, shapes, errors, and what a graph of them may hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.helpers import ISAS, fixed, group_tensors, random_tensors, tensors_for
from tests.support.training_steps import same_bits

from torchweld.core.blocks import parse_spec

pytestmark = [
    pytest.mark.skipif(not ISAS, reason="no compiled kernels on this machine"),
    pytest.mark.usefixtures("one_thread"),
]

GELU = "gelu/b;identity/b"
DROPPED = "gelu/b/drop:0.25;silu/separate;tanh/drop:0.5"
QKV = "identity/b;identity;silu/first/b"
ops = torch.ops.torchweld


def arguments(spec: str, *, save: bool = True) -> dict[str, Any]:
    """Of `chain_backward`, with what `chain_saving` gave."""
    forms = parse_spec(spec)
    tensors = [t.detach() for t in tensors_for(forms, torch.float32)]
    x = fixed(2, 3, 5)
    sizes = (*(4, 6, 3)[: len(forms) - 1], 3)
    masks = [
        ops.dropout_mask(x, n, form.dropout)
        for n, form in zip(sizes, forms, strict=True)
        if form.dropout
    ]
    y, *saved = ops.chain_saving(x, tensors, masks, spec, save)
    return {
        "grad": fixed(*y.shape),
        "x": x,
        "params": tensors,
        "saved": saved,
        "masks": masks,
        "spec": spec,
        "needed": [True] * (1 + len(tensors)),
    }


def passes(op: Any, *given: Any) -> None:
    assert set(torch.library.opcheck(op.default, given).values()) == {"SUCCESS"}


# ---- opcheck ----


@pytest.mark.parametrize("recompute", [None, True])
def test_opcheck_of_a_chain_in_training(recompute: bool | None) -> None:
    tensors = tensors_for(parse_spec(GELU), torch.float32)
    passes(ops.chain_training, fixed(2, 3, 5).requires_grad_(), tensors, GELU, recompute)


@pytest.mark.parametrize(
    ("spec", "save"), [(GELU, False), (DROPPED, True), ("silu/interleaved/t/b", True)]
)
def test_opcheck_of_forward_and_backward(spec: str, save: bool) -> None:
    given = arguments(spec, save=save)
    passes(ops.chain_saving, given["x"], given["params"], given["masks"], spec, save)
    passes(ops.chain_backward, *given.values())
    some = [i % 2 == 0 for i in range(len(given["needed"]))]
    passes(ops.chain_backward, *{**given, "needed": some}.values())


def test_opcheck_of_a_group_in_training() -> None:
    tensors = [t.detach() for t in group_tensors(parse_spec(QKV), 5, torch.float32)]
    x = fixed(2, 3, 5)
    passes(ops.group_saving, x, tensors, QKV)
    results = ops.group_saving(x, tensors, QKV)
    grads = [fixed(*y.shape) for y in results[:3]]
    passes(ops.group_backward, grads, x, tensors, results[3:], QKV, [True] * 6)


def test_the_mask_is_known_to_be_random() -> None:
    """A compiler must neither share nor move the call."""
    assert torch.Tag.nondeterministic_seeded in ops.dropout_mask.default.tags
    found = torch.library.opcheck(
        ops.dropout_mask.default,
        (fixed(3, 5), 21, 0.5),
        test_utils=("test_schema", "test_faketensor"),
    )
    assert set(found.values()) == {"SUCCESS"}


def test_shapes_without_values() -> None:
    """On meta, as in a module that is only planned: the same sizes, nothing computed."""
    tensors = [t.detach().to("meta").requires_grad_() for t in tensors_for(parse_spec(GELU))]
    x = torch.empty(2, 0, 5, dtype=torch.float64, device="meta", requires_grad=True)
    y = ops.chain_training(x, tensors, GELU)
    grads = torch.autograd.grad(y.sum(), [x, *tensors])
    assert [t.shape for t in grads] == [t.shape for t in (x, *tensors)]
    assert all(t.is_meta for t in (y, *grads))


# ---- errors ----


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"grad": fixed(2, 3, 4)}, r"grad"),
        ({"grad": fixed(2, 3, 3).double()}, r"grad"),
        ({"needed": [True] * 3}, r"needed|flags"),
        (
            {"saved": [fixed(2, 3, 4)] * 7},
            "saves 4 tensors for this spec, 7 were given",
        ),
        ({"masks": []}, r"2 layers with dropout, 0 masks were given"),
        ({"masks": [torch.zeros(2, 3, 1, dtype=torch.uint8)] * 3}, r"3 masks were given"),
        ({"masks": [torch.zeros(2, 3, 2, dtype=torch.uint8)] * 2}, r"the mask of layer 0 is"),
        ({"masks": [torch.zeros(2, 3, 1)] * 2}, r"expected .* of uint8"),
        ({"params": [fixed(4, 5)]}, r"asks for \d tensors, 1 were given"),
        ({"x": fixed(2, 3, 6)}, r"features"),
    ],
)
def test_wrong_arguments_of_backward_are_named(changed: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, RuntimeError), match=message):
        ops.chain_backward(*{**arguments(DROPPED), **changed}.values())


@pytest.mark.parametrize(
    ("p", "features", "message"),
    [(0.0, 8, "0 < p < 1"), (1.0, 8, "0 < p < 1"), (0.5, 0, "at least one feature")],
)
def test_wrong_arguments_of_the_mask_are_named(p: float, features: int, message: str) -> None:
    with pytest.raises((ValueError, RuntimeError), match=message):
        ops.dropout_mask(fixed(3, 5), features, p)


def test_nothing_needed_is_nothing_computed() -> None:
    given = arguments(GELU)
    assert ops.chain_backward(*{**given, "needed": [False] * 5}.values()) == []


# ---- the same gradients by any way ----


@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.parametrize("rows", [5, 64, 600])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bits_do_not_depend_on_threads(rows: int, threads: int, dtype: torch.dtype) -> None:
    spec = "gelu/b;silu/first/b;identity/b"
    tensors = random_tensors((70, 190, 101, 33), parse_spec(spec), dtype)
    x, g = torch.randn(rows, 70).to(dtype), torch.randn(rows, 33).to(dtype)
    found = []
    for count in (1, threads):
        torch.set_num_threads(count)
        y, *saved = ops.chain_saving(x, tensors, [], spec, True)
        found.append([y, *ops.chain_backward(g, x, tensors, saved, [], spec, [True] * 7)])
    torch.set_num_threads(1)
    same_bits(*found)


def test_saving_changes_no_bit_of_the_output() -> None:
    for dtype in (torch.float32, torch.float16, torch.float64):
        tensors = random_tensors((70, 190, 33), parse_spec(GELU), dtype)
        for rows in (1, 7, 40):
            x = torch.randn(rows, 70).to(dtype)
            y = ops.chain(x, tensors, GELU)
            for save in (True, False):
                assert torch.equal(ops.chain_saving(x, tensors, [], GELU, save)[0], y)
