"""The way `cuda` can be captured into a CUDA graph, as far as its ops on the host show it.

`tests/ops/gpu/test_graph_capture.py` searches its source; `test_real_gpu.py` captures, on a GPU.
"""

from __future__ import annotations

import pytest
from tests.support.capture_watch import assert_nothing_waits
from tests.support.cuda_on_host import launched

pytestmark = pytest.mark.usefixtures("cuda_on_host")


def test_no_op_that_runs_waits() -> None:
    assert_nothing_waits("cuda")
    assert {"torchweld_cuda_narrow", "torchweld_cuda_narrow_backward"} <= set(launched())
