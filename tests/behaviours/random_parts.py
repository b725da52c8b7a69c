"""Writes parts of random forwards that read something, and changes that a user may make to it.

A part is a function of the writer. It adds globals, attributes or methods to the source, adds to
`changes`, and gives a line of forward (activations) or an expression (reads). Changes replace an
activation by atan: sin would turn small rounding errors of large values into large ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.behaviours.random_pieces import Writer

FUNCTIONS = ("F.relu", "F.gelu", "F.silu", "torch.tanh", "torch.sigmoid")
MODULES = ("nn.ReLU()", "nn.GELU()", "nn.SiLU()", "nn.Tanh()", "nn.LeakyReLU(0.1)")
# Equal to relu for ordinary numbers only.
NEARLY = (
    "torch.where(h > 0, h, 0.0)",
    "F.relu(h).masked_fill(h != h, 0.0)",
    "F.relu(torch.nan_to_num(h))",
    "F.relu(h.clamp(max=torch.finfo(h.dtype).max))",
    "F.relu(h).clamp(max=60000.0)",
)


# ---- activations: each gives a line of forward ----


def _function(w: Writer) -> str:
    return f"h = {w.rng.choice(FUNCTIONS)}(h)"


def _in_place(w: Writer) -> str:
    return w.rng.choice(("h.relu_()", "h = F.relu_(h)", "F.relu(h, inplace=True)", "h.tanh_()"))


def _module(w: Writer) -> str:
    n, kind = w.next(), w.rng.choice(MODULES)
    w.init.append(f"act{n} = {kind}")
    w.changes += [
        f"m.act{n} = nn.Softplus()",
        f"m.act{n}.forward = torch.atan",
        f"m.act{n}.__class__ = nn.Softsign",
    ]
    if "Leaky" in kind:
        w.changes += [f"m.act{n}.negative_slope = 0.7"] * 2
    return f"h = self.act{n}(h)"


def _sequential(w: Writer) -> str:
    n = w.next()
    w.init.append(f"seq{n} = nn.Sequential({w.rng.choice(MODULES)})")
    w.changes += [
        f"m.seq{n}.append(nn.Softsign())",
        f"m.seq{n}[0] = nn.Softsign()",
        f"m.seq{n}.insert(0, nn.Softsign())",
        f"del m.seq{n}[0]",
    ]
    return f"h = self.seq{n}(h)"


def _method(w: Writer) -> str:
    n = w.next()
    w.methods.append(f"def act{n}(self, h):\n    return {w.rng.choice(FUNCTIONS)}(h)")
    w.changes += [
        f"m.act{n} = torch.atan",
        f"Model.act{n} = lambda self, h: torch.atan(h)",
        f"Model.act{n}.__code__ = (lambda self, h: torch.atan(h)).__code__",
    ]
    return f"h = self.act{n}(h)"


def _helper(w: Writer) -> str:
    n = w.next()
    w.functions.append(f"def act{n}(h):\n    return {w.rng.choice(FUNCTIONS)}(h)")
    w.functions.append(f"def outer{n}(h):\n    return act{n}(h)")
    w.changes += [
        f"act{n} = torch.atan",
        f"act{n}.__code__ = (lambda h: torch.atan(h)).__code__",
    ]
    return f"h = {w.rng.choice(('act', 'outer'))}{n}(h)"


def _helper_with_default(w: Writer) -> str:
    n = w.next()
    w.functions.append(f"def act{n}(h, slope=0.1):\n    return F.leaky_relu(h, slope)")
    w.changes.append(f"act{n}.__defaults__ = (0.9,)")
    return f"h = act{n}(h)"


def _table(w: Writer) -> str:
    n = w.next()
    w.globals.append(f"ACTS{n} = {{'act': {w.rng.choice(FUNCTIONS)}}}")
    w.changes += [f"ACTS{n}['act'] = torch.atan", f"ACTS{n} = {{'act': torch.atan}}"]
    return f"h = ACTS{n}['act'](h)"


def _named_by_config(w: Writer) -> str:
    n = w.next()
    w.globals.append(f"ACTS{n} = {{'relu': F.relu, 'atan': torch.atan}}")
    w.config.append(f"act{n} = 'relu'")
    w.changes += [f"m.config.act{n} = 'atan'", f"ACTS{n}['relu'] = torch.atan"]
    return f"h = ACTS{n}[self.config.act{n}](h)"


def _attribute(w: Writer) -> str:
    n = w.next()
    w.init.append(f"fn{n} = {w.rng.choice(FUNCTIONS)}")
    w.changes.append(f"m.fn{n} = torch.atan")
    return f"h = self.fn{n}(h)"


def _partial(w: Writer) -> str:
    n = w.next()
    w.init.append(f"fn{n} = functools.partial(F.leaky_relu, negative_slope=0.1)")
    w.changes.append(f"m.fn{n}.keywords['negative_slope'] = 0.9")
    return f"h = self.fn{n}(h)"


def _nearly(w: Writer) -> str:
    return f"h = {w.rng.choice(NEARLY)}"


def _mutable_default(w: Writer) -> str:
    n = w.next()
    text = f"def act{n}(h, factors=[]):\n    for factor in factors:\n        h = h * factor\n"
    w.functions.append(text + "    return F.relu(h)")
    w.changes.append(f"act{n}.__defaults__[0].append(3.0)")
    return f"h = act{n}(h)"


def _callable_object(w: Writer) -> str:
    n = w.next()
    text = f"class Act{n}:\n    slope = 0.1\n    def __call__(self, h):\n"
    w.functions.append(text + "        return F.leaky_relu(h, self.slope)")
    w.init.append(f"act{n} = Act{n}()")
    w.changes += [f"m.act{n}.slope = 0.9", f"Act{n}.slope = 0.9", f"m.act{n} = torch.atan"]
    return f"h = self.act{n}(h)"


ACTIVATIONS: tuple[Callable[[Writer], str], ...] = (
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
    _nearly,
    _mutable_default,
    _callable_object,
)


# ---- reads of things that can change: each gives an expression that is false at first ----


def _instance(w: Writer) -> str:
    n = w.next()
    w.init.append(f"a{n} = False")
    w.changes.append(f"m.a{n} = True")
    return f"self.a{n}"


def _of_class(w: Writer) -> str:
    n = w.next()
    w.of_class.append(f"c{n} = False")
    w.changes += [f"m.c{n} = True", f"Model.c{n} = True"]
    return w.rng.choice((f"self.c{n}", f"type(self).c{n}", f"Model.c{n}"))


def _of_config(w: Writer) -> str:
    n = w.next()
    w.config.append(f"f{n} = False")
    w.changes += [f"m.config.f{n} = True", f"m.config = Config(); m.config.f{n} = True"]
    return f"self.config.f{n}"


def _global(w: Writer) -> str:
    n = w.next()
    w.globals.append(f"G{n} = False")
    w.changes.append(f"G{n} = True")
    return f"G{n}"


def _entry(w: Writer) -> str:
    n = w.next()
    w.init.append(f"held{n} = {{}}")
    w.changes.append(f"m.held{n}['on'] = True")
    return f"self.held{n}.get('on')"


def _length(w: Writer) -> str:
    n = w.next()
    w.globals.append(f"LIST{n} = []")
    w.changes.append(f"LIST{n}.append(1)")
    return f"len(LIST{n}) > 0"


def _absent(w: Writer) -> str:
    n = w.next()
    w.changes += [f"m.g{n} = True", f"Model.g{n} = True"]
    return w.rng.choice((f"getattr(self, 'g{n}', False)", f"hasattr(self, 'g{n}')"))


def _computed_name(w: Writer) -> str:
    n = w.next()
    w.of_class.append(f"k{n} = False")
    w.changes.append(f"m.k{n} = True")
    return f"getattr(self, 'k' + str({n}))"


def _property(w: Writer) -> str:
    n = w.next()
    w.of_class.append(f"_p{n} = False")
    w.methods.append(f"@property\ndef p{n}(self):\n    return self._p{n}")
    w.changes += [f"m._p{n} = True", f"Model.p{n} = True"]
    return f"self.p{n}"


def _asked_by_helper(w: Writer) -> str:
    n = w.next()
    w.init.append(f"a{n} = False")
    w.functions.append(f"def asked{n}(module):\n    return module.a{n}")
    w.changes += [f"m.a{n} = True", f"asked{n} = lambda module: True"]
    return f"asked{n}(self)"


def _closure(w: Writer) -> str:
    n = w.next()
    w.functions.append(
        f"def made{n}():\n    on = False\n    def asked():\n        return on\n"
        "    def turn():\n        nonlocal on\n        on = True\n    return asked, turn\n"
        f"asked{n}, turn{n} = made{n}()"
    )
    w.changes.append(f"turn{n}()")
    return f"asked{n}()"


def _nested(w: Writer) -> str:
    n = w.next()
    w.functions.append(f"class Inner{n}:\n    on = False")
    w.config.append(f"inner{n} = Inner{n}()")
    w.changes += [f"m.config.inner{n}.on = True", f"Inner{n}.on = True"]
    return f"self.config.inner{n}.on"


def _missed(w: Writer) -> str:
    n = w.next()
    w.methods.append(
        f"def asked{n}(self):\n    try:\n        return self.e{n}\n"
        "    except AttributeError:\n        return False"
    )
    w.changes.append(f"m.e{n} = True")
    return f"self.asked{n}()"


READS: tuple[Callable[[Writer], str], ...] = (
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
    _closure,
    _nested,
    _missed,
)
