"""Where rounds are computed: on the CPU by the embedded engine, or on a GPU as a lane by itself (`engines.sim.lanes`).

Both draw the same participants and batches and agree to rounding. A run begun on a GPU may be continued on the CPU; the
other way round its certificates would claim bits that a GPU does not keep (docs/theory.md, section 6.6).
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any, cast, get_args

from sifu.choices import Device, Precision
from sifu.core.engine import Engine
from sifu.core.spec import RIDGE, Spec
from sifu.errors import InputError

if TYPE_CHECKING:
    from sifu.engines.sim.closed_form import ClosedFormFederation

WORTH_A_GPU = 2**20
"""Values in the samples of a round's participants from which on `auto` takes the GPU for a linear model.

Measured (`benchmarks/gpu_worth.py`): rounds are faster on a GPU from far fewer on, but a command starts a second later.
Networks always go there (in float32, the only type lanes have for them): rounds of small ones are 12 to 40 times as
fast, though the first use of a network on a machine compiles its kernels for some ten seconds.
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


def on_device(engine: Engine, clients: Any, spec: Spec, device: str, precision: str) -> Engine:
    """The embedded engine itself, or a lane on the GPU with its model and clients.

    `auto` takes the GPU where there is one, the lane can do what the run asks for, and it pays: for networks, and for
    linear models with many samples.
    """
    check_choice(device, precision)
    if device == "cpu":
        return engine
    missing = why_no_gpu()
    if spec.model.kind == RIDGE:  # a solve takes a second wherever it runs; features gain, where it is asked for
        if device == "cuda" and missing is not None:
            raise InputError(f"--device cuda cannot be used here: {missing}")
        if device == "cuda":
            cast("ClosedFormFederation", engine).compute_features_on("cuda")
        return engine
    if missing is not None:
        if device == "cuda":
            raise InputError(f"--device cuda cannot be used here: {missing}")
        return engine
    if device == "auto" and not _worth_a_gpu(engine, clients):
        return engine
    try:
        return _lane(engine, clients, spec, precision)
    except InputError:
        if device == "auto":
            return engine
        raise


def _lane(engine: Engine, clients: Any, spec: Spec, precision: str) -> Engine:
    from sifu.engines.sim import SimulatedFederation
    from sifu.engines.sim.lanes import lane_engines

    if spec.keep.gram_clients:
        raise InputError("a GPU keeps no Gram matrices: set keep.gram_clients = 0, or use --device cpu")
    (lane,) = lane_engines([cast("SimulatedFederation", engine)], [clients], GPU, precision)
    return lane


def _worth_a_gpu(engine: Engine, clients: Any) -> bool:
    from sifu.engines.sim import LinearModel, SimulatedFederation

    model = cast("SimulatedFederation", engine).model
    if not isinstance(model, LinearModel):
        return model.conv_net is not None  # other modules run there kernel by kernel, where they are asked to
    rule = engine.facts.participation
    share = {"all": 1.0, "fixed": rule.count / len(clients), "poisson": rule.rate}[rule.kind]
    return bool(min(share, 1.0) * sum(client.x.size for client in clients) >= WORTH_A_GPU)
