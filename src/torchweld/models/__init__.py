"""Built-in models: small, in plain PyTorch, the same weights and inputs every time.

`MODELS["gpt"].build()` gives `(model, inputs)`, the model in eval mode on the CPU. Another size is
another configuration: `MODELS["gpt"].build(config=GptConfig(layers=2))`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from torchweld.core.errors import TorchweldError
from torchweld.core.model_inputs import Inputs
from torchweld.models import bert, dlrm, gpt, llama, mixer, policy, vit


@dataclass(frozen=True, kw_only=True)
class Builtin:
    """A model that can be named: what it is, and how it and its example inputs are made."""

    name: str
    kind: str  # with the names of the configuration's fields in braces
    config: Any
    make: Callable[[Any], nn.Module]
    example: Callable[[Any, torch.Generator], Inputs]

    @property
    def description(self) -> str:
        """The model in one line, with its sizes."""
        return self.kind.format_map(vars(self.config))

    def build(self, seed: int = 0, config: Any = None) -> tuple[nn.Module, Inputs]:
        """The model in eval mode and inputs for it; torch's own random state stays as it was."""
        config = self.config if config is None else config
        if type(config) is not type(self.config):
            raise TorchweldError(
                f"the built-in model {self.name!r} has a {type(self.config).__name__}, not a "
                f"{type(config).__name__}; as in {self.config}"
            )
        with seeded(seed), torch.device("cpu"):
            model = self.make(config)
            inputs = self.example(config, torch.Generator().manual_seed(seed))
        return model.eval(), inputs


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Inside, torch draws on the CPU from `seed`; afterwards its random state is as before."""
    with torch.random.fork_rng(devices=[]):
        # torch.manual_seed would reseed the GPUs too, whose state is not kept here.
        torch.default_generator.manual_seed(seed)
        yield


MODELS: dict[str, Builtin] = {
    builtin.name: builtin
    for builtin in (
        Builtin(
            name="gpt",
            kind="GPT-2 in small: {layers} layers of {width}, {batch}x{tokens} tokens",
            config=gpt.GptConfig(),
            make=gpt.Gpt,
            example=gpt.example_inputs,
        ),
        Builtin(
            name="llama",
            kind="Llama-like, gated MLPs: {layers} layers of {width}, {batch}x{tokens} tokens",
            config=llama.LlamaConfig(),
            make=llama.Llama,
            example=llama.example_inputs,
        ),
        Builtin(
            name="bert",
            kind="BERT-like sentence encoder: {layers} layers of {width}, {batch}x{tokens} tokens",
            config=bert.BertConfig(),
            make=bert.Bert,
            example=bert.example_inputs,
        ),
        Builtin(
            name="vit",
            kind="vision transformer: {layers} layers of {width}, {batch} image of {size}x{size}",
            config=vit.VitConfig(),
            make=vit.Vit,
            example=vit.example_inputs,
        ),
        Builtin(
            name="dlrm",
            kind="DLRM-like recommender: {features} features, {tables} tables, {batch} rows",
            config=dlrm.DlrmConfig(),
            make=dlrm.Dlrm,
            example=dlrm.example_inputs,
        ),
        Builtin(
            name="policy",
            kind="RL policy: {observation} observed, hidden {hidden} with tanh, {batch} row",
            config=policy.PolicyConfig(),
            make=policy.Policy,
            example=policy.example_inputs,
        ),
        Builtin(
            name="mixer",
            kind="MLP-Mixer: {layers} layers of {width}, {batch} image of {size}x{size}",
            config=mixer.MixerConfig(),
            make=mixer.Mixer,
            example=mixer.example_inputs,
        ),
    )
}

DEMO = "gpt"
