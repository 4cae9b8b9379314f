"""Triton kernels for the gradients of convolutions' weights.

Sums over samples are split into a fixed number of parts that are added in order, so equal inputs give equal results.
Slots, parameters and `winner` are defined in `sifu_kernels.convolution_kernels`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sifu_kernels.convolution_kernels import DEAD, block_offset, load_patch, place_of, sample_of, tap_offset
from sifu_kernels.round_kernels import take_step


@triton.jit
def _outputs_from(
    first, rows, upstream, winner, row_stride, g, co,
    BATCH: tl.constexpr, CO: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, GATHER: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Load BR outputs of slot g's batch, starting at number `first`: sample, row, column, gradient and winner of each.

    Past the last output the gradient is zero and no position is the maximum.
    """
    real, inner, n, y, x = place_of(first + tl.arange(0, BR), BATCH, PH, PW)
    sample = sample_of(rows, row_stride, g, n, BATCH, GATHER)
    spot = (g * (BATCH * PH * PW) + inner)[:, None] * CO + co[None, :]
    inside = real[:, None] & (co[None, :] < CO)
    gradient = tl.load(upstream + spot, mask=inside, other=0.0)
    won = tl.load(winner + spot, mask=inside, other=DEAD)
    return sample, y, x, gradient, won


@triton.jit
def convolution_weight_gradient(
    images, rows, upstream, winner, partial,
    row_stride, slots, length, bias_at,
    BATCH: tl.constexpr, H: tl.constexpr, W: tl.constexpr, CI: tl.constexpr, CO: tl.constexpr, POOL: tl.constexpr,
    PH: tl.constexpr, PW: tl.constexpr, GATHER: tl.constexpr, PARTS: tl.constexpr,
    BKW: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Sum patch_k * gradient_co over a part of the samples into partial[part, g, k, co], and the bias gradient."""
    part = tl.program_id(1)
    g = tl.program_id(2).to(tl.int64)
    k = tl.program_id(0) * BKW + tl.arange(0, BKW)
    in_k = k < 9 * CI
    offset = tap_offset(k, W, CI)
    co = tl.arange(0, BN)
    STRIDE: tl.constexpr = 2 if POOL else 1
    acc = tl.zeros((BKW, BN), dtype=tl.float32)
    bias = tl.zeros((BR, BN), dtype=tl.float32)
    PART_STEPS: tl.constexpr = (BATCH * PH * PW + PARTS * BR - 1) // (PARTS * BR)
    for step in range(PART_STEPS):
        sample, y, x, gradient, won = _outputs_from(
            (part * PART_STEPS + step) * BR, rows, upstream, winner, row_stride, g, co, BATCH, CO, PH, PW, GATHER, BR
        )
        corner = images + sample * (H * W * CI) + (y * W + x) * (STRIDE * CI)
        bias += tl.where(won < DEAD, gradient, 0.0)
        at = corner[None, :] + offset[:, None]
        for position in tl.static_range(4 if POOL else 1):
            own = tl.where(won == position, gradient, 0.0)
            seen = load_patch(at + (position // 2 * W + position % 2) * CI, in_k[:, None], CI, BKW)
            acc = tl.dot(seen, own, acc, input_precision="tf32")
    target = partial + (part * slots + g) * length
    tl.store(target + k[:, None] * CO + co[None, :], acc, mask=in_k[:, None] & (co[None, :] < CO))
    if tl.program_id(0) == 0:
        tl.store(target + bias_at + co, tl.sum(bias, axis=0), mask=co < CO)


@triton.jit
def _store_shifted(target, gradient, dy, dx, ci, co, CI: tl.constexpr, CO: tl.constexpr):
    """Store the entries of a block's gradient (outputs, 4x4 inputs) that belong to the 3x3 taps of one position."""
    inside = (dy >= 0) & (dy < 3) & (dx >= 0) & (dx < 3)
    at = target + ((dy * 3 + dx) * CI + ci)[None, :] * CO + co[:, None]
    tl.store(at, gradient, mask=inside[None, :] & (co < CO)[:, None])


@triton.jit
def block_weight_gradient(
    images, rows, upstream, winner, partial,
    row_stride, slots, length, bias_at,
    BATCH: tl.constexpr, H: tl.constexpr, W: tl.constexpr, CI: tl.constexpr, CO: tl.constexpr,
    PH: tl.constexpr, PW: tl.constexpr, GATHER: tl.constexpr, PARTS: tl.constexpr,
    BN: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Compute the weight gradient of `convolve_block`; partial[4 part + s] is the contribution of position s."""
    part = tl.program_id(0)
    g = tl.program_id(1).to(tl.int64)
    K: tl.constexpr = 16 * CI
    k = tl.arange(0, K)
    offset = block_offset(k, W, CI)
    co = tl.arange(0, BN)
    acc0 = tl.zeros((BN, K), dtype=tl.float32)
    acc1 = acc0
    acc2 = acc0
    acc3 = acc0
    bias = tl.zeros((BR, BN), dtype=tl.float32)
    PART_STEPS: tl.constexpr = (BATCH * PH * PW + PARTS * BR - 1) // (PARTS * BR)
    for step in range(PART_STEPS):
        sample, y, x, gradient, won = _outputs_from(
            (part * PART_STEPS + step) * BR, rows, upstream, winner, row_stride, g, co, BATCH, CO, PH, PW, GATHER, BR
        )
        corner = images + sample * (H * W * CI) + (y * W + x) * (2 * CI)
        bias += tl.where(won < DEAD, gradient, 0.0)
        x = tl.load(corner[:, None] + offset[None, :])
        g0 = tl.where(won == 0, gradient, 0.0)
        g1 = tl.where(won == 1, gradient, 0.0)
        g2 = tl.where(won == 2, gradient, 0.0)
        g3 = tl.where(won == 3, gradient, 0.0)
        acc0 = tl.dot(tl.trans(g0), x, acc0, input_precision="tf32")
        acc1 = tl.dot(tl.trans(g1), x, acc1, input_precision="tf32")
        acc2 = tl.dot(tl.trans(g2), x, acc2, input_precision="tf32")
        acc3 = tl.dot(tl.trans(g3), x, acc3, input_precision="tf32")
    u = k // (4 * CI)
    v = (k % (4 * CI)) // CI
    ci = k % CI
    first = part * 4 * slots + g
    _store_shifted(partial + first * length, acc0, u, v, ci, co, CI, CO)
    _store_shifted(partial + (first + slots) * length, acc1, u, v - 1, ci, co, CI, CO)
    _store_shifted(partial + (first + 2 * slots) * length, acc2, u - 1, v, ci, co, CI, CO)
    _store_shifted(partial + (first + 3 * slots) * length, acc3, u - 1, v - 1, ci, co, CI, CO)
    # The bias gradient is stored with the first position; the entries of the others stay zero.
    tl.store(partial + first * length + bias_at + co, tl.sum(bias, axis=0), mask=co < CO)


@triton.jit
def row_weight_gradient(
    images, rows, upstream, winner, partial,
    row_stride, slots, length, bias_at,
    BATCH: tl.constexpr, H: tl.constexpr, W: tl.constexpr, CI: tl.constexpr, CO: tl.constexpr,
    PH: tl.constexpr, PW: tl.constexpr, GATHER: tl.constexpr, PARTS: tl.constexpr,
    BC: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Compute the weight gradient of a row of taps of a pooled convolution, for BC of its channels.

    A pixel is loaded once for the two adjacent positions that use it. `partial` is defined in
    `convolution_weight_gradient`.
    """
    dy = tl.program_id(0) // (CI // BC)
    part = tl.program_id(1)
    g = tl.program_id(2).to(tl.int64)
    ci = tl.program_id(0) % (CI // BC) * BC + tl.arange(0, BC)
    co = tl.arange(0, BN)
    acc0 = tl.zeros((BC, BN), dtype=tl.float32)
    acc1 = acc0
    acc2 = acc0
    bias = tl.zeros((BR, BN), dtype=tl.float32)
    PART_STEPS: tl.constexpr = (BATCH * PH * PW + PARTS * BR - 1) // (PARTS * BR)
    for step in range(PART_STEPS):
        sample, y, x, gradient, won = _outputs_from(
            (part * PART_STEPS + step) * BR, rows, upstream, winner, row_stride, g, co, BATCH, CO, PH, PW, GATHER, BR
        )
        corner = images + (sample * (H * W) + (y * 2 + dy) * W + x * 2) * CI
        bias += tl.where(won < DEAD, gradient, 0.0)
        at = corner[None, :] + ci[:, None]
        for a in tl.static_range(2):
            left = tl.where(won == 2 * a, gradient, 0.0)
            right = tl.where(won == 2 * a + 1, gradient, 0.0)
            x0 = tl.load(at + a * (W * CI))
            x1 = tl.load(at + a * (W * CI) + CI)
            x2 = tl.load(at + a * (W * CI) + 2 * CI)
            x3 = tl.load(at + a * (W * CI) + 3 * CI)
            acc0 = tl.dot(x0, left, acc0, input_precision="tf32")
            acc0 = tl.dot(x1, right, acc0, input_precision="tf32")
            acc1 = tl.dot(x1, left, acc1, input_precision="tf32")
            acc1 = tl.dot(x2, right, acc1, input_precision="tf32")
            acc2 = tl.dot(x2, left, acc2, input_precision="tf32")
            acc2 = tl.dot(x3, right, acc2, input_precision="tf32")
    target = partial + (part * slots + g) * length
    spot = target + (dy * 3 * CI + ci)[:, None] * CO + co[None, :]
    inside = (co < CO)[None, :]
    tl.store(spot, acc0, mask=inside)
    tl.store(spot + CI * CO, acc1, mask=inside)
    tl.store(spot + 2 * CI * CO, acc2, mask=inside)
    if tl.program_id(0) == 0:
        tl.store(target + bias_at + co, tl.sum(bias, axis=0), mask=co < CO)


@triton.jit
def descend_by_weight_gradient(
    images, rows, upstream, winner, models, velocities,
    row_stride, size, weight_at, bias_at, rate, momentum, decay,
    BATCH: tl.constexpr, H: tl.constexpr, W: tl.constexpr, CI: tl.constexpr, CO: tl.constexpr,
    PH: tl.constexpr, PW: tl.constexpr, GATHER: tl.constexpr,
    FIRST: tl.constexpr,
    BKW: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Compute the whole weight gradient of an unpooled convolution with few outputs, and take the step."""
    g = tl.program_id(1).to(tl.int64)
    k = tl.program_id(0) * BKW + tl.arange(0, BKW)
    in_k = k < 9 * CI
    offset = tap_offset(k, W, CI)
    co = tl.arange(0, BN)
    acc = tl.zeros((BKW, BN), dtype=tl.float32)
    biases = tl.zeros((BR, BN), dtype=tl.float32)
    for first in range(0, BATCH * PH * PW, BR):
        sample, y, x, gradient, won = _outputs_from(
            first, rows, upstream, winner, row_stride, g, co, BATCH, CO, PH, PW, GATHER, BR
        )
        corner = images + sample * (H * W * CI) + (y * W + x) * CI
        gradient = tl.where(won < DEAD, gradient, 0.0)
        biases += gradient
        at = corner[None, :] + offset[:, None]
        acc = tl.dot(load_patch(at, in_k[:, None], CI, BKW), gradient, acc, input_precision="tf32")
    real = in_k[:, None] & (co[None, :] < CO)
    at = g * size + weight_at + k[:, None] * CO + co[None, :]
    weight = tl.load(models + at, mask=real, other=0.0)
    take_step(models, velocities, at, real, weight, acc, rate, momentum, decay, FIRST)
    if tl.program_id(0) == 0:
        at_b = g * size + bias_at + co
        bias = tl.load(models + at_b, mask=co < CO, other=0.0)
        take_step(models, velocities, at_b, co < CO, bias, biases, rate, momentum, decay, FIRST)
