"""Limits of the hardware: operations and bytes of a round against measured sgemm and memory speed.

`compare.py` starts this file to measure the peaks, which it prints as one line of JSON.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from peers.workloads import A, B, Setting


@dataclass(frozen=True)
class Work:
    """One form of a round: floating-point operations, and the least bytes read from memory."""

    setting: str
    form: str
    operations: float
    bytes: float

    def bound(self, flops: float, bandwidth: float) -> float:
        """Return the least seconds a round takes on hardware with these peaks."""
        return max(self.operations / flops, self.bytes / bandwidth)


def softmax_directly(setting: Setting) -> Work:
    """Return the work of steps that multiply by X twice (scores, gradient); a client's data stay in the cache."""
    features, classes = setting.shape[0], 10
    step = 2 * 2 * setting.batch * features * classes
    return Work(
        setting.name,
        "each step with the data",
        setting.participants * setting.steps * step,
        4 * setting.participants * (setting.samples * features + 2 * (features + 1) * classes),
    )


def softmax_by_gram(setting: Setting) -> Work:
    """Return the work of steps on the scores with a kept G = X X', which need the data only at both ends of a round."""
    features, classes, samples = setting.shape[0], 10, setting.samples
    ends = 2 * 2 * samples * features * classes
    steps = setting.steps * 2 * samples * samples * classes
    return Work(
        setting.name,
        "steps with Gram matrices",
        setting.participants * (ends + steps),
        4 * setting.participants * (samples * features + samples * samples + 2 * (features + 1) * classes),
    )


LAYERS = (
    # outputs (positions x channels), products per output
    (30 * 30 * 32, 3 * 9),
    (13 * 13 * 64, 32 * 9),
    (4 * 4 * 64, 64 * 9),
    (64, 1024),
    (10, 64),
)
"""Layers of the network of B (`ConvNet` of workloads.py)."""
ACTIVATIONS = 30 * 30 * 32 + 15 * 15 * 32 + 13 * 13 * 64 + 6 * 6 * 64 + 4 * 4 * 64 + 64 + 10


def convolutions(setting: Setting) -> Work:
    """Return the work of the forward pass and of the backward pass to weights and inputs, except to the image."""
    forward = sum(2 * outputs * products for outputs, products in LAYERS)
    first = 2 * LAYERS[0][0] * LAYERS[0][1]
    parameters = 3 * 9 * 32 + 32 * 9 * 64 + 64 * 9 * 64 + 1024 * 64 + 640 + 32 + 64 + 64 + 64 + 10
    trained = setting.samples_a_round
    # A step reads parameters, gradients and momentum, and writes parameters and momentum.
    steps = setting.participants * setting.steps * 5 * parameters
    return Work(
        setting.name,
        "forward and backward",
        trained * (3 * forward - first),
        4 * (trained * (math.prod(setting.shape) + 4 * ACTIVATIONS) + steps),
    )


WORK = (softmax_directly(A), softmax_by_gram(A), convolutions(B))


def _best(function: Callable[[], object], repeats: int = 7) -> float:
    """Return the shortest of several times, because a peak is the hardware's limit, not its speed when shared."""
    function()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        function()
        times.append(time.perf_counter() - started)
    return min(times)


def peaks() -> dict[str, float]:
    """Return the largest sgemm rate and memory bandwidth (a = b + s c, 192 MB) with all cores."""
    torch.set_num_threads(os.cpu_count() or 1)
    flops = 0.0
    for size in (1024, 2048):
        left, right = torch.rand(size, size), torch.rand(size, size)
        out = torch.empty(size, size)
        flops = max(flops, 2 * size**3 / _best(lambda left=left, right=right, out=out: torch.mm(left, right, out=out)))
    a, b, c = (torch.zeros(16_000_000) for _ in range(3))
    seconds = _best(lambda: torch.add(b, c, alpha=3.0, out=a))
    return {"sgemm_flops": flops, "bytes_a_second": 3 * 4 * a.numel() / seconds}


if __name__ == "__main__":
    print(json.dumps(peaks()))
