"""A welded module inside a graph: torch.compile, torch.export, AOTInductor, torch.jit.trace.

The graph gets the op if the decision's backends have it in graphs, for each of the row ranges: a
graph is made once for all row counts, so the table cannot be asked. Else it gets the original code.
What is compiled for this process may read the module's packed copy; what is exported or traced
reads the weights where they lie, since it may run anywhere. Nothing is kept, counted or warned
about while a graph is being made, so that a compiler can follow every step, and guards what was
looked at.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from torchweld.ops.backends.backend import wants_gradients
from torchweld.ops.packing import exporting
from torchweld.welds.guarding.welded_structure import inside

if TYPE_CHECKING:
    from torchweld.welds.guarding.call_arguments import Picked
    from torchweld.welds.swapping.joint import Joint


def recording() -> bool:
    """Whether a graph is being made of what runs now."""
    return torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None


def record(
    module: nn.Module, base: Any, joint: Joint, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor | None:
    """The op's result for the graph; None if the graph must hold the original code."""
    if not joint.recordable or _to_onnx():
        return None
    picked = joint.arguments.pick(args, kwargs)
    x = None if picked is None else picked.x
    if picked is None or not isinstance(x, Tensor):
        return None
    if x.dtype != joint.dtype or x.device.type != joint.device or x.dim() == 0:
        return None
    if not _is_valid(joint, picked):
        return None
    if torch.is_autocast_enabled(joint.device) or joint.asks_modes:
        return None
    if not joint.holds_now():
        return None
    if torch.compiler.is_dynamo_compiling() and not exporting():
        # The result is dropped as dead code, but Dynamo adds guards for what this call reads.
        base.forward(module, *args, **kwargs)
    elif joint.structure.differs(module):
        return None
    training, mixed = module.training, False
    for part in joint.structure.parts:
        found = inside(module, part.steps)
        if found is not None:
            training = training or found.training
            mixed = mixed or found.training is not module.training
    if training and not joint.trains:
        return None
    if mixed and joint.drops_out:
        return None
    tensors: list[Tensor] = []
    for steps, name in joint.tensor_steps:
        holder = inside(module, steps)
        tensor: Tensor | None = None if holder is None else holder._parameters.get(name)
        if holder is not None and tensor is None:
            tensor = holder._buffers.get(name)
        if tensor is None:
            return None
        tensors.append(tensor)
    portable = exporting() or torch._C._get_tracing_state() is not None
    # What is exported or traced in eval mode is for inference, whatever the gradient mode.
    gradients = not portable and wants_gradients(x, tensors)
    if joint.infers and gradients:
        return None
    y: Tensor
    if training:
        keeps = joint.decision.recompute
        y = torch.ops.torchweld.chain_training(x, tensors, joint.training_spec, keeps)
    elif gradients:
        y = torch.ops.torchweld.chain_training(x, tensors, joint.spec, joint.decision.recompute)
    elif joint.kept is None or portable:
        y = torch.ops.torchweld.chain(x, tensors, joint.spec)
    else:
        y = torch.ops.torchweld.chain_kept(x, tensors, joint.spec, joint.kept)
    scale = joint.decision.block.scale
    return y if scale == 1.0 else y * scale


def _is_valid(joint: Joint, picked: Picked) -> bool:
    _C: Any = torch._C
    # torch.jit.trace records sizes as values of its graph. It is switched off while we read them.
    tracing = None if torch.compiler.is_dynamo_compiling() else torch._C._get_tracing_state()
    if tracing is not None:
        _C._set_tracing_state(None)
    try:
        width = joint.decision.block.in_features
        return picked.x.shape[-1] == width and joint.valid.holds_in_graphs(picked)
    finally:
        if tracing is not None:
            _C._set_tracing_state(tracing)


def _to_onnx() -> bool:
    """Whether the graph is to be turned into one that knows nothing of our op."""
    return not torch.compiler.is_dynamo_compiling() and torch.onnx.is_in_onnx_export()
