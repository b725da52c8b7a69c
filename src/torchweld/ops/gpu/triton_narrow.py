"""A whole narrow chain as one Triton kernel: hidden values never leave the chip.

A program takes some rows through all layers. Every width is padded to a power of two, so a layer is
one product of tiles; of wide layers it computes some columns at a time, and puts them together.
"""

from __future__ import annotations

import triton
import triton.language as tl

from torchweld.ops.gpu.triton_math import activation
from torchweld.ops.gpu.triton_pointwise import row_of


@triton.jit
def narrow_product(
    h, w, bias, first, K, N, w_k, w_n, bias_n,
    HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr, PK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """h · w + bias for CHUNK columns from `first` on; h is padded with zeros."""
    steps = tl.arange(0, PK)
    columns = first + tl.arange(0, CHUNK)
    inside = (steps[:, None] < K) & (columns[None, :] < N)
    at = w + steps[:, None].to(tl.int64) * w_k + columns[None, :].to(tl.int64) * w_n
    tile = tl.load(at, mask=inside, other=0.0)
    found = tl.dot(h, tile, input_precision=PRECISION)
    if HAS_BIAS:
        found += row_of(bias, columns, N, bias_n)
    return found


@triton.jit
def narrow_layer(
    h, rows, gate, up, gate_bias, up_bias, z, v, y, M, strides, p0, p1,
    K: tl.constexpr, N: tl.constexpr, PK: tl.constexpr, PN: tl.constexpr, CHUNK: tl.constexpr,
    ACT: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr, SAVES: tl.constexpr,
    LAST: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """The layer's output for these rows, padded with zeros; of the last layer, stored in y."""
    PARTS: tl.constexpr = PN // CHUNK
    whole = tl.zeros((BM, PN), h.dtype)
    for part in range(PARTS):
        own = part * CHUNK + tl.arange(0, CHUNK)
        there = (rows[:, None] < M) & (own[None, :] < N)
        at = rows[:, None] * N + own[None, :]
        before = narrow_product(
            h, gate, gate_bias, part * CHUNK, K, N, strides[0], strides[1], strides[4],
            HAS_BIAS, PRECISION, PK, CHUNK,
        )  # fmt: skip
        if SAVES:
            tl.store(z + at, before.to(h.dtype), mask=there)
        value = activation(before, p0, p1, ACT)
        if GATED:
            factor = narrow_product(
                h, up, up_bias, part * CHUNK, K, N, strides[2], strides[3], strides[5],
                HAS_BIAS, PRECISION, PK, CHUNK,
            )  # fmt: skip
            if SAVES:
                tl.store(v + at, factor.to(h.dtype), mask=there)
            value *= factor
        # What an activation makes of the padding must not reach the next product.
        value = tl.where(own[None, :] < N, value, 0.0).to(h.dtype)
        if LAST:
            tl.store(y + at, value, mask=there)
        elif PARTS == 1:
            whole = value
        else:
            spread = tl.broadcast_to(value[:, None, :], (BM, PARTS, CHUNK))
            spread = tl.reshape(spread, (BM, PN))
            whole = tl.where(tl.arange(0, PN)[None, :] // CHUNK == part, spread, whole)
    return whole


@triton.jit
def torchweld_narrow(
    x, y, gates, ups, gate_biases, up_biases, zs, vs, M, x_m, x_k, strides,
    SIZES: tl.constexpr, PADDED: tl.constexpr, CHUNKS: tl.constexpr,
    ACTS: tl.constexpr, P0: tl.constexpr, P1: tl.constexpr,
    GATED: tl.constexpr, BIASED: tl.constexpr, SAVED: tl.constexpr, LAYERS: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Tuples have an entry for each layer; `strides` has six: of gate, up, and their biases."""
    rows = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    steps = tl.arange(0, PADDED[0])
    inside = (rows[:, None] < M) & (steps[None, :] < SIZES[0])
    at = x + rows[:, None] * x_m + steps[None, :].to(tl.int64) * x_k
    h = tl.load(at, mask=inside, other=0.0)
    for i in tl.static_range(LAYERS):
        h = narrow_layer(
            h, rows, gates[i], ups[i], gate_biases[i], up_biases[i], zs[i], vs[i], y, M, strides[i],
            P0[i], P1[i], SIZES[i], SIZES[i + 1], PADDED[i], PADDED[i + 1], CHUNKS[i],
            ACTS[i], GATED[i], BIASED[i], SAVED[i], i + 1 == LAYERS, PRECISION, BM,
        )  # fmt: skip
