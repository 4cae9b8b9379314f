"""Where a convolution's outputs, pixels and taps lie: the pieces that its kernels begin with.

Pixels are NHWC. Images and activations lie in borders of zeros as wide as the padding, so that an address is a corner
plus an offset and no load needs a mask.
"""

from __future__ import annotations

import triton
import triton.language as tl

DEAD = tl.constexpr(4)
"""The winner among a pooled output's four positions (0 to 3) where ReLU cut it off."""


@triton.jit
def place_of(number, BATCH, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """Places in BATCH planes of HEIGHT x WIDTH: whether there is one, its number, sample, row and column.

    The first stands in for those behind the last.
    """
    real = number < BATCH * HEIGHT * WIDTH
    inner = tl.where(real, number, 0)
    sample = inner // (HEIGHT * WIDTH)
    y = (inner % (HEIGHT * WIDTH)) // WIDTH
    x = inner % WIDTH
    return real, inner, sample, y, x


@triton.jit
def sample_of(rows, row_stride, g, n, BATCH, GATHER: tl.constexpr):
    """Where sample n of slot g's batch lies: the image that its row names (GATHER), or the slot's own activation."""
    if GATHER:
        sample = tl.maximum(tl.load(rows + g * row_stride + n).to(tl.int64), 0)
    else:
        sample = g * BATCH + n
    return sample


@triton.jit
def tap_offset(k, W: tl.constexpr, CI: tl.constexpr):
    """From a corner to input k of a 3x3 patch."""
    tap = k // CI
    return ((tap // 3) * W + tap % 3) * CI + k % CI


@triton.jit
def block_offset(k, W: tl.constexpr, CI: tl.constexpr):
    """From a corner to input k of a block of 4x4 pixels."""
    return k // (4 * CI) * (W * CI) + k % (4 * CI)


@triton.jit
def load_patch(at, inside, CI: tl.constexpr, BK: tl.constexpr):
    """Load a tile of patches; a mask only where the tile reaches behind the last tap."""
    if (9 * CI) % BK == 0:
        values = tl.load(at)
    else:
        values = tl.load(at, mask=inside, other=0.0)
    return values
