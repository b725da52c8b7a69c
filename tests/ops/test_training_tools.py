"""Others' training loops: transformers' Trainer, accelerate and peft train models with FusedMLPs.

Each trains a model with fused blocks and the same model with plain ones, from the same start.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.helpers import ISAS, last_run
from tests.support.training_steps import backward_runs
from torch import Tensor, nn
from torch.utils.data import DataLoader

import torchweld as tw

pytestmark = [
    pytest.mark.skipif(not ISAS, reason="no compiled kernels on this machine"),
    pytest.mark.usefixtures("one_thread"),
]


def needs(*packages: str) -> pytest.MarkDecorator:
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"{', '.join(missing)} is not installed")


WIDTH, HIDDEN, VOCAB, TOKENS, STEPS = 16, 64, 32, 8, 4


class PlainMlp(nn.Module):
    """What FusedMLP computes, child by child."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.gelu(self.up(x)))
        return y


class Small(nn.Module):
    """Two blocks between an embedding and a head; its forward is as Trainer wants it."""

    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.mixed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.mixed(self.tokens(input_ids))
        for block in self.blocks:
            x = x + block(x)
        logits = self.head(x)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


def fused(**how: Any) -> Small:
    return Small(lambda: tw.FusedMLP((WIDTH, HIDDEN, WIDTH), **how))


def plain() -> Small:
    return Small(PlainMlp)


def examples(count: int = 32) -> list[dict[str, Tensor]]:
    random = torch.Generator().manual_seed(5)
    ids = torch.randint(VOCAB, (count, TOKENS), generator=random)
    return [{"input_ids": row, "labels": (row + 1) % VOCAB} for row in ids]


def falling(losses: list[float], wanted: list[float], tolerance: float = 1e-4) -> None:
    assert len(losses) == len(wanted) == STEPS
    assert losses == pytest.approx(wanted, rel=tolerance)
    assert losses[-1] < losses[0]


@pytest.fixture
def own_accelerator() -> Iterator[None]:
    """The first accelerator of a process decides about precision for all."""
    yield
    state = importlib.import_module("accelerate.state")
    state.AcceleratorState._reset_state(reset_partial_state=True)


def backwards() -> int:
    count: int = last_run()["backwards"]
    return count


# ---- transformers' Trainer ----


def by_trainer(model: nn.Module, folder: Path, **settings: Any) -> list[float]:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=4,
        learning_rate=3e-2,
        seed=1,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        **settings,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=examples())
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@needs("transformers", "accelerate")
@pytest.mark.usefixtures("own_accelerator")
@pytest.mark.parametrize(
    ("settings", "tolerance"),
    [
        ({}, 1e-4),
        pytest.param(
            {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1}, 1e-4, marks=pytest.mark.slow
        ),
        pytest.param({"bf16": True}, 2e-2, marks=pytest.mark.slow),
    ],
    ids=["as it is", "accumulating", "bf16"],
)
def test_trainer(settings: dict[str, Any], tolerance: float, tmp_path: Path) -> None:
    steps = STEPS * settings.get("gradient_accumulation_steps", 1)
    with backward_runs(calls=2 * steps):
        losses = by_trainer(fused(), tmp_path, **settings)
    falling(losses, by_trainer(plain(), tmp_path, **settings), tolerance)


# ---- accelerate ----


def by_accelerate(model: nn.Module) -> list[float]:
    accelerate = importlib.import_module("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data: Any = DataLoader(examples(4 * STEPS), batch_size=4)  # type: ignore[arg-type]
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    losses = []
    for batch in data:
        with accelerator.accumulate(model):
            loss = model(**batch)["loss"]
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@needs("accelerate")
@pytest.mark.usefixtures("own_accelerator")
def test_accelerate() -> None:
    with backward_runs(calls=2 * STEPS):
        losses = by_accelerate(fused())
    falling(losses, by_accelerate(plain()))


# ---- peft ----


def with_adapters(model: nn.Module, targets: list[str]) -> nn.Module:
    import peft

    torch.manual_seed(7)
    config = peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
    adapted: nn.Module = peft.get_peft_model(model, config)
    return adapted


def by_hand(model: nn.Module) -> list[float]:
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-2)
    losses = []
    for start in range(0, 4 * STEPS, 4):
        rows = examples()[start : start + 4]
        batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        loss = model(**batch)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@needs("peft")
def test_adapters_beside_frozen_blocks() -> None:
    """The blocks pass gradients on: one product per weight, none for weights that are frozen."""
    model = with_adapters(fused(), ["mixed", "head"])
    with backward_runs(calls=2 * STEPS):
        losses = by_hand(model)
    assert last_run()["products"] == 2
    falling(losses, by_hand(with_adapters(plain(), ["mixed", "head"])))
    assert all(p.grad is None for name, p in model.named_parameters() if "lora" not in name)


@needs("peft")
def test_adapters_inside_the_blocks_are_heeded() -> None:
    """A child that peft has wrapped runs as peft made it, and so the block is not fused."""
    model = with_adapters(fused(), ["up", "down"])
    before = backwards()
    with pytest.warns(UserWarning, match="runs its children one by one, because up is a Linear"):
        losses = by_hand(model)
    assert backwards() == before
    falling(losses, by_hand(with_adapters(plain(), ["up", "down"])))


@needs("peft")
def test_adapters_that_are_merged_run_fused_again() -> None:
    model = with_adapters(fused(), ["up", "down"])
    merged = model.merge_and_unload()  # type: ignore[operator]
    with backward_runs(calls=2):
        merged.requires_grad_()
        merged(**{name: value[None] for name, value in examples(1)[0].items()})["loss"].backward()
