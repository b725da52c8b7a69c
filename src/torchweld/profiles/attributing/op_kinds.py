"""What an op does, from its name as the profiler gives it.

In: "aten::addmm", "AddmmBackward0", "graph_0_cpp_fused_gelu_0", ... Out: a `Kind`. Small tables
hold what must be exact; the rest comes from torch itself: whether an op is registered as a
composition of others, which tensors its schema says are views, and the tags of its overloads. A
name that the installed torch does not know (a trace of another release, a custom op) is matched
by its family, or is "unknown".
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Literal, get_args

import torch

from torchweld.profiles.attributing.op_schemas import is_composition, is_out, is_view, overloads_of

Kind = Literal[
    "product",
    "attention",
    "convolution",
    "pointwise",
    "reduction",  # scans and sorts too
    "normalisation",  # softmax too
    "copy",
    "gather",  # embedding, index, scatter, interpolation
    "random",
    "fill",
    "fused",  # torchweld's ops, oneDNN's fused ones, kernels of a compiler
    "optimizer",
    "communication",
    "unknown",
    "allocation",
    "metadata",  # views; launch nothing
    "composite",  # only calls other ops; ranges of the user too
    "autograd",
    "dynamo",
]
KINDS: tuple[Kind, ...] = get_args(Kind)

IDLE_KINDS: frozenset[Kind] = frozenset(
    ("allocation", "metadata", "composite", "autograd", "dynamo")
)
# What counts as a launch on a CPU. An unknown op is taken to do something.
WORK_KINDS: frozenset[Kind] = frozenset(KINDS) - IDLE_KINDS


def _patterns(*rows: tuple[str, Kind]) -> tuple[tuple[re.Pattern[str], Kind], ...]:
    return tuple((re.compile(pattern), kind) for pattern, kind in rows)


def _table(rows: dict[Kind, str]) -> dict[str, Kind]:
    return {name: kind for kind, names in rows.items() for name in names.split()}


# aten's names without "aten::"; the in-place variant of a name has the same kind.
_EXACT = _table(
    {
        "product": """mm addmm bmm baddbmm addbmm mv addmv dot vdot addr ger _scaled_mm _int_mm
            _grouped_mm _scaled_grouped_mm _scaled_mm_v2 _scaled_grouped_mm_v2 _cdist_backward
            _addmm_activation mkldnn_linear mkldnn_linear_backward
            mkldnn_linear_backward_input mkldnn_linear_backward_weights linear_backward
            matmul_backward _weight_int8pack_mm _weight_int4pack_mm _weight_int4pack_mm_for_cpu
            _mixed_dtypes_linear _trilinear _cdist_forward _euclidean_dist mkldnn_rnn_layer
            mkldnn_rnn_layer_backward _cudnn_rnn _cudnn_rnn_backward miopen_rnn""",
        "pointwise": """hardswish glu tril triu masked_fill where _masked_scale _prelu_kernel
            _add_relu _transform_bias_rescale_qkv floor_divide complex polar isin log_sigmoid
            log_sigmoid_forward mse_loss_backward smooth_l1_loss_backward huber_loss_backward
            binary_cross_entropy_backward soft_margin_loss_backward""",
        "reduction": """mse_loss smooth_l1_loss huber_loss binary_cross_entropy
            binary_cross_entropy_with_logits soft_margin_loss nll_loss_forward nll_loss_backward
            nll_loss2d_forward nll_loss2d_backward cumsum cumprod cummax cummin logcumsumexp
            _logcumsumexp _cummax_helper _cummin_helper sort topk kthvalue median nanmedian mode
            trace histc bincount dist _is_all_true _is_any_true allclose equal sum nansum mean prod
            var std var_mean std_mean amax amin aminmax max min argmax argmin any all logsumexp norm
            linalg_vector_norm count_nonzero _aminmax native_norm""",
        "copy": """copy clone _to_copy cat _cat stack _stack _chunk_cat repeat roll flip rot90
            constant_pad_nd pixel_shuffle pixel_unshuffle channel_shuffle im2col col2im
            native_channel_shuffle
            _pin_memory _copy_from _copy_from_and_resize diag_embed block_diag slice_backward
            select_backward unfold_backward diagonal_backward slice_scatter select_scatter
            diagonal_scatter as_strided_scatter to_mkldnn _to_dense _local_scalar_dense
            _mkldnn_reshape _mkldnn_transpose mkldnn_reorder_conv2d_weight""",
        "gather": """embedding index _index_put_impl gather take take_along_dim put
            masked_select masked_scatter masked_scatter_backward nonzero nonzero_static
            searchsorted bucketize repeat_interleave _unique _unique2 unique_dim
            unique_consecutive affine_grid_generator""",
        "random": "native_dropout _fused_dropout",
        "fill": """fill zero zeros zeros_like new_zeros ones ones_like new_ones full full_like
            new_full arange range linspace logspace eye scalar_tensor tril_indices triu_indices
            _efficientzerotensor""",
        "optimizer": "_amp_update_scale",
        "fused": """_thnn_fused_lstm_cell _thnn_fused_gru_cell
            _thnn_fused_lstm_cell_backward_impl _thnn_fused_gru_cell_backward""",
        "communication": "record_param_comms",
        "allocation": """empty empty_like empty_strided empty_permuted new_empty
            new_empty_strided resize resize_as _resize_output _empty_affine_quantized""",
        "metadata": """_unsafe_view unsafe_split unsafe_split_with_sizes unsafe_chunk lift
            lift_fresh set resolve_conj resolve_neg _conj _neg_view _fused_sdp_choice result_type
            is_same_size is_pinned is_set_to _has_same_storage_numel record_stream detach
            _assert_async _assert_scalar _assert_tensor_metadata _reshape_alias""",
        "composite": """_transformer_encoder_layer_fwd _native_multi_head_attention linear matmul
            scaled_dot_product_attention _scaled_dot_product_attention_math dropout contiguous
            reshape to conv1d conv2d conv3d layer_norm batch_norm group_norm rms_norm softmax
            log_softmax cross_entropy_loss einsum item _linalg_check_errors""",
        "normalisation": "_fused_rms_norm _fused_rms_norm_backward",
    }
)

# Families of aten names, in the order they are tried.
_FAMILIES = _patterns(
    (r"_foreach_|_amp_foreach|_fused_(adam|adamw|sgd|adagrad)", "optimizer"),
    (r"attention|scaled_dot_product", "attention"),
    (r"(^|_)(de)?conv(olution)?(\d?d|_|$)", "convolution"),
    (r"(batch|layer|group|rms|instance|weight)_norm|softmax|^renorm", "normalisation"),
    (r"^_?embedding|^_?(unsafe_)?(masked_)?index|^scatter|grid_sampler|upsample", "gather"),
    (r"pool\d?d|unpool|segment_reduce|_loss", "reduction"),
    (r"^(reflection|replication|circular)_pad|_copy$", "copy"),
    (r"^_?(rand|normal|uniform|bernoulli|dropout|multinomial|exponential)", "random"),
    (r"_window$", "fill"),
)

# Names outside all namespaces: ranges that torch or the user opens.
_RANGES = _patterns(
    (r"autograd::engine::|torch::autograd::", "autograd"),
    (r"\w+Backward\d*$", "autograd"),
    (r"(nccl|gloo|ucc|mpi|xccl|rccl):", "communication"),
    (r"record_param_comms", "communication"),
    (r"## Call CompiledFxGraph|triton_\w|(graph_\d+_)?(cpp|triton)_\w*\d", "fused"),
    (r"fused_\w|tensorexpr_|TensorExpr", "fused"),
    (r"Torch-Compiled Region|TorchDynamo|Pregraph bytecode|AOTDispatcher", "dynamo"),
    (r"CompiledFunction$|(graph_\d+_)?inductor_wrapper_call|Compiled Autograd", "dynamo"),
    (r".*\(dynamo_timed\)$", "dynamo"),
    (r"detach_?$", "metadata"),
)

# Other namespaces than aten. An empty pattern matches the rest of the namespace.
_NAMESPACES = _patterns(
    (r"torchweld::pack$", "copy"),
    (r"torchweld::dropout_mask$", "random"),
    (r"torchweld::", "fused"),
    (r"mkldnn::_reorder", "copy"),
    (r"mkldnn::.*rnn", "product"),
    (r"mkldnn::|onednn::|fbgemm::.*linear", "fused"),
    (r"mkl::_mkl_linear", "product"),
    (r"mkl::_mkl_reorder", "copy"),
    (r"quantized::(linear|matmul)", "product"),
    (r"quantized::conv", "convolution"),
    (r"(_c10d_functional|c10d_functional|c10d|symm_mem|_dtensor)::", "communication"),
    (r"inductor::_mm", "product"),
    (r"(profiler|prim|prims?_script|FSDP|DistributedDataParallel)::", "composite"),
    (r"(flash_attn|xformers).*::.*(attn|attention|fmha|flash|_fwd|_bwd)", "attention"),
    (r"(torchaudio|torchvision)::.*nms", "gather"),
)


@lru_cache(maxsize=16_384)
def kind_of(name: str) -> Kind:
    """The kind of an op by its name in the profiler; "unknown" if nothing is known about it."""
    for pattern, kind in _RANGES:
        if pattern.match(name):
            return kind
    namespace, separator, base = name.partition("::")
    if not separator:
        return "composite"
    if namespace != "aten":
        for pattern, kind in _NAMESPACES:
            if pattern.match(name):
                return kind
    return _kind_in_namespace(namespace, base.partition(".")[0])


def _kind_in_namespace(namespace: str, base: str) -> Kind:
    plain = base.rstrip("_") or base
    if namespace == "aten":
        exact = _EXACT.get(plain)
        if exact is not None:
            return exact
    overloads = [over for over in overloads_of(namespace, base) if not is_out(over)]
    if overloads and all(map(is_composition, overloads)):
        return "composite"
    if any(map(is_view, overloads)):
        return "metadata"
    tags = {tag for overload in overloads for tag in overload.tags}
    if torch.Tag.pointwise in tags:
        return "pointwise"
    if getattr(torch.Tag, "reduction", None) in tags:  # not in every release
        return "reduction"
    for pattern, kind in _FAMILIES:
        if pattern.search(base):
            return kind
    if torch.Tag.nondeterministic_seeded in tags:
        return "random"
    if torch.Tag.view_copy in tags:
        return "copy"
    if plain.endswith("_backward"):
        return _kind_in_namespace(namespace, plain.removesuffix("_backward"))
    if plain != base:
        return _kind_in_namespace(namespace, plain)
    return "unknown"


def hides_kernels(name: str) -> bool:
    """Whether this is a compiled graph: its kernels show only if the compiler was told to."""
    return name.startswith("## Call CompiledFxGraph")


def is_compiler_work(name: str) -> bool:
    """Whether what runs inside this is compilation: ops on tensors without data, trial runs."""
    return name.endswith("(dynamo_timed)")
