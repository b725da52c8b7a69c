"""What an op has to do: floating-point operations, bytes read, bytes written.

In: an `Op` and its kind. Out: `Work`, every read and write with the memory it goes to. It follows
from the shapes alone, and is the least that the op must do: read each input once and write each
result once. A multiply-add counts as two; integer arithmetic is not counted. The models are in
`product_costs.py`, `training_costs.py`, `elementwise_costs.py` and `move_costs.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from torchweld.profiles.accounting import (
    elementwise_costs,
    move_costs,
    product_costs,
    training_costs,
)
from torchweld.profiles.accounting.op_calls import OpCall, Work, is_float, names
from torchweld.profiles.accounting.product_costs import Model
from torchweld.profiles.attributing.op_kinds import IDLE_KINDS, Kind, kind_of
from torchweld.profiles.attributing.op_nesting import working
from torchweld.profiles.profile import Op

_NOTHING = Work(flops=0, reads=(), writes=())
_NOT_RECORDED = Work(flops=None, reads=(), writes=())

# The cost of each op by its name, without the namespace and the underscore of in-place variants.
_MODELS: dict[str, Model] = {
    **dict.fromkeys(("mm", "bmm", "mv", "dot", "vdot", "_scaled_mm"), product_costs.product(0)),
    **dict.fromkeys(("addmm", "baddbmm", "addmv", "_addmm_activation"), product_costs.product(1)),
    "addbmm": product_costs.sum_of_products,
    "ger": product_costs.outer(0),
    "addr": product_costs.outer(1),
    **dict.fromkeys(("mkldnn_linear", "_linear_pointwise"), product_costs.linear(1)),
    "_mkl_linear": product_costs.mkl_linear,
    "mkldnn_linear_backward_input": product_costs.linear_backward_input,
    "mkldnn_linear_backward_weights": product_costs.linear_backward_weights,
    **dict.fromkeys(("chain", "chain_kept", "chain_training"), product_costs.chain),
    "group": product_costs.group,
    **dict.fromkeys(("chain_packed", "group_packed", "group_of_packed"), product_costs.packed),
    "chain_saving": training_costs.chain_saving,
    "group_saving": training_costs.group_saving,
    "chain_backward": training_costs.chain_backward,
    "group_backward": training_costs.group_backward,
    "_convolution_pointwise": product_costs.convolution,
    "convolution_backward": product_costs.convolution_backward(0, 1),
    "mkldnn_convolution_backward": product_costs.convolution_backward(1, 0),
    **{
        f"_scaled_dot_product_{name}": product_costs.attention
        for name in (
            "flash_attention_for_cpu",
            "flash_attention",
            "efficient_attention",
            "cudnn_attention",
        )
    },
    **{
        f"_scaled_dot_product_{name}_backward": product_costs.attention_backward
        for name in (
            "flash_attention_for_cpu",
            "flash_attention",
            "efficient_attention",
            "cudnn_attention",
        )
    },
    **dict.fromkeys(
        ("sort", "topk", "kthvalue", "median", "nanmedian", "mode"), elementwise_costs.sorting
    ),
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward"), elementwise_costs.loss),
    **dict.fromkeys(("nll_loss_backward", "nll_loss2d_backward"), elementwise_costs.loss_backward),
    **dict.fromkeys(elementwise_costs.FUSED_OPTIMIZERS, elementwise_costs.fused_optimizer),
    "copy": move_costs.copy_into,
    **dict.fromkeys(
        names("""
            scatter scatter_add scatter_reduce index_add index_copy index_put index_fill
            index_reduce _index_put_impl put masked_scatter
        """),
        move_costs.scatter,
    ),
    **dict.fromkeys(("_embedding_bag", "_embedding_bag_forward_only"), move_costs.embedding_bag),
    **dict.fromkeys(
        ("embedding_dense_backward", "_embedding_bag_dense_backward"), move_costs.embedding_backward
    ),
}

# For all others of a kind. Products, attention and fused ops of another name have no model.
_BY_KIND: dict[Kind, Model] = {
    "convolution": product_costs.convolution,
    "pointwise": elementwise_costs.pointwise,
    "reduction": elementwise_costs.reduction,
    "normalisation": elementwise_costs.normalisation,
    "optimizer": elementwise_costs.foreach,
    "copy": move_costs.copy,
    "gather": move_costs.gather,
    "random": move_costs.random,
    "fill": move_costs.fill,
}


def work_of(op: Op, kind: Kind, inside: Sequence[tuple[int, int]] = ()) -> Work:
    """What the op has to do; `flops` is None where no model knows it. `inside`: `made_inside`."""
    if kind in IDLE_KINDS:
        return _NOTHING
    call = OpCall(op, inside)
    if not call.inputs and not call.outs and not call.written:
        return _NOT_RECORDED  # a kernel of a compiler, a trace without shapes
    model = _MODELS.get(call.plain) or _BY_KIND.get(kind)
    return model(call) if model is not None else call.unknown()


def works_of(ops: Sequence[Op]) -> list[Work | None]:
    """The work of each op of a step; None for an op that does none itself."""
    parents = [op.parent for op in ops]
    works = working([op.name for op in ops], parents)
    inside = made_inside(ops, works)
    return [
        work_of(op, kind_of(op.name), inside.get(i, ())) if works[i] else None
        for i, op in enumerate(ops)
    ]


def made_inside(ops: Sequence[Op], works: Sequence[bool]) -> dict[int, list[tuple[int, int]]]:
    """Op that does work -> memory made by ops inside it that do none, or that prepare for it."""
    found: dict[int, list[tuple[int, int]]] = {}
    for op in ops:
        if op.written:
            around = op.parent
            while around >= 0 and not works[around]:
                around = ops[around].parent
            if around >= 0:
                found.setdefault(around, []).extend(op.written)
    return found


def arithmetic_dtype(op: Op) -> str:
    """The type an op computes in: that of its first floating-point argument."""
    for tensor in op.inputs:
        if tensor is not None and is_float(tensor):
            return tensor.dtype or "float32"
    return "float32"
