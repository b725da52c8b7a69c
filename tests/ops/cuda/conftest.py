"""The CUDA kernels run on the host here, on CPU tensors."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
from tests.support.helpers import ISAS

collect_ignore_glob: list[str] = []
if not ISAS or shutil.which("g++") is None:  # their gradients are the compiled op's
    collect_ignore_glob.append("test_*.py")


@pytest.fixture
def cuda_on_host(one_thread: None) -> Iterator[None]:
    from tests.support.cuda_on_host import standing_in

    with standing_in():
        yield
