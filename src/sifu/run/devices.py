"""Choice of the device that computes rounds: the CPU, or a GPU (`engines.sim.lanes`).

CPU and GPU draw the same participants and batches, and their results agree up to rounding. A run begun on a GPU may be
continued on the CPU. The reverse is refused, because the certificates of a CPU run claim bits that a GPU does not
reproduce (docs/theory.md, section 6.6).

An engine states its training settings, but not whether it keeps state from round to round. Only sifu's own engines,
identified by their exact class, are known to keep none.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast, get_args

import numpy as np

from sifu.choices import Device, Precision
from sifu.core.capabilities import check_capabilities
from sifu.core.engine import Engine, Position
from sifu.core.spec import Spec
from sifu.core.spec.regime import ClosedForm, Regime, by_regime
from sifu.core.spec.sections import NETWORK_FEATURES
from sifu.errors import InputError
from sifu.theory.facts import BY_LARGEST_CLIENT, BY_PARTICIPANTS, ON_A_REPEATING_GPU, ON_NODES, UNKNOWN, TrainingFacts

if TYPE_CHECKING:
    from sifu.engines.sim import SimulatedFederation
    from sifu.engines.sim.embedded_heads import ClosedFormFederation

WORTH_A_GPU = 2**20
"""Number of values in a round's samples from which `auto` uses the GPU for a linear model.

Measured (`benchmarks/gpu_rounds.py worth`): rounds are faster on a GPU with far fewer values, but a command starts a
second later. `auto` always uses the GPU for the package's convolutional networks (in float32, the only type lanes
support for them): rounds of small networks are 12 to 40 times as fast, though the first use of a network on a machine
compiles kernels for about ten seconds.
"""
GPU = "cuda"


def check_choice(device: str, precision: str) -> None:
    """Check that the device and the precision are known values."""
    for name, value, options in (("device", device, get_args(Device)), ("precision", precision, get_args(Precision))):
        if value not in options:
            raise InputError(f"{name} must be one of {', '.join(options)}, found {value!r}")


def why_no_gpu() -> str | None:
    """Return why a GPU cannot be used here, or None if it can."""
    import torch

    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    return None


def features_device(spec: Spec, device: str) -> str:
    """Return the device for a trained head's features: a GPU if a network computes them and a GPU is available."""
    by_network = spec.features.kind in NETWORK_FEATURES and spec.regime.maps_before_training
    return GPU if by_network and device != "cpu" and why_no_gpu() is None else "cpu"


def on_device(engine: Engine, clients: Any, spec: Spec, device: str, precision: str) -> Engine:
    """Return the embedded engine itself, or a GPU engine with its model and clients.

    `auto` uses the GPU if there is one, it supports the run, and it pays off. It pays off for the package's
    convolutional networks, networks that compute features, and linear models with many samples. A user's module trains
    on the GPU only with `device` cuda.

    Args:
        engine: The embedded engine.
        clients: Clients with their data.
        spec: Spec of the run.
        device: auto, cpu or cuda.
        precision: Precision of networks on the GPU.

    Raises:
        InputError: If `device` is cuda and the GPU cannot be used.
    """
    check_choice(device, precision)
    if device == "cpu":
        return engine
    missing = why_no_gpu()
    if device == "cuda" and missing is not None:
        raise InputError(f"--device cuda cannot be used here: {missing}")
    return engine if missing is not None else by_regime(ON_GPU, spec.regime)(engine, clients, spec, device, precision)


def _rounds_on_gpu(engine: Engine, clients: Any, spec: Spec, device: str, precision: str) -> Engine:
    """Return a GPU engine with the engine's model and clients, or the same engine if `auto` decides against a GPU."""
    if device == "auto" and not _worth_a_gpu(engine, clients):
        return engine
    from sifu.engines.sim.lanes import lane_engines

    try:
        if spec.keep.gram_clients:
            raise InputError("the GPU engine computes no Gram matrices: set keep.gram_clients = 0, or use --device cpu")
        return lane_engines([cast("SimulatedFederation", engine)], [clients], GPU, precision)[0]
    except InputError:
        if device == "auto":
            return engine
        raise


def _head_on_gpu(engine: Engine, clients: Any, spec: Spec, device: str, precision: str) -> Engine:
    """Return the engine with features computed on the GPU. With `auto`, use the GPU only if a network computes them."""
    if device != "auto" or spec.features.kind in NETWORK_FEATURES:
        return cast("ClosedFormFederation", engine).with_features_on(GPU)
    return engine


ON_GPU: dict[type[Regime], Callable[[Engine, Any, Spec, str, str], Engine]] = {
    Regime: _rounds_on_gpu,
    ClosedForm: _head_on_gpu,
}


def _worth_a_gpu(engine: Engine, clients: Any) -> bool:
    from sifu.engines.sim import LinearModel

    model = cast("SimulatedFederation", engine).model
    if not isinstance(model, LinearModel):
        return model.conv_net is not None  # other modules use the GPU only with device = cuda
    rule = engine.facts.participation
    share = {"all": 1.0, "fixed": rule.count / len(clients), "poisson": rule.rate}[rule.kind]
    return bool(min(share, 1.0) * sum(client.x.size for client in clients) >= WORTH_A_GPU)


OWN_ENGINES = {
    "sifu.engines.sim.simulator.SimulatedFederation": BY_PARTICIPANTS,
    "sifu.engines.sim.embedded_heads.ClosedFormFederation": BY_PARTICIPANTS,
    "sifu.engines.sim.embedded_heads.HeadsOnDevice": ON_A_REPEATING_GPU,
    "sifu.run.kept_statistics.KeptStatistics": BY_PARTICIPANTS,
    "sifu.engines.sim.gpu.lane_engine.LaneEngine": BY_LARGEST_CLIENT,
    "sifu.engines.outside.OutsideFederation": ON_NODES,
    "sifu.engines.outside_statistics.OutsideStatistics": ON_NODES,
    "sifu.engines.outside_statistics.MaskedOutsideStatistics": ON_NODES,
    "sifu.engines.flower.flower_engine.FlowerFederation": ON_NODES,
    "sifu.engines.flower.statistics_engine.FlowerStatistics": ON_NODES,
    "sifu.engines.flower.statistics_engine.MaskedFlowerStatistics": ON_NODES,
}
"""Kind of each engine class: the inputs that determine the last bits of its rounds (docs/theory.md, section 6.6)."""
METHODS = ("run_round", "run_rounds", "local_updates", "initial_model", "collect")


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
    the influence of a forgotten client. Rounds with noise from the operating system cannot be compared. Also check that
    optional methods are declared.

    Raises:
        InputError: If results differ, or an optional method is not declared.
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
            f"the engine {type(engine).__name__} gave a different result when its first round was repeated: it keeps "
            "state between rounds, or draws random numbers without a key. State of a client would remain after the "
            "client is forgotten: make a round depend only on its model, its position and its clients"
        )
