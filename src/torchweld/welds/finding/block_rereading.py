"""Reads a known block again from a model: for plans, copies and pickles.

In: a model and a block. Out: `Rereader(model).read(block)` gives the block as the model computes it
now, or a `Refusal`. Only the graph decides: a clone is traced, and nothing else runs. Only the path
and the calls of the given block are trusted.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import nn

from torchweld.core.errors import CannotCloneError
from torchweld.welds.cloning.model_clone import structural_clone
from torchweld.welds.finding.block_candidates import check_evaluation, check_state
from torchweld.welds.finding.structure_key import structure_key
from torchweld.welds.found_blocks import Beside, Block, Call, DType, Refusal
from torchweld.welds.guarding.block_validity import Proofs, facts_for, kinds_of
from torchweld.welds.guarding.valid_sizes import ANY_DIMS
from torchweld.welds.recognising.chain_recognition import Chain
from torchweld.welds.refusal_reasons import Refused
from torchweld.welds.tracing.call_recording import MOST_KINDS, Signature, TensorSpec
from torchweld.welds.tracing.forward_trace import own_tensors

# More rows are not traced, so that a file cannot decide how much memory a trace takes.
MOST_ROWS_READ = 1 << 16


class Rereader:
    """Reads blocks of one model; modules that are built alike are traced once."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._proofs = Proofs()

    def read(self, block: Block) -> Block | Refusal:
        try:
            live = self._model.get_submodule(block.path)
        except AttributeError:
            return Refusal(path=block.path, kind="", reason="there is no such module")
        try:
            with torch.inference_mode(False):
                return self._read(structural_clone(live).model, block)
        except Refused as refused:
            reason, op, where = refused.reason, refused.op, refused.where
        except CannotCloneError as error:
            reason, op, where = str(error), "", ""
        return Refusal(path=block.path, kind=type(live).__name__, reason=reason, op=op, where=where)

    def _read(self, module: nn.Module, block: Block) -> Block:
        check_state(module)
        tensors = own_tensors(module)
        missing = [name for name in block.tensors if name not in tensors]
        if missing:
            raise Refused(f"it has no {missing[0]} any more")
        signatures, key = signatures_of(block, module), structure_key(module)
        chain = self._chain(module, signatures, key)
        facts = facts_for(module, signatures)
        valid = self._proofs.domains(module, signatures, chain, facts, key)
        return replace(
            block,
            kind=type(module).__name__,
            form=chain.form,
            tensors=chain.tensors,
            argument=chain.argument,
            in_features=chain.in_features,
            hidden=chain.hidden_sizes(tensors),
            out_features=chain.out_features,
            dtype=cast(DType, str(chain.dtype).removeprefix("torch.")),
            covers=tuple(name for name, _ in module.named_modules() if name),
            dropout=chain.dropout,
            scale=chain.scale,
            structure=chain.structure(tensors),
            valid=valid,
            depends_on=facts.words,
        )

    def _chain(self, module: nn.Module, signatures: Sequence[Signature], key: Hashable) -> Chain:
        """The chain that all kinds of calls agree on, with few rows and with many."""
        found: Chain | None = None
        for signature in signatures:
            about = (key, signature.arguments, signature.grad, signature.training)
            chain = self._proofs.read(module, signature, about)
            evaluated = chain
            if signature.training:
                at_rest = replace(signature, training=False)
                evaluated = self._proofs.read(module, at_rest, (*about[:-1], False))
            check_evaluation(chain, evaluated)
            if found is None or (chain.dropout and not found.dropout):
                found, chain = chain, found or chain
            same = replace(chain, dropout=()) == replace(found, dropout=())
            if not same or (chain.dropout and chain.dropout != found.dropout):
                raise Refused("computes different things in different calls")
        assert found is not None
        return found


def reread(model: nn.Module, block: Block) -> Block | Refusal:
    """Reads one block of a model again."""
    return Rereader(model).read(block)


# The fields of a block that describe its computation, in words.
_CLAIMS = {
    "kind": "is a {now} and not a {was}",
    "form": "computes {now} and not {was}",
    "tensors": "computes with {now} and not with {was}",
    "argument": "computes it from {now} and not from {was}",
    "in_features": "takes {now} features and not {was}",
    "out_features": "gives {now} features and not {was}",
    "dtype": "has weights of {now} and not of {was}",
    "scale": "multiplies by {now} and not by {was}",
}


def differences(now: Block, was: Block) -> Iterator[str]:
    """How the block in the model differs from the given block, in words."""
    for name, words in _CLAIMS.items():
        values = {"now": getattr(now, name), "was": getattr(was, name)}
        if values["now"] != values["was"]:
            yield words.format(**{key: _in_words(value) for key, value in values.items()})


def _in_words(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


# ---- calls to trace ----


def signatures_of(block: Block, module: nn.Module) -> list[Signature]:
    """The calls that a block lists: of each kind the one with the fewest rows and with the most."""
    weight = own_tensors(module).get(block.tensors[0])
    if weight is None:
        raise Refused(f"it has no {block.tensors[0]} any more")
    device = weight.device
    calls = sorted(block.calls or (_made_up(block),), key=lambda call: call.rows)
    found: dict[Hashable, Signature] = {}
    for few in (True, False):
        for call in calls if few else reversed(calls):
            if call.rows == 0:
                continue
            for beside, nones in _besides(block, len(call.shape)):
                signature = _signature(block, call, beside, nones, device)
                (kind,) = kinds_of([signature])
                found.setdefault((kind, few), signature)
    if not 1 <= len(found) <= MOST_KINDS:
        raise Refused(f"was called in {len(found)} ways; expected 1 to {MOST_KINDS}")
    return list(dict.fromkeys(found.values()))


def _made_up(block: Block) -> Call:
    """A call for a block made by hand, which lists no calls."""
    return Call(
        shape=(2, block.in_features),
        dtype=block.dtype,
        contiguous=True,
        grad=False,
        training=False,
        count=1,
    )


def _besides(block: Block, dims: int) -> list[tuple[tuple[Beside, ...], tuple[str, ...]]]:
    """The arguments other than x in calls with `dims` dimensions: tensors, and names of Nones."""
    told = [
        (d.beside, d.nones) for d in block.valid if d.ones == ANY_DIMS or len(d.ones) == dims - 1
    ]
    if told:
        return list(dict.fromkeys(told))
    return [(tuple(Beside(name=n, dtype=block.dtype, ones="n" * dims) for n in block.ignores), ())]


def _signature(
    block: Block,
    call: Call,
    beside: Sequence[Beside],
    nones: Sequence[str],
    device: torch.device,
) -> Signature:
    shape = _fewer_rows(call.shape)
    arguments: list[tuple[str, TensorSpec | None]] = [
        (block.argument, _spec(shape, call.dtype, device)),
        *((name, None) for name in nones),
    ]
    for one in beside:
        sizes = [1 if c == "1" else 3 for c in one.ones]
        if len(sizes) == len(shape):  # most often it has the shape of x
            sizes = [1 if c == "1" else n for c, n in zip(one.ones, shape, strict=True)]
        arguments.append((one.name, _spec(tuple(sizes), one.dtype, device)))
    return Signature(
        arguments=tuple(arguments),
        output=None,
        grad=call.grad,
        training=call.training,
        autocast=False,
    )


def _spec(shape: tuple[int, ...], dtype: str, device: torch.device) -> TensorSpec:
    like = torch.empty(shape, device="meta")
    return TensorSpec(shape, tuple(like.stride()), getattr(torch, dtype), device, False, True)


def _fewer_rows(shape: tuple[int, ...]) -> tuple[int, ...]:
    *lead, width = shape
    for i in range(len(lead)):
        others = math.prod(lead[:i] + lead[i + 1 :])
        if others * lead[i] > MOST_ROWS_READ:
            lead[i] = min(lead[i], max(2, MOST_ROWS_READ // others))
    return (*lead, width)
