"""Choice of the device that computes rounds: the CPU, or a GPU.

CPU and GPU draw the same participants and batches, and their results agree up to rounding. A run begun on a GPU may be
continued on the CPU. The reverse is refused, because the certificates of a CPU run claim bits that a GPU does not
reproduce (docs/theory.md, section 6.6).

An engine states its training settings, but not whether it keeps state from round to round. Only sifu's own engines,
identified by their exact class, are known to keep none.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast, get_args

import numpy as np

from sifu.choices import Device
from sifu.core.capabilities import check_capabilities
from sifu.core.engine import Engine, Position
from sifu.core.spec import Spec
from sifu.core.spec.sections import IMAGE_FEATURES, TF32
from sifu.errors import InputError
from sifu.theory.facts import BY_PARTICIPANTS, ON_A_GPU, ON_A_REPEATING_GPU, ON_NODES, UNKNOWN, TrainingFacts

if TYPE_CHECKING:
    from sifu.engines.sim import SimulatedFederation
    from sifu.engines.sim.embedded_heads import ClosedFormFederation

GPU = "cuda"


def check_choice(device: str) -> None:
    """Check that the device is a known value."""
    if device not in get_args(Device):
        raise InputError(f"device must be one of {', '.join(get_args(Device))}, found {device!r}")


def why_no_gpu() -> str | None:
    """Return why a GPU cannot be used here, or None if it can."""
    import torch

    return None if torch.cuda.is_available() else "torch finds no CUDA device"


def features_device(spec: Spec, device: str) -> str:
    """Return the device for a trained head's features: a GPU if a network computes them and a GPU is available."""
    by_network = spec.features.kind in IMAGE_FEATURES and spec.regime.maps_before_training
    return GPU if by_network and device != "cpu" and why_no_gpu() is None else "cpu"


def on_device(engine: Engine, clients: Any, spec: Spec, device: str, trainer: str | None = None) -> Engine:
    """Return the embedded engine itself, or a GPU engine with its model and clients.

    `auto` uses a GPU for networks that compute features, for convolutional networks whose training can be captured, and
    for `model.dtype = "tf32"`, which needs one.

    Raises:
        InputError: If a GPU is needed and cannot be used.
    """
    check_choice(device)
    missing = why_no_gpu()
    if spec.model.dtype == TF32 and (device == "cpu" or missing is not None):
        raise InputError(f'model.dtype = "tf32" needs a GPU: {missing or "leave --device cpu out"}')
    if device == "cpu":
        return engine
    if device == "cuda" and missing is not None:
        raise InputError(f"--device cuda cannot be used here: {missing}")
    if missing is not None:
        return engine
    if not spec.regime.solves:
        return _rounds_on_gpu(engine, clients, spec, device, trainer)
    if device == "auto" and spec.features.kind not in IMAGE_FEATURES:
        return engine
    return cast("ClosedFormFederation", engine).with_features_on(GPU)


def _rounds_on_gpu(engine: Engine, clients: Any, spec: Spec, device: str, trainer: str | None) -> Engine:
    """Return a GPU engine with the engine's model and clients, or the same engine if `auto` decides against a GPU."""
    from sifu.engines.sim.gpu.branches import is_captured
    from sifu.engines.sim.gpu.graph_engine import GraphEngine
    from sifu.engines.sim.simulator import FederationOnDevice
    from sifu.engines.sim.trainers import who_trains

    federation = cast("SimulatedFederation", engine)
    network, captured = getattr(federation.model, "conv_net", None), is_captured(federation.model)
    if device == "auto" and spec.model.dtype != TF32 and not (network and captured and _plain(spec)):
        return engine
    by = who_trains(network, spec.model.dtype, GPU, trainer)
    if by.kernels is not None:
        made: Engine = by.kernels.gpu_engine(federation, clients, GPU)
        return made
    return GraphEngine(federation, GPU) if captured else FederationOnDevice.of(federation, GPU)


def _plain(spec: Spec) -> bool:
    """Return whether rounds need nothing but the mean of models, so that a GPU can run them."""
    server = spec.server
    return server.rejected == "stop" and not server.update_bound


OWN_ENGINES = {
    "sifu.engines.sim.simulator.SimulatedFederation": BY_PARTICIPANTS,
    "sifu.engines.sim.embedded_heads.ClosedFormFederation": BY_PARTICIPANTS,
    "sifu.engines.sim.embedded_heads.HeadsOnDevice": ON_A_REPEATING_GPU,
    "sifu.run.kept_statistics.KeptStatistics": BY_PARTICIPANTS,
    "sifu.engines.sim.gpu.graph_engine.GraphEngine": ON_A_REPEATING_GPU,
    "sifu.engines.sim.simulator.FederationOnDevice": ON_A_GPU,
    "sifu_kernels.lane_engine.LaneEngine": ON_A_GPU,
    "sifu.engines.outside.OutsideFederation": ON_NODES,
    "sifu.engines.outside_statistics.OutsideStatistics": ON_NODES,
    "sifu.engines.outside_statistics.MaskedOutsideStatistics": ON_NODES,
    "sifu.engines.flower.flower_engine.FlowerFederation": ON_NODES,
    "sifu.engines.flower.statistics_engine.FlowerStatistics": ON_NODES,
    "sifu.engines.flower.statistics_engine.MaskedFlowerStatistics": ON_NODES,
}
"""Kind of each engine class: the inputs that determine the last bits of its rounds (docs/theory.md, section 6.6)."""
METHODS = ("run_round", "run_rounds", "initial_model", "collect")


def engine_kind(engine: Engine) -> str:
    """Return the kind of an engine (`OWN_ENGINES`), or `UNKNOWN` if the engine is not sifu's own."""
    kind = type(engine)
    if not getattr(engine, "__dict__", {}).keys().isdisjoint(METHODS):
        return UNKNOWN  # a method was replaced on this object
    return OWN_ENGINES.get(f"{kind.__module__}.{kind.__qualname__}", UNKNOWN)


def facts_of(engine: Engine) -> TrainingFacts:
    """Return the facts of an engine; its kind is determined here, not by the engine."""
    return replace(engine.facts, engine=engine_kind(engine))


def check_repeats(engine: Engine) -> None:
    """Check that an engine which is not sifu's own gives the same result when a round is repeated.

    An engine whose results differ keeps state from round to round, such as a server's momentum. This state would retain
    the influence of a forgotten client. Also check that optional methods are declared.

    Raises:
        InputError: If results differ, or an optional method is not declared.
    """
    check_capabilities(engine)
    if engine_kind(engine) != UNKNOWN:
        return
    start, everyone = engine.initial_model(0), np.arange(len(engine.clients), dtype=np.int64)
    first = engine.run_round(start, Position(0, 0), everyone)
    engine.run_round(first.model, Position(0, 1), everyone)
    again = engine.run_round(start, Position(0, 0), everyone)
    pairs = [(getattr(first, name), getattr(again, name)) for name in ("model", "participants", "drifts")]
    pairs.append((start, engine.initial_model(0)))
    if not all(np.array_equal(before, after, equal_nan=True) for before, after in pairs):
        raise InputError(
            f"the engine {type(engine).__name__} gave a different result when its first round was repeated: it keeps "
            "state between rounds, or draws random numbers without a key. State of a client would remain after the "
            "client is forgotten: make a round depend only on its model, its position and its clients"
        )
