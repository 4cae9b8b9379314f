"""Prediction of the time of a request on a closed-form head, from recorded sizes and the speed of this machine.

A request reads the sum, subtracts the statistics of the leaving clients, writes the new sum, and solves for the head.
With K features it takes

    START_STEPS / steps + K^2 (8 PASSES / bytes + 2 n / factors) + K^3 / (3 factors)

seconds, where n is the number of samples that leave as rows and `factors` counts all threads (`Speed.seconds` has the
exceptions for narrow heads and for cross-validation). The speeds `steps`, `bytes` and `factors` are measured once per
process, in a few milliseconds, on the machine that plans the request; the speed of training is irrelevant. The other
constants are amounts of work, not times.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from threadpoolctl import threadpool_info, threadpool_limits

from sifu.core.closed_form_engine import recorded_fixed_point
from sifu.run.run_view import RunView
from sifu.theory.closed_form.ridge import WIDE

START_STEPS = 7e6
"""Work of a command besides statistics (loading, planning, signing and recording), counted in steps of `_steps`."""
STEPS = 20_000
"""Number of steps executed to measure the speed of Python."""
PASSES = 16.0
"""Passes over a matrix of 8 K^2 bytes: unpacking, packing, digests, copies and the products of the solver."""
CROSS_VALIDATION = 8.0
"""Cost of choosing the penalty by cross-validation, in factorisations."""
SHARE = 0.8
"""Speed that each further thread adds, as a fraction of the speed of the first thread."""
SIZE = 1024
"""Size of the matrices that speeds are measured on."""


@dataclass(frozen=True)
class Speed:
    """Speed of a machine.

    Attributes:
        factors: Operations per second of a factorisation in float32 on one thread.
        threads: Number of threads of a factorisation.
        bytes: Bytes per second of a pass over a matrix.
        steps: Steps of Python code per second, measured by `_steps`.
    """

    factors: float
    threads: int
    bytes: float
    steps: float

    @property
    def start(self) -> float:
        """Seconds of a command besides rounds and statistics."""
        return START_STEPS / self.steps

    def seconds(self, features: int, samples: int, *, cross_validated: bool = False) -> float:
        """Return the expected seconds of a request.

        Args:
            features: Number of features, K.
            samples: Number of samples that are subtracted as rows.
            cross_validated: True if cross-validation chooses the penalty again.

        >>> machine = Speed(factors=3.5e10, threads=2, bytes=3e9, steps=4.7e6)
        >>> [round(machine.seconds(features, 100), 1) for features in (512, 2048, 4192, 8384)]
        [1.5, 1.8, 2.7, 7.8]
        """
        together = self.factors * (1.0 + SHARE * (self.threads - 1))
        cubic = features**3 / 3.0 * (1.0 + CROSS_VALIDATION * cross_validated)
        # Narrow heads are solved in float64, which takes twice the time, on one thread.
        solved = cubic / together if features > WIDE else 2.0 * cubic / self.factors
        squared = PASSES * 8.0 / self.bytes + 2.0 * samples / together
        return self.start + features**2 * squared + solved


@cache
def measured_speed() -> Speed:
    """Return the speed of this machine, measured once in processor time, which other programs hardly change."""
    import scipy.linalg

    matrix = np.full((SIZE, SIZE), 0.5, dtype=np.float32, order="F")
    matrix[np.diag_indices(SIZE)] = 1.0
    numbers = np.ones(4 * SIZE**2, dtype=np.int64)
    threads = max((pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"), default=1)
    with threadpool_limits(limits=1):
        factored = _shortest(lambda: scipy.linalg.cho_factor(matrix, lower=True, check_finite=False))
    copied = _shortest(lambda: np.multiply(numbers, 0.5))
    return Speed(SIZE**3 / 3.0 / factored, threads, numbers.nbytes / copied, STEPS / _shortest(_steps))


def _steps() -> None:
    """Execute the Python steps whose speed is measured."""
    table: dict[int, Any] = {}
    for step in range(STEPS):
        table[step & 255] = (step, table.get(step & 127))


def _shortest(action: Callable[[], Any]) -> float:
    """Return the processor seconds of the fastest of three runs."""
    seconds = []
    for _ in range(3):
        started = time.thread_time()
        action()
        seconds.append(time.thread_time() - started)
    return max(min(seconds), 1e-9)


def request_seconds(view: RunView, leaving: set[int]) -> float | None:
    """Return the expected seconds to forget the clients `leaving` from kept statistics, or None if no sum is stored."""
    stored = list(view.reader.statistics().values())
    if not any(row.is_sum for row in stored):
        return None
    own = {row.clients[0]: row.samples for row in stored if row.is_rows and row.clients[0] in leaving}
    features = recorded_fixed_point(view.spec, view.reader.layout).features
    return measured_speed().seconds(features, sum(own.values()), cross_validated=view.regime.penalty is None)
