"""Activations and their gradients for Triton kernels, in fp32.

Names and parameters are those of `core/activations.py`. Only what every target and the interpreter
have is used: no libdevice. Where a formula would lose digits near zero, another takes its place.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tanh(z):
    """A series near zero, where the difference would cancel."""
    magnitude = tl.abs(z)
    e = tl.exp(-2.0 * magnitude)
    far = (1.0 - e) / (1.0 + e)
    square = z * z
    near = magnitude * (
        1.0
        + square
        * (
            -0.33333333333
            + square * (0.13333333333 + square * (-0.05396825397 + square * 0.0218694885))
        )
    )
    found = tl.where(magnitude < 0.25, near, far)
    return tl.where(z < 0, -found, tl.where(z == 0, z, found))


@triton.jit
def log1p(e):
    """log(1 + e) for e >= 0; what `1 + e` rounds away is put back."""
    u = 1.0 + e
    return tl.where(u == 1.0, e, tl.where(e > 1e30, tl.log(e), tl.log(u) * (e / (u - 1.0))))


@triton.jit
def expm1(z):
    """exp(z) - 1 for z <= 0."""
    u = tl.exp(z)
    near = tl.where(u == 1.0, z, (u - 1.0) * (z / tl.log(u)))
    return tl.where(z < -1.0, u - 1.0, near)


@triton.jit
def softplus(z):
    """log(1 + exp(z)), without an overflow."""
    return tl.maximum(z, 0.0) + log1p(tl.exp(-tl.abs(z)))


@triton.jit
def activation(z, p0, p1, ACT: tl.constexpr):
    if ACT == "relu":
        return tl.where(z < 0, 0.0, z)  # NaN stays
    elif ACT == "relu2":
        positive = tl.where(z < 0, 0.0, z)
        return positive * positive
    elif ACT == "leaky_relu":
        return tl.where(z > 0, z, z * p0)
    elif ACT == "silu":
        return z / (1.0 + tl.exp(-z))
    elif ACT == "gelu":
        return 0.5 * z * (1.0 + tl.erf(z * 0.7071067811865476))
    elif ACT == "gelu_tanh":
        return 0.5 * z * (1.0 + tanh(0.7978845608028654 * (z + 0.044715 * z * z * z)))
    elif ACT == "quick_gelu":
        return z / (1.0 + tl.exp(-1.702 * z))
    elif ACT == "tanh":
        return tanh(z)
    elif ACT == "sigmoid":
        return 1.0 / (1.0 + tl.exp(-z))
    elif ACT == "elu":
        return tl.where(z > 0, z, p0 * expm1(z))
    elif ACT == "mish":
        return z * tanh(softplus(z))
    elif ACT == "hardswish":
        return z * tl.minimum(tl.maximum(z + 3.0, 0.0), 6.0) / 6.0
    elif ACT == "softplus":
        return tl.where(z * p0 > p1, z, softplus(z * p0) / p0)
    else:
        tl.static_assert(ACT == "identity", "an activation without a Triton formula")
        return z


@triton.jit
def activation_gradient(g, z, p0, p1, ACT: tl.constexpr):
    """The gradient of z from g, that of act(z). Where eager selects, so does this: no 0 * Inf."""
    if ACT == "relu":
        return tl.where(z <= 0, 0.0, g)
    elif ACT == "relu2":
        return tl.where(z <= 0, 0.0, g * 2.0 * z)
    elif ACT == "leaky_relu":
        return tl.where(z > 0, g, g * p0)
    elif ACT == "silu":
        s = 1.0 / (1.0 + tl.exp(-z))
        return g * s * (1.0 + z * (1.0 - s))
    elif ACT == "gelu":
        cdf = 0.5 * (1.0 + tl.erf(z * 0.7071067811865476))
        return g * (cdf + z * 0.3989422804014327 * tl.exp(-0.5 * z * z))
    elif ACT == "gelu_tanh":
        t = tanh(0.7978845608028654 * (z + 0.044715 * z * z * z))
        inner = 0.7978845608028654 * (1.0 + 0.134145 * z * z)
        return g * (0.5 * (1.0 + t) + 0.5 * z * (1.0 - t * t) * inner)
    elif ACT == "quick_gelu":
        s = 1.0 / (1.0 + tl.exp(-1.702 * z))
        return g * s * (1.0 + 1.702 * z * (1.0 - s))
    elif ACT == "tanh":
        t = tanh(z)
        return g * (1.0 - t * t)
    elif ACT == "sigmoid":
        s = 1.0 / (1.0 + tl.exp(-z))
        return g * (1.0 - s) * s
    elif ACT == "elu":
        return tl.where(z > 0, g, g * p0 * tl.exp(tl.minimum(z, 0.0)))
    elif ACT == "mish":
        t = tanh(softplus(z))
        s = 1.0 / (1.0 + tl.exp(-z))
        return g * (t + z * s * (1.0 - t * t))
    elif ACT == "hardswish":
        middle = g * (z / 3.0 + 0.5)
        return tl.where(z <= -3.0, 0.0, tl.where(z < 3.0, middle, g))
    elif ACT == "softplus":
        s = 1.0 / (1.0 + tl.exp(-z * p0))
        return tl.where(z * p0 > p1, g, g * s)
    else:
        tl.static_assert(ACT == "identity", "an activation without a Triton formula")
        return g
