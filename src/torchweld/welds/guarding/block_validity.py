"""Finds where a block is valid: in which calls its module computes the chain, and its facts.

In: a module and its recorded calls. Out: `Domain`s, which are data, and `Facts`, which hold the
objects that the module's code read.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace

from torch import nn

from torchweld.core.model_inputs import first_line
from torchweld.core.passing_exceptions import says_nothing
from torchweld.welds.found_blocks import Beside, Domain
from torchweld.welds.guarding.dependencies import facts_of
from torchweld.welds.guarding.dependency_facts import Facts, Observed
from torchweld.welds.guarding.executed_code import Executed, executed, stored_names
from torchweld.welds.guarding.valid_sizes import (
    ANY_DIMS,
    example_sizes,
    pattern_of,
    patterns_to_try,
    same_for_all_sizes,
)
from torchweld.welds.recognising.chain_recognition import Chain, as_chain
from torchweld.welds.refusal_reasons import Refused, defined_at
from torchweld.welds.tracing.call_recording import Signature, TensorSpec, forward_signature
from torchweld.welds.tracing.forward_trace import called, refusing, trace, traceable
from torchweld.welds.tracing.graph_reading import read


def kinds_of(signatures: Iterable[Signature]) -> dict[Hashable, Signature]:
    """One call of each kind; calls of one kind differ in sizes alone."""
    kinds: dict[Hashable, Signature] = {}
    for signature in signatures:
        arguments = tuple(
            (name, (spec.dtype, len(spec.shape), spec.requires_grad))
            if isinstance(spec, TensorSpec)
            else (name, spec)
            for name, spec in signature.arguments
        )
        kinds.setdefault((arguments, signature.grad, signature.training), signature)
    return kinds


# ---- facts: what the code reads ----


def facts_for(
    module: nn.Module,
    signatures: Iterable[Signature],
    *,
    live: Callable[[nn.Module], nn.Module] = lambda inner: inner,
    kind_of: Callable[[type], type] = lambda kind: kind,
) -> Facts:
    """The facts on which the module depends in these calls; Refused if they cannot be watched.

    The calls run on fake tensors. `module` may be a clone: `live` gives the live module for a
    module of the clone, and the facts are about live modules.
    """
    calls = list(dict.fromkeys(signatures))
    calls += [replace(one, training=False) for one in calls if one.training]
    kinds = list(kinds_of(calls).values())
    found = [_executed(module, signature) for signature in kinds]

    def facts() -> Facts:
        ran = [
            replace(one, first=live(one.first)) if isinstance(one.first, nn.Module) else one
            for some in found
            for one in some.ran
        ]
        names = frozenset(name for some in found for name in some.called)
        return facts_of(live(module), ran, names, kind_of)

    known = facts()
    if known.asks_sizes:  # other sizes may take other branches
        more = [one for one in _of_all_sizes(calls) if one not in kinds]
        if len(more) > MOST_SIZES:
            raise Refused(f"asks for sizes, and was called with more than {MOST_SIZES} of them")
        for signature in more:
            # A made-up size may fail to run. Then it is not proved valid either.
            with contextlib.nullcontext() if signature in calls else contextlib.suppress(Refused):
                found.append(_executed(module, signature))
        known = facts()
    _check_modes(module, known, kinds)
    _check_effects(module, kinds, known)
    return known


# Most sizes in the calls of a module that asks for sizes.
MOST_SIZES = 128


def _executed(module: nn.Module, signature: Signature) -> Executed:
    with traceable(module, signature) as (own, given, _), refusing():
        called(module, signature, own, given)  # things done once, such as an import, are done now
        before = [set(vars(tensor)) for tensor in (*own, *given)]
        found = executed(lambda: called(module, signature, own, given))
        stored = stored_names(lambda: called(module, signature, own, given), found.ran)
        after = [set(vars(tensor)) for tensor in (*own, *given)]
    if stored:
        raise Refused(f"sets {stored[0]}, which outlives the call", where=stored[1])
    if before != after:
        raise Refused("sets an attribute of a tensor", where=defined_at(module))
    return found


def _of_all_sizes(calls: Sequence[Signature]) -> list[Signature]:
    """Every call, and one call per pattern of ones that may be proved."""
    found = list(calls)
    for signature in kinds_of(calls).values():
        for name, spec in signature.arguments:
            if not isinstance(spec, TensorSpec) or not spec.shape:
                continue
            for pattern in patterns_to_try([spec.shape[:-1]]):
                made_up = resized(spec, (*example_sizes(pattern), spec.shape[-1]))
                arguments = tuple((n, made_up if n == name else s) for n, s in signature.arguments)
                found.append(replace(signature, arguments=arguments))
    return list(dict.fromkeys(found))


def resized(spec: TensorSpec, shape: tuple[int, ...]) -> TensorSpec:
    """The same spec with another shape, contiguous."""
    strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    return replace(spec, shape=shape, stride=strides, contiguous=True)


def _check_effects(module: nn.Module, signatures: Iterable[Signature], facts: Facts) -> None:
    """Raises Refused if a call changes what it depends on: a list, a counter."""
    before = Observed(facts)
    for signature in signatures:
        with traceable(module, signature) as (own, given, _), refusing():
            called(module, signature, own, given)
    if change := before.changed():
        raise Refused(f"changes {change} at every call", where=defined_at(module))


def _check_modes(module: nn.Module, facts: Facts, signatures: Iterable[Signature]) -> None:
    """Raises Refused if the code asks for the layout of arguments that were not contiguous."""
    if "layout" in facts.modes:
        specs = [s for one in signatures for _, s in one.arguments if isinstance(s, TensorSpec)]
        if not all(spec.contiguous for spec in specs):
            reason = "asks how its argument is laid out in memory, and it was not contiguous"
            raise Refused(reason, where=defined_at(module))


# ---- domains: which calls are valid ----


class Proofs:
    """Traces and proofs of the modules of a model, shared by modules that are built alike.

    Modules that are built alike have the same key: see `structure_key`.
    """

    def __init__(self) -> None:
        self._chains: dict[Hashable, Chain | Refused] = {}
        self._sizes: dict[Hashable, bool] = {}

    def read(self, module: nn.Module, signature: Signature, key: Hashable) -> Chain:
        """The chain of a call, traced once per `key`: build of the module, and kind of call."""
        if key not in self._chains:
            try:
                self._chains[key] = read_chain(module, signature)
            except Refused as refused:
                self._chains[key] = refused
        known = self._chains[key]
        if isinstance(known, Refused):
            raise known
        return known

    def domains(
        self,
        module: nn.Module,
        signatures: Sequence[Signature],
        chain: Chain,
        facts: Facts,
        key: Hashable,
    ) -> tuple[Domain, ...]:
        """The recorded calls, and calls of other sizes that provably compute the chain."""
        found: list[Domain] = []
        free = type(module) is nn.Linear or (chain.sizeless and not facts.asks_sizes)
        for group in _by_arguments(signatures, chain.argument).values():
            shapes = [_x_of(one, chain.argument).shape[:-1] for one in group]
            beside, nones = _beside(group[0], chain.argument), _nones(module, group[0])
            if free:
                found.append(Domain(ones=ANY_DIMS, beside=beside, nones=nones))
                continue
            seen = set(map(pattern_of, shapes))
            proved = [
                pattern
                for pattern in patterns_to_try(shapes)
                if self._any_size(module, group[0], chain, pattern, pattern in seen, key)
            ]
            found += [Domain(ones=pattern, beside=beside, nones=nones) for pattern in proved]
            # If sizes matter, exactly these sizes are valid, of all arguments given.
            exact: dict[tuple[str, tuple[Beside, ...]], list[tuple[int, ...]]] = {}
            for one, shape in zip(group, shapes, strict=True):
                pattern, given = pattern_of(shape), _beside(one, chain.argument, exact=True)
                if pattern not in proved:
                    exact.setdefault((pattern, given), []).append(shape)
            for (pattern, given), sizes in exact.items():
                known = tuple(dict.fromkeys(sizes))
                found.append(Domain(ones=pattern, shapes=known, beside=given, nones=nones))
        return tuple(dict.fromkeys(found))

    def _any_size(
        self,
        module: nn.Module,
        signature: Signature,
        chain: Chain,
        pattern: str,
        seen: bool,
        key: Hashable,
    ) -> bool:
        """Whether all calls with this pattern compute the chain; `seen`: one was recorded."""
        (kind,) = kinds_of([signature])
        about = (key, kind, pattern, _beside(signature, chain.argument))
        if about not in self._sizes:
            self._sizes[about] = (
                seen or self._computes(module, signature, chain, pattern, about)
            ) and same_for_all_sizes(module, signature, chain.argument, pattern, chain.out_features)
        return self._sizes[about]

    def _computes(
        self, module: nn.Module, signature: Signature, chain: Chain, pattern: str, about: Hashable
    ) -> bool:
        """Whether a made-up call with this pattern of ones computes the chain."""
        x = _x_of(signature, chain.argument)
        made_up = resized(x, (*example_sizes(pattern), x.shape[-1]))
        arguments = tuple(
            (name, made_up if name == chain.argument else spec)
            for name, spec in signature.arguments
        )
        try:
            found = self.read(module, replace(signature, arguments=arguments), about)
        except Refused:
            return False
        return replace(found, dropout=()) == replace(chain, dropout=())


def read_chain(module: nn.Module, signature: Signature) -> Chain:
    """The chain that one call computes, by its graph."""
    traced = trace(module, signature)
    try:
        chain = replace(as_chain(read(traced)), sizeless=traced.sizeless)
        if traced.changes:
            reason = f"sets its {traced.changes[0]} at every call"
            raise Refused(reason, where=defined_at(module))
        return chain
    except Refused as refused:
        refused.multiplies = traced.multiplies
        raise
    except Exception as error:  # a graph the reader was not written for
        if says_nothing(error):
            raise
        odd = Refused(f"its graph cannot be read: {first_line(error)}", "", defined_at(module))
        odd.multiplies = traced.multiplies
        raise odd from error


def _x_of(signature: Signature, argument: str) -> TensorSpec:
    spec = dict(signature.arguments)[argument]
    assert isinstance(spec, TensorSpec)
    return spec


def _by_arguments(
    signatures: Sequence[Signature], argument: str
) -> dict[Hashable, list[Signature]]:
    """Calls grouped by the kinds of their arguments and by their modes."""
    found: dict[Hashable, list[Signature]] = {}
    for one in signatures:
        dims = len(_x_of(one, argument).shape)
        given = frozenset(name for name, _ in one.arguments)
        key = (dims, given, _beside(one, argument), one.grad, one.training)
        found.setdefault(key, []).append(one)
    return found


def _beside(signature: Signature, argument: str, *, exact: bool = False) -> tuple[Beside, ...]:
    return tuple(
        Beside(
            name=name,
            dtype=str(spec.dtype).removeprefix("torch."),
            ones=pattern_of(spec.shape),
            shape=spec.shape if exact else (),
        )
        for name, spec in signature.arguments
        if isinstance(spec, TensorSpec) and name != argument
    )


def _nones(module: nn.Module, signature: Signature) -> tuple[str, ...]:
    """Arguments given as None whose default is not None."""
    own = forward_signature(module)
    parameters = {} if own is None else own.parameters
    return tuple(
        name
        for name, spec in signature.arguments
        if spec is None and name in parameters and parameters[name].default is not None
    )
