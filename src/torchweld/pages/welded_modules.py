"""Which modules of a side are welded: those a plan names, and those that run an op of torchweld."""

from __future__ import annotations

from torchweld.pages.page_records import FRAME_KINDS, PageSide

OURS = "torchweld::"
_OP = FRAME_KINDS.index("op")


def welded_modules(side: PageSide) -> set[int]:
    """Indices into `PageSide.modules`; 0 is the model itself, which is no block."""
    found = {i for i, row in enumerate(side.modules) if row.fate == "welded"}
    return (found | fused_modules(side)) - {0, -1}


def fused_modules(side: PageSide) -> set[int]:
    """Modules whose own ops are of torchweld."""
    found: set[int] = set()
    for flame in (side.flame, side.device_flame):
        if flame is not None:
            ours = {i for i, name in enumerate(flame.names) if name.startswith(OURS)}
            columns = zip(flame.kind, flame.name, flame.module, strict=True)
            found |= {module for kind, name, module in columns if kind == _OP and name in ours}
    return found
