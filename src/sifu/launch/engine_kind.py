"""Whether an engine is one of sifu's own, and what its rounds then follow from.

An engine says what it trains, but not what it keeps from round to round: that is known of sifu's own engines alone, by
their very class. A subclass or a copy may do anything, so nothing is known of it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from sifu.core.engine import Engine, Position, RoundResult
from sifu.errors import InputError
from sifu.theory.facts import BY_LARGEST_CLIENT, BY_PARTICIPANTS, ON_NODES, UNKNOWN, TrainingFacts

OWN_ENGINES = {
    "sifu.engines.sim.engine.SimulatedFederation": BY_PARTICIPANTS,
    "sifu.engines.sim.closed_form.ClosedFormFederation": BY_PARTICIPANTS,
    "sifu.engines.sim.kept_statistics.KeptStatistics": BY_PARTICIPANTS,
    "sifu.engines.sim.tuned.TunedFederation": BY_PARTICIPANTS,
    "sifu.engines.sim.gpu.lane_engine.LaneEngine": BY_LARGEST_CLIENT,
    "sifu.engines.outside.OutsideFederation": ON_NODES,
    "sifu.engines.flower.engine.FlowerFederation": ON_NODES,
    "sifu.engines.flower.statistics_engine.FlowerStatistics": ON_NODES,
    "sifu.engines.flower.statistics_engine.MaskedFlowerStatistics": ON_NODES,
}
"""By class: what the bits of a round follow from (docs/theory.md, section 6.6)."""
METHODS = ("run_round", "run_rounds", "local_updates", "initial_model", "collect")


def engine_kind(engine: Engine) -> str:
    """What the rounds of an engine follow from; not known of an engine that is not sifu's own."""
    kind, changed = type(engine), not vars(engine).keys().isdisjoint(METHODS) if hasattr(engine, "__dict__") else False
    return UNKNOWN if changed else OWN_ENGINES.get(f"{kind.__module__}.{kind.__qualname__}", UNKNOWN)


def facts_of(engine: Engine) -> TrainingFacts:
    """The facts of an engine; what kind it is does not come from what it says."""
    return replace(engine.facts, engine=engine_kind(engine))


def check_repeats(engine: Engine) -> None:
    """Refuse an engine that is not sifu's own and gives another result when a round is repeated.

    It would keep something from round to round, a server's momentum for example, and what it keeps of a client would
    stay when the client is forgotten. Rounds with noise of the operating system cannot be compared.
    """
    if engine_kind(engine) != UNKNOWN or engine.facts.noise > 0.0:
        return
    start, everyone = engine.initial_model(0), np.arange(len(engine.clients), dtype=np.int64)
    first = engine.run_round(start, Position(0, 0), everyone)
    engine.run_round(first.model, Position(0, 1), everyone)
    if not (_same(first, engine.run_round(start, Position(0, 0), everyone)) and _equal(start, engine.initial_model(0))):
        raise InputError(
            f"the engine {type(engine).__name__} gave another result when its first round was repeated: it keeps "
            "something from round to round, or draws at random without a key. What it keeps of a client would stay "
            "when the client is forgotten: let a round follow from its model, its position and its clients alone"
        )


def _same(first: RoundResult, again: RoundResult) -> bool:
    pairs = ((first.model, again.model), (first.participants, again.participants), (first.drifts, again.drifts))
    return all(_equal(before, after) for before, after in pairs)


def _equal(value: np.ndarray, other: np.ndarray) -> bool:
    return value.shape == other.shape and np.array_equal(value, other, equal_nan=True)
