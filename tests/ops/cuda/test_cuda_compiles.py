"""nvcc compiles the CUDA kernels for real GPUs: without a warning, and within what is on record.

Nothing here runs on a GPU. Without nvcc the tests are skipped, and say so.
"""

from __future__ import annotations

import pytest
from tests.support import cuda_compiling
from tests.support.cuda_compiling import TARGETS, compiled, instructions, recorded, uses

pytestmark = pytest.mark.skipif(
    cuda_compiling.compiler() is None, reason="nvcc is not there: CUDA kernels are not compiled"
)

RENEW = "`python -m tests.support.cuda_compiling` writes the record anew; then review the change"


@pytest.mark.parametrize("target", TARGETS)
def test_kernels_compile_and_take_what_is_on_record(target: str) -> None:
    found = uses(compiled(target))
    kernels = recorded()
    assert set(found) == set(kernels), RENEW
    for name, use in found.items():
        known = kernels[name][target]
        assert use.spills <= known["spills"], f"{name} spills {use.spills} bytes; {RENEW}"
        assert use.stack <= known["stack"], f"{name} has a stack of {use.stack} bytes; {RENEW}"
        if cuda_compiling.version() == cuda_compiling.recorded_version():
            assert use.registers == known["registers"], f"{name}: {use.registers}; {RENEW}"


@pytest.mark.parametrize("target", TARGETS)
def test_products_of_16_bits_run_on_tensor_cores(target: str) -> None:
    compiled(target)
    counted = instructions(target)
    assert counted["HMMA"] > 0
    assert counted["LDSM"] > 0


def test_the_record_is_read_as_ptxas_writes_it() -> None:
    said = """
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_ZN31_GLOBAL__N__21torchweld_cuda_narrowIfEEvNS_11NarrowChainEPT_' for 'sm_80'
ptxas info    : Function properties for _ZN31_GLOBAL__N__21torchweld_cuda_narrowIfEEvNS_11NarrowChainEPT_
    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 96 registers, used 1 barriers, 8 bytes cumulative stack size, 16 bytes smem, 4 bytes cmem[0]
"""  # noqa: E501
    use = cuda_compiling.KernelUse(registers=96, shared=16, stack=8, spills=16)
    assert uses(said) == {"torchweld_cuda_narrow fp32": use}
