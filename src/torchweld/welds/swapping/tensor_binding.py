"""A welded module as it stands now, ready for quick calls.

`Bound` has the dictionaries in which the block's tensors are looked up at every call, and what the
compiled forward reads in place of a module. It is good for as long as the module's guard holds and
its tensors are kept where they were.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, cast

from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from torchweld import ops
from torchweld.core.blocks import LayerForm, format_spec
from torchweld.welds.guarding.welded_structure import BACKWARD_HOOKS, HOOKS, inside, steps_of
from torchweld.welds.weld_decisions import Choice

# Hooks on all modules are called for those inside a block too.
GLOBAL_HOOKS = (torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks)
GLOBAL_BACKWARD_HOOKS = (
    torch_module._global_backward_hooks,
    torch_module._global_backward_pre_hooks,
)


class TensorPlace(NamedTuple):
    """Where a tensor is looked up: a module's `_parameters` or `_buffers`, and its name there."""

    holder: dict[str, Tensor | None]
    name: str


def place_of(module: nn.Module, path: str) -> TensorPlace | None:
    """Where the tensor "up.weight" is; None if there is none of that name."""
    inner, _, name = path.rpartition(".")
    found = inside(module, steps_of(inner))
    for holder in () if found is None else (found._parameters, found._buffers):
        if holder.get(name) is not None:
            return TensorPlace(cast(dict[str, Tensor | None], holder), name)
    return None


class Stand:
    """Stands for a module in the compiled forward, which reads its instance dictionary alone."""


class StandKind(NamedTuple):
    """The kind of calls that a stand serves."""

    packed: bool = False
    recompute: bool = False
    training: bool = False  # the module is in training mode

    @staticmethod
    def of(choice: Choice, training: bool) -> StandKind:
        return PACKED if choice.packed else StandKind(False, choice.recompute, training)


PACKED = StandKind(packed=True)
STAND_KINDS = (
    PACKED,
    *(StandKind(recompute=r, training=t) for r in (False, True) for t in (False, True)),
)


class Bound:
    """The block's tensors, ready for quick calls; unusable if `problem` is set."""

    __slots__ = (
        "_copies",
        "backward_hooks",
        "fast",
        "hooks",
        "places",
        "problem",
        "stands",
    )

    def __init__(
        self,
        module: nn.Module,
        forms: Sequence[LayerForm],
        tensors: Sequence[str],
        *,
        in_training: Sequence[LayerForm],
        pack: Any,
    ) -> None:
        # Shape of x -> what to give to the compiled forward (a Stand, or a member of a group), or
        # False where the table has no choice for that many rows. Filled by calls that were found
        # to be covered.
        self.fast: dict[tuple[int, ...], Stand | Any | Literal[False]] = {}
        self.places: list[TensorPlace] = []
        # Dictionaries that stand for the `_parameters` of a Linear -> places of weight and bias.
        self._copies: list[tuple[dict[str, Any], TensorPlace, TensorPlace | None]] = []
        # Each stand by the calls that it is for. Empty if there are no kernels.
        self.stands: dict[StandKind, Stand] = {}
        self.problem: str | None = None
        inner = bool(module._modules)
        self.hooks = list(GLOBAL_HOOKS) if inner else []
        self.backward_hooks = list(GLOBAL_BACKWARD_HOOKS) if inner else []
        for path in tensors:
            place = place_of(module, path)
            if place is None:
                self.problem = f"{path} is no parameter or buffer any more"
                break
            self.places.append(place)
        if self.problem is None and ops.compiled is not None:
            self._stand_in(module, forms, in_training, tensors, pack)

    def fits(self, module: nn.Module, tensors: Sequence[str]) -> bool:
        """Whether tensors are still looked up in the same dictionaries."""
        now = [place_of(module, path) for path in tensors]
        pairs = zip(now, self.places, strict=False)
        return len(now) == len(self.places) and all(
            a is not None and a.holder is b.holder for a, b in pairs
        )

    # ---- tensors ----

    def tensors(self) -> list[Tensor] | None:
        """The block's, as they are now; None if one is gone."""
        found: list[Tensor] = []
        for holder, name in self.places:
            tensor = holder.get(name)
            if tensor is None:
                return None
            found.append(tensor)
        return found

    def wants_gradients(self, x: Tensor) -> bool:
        """Whether autograd would record a call, in a mode in which it records."""
        if x.requires_grad:
            return True
        for holder, name in self.places:
            tensor = holder.get(name)
            if tensor is not None and tensor.requires_grad:
                return True
        return False

    def _stand_in(
        self,
        module: nn.Module,
        forms: Sequence[LayerForm],
        in_training: Sequence[LayerForm],
        tensors: Sequence[str],
        pack: Any,
    ) -> None:
        """Makes what the compiled forward reads: a module whose children are all plain Linears."""
        children: dict[str, nn.Module] = {}
        first = 0
        for form in forms:
            for _ in range(form.weights):
                weight, bias = first, first + 1 if form.bias else None
                first += 2 if form.bias else 1
                children[str(len(children))] = self._linear(module, tensors, weight, bias)
        spec, training_spec = format_spec(forms), format_spec(in_training)
        for kind in STAND_KINDS:
            self.stands[kind] = stand = Stand()
            stand.__dict__.update(
                _modules=children,
                _names=tuple(children),
                _spec=spec,
                _training_spec=training_spec,
                _pack=pack if kind.packed else None,
                training=kind.training,
                recompute=kind.recompute,
                _holder=None,
            )

    def _linear(
        self, module: nn.Module, tensors: Sequence[str], weight: int, bias: int | None
    ) -> nn.Module:
        """The module that holds a product's tensors, if it is a plain Linear, or a stand-in.

        A stand-in shares the `_parameters` of what holds the tensors, where they are kept as a
        Linear keeps them; else it has a dictionary of its own, to be refreshed before each call.
        """
        places, inner = self.places, tensors[weight].rpartition(".")[0]
        holder = inside(module, steps_of(inner))
        assert holder is not None
        own: dict[str, Any] = holder._parameters
        alike = places[weight].holder is own and places[weight].name == "weight"
        if bias is None:
            alike = alike and own.get("bias", self) is None
        else:
            alike = alike and places[bias].holder is own and places[bias].name == "bias"
        if alike and type(holder) is nn.Linear:
            return holder
        if not alike:
            own = {}
            self._copies.append((own, places[weight], None if bias is None else places[bias]))
        stand: nn.Linear = nn.Linear.__new__(nn.Linear)
        stand.__dict__.update({kind: {} for kind in (*HOOKS, *BACKWARD_HOOKS)}, _parameters=own)
        return stand

    @property
    def direct(self) -> bool:
        """Whether the compiled forward finds the tensors by itself."""
        return not self._copies

    def refresh(self) -> None:
        """Gives stand-ins with dictionaries of their own the tensors as they are now."""
        for own, weight, bias in self._copies:
            own["weight"] = weight.holder.get(weight.name)
            own["bias"] = None if bias is None else bias.holder.get(bias.name)
