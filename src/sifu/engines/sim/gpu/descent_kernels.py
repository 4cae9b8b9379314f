"""One step of SGD: the piece that kernels end with which know their gradient, and the kernel for sums in parts.

A clipped step needs the norm of the whole gradient first: then every kernel stores what it would have stepped by, and
three more take the norm of each slot's gradient and the step.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def take_step(
    models, velocities, at, real, weight, gradient,
    rate, momentum, decay, FIRST: tl.constexpr, NESTEROV: tl.constexpr, CLIPPED: tl.constexpr,
):  # fmt: skip
    """One step as torch.optim.SGD does it, of the parameters at `at`, whose values are `weight`.

    A gradient with one dimension more is summed over its first. CLIPPED: the gradient is stored at `velocities`, and
    the step is left to `clipped_step`.
    """
    if CLIPPED:
        if len(gradient.shape) > len(weight.shape):
            gradient = tl.sum(gradient, axis=0)
        tl.store(velocities + at, gradient, mask=real)
    else:
        _descend(models, velocities, at, real, weight, gradient, rate, momentum, decay, FIRST, NESTEROV)


@triton.jit
def _descend(
    models, velocities, at, real, weight, gradient,
    rate, momentum, decay, FIRST: tl.constexpr, NESTEROV: tl.constexpr,
):  # fmt: skip
    if not FIRST:
        # Before the gradient is used: where a load stands decides layouts, hence which products and sums are fused.
        before = tl.load(velocities + at, mask=real, other=0.0)
    if len(gradient.shape) > len(weight.shape):
        gradient = tl.sum(gradient, axis=0)
    gradient = gradient + decay * weight
    if FIRST:
        velocity = gradient
    else:
        velocity = momentum * before + gradient
    direction = velocity
    if NESTEROV:
        direction = gradient + momentum * velocity
    tl.store(models + at, weight - rate * direction, mask=real)
    tl.store(velocities + at, velocity, mask=real)


@triton.jit
def descend_convolution(
    partial, models, velocities,
    slots, size, length, weight_at, rate, momentum, decay,
    PARTS: tl.constexpr, FIRST: tl.constexpr, NESTEROV: tl.constexpr, CLIPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add the parts of a convolution's gradient in order and take one step."""
    g = tl.program_id(1).to(tl.int64)
    j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = j < length
    gradient = tl.zeros((BLOCK,), dtype=tl.float32)
    TOGETHER: tl.constexpr = 8 if PARTS % 8 == 0 else PARTS
    for start in range(0, PARTS, TOGETHER):
        for ahead in tl.static_range(TOGETHER):  # this many loads are on their way at once
            gradient += tl.load(partial + ((start + ahead) * slots + g) * length + j, mask=real, other=0.0)
    at = g * size + weight_at + j
    weight = tl.load(models + at, mask=real, other=0.0)
    take_step(models, velocities, at, real, weight, gradient, rate, momentum, decay, FIRST, NESTEROV, CLIPPED)


@triton.jit
def gradient_squares(gradients, partial, size, BLOCK: tl.constexpr):
    """partial[slot, block]: the sum of squares of a block of the slot's gradient, in float64."""
    g = tl.program_id(1).to(tl.int64)
    j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(gradients + g * size + j, mask=j < size, other=0.0).to(tl.float64)
    tl.store(partial + g * tl.num_programs(0) + tl.program_id(0), tl.sum(value * value, axis=0))


@triton.jit
def clip_factors(partial, factors, clip, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    """factors[slot] = min(1, c / norm) (`LocalTraining.clip_factor`); the partial sums are added in a fixed order."""
    g = tl.program_id(0).to(tl.int64)
    total = tl.zeros((BLOCK,), dtype=tl.float64)
    for start in range(0, BLOCKS, BLOCK):
        b = start + tl.arange(0, BLOCK)
        total += tl.load(partial + g * BLOCKS + b, mask=b < BLOCKS, other=0.0)
    bound = tl.load(clip)
    tl.store(factors + g, (bound / tl.maximum(tl.sqrt(tl.sum(total, axis=0)), bound)).to(tl.float32))


@triton.jit
def clipped_step(
    gradients, factors, models, velocities, size, rate, momentum, decay,
    FIRST: tl.constexpr, NESTEROV: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One step of all parameters by the gradient of each slot times its factor; weight decay comes after clipping."""
    g = tl.program_id(1).to(tl.int64)
    j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = j < size
    at = g * size + j
    weight = tl.load(models + at, mask=real, other=0.0)
    gradient = tl.load(gradients + at, mask=real, other=0.0) * tl.load(factors + g)
    _descend(models, velocities, at, real, weight, gradient, rate, momentum, decay, FIRST, NESTEROV)
