"""Each rule on a real model that shows it, and on one that is like it and does not.

Profiles are short and taken on one thread; peaks are given, far above any machine's, so that what
is found depends on what the model does and not on how fast it ran.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.support.made_profiles import make_peaks
from tests.support.measured import measured
from torch import Tensor, nn
from torch.nn import functional as F

from torchweld import FusedMLP
from torchweld.findings import Finding, combined_bound, diagnose
from torchweld.findings.evidence import Evidence
from torchweld.findings.rules_fusion import mlp_blocks
from torchweld.machine import measured_peaks
from torchweld.profiles.accounting.time_account import account
from torchweld.profiles.profile import Profile
from torchweld.profiles.recording import live_profile

# Large enough that no product is mostly its start.
WIDTH = 256
PEAKS = make_peaks(gflops=1e6, gbps=1e5, threads=1)


@pytest.fixture(autouse=True)
def _short_profiles(monkeypatch: pytest.MonkeyPatch, calm_profiles: None) -> None:
    monkeypatch.setattr(measured_peaks, "peaks", lambda measure=False: PEAKS)
    monkeypatch.setattr(live_profile, "SET_SECONDS", 0.0)
    torch.set_num_threads(1)


def findings(
    model: Callable[..., object], inputs: Any = None, **options: Any
) -> dict[str, Finding]:
    return by_rule(live_profile.profile(model, inputs, steps=2, **options))


def by_rule(profile: Profile) -> dict[str, Finding]:
    return {finding.rule: finding for finding in diagnose(profile)}


class Function(nn.Module):
    """A module that runs a function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class MLP(nn.Module):
    def __init__(self, width: int, between: nn.Module, gated: bool = False) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.gate = nn.Linear(width, 2 * width) if gated else None
        self.between = between
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.between(self.up(x))
        if self.gate is not None:
            hidden = hidden * self.gate(x)
        y: Tensor = self.down(hidden)
        return y


class Layers(nn.Module):
    """Residual blocks after a norm."""

    def __init__(self, make: Callable[[], nn.Module], width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlps = nn.ModuleList(make() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for mlp in self.mlps:
            x = x + mlp(self.norm(x))
        return x


# ---- fusion ----


def test_mlp_blocks_of_a_model() -> None:
    found = findings(Layers(lambda: MLP(WIDTH, nn.GELU()), WIDTH), torch.randn(4, WIDTH))
    assert found["mlp-block"].title == "3 MLP blocks as separate ops"
    assert found["mlp-block"].modules == ("mlps.*",)
    assert "3 × (4 × 256 → 512 → 256, gelu, float32)" in " ".join(found["mlp-block"].evidence)
    assert found["few-rows"].modules == ("mlps.*.up", "mlps.*.down")
    assert "shared-input" not in found
    assert "pointwise-chain" not in found


def test_gated_blocks_with_dropout_in_training() -> None:
    make = lambda: MLP(WIDTH, nn.Sequential(nn.SiLU(), nn.Dropout(0.1)), gated=True)  # noqa: E731
    profile = live_profile.profile(
        Layers(make, WIDTH), torch.randn(2, 5, WIDTH), training=True, steps=2
    )
    found = by_rule(profile)
    assert found["mlp-block"].title == "3 gated MLP blocks as separate ops"
    assert "10 × 256 → 512 → 256, gated" in " ".join(found["mlp-block"].evidence)
    assert found["shared-input"].title.startswith("6 Linears")
    (draft,) = mlp_blocks(Evidence(profile, account(profile)))
    claimed = {profile.ops[s.number].phase for s in draft.claims if s.of == "op"}
    assert claimed == {"forward", "backward"}
    names = {profile.ops[s.number].name for s in draft.claims if s.of == "op"}
    assert not [name for name in names if "AccumulateGrad" in name]


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: MLP(WIDTH, nn.LayerNorm(2 * WIDTH)), id="a norm between the Linears"),
        pytest.param(lambda: MLP(WIDTH, nn.Identity()), id="nothing between the Linears"),
        pytest.param(
            lambda: FusedMLP((WIDTH, 2 * WIDTH, WIDTH), activation="gelu"), id="fused already"
        ),
    ],
)
def test_models_without_a_block_to_fuse(make: Callable[[], nn.Module]) -> None:
    found = findings(Layers(make, WIDTH), torch.randn(4, WIDTH))
    assert "mlp-block" not in found
    assert "pointwise-chain" not in found


def test_a_chain_of_pointwise_ops() -> None:
    chain = Function(lambda x: x.mul(2).add(1).abs().neg().mul(3).sub(1))
    found = findings(chain, torch.randn(1000, 1000))
    assert found["pointwise-chain"].title == "1 chain of element-wise ops"
    assert "(mul → add → abs → neg → mul → sub)" in " ".join(found["pointwise-chain"].evidence)
    # Six passes that read and write, of which one is needed.
    assert "40.0 MB per step move between them" in found["pointwise-chain"].evidence[1]
    assert found["pointwise-chain"].bound > 2


def test_pointwise_ops_with_a_reduction_between_are_no_chain() -> None:
    found = findings(Function(lambda x: x.mul(2).cumsum(1).abs().cumsum(1)), torch.randn(500, 500))
    assert "pointwise-chain" not in found


class Attention(nn.Module):
    def __init__(self, shared: bool) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(64, 64) for _ in range(3))
        self.shared = shared

    def forward(self, x: Tensor) -> Tensor:
        other = x if self.shared else x.clone()
        third = x if self.shared else x.clone()
        return F.scaled_dot_product_attention(self.q(x), self.k(other), self.v(third))


@pytest.mark.parametrize("shared", [True, False])
def test_linears_that_share_an_input(shared: bool) -> None:
    found = findings(Attention(shared), torch.randn(1, 8, 64))
    assert ("shared-input" in found) == shared
    if shared:
        assert "8 × 64 → 64 + 64 + 64" in " ".join(found["shared-input"].evidence)


# ---- products ----


def test_16_bit_products() -> None:
    model = nn.Linear(256, 256, bias=False).bfloat16()
    assert "slow-16-bit" in findings(model, torch.randn(128, 256).bfloat16())
    assert "slow-16-bit" not in findings(model.float(), torch.randn(128, 256))


def test_few_and_many_rows() -> None:
    assert "few-rows" in findings(nn.Linear(512, 512), torch.randn(8, 512))
    assert "few-rows" not in findings(nn.Linear(512, 512), torch.randn(128, 512))


# ---- the host ----


def many(x: Tensor) -> Tensor:
    for _ in range(100):
        x = x.cumsum(0)
    return x


def test_a_step_of_overhead() -> None:
    def python(x: Tensor) -> Tensor:
        time.sleep(0.01)
        return many(x)

    found = findings(Function(python), torch.ones(2))
    assert found["overhead-bound"].bound > 2
    assert "overhead-bound" not in findings(Function(lambda x: x @ x), torch.ones(1000, 1000))


def test_a_storm_of_views() -> None:
    def views(x: Tensor) -> Tensor:
        for _ in range(50):
            x = x.transpose(0, 1).unsqueeze(0).squeeze(0)
        return x + 1

    found = findings(Function(views), torch.ones(4, 4))
    assert found["metadata-storm"].title.startswith("150 views")
    assert "metadata-storm" not in findings(Function(many), torch.ones(4, 4))


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            time.sleep(0.3)
            self.table = torch.ones(4, 4)
        return x @ self.table


def test_a_cold_first_step() -> None:
    model = Lazy()
    cold = findings(model, torch.ones(4, 4))["cold-start"]
    assert cold.bound == 1.0
    assert cold.once_us > 290_000
    assert "cold-start" not in findings(model, torch.ones(4, 4))


def test_copies_that_a_layout_forces() -> None:
    found = findings(Function(lambda x: x.transpose(0, 1).contiguous()), torch.randn(500, 600))
    assert found["layout-copy"].title.startswith("1 copy")
    assert "contiguous (1)" in " ".join(found["layout-copy"].evidence)
    found = findings(Function(lambda x: x.transpose(0, 1).clone()), torch.randn(500, 600))
    assert "layout-copy" not in found  # which keeps the layout it was given


def test_a_linear_on_a_transposed_input() -> None:
    """A mixer has this: the product cannot take the strides, and copies."""
    mixer = nn.Linear(300, 4)
    found = findings(Function(lambda x: mixer(x.transpose(1, 2))), torch.randn(4, 300, 200))
    assert "linear (1)" in " ".join(found["layout-copy"].evidence)
    assert "layout-copy" not in findings(Function(mixer), torch.randn(4, 200, 300))


# ---- torch.compile ----


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("fresh_dynamo")
def test_recompilation_and_guards() -> None:
    scaled = torch.compile(lambda x, k: x * k, backend="eager", dynamic=False)
    sizes = iter(range(1, 1000))
    calls = 0

    def changing() -> None:
        nonlocal calls
        calls += 1
        # Another shape in the second call; afterwards always the same two.
        scaled(torch.ones(next(sizes) if calls < 3 else 1), 2.0)

    found = findings(changing)
    assert found["recompilation"].title == "Code was compiled again 1 time"
    assert any(line.startswith("because") for line in found["recompilation"].evidence)
    assert found["guard-cost"].saved_us > 0

    steady = findings(lambda: scaled(torch.ones(1), 2.0))
    assert "recompilation" not in steady


def test_an_eager_model_has_no_guards() -> None:
    assert "guard-cost" not in findings(Function(many), torch.ones(4, 4))


# ---- all together ----


def test_a_live_profile_s_findings_are_of_one_step() -> None:
    profile = live_profile.profile(
        Layers(lambda: MLP(WIDTH, nn.GELU()), WIDTH), torch.randn(4, WIDTH), steps=2
    )
    found = diagnose(profile)
    assert found
    for finding in found:
        assert 0 <= finding.saved_us <= measured(profile.step_us)
        assert finding.cause
        assert finding.action
        assert finding.evidence
    together = measured(combined_bound(found, profile))
    assert together >= max(finding.bound for finding in found)
