"""Tests of kernels are left out where there are none; this keeps that from hiding a loss."""

import os
import shutil

import pytest

from torchweld import ops


@pytest.mark.skipif(
    "TORCHWELD_NO_EXT" in os.environ or not any(map(shutil.which, ("g++", "clang++", "c++"))),
    reason="built without kernels on purpose",
)
def test_where_there_is_a_compiler_the_kernels_are_in_use() -> None:
    assert ops.compiled is not None, ops.problem
    assert ops.compiled.isas()[ops.compiled.isa()] == (True, True)
