"""Where rounds are computed: on the CPU by the embedded engine, or on a GPU as a lane on its own (`engines.sim.lanes`).

Both draw the same participants and batches and agree to rounding. A run begun on a GPU may be continued on the CPU; the
other way round its certificates would claim bits that a GPU does not keep (docs/theory.md, section 6.6).

An engine says what it trains, but not what it keeps from round to round: that is known of sifu's own engines alone, by
their very class. A subclass or a copy may do anything, so nothing is known of it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast, get_args

import numpy as np

from sifu.choices import Device, Precision
from sifu.core.capabilities import check_capabilities
from sifu.core.engine import ChecksModule, Engine, Position
from sifu.core.spec import Spec
from sifu.core.spec.regime import ClosedForm, Regime, TunedNetworks, by_regime
from sifu.core.spec.sections import NETWORK_FEATURES
from sifu.errors import InputError
from sifu.theory.facts import BY_LARGEST_CLIENT, BY_PARTICIPANTS, ON_A_REPEATING_GPU, ON_NODES, UNKNOWN, TrainingFacts

if TYPE_CHECKING:
    from sifu.engines.sim import SimulatedFederation
    from sifu.engines.sim.embedded_heads import ClosedFormFederation
    from sifu.engines.sim.tuned_engine import TunedFederation

WORTH_A_GPU = 2**20
"""Values in the samples of a round's participants from which on `auto` takes the GPU for a linear model.

Measured (`benchmarks/gpu_rounds.py worth`): rounds are faster on a GPU from far fewer on, but a command starts a second
later. Networks always go there (in float32, the only type lanes have for them): rounds of small ones are 12 to 40 times
as fast, though the first use of a network on a machine compiles its kernels for some ten seconds.
"""
GPU = "cuda"


def check_choice(device: str, precision: str) -> None:
    """Refuse names of devices and precisions that do not exist."""
    for name, value, options in (("device", device, get_args(Device)), ("precision", precision, get_args(Precision))):
        if value not in options:
            raise InputError(f"{name} must be one of {', '.join(options)}, found {value!r}")


def why_no_gpu() -> str | None:
    """Why a GPU cannot be used here, or None if it can."""
    import torch

    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    return None


def features_device(spec: Spec, device: str) -> str:
    """Where a trained head's features are computed: on a GPU if they go through a network and there is one."""
    through_network = spec.features.kind in NETWORK_FEATURES and spec.regime.maps_before_training and device != "cpu"
    return GPU if through_network and why_no_gpu() is None else "cpu"


def on_device(engine: Engine, clients: Any, spec: Spec, device: str, precision: str) -> Engine:
    """The embedded engine itself, or a lane on the GPU with its model and clients.

    `auto` takes the GPU where there is one, the lane can do what the run asks for, and it is worthwhile: for networks,
    also for those that features go through, and for linear models with many samples.
    """
    check_choice(device, precision)
    if device == "cpu":
        return engine
    missing = why_no_gpu()
    if device == "cuda" and missing is not None:
        raise InputError(f"--device cuda cannot be used here: {missing}")
    return engine if missing is not None else by_regime(ON_GPU, spec.regime)(engine, clients, spec, device, precision)


def _rounds_on_gpu(engine: Engine, clients: Any, spec: Spec, device: str, precision: str) -> Engine:
    """Return a lane with the engine's model and clients, where it is worthwhile."""
    if device == "auto" and not _worth_a_gpu(engine, clients):
        return engine
    from sifu.engines.sim.lanes import lane_engines

    try:
        if spec.keep.gram_clients:
            raise InputError("a GPU keeps no Gram matrices: set keep.gram_clients = 0, or use --device cpu")
        return lane_engines([cast("SimulatedFederation", engine)], [clients], GPU, precision)[0]
    except InputError:
        if device == "auto":
            return engine
        raise


def _head_on_gpu(engine: Engine, clients: Any, spec: Spec, device: str, precision: str) -> Engine:
    """Compute features on the GPU: a solve takes a second wherever it runs; networks gain."""
    if device != "auto" or spec.features.kind in NETWORK_FEATURES:
        cast("ClosedFormFederation", engine).compute_features_on(GPU)
    return engine


def _tuning_on_gpu(engine: Engine, clients: Any, spec: Spec, device: str, precision: str) -> Engine:
    """Return the engine whose groups tune their networks on the GPU."""
    return cast("TunedFederation", engine).on(GPU, precision)


ON_GPU: dict[type[Regime], Callable[[Engine, Any, Spec, str, str], Engine]] = {
    Regime: _rounds_on_gpu,
    ClosedForm: _head_on_gpu,
    TunedNetworks: _tuning_on_gpu,
}


def _worth_a_gpu(engine: Engine, clients: Any) -> bool:
    from sifu.engines.sim import LinearModel

    model = cast("SimulatedFederation", engine).model
    if not isinstance(model, LinearModel):
        return model.conv_net is not None  # other modules run there kernel by kernel, where they are asked to
    rule = engine.facts.participation
    share = {"all": 1.0, "fixed": rule.count / len(clients), "poisson": rule.rate}[rule.kind]
    return bool(min(share, 1.0) * sum(client.x.size for client in clients) >= WORTH_A_GPU)


OWN_ENGINES = {
    "sifu.engines.sim.simulator.SimulatedFederation": BY_PARTICIPANTS,
    "sifu.engines.sim.embedded_heads.ClosedFormFederation": BY_PARTICIPANTS,
    "sifu.run.kept_statistics.KeptStatistics": BY_PARTICIPANTS,
    "sifu.engines.sim.tuned_engine.TunedFederation": BY_PARTICIPANTS,
    "sifu.engines.sim.tuned_engine.TunedOnDevice": ON_A_REPEATING_GPU,
    "sifu.engines.sim.gpu.lane_engine.LaneEngine": BY_LARGEST_CLIENT,
    "sifu.engines.outside.OutsideFederation": ON_NODES,
    "sifu.engines.flower.flower_engine.FlowerFederation": ON_NODES,
    "sifu.engines.flower.statistics_engine.FlowerStatistics": ON_NODES,
    "sifu.engines.flower.statistics_engine.MaskedFlowerStatistics": ON_NODES,
    "sifu.engines.flower.statistics_engine.TunedFlowerStatistics": ON_NODES,
    "sifu.engines.flower.statistics_engine.MaskedTunedFlowerStatistics": ON_NODES,
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


def check_module(engine: Engine) -> None:
    """Refuse a user's module that carries something from client to client, before a run is made of it."""
    if isinstance(engine, ChecksModule) and engine_kind(engine) != UNKNOWN:
        engine.check_module()


def check_repeats(engine: Engine) -> None:
    """Refuse an engine that is not sifu's own and gives another result when a round is repeated.

    It would keep something from round to round, a server's momentum for example, and what it keeps of a client would
    stay when the client is forgotten. Rounds with noise of the operating system cannot be compared. Optional methods
    that it does not declare are refused, too.
    """
    check_capabilities(engine)
    if engine_kind(engine) != UNKNOWN or engine.facts.noise > 0.0:
        return
    start, everyone = engine.initial_model(0), np.arange(len(engine.clients), dtype=np.int64)
    first = engine.run_round(start, Position(0, 0), everyone)
    engine.run_round(first.model, Position(0, 1), everyone)
    again = engine.run_round(start, Position(0, 0), everyone)
    pairs = [(getattr(first, name), getattr(again, name)) for name in ("model", "participants", "drifts")]
    pairs.append((start, engine.initial_model(0)))
    if not all(np.array_equal(before, after, equal_nan=True) for before, after in pairs):
        raise InputError(
            f"the engine {type(engine).__name__} gave another result when its first round was repeated: it keeps "
            "something from round to round, or draws at random without a key. What it keeps of a client would stay "
            "when the client is forgotten: let a round follow from its model, its position and its clients alone"
        )
