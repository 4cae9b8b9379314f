"""Rule for an automatic sigma, and the rounds that a request is expected to take (docs/theory.md, section 13).

The ratio r of noise to signal at a model is sigma sqrt(d) / ||theta - theta_0||, for d parameters. Noise is expected to
undo the share r of the rounds that led to the model, and less where training ends with many errors, among which those
that noise adds count less: the share r FEW_ERRORS / e for a share of errors e. `auto` takes the kept model, with the
least noise that it needs, whose request is expected to take the fewest rounds.
"""

from __future__ import annotations

import math

SIGMA_STEP = 1.1
"""Base of the powers to which an automatic sigma is rounded up.

Public certificates state sigma. Rounding it up hides most of the information about the Psi from which it was chosen.
"""
FEW_ERRORS = 0.05
"""Share of errors up to which noise undoes the share r of the rounds; chosen on the tasks of docs/noise.md."""
LOWEST_SIGMA, HIGHEST_SIGMA, LADDER_RATIO = 1e-4, 10.0, 1.25
"""Noise sizes for which models are kept if sigma is automatic, and the ratio of neighbouring sizes.

Between two sizes at most a fifth of the noise is wasted. Noise outside these bounds was never the best in
benchmarks/noise_choice.py; a request that needs it starts from the nearest kept model before.
"""


def rounded_up_sigma(noise_std: float) -> float:
    """Return the smallest power of `SIGMA_STEP` that is at least `noise_std`, or 0 for no noise.

    >>> rounded_up_sigma(1.0), round(rounded_up_sigma(1.05), 6), rounded_up_sigma(0.0)
    (1.0, 1.1, 0.0)
    """
    if noise_std <= 0.0:
        return 0.0
    rung = SIGMA_STEP ** math.ceil(math.log(noise_std) / math.log(SIGMA_STEP))
    return rung if rung >= noise_std else rung * SIGMA_STEP


def noise_to_signal(noise_std: float, distance: float, parameters: int, earlier_energy: float = 0.0) -> float:
    """Return the ratio of noise to signal at a model.

    Args:
        noise_std: Standard deviation of the noise.
        distance: Distance of the model from the initial model.
        parameters: Number of parameters.
        earlier_energy: Sum of the variances of earlier noise on the path, which is no signal.
    """
    if noise_std == 0.0:
        return 0.0
    signal = distance**2 - earlier_energy * parameters
    return noise_std * math.sqrt(parameters / signal) if signal > 0.0 else math.inf


def expected_rounds(training: int, undone: int, done: int, ratio: float, errors: float) -> float:
    """Return the expected rounds of a request that starts from an earlier model with noise.

    >>> round(expected_rounds(100, 10, 90, 0.2, 0.05)), round(expected_rounds(100, 10, 90, 0.2, 0.5))
    (28, 12)

    Args:
        training: Rounds of the first training, which a fresh model is expected to need.
        undone: Rounds between the model and the current one.
        done: Rounds that led to the model, or 0 for a fresh model.
        ratio: Ratio of noise to signal.
        errors: Share of wrong predictions at the end of the first training.
    """
    if done == 0:
        return float(training)
    share = ratio * FEW_ERRORS / max(errors, FEW_ERRORS)
    return min(float(training), undone + share * min(done, training))
