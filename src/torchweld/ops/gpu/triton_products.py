"""Triton products with what comes before or after them.

`torchweld_linear`: bias, activation and gate in the epilogue of the product.
`torchweld_linear_backward`: the gradient of a layer's output as a product, and in its epilogue the
gradients of the layer's pre-activations and the sums for its biases.

Any sizes and strides: tiles are masked, and offsets have 64 bits. Sums are in fp32. M rows, K in,
N out.
"""

from __future__ import annotations

import triton
import triton.language as tl

from torchweld.ops.gpu.triton_math import activation
from torchweld.ops.gpu.triton_pointwise import kept_factor, row_of, store_gradients, tile_of


@triton.jit
def tile_numbers(M, N, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr):
    """Which tile a program computes. GROUP row tiles pass together, and share columns in L2."""
    program = tl.program_id(0)
    row_tiles, column_tiles = tl.cdiv(M, BM), tl.cdiv(N, BN)
    per_group = GROUP * column_tiles
    first = program // per_group * GROUP
    height = tl.minimum(row_tiles - first, GROUP)
    within = program % per_group
    return first + within % height, within // height


@triton.jit
def add_product(
    total, a, b, rows, columns, M, N, K, a_m, a_k, b_k, b_n,
    PRECISION: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """total + a · b, a being [M, K] and b [K, N]."""
    steps, depth = tl.arange(0, BK), tl.full((), BK, tl.int64)
    at_a = a + rows[:, None] * a_m + steps[None, :].to(tl.int64) * a_k
    at_b = b + steps[:, None].to(tl.int64) * b_k + columns[None, :].to(tl.int64) * b_n
    for k in range(0, K, BK):
        left = K - k
        x = tl.load(at_a, mask=(rows[:, None] < M) & (steps[None, :] < left), other=0.0)
        w = tl.load(at_b, mask=(steps[:, None] < left) & (columns[None, :] < N), other=0.0)
        total = tl.dot(x, w, total, input_precision=PRECISION)
        at_a += depth * a_k
        at_b += depth * b_k
    return total


@triton.jit
def torchweld_linear(
    x, gate, up, gate_bias, up_bias, y, z, v, mask,
    M, N, K, x_m, x_k, gate_k, gate_n, up_k, up_n, gate_bias_n, up_bias_n, mask_m, scale, p0, p1,
    ACT: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr, DROPS: tl.constexpr,
    SAVES: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """y = act(x · gate + bias) * (x · up + bias); z and v get the pre-activations, if SAVES."""
    row_tile, column_tile = tile_numbers(M, N, BM, BN, GROUP)
    rows, columns, there = tile_of(row_tile, column_tile, M, N, BM, BN)
    of_gate = tl.zeros((BM, BN), tl.float32)
    of_up = tl.zeros((BM, BN), tl.float32)
    steps, depth = tl.arange(0, BK), tl.full((), BK, tl.int64)
    at_x = x + rows[:, None] * x_m + steps[None, :].to(tl.int64) * x_k
    at_gate = gate + steps[:, None].to(tl.int64) * gate_k + columns[None, :].to(tl.int64) * gate_n
    at_up = up + steps[:, None].to(tl.int64) * up_k + columns[None, :].to(tl.int64) * up_n
    for k in range(0, K, BK):
        left = K - k
        inside = (steps[:, None] < left) & (columns[None, :] < N)
        part = tl.load(at_x, mask=(rows[:, None] < M) & (steps[None, :] < left), other=0.0)
        of_gate = tl.dot(part, tl.load(at_gate, mask=inside, other=0.0), of_gate,
                         input_precision=PRECISION)  # fmt: skip
        if GATED:
            of_up = tl.dot(part, tl.load(at_up, mask=inside, other=0.0), of_up,
                           input_precision=PRECISION)  # fmt: skip
        at_x += depth * x_k
        at_gate += depth * gate_k
        at_up += depth * up_k
    at = rows[:, None] * N + columns[None, :]
    if HAS_BIAS:
        of_gate += row_of(gate_bias, columns, N, gate_bias_n)
    if SAVES:
        tl.store(z + at, of_gate.to(z.dtype.element_ty), mask=there)
    value = activation(of_gate, p0, p1, ACT)
    if GATED:
        if HAS_BIAS:
            of_up += row_of(up_bias, columns, N, up_bias_n)
        if SAVES:
            tl.store(v + at, of_up.to(v.dtype.element_ty), mask=there)
        value *= of_up
    if DROPS:
        value *= kept_factor(mask, rows, columns, there, mask_m, scale)
    tl.store(y + at, value.to(y.dtype.element_ty), mask=there)


@triton.jit
def torchweld_linear_backward(
    g, w, g2, w2, z, v, h, gate_grad, up_grad, gate_sums, up_sums, mask,
    M, N, J, g_m, g_j, w_j, w_n, w2_j, w2_n, grad_m, grad_n, mask_m, scale, p0, p1,
    PAIRS: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr, DROPS: tl.constexpr,
    HIDDEN: tl.constexpr, SUMS: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """d = g · w, plus g2 · w2 if there are two PAIRS; then what `store_gradients` does with d.

    g, g2: gradients of the next layer's pre-activations, [M, J]. w, w2: its weights, [J, N].
    """
    row_tile, column_tile = tile_numbers(M, N, BM, BN, GROUP)
    rows, columns, there = tile_of(row_tile, column_tile, M, N, BM, BN)
    d = tl.zeros((BM, BN), tl.float32)
    d = add_product(d, g, w, rows, columns, M, N, J, g_m, g_j, w_j, w_n, PRECISION, BK)
    if PAIRS == 2:
        d = add_product(d, g2, w2, rows, columns, M, N, J, g_m, g_j, w2_j, w2_n, PRECISION, BK)
    store_gradients(
        d, rows, columns, there, row_tile,
        z, v, h, gate_grad, up_grad, gate_sums, up_sums, mask,
        M, N, grad_m, grad_n, mask_m, scale, p0, p1, ACT, GATED, DROPS, HIDDEN, SUMS,
    )  # fmt: skip
