"""`chain_packed` and `group_packed` on tensors that `pack` did not make, or not like this.

Whatever is wrong with one is told as a ValueError before anything behind the header is read.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator

import pytest
import torch
from tests.support.helpers import ISAS, using_isa
from torch import Tensor

pytestmark = pytest.mark.skipif(not ISAS, reason="no compiled kernels on this machine")

SPEC = "gelu/b;silu/first;identity/b"
SIZES = [(24, 31), (24,), (34, 24), (9, 17), (9,)]
X = torch.randn(5, 31)
# As packed_weights.h has it: eight words of header, three for each layer, whole lines.
WORDS, HEADER = 8, 64 + 3 * 24 + 56
FACTOR = 0x9E3779B97F4A7C15


def packed(dtype: torch.dtype = torch.float32) -> Tensor:
    torch.manual_seed(3)
    tensors = [torch.randn(size).to(dtype) for size in SIZES]
    made: Tensor = torch.ops.torchweld.pack(tensors, SPEC)
    return made


def run(tensor: Tensor, spec: str = SPEC, x: Tensor = X) -> Tensor:
    y: Tensor = torch.ops.torchweld.chain_packed(x, tensor, spec)
    return y


def refused(tensor: Tensor, message: str = "packed", *, spec: str = SPEC, x: Tensor = X) -> None:
    for op in (torch.ops.torchweld.chain_packed, torch.ops.torchweld.group_packed):
        with pytest.raises(ValueError, match=message):
            op(x, tensor, spec)


def words(tensor: Tensor) -> list[int]:
    count = HEADER // 8
    return list(struct.unpack(f"<{count}Q", bytes(tensor[:HEADER].tolist())))


def forged(tensor: Tensor, changes: dict[int, int]) -> Tensor:
    """A copy with these words of the header replaced, and the checksum made right again."""
    own = words(tensor)
    for index, value in changes.items():
        own[index] = value % 2**64
    terms = (word * FACTOR * (2 * i + 1) for i, word in enumerate(own[2:]))
    own[1] = sum(terms) % 2**64
    made = tensor.clone()
    made[:HEADER] = torch.tensor(list(struct.pack(f"<{len(own)}Q", *own)), dtype=torch.uint8)
    return made


def test_a_forged_header_without_changes_is_a_right_one() -> None:
    """Otherwise the tests with changes would prove nothing."""
    tensor = packed()
    assert torch.equal(forged(tensor, {}), tensor)
    assert torch.equal(run(tensor.clone()), run(tensor))


@pytest.mark.parametrize("index", range(HEADER))
def test_every_byte_of_the_header_counts(index: int) -> None:
    tensor = packed()
    right = int(tensor[index])
    for value in {0, 1, 0x7F, 0x80, 0xFF, right ^ 1, right ^ 0x80, (right + 1) % 256} - {right}:
        tensor[index] = value
        refused(tensor)


def extremes(rng: random.Random) -> Iterator[int]:
    yield from (0, 1, 2, 7, 8, 16, 17, 24, 31, 33, 64, 192, 2**31 - 1, 2**31, 2**32, 2**40)
    yield from (2**61, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64 - 64)
    yield from (rng.randrange(2**64) for _ in range(20))


@pytest.mark.parametrize("index", range(2, HEADER // 8))
def test_a_right_checksum_does_not_lead_out_of_the_tensor(index: int) -> None:
    tensor, rng = packed(), random.Random(index)
    last_N = 64 // 8 + 3 * 2 + 1
    for value in extremes(rng):
        made = forged(tensor, {index: value})
        padding = index >= WORDS + 3 * 3
        if torch.equal(made, tensor) or padding:
            continue
        if index == last_N and -(-value // 32) == 1 and value < 33 and value > 0:
            continue  # as many panels: nothing outside is read
        with pytest.raises(ValueError, match="torchweld: "):
            run(made)


def test_several_forged_words_at_once() -> None:
    tensor, rng = packed(), random.Random(0)
    indices = [*range(2, 7), *range(8, 17)]
    for _ in range(500):
        changes = {i: rng.choice(list(extremes(rng))) for i in rng.sample(indices, 3)}
        with pytest.raises(ValueError, match="torchweld: "):
            run(forged(tensor, changes))


@pytest.mark.parametrize("kept", [0, 1, 7, 8, 63, 64, 65, 136, 191, 192, 193, 1000, -64, -1])
def test_a_tensor_that_was_cut_off(kept: int) -> None:
    refused(packed()[:kept].clone())


def test_a_tensor_that_goes_on() -> None:
    tensor = packed()
    refused(torch.cat([tensor, tensor[:64]]), "not as long as it says")


def test_foreign_tensors() -> None:
    generator = torch.Generator().manual_seed(5)
    for length in (0, 1, 64, 192, 4096, 100_000):
        refused(torch.zeros(length, dtype=torch.uint8))
        refused(torch.randint(0, 256, (length,), dtype=torch.uint8, generator=generator))
    refused(torch.randn(5000), "contiguous tensor of uint8")
    refused(packed().view(torch.int8), "contiguous tensor of uint8")
    refused(packed().repeat_interleave(2)[::2], "contiguous tensor of uint8")
    refused(torch.tensor(3, dtype=torch.uint8))


def test_a_tensor_whose_memory_is_gone() -> None:
    tensor = packed().clone()
    tensor.untyped_storage().resize_(128)
    refused(tensor, "too short")


def test_a_tensor_that_starts_anywhere() -> None:
    tensor = packed()
    for shift in (1, 2, 4):
        moved = torch.empty(tensor.numel() + 8, dtype=torch.uint8)[shift : shift + tensor.numel()]
        moved.copy_(tensor)
        refused(moved, "multiple of 8 bytes")


def test_another_spec_dtype_or_x() -> None:
    refused(packed(), "another spec", spec=SPEC.replace("gelu", "tanh"))
    refused(packed(), "another spec", spec="gelu/b")
    refused(packed(torch.bfloat16), "another dtype")
    refused(packed(), "another dtype", x=X.double())
    refused(packed(), "takes 31 features, but x has 30", x=X[:, :30])
    refused(packed(), "x is int64", x=X.long())
    refused(packed(), "a scalar", x=torch.tensor(1.0))


def test_another_instruction_set() -> None:
    made = {}
    for isa in ISAS:
        with using_isa(isa):
            made[isa] = packed()
    for isa in ISAS:
        with using_isa(isa):
            for other, tensor in made.items():
                if {isa, other} == {"avx512", "avx2wide"}:  # registers of one width
                    torch.testing.assert_close(run(tensor), run(made[isa]))
                elif other != isa:
                    refused(tensor, "pack again")


@pytest.mark.parametrize(
    ("tensors", "spec", "message"),
    [
        ([], "gelu", "asks for 1 tensors, 0 were given"),
        ([torch.randn(4)], "gelu", "expected two dimensions"),
        ([torch.randn(0, 4)], "gelu", "every size must be at least 1"),
        ([torch.randn(4, 3).to_sparse()], "gelu", "expected strided"),
        ([torch.randn(4, 3), torch.randn(3)], "gelu/b", "expected .4."),
        ([torch.randn(4, 3), torch.randn(4).double()], "gelu/b", "must have one dtype"),
        ([torch.ones(4, 3, dtype=torch.int32)], "gelu", "int32"),
        ([torch.randn(3, 4)], "gelu/first", "even number"),
    ],
)
def test_what_cannot_be_packed(tensors: list[Tensor], spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        torch.ops.torchweld.pack(tensors, spec)
