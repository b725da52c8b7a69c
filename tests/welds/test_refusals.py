"""Tests that modules that are not exactly chains are refused, with reason, op and source line."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support import module_zoo as zoo
from tests.support.module_zoo import H, K, N
from torch import Tensor, nn
from torch.nn.utils import parametrize

import torchweld as tw
from torchweld.core.model_inputs import Inputs
from torchweld.welds.finding.find import find
from torchweld.welds.found_blocks import Blocks, Refusal

X = torch.randn(3, 5, K, generator=torch.Generator().manual_seed(1))


def refusal_of(blocks: Blocks, path: str = "") -> Refusal:
    (refusal,) = (refusal for refusal in blocks.refused if refusal.path == path)
    return refusal


def paths(blocks: Blocks) -> list[str]:
    return [block.path for block in blocks]


@pytest.mark.parametrize(
    ("make", "op", "reason", "line_has"),
    [
        (zoo.NormInside, "aten.layer_norm", "a layer norm between the Linears", "self.norm("),
        (zoo.Sparse, "aten.mean", "a mean between the Linears", "h.mean("),
        (zoo.ResponseNorm, "aten.mul", "aten.mul with its gamma between", "self.gamma * h"),
        (zoo.Branching, "aten._local_scalar_dense", "depend on values", "if h.sum()"),
    ],
)
def test_what_stands_in_the_way_is_named(
    make: Callable[[], nn.Module], op: str, reason: str, line_has: str
) -> None:
    blocks = find(nn.Sequential(nn.Identity(), make()), X)
    refusal = refusal_of(blocks, "1")
    assert (refusal.kind, refusal.op) == (make.__name__, op)
    assert reason in refusal.reason
    file, _, line = refusal.where.partition(":")
    assert file == "module_zoo.py"
    with open(zoo.__file__) as source:
        text = source.read().splitlines()[int(line) - 1]
    assert line_has in text
    assert paths(blocks) == ["1.a", "1.b"]


def test_a_softmax_in_the_middle() -> None:
    blocks = find(zoo.Functional(lambda h: F.softmax(h, dim=-1)), X)
    assert refusal_of(blocks).reason == "a softmax between the Linears"
    assert refusal_of(blocks).op == "aten.softmax"


def test_a_norm_first_and_a_norm_last() -> None:
    for order, place in ((1, "before the first"), (-1, "after the last")):
        parts = [nn.LayerNorm(K), nn.Linear(K, K), nn.ReLU(), nn.Linear(K, K)][::order]
        reason = refusal_of(find(nn.Sequential(*parts), X)).reason
        assert reason == f"a layer norm {place} Linear ({0 if order == 1 else 3})"


def test_an_op_that_the_result_does_not_need_is_no_reason() -> None:
    class Watching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(K, H), nn.Linear(H, N)

        def forward(self, x: Tensor) -> Tensor:
            h = F.relu(self.a(x))
            F.softmax(h, dim=-1).mean()
            return self.b(h)

    assert [block.form for block in find(Watching(), X)] == ["relu/b;identity/b"]


def test_products_over_another_dimension() -> None:
    blocks = find(zoo.SpatialGate(tokens=5), X)
    assert "along a dimension other than the last" in refusal_of(blocks).reason
    assert paths(blocks) == ["fc1", "fc2", "spatial"]
    assert blocks[2].calls[0].shape == (3, 2 * H // 2, 5)


def test_a_clamped_gate_with_an_offset() -> None:
    refusal = refusal_of(find(zoo.ClampedGate(), X))
    assert refusal.op == "aten.clamp"
    assert "neither an activation nor a gate" in refusal.reason


def test_experts_with_stacked_weights() -> None:
    inputs = Inputs(torch.randn(7, K), torch.randint(3, (7,)))
    blocks = find(zoo.Experts(), inputs)
    assert paths(blocks) == []
    refusal = refusal_of(blocks)
    assert "3 dimensions (gate_up_proj, down_proj)" in refusal.reason
    assert refusal.where.startswith("module_zoo.py:")


def test_a_residual_argument_is_named_and_the_linears_are_found() -> None:
    blocks = find(zoo.WithResidual(), Inputs(X, residual=X.clone()))
    assert refusal_of(blocks).reason == "adds its argument residual to the result"
    assert refusal_of(blocks).op == "aten.add"
    assert paths(blocks) == ["dense_h_to_4h", "dense_4h_to_h"]


def test_a_residual_of_its_own() -> None:
    refusal = refusal_of(find(zoo.Inline(), X))
    assert refusal.reason == "a layer norm before the first Linear (final_layer_norm)"


def test_embeddings_and_convolutions_are_no_refusals() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(20, K)
            self.conv = nn.Conv1d(4, 4, 3, padding=1)
            self.head = nn.Linear(K, N)

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.conv(self.embedding(ids)))

    blocks = find(Model(), torch.randint(20, (2, 4)))
    assert paths(blocks) == ["head"]
    assert [refusal.path for refusal in blocks.refused] == [""]


@pytest.mark.parametrize("inner", ["a", "b"])
@pytest.mark.parametrize(
    "hook",
    [
        lambda m: m.register_forward_hook(lambda *_: None),
        lambda m: m.register_forward_pre_hook(lambda *_: None),
        lambda m: m.register_full_backward_hook(lambda *_: None),
        lambda m: m.register_full_backward_pre_hook(lambda *_: None),
    ],
)
def test_hooks_inside_are_not_skipped(inner: str, hook: Callable[[nn.Module], Any]) -> None:
    model = zoo.Functional(F.relu)
    hook(model.get_submodule(inner))
    blocks = find(model, X)
    assert refusal_of(blocks).reason.startswith(f"{inner} has ")
    assert "hooks" in refusal_of(blocks).reason
    assert paths(blocks) == ["a", "b"], "a module's own hooks run around its forward"


def test_hooks_on_the_outside_stay_and_are_not_run_by_the_tracer() -> None:
    model, calls = zoo.Functional(F.relu), []
    model.register_forward_hook(lambda *_: calls.append(1))
    assert paths(find(model, X)) == [""]
    assert calls == [1]


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


class Unchanged(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight


@pytest.mark.parametrize("kind", [Doubled, Unchanged])
def test_parametrised_linears(kind: type[nn.Module]) -> None:
    model = zoo.Functional(F.relu)
    parametrize.register_parametrization(model.a, "weight", kind())
    blocks = find(model, X)
    assert refusal_of(blocks).reason == "a is parametrised (weight)"
    assert refusal_of(blocks, "a").reason == "it is parametrised (weight)"
    assert paths(blocks) == ["b"]


def test_weights_that_a_hook_computes() -> None:
    model = zoo.Functional(F.relu)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # deprecated, but models have it
        nn.utils.weight_norm(model.a)
    blocks = find(model, X)
    assert paths(blocks) == ["b"]
    assert "neither a parameter nor a buffer" in refusal_of(blocks, "a").reason


def test_pruned_linears() -> None:
    from torch.nn.utils import prune

    model = zoo.Functional(F.relu)
    prune.l1_unstructured(model.a, "weight", 0.5)
    assert paths(find(model, X)) == ["b"]


def test_computed_weights() -> None:
    blocks = find(zoo.ScaledWeight(), X)
    assert paths(blocks) == []
    assert refusal_of(blocks).reason == "a weight that is computed by aten.mul"
    assert refusal_of(blocks).op == "aten.linear"


def test_quantised_linears() -> None:
    class Int8Linear(nn.Module):
        weight: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("weight", torch.randint(-9, 9, (N, K), dtype=torch.int8))
            self.scale = nn.Parameter(torch.ones(N))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight.to(x.dtype) * self.scale[:, None])

    blocks = find(nn.Sequential(nn.Linear(K, K), Int8Linear()), X)
    assert paths(blocks) == ["0"]
    assert refusal_of(blocks, "1").reason == "it is quantised (weight is int8)"


def test_weights_of_a_tensor_subclass() -> None:
    class Marked(Tensor):
        pass

    model = nn.Linear(K, N)
    model.weight = nn.Parameter(torch.randn(N, K).as_subclass(Marked))
    assert type(model.weight) is not nn.Parameter
    blocks = find(model, X)
    assert paths(blocks) == []
    assert "as its weight" in refusal_of(blocks).reason


def test_a_forward_set_on_the_instance() -> None:
    model = zoo.Functional(F.relu)
    plain = model.a.forward
    model.a.forward = lambda x: 2 * plain(x)  # type: ignore[assignment, method-assign]
    blocks = find(model, X)
    assert paths(blocks) == ["b"]
    assert refusal_of(blocks).reason == "a has a forward of its own, set on the instance"


def test_mixed_types() -> None:
    model = zoo.GatedWithDropout().bfloat16()
    model.wo.float()
    blocks = find(model, X.bfloat16())
    assert paths(blocks) == ["wi_0", "wi_1", "wo"]
    refusal = refusal_of(blocks)
    assert refusal.reason == "weights and input of several types: bfloat16, float32"


def test_a_result_of_another_type() -> None:
    class Widened(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(K, H), nn.Linear(H, N)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(F.relu(self.a(x))).float()

    blocks = find(Widened().bfloat16(), X.bfloat16())
    assert refusal_of(blocks).reason == "returns float32 where it computes in bfloat16"


def test_a_second_bias() -> None:
    class Shifted(nn.Linear):
        def __init__(self) -> None:
            super().__init__(K, N)
            self.shift = nn.Parameter(torch.randn(N))

        def forward(self, input: Tensor) -> Tensor:  # noqa: A002
            return super().forward(input) + self.shift

    refusal = refusal_of(find(Shifted(), X))
    assert refusal.reason == "aten.add with its shift after the last Linear"


def test_casts_of_the_input() -> None:
    class Casting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(K, H).bfloat16(), nn.Linear(H, N).bfloat16()

        def forward(self, x: Tensor) -> Tensor:
            return self.b(F.relu(self.a(x.to(self.a.weight.dtype))))

    refusal = refusal_of(find(Casting(), X))
    assert refusal.reason == "a cast from float32 to bfloat16 before the first Linear"


def test_autocast() -> None:
    model = zoo.Functional(F.relu)

    def run(m: nn.Module) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            m(X)

    blocks = find(model, run)
    assert paths(blocks) == []
    assert "autocast" in refusal_of(blocks).reason


def test_in_place_changes_of_the_argument() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(K, H), nn.Linear(H, N)

        def forward(self, x: Tensor) -> Tensor:
            x.mul_(1.0)
            return self.b(F.relu(self.a(x)))

    refusal = refusal_of(find(InPlace(), X.clone()))
    assert (refusal.reason, refusal.op) == ("changes its argument x in place", "aten.mul_")
    assert refusal.where.startswith("test_refusals.py:")


@pytest.mark.parametrize("last", ["as it is", "zero", "nan"])
def test_a_change_through_a_view_is_part_of_the_value(last: str) -> None:
    class BehindTheBack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(K, H), nn.Linear(H, N)

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            h.view(-1).relu_()
            return self.b(h)

    model = BehindTheBack()
    if last != "as it is":  # with such weights results do not show the relu
        nn.init.constant_(model.b.weight, 0.0 if last == "zero" else math.nan)
    (block,) = find(model, X)
    assert block.form == "relu/b;identity/b"


def test_a_module_that_depends_on_the_number_of_rows() -> None:
    class Moody(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(K, H), nn.Linear(H, N)

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            return self.b(F.relu(h) if x.shape[1] > 1 else F.gelu(h))

    model = Moody()
    assert [b.form for b in find(model, X)] == ["relu/b;identity/b"]
    assert [b.form for b in find(model, X[:, :1])] == ["gelu/b;identity/b"]
    both = find(model, [X, X[:, :1]])
    assert paths(both) == ["a", "b"]
    assert "does not compute" in refusal_of(both).reason


def test_a_module_that_trains_on_something_else() -> None:
    class TwoFaced(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(K, H), nn.Linear(H, N)

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            return self.b(F.relu(h) if self.training else F.gelu(h))

    def run(m: nn.Module) -> None:
        m.eval()(X)
        m.train()(X)

    blocks = find(TwoFaced(), run)
    assert paths(blocks) == ["a", "b"]
    assert refusal_of(blocks).reason == ("computes different things in evaluation and in training")


def test_gates_that_do_not_fit_together() -> None:
    class OtherInput(zoo.Gated):
        def forward(self, x: Tensor) -> Tensor:
            return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x.abs()))

    class OtherRows(zoo.Gated):
        def forward(self, x: Tensor) -> Tensor:
            up = self.up_proj(x.transpose(0, 1))
            return self.down_proj(F.silu(self.gate_proj(x)) * up)

    one_bias = zoo.Gated(bias=True)
    one_bias.up_proj = nn.Linear(K, H, bias=False)
    for model, reason in (
        (OtherInput(), "gate and up have different inputs"),
        (one_bias, "only one of gate and up has a bias"),
        (OtherRows(), "aten.mul of tensors whose rows do not match between the Linears"),
    ):
        blocks = find(model, torch.randn(4, 4, K))
        assert refusal_of(blocks).reason == reason
        assert paths(blocks) == ["up_proj", "gate_proj", "down_proj"]


def test_several_outputs_and_other_shapes() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(K, N)

        def forward(self, x: Tensor) -> tuple[Tensor, None]:
            return self.a(x), None

    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dense = nn.Linear(K, N)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.dense(x[:, 0]))

    assert refusal_of(find(Two(), X)).reason == "returns a tuple instead of a tensor"
    blocks = find(First(), X)
    assert "is not its input [3, 5, 10] with another last dimension" in refusal_of(blocks).reason
    assert blocks[0].calls[0].shape == (3, K)


def test_a_leaf_that_returns_its_product_in_a_tuple() -> None:
    class Wrapped(nn.Linear):
        def forward(self, input: Tensor) -> Any:  # noqa: A002
            return (super().forward(input),)

    blocks = find(nn.Sequential(Wrapped(K, N)), X)
    assert paths(blocks) == []
    assert refusal_of(blocks, "0").reason == "returns a tuple instead of a tensor"


def test_recurrent_layers_are_refused() -> None:
    blocks = find(nn.LSTM(K, N, batch_first=True), X)
    assert paths(blocks) == []
    assert refusal_of(blocks).kind == "LSTM"


def test_rows_in_another_order() -> None:
    class Flipped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(K, H), nn.Linear(H, N)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(F.relu(self.a(x.transpose(0, 1))))

    refusal = refusal_of(find(Flipped(), torch.randn(4, 4, K)))
    assert refusal.reason == "reorders or leaves out rows"


@pytest.mark.parametrize("training", [False, True])
def test_the_encoder_layer_with_and_without_its_fast_path(training: bool) -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=True)
    blocks = find(layer, torch.randn(2, 5, 16), training=training)
    if training:
        assert paths(blocks) == ["linear1", "linear2"]
        assert "out_proj was not called" in refusal_of(blocks, "self_attn").reason
    else:
        assert paths(blocks) == []
        reason = refusal_of(blocks).reason
        assert "linear1, linear2 were not called: the weights are read directly" in reason


def test_modules_that_are_closed() -> None:
    fused = tw.FusedMLP((K, H, N))
    blocks = find(nn.Sequential(nn.Linear(K, K), fused), X)
    assert paths(blocks) == ["0"]
    assert "runs as one op already" in refusal_of(blocks, "1").reason

    compiled: Any = torch.compile(zoo.Functional(F.relu), backend="eager")
    blocks = find(nn.Sequential(nn.Linear(K, K), compiled), X)
    assert paths(blocks) == ["0"]
    assert "is compiled" in refusal_of(blocks, "1").reason


def test_one_line_a_module_and_none_for_containers() -> None:
    model = nn.Sequential(nn.Sequential(zoo.NormInside(), nn.Linear(N, K)), nn.ReLU())
    blocks = find(model, X)
    assert [refusal.path for refusal in blocks.refused] == ["0.0"]
    assert paths(blocks) == ["0.0.a", "0.0.b", "0.1"]


def test_no_grad_inside_a_module_that_trains() -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(K, H), nn.Linear(H, N)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                h = F.relu(self.a(x))
            return self.b(h)

    class Detached(Frozen):
        def forward(self, x: Tensor) -> Tensor:
            return self.b(F.relu(self.a(x)).detach())

    for model, word in ((Frozen(), "gradients"), (Detached(), "a detach")):
        assert paths(find(model, X)) == [""]
        blocks = find(model, X, training=True)
        assert paths(blocks) == ["a", "b"]
        assert word in refusal_of(blocks).reason


class Noting(zoo.Functional):
    """An MLP that passes its hidden values to a function."""

    def __init__(self, note: Callable[[Any, Tensor], object]) -> None:
        super().__init__(F.relu)
        self.note, self.calls, self.last = note, 0, None
        self.seen: list[Tensor] = []
        self.by_name: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.note(self, x)
        return super().forward(x)


@pytest.mark.parametrize(
    ("note", "name"),
    [
        (lambda self, h: setattr(self, "calls", self.calls + 1), "calls"),
        (lambda self, h: setattr(self, "last", h), "last"),
        (lambda self, h: setattr(self, "new", h), "new"),
        (lambda self, h: self.seen.append(h), "seen"),
        (lambda self, h: self.by_name.update(h=h), "by_name"),
        (lambda self, h: setattr(self.a, "last", h), "a.last"),
    ],
)
def test_what_sets_attributes_keeps_its_code(
    note: Callable[[Any, Tensor], object], name: str
) -> None:
    model = Noting(note)
    before = dict(model.__dict__)
    blocks = find(model, X)
    assert refusal_of(blocks).reason == f"sets its {name} at every call"
    assert refusal_of(blocks).where.startswith("test_refusals.py:")
    assert "b" in paths(blocks)
    assert model.__dict__ == before
    assert (model.seen, model.by_name) == ([], {})


def test_an_attribute_that_is_set_to_what_it_is_would_not_be_set_back() -> None:
    def note(self: Any, h: Tensor) -> None:
        self.calls = 0

    refusal = refusal_of(find(Noting(note), X))
    assert refusal.reason == "sets calls, which outlives the call"
    assert refusal.where.startswith("test_refusals.py:")


def test_what_the_reader_does_not_know_is_refused() -> None:
    """peft's VBLoRA has this: topk of the module's own parameters gives two tensors at once."""

    class Chosen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(N, K))

        def forward(self, x: Tensor) -> Tensor:
            _, which = self.weight.topk(2)
            return x @ self.weight.t()[:, which[0]]

    assert "aten.topk" in refusal_of(find(Chosen(), X)).reason


def test_weights_that_are_not_finite_are_told() -> None:
    model = nn.Sequential(nn.Linear(K, H), nn.ReLU(), nn.Linear(H, N))
    nn.init.constant_(model.get_parameter("2.weight"), math.inf)
    blocks = find(model, X)
    assert [block.path for block in blocks] == [""]
    assert "the model has NaN or Inf in its 2.weight" in blocks.notices
