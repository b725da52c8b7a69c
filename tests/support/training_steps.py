"""What tests of training share: the op with its two ways of keeping, and seeing what backward did.

*Save* (`recompute=False`) keeps x and one hidden-sized tensor per layer, *recompute* keeps x alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from tests.support import helpers
from tests.support.helpers import all_within, last_run, left_to_torch, using_threads
from torch import Tensor, nn

from torchweld.core.blocks import LayerForm, parse_spec, split_tensors
from torchweld.numerics.numerical_rule import Judgement, judge
from torchweld.numerics.sum_scales import scales_of
from torchweld.ops.backends import reference_backend

KEEPING: dict[str, bool] = {"save": False, "recompute": True}


def chain_training(
    x: Tensor, tensors: Sequence[Tensor], spec: str, recompute: bool | None = None
) -> Tensor:
    y: Tensor = torch.ops.torchweld.chain_training(x, list(tensors), spec, recompute)
    return y


@contextmanager
def backward_runs(*, calls: int = 1, composed: bool = False) -> Iterator[None]:
    """What happens inside ends with our backward, which runs `calls` times in this thread;
    `composed`: torch's own products may do it."""
    before = last_run()["backwards"]
    yield
    run = last_run()
    count = run["backwards"] - before
    assert count == calls, f"{count} backwards, not {calls}"
    assert run["pass"] == "backward", f"{run} is not a backward"
    assert composed or run["weights"] != "composed", f"{run} is torch's own products"


def left_backward(x: Tensor, tensors: Sequence[Tensor]) -> bool:
    """Whether torch's own bf16 products may win in backward, which has twice forward's."""
    return x.dtype == torch.bfloat16 and (
        left_to_torch(x, tensors) or left_to_torch(torch.cat([x, x]) if x.dim() > 1 else x, tensors)
    )


def outputs_of(form: LayerForm, tensors: Sequence[Tensor]) -> int:
    """Features that come out of a layer."""
    outputs = tensors[0].shape[1 if form.transposed else 0]
    return outputs if form.gate in ("none", "separate") else outputs // 2


def gradients_for(
    x: Tensor, tensors: Sequence[Tensor], spec: str, *, group: bool = False
) -> list[Tensor]:
    """Random gradients of the outputs, for backward to start from."""
    parts = split_tensors(parse_spec(spec), tensors)
    return [
        torch.randn(*x.shape[:-1], outputs_of(*part)).to(x.dtype)
        for part in (parts if group else parts[-1:])
    ]


def judge_gradients(
    x: Tensor,
    tensors: Sequence[Tensor],
    spec: str,
    grads: Sequence[Tensor] | None = None,
    *,
    group: bool = False,
    threads: int = 1,
) -> dict[str, Judgement]:
    """The numerical rule for outputs and gradients, which are seen to come from our kernels on
    `threads` threads. A chain is judged saved and recomputed; eager and the reference run once."""
    forms = parse_spec(spec)
    given = gradients_for(x, tensors, spec, group=group) if grads is None else grads

    def run(function: Callable[..., list[Tensor]], dtype: torch.dtype) -> list[Tensor]:
        inputs = [t.detach().to(dtype).requires_grad_() for t in (x, *tensors)]
        ys = function(inputs[0], inputs[1:])
        found = torch.autograd.grad(ys, inputs, [grad.to(dtype) for grad in given])
        return [*(y.detach() for y in ys), *found]

    def plain(x: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
        if group:
            return reference_backend.group(x, tensors, forms)
        return [reference_backend.chain(x, tensors, forms)]

    def grouped(x: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
        return helpers.group(x, tensors, spec)

    def kept(recompute: bool) -> Callable[..., list[Tensor]]:
        return lambda x, tensors: [chain_training(x, tensors, spec, recompute)]

    scales = scales_of(x, tensors, forms, group=group, grads=given)
    eager, reference = run(plain, x.dtype), run(plain, torch.float64)
    names = [f"output {i}" for i in range(len(given))]
    names += ["grad x", *(f"grad {i}" for i in range(len(tensors)))]
    found: dict[str, Judgement] = {}
    for keep, function in (
        {"group": grouped} if group else {keep: kept(flag) for keep, flag in KEEPING.items()}
    ).items():
        with using_threads(threads), backward_runs(composed=left_backward(x, tensors)):
            got = run(function, x.dtype)
        columns = zip(names, got, eager, reference, [*scales.outputs, *scales.grads], strict=True)
        found |= {f"{keep}: {name}": judge(*row) for name, *row in columns}
    return found


def all_right(judgements: dict[str, Judgement]) -> None:
    """All bounds hold, and most of them mean something: 16 bits of a short sum say little."""
    all_within(judgements)
    meaningful = [name for name, found in judgements.items() if found.meaningful]
    assert 2 * len(meaningful) > len(judgements), f"only {meaningful} say anything"


def products_needed(
    forms: Sequence[LayerForm], needed: Sequence[bool], *, group: bool = False
) -> int:
    """Products that a backward cannot do without: one per weight whose gradient is needed, and one
    per weight that gradients have to pass on their way down. Gate and up that share a weight count
    as two. `needed`: x first."""
    count, first, below = 0, 1, needed[0]
    for form in forms:
        own = needed[first : first + form.tensors]
        halves = 1 if form.gate in ("none", "separate") else 2
        count += halves * (sum(own[:: 2 if form.bias else 1]) + (form.weights if below else 0))
        below = below or (any(own) and not group)
        first += form.tensors
    return count


def same_bits(got: Sequence[Tensor | None], wanted: Sequence[Tensor | None]) -> None:
    for i, (a, b) in enumerate(zip(got, wanted, strict=True)):
        assert a is not None, f"gradient {i} is missing"
        assert b is not None, f"gradient {i} was not expected"
        assert torch.equal(a, b), f"gradient {i} is off by {float((a - b).abs().max())}"


def all_close(
    got: Sequence[Tensor | None],
    wanted: Sequence[Tensor | None],
    *,
    rtol: float | None = None,
    atol: float | None = None,
) -> None:
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol)


def grads_in(module: nn.Module) -> list[Tensor | None]:
    return [parameter.grad for parameter in module.parameters()]


def saved_bytes(function: Callable[[], Tensor], module: nn.Module | None = None) -> int:
    """Bytes of the storages that autograd keeps for the backward of what `function` computes, those
    of parameters left out."""
    storages: dict[int, int] = {}
    own = [] if module is None else [p.untyped_storage().data_ptr() for p in module.parameters()]

    def keep(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage.nbytes()
        kept.append(t)  # so that no address is used twice
        return t

    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        y = function()
    assert y.requires_grad
    return sum(storages.values())
