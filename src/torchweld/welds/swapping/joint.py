"""What a welded module keeps, and how it decides about a call.

A call is served by the fused op if the decision covers it and the module is built as it was; else
the caller runs the original code. There are two kinds of reasons for that. *Conditions* belong to
the call (gradients, autocast, other rows): they are counted, and told by `telling`. *Changes* are
what the user has done to the module (a child replaced, a hook inside): each is said in a warning.
"""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from torchweld import ops
from torchweld.core.blocks import LayerForm, format_spec, parse_spec, with_dropout
from torchweld.core.errors import BuildError, RefusedError, TorchweldError
from torchweld.core.interrupt_safety import Apart
from torchweld.core.safe_text import clean
from torchweld.numerics.dropped_values import drawing_from, random_state
from torchweld.ops import compiled_forward
from torchweld.ops.backends import backend_named
from torchweld.ops.backends.backend import Form, Runner
from torchweld.ops.packing import new_pack
from torchweld.welds.guarding.call_arguments import Arguments, Picked, Validity
from torchweld.welds.guarding.call_modes import Modes
from torchweld.welds.guarding.guard import Guard
from torchweld.welds.guarding.welded_structure import Structure, release, steps_of
from torchweld.welds.swapping.gathering import Membership
from torchweld.welds.swapping.guard_making import read_again
from torchweld.welds.swapping.original_code import Telling, WeldedModel
from torchweld.welds.swapping.safety_net import Checking, disagreement
from torchweld.welds.swapping.tensor_binding import Bound, Stand, StandKind, place_of
from torchweld.welds.swapping.training_calls import drops_as_known
from torchweld.welds.weld_decisions import Choice, Decision

OFF = os.environ.get("TORCHWELD") == "0"  # for the whole process, read once


_PLAIN = (Tensor, nn.Parameter)
_MOST_SIZES = 4096  # most shapes of x remembered per module


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _nobody_knows() -> bool:
    """Default of `holds_now`: a copied or loaded module has no guard before its first call."""
    return False


class _Call(NamedTuple):
    """A call that has passed all checks so far."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    x: Tensor
    tensors: list[Tensor]
    bound: Bound
    training: bool
    gradients: bool
    alone: bool  # x is all that was given


class Joint:
    """The state of one welded module. Copies and pickles start without packed weights."""

    def __init__(
        self,
        decision: Decision,
        structure: Structure,
        device: str,
        model: WeldedModel | None = None,  # what was saved by torchweld 0.1 has none
    ) -> None:
        block = decision.block
        self.model = WeldedModel("the model") if model is None else model
        self.telling = Telling(decision, self.model)
        self.decision = decision
        self.membership = Membership(decision, self.model)
        self.backends = {c.backend: backend_named(c.backend) for c in decision.choices}
        self.structure = structure
        self.device = device  # the device type that x must be on
        self.dtype: torch.dtype = getattr(torch, block.dtype)
        self.forms = parse_spec(block.form)
        self.spec = format_spec(self.forms)
        self.trains = decision.training and drops_as_known(decision, structure)
        dropped = block.dropout if self.trains and any(block.dropout) else ()
        self.forms_in_training = with_dropout(self.forms, dropped)
        self.training_spec = format_spec(self.forms_in_training)
        self.drops_out = self.training_spec != self.spec
        forward = structure.parts[0].forward
        self.arguments = Arguments.of(forward, block.argument, block.ignores)
        self.valid = Validity(block)
        # Set by welding. A copy, or what was loaded, has none: it is read again when it is called.
        self.guard: Guard | None = None
        self._unreadable: str | None = None  # why there can be no guard
        self.modes = Modes(decision)
        # How a compiler finds the tensors: steps to their module, and their name there.
        parts = [path.rpartition(".") for path in block.tensors]
        self.tensor_steps = tuple((steps_of(inner), name) for inner, _, name in parts)
        self.infers = not decision.training
        self.pack = new_pack()
        # What a graph holds in place of the pack, if there is to be a packed copy.
        packed = any(c.packed and c.abilities.c_forward for c in decision.choices)
        self.kept: Tensor | None = self.pack.number if packed and self.pack is not None else None
        self.bound: Bound | None = None
        self.watch: Any = None  # the guard in C, for the quick way
        self.counts: dict[str, int] = {}
        self.said: list[str] = []
        self.checking: Checking | None = None
        self.checked = 0
        self._runner: tuple[Choice, list[Tensor], Runner] | None = None
        self._paused = 0
        self._lock = threading.Lock()
        self.asks_modes = False  # whether the block's code asks about modes of the call
        self.holds_now = _nobody_knows  # whether the guard holds, for a compiler to ask once
        self._settle()

    def watch_over(self, module: nn.Module, guard: Guard) -> None:
        """Lets the guard decide, from now on, whether the module is what the decision is about."""
        self.guard, self.asks_modes = guard, bool(guard.facts.modes)
        places = [place_of(module, path) for path in self.decision.block.tensors]
        tensors = [place.holder[place.name] for place in places if place is not None]
        self.modes.remember([tensor for tensor in tensors if tensor is not None])
        ref = weakref.ref(module)

        def holds_now() -> bool:
            found = ref()
            if found is None or guard.changed(found) is not None:
                return False
            return guard.hooked(found, gradients=True) is None

        self.holds_now = torch.compiler.assume_constant_result(holds_now)  # type: ignore[no-untyped-call]

    def __reduce__(self) -> tuple[Any, ...]:
        return Joint, (self.decision, self.structure, self.device, self.model)

    # ---- switching off and on ----

    def _settle(self) -> None:
        self.active = not OFF and self._paused == 0
        # Whether a graph may hold the op; a graph serves any number of rows.
        self.recordable = (
            self.active
            and self.decision.in_graphs
            and not any(backend.unavailable() for backend in self.backends.values())
        )
        self.bound = self.watch = None  # the quick way leads through them

    def pause(self) -> None:
        with self._lock:
            self._paused += 1
            self._settle()

    def resume(self) -> None:
        with self._lock:
            self._paused -= 1
            self._settle()

    def check(self, checking: Checking | None) -> None:
        self.checking, self.bound, self.watch = checking, None, None

    def drop_copies(self) -> None:
        """Gives the memory of packed weights back; a later call makes them anew."""
        self.bound = self.watch = self._runner = None
        if self.pack is not None:
            self.pack.clear()

    @property
    def copied_bytes(self) -> int:
        packed = 0 if self.pack is None else int(self.pack.nbytes)
        return packed + (0 if self._runner is None else self._runner[2].copied_bytes)

    # ---- a call ----

    def serve(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The op's result for this call, or None if the original has to run.

        Raises RefusedError where the op would not have the call: the original may, or has a better
        message.
        """
        if not self.active:
            return self.count("disabled")
        if torch._C._len_torch_function_stack() > 0:  # a mode would see us touch x
            return self.count("a torch function mode")
        picked = self.arguments.pick(args, kwargs)
        if picked is None:
            return self.count("other arguments", args[0] if args else None)
        condition = self._condition_of(picked)
        if condition is not None:
            return self.count(condition, picked.x)
        x, training = picked.x, module.training
        guard = self.guard or self._read(module)
        if guard is None:
            return self.say(self._unreadable or "it cannot be read")
        bound = self.bound
        if bound is None or not bound.fits(module, self.decision.block.tensors):
            bound = self._bind(module)
        tensors = bound.tensors()
        if bound.problem is not None or tensors is None:
            problem = bound.problem or "its tensors are changing"
            return self._let_go(guard.changed(module) or problem)

        gradients = torch.is_grad_enabled() and bound.wants_gradients(x)
        if training and not self.trains:
            return self.count("training mode")
        if gradients and self.infers:
            return self.count("gradients")
        if not guard.holds(module, training, gradients):
            return self._changed(module, guard, training, gradients)
        if any(bound.hooks) or (gradients and any(bound.backward_hooks)):
            return self.count("global hooks")
        given = [x, *picked.beside.values()]
        mode = self.modes.why_not(guard.facts.modes, given, tensors)
        if mode is not None:
            return self.count(mode)
        self.watch = guard.watch
        alone = not picked.beside and not picked.nones
        return self._run(_Call(module, args, kwargs, x, tensors, bound, training, gradients, alone))

    def _read(self, module: nn.Module) -> Guard | None:
        """The guard of a module that came without one."""
        with self._lock:
            if self.guard is None and self._unreadable is None:
                with Apart() as apart:
                    found = apart(read_again, module, self.decision.block)
                if isinstance(found, str):
                    self._unreadable = found
                else:
                    guard, now = found
                    self.valid = Validity(now)
                    self.watch_over(module, guard)
            return self.guard

    def _condition_of(self, picked: Picked) -> str | None:
        x = picked.x
        if type(x) not in _PLAIN:
            return "a tensor subclass" if isinstance(x, Tensor) else "other arguments"
        if x.dtype is not self.dtype:
            return "another dtype"
        device = x.device.type
        if device != self.device:
            return "another device"
        if torch.is_autocast_enabled(device):
            return "autocast"
        if x.__dict__:  # which the module may ask for
            return "attributes of x"
        if x.dim() == 0 or x.shape[-1] != self.decision.block.in_features:
            return "another shape"
        return self.valid.why_not(picked)

    def _bind(self, module: nn.Module) -> Bound:
        bound = Bound(
            module,
            self.forms,
            self.decision.block.tensors,
            in_training=self.forms_in_training,
            pack=self.pack,
        )
        self.bound = bound
        if not self.active:  # switched off in another thread meanwhile
            self.bound = None
        return bound

    def _run(self, call: _Call) -> Tensor | None:
        block, bound, x = self.decision.block, call.bound, call.x
        rows = x.numel() // block.in_features
        choice = self.decision.choice(rows)
        if choice is None:
            member = self.membership.member(call.module, bound, rows, None)
            self._remember(call, False if member is None else member)
            self.count("rows" if member is None else "called apart from its group", x)
            return None
        if choice.packed and (call.training or call.gradients):  # the weights are about to change
            choice = Choice(backend=choice.backend)
        in_c = self.backends[choice.backend].abilities.c_forward
        drawn = self._random_state(call)
        try:
            y = self._compiled(call, choice) if in_c else self._ran(call, choice)
        except RefusedError:
            raise
        except TorchweldError as error:  # raised by a backend; errors of other code pass through
            raise RefusedError(str(error).partition("\n")[0]) from error
        if y is None:
            self.count("a tensor subclass")
            return None
        self.telling.served()
        if block.scale != 1.0:
            y = y * block.scale if call.gradients else y.mul_(block.scale)
        checking = self.checking
        if checking is not None:
            if checking.wanted() and not self._agrees(call, choice, y, drawn):
                return None
            if checking.over:
                self.check(None)
        else:
            stand: Stand | None = None
            if in_c and bound.direct and block.scale == 1.0:
                stand = bound.stands.get(StandKind.of(choice, call.training))
            member = self.membership.member(call.module, bound, rows, stand)
            if member is not None or stand is not None:
                self._remember(call, stand if member is None else member)
        return y

    def _remember(self, call: _Call, stand: Stand | Any | Literal[False]) -> None:
        """Keeps the stand for the quick way, which serves inference in eval mode alone."""
        quick = call.alone and self.arguments.wanted_first
        quick = quick and not (call.training or call.gradients)
        asked = self.guard is None or self.guard.facts.modes
        if quick and not asked and self.checking is None and len(call.bound.fast) < _MOST_SIZES:
            call.bound.fast[tuple(call.x.shape)] = stand

    def _compiled(self, call: _Call, choice: Choice) -> Tensor | None:
        """None where the compiled forward saw something that is not as expected."""
        bound = call.bound
        stand = bound.stands.get(StandKind.of(choice, call.training))
        if stand is None:
            raise BuildError(f"torchweld's kernels are missing: {ops.problem}")
        bound.refresh()
        if choice.packed and torch.is_grad_enabled():
            with torch.no_grad():  # no gradient is needed here, so a packed copy is safe
                return compiled_forward(stand, call.x)
        return compiled_forward(stand, call.x)

    def _ran(self, call: _Call, choice: Choice) -> Tensor:
        kept = self._runner
        if (
            kept is None
            or kept[0] != choice
            or any(a is not b for a, b in zip(kept[1], call.tensors, strict=True))
        ):
            kept = self._runner = (
                choice,
                call.tensors,
                self._build(choice, self.forms, call.tensors),
            )
        y = kept[2](call.x)
        assert isinstance(y, Tensor)
        return y

    def _build(
        self, choice: Choice, forms: Sequence[LayerForm], tensors: Sequence[Tensor]
    ) -> Runner:
        block = Form.of("chain", forms, tensors)
        return self.backends[choice.backend].build(block, tensors, choice.mode)

    def _random_state(self, call: _Call) -> Tensor | None:
        """What the call draws its dropout from, if it is to be compared; else None."""
        if self.checking is None or not (call.training and self.drops_out):
            return None
        return random_state(call.x.device)

    def _agrees(self, call: _Call, choice: Choice, y: Tensor, drawn: Tensor | None) -> bool:
        """Compares with the original; a block that disagrees is welded no longer."""
        base = self.structure.parts[0].kind
        forms = self.forms if drawn is None else self.forms_in_training
        with torch.no_grad():
            with drawing_from(drawn, call.x.device):
                original = base.forward(call.module, *call.args, **call.kwargs)  # type: ignore[attr-defined]
            wrong = disagreement(
                y.detach(),
                original,
                call.x.detach(),
                [t.detach() for t in call.tensors],
                forms,
                scale=self.decision.block.scale,
                gradients_of=partial(self._build, choice, forms) if call.gradients else None,
                drawn=drawn,
            )
        self.checked += 1
        if wrong is None:
            return True
        release(call.module)
        self.drop_copies()
        warnings.warn(
            f"torchweld: {self.name} is welded no longer, since a call disagreed with the "
            f"original: {wrong}",
            stacklevel=2,
        )
        return False

    # ---- reasons ----

    @property
    def name(self) -> str:
        block = self.decision.block
        return clean(block.path or f"the {block.kind}")

    def count(self, condition: str, x: object = None) -> None:
        """Counts without a lock, for speed; two calls at the same moment may count as one."""
        self.counts[condition] = self.counts.get(condition, 0) + 1
        if condition not in self.telling.done:
            if self.membership.calls:  # its group ran its calls in C, where nothing is counted here
                self.telling.served()
            weights = None if self.bound is None else self.bound.tensors()
            self.telling.hear(condition, x, weights or ())

    def say(self, change: str) -> None:
        """Counts, and warns the first time."""
        self.counts[change] = self.counts.get(change, 0) + 1
        with self._lock:
            if change in self.said:
                return
            self.said.append(change)
        warnings.warn(
            f"torchweld: {self.name} runs its original code, because {change}", stacklevel=2
        )

    def _changed(self, module: nn.Module, guard: Guard, training: bool, gradients: bool) -> None:
        """The guard does not hold: says what has changed."""
        change = guard.changed(module) or guard.hooked(module, gradients)
        if change is not None:
            return self._let_go(change)
        return self.count("training mode" if guard.switched(module, training) else "a change")

    def _let_go(self, change: str) -> None:
        """Warns about the change and drops what was cached for the module."""
        self.bound = self.watch = None
        if self.guard is not None:
            self.guard.let_go()
        return self.say(change)
