"""Writes random forwards from small pieces.

A piece adds what it needs to the source (globals, attributes, methods) and gives a few lines of
`forward`. It adds to `changes` what a user might later do to the things that those lines read.
"""

from __future__ import annotations

import random

from tests.behaviours.random_parts import ACTIVATIONS, READS

K = 8  # input features
WIDTHS = (8, 8, 12)

# Done to a value in branches that are not taken when recorded.
EFFECTS = (
    "{v} = {v} * 2.0",
    "{v} = {v}.tanh()",
    "{v} = -{v}",
    "{v} = {v} + 1.0",
    "{v}.clamp_(-0.1, 0.1)",
    "{v}.view(-1).mul_(3.0)",
    "{v} = torch.where({v} > 0, {v}, 0.0)",
)

# Changes in place that ordinary inputs do not reach.
EDITS = (
    "{v}.view(-1).clamp_(-50, 50)",
    "{v}[..., :2].clamp_(-50, 50)",
    "{v}.mT.clamp_(-50, 50)",
    "{v}.chunk(2, dim=-1)[1].clamp_(-50, 50)",
    "{v}.unbind(-1)[0].clamp_(-50, 50)",
    "{v}.select(-1, 1).clamp_(-50, 50)",
    "{v}.detach().clamp_(-50, 50)",
    "{v}.data.clamp_(-50, 50)",
    "torch.clamp({v}, -50, 50, out={v})",
    "torch._foreach_clamp_max_([{v}[..., 0]], 50.0)",
    "{v}[{v} > 50] = 50.0",
    "{v}[..., 0] = {v}[..., 0].clamp(max=50.0)",
    "{v}.data = {v}.clamp(-50, 50)",
    "{v}.masked_fill_({v} != {v}, 0.0)",
    "{v}.copy_({v}.clamp(-50, 50))",
    "x.view(-1).clamp_(-50, 50)",
)

# Side effects.
NOTES = ("LOG.append(len(x))", "LOG.append(h.dim())", "self.calls = getattr(self, 'calls', 0) + 1")

# Conditions on the call: (the condition, what else the source needs).
QUESTIONS = (
    "flag",
    "mask is not None",
    "x.dim() == 3",
    "x.ndim == 1",
    "x.shape[0] == 5",
    "x.shape[0] > 20",
    "len(x) % 2 == 1",
    "x.numel() == 24",
    "str(tuple(x.shape)) == '(3, 8)'",
    "f'{len(x)}' == '5'",
    "tuple(x.shape) in {(5, 8), (1, 8)}",
    "x.dtype == torch.float64",
    "not x.is_contiguous()",
    "x.stride(-1) != 1",
    "x.requires_grad",
    "torch.is_grad_enabled() and not self.training",
    "torch.is_inference_mode_enabled()",
    "torch.is_autocast_enabled('cpu')",
    "self.l0.bias is None",
    "self.l0.weight.requires_grad is False",
    "x.storage_offset() != 0",
    "mask is x",
    "type(self) is not Model",
    "not isinstance(x, torch.Tensor) or type(x) is not torch.Tensor",
    "hasattr(x, 'tag')",
)
# Conditions on a mask that every recorded call gives and that does not affect the result.
MASK_QUESTIONS = (
    "mask is None",
    "mask is x",
    "mask.shape[0] == 3",
    "mask.dim() == 3",
    "mask.dtype == torch.float64",
    "not isinstance(mask, torch.Tensor)",
)


class Writer:
    """Writes one random module."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.changes: list[str] = []
        self.globals: list[str] = []
        self.functions: list[str] = []
        self.config: list[str] = ["unread = 0"]
        self.of_class: list[str] = []
        self.methods: list[str] = []
        self.init: list[str] = []
        self._forward: list[str] = []
        self._number = 0
        self.masked = rng.random() < 0.1  # every recorded call gives a mask

    def source(self) -> str:
        self._write_layers()
        self._write_changes_of_any_module()
        # Some forwards take x alone.
        given = self.masked or any("flag" in line or "mask" in line for line in self._forward)
        plain = not given and self.rng.random() < 0.5
        signature = "self, x" if plain else "self, x, flag=False, mask=None"
        blocks = [
            ["import copy, functools, math", "import torch", "import torch.nn.functional as F"],
            ["from torch import nn", ""],
            ["LOG = []", *self.globals, ""],
            ["class Config:", "    def __init__(self):", *_in(self.config, 2, "self.")],
            *[["", text] for text in self.functions],
            ["", "class Model(nn.Module):", *_in(self.of_class, 1)],
            ["    def __init__(self):", "        super().__init__()"],
            ["        self.config = Config()", *_in(self.init, 2, "self.")],
            *[_in(text.splitlines(), 1) for text in self.methods],
            [f"    def forward({signature}):", *_in(self._forward, 2)],
        ]
        return "\n".join(line for block in blocks for line in block) + "\n"

    # ---- the chain ----

    def _write_layers(self) -> None:
        rng = self.rng
        count = rng.choice((1, 2, 2, 2, 3))
        sizes = [K, *(rng.choice(WIDTHS) for _ in range(count - 1)), rng.choice((K, 6))]
        edits = [rng.randrange(count)] if rng.random() < 0.22 else []
        self._maybe_branch("x")
        for i in range(count):
            value = "x" if i == 0 else "h"
            self.init.append(f"l{i} = nn.Linear({sizes[i]}, {sizes[i + 1]})")
            self._forward.append(f"h = self.l{i}({value})")
            if i in edits:
                self._forward.append(rng.choice(EDITS).format(v="h"))
            if i < count - 1 or rng.random() < 0.2:
                self._write_activation()
            self._maybe_branch("h")
        if rng.random() < 0.1 and sizes[-1] == K:
            self._forward.append("h = x + h")
        if rng.random() < 0.15 and sizes[:3] == [K, K, K]:
            self.init.append("l1.weight = self.l0.weight")
            self.changes += ["m.l1.weight = nn.Parameter(2.0 * m.l1.weight.detach())"] * 3
        if rng.random() < 0.06:
            self._forward.append(rng.choice(NOTES))
        self._write_scale()
        self._write_return()

    def _write_activation(self) -> None:
        self._forward.append(self.rng.choice(ACTIVATIONS)(self))

    def _write_scale(self) -> None:
        n, rng = self.next(), self.rng
        where = rng.choice(("", "", "", "self", "config", "global", "number"))
        if where == "self":
            self.init.append(f"s{n} = 0.5")
            self.changes.append(f"m.s{n} = 3.0")
            self._forward.append(f"h = h * self.s{n}")
        elif where == "config":
            self.config.append(f"s{n} = 0.5")
            self.changes.append(f"m.config.s{n} = 3.0")
            self._forward.append(f"h = self.config.s{n} * h")
        elif where == "global":
            self.globals.append(f"S{n} = 4")
            self.changes.append(f"S{n} = 9")
            self._forward.append(f"h = h / math.sqrt(S{n})")
        elif where == "number":
            self._forward.append("h.mul_(0.5)")

    def _write_return(self) -> None:
        if self.rng.random() < 0.2:
            n, question = self.next(), self._question()
            text = f"def finish{n}(self, x, h, flag=False, mask=None):\n"
            text += f"    return h.tanh() if {question} else h"
            self.functions.append(text)
            given = ", flag, mask" if "flag" in question or "mask" in question else ""
            self._forward.append(f"return finish{n}(self, x, h{given})")
            self.changes.append(f"finish{n} = lambda self, x, h, *a: h + 1.0")
            return
        self._forward.append("return h")

    # ---- branches ----

    def _maybe_branch(self, value: str) -> None:
        rng = self.rng
        if rng.random() > 0.4:
            return
        question = self._question()
        effect = rng.choice(EFFECTS).format(v=value)
        form = rng.choice(("if", "if", "if", "ternary", "return", "factor"))
        if form == "ternary":
            self._forward.append(f"{value} = {value}.tanh() if {question} else {value}")
        elif form == "return":
            self._forward.append(f"if {question}: return {value} * 2.0")
        elif form == "factor":
            self._forward.append(f"if ({question}) is True: {value} = {value} * 2.0")
        else:
            self._forward.append(f"if {question}: {effect}")

    def _question(self) -> str:
        if self.masked and self.rng.random() < 0.6:
            return self.rng.choice(MASK_QUESTIONS)
        if self.rng.random() < 0.45:
            questions = [text for text in QUESTIONS if not (self.masked and "mask" in text)]
            return self.rng.choice(questions)
        return self.rng.choice(READS)(self)

    def next(self) -> int:
        self._number += 1
        return self._number

    # ---- changes that any module allows ----

    def _write_changes_of_any_module(self) -> None:
        self.changes += self.rng.sample(
            [
                "m.l0.weight.data.mul_(2.0)",
                "m.l0.bias.data.add_(1.0)",
                "m.l0.bias = None",
                "m.l0 = nn.Linear(m.l0.in_features, m.l0.out_features)",
                "m.l0.weight = nn.Parameter(torch.ones_like(m.l0.weight))",
                "m.load_state_dict({k: 2.0 * v for k, v in m.state_dict().items()})",
                "m.l0.register_forward_hook(lambda module, args, y: y * 2.0)",
                "m.register_forward_hook(lambda module, args, y: y * 2.0)",
                "m.l0.forward = lambda x: torch.zeros(*x.shape[:-1], m.l0.out_features)",
                "m.forward = lambda x, *a, **k: x * 2.0",
                "m.l0.__class__ = type('Own', (nn.Linear,), {'forward': lambda s, x: 1.0})",
                "Model.forward = lambda self, x, *a, **k: x * 2.0",
                "m.train(not m.training)",
                "m.requires_grad_(False)",
                "m.unread = 3",
                "m.config.unread = 3",
                "m.config = Config()",
                "m = copy.deepcopy(m)",
                "m.double(); m.float()",
                "m.double()",
            ],
            2,
        )


def _in(lines: list[str], depth: int, prefix: str = "") -> list[str]:
    return [" " * 4 * depth + prefix + line for line in lines]
