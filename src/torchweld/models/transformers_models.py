"""Models from transformers configurations: "gpt2", "llama?num_hidden_layers=2", or a folder.

In: what follows `hf:` in a target. Out: the model in eval mode, default inputs (None if the model
takes something that has no obvious default), and notes on what was chosen. Weights are
random unless a folder has them. Nothing is downloaded, and no code from a folder is run.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchweld.core.errors import TorchweldError
from torchweld.core.model_inputs import Inputs, first_line
from torchweld.core.passing_exceptions import is_interrupt, says_nothing
from torchweld.machine.hardware import hardware
from torchweld.models import seeded

DEFAULT_TOKENS = 128
# Types whose default configuration is too large to try; all others keep their default.
SIZES: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
    },
}
# Least length of a type that is looked for inside words; shorter ones, such as opt, match too many.
LEAST_PART = 4
MOST_NAME = 200  # characters of a name that are looked at
# Nothing is downloaded, and no code that lies in the folder is run or asked about.
FROM_FOLDER: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin")


@dataclass(frozen=True, kw_only=True)
class Built:
    model: nn.Module
    inputs: Inputs | None
    notes: tuple[str, ...]


def parse_request(text: str) -> tuple[str, dict[str, Any]]:
    """`"gpt2?n_layer=2,n_embd=64"` -> `("gpt2", {"n_layer": 2, "n_embd": 64})`."""
    name, mark, query = text.partition("?")
    if not name or (mark and not query):
        raise TorchweldError(
            f"'hf:{text}' names no model; as in hf:gpt2, hf:gpt2?n_layer=2,n_embd=64 or hf:folder"
        )
    overrides: dict[str, Any] = {}
    for part in re.split(r",(?=\s*\w+\s*=)", query) if query else ():
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not key or not value:
            raise TorchweldError(
                f"{part!r} in 'hf:{text}' sets nothing; as in hf:gpt2?n_layer=2,n_embd=64"
            )
        overrides[key] = _value(value)
    return name, overrides


def _value(text: str) -> Any:
    """JSON where it is JSON (2, 0.1, true, [1, 2]), else the text itself (gelu_new)."""
    try:
        return json.loads(text)
    except ValueError:
        return {"True": True, "False": False, "None": None}.get(text, text)


def build(text: str, seed: int = 0) -> Built:
    """The model that `hf:text` asks for."""
    name, overrides = parse_request(text)
    transformers = _import_transformers(text)
    dtype = _dtype(overrides.pop("dtype", None), text)
    folder = Path(name).expanduser()
    notes: list[str] = []
    if (folder / "config.json").is_file():
        config = _folder_config(transformers, folder, overrides, text)
    elif folder.is_dir():
        raise TorchweldError(
            f"'hf:{text}': the folder has no config.json; expected one saved by save_pretrained"
        )
    else:
        values = {**SIZES.get(name, {}), **overrides}
        config = _type_config(transformers, name, values, text)
        if name in SIZES:
            sizes = ", ".join(f"{key}={values[key]}" for key in SIZES[name])
            notes.append(f"{name} with {sizes}; other sizes as in hf:{name}?num_hidden_layers=2")
    make = _class_for(transformers, config)
    weights = folder.is_dir() and any(any(folder.glob(names)) for names in WEIGHT_FILES)
    _check_size(make, config, text)
    with seeded(seed), torch.device("cpu"), _told(f"'hf:{text}'"):
        if weights:
            model = make.from_pretrained(folder, config=config, **FROM_FOLDER)
        else:
            model = make(config)
            notes.append("random weights")
    model = model.to(dtype) if dtype is not None else model
    generator = torch.Generator().manual_seed(seed)
    return Built(
        model=model.eval(), inputs=_default_inputs(model, config, generator), notes=tuple(notes)
    )


def _import_transformers(text: str) -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise TorchweldError(
            f"'hf:{text}' needs transformers, which does not import here ({first_line(error)}); "
            'install it with: pip install "torchweld[models]"'
        ) from error


@contextmanager
def _told(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # whatever a configuration or a model's constructor raises
        if says_nothing(error):
            raise
        raise TorchweldError(
            f"{what}: transformers cannot build it: {first_line(error)}; check the values given "
            "after the ?, or write a factory: path/to/file.py:factory"
        ) from error


def _dtype(name: Any, text: str) -> torch.dtype | None:
    if name is None:
        return None
    found = getattr(torch, str(name), None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise TorchweldError(
            f"'hf:{text}': unknown dtype {name!r}; there are: float32, bfloat16, float16, float64"
        )
    return found


def _type_config(transformers: Any, name: str, values: Mapping[str, Any], text: str) -> Any:
    types = list(transformers.CONFIG_MAPPING)
    if name not in types:
        inside = type_inside(name, types)
        own = name.rpartition("/")[2].lower()
        near = [inside] if inside else get_close_matches(own, types, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(f'hf:{n}' for n in near)}? " if near else ""
        raise TorchweldError(
            f"unknown model type or folder {name!r}; {hint}transformers "
            f"{transformers.__version__} has {len(types)} types; names of checkpoints are not "
            "among them, nothing is downloaded"
        )
    with _told(f"'hf:{text}'"):
        default = transformers.AutoConfig.for_model(name)
    _check_keys(default, values, text)
    # Made with the values rather than changed later: derived sizes are computed only once.
    with _told(f"'hf:{text}'"):
        return transformers.AutoConfig.for_model(name, **values)


def type_inside(name: str, types: Sequence[str]) -> str | None:
    """The longest type that stands in the name of a checkpoint, as `bert` in bert-base-uncased.

    Separators do not count: gpt-j-6b is of type gptj. Whole words win over parts of words, so that
    gemma-2b is gemma, not gemma2; and what follows the owner's / wins over the owner.
    """
    owner, _, own = name.rpartition("/")
    for text in (own, owner):
        words = [word.lower() for word in re.split(r"[-_./\s]+", text[-MOST_NAME:]) if word]
        runs = {
            "".join(words[i:j]): i for j in range(len(words), 0, -1) for i in range(j - 1, -1, -1)
        }
        plain = {one: re.sub(r"[-_.]", "", one.lower()) for one in types}
        whole = [one for one in types if plain[one] in runs]
        parts = [
            one
            for one in types
            if len(plain[one]) >= LEAST_PART and any(plain[one] in word for word in words)
        ]
        if found := whole or parts:
            return max(found, key=lambda one: (len(plain[one]), -runs.get(plain[one], 0)))
    return None


def _folder_config(transformers: Any, folder: Path, values: Mapping[str, Any], text: str) -> Any:
    with _told(f"'hf:{text}'"):
        default = transformers.AutoConfig.from_pretrained(folder, **FROM_FOLDER)
    _check_keys(default, values, text)
    with _told(f"'hf:{text}'"):
        return transformers.AutoConfig.from_pretrained(folder, **FROM_FOLDER, **values)


def _check_keys(config: Any, values: Mapping[str, Any], text: str) -> None:
    """transformers would keep a misspelt name as a new attribute, and build the default."""
    for key in values:
        if not hasattr(config, key):
            names = [*config.to_dict(), *config.attribute_map]
            near = get_close_matches(key, names, n=3, cutoff=0.5)
            hint = f"did you mean {' or '.join(near)}?" if near else "see its documentation"
            raise TorchweldError(f"'hf:{text}': {type(config).__name__} has no {key!r}; {hint}")


def _class_for(transformers: Any, config: Any) -> Any:
    """The class with the usual head: none for encoders, a language model's for decoders."""
    for name in getattr(config, "architectures", None) or ():
        if isinstance(found := getattr(transformers, name, None), type):
            return found
    kind = type(config)
    mappings = [transformers.MODEL_MAPPING]
    if config.is_encoder_decoder:
        speech = transformers.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING
        mappings = [transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING, speech, *mappings]
    elif kind not in transformers.MODEL_FOR_MASKED_LM_MAPPING:
        mappings = [transformers.MODEL_FOR_CAUSAL_LM_MAPPING, *mappings]
    for mapping in mappings:
        if kind in mapping:
            found = mapping[kind]
            return found[0] if isinstance(found, (list, tuple)) else found
    raise TorchweldError(
        f"transformers has no plain model for the type {config.model_type!r}; "
        "write a factory: path/to/file.py:factory"
    )


def _check_size(make: Any, config: Any, text: str) -> None:
    """Refuses a model that would fill the machine's memory, before it is built."""
    memory_bytes = hardware().memory_bytes
    if memory_bytes is None:
        return
    try:
        with torch.device("meta"):
            shape = make(config)
    except Exception as error:  # some constructors read values, which meta tensors do not have
        if is_interrupt(error):
            raise
        return
    weight_bytes = sum(parameter.nbytes for parameter in shape.parameters())
    # Half: measuring a model takes up to as much memory again as its weights.
    if weight_bytes > memory_bytes / 2:
        raise TorchweldError(
            f"'hf:{text}' has {weight_bytes / 1e9:.1f} GB of weights, more than half of this "
            f"machine's {memory_bytes / 1e9:.1f} GB of memory; make it smaller, as in "
            f"hf:{config.model_type}?num_hidden_layers=2"
        )


def _default_inputs(model: Any, config: Any, generator: torch.Generator) -> Inputs | None:
    """Random tokens (1x128), or an image of the size the configuration names."""
    if any(hasattr(config, f"{kind}_config") for kind in ("vision", "audio")):
        return None  # they take several inputs, and which may be left out differs
    text = config.get_text_config()
    takes = model.main_input_name
    if takes == "input_ids" and isinstance(vocab := getattr(text, "vocab_size", None), int):
        tokens = DEFAULT_TOKENS
        places = getattr(text, "max_position_embeddings", None)
        if isinstance(places, int) and places > 0:
            # Some types begin to count positions at 2.
            tokens = max(1, min(tokens, places - 2))
        given = {"input_ids": torch.randint(vocab, (1, tokens), generator=generator)}
        if config.is_encoder_decoder:
            given["decoder_input_ids"] = torch.randint(vocab, (1, tokens), generator=generator)
        return Inputs(**given)
    size = getattr(config, "image_size", None)
    if takes == "pixel_values" and isinstance(size, (int, list, tuple)):
        height, width = (size, size) if isinstance(size, int) else size
        shape = (1, getattr(config, "num_channels", 3), height, width)
        return Inputs(pixel_values=torch.randn(shape, generator=generator).to(model.dtype))
    return None
