"""Finds the chains in a model by what its modules compute: `tw.find`.

In: a model and inputs. Out: `Blocks`. The model runs once on each input while the calls of its
modules are recorded. From the outside in, every module that is small enough to be a chain is
traced. Its graph is brought into normal form and read as a chain, which is confirmed by numbers.
The largest modules that are chains become blocks. A module that is not a chain is refused with a
reason, and its children are examined.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.utils._pytree import tree_leaves

from torchweld.core.argument_checks import check_flags, check_model
from torchweld.core.errors import TorchweldError
from torchweld.core.interrupt_safety import Apart, undisturbed
from torchweld.core.model_inputs import Inputs, Workload, as_workloads, first_line
from torchweld.core.module_paths import grouped_paths
from torchweld.core.passing_exceptions import says_nothing
from torchweld.welds.cloning.model_clone import Clone, clone_to_run
from torchweld.welds.finding.block_candidates import Candidates
from torchweld.welds.found_blocks import Block, Blocks, Call, DType, Refusal
from torchweld.welds.recognising.chain_recognition import Chain
from torchweld.welds.refusal_reasons import Refused, defined_at
from torchweld.welds.tracing.call_recording import (
    MOST_KINDS,
    RecordedCalls,
    TensorSpec,
    closed_reason,
    noticing,
    record,
)
from torchweld.welds.tracing.forward_trace import own_tensors


def find(model: nn.Module, inputs: Any, *, training: bool = False) -> Blocks:
    """Finds the blocks of `model` that can be welded, and says why others cannot.

    A clone of the model runs on `inputs`, on the same parameters, in eval mode without gradients.
    With `training=True` it runs in training mode with gradients (forward only). The model itself is
    not touched, and may be in use. Blocks of a model on meta are found too, but not confirmed.
    """
    check_model("find", model)
    check_flags("find", training=training)
    try:
        return _find(model, inputs, training)
    except Exception as error:
        if says_nothing(error) or isinstance(error, TorchweldError):
            raise
        kind = type(model).__name__
        raise TorchweldError(f"this {kind} cannot be analysed: {first_line(error)}") from error


@undisturbed
def _find(model: nn.Module, inputs: Any, training: bool) -> Blocks:
    lazy = [n for n, p in model.named_parameters() if isinstance(p, UninitializedParameter)]
    if lazy:
        raise TorchweldError(
            f"{lazy[0]} has no shape yet (a lazy module); run the model once, then look for blocks"
        )
    on_meta = any(p.is_meta for p in model.parameters())
    workloads = as_workloads(inputs)
    if on_meta:
        workloads = [_on_meta(workload) for workload in workloads]
    clone = clone_to_run(model)
    root, notices = clone.model, list[str]()
    # Tensors made in inference mode could not be used outside of it.
    with torch.inference_mode(False), noticing(clone, notices), Apart() as apart:
        if training != root.training or not training:
            root.train(training)
        workloads = [rebound(workload, clone) for workload in workloads]
        with torch.set_grad_enabled(training):
            runs = [(_runner(workload, root), workload.count) for workload in workloads]
            recording = record(root, runs)
        _check_called(recording, workloads, root)
        search = _Search(recording, Candidates(recording, confirm=not on_meta), apart)
        search.visit(root, "")
    return search.result(notices, on_meta)


def _runner(workload: Workload, model: nn.Module) -> Callable[[], object]:
    return lambda: workload.try_on(model)


def rebound(workload: Workload, clone: Clone) -> Workload:
    """The same call, with modules of the model in its arguments replaced by their clones."""
    if workload.inputs is None:
        return workload
    given = (workload.inputs.args, workload.inputs.kwargs)
    args, kwargs = clone.rebound(given)
    leaves = zip(tree_leaves(given), tree_leaves((args, kwargs)), strict=True)
    if all(a is b for a, b in leaves):
        return workload
    inputs = type(workload.inputs)(*args, **kwargs)
    return replace(workload, run=inputs.call, inputs=inputs)


def _check_called(recording: RecordedCalls, workloads: Sequence[Workload], root: nn.Module) -> None:
    for calls, workload in zip(recording.calls, workloads, strict=True):
        if calls == 0 and workload.inputs is None and not closed_reason(root):
            raise TorchweldError(
                f"{workload.name!r} called no module of the model that it was given, which is a "
                "copy for analysis; call the argument: lambda m: m(x), and not "
                "lambda m: model(x)"
            )


def _on_meta(workload: Workload) -> Workload:
    """The same call with tensors on meta, for a model on meta."""
    if workload.inputs is None:
        return workload

    def moved(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to("meta")
        if type(value) in (list, tuple):
            return type(value)(moved(item) for item in value)
        if type(value) is dict:
            return {key: moved(item) for key, item in value.items()}
        return value

    kwargs = {key: moved(item) for key, item in workload.inputs.kwargs.items()}
    inputs = Inputs(*moved(workload.inputs.args), **kwargs)
    return replace(workload, run=inputs.call, inputs=inputs)


class _Search:
    """Walks a model from the outside in, and collects blocks and refusals."""

    def __init__(self, recording: RecordedCalls, candidates: Candidates, apart: Apart) -> None:
        self._recording, self._candidates, self._apart = recording, candidates, apart
        self._order = {module: i for i, module in enumerate(recording.paths)}
        # A tied weight counts as used if one of its modules was called.
        self._used = {id(p) for module in recording.seen for p in module._parameters.values()}
        self._blocks: dict[nn.Module, Block] = {}
        self._refused: dict[nn.Module, Refusal] = {}
        self._idle: list[str] = []  # paths of modules with weights that were not used
        self._visited: set[nn.Module] = set()
        self._explained: set[nn.Module | None] = set()  # not called; a refusal says so already

    def _looked_into(self, module: nn.Module, path: str) -> Chain | Refused | None:
        """The chain of a module, whose block is noted; or why it has none."""
        try:
            found = self._apart(self._candidates.examine, module)
            if isinstance(found, Chain):
                self._blocks[module] = self._apart(self._block, module, path, found)
        except Exception as error:  # an unusual module must not stop the search
            if says_nothing(error) or isinstance(error, TorchweldError):
                raise
            return Refused(f"cannot be analysed: {first_line(error)}", where=defined_at(module))
        return found

    def visit(self, module: nn.Module, path: str) -> None:
        if module in self._visited:
            return
        self._visited.add(module)
        closed = closed_reason(module)
        if closed:
            self._refuse(module, path, Refused(f"{closed}: nothing inside was analysed"))
            return
        found = self._looked_into(module, path)
        if isinstance(found, Chain):
            return
        called = module in self._recording.seen
        idle = self._uncalled_children(module) if called else []
        self._explained |= {module._modules[name] for name in idle}
        for name, child in module._modules.items():
            if child is not None:
                self.visit(child, f"{path}.{name}" if path else name)
        if not called and module not in self._explained and self._is_idle(module):
            self._idle.append(path)
        if found is None and not idle:
            return
        if idle:
            found = _uncalled(idle, defined_at(module))
        assert found is not None
        if idle or self._holds_linears(module) or self._candidates.owns_weights(module, found):
            self._refuse(module, path, found)

    def _holds_linears(self, module: nn.Module) -> bool:
        """Whether the module itself combines Linears: children, or children in lists.

        One Linear beside larger parts, like the head of a language model, does not count.
        """
        parts = list(self._parts_of(module))
        known = self._blocks.keys() | self._refused.keys()
        linears = [part for part in parts if part in known and not part._modules]
        others = [
            part
            for part in parts
            if part._modules and any(inner in self._blocks for inner in part.modules())
        ]
        return len(linears) > 1 or (len(linears) == 1 and not others)

    def _parts_of(self, module: nn.Module) -> Iterator[nn.Module]:
        for child in module._modules.values():
            if child is None:
                continue
            yield child
            if child not in self._recording.seen and child._modules:
                yield from self._parts_of(child)

    def _uncalled_children(self, module: nn.Module) -> list[str]:
        """Names of direct children with a weight that the module did not call although it ran."""
        return [
            name
            for name, child in module._modules.items()
            if child is not None and child not in self._recording.seen and self._is_idle(child)
        ]

    def _is_idle(self, module: nn.Module) -> bool:
        """Whether it has weights, and no module that ran shares one of them."""
        own = [p for p in module._parameters.values() if p is not None and p.dim() == 2]
        return bool(own) and not any(id(p) in self._used for p in own)

    def _refuse(self, module: nn.Module, path: str, refused: Refused) -> None:
        self._refused[module] = _refusal(path, module, refused)

    def _block(self, module: nn.Module, path: str, chain: Chain) -> Block:
        calls: dict[Call, int] = {}
        ignores: set[str] = set()
        for signature, count in self._recording.seen[module].filled.items():
            given = dict(signature.arguments)
            ignores |= {n for n, s in given.items() if isinstance(s, TensorSpec)}
            x = given[chain.argument]
            output = signature.output
            call = Call(
                shape=x.shape,
                dtype=_name(x.dtype),
                contiguous=x.contiguous,
                grad=output.requires_grad,
                training=signature.training,
                count=0,
            )
            calls[call] = calls.get(call, 0) + count
        own = own_tensors(module)
        return Block(
            path=path,
            kind=type(module).__name__,
            form=chain.form,
            tensors=chain.tensors,
            argument=chain.argument,
            ignores=tuple(sorted(ignores - {chain.argument})),
            in_features=chain.in_features,
            hidden=chain.hidden_sizes(own),
            out_features=chain.out_features,
            dtype=_name(chain.dtype),
            covers=_inside(module),
            dropout=chain.dropout,
            scale=chain.scale,
            calls=tuple(replace(call, count=count) for call, count in calls.items()),
            structure=chain.structure(own),
            valid=self._candidates.valid(module, chain),
            depends_on=self._candidates.depends_on(module),
        )

    # ---- groups, and the result ----

    def _grouped(self) -> dict[nn.Module, Block]:
        """Puts one-layer blocks that one module always calls with the same tensor into groups."""
        members: dict[Any, list[nn.Module]] = {}
        for module, block in self._blocks.items():
            if block.layers == 1 and block.scale == 1.0:
                seen = self._recording.seen[module]
                callers, tensors = frozenset(seen.callers), seen.tensors[block.argument]
                members.setdefault((callers, tensors, block.dtype), []).append(module)
        blocks = dict(self._blocks)
        numbers: dict[str, int] = {}
        for (callers, _, _), modules in members.items():
            if len(modules) > 1 and len(callers) == 1:
                (caller,) = callers
                number = numbers[caller] = numbers.get(caller, -1) + 1
                for module in modules:
                    blocks[module] = replace(blocks[module], group=f"{caller}#{number}")
        return blocks

    def _not_finite(self, module: nn.Module) -> list[str]:
        """Names of the block's tensors that hold NaN or Inf."""
        own = own_tensors(module)
        names = dict.fromkeys(self._blocks[module].tensors)
        with torch.no_grad():
            return [name for name in names if not own[name].is_meta and not _is_finite(own[name])]

    def result(self, notices: Sequence[str], on_meta: bool) -> Blocks:
        found = list(notices)
        if on_meta:
            found.append("the model is on meta, so nothing was confirmed by numbers")
        for module in self._blocks:
            first, *others = self._recording.paths[module]
            if others:
                found.append(f"{first} is also {', '.join(others)}: one module, one block")
            if odd := self._not_finite(module):
                found.append(f"{first or 'the model'} has NaN or Inf in its {', '.join(odd)}")
            if left_out := self._recording.seen[module].left_out:
                found.append(
                    f"{first} was called in more than {MOST_KINDS} ways: {left_out} calls left out"
                )
        if self._idle:
            everything = [path for paths in self._recording.paths.values() for path in paths]
            names = ", ".join(grouped_paths(self._idle, everything))
            found.append(f"not called by these inputs, so not looked at: {names}")
        blocks = self._grouped()
        return Blocks(
            blocks=tuple(blocks[m] for m in sorted(blocks, key=self._order.__getitem__)),
            refused=tuple(
                self._refused[m] for m in sorted(self._refused, key=self._order.__getitem__)
            ),
            notices=tuple(found),
        )


def _is_finite(tensor: Tensor) -> bool:
    """Checked in parts, since the head of a language model can be as large as the rest."""
    rows = max(1, (1 << 20) // max(1, tensor[0].numel())) if tensor.numel() else 1
    return all(bool(part.isfinite().all()) for part in torch.split(tensor, rows))


def _refusal(path: str, module: nn.Module, refused: Refused) -> Refusal:
    return Refusal(
        path=path,
        kind=type(module).__name__,
        reason=refused.reason,
        op=refused.op,
        where=refused.where,
    )


def _inside(module: nn.Module) -> tuple[str, ...]:
    return tuple(name for name, _ in module.named_modules() if name)


def _uncalled(names: Sequence[str], where: str) -> Refused:
    were = "was" if len(names) == 1 else "were"
    return Refused(
        f"{', '.join(names)} {were} not called: the weights are read directly, or not used",
        where=where,
    )


def _name(dtype: torch.dtype) -> DType:
    return cast(DType, str(dtype).removeprefix("torch."))
