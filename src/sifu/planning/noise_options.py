"""Choice of the noise of a request by `--sigma auto`.

The node and the noise are chosen together, from recorded scalars (docs/noise.md; docs/theory.md, section 9.1). Each
kept node needs a minimum of noise, which follows from the Psi curves of the subjects to hide and their remaining
budgets. A forecast predicts the rounds for each pair of node and noise. The pair with the fewest rounds is chosen, or
the initial model if no pair is clearly faster than Scratch.

A later request starts after this noise edge, which covers all subjects forgotten so far, and chooses its own noise.
More noise now would not cover clients that ask later, because noise edges added before a client's request never cover
that client. So a request adds only the noise it needs. The forecast includes the effect of earlier noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sifu.choices import LEVELS, Level
from sifu.core.premises import Premise, level_of
from sifu.planning.forecast import WORTH_IT, Forecast
from sifu.run.run_view import RunView
from sifu.theory.rollback import Exposure, least_noise, least_noises

LARGEST_NOISE_TO_SIGNAL = 0.5
"""Largest useful ratio of the noise to the model's distance from the initial model (docs/theory.md, section 13)."""
SIGMA_LADDER = 1.1
"""Base of the powers to which an automatic sigma is rounded up.

Public certificates state sigma. Rounding it up hides most of the information about the Psi from which sigma was chosen.
"""


@dataclass(frozen=True)
class NoiseOption:
    """Noise that a request could use, with its predicted effect; options are compared by their `expected` rounds."""

    noise_std: float
    depth: int
    rounds: int
    noise_to_signal: float
    expected: float
    predicted_rounds: int | None
    predicted_interval: tuple[int, int] | None
    level: Level


def noise_options(
    view: RunView, exposures: Sequence[Exposure], order: int, forecast: Forecast, premises: Sequence[Premise]
) -> tuple[NoiseOption, ...]:
    """Return the least noise of each kept node, rounded up, with its predicted effect, latest node first.

    Rounding up may allow a later node than the node that the noise was computed for, so every option uses the latest
    node that its noise allows. Nodes for which no finite noise suffices are left out.

    Args:
        view: View of the run.
        exposures: Subjects to hide, of this request and of earlier requests.
        order: Order of the request among all executed requests.
        forecast: Forecast of the rounds until the model reaches its target again.
        premises: Premises of the method, which determine the level.
    """
    before = _needed_by_earlier(view, [exposure for exposure in exposures if exposure.subject.order < order], order)
    new = [exposure for exposure in exposures if exposure.subject.order >= order]
    needed = {depth: max(least_noise(new, depth, order), before[depth]) for depth in sorted(view.kept, reverse=True)}
    starts_fresh = view.path.nodes[0].kind == "initial"
    options: dict[tuple[int, float], NoiseOption] = {}
    for least in needed.values():
        if not math.isfinite(least):
            continue
        noise_std = on_ladder(least)
        reached = next(d for d, other in needed.items() if other <= noise_std)
        noise_std = noise_std if needed[reached] > 0.0 else 0.0
        prediction = forecast.predict(reached, noise_std)
        options[reached, noise_std] = NoiseOption(
            noise_std=noise_std,
            depth=reached,
            rounds=view.path.rounds_until(reached),
            noise_to_signal=noise_to_signal(view, reached, noise_std),
            expected=forecast.expected(reached, noise_std),
            predicted_rounds=prediction.rounds if prediction else None,
            predicted_interval=prediction.interval if prediction else None,
            level=level_of(premises, exact=noise_std == 0.0, fresh=reached == 0 and starts_fresh),
        )
    return tuple(options.values())


def _needed_by_earlier(view: RunView, earlier: Sequence[Exposure], order: int) -> dict[int, float]:
    """Return the least noise of each kept node for the subjects forgotten earlier, cached until the run changes."""
    remembered: dict[object, dict[int, float]] = view.reader.remembered("least noise of those forgotten earlier", dict)
    key = (view.path.nodes[-1].node, order, tuple(exposure.subject for exposure in earlier), tuple(sorted(view.kept)))
    if key not in remembered:
        remembered[key] = least_noises(earlier, view.kept, order)
    return remembered[key]


def choose_noise(
    options: Sequence[NoiseOption], forecast: Forecast, least: Level | None
) -> tuple[float, tuple[str, ...]]:
    """Return the noise of the option with the fewest expected rounds, and notes on the choice.

    Unless noise makes the request clearly faster than Scratch, the result is less noise than any option needs, so that
    the latest node that needs no noise is chosen. Options below the level `least` are used only if there are no others.
    """
    enough = [option for option in options if LEVELS.index(option.level) >= LEVELS.index(least or "none")]
    best = min(enough or options, key=lambda option: option.expected)
    if best.noise_std > 0.0 and best.expected <= WORTH_IT * forecast.expected(0, 0.0):
        return best.noise_std, ()
    # Less noise than any node needs selects the latest node that needs none: theta_0, or a later node that the subjects
    # did not influence.
    too_little = 0.5 * min((option.noise_std for option in options if option.noise_std > 0.0), default=1.0)
    if best.noise_std == 0.0 and best.depth > 0:
        return too_little, ()
    return too_little, (
        "no kept model with its noise promises clearly fewer rounds than Scratch, so training starts again from "
        "the initial model: exact, and as slow as Scratch. More clients, or a larger epsilon, would help",
    )


def on_ladder(noise_std: float) -> float:
    """Return the smallest power of `SIGMA_LADDER` that is at least `noise_std`, or 0 for no noise."""
    if noise_std <= 0.0:
        return 0.0
    rung = SIGMA_LADDER ** math.ceil(math.log(noise_std) / math.log(SIGMA_LADDER))
    return rung if rung >= noise_std else rung * SIGMA_LADDER


def noise_to_signal(view: RunView, depth: int, noise_std: float) -> float:
    """Return sigma sqrt(d) / ||theta - theta_0||, with earlier noise subtracted from the squared distance."""
    size = view.parameters
    signal = math.sqrt(max(view.nodes[depth].distance ** 2 - view.path.noise_energy(depth) * size, 0.0))
    if noise_std == 0.0:
        return 0.0
    return noise_std * math.sqrt(size) / signal if signal > 0.0 else math.inf
