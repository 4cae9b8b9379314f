"""Triton kernels for linear layers, and kernels that distribute, update, average and measure models.

Slots and parameters are defined in `sifu_kernels.convolution_kernels`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def take_step(models, velocities, at, real, weight, gradient, rate, momentum, decay, FIRST: tl.constexpr):
    """Take one step of torch.optim.SGD for the parameters at `at`, whose values are `weight`.

    A gradient with an additional first dimension is summed over that dimension.
    """
    if not FIRST:
        # Load first: the position of a load decides layouts and thus which products and sums are fused.
        before = tl.load(velocities + at, mask=real, other=0.0)
    if len(gradient.shape) > len(weight.shape):
        gradient = tl.sum(gradient, axis=0)
    gradient = gradient + decay * weight
    if FIRST:
        velocity = gradient
    else:
        velocity = momentum * before + gradient
    tl.store(models + at, weight - rate * velocity, mask=real)
    tl.store(velocities + at, velocity, mask=real)


@triton.jit
def descend_convolution(
    partial, models, velocities,
    slots, size, length, weight_at, rate, momentum, decay,
    PARTS: tl.constexpr, FIRST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum the parts of a convolution's gradient in order and take one step."""
    g = tl.program_id(1).to(tl.int64)
    j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = j < length
    gradient = tl.zeros((BLOCK,), dtype=tl.float32)
    TOGETHER: tl.constexpr = 8 if PARTS % 8 == 0 else PARTS
    for start in range(0, PARTS, TOGETHER):
        for ahead in tl.static_range(TOGETHER):  # issues all these loads at once
            gradient += tl.load(partial + ((start + ahead) * slots + g) * length + j, mask=real, other=0.0)
    at = g * size + weight_at + j
    weight = tl.load(models + at, mask=real, other=0.0)
    take_step(models, velocities, at, real, weight, gradient, rate, momentum, decay, FIRST)


@triton.jit
def hand_out(history, counter, order, models, lanes, width, size, SLOTS: tl.constexpr, BLOCK: tl.constexpr):
    """Copy the current model of each slot's lane, history[counter, lane], to models[slot]."""
    g = tl.program_id(1).to(tl.int64)
    j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    now = tl.load(counter).to(tl.int64)
    lane = tl.load(order + now * width + g) // SLOTS
    value = tl.load(history + (now * lanes + lane) * size + j, mask=j < size, other=0.0)
    tl.store(models + g * size + j, value, mask=j < size)


@triton.jit
def average(
    history, counter, places, models, weights, origins, partial, lanes, size,
    SLOTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the next model history[counter + 1, lane] = mean, and partial sums of squares.

    partial[lane, q, block] holds the block's sum of squares: of theta_q - mean for q < SLOTS, of mean - theta for
    q = SLOTS, of the next model minus origin for q = SLOTS + 1, and of theta for q = SLOTS + 2. An empty round leaves
    the model unchanged; entries of empty slots are not written.
    """
    lane = tl.program_id(1).to(tl.int64)
    j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = j < size
    now = tl.load(counter).to(tl.int64)
    theta = tl.load(history + (now * lanes + lane) * size + j, mask=real, other=0.0).to(tl.float64)
    mean = tl.zeros((BLOCK,), dtype=tl.float64)
    total = tl.zeros((BLOCK,), dtype=tl.float64)
    for i in range(SLOTS):
        place = tl.load(places + (now * lanes + lane) * SLOTS + i)
        if place >= 0:
            share = tl.load(weights + (now * lanes + lane) * SLOTS + i)
            total += share
            mean += share * tl.load(models + place * size + j, mask=real, other=0.0).to(tl.float64)
    mean = tl.where(total > 0.0, mean, theta)
    blocks = tl.num_programs(0)
    spot = partial + lane * (SLOTS + 3) * blocks + tl.program_id(0)
    for i in range(SLOTS):
        place = tl.load(places + (now * lanes + lane) * SLOTS + i)
        if place >= 0:
            mine = tl.load(models + place * size + j, mask=real, other=0.0).to(tl.float64)
            away = tl.where(real, mine - mean, 0.0)
            tl.store(spot + i * blocks, tl.sum(away * away, axis=0))
    shift = tl.where(real, mean - theta, 0.0)
    tl.store(spot + SLOTS * blocks, tl.sum(shift * shift, axis=0))
    new = (theta + (mean - theta)).to(history.dtype.element_ty)
    tl.store(history + ((now + 1) * lanes + lane) * size + j, new, mask=real)
    way = tl.where(real, new.to(tl.float64) - tl.load(origins + lane * size + j, mask=real, other=0.0), 0.0)
    tl.store(spot + (SLOTS + 1) * blocks, tl.sum(way * way, axis=0))
    tl.store(spot + (SLOTS + 2) * blocks, tl.sum(theta * theta, axis=0))


@triton.jit
def collect(partial, counter, measured, lanes, BLOCKS: tl.constexpr, QUANTITIES: tl.constexpr, BLOCK: tl.constexpr):
    """Compute measured[counter, lane, q], the square root of the sum of a quantity's partial sums."""
    lane = tl.program_id(0).to(tl.int64)
    q = tl.program_id(1)
    now = tl.load(counter).to(tl.int64)
    total = tl.zeros((BLOCK,), dtype=tl.float64)
    for start in range(0, BLOCKS, BLOCK):
        b = start + tl.arange(0, BLOCK)
        total += tl.load(partial + (lane * QUANTITIES + q) * BLOCKS + b, mask=b < BLOCKS, other=0.0)
    tl.store(measured + (now * lanes + lane) * QUANTITIES + q, tl.sqrt(tl.sum(total, axis=0)))


@triton.jit
def _product(
    inputs, models, g, n, o,
    size, BATCH, weight_at, IN: tl.constexpr, OUT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Return outputs o of samples n of slot g, without the bias."""
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
        acc += tl.dot(x, w, input_precision="tf32")
    return acc


@triton.jit
def _row_and_label(rows, labels, row_stride, g, n, BATCH):
    """Return the data-row index of sample n in slot g's batch, and its label; both are -1 if there is no sample."""
    row = tl.load(rows + g * row_stride + n, mask=n < BATCH, other=-1).to(tl.int64)
    label = tl.load(labels + tl.maximum(row, 0), mask=row >= 0, other=-1).to(tl.int32)
    return row, label


@triton.jit
def _mix(value):
    """Compute `sifu.theory.participation.mix`."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB
    return value ^ (value >> 31)


@triton.jit
def hidden_layer(
    inputs, models, out, dropout_keys,
    size, BATCH, weight_at, bias_at, keep_scale, dropped_below,
    IN: tl.constexpr, OUT: tl.constexpr, DROPOUT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Compute out[g, n, o] = ReLU(inputs W + b), with dropout keyed by position (`sifu.theory.participation`)."""
    g = tl.program_id(2).to(tl.int64)
    n = tl.program_id(1) * BM + tl.arange(0, BM)
    o = tl.program_id(0) * BN + tl.arange(0, BN)
    acc = _product(inputs, models, g, n, o, size, BATCH, weight_at, IN, OUT, BM, BN, BK)
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
    IN: tl.constexpr, OUT: tl.constexpr, FIRST: tl.constexpr,
    BM: tl.constexpr, BF: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of a hidden layer's input and take one step of its weights, which are read once.

    `upstream` is the gradient of `outputs`; BM covers the whole batch. The mask of the input's own ReLU is applied
    where its gradient is used.
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
        acc += tl.dot(gradient, tl.trans(weight), input_precision="tf32")
        own = tl.dot(tl.trans(x), gradient, input_precision="tf32")
        take_step(models, velocities, spot, real, weight, own, rate, momentum, decay, FIRST)
        if tl.program_id(0) == 0:
            spot_b = g * size + bias_at + o
            bias = tl.load(models + spot_b, mask=o < OUT, other=0.0)
            take_step(models, velocities, spot_b, o < OUT, bias, gradient, rate, momentum, decay, FIRST)
    tl.store(
        input_gradient + (g * BATCH + n)[:, None] * IN + f[None, :],
        acc,
        mask=(n < BATCH)[:, None] & (f < IN)[None, :],
    )


@triton.jit
def classify(
    inputs, labels, rows, models, velocities, input_gradient,
    row_stride, size, BATCH, weight_at, bias_at, rate, momentum, decay,
    IN: tl.constexpr, OUT: tl.constexpr, FIRST: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """For each slot, compute the last layer and softmax cross-entropy over the true rows; take one gradient step."""
    g = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BM)
    o = tl.arange(0, BN)
    row, label = _row_and_label(rows, labels, row_stride, g, n, BATCH)
    scores = _product(inputs, models, g, n, o, size, BATCH, weight_at, IN, OUT, BM, BN, BK)
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
        tl.store(input_gradient + at, tl.dot(gradient, tl.trans(w), input_precision="tf32"), mask=inside)
        own = tl.dot(tl.trans(x), gradient, input_precision="tf32")
        take_step(models, velocities, spot, real, w, own, rate, momentum, decay, FIRST)
    take_step(models, velocities, spot_b, o < OUT, bias, gradient, rate, momentum, decay, FIRST)


@triton.jit
def score(
    inputs, labels, rows, models, correct, losses,
    row_stride, size, BATCH, weight_at, bias_at,
    IN: tl.constexpr, OUT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Compute the last layer in evaluation: whether each row is classified correctly, and its loss."""
    g = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BM + tl.arange(0, BM)
    o = tl.arange(0, BN)
    row, label = _row_and_label(rows, labels, row_stride, g, n, BATCH)
    scores = _product(inputs, models, g, n, o, size, BATCH, weight_at, IN, OUT, BM, BN, BK)
    scores += tl.load(models + g * size + bias_at + o, mask=o < OUT, other=0.0)[None, :]
    scores = tl.where((o < OUT)[None, :], scores, float("-inf"))
    best = tl.max(scores, axis=1)
    own = tl.sum(tl.where(o[None, :] == label[:, None], scores, 0.0), axis=1)
    loss = best + tl.log(tl.sum(tl.exp(scores - best[:, None]), axis=1)) - own
    chosen = tl.min(tl.where(scores == best[:, None], o[None, :], BN), axis=1)
    real = (n < BATCH) & (row >= 0)
    tl.store(correct + g * BATCH + n, (real & (chosen == label)).to(tl.int32), mask=n < BATCH)
    tl.store(losses + g * BATCH + n, tl.where(real, loss, 0.0), mask=n < BATCH)
