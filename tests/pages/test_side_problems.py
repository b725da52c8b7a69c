"""Sides that were damaged in a file are refused, and say where."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from tests.support.block_profiles import blocks, fused_blocks, on_device

from torchweld.core.records import RecordError, from_plain, json_text
from torchweld.pages.flame_diff import diff_of
from torchweld.pages.page_records import FlameDiff, PageSide
from torchweld.pages.profile_view import side_of


def put(*keys: str | int, value: Any) -> Callable[[Any], None]:
    """Sets what stands at these keys."""

    def damage(data: Any) -> None:
        for key in keys[:-1]:
            data = data[key]
        data[keys[-1]] = value

    return damage


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (put("modules", 1, "parent", value=1), r"modules.parent\[1\] = 1"),
        (put("modules", 1, "parent", value=-1), r"modules.parent\[1\] = -1"),
        (put("flame", "parent", 2, value=2), r"parent\[2\] = 2"),
        (put("flame", "name", 0, value=999), r"name\[0\] = 999"),
        (put("flame", "kind", 0, value=5), r"kind\[0\] = 5; expected is one of 5"),
        (put("flame", "module", 0, value=999), r"flame.module\[0\] = 999"),
        (put("device_flame", "calls", value=[]), "different lengths"),
        (put("timeline", "lanes", 0, "depth", value=[]), "different lengths"),
        (put("timeline", "lanes", 0, "name_index", 0, value=999), r"name_index\[0\] = 999"),
        (put("timeline", "lanes", 0, "module", 0, value=999), r"lane.module\[0\] = 999"),
    ],
)
def test_a_damaged_side_is_refused(damage: Callable[[Any], None], complaint: str) -> None:
    data = json.loads(json_text(side_of(on_device(blocks(1, live=False)))))
    from_plain(PageSide, data)
    damage(data)
    with pytest.raises(RecordError, match=complaint):
        from_plain(PageSide, data)


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (put("after_us", value=[]), "different lengths"),
        (put("parent", 1, value=7), r"parent\[1\] = 7"),
        (put("name", 0, value=999), r"name\[0\] = 999"),
    ],
)
def test_a_damaged_difference_is_refused(damage: Callable[[Any], None], complaint: str) -> None:
    data = json.loads(json_text(diff_of(side_of(blocks(1)), side_of(fused_blocks(1)))))
    from_plain(FlameDiff, data)
    damage(data)
    with pytest.raises(RecordError, match=complaint):
        from_plain(FlameDiff, data)
