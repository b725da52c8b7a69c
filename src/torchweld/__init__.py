"""torchweld: fused Linears and MLPs for PyTorch, measured and verified.

Importing it registers `torch.ops.torchweld` and imports nothing heavy but torch; public names are
loaded when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from torchweld import ops as _ops  # registers torch.ops.torchweld

if TYPE_CHECKING:
    from torchweld.blocks import Layer
    from torchweld.errors import TorchweldError
    from torchweld.functional import linears, mlp
    from torchweld.measuring import Comparison, compare
    from torchweld.modules import FusedMLP
    from torchweld.packing import packed_bytes, repack

__version__ = "0.1.0"

_WHERE = {
    "Comparison": "measuring",
    "FusedMLP": "modules",
    "Layer": "blocks",
    "TorchweldError": "errors",
    "compare": "measuring",
    "linears": "functional",
    "mlp": "functional",
    "packed_bytes": "packing",
    "repack": "packing",
}
__all__ = [
    "Comparison",
    "FusedMLP",
    "Layer",
    "TorchweldError",
    "compare",
    "linears",
    "mlp",
    "packed_bytes",
    "repack",
]
assert _ops


def __getattr__(name: str) -> Any:
    where = _WHERE.get(name)
    if where is None:
        raise AttributeError(f"module 'torchweld' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"torchweld.{where}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
