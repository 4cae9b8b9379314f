"""`--sigma auto`: node and noise chosen together, from recorded scalars (docs/noise.md; docs/theory.md, section 9.1).

Each kept node needs a least noise, from the Psi curves of those who must be hidden there and the budgets they have
left. A forecast says how many rounds each of these pairs would take; the pair with the fewest is chosen, or the initial
model where none is clearly better than Scratch.

Looking ahead over a sequence: a later request stays past this noise edge, where everyone forgotten so far is covered,
with its own noise, chosen then. More noise now would cover no one who asks later (edges added before a request
never do), so a request takes only what it needs; what earlier noise has left behind is part of the forecast.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sifu.choices import LEVELS, Level
from sifu.core.premises import Premise, level_of
from sifu.planning.forecast import WORTH_IT, Forecast
from sifu.planning.plan import NoiseOption
from sifu.run.run_view import RunView
from sifu.theory.rollback import Exposure, least_noise, least_noises

LARGEST_NOISE_TO_SIGNAL = 0.5
"""Noise up to this share of the distance travelled is worthwhile (docs/theory.md, section 13, for advice)."""
SIGMA_LADDER = 1.1
"""An automatic sigma stands in public certificates, so it is rounded up to a power of this: it then says little
about the Psi it was chosen from."""


@dataclass(frozen=True)
class NoiseChoice:
    """The noise chosen, and what should be said about it."""

    noise_std: float
    notes: tuple[str, ...] = ()


def noise_options(
    view: RunView, exposures: Sequence[Exposure], order: int, forecast: Forecast, premises: Sequence[Premise]
) -> tuple[NoiseOption, ...]:
    """The least noise of each kept node, rounded up, the node it leads to, and what would come of it; latest first.

    More noise than a node needs may reach a later one: every option is at the latest node that its noise allows.
    """
    before = _needed_by_earlier(view, [exposure for exposure in exposures if exposure.subject.order < order], order)
    new = [exposure for exposure in exposures if exposure.subject.order >= order]
    needed = {depth: max(least_noise(new, depth, order), before[depth]) for depth in sorted(view.kept, reverse=True)}
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
            level=level_of(premises, exact=noise_std == 0.0),
        )
    return tuple(options.values())


def _needed_by_earlier(view: RunView, earlier: Sequence[Exposure], order: int) -> dict[int, float]:
    """The least noise of each kept node for those forgotten earlier: the same until something is written."""
    remembered: dict[object, dict[int, float]] = view.reader.remembered("least noise of those forgotten earlier", dict)
    key = (view.path.nodes[-1].node, order, tuple(exposure.subject for exposure in earlier), tuple(sorted(view.kept)))
    if key not in remembered:
        remembered[key] = least_noises(earlier, view.kept, order)
    return remembered[key]


def choose_noise(options: Sequence[NoiseOption], forecast: Forecast, least: Level | None = None) -> NoiseChoice:
    """The option that promises the fewest rounds; less noise than any of them, so theta_0, where Scratch is as fast.

    Options below the `least` level asked for are left aside, unless there are no others.
    """
    enough = [option for option in options if LEVELS.index(option.level) >= LEVELS.index(least or "none")]
    best = min(enough or options, key=lambda option: option.expected)
    if best.noise_std > 0.0 and best.expected <= WORTH_IT * forecast.expected(0, 0.0):
        return NoiseChoice(best.noise_std)
    # Less noise than any node needs leads to the latest one that needs none: theta_0, or one they never touched.
    too_little = 0.5 * min((option.noise_std for option in options if option.noise_std > 0.0), default=1.0)
    if best.noise_std == 0.0 and best.depth > 0:
        return NoiseChoice(too_little)
    return NoiseChoice(
        too_little,
        (
            "no kept model with its noise promises clearly fewer rounds than Scratch, so training starts again from "
            "the initial model: exact, and as slow as Scratch. More clients, or a larger epsilon, would help",
        ),
    )


def on_ladder(noise_std: float) -> float:
    """The next power of `SIGMA_LADDER` at or above a noise."""
    if noise_std <= 0.0:
        return 0.0
    rung = SIGMA_LADDER ** math.ceil(math.log(noise_std) / math.log(SIGMA_LADDER))
    return rung if rung >= noise_std else rung * SIGMA_LADDER


def noise_to_signal(view: RunView, depth: int, noise_std: float) -> float:
    """sigma sqrt(d) / ||theta - theta_0|| with the energy of earlier noise taken out of the distance."""
    size = view.parameters
    signal = math.sqrt(max(view.rows[depth].distance ** 2 - view.path.noise_energy(depth) * size, 0.0))
    if noise_std == 0.0:
        return 0.0
    return noise_std * math.sqrt(size) / signal if signal > 0.0 else math.inf
