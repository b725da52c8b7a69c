"""What the tests of the diagnosis share: ops joined by their tensors, and findings by rule."""

from __future__ import annotations

from tests.support.made_profiles import Builder, tensor

from torchweld.findings import Finding, diagnose
from torchweld.findings.evidence import Evidence
from torchweld.findings.fusible_ops import blocks_of, linears_of, runs_of
from torchweld.profiles.accounting.time_account import account
from torchweld.profiles.profile import Phase, Profile, Tensor

# With the builder's peaks: 100,000 operations and 10,000 bytes a µs; the smallest op takes 1 µs.
BYTES_A_US = 10_000


class Model(Builder):
    """Ops that give the tensor they make."""

    def run(
        self,
        name: str,
        *inputs: Tensor,
        us: float = 100.0,
        shape: tuple[int, ...] | None = None,
        module: int = 0,
        phase: Phase = "forward",
        storage: int | None = -1,
    ) -> Tensor:
        result = tensor(*(shape or inputs[0].shape), dtype=inputs[0].dtype, storage=storage)
        makes = (result.storage, result.nbytes) if result.storage is not None else None
        self.op(f"aten::{name}", us, module=module, inputs=inputs, makes=makes, phase=phase)
        return result

    def linear(self, x: Tensor, width: int, module: int = 0, **options: object) -> Tensor:
        storage = options.get("storage", -1)
        weight = tensor(x.shape[-1], width, dtype=x.dtype, storage=storage)  # type: ignore[arg-type]
        shape = (*x.shape[:-1], width)
        return self.run("mm", x, weight, shape=shape, module=module, **options)  # type: ignore[arg-type]


def found(profile: Profile, rule: str) -> Finding | None:
    return next((finding for finding in diagnose(profile) if finding.rule == rule), None)


def runs(profile: Profile) -> list[tuple[int, ...]]:
    return [run.ops for run in runs_of(Evidence(profile, account(profile)))]


def blocks(profile: Profile) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    case = Evidence(profile, account(profile))
    return [(b.products, b.between) for b in blocks_of(case, runs_of(case), linears_of(case))]
