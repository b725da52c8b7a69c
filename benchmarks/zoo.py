"""Tiny models of as many transformers types as can be built from their configurations.

`build(model_type)` gives the model in eval mode, random weights, and inputs it runs on, or raises
a `CannotBuildError` with what every attempt met. Sizes are made small by the names that
configurations have for them; where a type does not like that, less and less is changed.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

TOKENS = 12
IMAGE = 64
MOST_PARAMETERS = 16_000_000


def _sized(names: str, size: int) -> dict[str, int]:
    return dict.fromkeys(names.split(), size)


WIDTHS = _sized(
    "hidden_size d_model n_embd dim embed_dim embedding_size emb_dim encoder_hidden_size "
    "decoder_hidden_size d_embed encoder_embed_dim projection_dim mm_hidden_size hidden_dim "
    "output_hidden_size out_hidden_size text_embed_dim d_text qformer_hidden_size d_hidden "
    "decoder_dim attention_hidden_size word_embed_proj_dim cross_attention_hidden_size",
    64,
)
HIDDEN = _sized(
    "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff n_inner dim_feedforward "
    "intermediate_dim ffn_hidden_size feedforward_size encoder_intermediate_size mlp_dim d_inner "
    "decoder_intermediate_size shared_intermediate_size ff_expansion_dim",
    128,
)
DEPTHS = _sized(
    "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers "
    "num_decoder_layers num_encoder_layers depth num_blocks encoder_num_hidden_layers "
    "decoder_num_hidden_layers temporal_num_hidden_layers num_mel_layers",
    2,
)
HEADS = _sized(
    "num_attention_heads n_head n_heads num_heads encoder_attention_heads "
    "decoder_attention_heads decoder_num_attention_heads encoder_num_attention_heads "
    "num_key_value_heads num_query_heads",
    4,
)
OTHERS = {
    **_sized("head_dim d_kv attention_head_size global_head_dim", 16),
    **_sized("vocab_size text_vocab_size codebook_vocab_size audio_vocab_size", 1000),
    **_sized("max_position_embeddings n_positions max_seq_len n_ctx", 128),
    **_sized("num_experts n_routed_experts num_local_experts moe_num_experts n_experts", 4),
    **_sized("num_experts_per_tok moe_k num_experts_per_token moe_topk", 2),
    **_sized("moe_intermediate_size expert_ffn_hidden_size", 32),
    "shared_expert_intermediate_size": 32,
    **_sized("n_group topk_group", 1),
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "image_size": IMAGE,
    "num_labels": 3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "sliding_window": 8,
    "attention_window": 8,
    "rotary_dim": 8,
    "num_mel_bins": 16,
    "max_source_positions": 64,
    "num_key_value_heads": 4,
    **_sized("qkv_hidden_size attention_dim encoder_dim", 64),
}
EVERYTHING = {**WIDTHS, **HIDDEN, **DEPTHS, **HEADS, **OTHERS}
# Each attempt changes less than the one before.
ATTEMPTS: tuple[Mapping[str, Any], ...] = (
    EVERYTHING,
    {
        k: v
        for k, v in EVERYTHING.items()
        if k not in ("head_dim", "sliding_window", "kv_lora_rank")
    },
    {**WIDTHS, **HIDDEN, **DEPTHS, **HEADS, "vocab_size": 1000, "pad_token_id": 0},
    {**HIDDEN, **DEPTHS, "vocab_size": 1000, "pad_token_id": 0, "image_size": IMAGE},
    {**DEPTHS, "vocab_size": 1000, "pad_token_id": 0},
    DEPTHS,
    {},
)


class CannotBuildError(Exception):
    """No attempt gave a model that runs; the message has the last reason."""


@dataclass(frozen=True, kw_only=True)
class ZooModel:
    model: nn.Module
    inputs: dict[str, Any]


def model_types() -> list[str]:
    """All types that transformers has a configuration for."""
    import transformers

    return sorted(transformers.CONFIG_MAPPING.keys())


def build(model_type: str) -> ZooModel:
    """A small model of this type that runs."""
    reasons: list[str] = []
    for sizes in ATTEMPTS:
        try:
            config = _config(model_type, sizes)
            config._attn_implementation = "eager"
            classes = list(_classes(config))
        except Exception as error:  # what a configuration objects to, or a missing class
            reasons.append(_line(error))
            continue
        for make in classes:
            try:
                with torch.device("meta"):
                    count = sum(p.numel() for p in make(config).parameters())
            except Exception as error:  # some read values, which meta tensors do not have
                reasons.append(_line(error))
                count = 0 if sizes is EVERYTHING else MOST_PARAMETERS + 1
            if count > MOST_PARAMETERS:
                reasons.append(f"{count / 1e6:.0f} million parameters")
                continue
            try:
                torch.manual_seed(0)
                model = make(config).eval().float()
            except Exception as error:
                reasons.append(_line(error))
                continue
            _spread(model)
            for inputs in _inputs(model, config):
                try:
                    with torch.no_grad(), warnings.catch_warnings():
                        warnings.simplefilter("ignore")
                        model(**inputs)
                except Exception as error:
                    reasons.append(_line(error))
                    continue
                return ZooModel(model=model, inputs=inputs)
    raise CannotBuildError(reasons[-1] if reasons else "there is no class for it")


def _line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return f"{type(error).__name__}: {lines[0][:160]}"


def _spread(model: nn.Module) -> None:
    """Weights that are zero, or all alike, would hide mistakes."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point() and parameter.numel() > 1:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(0.02 * noise.to(parameter.dtype))


def _config(model_type: str, sizes: Mapping[str, Any]) -> Any:
    import transformers

    default = transformers.AutoConfig.for_model(model_type)
    return transformers.AutoConfig.for_model(model_type, **_values(default, sizes))


def _values(config: Any, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes that a configuration has, those of its parts too."""
    found: dict[str, Any] = {}
    for name, value in sizes.items():
        old = getattr(config, name, None)
        if type(old) is int and (name.endswith("token_id") or old > value):
            found[name] = value
    for name in getattr(config, "sub_configs", None) or {}:
        part = getattr(config, name, None)
        if part is not None and not isinstance(part, dict):
            inner = _values(part, sizes)
            if "model_type" in part.to_dict():
                inner["model_type"] = part.model_type
            found[name] = inner
    return found


def _classes(config: Any) -> Iterator[Any]:
    """Model classes, those with a head first: a language model's last product is a Linear too."""
    import transformers

    kind = type(config)
    names = (
        "MODEL_FOR_CAUSAL_LM_MAPPING",
        "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
        "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING",
        "MODEL_FOR_MASKED_LM_MAPPING",
        "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING",
        "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING",
        "MODEL_MAPPING",
    )
    for name in names:
        mapping = getattr(transformers, name, None)
        if mapping is not None and kind in mapping:
            found = mapping[kind]
            yield from found if isinstance(found, (list, tuple)) else (found,)


def _inputs(model: Any, config: Any) -> Iterator[dict[str, Any]]:
    """What the model may take, the likeliest first."""
    takes = inspect.signature(model.forward).parameters
    generator = torch.Generator().manual_seed(2)
    text = config.get_text_config()
    vocab = min(getattr(text, "vocab_size", None) or 1000, 900)

    def tokens(count: int = TOKENS) -> Tensor:
        # Above the special ones.
        return torch.randint(min(5, vocab - 1), vocab, (1, count), generator=generator)

    def image(frames: int | None = None) -> Tensor:
        vision = getattr(config, "vision_config", config)
        size = getattr(vision, "image_size", None) or IMAGE
        height, width = (size, size) if isinstance(size, int) else size[-2:]
        channels = getattr(vision, "num_channels", None) or 3
        shape = (
            (1, channels, height, width) if frames is None else (1, frames, channels, height, width)
        )
        return torch.randn(shape, generator=generator)

    words = {"input_ids": tokens()}
    if "decoder_input_ids" in takes:
        words["decoder_input_ids"] = tokens()
    given: list[dict[str, Any]] = []
    if "input_ids" in takes:
        given.append(words)
        if "pixel_values" in takes:
            given.append({**words, "pixel_values": image()})
        if "bbox" in takes:
            given.append({**words, "bbox": torch.randint(0, 9, (1, TOKENS, 4)).sort(-1).values})
    if "pixel_values" in takes:
        frames = getattr(config, "num_frames", None)
        given.append({"pixel_values": image()})
        if isinstance(frames, int):
            given.append({"pixel_values": image(frames)})
    if "pixel_values_videos" in takes:
        given.append({"pixel_values_videos": image(getattr(config, "frames_per_clip", 4))})
    if "input_values" in takes:
        given += [
            {"input_values": torch.randn(1, length, generator=generator)}
            for length in (16000, 4000)
        ]
        bins = getattr(config, "num_mel_bins", None)
        if isinstance(bins, int):
            length = getattr(config, "max_length", None) or 1024
            given.append({"input_values": torch.randn(1, length, bins, generator=generator)})
    if "input_features" in takes:
        bins = getattr(config, "num_mel_bins", None) or getattr(config, "feat_dim", None) or 80
        length = 2 * (getattr(config, "max_source_positions", None) or 64)
        for shape in ((1, bins, length), (1, 64, bins), (1, length, bins)):
            features = {"input_features": torch.randn(shape, generator=generator)}
            if "decoder_input_ids" in takes:
                features["decoder_input_ids"] = tokens()
            given.append(features)
    if "past_values" in takes:
        length = getattr(config, "context_length", None) or 64
        channels = getattr(config, "num_input_channels", None) or 1
        given.append({"past_values": torch.randn(1, length, channels, generator=generator)})
    if "inputs" in takes:
        width = getattr(config, "d_model", 64)
        given.append({"inputs": tokens(64)})
        given.append({"inputs": torch.randn(1, TOKENS, width, generator=generator)})
    # A cache would be handed from one run to the next.
    for one in given:
        yield {**one, "use_cache": False} if "use_cache" in takes else one
    yield from given
