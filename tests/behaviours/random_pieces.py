"""The pieces that random forwards are written of.

A piece adds what it needs to the source (globals, attributes, methods), gives a few lines of
`forward`, and adds to `changes` what a user might do later to what those lines read.
"""

from __future__ import annotations

import random
from collections.abc import Callable

K = 8  # features that come in
WIDTHS = (8, 8, 12)

FUNCTIONS = ("F.relu", "F.gelu", "F.silu", "torch.tanh", "torch.sigmoid")
MODULES = ("nn.ReLU()", "nn.GELU()", "nn.SiLU()", "nn.Tanh()", "nn.LeakyReLU(0.1)")

# What a branch does to a value that is not to be done when recorded.
EFFECTS = (
    "{v} = {v} * 2.0",
    "{v} = {v}.tanh()",
    "{v} = -{v}",
    "{v} = {v} + 1.0",
    "{v}.clamp_(-0.1, 0.1)",
    "{v}.view(-1).mul_(3.0)",
    "{v} = torch.where({v} > 0, {v}, 0.0)",
)

# Changes in place that ordinary inputs do not come near.
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

# Questions about the call: (the question, what else the source needs).
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
)


class Writer:
    """One random module."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.changes: list[str] = []
        self._globals: list[str] = []
        self._functions: list[str] = []
        self._config: list[str] = ["unread = 0"]
        self._class: list[str] = []
        self._methods: list[str] = []
        self._init: list[str] = []
        self._forward: list[str] = []
        self._number = 0

    def source(self) -> str:
        self._write_layers()
        self._write_changes_of_any_module()
        # Some forwards take nothing beside x.
        simple = not any("flag" in line or "mask" in line for line in self._forward)
        plain = simple and self.rng.random() < 0.5
        signature = "self, x" if plain else "self, x, flag=False, mask=None"
        blocks = [
            ["import copy, functools, math", "import torch", "import torch.nn.functional as F"],
            ["from torch import nn", ""],
            [*self._globals, ""],
            ["class Config:", "    def __init__(self):", *_in(self._config, 2, "self.")],
            *[["", text] for text in self._functions],
            ["", "class Model(nn.Module):", *_in(self._class, 1)],
            ["    def __init__(self):", "        super().__init__()"],
            ["        self.config = Config()", *_in(self._init, 2, "self.")],
            *[_in(text.splitlines(), 1) for text in self._methods],
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
            self._init.append(f"l{i} = nn.Linear({sizes[i]}, {sizes[i + 1]})")
            self._forward.append(f"h = self.l{i}({value})")
            if i in edits:
                self._forward.append(rng.choice(EDITS).format(v="h"))
            if i < count - 1 or rng.random() < 0.2:
                self._write_activation()
            self._maybe_branch("h")
        if rng.random() < 0.1 and sizes[-1] == K:
            self._forward.append("h = x + h")
        self._write_scale()
        self._write_return()

    def _write_activation(self) -> None:
        self._forward.append(self.rng.choice(_ACTIVATIONS)(self))

    def _write_scale(self) -> None:
        n, rng = self._next(), self.rng
        where = rng.choice(("", "", "", "self", "config", "global", "number"))
        if where == "self":
            self._init.append(f"s{n} = 0.5")
            self.changes.append(f"m.s{n} = 3.0")
            self._forward.append(f"h = h * self.s{n}")
        elif where == "config":
            self._config.append(f"s{n} = 0.5")
            self.changes.append(f"m.config.s{n} = 3.0")
            self._forward.append(f"h = self.config.s{n} * h")
        elif where == "global":
            self._globals.append(f"S{n} = 4")
            self.changes.append(f"S{n} = 9")
            self._forward.append(f"h = h / math.sqrt(S{n})")
        elif where == "number":
            self._forward.append("h.mul_(0.5)")

    def _write_return(self) -> None:
        if self.rng.random() < 0.2:
            n, question = self._next(), self._question()
            text = f"def finish{n}(self, x, h, flag=False, mask=None):\n"
            text += f"    return h.tanh() if {question} else h"
            self._functions.append(text)
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
        if self.rng.random() < 0.45:
            return self.rng.choice(QUESTIONS)
        return self.rng.choice(_READS)(self)

    def _next(self) -> int:
        self._number += 1
        return self._number

    # ---- what can be done to any module ----

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


# ---- activations: each gives a line of forward ----


def _function(w: Writer) -> str:
    return f"h = {w.rng.choice(FUNCTIONS)}(h)"


def _in_place(w: Writer) -> str:
    return w.rng.choice(("h.relu_()", "h = F.relu_(h)", "F.relu(h, inplace=True)", "h.tanh_()"))


def _module(w: Writer) -> str:
    n, kind = w._next(), w.rng.choice(MODULES)
    w._init.append(f"act{n} = {kind}")
    w.changes += [
        f"m.act{n} = nn.Softplus()",
        f"m.act{n}.forward = torch.sin",
        f"m.act{n}.__class__ = nn.Softsign",
    ]
    if "Leaky" in kind:
        w.changes += [f"m.act{n}.negative_slope = 0.7"] * 2
    return f"h = self.act{n}(h)"


def _sequential(w: Writer) -> str:
    n = w._next()
    w._init.append(f"seq{n} = nn.Sequential({w.rng.choice(MODULES)})")
    w.changes += [
        f"m.seq{n}.append(nn.Softsign())",
        f"m.seq{n}[0] = nn.Softsign()",
        f"m.seq{n}.insert(0, nn.Softsign())",
        f"del m.seq{n}[0]",
    ]
    return f"h = self.seq{n}(h)"


def _method(w: Writer) -> str:
    n = w._next()
    w._methods.append(f"def act{n}(self, h):\n    return {w.rng.choice(FUNCTIONS)}(h)")
    w.changes += [
        f"m.act{n} = torch.sin",
        f"Model.act{n} = lambda self, h: torch.sin(h)",
        f"Model.act{n}.__code__ = (lambda self, h: torch.sin(h)).__code__",
    ]
    return f"h = self.act{n}(h)"


def _helper(w: Writer) -> str:
    n = w._next()
    w._functions.append(f"def act{n}(h):\n    return {w.rng.choice(FUNCTIONS)}(h)")
    w._functions.append(f"def outer{n}(h):\n    return act{n}(h)")
    w.changes += [
        f"act{n} = torch.sin",
        f"act{n}.__code__ = (lambda h: torch.sin(h)).__code__",
    ]
    return f"h = {w.rng.choice(('act', 'outer'))}{n}(h)"


def _helper_with_default(w: Writer) -> str:
    n = w._next()
    w._functions.append(f"def act{n}(h, slope=0.1):\n    return F.leaky_relu(h, slope)")
    w.changes.append(f"act{n}.__defaults__ = (0.9,)")
    return f"h = act{n}(h)"


def _table(w: Writer) -> str:
    n = w._next()
    w._globals.append(f"ACTS{n} = {{'act': {w.rng.choice(FUNCTIONS)}}}")
    w.changes += [f"ACTS{n}['act'] = torch.sin", f"ACTS{n} = {{'act': torch.sin}}"]
    return f"h = ACTS{n}['act'](h)"


def _named_by_config(w: Writer) -> str:
    n = w._next()
    w._globals.append(f"ACTS{n} = {{'relu': F.relu, 'sin': torch.sin}}")
    w._config.append(f"act{n} = 'relu'")
    w.changes += [f"m.config.act{n} = 'sin'", f"ACTS{n}['relu'] = torch.sin"]
    return f"h = ACTS{n}[self.config.act{n}](h)"


def _attribute(w: Writer) -> str:
    n = w._next()
    w._init.append(f"fn{n} = {w.rng.choice(FUNCTIONS)}")
    w.changes.append(f"m.fn{n} = torch.sin")
    return f"h = self.fn{n}(h)"


def _partial(w: Writer) -> str:
    n = w._next()
    w._init.append(f"fn{n} = functools.partial(F.leaky_relu, negative_slope=0.1)")
    w.changes.append(f"m.fn{n}.keywords['negative_slope'] = 0.9")
    return f"h = self.fn{n}(h)"


_ACTIVATIONS: tuple[Callable[[Writer], str], ...] = (
    _function,
    _function,
    _in_place,
    _module,
    _sequential,
    _method,
    _helper,
    _helper_with_default,
    _table,
    _named_by_config,
    _attribute,
    _partial,
)


# ---- questions about what can change: each gives an expression that is false at first ----


def _instance(w: Writer) -> str:
    n = w._next()
    w._init.append(f"a{n} = False")
    w.changes.append(f"m.a{n} = True")
    return f"self.a{n}"


def _of_class(w: Writer) -> str:
    n = w._next()
    w._class.append(f"c{n} = False")
    w.changes += [f"m.c{n} = True", f"Model.c{n} = True"]
    return w.rng.choice((f"self.c{n}", f"type(self).c{n}", f"Model.c{n}"))


def _of_config(w: Writer) -> str:
    n = w._next()
    w._config.append(f"f{n} = False")
    w.changes += [f"m.config.f{n} = True", f"m.config = Config(); m.config.f{n} = True"]
    return f"self.config.f{n}"


def _global(w: Writer) -> str:
    n = w._next()
    w._globals.append(f"G{n} = False")
    w.changes.append(f"G{n} = True")
    return f"G{n}"


def _entry(w: Writer) -> str:
    n = w._next()
    w._init.append(f"held{n} = {{}}")
    w.changes.append(f"m.held{n}['on'] = True")
    return f"self.held{n}.get('on')"


def _length(w: Writer) -> str:
    n = w._next()
    w._globals.append(f"LIST{n} = []")
    w.changes.append(f"LIST{n}.append(1)")
    return f"len(LIST{n}) > 0"


def _absent(w: Writer) -> str:
    n = w._next()
    w.changes += [f"m.g{n} = True", f"Model.g{n} = True"]
    return w.rng.choice((f"getattr(self, 'g{n}', False)", f"hasattr(self, 'g{n}')"))


def _computed_name(w: Writer) -> str:
    n = w._next()
    w._class.append(f"k{n} = False")
    w.changes.append(f"m.k{n} = True")
    return f"getattr(self, 'k' + str({n}))"


def _property(w: Writer) -> str:
    n = w._next()
    w._class.append(f"_p{n} = False")
    w._methods.append(f"@property\ndef p{n}(self):\n    return self._p{n}")
    w.changes += [f"m._p{n} = True", f"Model.p{n} = True"]
    return f"self.p{n}"


def _asked_by_helper(w: Writer) -> str:
    n = w._next()
    w._init.append(f"a{n} = False")
    w._functions.append(f"def asked{n}(module):\n    return module.a{n}")
    w.changes += [f"m.a{n} = True", f"asked{n} = lambda module: True"]
    return f"asked{n}(self)"


_READS: tuple[Callable[[Writer], str], ...] = (
    _instance,
    _of_class,
    _of_config,
    _global,
    _entry,
    _length,
    _absent,
    _computed_name,
    _property,
    _asked_by_helper,
)


def _in(lines: list[str], depth: int, prefix: str = "") -> list[str]:
    return [" " * 4 * depth + prefix + line for line in lines]
