"""`--sigma auto`: choose node and noise together, from recorded scalars alone (DESIGN section 8).

The noise that a node needs grows with Psi there, and what it destroys is judged against how far training
had come: noise against signal is sigma sqrt(d) / ||theta - theta_0||. The rule goes to the latest node at
which that ratio stays below a fixed value, for a noise that would hide *any* active client there and not
only the ones asking. That is the headroom: later requests then stay past this noise edge, where everyone
forgotten so far is already covered, instead of falling back to the initial model. And so a later request
first tries the noise of the last edge again: growing it with every request would drown the model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sifu.core.rollback import Exposure, is_allowed, least_noise
from sifu.core.terms import RequestTerms
from sifu.methods.plan import NoiseOption
from sifu.methods.view import RunView

LARGEST_NOISE_TO_SIGNAL = 0.5
HEADROOM = 1.1
SIGMA_LADDER = 1.1
"""An automatic sigma stands in public certificates, so it is rounded up to a power of this: it then says little
about the Psi it was chosen from."""


@dataclass(frozen=True)
class NoiseChoice:
    """The noise chosen, the nodes it was chosen among, and what should be said about it."""

    noise_std: float
    options: tuple[NoiseOption, ...]
    notes: tuple[str, ...] = ()


def choose_noise(view: RunView, exposures: Sequence[Exposure], terms: RequestTerms, order: int) -> NoiseChoice:
    """The latest kept node whose noise stays below its signal, and a noise with headroom for it."""
    options: list[NoiseOption] = []
    chosen = _noise_of_last_edge(view, exposures, order)
    for depth in sorted(view.kept, reverse=True):
        needed = least_noise(exposures, depth, order)
        if not math.isfinite(needed):
            continue
        everyone = view.kept[depth].psi_max * terms.multiplier * HEADROOM
        noise_std = on_ladder(max(needed, everyone))
        ratio = noise_to_signal(view, depth, noise_std)
        rounds = view.path.rounds_until(depth)
        options.append(NoiseOption(noise_std, depth, rounds, ratio, predict_rounds(view, depth, noise_std)))
        if chosen is None and noise_std > 0.0 and ratio <= LARGEST_NOISE_TO_SIGNAL:
            chosen = noise_std
    notes: tuple[str, ...] = ()
    if chosen is None:
        positive = [one.noise_std for one in options if one.noise_std > 0.0]
        # Even the earliest noise would drown its model: ask for less than any node needs, and go to theta_0.
        chosen = min(positive, default=1.0) * 0.5
        notes = (
            "at every kept model the noise would drown what was learned, so training starts again from the initial "
            "model: exact, and as slow as Scratch. More clients, or a larger epsilon, would help",
        )
    return NoiseChoice(chosen, tuple(options), notes)


def on_ladder(noise_std: float) -> float:
    """The next power of `SIGMA_LADDER` at or above a noise."""
    if noise_std <= 0.0:
        return 0.0
    rung = SIGMA_LADDER ** math.ceil(math.log(noise_std) / math.log(SIGMA_LADDER))
    return rung if rung >= noise_std else rung * SIGMA_LADDER


def _noise_of_last_edge(view: RunView, exposures: Sequence[Exposure], order: int) -> float | None:
    """The last edge's noise, if with it the request can stay past that edge."""
    edges = [(depth, view.path.nodes[depth].noise_std) for depth, _ in view.path.noise_depths]
    if not edges or edges[-1][1] == 0.0:
        return None
    depth, noise_std = edges[-1]
    return noise_std if is_allowed(exposures, depth, noise_std, order) else None


def noise_to_signal(view: RunView, depth: int, noise_std: float) -> float:
    """sigma sqrt(d) / ||theta - theta_0|| with the energy of earlier noise taken out of the distance."""
    size = view.parameters
    earlier = sum(view.path.nodes[edge].noise_std ** 2 for edge, _ in view.path.noise_depths if edge <= depth)
    signal = math.sqrt(max(view.rows[depth].distance ** 2 - earlier * size, 0.0))
    if noise_std == 0.0:
        return 0.0
    return noise_std * math.sqrt(size) / signal if signal > 0.0 else math.inf


def predict_rounds(view: RunView, depth: int, noise_std: float) -> int | None:
    """A rough guess of the rounds to the target from a noised node; None where nothing is recorded to go by.

    Training without noise would take what it took from there to the end of the first training; noise
    throws away a share of the way that grows with its ratio to the signal.
    """
    training = view.training_rounds
    if training is None:
        return None
    done = view.path.rounds_until(depth)
    ratio = noise_to_signal(view, depth, noise_std)
    share = 1.0 if math.isinf(ratio) else ratio**2 / (1.0 + ratio**2)
    kept = min(done, training) * (1.0 - share)
    return max(1, round(training - kept))
