"""Where a block is valid: for which calls its module computes the chain, and on what it depends.

In: a module and the calls that were recorded of it. Out: `Domain`s, which are data, and `Facts`,
which hold the very objects that were read.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace

from torch import nn

from torchweld.discovery.depending import facts_of
from torchweld.discovery.executing import Ran, executed
from torchweld.discovery.facts import Facts
from torchweld.discovery.found import Beside, Domain
from torchweld.discovery.reasons import Refused, defined_at
from torchweld.discovery.recording import Signature, TensorSpec, forward_signature
from torchweld.discovery.sizes import pattern_of, patterns_to_try, same_for_all_sizes
from torchweld.discovery.tracing import called, refusing, traceable


def kinds_of(signatures: Iterable[Signature]) -> dict[Hashable, Signature]:
    """Calls that may differ in more than sizes: one of each kind."""
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


# ---- what the code reads ----


def facts_for(
    module: nn.Module,
    signatures: Iterable[Signature],
    *,
    live: Callable[[nn.Module], nn.Module] = lambda inner: inner,
    kind_of: Callable[[type], type] = lambda kind: kind,
) -> Facts:
    """What the module depends on in such calls; Refused if that cannot be watched.

    The calls run on fake tensors. `module` may be a copy: `live` gives the module that one of the
    copy stands for, and the facts are about those.
    """
    ran: list[Ran] = []
    kinds = kinds_of(signatures)
    for signature in kinds.values():
        with traceable(module, signature) as (own, given, _), refusing():
            found = executed(lambda: called(module, signature, own, given))  # noqa: B023
        ran += found
    ran = [
        replace(one, first=live(one.first)) if isinstance(one.first, nn.Module) else one
        for one in ran
    ]
    facts = facts_of(live(module), ran, kind_of)
    _check_modes(module, facts, kinds.values())
    return facts


def _check_modes(module: nn.Module, facts: Facts, signatures: Iterable[Signature]) -> None:
    """Refused if the code asks what differed between the calls."""
    if "layout" in facts.modes:
        specs = [s for one in signatures for _, s in one.arguments if isinstance(s, TensorSpec)]
        if not all(spec.contiguous for spec in specs):
            reason = "asks how its argument lies in memory, and that was not contiguous"
            raise Refused(reason, where=defined_at(module))


# ---- which calls ----


def domains_for(
    module: nn.Module,
    signatures: Sequence[Signature],
    argument: str,
    out_features: int,
    known: dict[Hashable, bool],
    key: Hashable,
) -> tuple[Domain, ...]:
    """The calls that were seen, and those of other sizes that provably compute the same.

    `known` remembers what was proved of modules that are built alike, which have the same `key`.
    """
    domains: dict[Domain, None] = {}
    for group in _by_arguments(signatures, argument).values():
        shapes = [_x_of(signature, argument).shape[:-1] for signature in group]
        first = group[0]
        beside, nones = _beside(first, argument), _nones(module, first)
        proved = set()
        for pattern in patterns_to_try(shapes):
            about = (key, kinds_of([first]).popitem()[0], pattern, beside)
            if about not in known:
                known[about] = type(module) is nn.Linear or same_for_all_sizes(
                    module, first, argument, pattern, out_features
                )
            if known[about]:
                proved.add(pattern)
                domains[Domain(ones=pattern, beside=beside, nones=nones)] = None
        for shape in shapes:
            pattern = pattern_of(shape)
            if pattern not in proved:
                old = next((d for d in domains if d.ones == pattern and d.beside == beside), None)
                seen = (*(old.shapes if old else ()), shape)
                domains.pop(old, None) if old else None
                exact = Domain(ones=pattern, shapes=seen, beside=beside, nones=nones)
                domains[exact] = None
    return tuple(domains)


def _x_of(signature: Signature, argument: str) -> TensorSpec:
    spec = dict(signature.arguments)[argument]
    assert isinstance(spec, TensorSpec)
    return spec


def _by_arguments(
    signatures: Sequence[Signature], argument: str
) -> dict[Hashable, list[Signature]]:
    """Calls that gave the same kinds of arguments, in the same modes."""
    found: dict[Hashable, list[Signature]] = {}
    for one in signatures:
        dims = len(_x_of(one, argument).shape)
        given = frozenset(name for name, _ in one.arguments)
        key = (dims, given, _beside(one, argument), one.grad, one.training)
        found.setdefault(key, []).append(one)
    return found


def _beside(signature: Signature, argument: str) -> tuple[Beside, ...]:
    return tuple(
        Beside(
            name=name,
            dtype=str(spec.dtype).removeprefix("torch."),
            ones=pattern_of(spec.shape),
        )
        for name, spec in signature.arguments
        if isinstance(spec, TensorSpec) and name != argument
    )


def _nones(module: nn.Module, signature: Signature) -> tuple[str, ...]:
    """Arguments that were given as None and would have been something else."""
    own = forward_signature(module)
    parameters = {} if own is None else own.parameters
    return tuple(
        name
        for name, spec in signature.arguments
        if spec is None
        and name in parameters
        and parameters[name].default not in (None, inspect.Parameter.empty)
    )
