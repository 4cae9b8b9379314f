"""Triton kernels for the linear layers behind the convolutions: forward, backward with a step of SGD, and scores.

Slots and parameters are as in `sifu.engines.sim.gpu.convolution_kernels`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sifu.engines.sim.gpu.round_kernels import take_step


@triton.jit
def _product(
    inputs, models, g, n, o,
    size, BATCH, weight_at, IN: tl.constexpr, OUT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Outputs o of samples n of slot g, without the bias."""
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
    return acc


@triton.jit
def _row_and_label(rows, labels, row_stride, g, n, BATCH):
    """Which sample of the data is number n of slot g's batch, and its label; -1 where there is none."""
    row = tl.load(rows + g * row_stride + n, mask=n < BATCH, other=-1).to(tl.int64)
    label = tl.load(labels + tl.maximum(row, 0), mask=row >= 0, other=-1).to(tl.int32)
    return row, label


@triton.jit
def _mix(value):
    """`sifu.theory.participation.mix`."""
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
    """out[g, n, o] = ReLU(inputs W + b), with dropout by hashing the unit's place (`sifu.theory.participation`)."""
    g = tl.program_id(2).to(tl.int64)
    n = tl.program_id(1) * BM + tl.arange(0, BM)
    o = tl.program_id(0) * BN + tl.arange(0, BN)
    acc = _product(inputs, models, g, n, o, size, BATCH, weight_at, IN, OUT, BM, BN, BK, PRECISION)
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
    IN: tl.constexpr, OUT: tl.constexpr, FIRST: tl.constexpr, NESTEROV: tl.constexpr, CLIPPED: tl.constexpr,
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
        take_step(models, velocities, spot, real, weight, own, rate, momentum, decay, FIRST, NESTEROV, CLIPPED)
        if tl.program_id(0) == 0:
            spot_b = g * size + bias_at + o
            bias = tl.load(models + spot_b, mask=o < OUT, other=0.0)
            take_step(
                models, velocities, spot_b, o < OUT, bias, gradient, rate, momentum, decay, FIRST, NESTEROV, CLIPPED
            )
    tl.store(
        input_gradient + (g * BATCH + n)[:, None] * IN + f[None, :],
        acc,
        mask=(n < BATCH)[:, None] & (f < IN)[None, :],
    )


@triton.jit
def classify(
    inputs, labels, rows, models, velocities, input_gradient,
    row_stride, size, BATCH, weight_at, bias_at, rate, momentum, decay,
    IN: tl.constexpr, OUT: tl.constexpr, FIRST: tl.constexpr, NESTEROV: tl.constexpr, CLIPPED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The last layer, softmax cross-entropy over the real rows of the batch, its gradient, and one step, per slot."""
    g = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BM)
    o = tl.arange(0, BN)
    row, label = _row_and_label(rows, labels, row_stride, g, n, BATCH)
    scores = _product(inputs, models, g, n, o, size, BATCH, weight_at, IN, OUT, BM, BN, BK, PRECISION)
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
        take_step(models, velocities, spot, real, w, own, rate, momentum, decay, FIRST, NESTEROV, CLIPPED)
    take_step(models, velocities, spot_b, o < OUT, bias, gradient, rate, momentum, decay, FIRST, NESTEROV, CLIPPED)


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
    row, label = _row_and_label(rows, labels, row_stride, g, n, BATCH)
    scores = _product(inputs, models, g, n, o, size, BATCH, weight_at, IN, OUT, BM, BN, BK, PRECISION)
    scores += tl.load(models + g * size + bias_at + o, mask=o < OUT, other=0.0)[None, :]
    scores = tl.where((o < OUT)[None, :], scores, float("-inf"))
    best = tl.max(scores, axis=1)
    own = tl.sum(tl.where(o[None, :] == label[:, None], scores, 0.0), axis=1)
    loss = best + tl.log(tl.sum(tl.exp(scores - best[:, None]), axis=1)) - own
    chosen = tl.min(tl.where(scores == best[:, None], o[None, :], BN), axis=1)
    real = (n < BATCH) & (row >= 0)
    tl.store(correct + g * BATCH + n, (real & (chosen == label)).to(tl.int32), mask=n < BATCH)
    tl.store(losses + g * BATCH + n, tl.where(real, loss, 0.0), mask=n < BATCH)
