"""The ways of a GPU run in Triton's interpreter here, on CPU tensors."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.support.helpers import ISAS

collect_ignore_glob: list[str] = []
if not ISAS:  # their gradients are the compiled op's
    collect_ignore_glob.append("test_*.py")


@pytest.fixture
def interpreted_gpu(one_thread: None) -> Iterator[None]:
    from tests.support.interpreted_gpu import standing_in

    with standing_in():
        yield
