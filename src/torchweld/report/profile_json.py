"""What the terminal shows, as plain data for `--json`: dicts, lists, numbers and strings.

In: a `Profile`, its `Account`, findings. Out: a dict ready for `json.dumps`. Single ops and kernels
are summed up; `Profile.save` keeps them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torchweld.core.not_measured import NotMeasured
from torchweld.core.records import to_plain
from torchweld.profiles.accounting.device_products import host_times, products_of
from torchweld.profiles.accounting.time_account import Account
from torchweld.profiles.profile import Device, Profile
from torchweld.report.op_table import op_rows

if TYPE_CHECKING:
    from torchweld.findings import Finding


def summary(profile: Profile, account: Account, findings: Sequence[Finding]) -> dict[str, Any]:
    """Names of fields are those of the dataclasses; times are µs per step, as their names say."""
    device = profile.device
    brief = replace(device, kernels=(), calls=(), gaps=()) if device is not None else None
    data = {
        "torchweld_summary": 1,
        "about": profile.about,
        "step_us": profile.step_us,
        "explained": account.explained,
        "step": account.step,
        "modules": _modules(profile, account),
        "ops": op_rows(profile, account, None, "time"),
        "findings": [{**to_plain(f), "sentence": f.sentence} for f in findings],
        "timing": profile.timing,
        "memory": profile.memory,
        "faults": profile.faults,
        "device": brief,
        "host": host_times(profile, device) if device is not None else None,
        "products": _products(device) if device is not None else [],
        "compilation": profile.compilation,
        "notices": [*profile.notices, *account.notices],
    }
    plain: dict[str, Any] = _plain(data)
    return plain


def _products(device: Device) -> list[dict[str, Any]]:
    """What the names of the products' kernels say; null where they do not."""
    return [
        {"name": row.name, "count": row.count, "us": row.us, "gemm": row.gemm}
        for row in products_of(device)
    ]


def _modules(profile: Profile, account: Account) -> list[dict[str, Any]]:
    why = profile.step_us
    found = []
    for module, accounted in zip(profile.modules, account.modules, strict=True):
        data = {**_plain(module), "total_us": module.total_us, "account": accounted}
        if isinstance(why, NotMeasured):
            data |= {name: why for name in data if name.endswith("_us")}
        found.append(data)
    return found


def _plain(value: Any) -> Any:
    """`value` as plain data with every field. JSON has no NaN and no infinity: they become null."""
    return to_plain(value, all_fields=True, odd=lambda _: None)
