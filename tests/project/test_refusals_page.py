"""docs/refusals.md: every refusal that it quotes is really made, in these words.

A quote is code at the start of a list's item; … stands for what differs. There is a case for each
quote, and a quote for each case.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scripts.doc_pages import read_page
from tests.support import module_zoo as zoo
from tests.support.module_zoo import H, K, N
from torch import Tensor, nn
from torch.nn.utils import parametrize

import torchweld as tw
from torchweld.cli.main import run
from torchweld.core.blocks import parse_spec
from torchweld.ops.backends import Form, select
from torchweld.timing import compare
from torchweld.welds.refusal_reasons import _WORDS

PAGE = "docs/refusals.md"
X = torch.randn(3, 5, K, generator=torch.Generator().manual_seed(1))
Forward = Callable[[Any, Tensor], Any]


class Written(nn.Module):
    """Two Linears, and a forward that the case writes."""

    def __init__(self, forward: Forward, **attributes: Any) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(K, H), nn.Linear(H, N)
        self.act = nn.ReLU()
        self.scale = nn.Parameter(torch.randn(N))
        self.written = forward
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Any:
        return self.written(self, x)


def refused(model: nn.Module, inputs: Any = X, path: str = "", training: bool = False) -> str:
    """Why `tw.find` refuses a module."""
    found = tw.find(model, inputs, training=training).refused
    (refusal,) = (one for one in found if one.path == path)
    return refusal.reason


def written(forward: Forward, **options: Any) -> Callable[[], str]:
    return lambda: refused(Written(forward), **options)


def said(error: type[BaseException], call: Callable[[], Any]) -> str:
    """What an error says."""
    with pytest.raises(error) as caught:
        call()
    return str(caught.value)


def hooked() -> str:
    model = zoo.Functional(F.relu)
    model.a.register_forward_hook(lambda *_: None)
    return refused(model)


def own_forward() -> str:
    model = zoo.Functional(F.relu)
    plain = model.a.forward
    model.a.forward = lambda x: 2 * plain(x)  # type: ignore[assignment, method-assign]
    return refused(model)


def parametrised() -> str:
    class Doubled(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return 2 * weight

    model = zoo.Functional(F.relu)
    parametrize.register_parametrization(model.a, "weight", Doubled())
    return refused(model)


def several_types() -> str:
    model = zoo.GatedWithDropout().bfloat16()
    model.wo.float()
    return refused(model, X.bfloat16())


def under_autocast() -> str:
    def call(model: nn.Module) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            model(X)

    return refused(zoo.Functional(F.relu), call)


def two_faced() -> str:
    def call(model: nn.Module) -> None:
        model.eval()(X)
        model.train()(X)

    return refused(Written(lambda m, x: m.b(F.relu(m.a(x)) if m.training else m.a(x))), call)


def counted(model: Any, x: Tensor) -> Tensor:
    model.calls = getattr(model, "calls", 0) + 1
    return model.b(F.relu(model.a(x)))


def clocked(model: Any, x: Tensor) -> Tensor:
    return model.b(F.relu(model.a(x))) * (1 + random.random() * 0)


TABLE = np.ones(1)


def by_array(model: Any, x: Tensor) -> Tensor:
    return model.b(F.relu(model.a(x))) * float(TABLE[0])


def computed_name(model: Any, x: Tensor) -> Tensor:
    return getattr(model, "".join(["b"]))(F.relu(model.a(x)))


def by_class(model: Any, x: Tensor) -> Tensor:
    return model.b(F.relu(model.a(x))) if type(model) is Written else x


def fast_path() -> str:
    layer = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=True)
    return refused(layer, torch.randn(2, 5, 16))


def fused_already() -> str:
    return refused(nn.Sequential(nn.Linear(K, K), tw.FusedMLP((K, H, N))), X, "1")


def with_no_grad(model: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        h = F.relu(model.a(x))
    return model.b(h)


def small() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 3)).eval(), torch.randn(4, 5)


def form() -> Form:
    up, down = torch.nn.Linear(5, 7), torch.nn.Linear(7, 3)
    tensors = [up.weight, up.bias, down.weight, down.bias]
    return Form.of("chain", parse_spec("gelu/b;identity/b"), tensors)


def of_backend(dtype: torch.dtype, device: str) -> Callable[[], str]:
    where = torch.device(device)
    return lambda: said(
        tw.TorchweldError, lambda: select(form(), [(4, 5)], dtype, where, name="cpu")
    )


def by_another_plan() -> str:
    model, x = small()
    plan = tw.plan(model, x, force=True)
    other = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3)).eval()
    return said(tw.TorchweldError, lambda: tw.apply(other, plan))


def without_rows_range() -> str:
    model, x = small()
    (block,) = tw.find(model, x)
    decision = tw.Decision(block=block, by_rows=((4, 1, tw.Choice(backend="cpu")),))
    return said(tw.TorchweldError, lambda: tw.weld(model, [decision]))


def no_seconds() -> str:
    found = compare(lambda: sum(range(100)), lambda: sum(range(100)), budget_s=1e-6)
    assert isinstance(found, tw.Comparison)
    assert found.verdict == "not measured"
    return found.reason


CASES: dict[str, Callable[[], str]] = {
    # not a chain
    "a layer norm between the Linears": lambda: refused(zoo.NormInside()),
    "a layer norm before the first Linear (…)": lambda: refused(zoo.Inline()),
    "works along a dimension other than the last": lambda: refused(zoo.SpatialGate(tokens=5)),
    "reorders or leaves out rows": lambda: refused(
        Written(lambda m, x: m.b(F.relu(m.a(x.transpose(0, 1))))), torch.randn(4, 4, K)
    ),
    "adds its argument … to the result": lambda: refused(
        zoo.WithResidual(), tw.Inputs(X, residual=X.clone())
    ),
    "aten.mul with its … after the last Linear": written(
        lambda m, x: m.b(F.relu(m.a(x))) * m.scale
    ),
    # not a known activation
    "… over a product is neither an activation nor a gate that torchweld has": written(
        lambda m, x: m.b(F.relu6(m.a(x)))
    ),
    "gate and up have different inputs": written(lambda m, x: m.b(F.silu(m.a(x)) * m.a(x.abs()))),
    # types and weights
    "weights and input of several types: …": several_types,
    "… was called under autocast, which casts weights at every call": under_autocast,
    "a weight that is computed by …": lambda: refused(zoo.ScaledWeight()),
    "… is parametrised (…)": parametrised,
    "weights of 3 dimensions (…)…": lambda: refused(
        zoo.Experts(), tw.Inputs(torch.randn(7, K), torch.randint(3, (7,)))
    ),
    # code that is not in the graph
    "… has forward hooks": hooked,
    "… has a forward of its own, set on the instance": own_forward,
    "… were not called: the weights are read directly, or not used": fast_path,
    "runs as one op already: nothing inside was analysed": fused_already,
    # what a call leaves behind
    "sets its … at every call": written(counted),
    "changes its argument … in place": written(lambda m, x: m.b(F.relu(m.a(x.mul_(1.0))))),
    # what can change unseen
    "calls …, which cannot be inspected": written(clocked),
    "depends on …, an array that can change unseen": written(by_array),
    "reads an attribute whose name is computed (…)": written(computed_name),
    "asks for the class of an object, which welding changes": written(by_class),
    # values, shapes, modes
    "its control flow or its shapes depend on values": lambda: refused(zoo.Branching()),
    "returns a tuple instead of a tensor": written(lambda m, x: (m.b(m.a(x)), x)),
    "computes different things in evaluation and in training": two_faced,
    "drops out in evaluation too": written(lambda m, x: m.b(F.dropout(m.a(x), 0.1))),
    "a dropout before the first Linear": written(
        lambda m, x: m.b(F.relu(m.a(F.dropout(x, 0.1)))), training=True
    ),
    "switches gradients on or off inside": written(with_no_grad, training=True),
    # requests
    "it runs on …; the tensors are on …": of_backend(torch.float32, "cuda"),
    "… is not one of …; cast with .to()": of_backend(torch.complex64, "cpu"),
    "these can: …": of_backend(torch.float32, "cuda"),
    "unknown backend …; did you mean …? there are: …": lambda: said(
        tw.TorchweldError, lambda: tw.Choice(backend="gpu")
    ),
    "unknown activation …; there are: …": lambda: said(
        tw.TorchweldError, lambda: tw.FusedMLP((5, 7, 3), activation="swish")
    ),
    "its table has rows … to …; expected 1 ≤ first ≤ last": without_rows_range,
    "the plan does not fit: … computes … and not …; plan again, or give …": by_another_plan,
    "… of … rounds that a verdict needs fitted into … s, and they show …": no_seconds,
}
# Words -> a command that ends with them and with exit code 2, beside the files of `files`.
COMMANDS = {
    "unknown built-in model …; did you mean …": "fuse gpd",
    "there is no file …": "fuse model.py:make",
    "names of checkpoints are not among them, nothing is …": "profile hf:bert-base-uncased",
    'is JSON, but not a trace: it has no list "traceEvents"': "profile other.json",
    "… is not a plan that torchweld saved": "bench policy --plan other.json",
    "the history … cannot be used (…)": "history --history other.json",
    "… is there already; --force replaces it": "profile policy --trace other.json",
    "there is no baseline …": "gate --baseline main policy --no-time",
    "--quick and --budget each set the time for measuring; give only one": (
        "fuse policy --quick --budget 9"
    ),
}


def quotes() -> list[str]:
    """Code that an item of a list begins with."""
    return re.findall(r"^- `([^`]+)`", read_page(PAGE), flags=re.MULTILINE)


def has(words: str, message: str) -> bool:
    """Whether a message has these words; … is anything."""
    return re.search(".*?".join(map(re.escape, words.split("…"))), message, re.DOTALL) is not None


def test_every_quote_has_a_case() -> None:
    assert sorted(quotes()) == sorted([*CASES, *COMMANDS])


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("words", CASES)
def test_it_is_refused_in_these_words(words: str) -> None:
    message = CASES[words]()
    assert has(words, message), message


@pytest.mark.parametrize("words", COMMANDS)
def test_the_command_is_refused_in_these_words(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if "hf:" in COMMANDS[words]:
        pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHWELD_HISTORY", str(tmp_path / "history.sqlite"))
    (tmp_path / "other.json").write_text('{"a": 1}')
    assert run(COMMANDS[words].split()) == 2
    message = " ".join(capsys.readouterr().err.split())
    assert has(words, message), message
    assert (tmp_path / "other.json").read_text() == '{"a": 1}'


def test_the_ops_that_have_words_are_the_kinds_that_the_page_names() -> None:
    """A new kind of op in words belongs on the page."""
    text = " ".join(read_page(PAGE).split())
    item = text.partition("in the same way ")[2].partition(" An op without a word")[0]
    named = ("norm", "softmax", "attention", "mean", "sum", "sort", "embedding", "convolution")
    assert all(word in item for word in named)
    known = (*named, "concatenation", "variance", "largest", "activation", "product")
    assert [words for words in _WORDS.values() if not any(word in words for word in known)] == []
