"""What the terminal shows, as plain data for `--json`: dicts, lists, numbers and strings.

In: a `Profile`, its `Account`, findings. Out: a dict ready for `json.dumps`. Single ops and kernels
are summed up; `Profile.save` keeps them all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any

from torchweld.core.not_measured import NotMeasured
from torchweld.core.records import to_plain
from torchweld.profiles.accounting.account import Account
from torchweld.profiles.profile import Profile
from torchweld.report.op_table import op_rows

if TYPE_CHECKING:
    from torchweld.findings import Finding


def summary(profile: Profile, account: Account, findings: Sequence[Finding]) -> dict[str, Any]:
    """Names of fields are those of the dataclasses; times are µs per step, as their names say."""
    device = profile.device
    brief = replace(device, kernels=(), calls=(), gaps=()) if device is not None else None
    data = {
        "torchweld_summary": 1,
        "about": asdict(profile.about),
        "step_us": profile.step_us,
        "explained": account.explained,
        "step": account.step,
        "modules": _modules(profile, account),
        "ops": [_plain(row) for row in op_rows(profile, account, None, "time")],
        "findings": [{**to_plain(f), "sentence": f.sentence} for f in findings],
        "timing": _whole(profile.timing),
        "memory": _whole(profile.memory),
        "device": _whole(brief),
        "compilation": _whole(profile.compilation),
        "notices": [*profile.notices, *account.notices],
    }
    return {key: _finite(_plain(item)) for key, item in data.items()}


def _modules(profile: Profile, account: Account) -> list[dict[str, Any]]:
    why = profile.step_us
    found = []
    for module, accounted in zip(profile.modules, account.modules, strict=True):
        data = {**asdict(module), "total_us": module.total_us, "account": accounted}
        if isinstance(why, NotMeasured):
            data |= {name: why for name in data if name.endswith("_us")}
        found.append(data)
    return found


def _whole(record: Any) -> Any:
    return None if record is None else asdict(record)


def _plain(value: Any) -> Any:
    """Every field of a record, those with their default too; `{"not_measured": why}` for none."""
    if isinstance(value, NotMeasured):
        return to_plain(value)
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become null."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
