"""One step of SGD: the piece that kernels end with which know their gradient, and the kernel for sums in parts."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def take_step(
    models, velocities, at, real, weight, gradient,
    rate, momentum, decay, FIRST: tl.constexpr, NESTEROV: tl.constexpr,
):  # fmt: skip
    """One step as torch.optim.SGD does it, of the parameters at `at`, whose values are `weight`.

    A gradient with one dimension more is summed over its first.
    """
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
    take_step(models, velocities, at, real, weight, gradient, rate, momentum, decay, FIRST, NESTEROV)
