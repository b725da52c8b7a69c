"""A welded module as it stands now, ready for quick calls.

`Bound` has the dictionaries in which the block's tensors are looked up at every call, what the
compiled forward reads in place of a module, and a snapshot that tells in a few hundred nanoseconds
whether the module is still as it was when examined. If it is not, it is bound anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, Literal, NamedTuple, cast

from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from torchweld import ops
from torchweld.blocks import LayerForm, format_spec
from torchweld.interrupts import is_interrupt
from torchweld.welding.structure import BACKWARD_HOOKS, HOOKS, Structure, inside, steps_of

# Hooks on all modules are called for those inside a block too.
GLOBAL_HOOKS = (torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks)
GLOBAL_BACKWARD_HOOKS = (
    torch_module._global_backward_hooks,
    torch_module._global_backward_pre_hooks,
)


class Place(NamedTuple):
    """Where a tensor is looked up: a module's `_parameters` or `_buffers`, and its name there."""

    holder: dict[str, Tensor | None]
    name: str


def place_of(module: nn.Module, path: str) -> Place | None:
    """Where the tensor "up.weight" is; None if there is none of that name."""
    inner, _, name = path.rpartition(".")
    found = inside(module, steps_of(inner))
    for holder in () if found is None else (found._parameters, found._buffers):
        if holder.get(name) is not None:
            return Place(cast(dict[str, Tensor | None], holder), name)
    return None


class Stand:
    """Stands for a module in the compiled forward, which reads its instance dictionary alone."""


class _Snapshot(NamedTuple):
    """A module and those inside, as they are at this moment."""

    kind: type
    read: Callable[[dict[str, Any]], Any]  # some entries of the module's own dictionary
    own: Any  # what it read
    inner: list[tuple[nn.Module, dict[str, Any], type]]  # each with its dictionary and class
    around: list[tuple[dict[str, Any], dict[str, Any]]]  # where paths are looked up, live and seen
    forwards: list[tuple[Any, Any]]  # classes and their forward

    @staticmethod
    def of(module: nn.Module, structure: Structure) -> _Snapshot:
        paths = [part.steps for part in structure.parts]
        found = [m for steps in paths[1:] if (m := inside(module, steps)) is not None]
        ends = {steps[:end] for steps in paths for end in range(len(steps))}
        holders = [m._modules for steps in ends if (m := inside(module, steps)) is not None]
        # Of the module itself not the whole dictionary, which leads here: without a circle, a model
        # that is let go is freed at once.
        own = module.__dict__
        keys = [key for key in structure.parts[0].attributes if key in own]
        read = itemgetter("_parameters", "_modules", *keys)
        return _Snapshot(
            kind=type(module),
            read=read,
            own=read(own),
            inner=[(m, dict(m.__dict__), type(m)) for m in found],
            around=[(live, dict(live)) for live in holders],
            forwards=[(k, k.forward) for k in {part.kind: None for part in structure.parts}],  # type: ignore[attr-defined]
        )


class Bound:
    """`problem` says why the original has to run, if it has to; else the rest is usable."""

    __slots__ = (
        "_around",
        "_copies",
        "_forwards",
        "_inner",
        "_own",
        "_parameters",
        "_plain_linear",
        "_read",
        "_type",
        "backward_hooks",
        "fast",
        "hooks",
        "natural",
        "packed",
        "places",
        "problem",
        "training",
    )

    def __init__(
        self,
        module: nn.Module,
        structure: Structure,
        forms: Sequence[LayerForm],
        tensors: Sequence[str],
        *,
        pack: Any,
        watch_linears: bool,
    ) -> None:
        """`watch_linears`: not every call will go through the compiled forward."""
        # Elements of x -> what to give to the compiled forward, or False where the table has no
        # choice for that many rows. Filled by calls that were found to be covered.
        self.fast: dict[int, Stand | Literal[False]] = {}
        self.places: list[Place] = []
        # Dictionaries that stand for the `_parameters` of a Linear -> places of weight and bias.
        self._copies: list[tuple[dict[str, Any], Place, Place | None]] = []
        self.natural: Stand | None = None
        self.packed: Stand | None = None
        before = _Snapshot.of(module, structure)
        # After the snapshot, so that a change in between is met at the next call.
        self.problem = structure.changed(module)
        for path in tensors if self.problem is None else ():
            place = place_of(module, path)
            if place is None:
                self.problem = f"{path} is no parameter or buffer any more"
                break
            self.places.append(place)
        trusted: list[nn.Module] = []
        if self.problem is None and ops.compiled is not None:
            linears = self._stand_in(module, forms, tensors, pack)
            trusted = [] if watch_linears else linears
        self._watch(module, structure, before, trusted)

    # ---- noticing changes ----

    def _watch(
        self,
        module: nn.Module,
        structure: Structure,
        before: _Snapshot,
        trusted: Sequence[nn.Module],
    ) -> None:
        """Of `trusted` the compiled forward sees class, hooks and a forward of their own."""
        inner = [one for one in before.inner if all(one[0] is not m for m in trusted)]
        self._inner = [(m, kind, m.__dict__, seen) for m, seen, kind in inner]
        self._around, self._forwards = before.around, before.forwards
        self._read, self._own, self._type = before.read, before.own, before.kind
        self._parameters = module._parameters
        self._plain_linear = structure.parts[0].kind is nn.Linear
        # Whether a Linear is in training mode makes no difference to anything.
        self.training = any(seen["training"] for m, seen, _ in inner if type(m) is not nn.Linear)
        self.hooks = [seen[kind] for _, seen, _ in inner for kind in HOOKS]
        self.backward_hooks = [seen[kind] for _, seen, _ in inner for kind in BACKWARD_HOOKS]
        if before.inner:
            self.hooks += GLOBAL_HOOKS
            self.backward_hooks += GLOBAL_BACKWARD_HOOKS

    def unchanged(self, module: nn.Module) -> bool:
        """Whether everything is as it was when examined, hooks apart."""
        if type(module) is not self._type or module._parameters is not self._parameters:
            return False
        if self._plain_linear:  # it has nothing inside, and computes from its parameters alone
            return nn.Linear.forward is self._forwards[0][1]
        try:
            # Values are compared by identity, and by equality only where that fails: 170 ns for a
            # dictionary of 20 entries.
            if self._read(module.__dict__) != self._own:
                return False
            for live, seen in self._around:
                if live != seen:
                    return False
            for m, kind, live, seen in self._inner:
                if type(m) is not kind or live != seen:
                    return False
        except Exception as error:  # an attribute is gone, or cannot be compared with what was
            if is_interrupt(error):
                raise
            return False
        for kind, forward in self._forwards:  # noqa: SIM110 (a generator costs 0.5 us)
            if kind.forward is not forward:
                return False
        return True

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
        self, module: nn.Module, forms: Sequence[LayerForm], tensors: Sequence[str], pack: Any
    ) -> list[nn.Module]:
        """Makes what the compiled forward reads: a module whose children are all plain Linears.

        Returns those that are not stand-ins themselves.
        """
        children: dict[str, nn.Module] = {}
        first = 0
        for form in forms:
            for _ in range(form.weights):
                weight, bias = first, first + 1 if form.bias else None
                first += 2 if form.bias else 1
                children[str(len(children))] = self._linear(module, tensors, weight, bias)
        spec = format_spec(forms)
        self.natural, self.packed = Stand(), Stand()
        for stand, own_pack in ((self.natural, None), (self.packed, pack)):
            stand.__dict__.update(
                _modules=children,
                _names=tuple(children),
                _spec=spec,
                _pack=own_pack,
                training=False,
                _holder=None,
            )
        return [m for m in children.values() if "in_features" in m.__dict__]

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
