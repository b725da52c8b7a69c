"""What is known of a model without timing it: its weights, its work, its outputs in float64."""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from torchweld.core.model_inputs import Workload, tensors_in
from torchweld.core.not_measured import NotMeasured
from torchweld.numerics.model_check import depth_of
from torchweld.numerics.model_results import backward, floating, results
from torchweld.numerics.model_truth import truth_of
from torchweld.profiles.accounting.time_account import account
from torchweld.profiles.recording.live_profile import profile

DIGEST_SAMPLES = 64


def digest(model: nn.Module) -> str:
    """The same for models with the same weights, by a sample of each."""
    found = hashlib.sha256()
    for name, parameter in model.named_parameters():
        flat = parameter.detach().flatten()
        sample = flat[:: max(1, flat.numel() // DIGEST_SAMPLES)].double().cpu().numpy()
        found.update(name.encode() + sample.tobytes())
    return found.hexdigest()


def work_of(model: nn.Module, workload: Workload) -> dict[str, Any]:
    """FLOPs of a call, by torch's own count, and bytes of weights, inputs and outputs."""
    with FlopCounterMode(display=False) as counter:
        output = workload.run(model)
    return _work(model, workload, output, counter.get_total_flops())


def training_work_of(model: nn.Module, workload: Workload) -> dict[str, Any]:
    """The same for forward and backward: weights are read twice, their gradients written once."""
    with FlopCounterMode(display=False) as counter:
        output = workload.run(model)
        backward(floating(output))
    found = _work(model, workload, output, counter.get_total_flops())
    return {**found, "moved_bytes": 3 * found["moved_bytes"]}


def _work(model: nn.Module, workload: Workload, output: Any, flops: int) -> dict[str, Any]:
    weights = {id(p): p.nbytes for p in model.parameters()}
    ends = [*workload.tensors(), *tensors_in(output)]
    dtypes = Counter(str(p.dtype).removeprefix("torch.") for p in model.parameters())
    return {
        "flops": flops,
        "weight_bytes": sum(weights.values()),
        "moved_bytes": sum(weights.values()) + sum(t.nbytes for t in ends),
        "dtype": dtypes.most_common(1)[0][0] if dtypes else "float32",
    }


def truth_arrays(model: nn.Module, workload: Workload) -> dict[str, Any]:
    """A `ModelTruth` as arrays: the outputs without rounding, and with other rounding."""
    found = truth_of(model, workload, False)
    eager = results(model, workload, False)
    return {
        "dtypes": {n: str(t.dtype).removeprefix("torch.") for n, t in eager.items()},
        "exact": None if found.exact is None else _arrays(found.exact),
        "jittered": [_arrays(one) for one in found.jittered],
        "why_not_exact": found.why_not_exact,
        "depth": depth_of(model),
    }


def _arrays(results: dict[str, Tensor]) -> dict[str, Any]:
    wide = (torch.float32, torch.float64)
    return {n: (t if t.dtype in wide else t.float()).numpy() for n, t in results.items()}


def profiled_host(model: nn.Module, workload: Workload) -> tuple[float, float] | NotMeasured:
    """Host time by a profile: starting ops, and Python, dispatcher and views between them.

    In µs, and as a share of the profiled step.
    """
    given = workload.inputs if workload.inputs is not None else workload.run
    step = account(profile(model, [given])).step
    if isinstance(step, NotMeasured):
        return step
    host_us = step.launch_us + step.host_us
    return host_us, host_us / step.total_us if step.total_us > 0 else 1.0
