"""Decides whether one module is a chain: by cheap checks, then its graph, then its numbers.

In: the `RecordedCalls` of a model. Out: `Candidates.examine(module)` gives a `Chain`, a `Refused`
with the reason, or None if the module was not called or is too large to be a chain. Modules that
are built alike are traced once; the numbers are confirmed for each.
"""

from __future__ import annotations

import inspect
from collections.abc import Hashable
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from torchweld.welds.finding.hard_input_probe import difference_in_kind
from torchweld.welds.finding.numeric_confirmation import disagreement
from torchweld.welds.finding.structure_key import structure_key
from torchweld.welds.found_blocks import Domain
from torchweld.welds.guarding.block_validity import Proofs, facts_for, kinds_of
from torchweld.welds.guarding.bytecode_names import names_of
from torchweld.welds.guarding.dependency_facts import Facts
from torchweld.welds.recognising.chain_recognition import Chain
from torchweld.welds.refusal_reasons import Refused, defined_at
from torchweld.welds.tracing.call_recording import (
    Nested,
    Opaque,
    RecordedCalls,
    SeenModule,
    TensorSpec,
    closed_reason,
    forward_signature,
)

# A module with more weights is not an MLP. Tracing one layer takes some milliseconds.
MOST_WEIGHTS = 32

_HIGHER_ORDER = frozenset(["cond", "while_loop", "scan", "associative_scan", "flex_attention"])
_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)


class Candidates:
    def __init__(self, recording: RecordedCalls, confirm: bool) -> None:
        self._seen = recording.seen
        self._confirm = confirm
        self._known: dict[nn.Module, Chain | Refused | None] = {}
        self._proofs = Proofs()
        self._in_kind: dict[Hashable, str] = {}
        self._facts: dict[nn.Module, Facts] = {}

    def examine(self, module: nn.Module) -> Chain | Refused | None:
        """The chain of a module, confirmed by numbers and with its facts; or why there is none."""
        found = self._examined(module)
        if not isinstance(found, Chain):
            return found
        calls = self._seen[module].filled
        for signature in calls if self._confirm else ():
            reason = disagreement(module, found, signature)
            if reason or (reason := self._kind(module, found)):
                return Refused(reason, where=defined_at(module))
        try:
            self._facts[module] = facts_for(module, calls)
        except Refused as refused:
            return refused
        return found

    def _kind(self, module: nn.Module, chain: Chain) -> str:
        """How the module differs in kind from the chain; checked once for modules built alike."""
        if type(module) is nn.Linear:  # it would be compared with itself, and a head is large
            return ""
        key = structure_key(module)
        for kind, signature in kinds_of(self._seen[module].filled).items():
            if (key, kind) not in self._in_kind:
                self._in_kind[key, kind] = difference_in_kind(module, chain, signature)
            if reason := self._in_kind[key, kind]:
                return reason
        return ""

    def valid(self, module: nn.Module, chain: Chain) -> tuple[Domain, ...]:
        """The calls in which the module is this chain."""
        calls, facts = list(self._seen[module].filled), self._facts[module]
        return self._proofs.domains(module, calls, chain, facts, structure_key(module))

    def depends_on(self, module: nn.Module) -> tuple[str, ...]:
        return self._facts[module].words

    def owns_weights(self, module: nn.Module, refused: Refused) -> bool:
        """Whether the module multiplies, or may multiply, by weights that it holds itself."""
        own = [p for p in module._parameters.values() if p is not None]
        shaped = any(p.dim() == 2 or _is_stack(p) for p in own)
        if "parametrizations" in module._modules or any(map(_is_quantised, _own_tensors(module))):
            return True
        return shaped and refused.multiplies is not False

    def _examined(self, module: nn.Module) -> Chain | Refused | None:
        """The chain of a module by its graph alone, without numbers and facts."""
        if module not in self._known:
            self._known[module] = self._looked_at(module)
        return self._known[module]

    def _looked_at(self, module: nn.Module) -> Chain | Refused | None:
        seen = self._seen.get(module)
        if seen is None or not any(_own_tensors(inner) for inner in module.modules()):
            return None
        if module._modules and not 1 <= _weights(module) <= MOST_WEIGHTS:
            return None
        try:
            check_state(module)
            self._check_parts(module)
            check_signatures(module, seen)
            chain = self._chain(module, seen)
            check_outputs(module, seen)
            return chain
        except Refused as refused:
            return _about_experts(module, refused)

    def _check_parts(self, module: nn.Module) -> None:
        """Raises Refused if a part, a module with tensors and no children, is not a Linear."""
        parts = [
            (self._seen[inner].order, name, inner)
            for name, inner in module.named_modules()
            if inner is not module and inner in self._seen and not inner._modules
        ]
        parts = sorted(part for part in parts if _own_tensors(part[2]))
        linears = [order for order, _, inner in parts if _weights(inner)]
        # Parts that cannot be Linears come first: often a norm decides at once.
        for order, name, inner in sorted(parts, key=lambda part: bool(_weights(part[2]))):
            outcome = self._examined(inner)
            if isinstance(outcome, Refused):
                reason = f"{name}: {outcome.reason}"
                if outcome.op:
                    reason = f"{outcome.reason}{_place(order, linears)} ({name})"
                raise _without_product(Refused(reason, outcome.op, self._seen[inner].where))

    # ---- the graph ----

    def _chain(self, module: nn.Module, seen: SeenModule) -> Chain:
        """The chain that all recorded kinds of calls agree on."""
        found: Chain | None = None
        key = structure_key(module)
        for kind, signature in kinds_of(seen.filled).items():
            chain = self._proofs.read(module, signature, (key, kind))
            evaluated = chain
            if signature.training:
                at_rest = replace(signature, training=False)
                evaluated = self._proofs.read(module, at_rest, (key, kind, "eval"))
            check_evaluation(chain, evaluated, defined_at(module))
            if found is None:
                found = chain
            elif replace(chain, dropout=found.dropout) != found:
                raise Refused("computes different things in different calls", "", seen.where)
            elif chain.dropout != found.dropout:
                if chain.dropout and found.dropout:
                    raise Refused("drops out with different probabilities", "", seen.where)
                found = chain if chain.dropout else found
        assert found is not None
        return found


def check_evaluation(chain: Chain, evaluated: Chain, where: str = "") -> None:
    """Raises Refused unless only dropout tells evaluation from training: a weld serves both."""
    if any(evaluated.dropout):
        raise Refused("drops out in evaluation too", "aten.dropout", where)
    if evaluated != replace(chain, dropout=()):
        raise Refused("computes different things in evaluation and in training", where=where)


def _about_experts(module: nn.Module, refused: Refused) -> Refused:
    names = [n for n, p in module._parameters.items() if p is not None and _is_stack(p)]
    if not names or refused.multiplies is False:
        return refused
    reason = f"weights of 3 dimensions ({', '.join(names)}): {refused.reason}"
    about = Refused(reason, refused.op, refused.where)
    about.multiplies = refused.multiplies
    return about


def _is_stack(tensor: Tensor) -> bool:
    """Whether it may hold one weight per expert."""
    return tensor.dim() == 3 and 1 not in tensor.shape


def _place(order: int, linears: list[int]) -> str:
    if not linears:
        return ""
    if order < min(linears):
        return " before the first Linear"
    return " after the last Linear" if order > max(linears) else " between the Linears"


# ---- checks that need no graph ----


def _own_tensors(module: nn.Module) -> list[Tensor]:
    tensors = [*module._parameters.values(), *module._buffers.values()]
    return [tensor for tensor in tensors if tensor is not None]


def _is_quantised(tensor: Tensor) -> bool:
    return tensor.is_quantized or (
        tensor.dim() == 2 and not tensor.is_floating_point() and tensor.dtype.itemsize == 1
    )


def _weights(module: nn.Module) -> int:
    """The number of the module's tensors that may be weights."""
    tensors = [*module.parameters(), *module.buffers()]
    return sum(t.dim() in (2, 3) and (t.is_floating_point() or _is_quantised(t)) for t in tensors)


def _without_product(refused: Refused) -> Refused:
    refused.multiplies = False
    return refused


def check_state(module: nn.Module) -> None:
    """Raises Refused if more runs than the modules' own code on plain parameters."""
    for name, inner in module.named_modules():
        what = name or "it"
        if closed := closed_reason(inner):
            raise Refused(f"{what} {closed}")
        if "forward" in inner.__dict__:
            raise Refused(f"{what} has a forward of its own, set on the instance")
        code = getattr(inspect.unwrap(type(inner).forward), "__code__", None)
        if code is not None and (names := _HIGHER_ORDER & names_of(code).read):
            # torch compiles their arguments, and a trace on fake tensors would break that for good.
            raise Refused(f"{what} may run torch.{min(names)}", where=defined_at(inner))
        if "parametrizations" in inner._modules:
            raise Refused(f"{what} is parametrised ({', '.join(inner.parametrizations)})")
        for hooks in _HOOKS if name else ():  # hooks of the module itself run around its forward
            if len(getattr(inner, hooks)) > 0:
                raise Refused(f"{what} has {hooks.strip('_').replace('_', ' ')}")
        for key, tensor in [*inner._parameters.items(), *inner._buffers.items()]:
            if tensor is None:
                continue
            if _is_quantised(tensor):
                kind = str(tensor.dtype).removeprefix("torch.")
                raise Refused(f"{what} is quantised ({key} is {kind})")
            if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer):
                raise Refused(f"{what} has a {type(tensor).__name__} as its {key}")


def check_signatures(module: nn.Module, seen: SeenModule) -> None:
    """Raises Refused if calls had arguments or results that a chain cannot have."""
    where = defined_at(module)
    if seen.unreadable:
        raise Refused(seen.unreadable, "", where)
    calls = seen.filled
    if not calls:
        raise Refused("no call with at least one row was completed", "", seen.where)
    names = {tuple(n for n, spec in call.arguments if _is_tensor(spec)) for call in calls}
    if len(names) > 1:
        raise Refused("is called with different arguments at different times", "", seen.where)
    for signature in calls:
        given = dict(signature.arguments)
        floats = {n: s for n, s in given.items() if _is_tensor(s) and s.dtype.is_floating_point}
        if not any(spec.shape for spec in floats.values()):
            raise _without_product(Refused("takes no floating-point tensor", "", where))
        _check_values(module, given, where)
        if signature.twice:
            raise Refused("was given one tensor as two arguments", "", seen.where)
        if signature.autocast:
            raise Refused("was called under autocast, which casts weights at every call")
    if module._modules:  # otherwise the graph is cheap to read, and gives a better reason
        check_outputs(module, seen)


def check_outputs(module: nn.Module, seen: SeenModule) -> None:
    """Raises Refused if a call did not return one tensor with the rows of an argument."""
    where = defined_at(module)
    for signature in seen.filled:
        output = signature.output
        specs = [spec for _, spec in signature.arguments if _is_tensor(spec)]
        floats = [spec for spec in specs if spec.shape and spec.dtype.is_floating_point]
        if not isinstance(output, TensorSpec):
            raise Refused(f"returns {_called(output)} instead of a tensor", "", where)
        if not any(spec.shape[:-1] == output.shape[:-1] for spec in floats):
            shapes = ", ".join(str(list(spec.shape)) for spec in floats)
            raise Refused(
                f"its output {list(output.shape)} is not its input {shapes} with another last "
                "dimension",
                "",
                where,
            )


def _check_values(module: nn.Module, given: dict[str, Any], where: str) -> None:
    """Raises Refused if an argument is not a tensor, None or the default of forward."""
    signature = forward_signature(module)
    parameters = {} if signature is None else signature.parameters
    for name, spec in given.items():
        if isinstance(spec, (Nested, Opaque)):
            raise Refused(f"takes {spec} as its {name}", "", where)
        if _is_tensor(spec) or spec is None:
            continue
        default = parameters[name].default if name in parameters else inspect.Parameter.empty
        if type(default) is not type(spec) or default != spec:
            raise Refused(f"takes {spec!r} as its {name}", "", where)


def _is_tensor(spec: Any) -> bool:
    return isinstance(spec, TensorSpec)


def _called(spec: Any) -> str:
    return str(spec) if isinstance(spec, (Nested, Opaque)) else repr(spec)
