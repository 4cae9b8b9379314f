"""Triton kernels for the forward pass through convolutions, and for the gradients of their inputs.

The kernels process many small convolutional classifiers at once, each with its own weights. A *slot* is one client of
one run. The parameters of slot g are models[g, :], in device order (`conv_plan`): every layer is a matrix [inputs,
outputs], followed by its bias. A convolution is an implicit product of patches with that matrix, fused with bias, ReLU
and 2x2 max-pooling. `winner` stores which of the four positions was the maximum (DEAD if ReLU set it
to zero), which is all the backward pass needs.

Pixels are NHWC. Images and activations have borders of zeros as wide as the padding, so that an address is a corner
plus an offset and no load needs a mask.
"""

from __future__ import annotations

import triton
import triton.language as tl

DEAD = tl.constexpr(4)
"""Value of `winner` for an output that ReLU set to zero; other values are the position (0 to 3) of the maximum."""


@triton.jit
def place_of(number, BATCH, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """Split position `number` in BATCH planes of HEIGHT x WIDTH: whether it exists, its number, sample, row and column.

    If it does not exist, the other values describe position 0.
    """
    real = number < BATCH * HEIGHT * WIDTH
    inner = tl.where(real, number, 0)
    sample = inner // (HEIGHT * WIDTH)
    y = (inner % (HEIGHT * WIDTH)) // WIDTH
    x = inner % WIDTH
    return real, inner, sample, y, x


@triton.jit
def sample_of(rows, row_stride, g, n, BATCH, GATHER: tl.constexpr):
    """Return the index of sample n of slot g's batch, among all images (GATHER) or among the slots' activations."""
    if GATHER:
        sample = tl.maximum(tl.load(rows + g * row_stride + n).to(tl.int64), 0)
    else:
        sample = g * BATCH + n
    return sample


@triton.jit
def tap_offset(k, W: tl.constexpr, CI: tl.constexpr):
    """Return the offset from a corner to input k of a 3x3 patch."""
    tap = k // CI
    return ((tap // 3) * W + tap % 3) * CI + k % CI


@triton.jit
def block_offset(k, W: tl.constexpr, CI: tl.constexpr):
    """Return the offset from a corner to input k of a block of 4x4 pixels."""
    return k // (4 * CI) * (W * CI) + k % (4 * CI)


@triton.jit
def load_patch(at, inside, CI: tl.constexpr, BK: tl.constexpr):
    """Load a tile of patches, with a mask only if the tile extends beyond the last tap."""
    if (9 * CI) % BK == 0:
        values = tl.load(at)
    else:
        values = tl.load(at, mask=inside, other=0.0)
    return values


@triton.jit
def _best_of_four(value0, value1, value2, value3):
    """Compute 2x2 max-pooling: the largest value and its position; the first of equal values wins, as in torch."""
    won = tl.where(value1 > value0, 1, 0)
    best = tl.maximum(value1, value0)
    won = tl.where(value2 > best, 2, won)
    best = tl.maximum(value2, best)
    won = tl.where(value3 > best, 3, won)
    return tl.maximum(value3, best), won


@triton.jit
def _store_output(
    out, winner, best, won, g, m, real, n, py, px, co,
    BATCH, CO: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, BORDER: tl.constexpr,
    KEEP_WINNER: tl.constexpr,
):  # fmt: skip
    """Apply ReLU and store out[g, n, py, px, co] inside its border, and the position of the maximum."""
    inside = real[:, None] & (co[None, :] < CO)
    row = ((g * BATCH + n) * (PH + 2 * BORDER) + py + BORDER) * (PW + 2 * BORDER) + px + BORDER
    won = tl.where(best > 0.0, won, DEAD)
    best = tl.maximum(best, 0.0)
    tl.store(out + row[:, None] * CO + co[None, :], best, mask=inside)
    if KEEP_WINNER:
        spot = (g * BATCH * PH * PW + m)[:, None] * CO + co[None, :]
        tl.store(winner + spot, won.to(tl.int8), mask=inside)


@triton.jit
def convolve(
    images, rows, models, out, winner,
    row_stride, size, BATCH, weight_at, bias_at,
    H: tl.constexpr, W: tl.constexpr, CI: tl.constexpr, CO: tl.constexpr, POOL: tl.constexpr,
    PH: tl.constexpr, PW: tl.constexpr, BORDER: tl.constexpr, GATHER: tl.constexpr,
    KEEP_WINNER: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Compute a 3x3 convolution, bias, ReLU and (POOL) 2x2 max-pooling: out[g, n, py, px, co] and `winner`.

    H x W is the input including its padding; `out` has a border of BORDER zeros for the next convolution.
    """
    g = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    real, _, n, py, px = place_of(m, BATCH, PH, PW)
    sample = sample_of(rows, row_stride, g, n, BATCH, GATHER)
    STRIDE: tl.constexpr = 2 if POOL else 1
    corner = images + sample * (H * W * CI) + (py * STRIDE * W + px * STRIDE) * CI
    co = tl.arange(0, BN)
    weights = models + g * size + weight_at
    acc0 = tl.zeros((BM, BN), dtype=tl.float32)
    acc1 = acc0
    acc2 = acc0
    acc3 = acc0
    for start in range(0, 9 * CI, BK):
        k = start + tl.arange(0, BK)
        at = corner[:, None] + tap_offset(k, W, CI)[None, :]
        inside = k < 9 * CI
        tile = tl.load(weights + k[:, None] * CO + co[None, :], mask=inside[:, None] & (co[None, :] < CO), other=0.0)
        taps = inside[None, :]
        acc0 = tl.dot(load_patch(at, taps, CI, BK), tile, acc0, input_precision="tf32")
        if POOL:
            acc1 = tl.dot(load_patch(at + CI, taps, CI, BK), tile, acc1, input_precision="tf32")
            acc2 = tl.dot(load_patch(at + W * CI, taps, CI, BK), tile, acc2, input_precision="tf32")
            acc3 = tl.dot(load_patch(at + (W + 1) * CI, taps, CI, BK), tile, acc3, input_precision="tf32")
    if POOL:
        best, won = _best_of_four(acc0, acc1, acc2, acc3)
    else:
        best, won = acc0, tl.zeros((BM, BN), dtype=tl.int32)
    bias = tl.load(models + g * size + bias_at + co, mask=co < CO, other=0.0)
    best += bias[None, :]
    _store_output(out, winner, best, won, g, m, real, n, py, px, co, BATCH, CO, PH, PW, BORDER, KEEP_WINNER)


@triton.jit
def convolve_block(
    images, rows, models, out, winner,
    row_stride, size, BATCH, weight_at, bias_at,
    H: tl.constexpr, W: tl.constexpr, CI: tl.constexpr, CO: tl.constexpr,
    PH: tl.constexpr, PW: tl.constexpr, BORDER: tl.constexpr, GATHER: tl.constexpr,
    KEEP_WINNER: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Compute the same as `convolve` with pooling, for few channels; a row of the product is an output's 4 x 4 inputs.

    Each of the four positions has its own matrix: the 3x3 taps shifted within 4x4, and zeros around them. This needs
    more arithmetic than a patch for every position, but a quarter of the loads. A program computes TILES tiles in
    sequence.
    """
    g = tl.program_id(1).to(tl.int64)
    k = tl.arange(0, 16 * CI)
    u = k // (4 * CI)
    v = (k % (4 * CI)) // CI
    offset = block_offset(k, W, CI)
    co = tl.arange(0, BN)
    weights = models + g * size + weight_at + (k % CI)[:, None] * CO + co[None, :]
    real_co = co[None, :] < CO
    tap0 = (u * 3 + v) * (CI * CO)
    low_u = u < 3
    low_v = v < 3
    w0 = tl.load(weights + tap0[:, None], mask=(low_u & low_v)[:, None] & real_co, other=0.0)
    w1 = tl.load(weights + (tap0 - CI * CO)[:, None], mask=(low_u & (v > 0))[:, None] & real_co, other=0.0)
    w2 = tl.load(weights + (tap0 - 3 * CI * CO)[:, None], mask=((u > 0) & low_v)[:, None] & real_co, other=0.0)
    w3 = tl.load(weights + (tap0 - 4 * CI * CO)[:, None], mask=((u > 0) & (v > 0))[:, None] & real_co, other=0.0)
    bias = tl.load(models + g * size + bias_at + co, mask=co < CO, other=0.0)
    for tile in range(TILES):
        m = (tl.program_id(0) * TILES + tile) * BM + tl.arange(0, BM)
        real, _, n, py, px = place_of(m, BATCH, PH, PW)
        sample = sample_of(rows, row_stride, g, n, BATCH, GATHER)
        corner = images + sample * (H * W * CI) + (py * 2 * W + px * 2) * CI
        x = tl.load(corner[:, None] + offset[None, :])
        zero = tl.zeros((BM, BN), dtype=tl.float32)
        acc0 = tl.dot(x, w0, zero, input_precision="tf32")
        acc1 = tl.dot(x, w1, zero, input_precision="tf32")
        acc2 = tl.dot(x, w2, zero, input_precision="tf32")
        acc3 = tl.dot(x, w3, zero, input_precision="tf32")
        best, won = _best_of_four(acc0, acc1, acc2, acc3)
        best += bias[None, :]
        _store_output(out, winner, best, won, g, m, real, n, py, px, co, BATCH, CO, PH, PW, BORDER, KEEP_WINNER)


@triton.jit
def spread_gradient(
    upstream, winner, spread, total,
    CO: tl.constexpr, POOL: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    SH: tl.constexpr, SW: tl.constexpr, LEAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of a convolution's outputs before pooling and ReLU, inside a border of zeros.

    `spread` is (samples, SH, SW, CO). The gradient begins at row and column LEAD; the border is never written.
    """
    j = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    real = j < total
    co = j % CO
    place = j // CO
    n = place // (PH * PW)
    py = (place % (PH * PW)) // PW
    px = place % PW
    value = tl.load(upstream + j, mask=real, other=0.0)
    won = tl.load(winner + j, mask=real, other=DEAD)
    STRIDE: tl.constexpr = 2 if POOL else 1
    at = spread + ((n * SH + py * STRIDE + LEAD) * SW + px * STRIDE + LEAD) * CO + co
    tl.store(at, tl.where(won == 0, value, 0.0), mask=real)
    if POOL:
        tl.store(at + CO, tl.where(won == 1, value, 0.0), mask=real)
        tl.store(at + SW * CO, tl.where(won == 2, value, 0.0), mask=real)
        tl.store(at + (SW + 1) * CO, tl.where(won == 3, value, 0.0), mask=real)


@triton.jit
def convolution_input_gradient(
    spread, models, out,
    size, BATCH, weight_at,
    H: tl.constexpr, W: tl.constexpr, CI: tl.constexpr, CO: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Compute out[g, n, y, x, ci], the gradient of a convolution's H x W input (without padding), from `spread`."""
    g = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    real, _, n, y, x = place_of(m, BATCH, H, W)
    corner = spread + (((g * BATCH + n) * (H + 2) + y) * (W + 2) + x) * CO
    ci = tl.arange(0, BN)
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    weights = models + g * size + weight_at
    for start in range(0, 9 * CO, BK):
        k = start + tl.arange(0, BK)
        tap = k // CO
        co = k % CO
        inside = k < 9 * CO
        at = corner[:, None] + ((8 - tap) // 3 * (W + 2) * CO + (8 - tap) % 3 * CO + co)[None, :]
        tile = tl.load(
            weights + (tap[:, None] * CI + ci[None, :]) * CO + co[:, None],
            mask=inside[:, None] & (ci[None, :] < CI), other=0.0,
        )  # fmt: skip
        acc = tl.dot(load_patch(at, inside[None, :], CO, BK), tile, acc, input_precision="tf32")
    tl.store(out + (g * BATCH * H * W + m)[:, None] * CI + ci[None, :], acc, mask=real[:, None] & (ci[None, :] < CI))
