"""A small run of `benchmarks/large_page.py`, and that it would notice lost time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from large_page import check_sums, run, write_trace

from torchweld.pages.profile_view import side_of
from torchweld.profiles.recording.trace_profile import read_trace


def test_a_made_up_trace_is_read_in_full_and_becomes_a_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.json.gz"
    write_trace(path, 3000)
    assert run(path, None) == 0
    assert "spans" in capsys.readouterr().out
    profile = read_trace(path)
    assert profile.memory is not None
    assert {"model.layers.0.mlp.up", "model.layers.23"} <= {m.path for m in profile.modules}
    assert {op.phase for op in profile.ops} == {"forward", "backward"}
    side = side_of(profile)
    assert side.flame is not None
    short = replace(side.flame, own_us=tuple(us / 2 for us in side.flame.own_us))
    with pytest.raises(SystemExit, match="add up to"):
        check_sums(profile, replace(side, flame=short))
