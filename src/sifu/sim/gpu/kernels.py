"""Triton kernels for local SGD of many small convolutional classifiers at once, each with weights of its own.

One *slot* is one client of one run. Parameters of slot g lie at models[g, :], in device order (see `plan`): every
layer is a matrix [inputs, outputs] and then its bias. Activations are NHWC. A convolution is an implicit product of
patches with that matrix, with bias, ReLU and 2x2 max-pooling fused behind it: `winner` remembers which of the four
positions won (DEAD where ReLU cut it off), which is all the backward pass needs. Images and activations lie in
borders of zeros as wide as the padding, so that an address is a corner plus an offset and no load needs a mask. Sums
over samples are split into a fixed number of parts that are added in order, so the same inputs give the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

DEAD = tl.constexpr(4)


@triton.jit
def _descend(weight, velocity, gradient, rate, momentum, decay, FIRST: tl.constexpr, NESTEROV: tl.constexpr):
    """One step of SGD as torch.optim.SGD does it: new weight and velocity."""
    gradient = gradient + decay * weight
    if FIRST:
        velocity = gradient
    else:
        velocity = momentum * velocity + gradient
    direction = velocity
    if NESTEROV:
        direction = gradient + momentum * velocity
    return weight - rate * direction, velocity


@triton.jit
def _patch(at, inside, CI: tl.constexpr, BK: tl.constexpr):
    """Load a tile of patches; a mask only where the tile reaches behind the last tap."""
    if (9 * CI) % BK == 0:
        values = tl.load(at)
    else:
        values = tl.load(at, mask=inside, other=0.0)
    return values


@triton.jit
def convolve(
    images, rows, models, out, winner,
    row_stride, size, BATCH, weight_at, bias_at,
    H: tl.constexpr, W: tl.constexpr, CI: tl.constexpr, CO: tl.constexpr, POOL: tl.constexpr,
    PH: tl.constexpr, PW: tl.constexpr, BORDER: tl.constexpr, GATHER: tl.constexpr, KEEP_WINNER: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """3x3 convolution, bias, ReLU and (POOL) 2x2 max-pooling: out[g, n, py, px, co] and which position won.

    H x W is the input with its padding, `out` has a border of BORDER zeros for the next convolution's.
    """
    g = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    real = m < BATCH * PH * PW
    inner = tl.where(real, m, 0)
    n = inner // (PH * PW)
    py = (inner % (PH * PW)) // PW
    px = inner % PW
    if GATHER:
        sample = tl.maximum(tl.load(rows + g * row_stride + n).to(tl.int64), 0)
    else:
        sample = g * BATCH + n
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
        tap = k // CI
        at = corner[:, None] + (((tap // 3) * W + tap % 3) * CI + k % CI)[None, :]
        inside = k < 9 * CI
        tile = tl.load(weights + k[:, None] * CO + co[None, :], mask=inside[:, None] & (co[None, :] < CO), other=0.0)
        acc0 = tl.dot(_patch(at, inside[None, :], CI, BK), tile, acc0, input_precision=PRECISION)
        if POOL:
            acc1 = tl.dot(_patch(at + CI, inside[None, :], CI, BK), tile, acc1, input_precision=PRECISION)
            acc2 = tl.dot(_patch(at + W * CI, inside[None, :], CI, BK), tile, acc2, input_precision=PRECISION)
            acc3 = tl.dot(_patch(at + (W + 1) * CI, inside[None, :], CI, BK), tile, acc3, input_precision=PRECISION)
    best = acc0
    won = tl.zeros((BM, BN), dtype=tl.int32)
    if POOL:  # the first of equal ones wins, as in torch
        won = tl.where(acc1 > best, 1, won)
        best = tl.maximum(acc1, best)
        won = tl.where(acc2 > best, 2, won)
        best = tl.maximum(acc2, best)
        won = tl.where(acc3 > best, 3, won)
        best = tl.maximum(acc3, best)
    bias = tl.load(models + g * size + bias_at + co, mask=co < CO, other=0.0)
    best += bias[None, :]
    inside = real[:, None] & (co[None, :] < CO)
    row = ((g * BATCH + n) * (PH + 2 * BORDER) + py + BORDER) * (PW + 2 * BORDER) + px + BORDER
    tl.store(out + row[:, None] * CO + co[None, :], tl.maximum(best, 0.0), mask=inside)
    if KEEP_WINNER:
        spot = (g * BATCH * PH * PW + m)[:, None] * CO + co[None, :]
        tl.store(winner + spot, tl.where(best > 0.0, won, DEAD).to(tl.int8), mask=inside)


@triton.jit
def convolve_block(
    images, rows, models, out, winner,
    row_stride, size, BATCH, weight_at, bias_at,
    H: tl.constexpr, W: tl.constexpr, CI: tl.constexpr, CO: tl.constexpr,
    PH: tl.constexpr, PW: tl.constexpr, BORDER: tl.constexpr, GATHER: tl.constexpr, KEEP_WINNER: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, TILES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`convolve` with pooling of a few channels: the 4 x 4 pixels that a pooled output sees are one row of a product.

    Each of the four positions has a matrix of its own, the 3x3 taps shifted within 4x4 and zeros around them: more
    arithmetic than a patch for every position, but a quarter of the loads. A program does TILES tiles one by one.
    """
    g = tl.program_id(1).to(tl.int64)
    k = tl.arange(0, 16 * CI)
    u = k // (4 * CI)
    v = (k % (4 * CI)) // CI
    offset = u * (W * CI) + k % (4 * CI)
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
        real = m < BATCH * PH * PW
        inner = tl.where(real, m, 0)
        n = inner // (PH * PW)
        py = (inner % (PH * PW)) // PW
        px = inner % PW
        if GATHER:
            sample = tl.maximum(tl.load(rows + g * row_stride + n).to(tl.int64), 0)
        else:
            sample = g * BATCH + n
        corner = images + sample * (H * W * CI) + (py * 2 * W + px * 2) * CI
        x = tl.load(corner[:, None] + offset[None, :])
        zero = tl.zeros((BM, BN), dtype=tl.float32)
        acc0 = tl.dot(x, w0, zero, input_precision=PRECISION)
        acc1 = tl.dot(x, w1, zero, input_precision=PRECISION)
        acc2 = tl.dot(x, w2, zero, input_precision=PRECISION)
        acc3 = tl.dot(x, w3, zero, input_precision=PRECISION)
        best = acc0
        won = tl.zeros((BM, BN), dtype=tl.int32)
        won = tl.where(acc1 > best, 1, won)
        best = tl.maximum(acc1, best)
        won = tl.where(acc2 > best, 2, won)
        best = tl.maximum(acc2, best)
        won = tl.where(acc3 > best, 3, won)
        best = tl.maximum(acc3, best)
        best += bias[None, :]
        inside = real[:, None] & real_co
        row = ((g * BATCH + n) * (PH + 2 * BORDER) + py + BORDER) * (PW + 2 * BORDER) + px + BORDER
        tl.store(out + row[:, None] * CO + co[None, :], tl.maximum(best, 0.0), mask=inside)
        if KEEP_WINNER:
            spot = (g * BATCH * PH * PW + m)[:, None] * CO + co[None, :]
            tl.store(winner + spot, tl.where(best > 0.0, won, DEAD).to(tl.int8), mask=inside)


@triton.jit
def convolution_weight_gradient(
    images, rows, upstream, winner, partial,
    row_stride, slots, length, bias_at,
    BATCH: tl.constexpr, H: tl.constexpr, W: tl.constexpr, CI: tl.constexpr, CO: tl.constexpr, POOL: tl.constexpr,
    PH: tl.constexpr, PW: tl.constexpr, GATHER: tl.constexpr, PARTS: tl.constexpr,
    BKW: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """partial[part, g, k, co] = sum over a part of the samples of patch_k * gradient_co, and the bias' likewise."""
    part = tl.program_id(1)
    g = tl.program_id(2).to(tl.int64)
    k = tl.program_id(0) * BKW + tl.arange(0, BKW)
    in_k = k < 9 * CI
    tap = k // CI
    offset = ((tap // 3) * W + tap % 3) * CI + k % CI
    co = tl.arange(0, BN)
    STRIDE: tl.constexpr = 2 if POOL else 1
    acc = tl.zeros((BKW, BN), dtype=tl.float32)
    bias = tl.zeros((BR, BN), dtype=tl.float32)
    TOTAL: tl.constexpr = BATCH * PH * PW
    PART_STEPS: tl.constexpr = (TOTAL + PARTS * BR - 1) // (PARTS * BR)
    for step in range(PART_STEPS):
        r = (part * PART_STEPS + step) * BR + tl.arange(0, BR)
        real = r < TOTAL
        inner = tl.where(real, r, 0)
        n = inner // (PH * PW)
        if GATHER:
            sample = tl.maximum(tl.load(rows + g * row_stride + n).to(tl.int64), 0)
        else:
            sample = g * BATCH + n
        corner = images + sample * (H * W * CI) + (((inner % (PH * PW)) // PW) * W + inner % PW) * (STRIDE * CI)
        spot = (g * TOTAL + inner)[:, None] * CO + co[None, :]
        inside = real[:, None] & (co[None, :] < CO)
        gradient = tl.load(upstream + spot, mask=inside, other=0.0)
        won = tl.load(winner + spot, mask=inside, other=4)
        bias += tl.where(won < DEAD, gradient, 0.0)
        at = corner[None, :] + offset[:, None]
        taps = in_k[:, None]
        part0 = tl.where(won == 0, gradient, 0.0)
        acc = tl.dot(_patch(at, taps, CI, BKW), part0, acc, input_precision=PRECISION)
        if POOL:
            part1 = tl.where(won == 1, gradient, 0.0)
            acc = tl.dot(_patch(at + CI, taps, CI, BKW), part1, acc, input_precision=PRECISION)
            part2 = tl.where(won == 2, gradient, 0.0)
            acc = tl.dot(_patch(at + W * CI, taps, CI, BKW), part2, acc, input_precision=PRECISION)
            part3 = tl.where(won == 3, gradient, 0.0)
            acc = tl.dot(_patch(at + (W + 1) * CI, taps, CI, BKW), part3, acc, input_precision=PRECISION)
    target = partial + (part * slots + g) * length
    tl.store(target + k[:, None] * CO + co[None, :], acc, mask=in_k[:, None] & (co[None, :] < CO))
    if tl.program_id(0) == 0:
        tl.store(target + bias_at + co, tl.sum(bias, axis=0), mask=co < CO)


@triton.jit
def _store_shifted(target, gradient, dy, dx, ci, co, CI: tl.constexpr, CO: tl.constexpr):
    """Store the rows of a transposed 4x4 block that are taps of a position."""
    inside = (dy >= 0) & (dy < 3) & (dx >= 0) & (dx < 3)
    at = target + ((dy * 3 + dx) * CI + ci)[None, :] * CO + co[:, None]
    tl.store(at, gradient, mask=inside[None, :] & (co < CO)[:, None])


@triton.jit
def block_weight_gradient(
    images, rows, upstream, winner, partial,
    row_stride, slots, length, bias_at,
    BATCH: tl.constexpr, H: tl.constexpr, W: tl.constexpr, CI: tl.constexpr, CO: tl.constexpr,
    PH: tl.constexpr, PW: tl.constexpr, GATHER: tl.constexpr, PARTS: tl.constexpr,
    BN: tl.constexpr, BR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The weight gradient to `convolve_block`: partial[4 part + s] is what position s of the four adds."""
    part = tl.program_id(0)
    g = tl.program_id(1).to(tl.int64)
    K: tl.constexpr = 16 * CI
    k = tl.arange(0, K)
    offset = k // (4 * CI) * (W * CI) + k % (4 * CI)
    co = tl.arange(0, BN)
    acc0 = tl.zeros((BN, K), dtype=tl.float32)
    acc1 = acc0
    acc2 = acc0
    acc3 = acc0
    bias = tl.zeros((BR, BN), dtype=tl.float32)
    TOTAL: tl.constexpr = BATCH * PH * PW
    PART_STEPS: tl.constexpr = (TOTAL + PARTS * BR - 1) // (PARTS * BR)
    for step in range(PART_STEPS):
        r = (part * PART_STEPS + step) * BR + tl.arange(0, BR)
        real = r < TOTAL
        inner = tl.where(real, r, 0)
        n = inner // (PH * PW)
        if GATHER:
            sample = tl.maximum(tl.load(rows + g * row_stride + n).to(tl.int64), 0)
        else:
            sample = g * BATCH + n
        corner = images + sample * (H * W * CI) + (((inner % (PH * PW)) // PW) * W + inner % PW) * (2 * CI)
        spot = (g * TOTAL + inner)[:, None] * CO + co[None, :]
        inside = real[:, None] & (co[None, :] < CO)
        gradient = tl.load(upstream + spot, mask=inside, other=0.0)
        won = tl.load(winner + spot, mask=inside, other=4)
        bias += tl.where(won < DEAD, gradient, 0.0)
        x = tl.load(corner[:, None] + offset[None, :])
        g0 = tl.where(won == 0, gradient, 0.0)
        g1 = tl.where(won == 1, gradient, 0.0)
        g2 = tl.where(won == 2, gradient, 0.0)
        g3 = tl.where(won == 3, gradient, 0.0)
        acc0 = tl.dot(tl.trans(g0), x, acc0, input_precision=PRECISION)
        acc1 = tl.dot(tl.trans(g1), x, acc1, input_precision=PRECISION)
        acc2 = tl.dot(tl.trans(g2), x, acc2, input_precision=PRECISION)
        acc3 = tl.dot(tl.trans(g3), x, acc3, input_precision=PRECISION)
    u = k // (4 * CI)
    v = (k % (4 * CI)) // CI
    ci = k % CI
    first = part * 4 * slots + g
    _store_shifted(partial + first * length, acc0, u, v, ci, co, CI, CO)
    _store_shifted(partial + (first + slots) * length, acc1, u, v - 1, ci, co, CI, CO)
    _store_shifted(partial + (first + 2 * slots) * length, acc2, u - 1, v, ci, co, CI, CO)
    _store_shifted(partial + (first + 3 * slots) * length, acc3, u - 1, v - 1, ci, co, CI, CO)
    # The bias is in the first of the four; the others' stays at the zeros it was made with.
    tl.store(partial + first * length + bias_at + co, tl.sum(bias, axis=0), mask=co < CO)


@triton.jit
def row_weight_gradient(
    images, rows, upstream, winner, partial,
    row_stride, slots, length, bias_at,
    BATCH: tl.constexpr, H: tl.constexpr, W: tl.constexpr, CI: tl.constexpr, CO: tl.constexpr,
    PH: tl.constexpr, PW: tl.constexpr, GATHER: tl.constexpr, PARTS: tl.constexpr,
    BC: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The weight gradient of a row of taps of a pooled convolution, for BC of its channels.

    A pixel is loaded once for the two positions side by side that see it. `partial` is as in
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
    TOTAL: tl.constexpr = BATCH * PH * PW
    PART_STEPS: tl.constexpr = (TOTAL + PARTS * BR - 1) // (PARTS * BR)
    for step in range(PART_STEPS):
        r = (part * PART_STEPS + step) * BR + tl.arange(0, BR)
        real = r < TOTAL
        inner = tl.where(real, r, 0)
        n = inner // (PH * PW)
        if GATHER:
            sample = tl.maximum(tl.load(rows + g * row_stride + n).to(tl.int64), 0)
        else:
            sample = g * BATCH + n
        py = (inner % (PH * PW)) // PW
        corner = images + (sample * (H * W) + (py * 2 + dy) * W + inner % PW * 2) * CI
        spot = (g * TOTAL + inner)[:, None] * CO + co[None, :]
        inside = real[:, None] & (co[None, :] < CO)
        gradient = tl.load(upstream + spot, mask=inside, other=0.0)
        won = tl.load(winner + spot, mask=inside, other=4)
        bias += tl.where(won < DEAD, gradient, 0.0)
        at = corner[None, :] + ci[:, None]
        for a in tl.static_range(2):
            left = tl.where(won == 2 * a, gradient, 0.0)
            right = tl.where(won == 2 * a + 1, gradient, 0.0)
            x0 = tl.load(at + a * (W * CI))
            x1 = tl.load(at + a * (W * CI) + CI)
            x2 = tl.load(at + a * (W * CI) + 2 * CI)
            x3 = tl.load(at + a * (W * CI) + 3 * CI)
            acc0 = tl.dot(x0, left, acc0, input_precision=PRECISION)
            acc0 = tl.dot(x1, right, acc0, input_precision=PRECISION)
            acc1 = tl.dot(x1, left, acc1, input_precision=PRECISION)
            acc1 = tl.dot(x2, right, acc1, input_precision=PRECISION)
            acc2 = tl.dot(x2, left, acc2, input_precision=PRECISION)
            acc2 = tl.dot(x3, right, acc2, input_precision=PRECISION)
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
    PH: tl.constexpr, PW: tl.constexpr, GATHER: tl.constexpr, FIRST: tl.constexpr, NESTEROV: tl.constexpr,
    BKW: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The whole weight gradient of an unpooled convolution of few outputs, and the step it makes."""
    g = tl.program_id(1).to(tl.int64)
    k = tl.program_id(0) * BKW + tl.arange(0, BKW)
    in_k = k < 9 * CI
    tap = k // CI
    offset = ((tap // 3) * W + tap % 3) * CI + k % CI
    co = tl.arange(0, BN)
    acc = tl.zeros((BKW, BN), dtype=tl.float32)
    biases = tl.zeros((BR, BN), dtype=tl.float32)
    TOTAL: tl.constexpr = BATCH * PH * PW
    for start in range(0, TOTAL, BR):
        r = start + tl.arange(0, BR)
        real = r < TOTAL
        inner = tl.where(real, r, 0)
        n = inner // (PH * PW)
        if GATHER:
            sample = tl.maximum(tl.load(rows + g * row_stride + n).to(tl.int64), 0)
        else:
            sample = g * BATCH + n
        corner = images + sample * (H * W * CI) + (((inner % (PH * PW)) // PW) * W + inner % PW) * CI
        spot = (g * TOTAL + inner)[:, None] * CO + co[None, :]
        inside = real[:, None] & (co[None, :] < CO)
        gradient = tl.load(upstream + spot, mask=inside, other=0.0)
        won = tl.load(winner + spot, mask=inside, other=4)
        gradient = tl.where(won < DEAD, gradient, 0.0)
        biases += gradient
        at = corner[None, :] + offset[:, None]
        acc = tl.dot(_patch(at, in_k[:, None], CI, BKW), gradient, acc, input_precision=PRECISION)
    real = in_k[:, None] & (co[None, :] < CO)
    at = g * size + weight_at + k[:, None] * CO + co[None, :]
    weight = tl.load(models + at, mask=real, other=0.0)
    velocity = weight
    if not FIRST:
        velocity = tl.load(velocities + at, mask=real, other=0.0)
    weight, velocity = _descend(weight, velocity, acc, rate, momentum, decay, FIRST, NESTEROV)
    tl.store(models + at, weight, mask=real)
    tl.store(velocities + at, velocity, mask=real)
    if tl.program_id(0) == 0:
        at_b = g * size + bias_at + co
        bias = tl.load(models + at_b, mask=co < CO, other=0.0)
        drive = bias
        if not FIRST:
            drive = tl.load(velocities + at_b, mask=co < CO, other=0.0)
        bias, drive = _descend(bias, drive, tl.sum(biases, axis=0), rate, momentum, decay, FIRST, NESTEROV)
        tl.store(models + at_b, bias, mask=co < CO)
        tl.store(velocities + at_b, drive, mask=co < CO)


@triton.jit
def spread_gradient(
    upstream, winner, spread, total,
    CO: tl.constexpr, POOL: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    SH: tl.constexpr, SW: tl.constexpr, LEAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Undo pooling and ReLU: the gradient at each of a convolution's own outputs, LEAD behind a border of zeros.

    `spread` is (samples, SH, SW, CO); its border is never written and stays zero.
    """
    j = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    real = j < total
    co = j % CO
    place = j // CO
    n = place // (PH * PW)
    py = (place % (PH * PW)) // PW
    px = place % PW
    value = tl.load(upstream + j, mask=real, other=0.0)
    won = tl.load(winner + j, mask=real, other=4)
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
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out[g, n, y, x, ci]: the gradient of a convolution's H x W input (without padding) from `spread_gradient`."""
    g = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    real = m < BATCH * H * W
    inner = tl.where(real, m, 0)
    n = inner // (H * W)
    y = (inner % (H * W)) // W
    x = inner % W
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
        acc = tl.dot(_patch(at, inside[None, :], CO, BK), tile, acc, input_precision=PRECISION)
    tl.store(out + (g * BATCH * H * W + m)[:, None] * CI + ci[None, :], acc, mask=real[:, None] & (ci[None, :] < CI))


@triton.jit
def descend_convolution(
    partial, models, velocities,
    slots, size, length, weight_at, rate, momentum, decay,
    PARTS: tl.constexpr, FIRST: tl.constexpr, NESTEROV: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add the parts of a convolution's gradient in order and take one step."""
    g = tl.program_id(1).to(tl.int64)
    j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = j < length
    gradient = tl.zeros((BLOCK,), dtype=tl.float32)
    TOGETHER: tl.constexpr = 8 if PARTS % 8 == 0 else PARTS
    for start in range(0, PARTS, TOGETHER):
        for ahead in tl.static_range(TOGETHER):  # so many loads are on their way at once
            gradient += tl.load(partial + ((start + ahead) * slots + g) * length + j, mask=real, other=0.0)
    at = g * size + weight_at + j
    weight = tl.load(models + at, mask=real, other=0.0)
    velocity = weight
    if not FIRST:
        velocity = tl.load(velocities + at, mask=real, other=0.0)
    weight, velocity = _descend(weight, velocity, gradient, rate, momentum, decay, FIRST, NESTEROV)
    tl.store(models + at, weight, mask=real)
    tl.store(velocities + at, velocity, mask=real)


@triton.jit
def _mix(value):
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB
    return value ^ (value >> 31)


@triton.jit
def hidden_layer(
    inputs, models, out, dropout_keys,
    size, BATCH, weight_at, bias_at, keep_scale, dropped_below,
    IN: tl.constexpr, OUT: tl.constexpr, DROPOUT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out[g, n, o] = ReLU(inputs W + b), with dropout by hashing the unit's place (`sifu.core.draws`)."""
    g = tl.program_id(2).to(tl.int64)
    n = tl.program_id(1) * BM + tl.arange(0, BM)
    o = tl.program_id(0) * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, IN, BK):
        f = start + tl.arange(0, BK)
        x = tl.load(
            inputs + (g * BATCH + n)[:, None] * IN + f[None, :],
            mask=(n < BATCH)[:, None] & (f < IN)[None, :], other=0.0,
        )  # fmt: skip
        w = tl.load(
            models + g * size + weight_at + f[:, None] * OUT + o[None, :], mask=(f < IN)[:, None] & (o < OUT)[None, :],
            other=0.0,
        )  # fmt: skip
        acc += tl.dot(x, w, input_precision=PRECISION)
    acc += tl.load(models + g * size + bias_at + o, mask=o < OUT, other=0.0)[None, :]
    value = tl.maximum(acc, 0.0)
    if DROPOUT:
        key = tl.load(dropout_keys + g).to(tl.uint64, bitcast=True)
        unit = (n[:, None] * OUT + o[None, :] + 1).to(tl.uint64)
        drawn = _mix(key + unit * 0x9E3779B97F4A7C15) >> 11
        value = tl.where(drawn.to(tl.int64) >= dropped_below, value * keep_scale, 0.0)
    tl.store(out + (g * BATCH + n)[:, None] * OUT + o[None, :], value, mask=(n < BATCH)[:, None] & (o < OUT)[None, :])


@triton.jit
def hidden_layer_backward(
    inputs, outputs, upstream, models, velocities, input_gradient,
    size, BATCH, weight_at, bias_at, keep_scale, rate, momentum, decay,
    IN: tl.constexpr, OUT: tl.constexpr, FIRST: tl.constexpr, NESTEROV: tl.constexpr,
    BM: tl.constexpr, BF: tl.constexpr, BO: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of a hidden layer's input, and one step of its weights, reading them once.

    `upstream` is the gradient of `outputs`; BM covers the whole batch. The input's own ReLU is masked where its
    gradient is used.
    """
    g = tl.program_id(1).to(tl.int64)
    f = tl.program_id(0) * BF + tl.arange(0, BF)
    n = tl.arange(0, BM)
    x = tl.load(
        inputs + (g * BATCH + n)[:, None] * IN + f[None, :], mask=(n < BATCH)[:, None] & (f < IN)[None, :], other=0.0
    )
    acc = tl.zeros((BM, BF), dtype=tl.float32)
    for start in range(0, OUT, BO):
        o = start + tl.arange(0, BO)
        inside = (n < BATCH)[:, None] & (o < OUT)[None, :]
        at = (g * BATCH + n)[:, None] * OUT + o[None, :]
        value = tl.load(outputs + at, mask=inside, other=0.0)
        gradient = tl.where(value > 0.0, tl.load(upstream + at, mask=inside, other=0.0) * keep_scale, 0.0)
        spot = g * size + weight_at + f[:, None] * OUT + o[None, :]
        real = (f < IN)[:, None] & (o < OUT)[None, :]
        weight = tl.load(models + spot, mask=real, other=0.0)
        acc += tl.dot(gradient, tl.trans(weight), input_precision=PRECISION)
        own = tl.dot(tl.trans(x), gradient, input_precision=PRECISION)
        velocity = weight
        if not FIRST:
            velocity = tl.load(velocities + spot, mask=real, other=0.0)
        weight, velocity = _descend(weight, velocity, own, rate, momentum, decay, FIRST, NESTEROV)
        tl.store(models + spot, weight, mask=real)
        tl.store(velocities + spot, velocity, mask=real)
        if tl.program_id(0) == 0:
            spot_b = g * size + bias_at + o
            bias = tl.load(models + spot_b, mask=o < OUT, other=0.0)
            drive = bias
            if not FIRST:
                drive = tl.load(velocities + spot_b, mask=o < OUT, other=0.0)
            bias, drive = _descend(bias, drive, tl.sum(gradient, axis=0), rate, momentum, decay, FIRST, NESTEROV)
            tl.store(models + spot_b, bias, mask=o < OUT)
            tl.store(velocities + spot_b, drive, mask=o < OUT)
    tl.store(
        input_gradient + (g * BATCH + n)[:, None] * IN + f[None, :],
        acc,
        mask=(n < BATCH)[:, None] & (f < IN)[None, :],
    )


@triton.jit
def classify(
    inputs, labels, rows, models, velocities, input_gradient,
    row_stride, size, BATCH, weight_at, bias_at, rate, momentum, decay,
    IN: tl.constexpr, OUT: tl.constexpr, FIRST: tl.constexpr, NESTEROV: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The last layer, softmax cross-entropy over the real rows of the batch, its gradient, and one step, per slot."""
    g = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BM)
    o = tl.arange(0, BN)
    row = tl.load(rows + g * row_stride + n, mask=n < BATCH, other=-1).to(tl.int64)
    label = tl.load(labels + tl.maximum(row, 0), mask=row >= 0, other=-1).to(tl.int32)
    scores = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, IN, BK):
        f = start + tl.arange(0, BK)
        x = tl.load(
            inputs + (g * BATCH + n)[:, None] * IN + f[None, :],
            mask=(n < BATCH)[:, None] & (f < IN)[None, :], other=0.0,
        )  # fmt: skip
        w = tl.load(
            models + g * size + weight_at + f[:, None] * OUT + o[None, :], mask=(f < IN)[:, None] & (o < OUT)[None, :],
            other=0.0,
        )  # fmt: skip
        scores += tl.dot(x, w, input_precision=PRECISION)
    spot_b = g * size + bias_at + o
    bias = tl.load(models + spot_b, mask=o < OUT, other=0.0)
    scores = tl.where((o < OUT)[None, :], scores + bias[None, :], float("-inf"))
    scores = tl.exp(scores - tl.max(scores, axis=1)[:, None])
    probability = scores / tl.sum(scores, axis=1)[:, None]
    count = tl.sum((row >= 0).to(tl.float32), axis=0)
    gradient = (probability - tl.where(o[None, :] == label[:, None], 1.0, 0.0)) / count
    gradient = tl.where((row >= 0)[:, None], gradient, 0.0)
    for start in range(0, IN, BK):
        f = start + tl.arange(0, BK)
        at = (g * BATCH + n)[:, None] * IN + f[None, :]
        inside = (n < BATCH)[:, None] & (f < IN)[None, :]
        x = tl.load(inputs + at, mask=inside, other=0.0)
        spot = g * size + weight_at + f[:, None] * OUT + o[None, :]
        real = (f < IN)[:, None] & (o < OUT)[None, :]
        w = tl.load(models + spot, mask=real, other=0.0)
        tl.store(input_gradient + at, tl.dot(gradient, tl.trans(w), input_precision=PRECISION), mask=inside)
        own = tl.dot(tl.trans(x), gradient, input_precision=PRECISION)
        velocity = w
        if not FIRST:
            velocity = tl.load(velocities + spot, mask=real, other=0.0)
        w, velocity = _descend(w, velocity, own, rate, momentum, decay, FIRST, NESTEROV)
        tl.store(models + spot, w, mask=real)
        tl.store(velocities + spot, velocity, mask=real)
    drive = bias
    if not FIRST:
        drive = tl.load(velocities + spot_b, mask=o < OUT, other=0.0)
    bias, drive = _descend(bias, drive, tl.sum(gradient, axis=0), rate, momentum, decay, FIRST, NESTEROV)
    tl.store(models + spot_b, bias, mask=o < OUT)
    tl.store(velocities + spot_b, drive, mask=o < OUT)


@triton.jit
def score(
    inputs, labels, rows, models, correct, losses,
    row_stride, size, BATCH, weight_at, bias_at,
    IN: tl.constexpr, OUT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The last layer in evaluation: whether each row is classified rightly, and its loss."""
    g = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BM + tl.arange(0, BM)
    o = tl.arange(0, BN)
    row = tl.load(rows + g * row_stride + n, mask=n < BATCH, other=-1).to(tl.int64)
    label = tl.load(labels + tl.maximum(row, 0), mask=row >= 0, other=-1).to(tl.int32)
    scores = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, IN, BK):
        f = start + tl.arange(0, BK)
        x = tl.load(
            inputs + (g * BATCH + n)[:, None] * IN + f[None, :],
            mask=(n < BATCH)[:, None] & (f < IN)[None, :], other=0.0,
        )  # fmt: skip
        w = tl.load(
            models + g * size + weight_at + f[:, None] * OUT + o[None, :], mask=(f < IN)[:, None] & (o < OUT)[None, :],
            other=0.0,
        )  # fmt: skip
        scores += tl.dot(x, w, input_precision=PRECISION)
    scores += tl.load(models + g * size + bias_at + o, mask=o < OUT, other=0.0)[None, :]
    scores = tl.where((o < OUT)[None, :], scores, float("-inf"))
    best = tl.max(scores, axis=1)
    own = tl.sum(tl.where(o[None, :] == label[:, None], scores, 0.0), axis=1)
    loss = best + tl.log(tl.sum(tl.exp(scores - best[:, None]), axis=1)) - own
    chosen = tl.min(tl.where(scores == best[:, None], o[None, :], BN), axis=1)
    real = (n < BATCH) & (row >= 0)
    tl.store(correct + g * BATCH + n, (real & (chosen == label)).to(tl.int32), mask=n < BATCH)
    tl.store(losses + g * BATCH + n, tl.where(real, loss, 0.0), mask=n < BATCH)
