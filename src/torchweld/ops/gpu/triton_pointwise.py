"""Pointwise Triton kernels: bias and activation, gates, their gradients, and dropout masks.

All take any strides, so gate and up may be halves of one tensor, or lie in turn. Rows are the first
axis of the grid, which has room for them. Offsets are 64 bits wide: Triton passes a stride below
2^31 in 32 bits, so columns are widened before they are multiplied by one. M rows, N columns.
"""

from __future__ import annotations

import triton
import triton.language as tl

from torchweld.ops.gpu.triton_math import activation, activation_gradient


@triton.jit
def tile_of(row_tile, column_tile, M, N, BM: tl.constexpr, BN: tl.constexpr):
    """Rows, columns and which of them exist; rows in 64 bits."""
    rows = row_tile.to(tl.int64) * BM + tl.arange(0, BM)
    columns = column_tile * BN + tl.arange(0, BN)
    return rows, columns, (rows[:, None] < M) & (columns[None, :] < N)


@triton.jit
def kept_factor(mask, rows, columns, there, stride, scale):
    """What dropout multiplies by, from one bit per value: 0 or `scale`."""
    bytes_ = tl.load(mask + rows[:, None] * stride + columns[None, :] // 8, mask=there, other=0)
    return ((bytes_.to(tl.int32) >> (columns[None, :] % 8)) & 1).to(tl.float32) * scale


@triton.jit
def row_of(bias, columns, N, stride):
    at = bias + columns.to(tl.int64) * stride
    return tl.load(at, mask=columns < N, other=0.0).to(tl.float32)[None, :]


@triton.jit
def torchweld_pointwise(
    gate, up, gate_bias, up_bias, y, mask,
    M, N, gate_m, gate_n, up_m, up_n, gate_bias_n, up_bias_n, mask_m, scale, p0, p1,
    ACT: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr, DROPS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """y = act(gate + bias) * (up + bias), contiguous; without a gate, act(gate + bias)."""
    rows, columns, there = tile_of(tl.program_id(0), tl.program_id(1), M, N, BM, BN)
    at_gate = gate + rows[:, None] * gate_m + columns[None, :].to(tl.int64) * gate_n
    z = tl.load(at_gate, mask=there, other=0.0).to(tl.float32)
    if HAS_BIAS:
        z += row_of(gate_bias, columns, N, gate_bias_n)
    value = activation(z, p0, p1, ACT)
    if GATED:
        at_up = up + rows[:, None] * up_m + columns[None, :].to(tl.int64) * up_n
        v = tl.load(at_up, mask=there, other=0.0).to(tl.float32)
        if HAS_BIAS:
            v += row_of(up_bias, columns, N, up_bias_n)
        value *= v
    if DROPS:
        value *= kept_factor(mask, rows, columns, there, mask_m, scale)
    at_y = y + rows[:, None] * N + columns[None, :]
    tl.store(at_y, value.to(y.dtype.element_ty), mask=there)


@triton.jit
def store_gradients(
    d, rows, columns, there, tile,
    z, v, h, gate_grad, up_grad, gate_sums, up_sums, mask,
    M, N, grad_m, grad_n, mask_m, scale, p0, p1,
    ACT: tl.constexpr, GATED: tl.constexpr, DROPS: tl.constexpr,
    HIDDEN: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """From d, the gradient of a layer's output: those of its pre-activations, and what else is due.

    z, v: pre-activations of gate and up, contiguous. h: gets the layer's output, if HIDDEN. sums:
    get the sums of the columns of this row tile, if SUMS, for the gradient of a bias.
    """
    at = rows[:, None] * N + columns[None, :]
    before = tl.load(z + at, mask=there, other=0.0).to(tl.float32)
    value = activation(before, p0, p1, ACT)
    if DROPS:
        kept = kept_factor(mask, rows, columns, there, mask_m, scale)
        d *= kept
    to = rows[:, None] * grad_m + columns[None, :].to(tl.int64) * grad_n
    at_sums = tile.to(tl.int64) * N + columns
    if GATED:
        factor = tl.load(v + at, mask=there, other=0.0).to(tl.float32)
        of_up = d * value
        tl.store(up_grad + to, of_up.to(up_grad.dtype.element_ty), mask=there)
        if SUMS:
            of_columns = tl.sum(tl.where(there, of_up, 0.0), 0)
            tl.store(up_sums + at_sums, of_columns, mask=columns < N)
        value *= factor
        d *= factor
    of_gate = activation_gradient(d, before, p0, p1, ACT)
    tl.store(gate_grad + to, of_gate.to(gate_grad.dtype.element_ty), mask=there)
    if SUMS:
        of_columns = tl.sum(tl.where(there, of_gate, 0.0), 0)
        tl.store(gate_sums + at_sums, of_columns, mask=columns < N)
    if HIDDEN:
        if DROPS:
            value *= kept
        tl.store(h + at, value.to(h.dtype.element_ty), mask=there)


@triton.jit
def torchweld_pointwise_backward(
    d, z, v, h, gate_grad, up_grad, gate_sums, up_sums, mask,
    M, N, d_m, d_n, grad_m, grad_n, mask_m, scale, p0, p1,
    ACT: tl.constexpr, GATED: tl.constexpr, DROPS: tl.constexpr,
    HIDDEN: tl.constexpr, SUMS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    rows, columns, there = tile_of(tile, tl.program_id(1), M, N, BM, BN)
    at_d = d + rows[:, None] * d_m + columns[None, :].to(tl.int64) * d_n
    given = tl.load(at_d, mask=there, other=0.0).to(tl.float32)
    store_gradients(
        given, rows, columns, there, tile, z, v, h, gate_grad, up_grad, gate_sums, up_sums, mask,
        M, N, grad_m, grad_n, mask_m, scale, p0, p1, ACT, GATED, DROPS, HIDDEN, SUMS,
    )  # fmt: skip


@triton.jit
def torchweld_dropout_mask(seed, mask, M, N, BYTES, p, BM: tl.constexpr, BN: tl.constexpr):
    """One bit per value: bit i of byte j is column 8 j + i. Random by position, from one seed."""
    rows, columns, there = tile_of(tl.program_id(0), tl.program_id(1), M, BYTES, BM, BN)
    # Two draws of four numbers for each byte.
    place = (rows[:, None] * BYTES + columns[None, :]) * 2
    key = tl.load(seed)
    packed = tl.zeros((BM, BN), tl.int32)
    for half in tl.static_range(2):
        a, b, c, e = tl.rand4x(key, place + half)
        first = columns[None, :] * 8 + half * 4
        packed |= ((a >= p) & (first < N)).to(tl.int32) << (half * 4)
        packed |= ((b >= p) & (first + 1 < N)).to(tl.int32) << (half * 4 + 1)
        packed |= ((c >= p) & (first + 2 < N)).to(tl.int32) << (half * 4 + 2)
        packed |= ((e >= p) & (first + 3 < N)).to(tl.int32) << (half * 4 + 3)
    at = mask + rows[:, None] * BYTES + columns[None, :]
    tl.store(at, packed.to(tl.uint8), mask=there)
