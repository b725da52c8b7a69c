"""Models of transformers as targets; what needs no transformers is tested without."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

from torchweld.core.errors import TorchweldError
from torchweld.models import transformers_models
from torchweld.models.targets import resolve
from torchweld.models.transformers_models import type_inside

HAS_TRANSFORMERS = importlib.util.find_spec("transformers") is not None
needs_transformers = pytest.mark.skipif(
    not HAS_TRANSFORMERS, reason="transformers is not installed"
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("gpt2", ("gpt2", {})),
        ("gpt2?n_layer=2,n_embd=64", ("gpt2", {"n_layer": 2, "n_embd": 64})),
        (
            "a/b?act=gelu_new, drop=0.1,tie=false",
            ("a/b", {"act": "gelu_new", "drop": 0.1, "tie": False}),
        ),
        ("x?sizes=[1,2],flag=True,none=null", ("x", {"sizes": [1, 2], "flag": True, "none": None})),
    ],
)
def test_hf_requests(text: str, expected: tuple[str, dict[str, object]]) -> None:
    assert transformers_models.parse_request(text) == expected


@pytest.mark.parametrize("text", ["", "?n_layer=2", "gpt2?", "gpt2?n_layer", "gpt2?n_layer="])
def test_hf_requests_that_are_not_understood(text: str) -> None:
    with pytest.raises(TorchweldError, match=r"hf:gpt2\?n_layer=2,n_embd=64"):
        transformers_models.parse_request(text)


def test_without_transformers_the_error_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(
        TorchweldError, match=r'needs transformers.*pip install "torchweld\[models\]"'
    ):
        resolve("hf:gpt2")


TINY = "hf:gpt2?n_layer=1,n_embd=32,n_head=2,vocab_size=100"


@needs_transformers
def test_hf_model_with_random_weights_and_default_inputs() -> None:
    before = torch.get_rng_state()
    target = resolve(TINY)
    again = resolve(TINY)
    assert torch.equal(torch.get_rng_state(), before)
    assert type(target.model).__name__ == "GPT2LMHeadModel"
    assert [w.name for w in target.workloads] == ["input_ids 1x128 int64"]
    assert target.notes == ("random weights",)
    with torch.no_grad():
        a, b = (t.workloads[0].run(t.model).logits for t in (target, again))
    assert a.shape == (1, 128, 100)
    assert torch.equal(a, b)


@needs_transformers
@pytest.mark.parametrize(
    ("text", "kind", "takes"),
    [
        ("llama?num_hidden_layers=1,vocab_size=99,dtype=bfloat16", "LlamaForCausalLM", 1),
        ("bert?num_hidden_layers=1,hidden_size=24,vocab_size=99", "BertModel", 1),
        ("t5?num_layers=1,num_decoder_layers=1,d_model=24", "T5ForConditionalGeneration", 2),
        ("vit?num_hidden_layers=1,hidden_size=24,image_size=32", "ViTModel", 1),
        ("gpt2?num_hidden_layers=1,n_embd=24,max_position_embeddings=9", "GPT2LMHeadModel", 1),
    ],
)
def test_hf_types_run_on_their_default_inputs(text: str, kind: str, takes: int) -> None:
    target = resolve(f"hf:{text}")
    assert type(target.model).__name__ == kind
    assert len(target.workloads[0].tensors()) == takes
    with torch.no_grad():
        target.workloads[0].run(target.model)
    expected = torch.bfloat16 if "bfloat16" in text else torch.float32
    assert {p.dtype for p in target.model.parameters()} == {expected}


@needs_transformers
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hf:gtp2", r"unknown model type or folder 'gtp2'; did you mean hf:gpt2.*nothing is downl"),
        ("hf:gpt2?layers=2", r"GPT2Config has no 'layers'; did you mean n_layer"),
        ("hf:gpt2?n_embd=65", r"cannot build it: ValueError: .*divisible"),
        ("hf:gpt2?dtype=int8", "unknown dtype 'int8'"),
        (
            "hf:mistral?num_hidden_layers=1,vocab_size=2000000000",
            r"GB of weights, more than half .*num_hidden_layers=2",
        ),
        (
            "hf:whisper?encoder_layers=1,decoder_layers=1,d_model=24",
            "its forward takes input_features,",
        ),
    ],
)
def test_hf_mistakes(text: str, message: str) -> None:
    with pytest.raises(TorchweldError, match=message):
        resolve(text)


@needs_transformers
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("bert-base-uncased", "bert"),
        ("BERT-large", "bert"),
        ("gpt2-medium", "gpt2"),
        ("distilgpt2", "gpt2"),
        ("meta-llama/Llama-3-8B", "llama"),
        ("TinyLlama/TinyLlama-1.1B", "llama"),
        ("distilbert-base-cased", "distilbert"),
        ("google/vit-base-patch16-224", "vit"),
        ("openai/clip-vit-base-patch32", "clip"),
        ("EleutherAI/gpt-j-6b", "gptj"),
        ("EleutherAI/gpt-neo-1.3B", "gpt_neo"),
        ("google/gemma-2b", "gemma"),
        ("google/gemma-2-9b", "gemma2"),
        ("google/flan-t5-base", "t5"),
        ("xlm-roberta-base?num_hidden_layers=2", "xlm-roberta"),
    ],
)
def test_the_name_of_a_checkpoint_is_met_with_its_type(name: str, kind: str) -> None:
    with pytest.raises(TorchweldError, match=rf"did you mean hf:{kind}\? .*nothing is downloaded"):
        resolve(f"hf:{name}")


@pytest.mark.parametrize("name", ["adopted", "org/abc-def", "lmsys/vicuna-7b", "", "/", "a//b"])
def test_a_name_with_no_type_in_it_is_not_guessed(name: str) -> None:
    assert type_inside(name, ["opt", "bert", "gpt2"]) is None


@needs_transformers
def test_hf_folder_with_and_without_weights(tmp_path: Path) -> None:
    source = resolve(TINY, seed=5)
    source.model.save_pretrained(tmp_path)  # type: ignore[operator]
    loaded = resolve(f"hf:{tmp_path}")
    assert loaded.notes == ()
    for a, b in zip(source.model.parameters(), loaded.model.parameters(), strict=True):
        assert torch.equal(a, b)
    for path in tmp_path.glob("*.safetensors"):
        path.unlink()
    assert resolve(f"hf:{tmp_path}").notes == ("random weights",)
    (tmp_path / "config.json").unlink()
    with pytest.raises(TorchweldError, match=r"the folder has no config\.json"):
        resolve(f"hf:{tmp_path}")


@needs_transformers
def test_generation_with_a_cache_is_recorded_and_runs_again() -> None:
    from torchweld.core.model_inputs import as_workloads, record

    target = resolve(TINY)
    ids = target.workloads[0].tensors()[0][:, :6]
    with record(target.model) as inputs, torch.no_grad():
        target.model.generate(  # type: ignore[operator]
            ids, max_new_tokens=4, do_sample=False, pad_token_id=0
        )
    assert sum(inputs.counts) == 4
    workloads = as_workloads(inputs)
    rows = [one.inputs.kwargs["input_ids"].shape[1] for one in workloads if one.inputs]
    assert len(rows) == len(workloads)
    assert rows[0] == 6
    assert set(rows[1:]) == {1}
    with torch.no_grad():
        for workload in workloads:
            first, second = (workload.run(target.model).logits for _ in range(2))
            assert torch.equal(first, second), "the cache grew from run to run"


@needs_transformers
def test_code_in_a_folder_is_neither_run_nor_asked_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"model_type": "mine", "auto_map": {"AutoConfig": "mine.MineConfig"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with pytest.raises(TorchweldError, match="transformers cannot build it"):
        resolve(f"hf:{tmp_path}")
    assert not (tmp_path / "ran").exists()
