"""sifu's embedded engine, bare or with the tracking of a recorded run: Psi for every client, and models kept."""

from __future__ import annotations

import numpy as np
from peers.contest import Stopwatch, main
from peers.workloads import Setting, Workload

from sifu.core.engine import Engine, Position, RoundResult
from sifu.core.layout import ModelLayout, Vector
from sifu.core.premises import MeasuredRegularity
from sifu.core.spec import Spec
from sifu.data import ClientData
from sifu.engines.sim import ConvNet, Convolution, ModuleModel
from sifu.run.clients_and_engine import engine_from_spec
from sifu.run.training import levels_to_keep
from sifu.theory.participation import ClientIndices
from sifu.theory.rollback import crosses_a_level, thin
from sifu.theory.rounding import norm
from sifu.theory.tracking import SensitivityTracker, summarise_round

CONVOLUTIONAL = ConvNet((3, 32, 32), (Convolution(32), Convolution(64), Convolution(64, pool=False)), (64,), outputs=10)


def spec_of(setting: Setting) -> Spec:
    """Return the setting as a spec."""
    return Spec.from_mapping(
        {
            "data": {"name": "python", "clients": setting.clients, "samples_per_client": setting.samples},
            "model": {"kind": "softmax" if setting.name == "A" else "python", "outputs": 10, "dtype": "float32"},
            "local": {
                "rate": setting.rate,
                "steps": setting.steps,
                "batch": 0 if setting.batch == setting.samples else setting.batch,
                "momentum": setting.momentum,
            },
            "server": {"participation": f"fixed({setting.participants})"},
            "regularity": {"kind": "measured" if setting.name == "A" else "assumed"},
        }
    )


def engine_of(workload: Workload) -> tuple[Engine, Spec]:
    """Return the engine that a user of the API gets."""
    names = (f"client-{number:03d}" for number in range(len(workload.x)))
    clients = [ClientData(*fields) for fields in zip(names, workload.x, workload.y, strict=True)]
    spec = spec_of(workload.setting)
    return engine_from_spec(spec, clients, ModuleModel(CONVOLUTIONAL) if spec.model.kind == "python" else None)


def _turned(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Convert a parameter between sifu's layout and the shared network's: only linear weights are transposed."""
    if array.shape == shape:
        return array
    if array.ndim == 2 and array.T.shape == shape:
        return array.T
    raise SystemExit(f"the engine's layout has a parameter of shape {array.shape}, expected {shape}")


def first_vector(layout: ModelLayout, workload: Workload) -> Vector:
    """Return the common first model in the engine's layout."""
    return np.concatenate([_turned(*pair).ravel() for pair in zip(workload.first, layout.shapes, strict=True)])


def parameters(layout: ModelLayout, vector: Vector, workload: Workload) -> list[np.ndarray]:
    """Return the engine's model in the shared network's layout."""
    edges = np.cumsum([int(np.prod(shape)) for shape in layout.shapes])[:-1]
    arrays = [part.reshape(shape) for part, shape in zip(np.split(vector, edges), layout.shapes, strict=True)]
    return [_turned(array, wanted.shape) for array, wanted in zip(arrays, workload.first, strict=True)]


class Tracking:
    """Work of a recorded run after each round, except writing to disk (see `sifu.run.training`)."""

    def __init__(self, engine: Engine, spec: Spec, first: Vector) -> None:
        self._tracker = SensitivityTracker(len(engine.clients))
        self._regularity = MeasuredRegularity.of(engine.clients, engine.facts, spec)
        self._levels, self._limit = levels_to_keep(spec), spec.keep.models
        self._everyone = np.arange(len(engine.clients))
        self._root = first.astype(np.float64)
        self.kept: dict[int, Vector] = {}
        self.distances: list[float] = []

    def ingest(self, depth: int, before: Vector, result: RoundResult) -> None:
        """Update Psi, and keep a copy of the model the round started from if a client crosses a level."""
        who = result.participants
        _, scalars = summarise_round(
            who,
            result.samples,
            result.drifts,
            result.mean_shift,
            result.rounding,
            factors=self._regularity.factors[who],
        )
        watched = who if scalars.absent_contraction == 1.0 else self._everyone
        psi_before = self._tracker.total(watched)
        self._tracker.update(scalars)
        if crosses_a_level(self._levels, psi_before, self._tracker.total(watched)):
            self.kept[depth] = before.copy()
            for gone in thin(list(self.kept), {0}, self._limit):
                del self.kept[gone]
        self.distances.append(norm(result.model.astype(np.float64) - self._root))


class Ours:
    """sifu's engine on a workload, with or without tracking."""

    def __init__(self, workload: Workload, tracking: bool) -> None:
        self._workload = workload
        self._engine, spec = engine_of(workload)
        self._model = first_vector(self._engine.layout, workload)
        self._tracking = Tracking(self._engine, spec, self._model) if tracking else None
        self._rounds = 0
        self.trained = 0
        """Samples trained on so far, counted here because the engine does not use the shared network."""

    def round(self, active: ClientIndices) -> None:
        """Run one round among the active clients."""
        result = self._engine.run_round(self._model, Position(0, self._rounds), active)
        if self._tracking:
            self._tracking.ingest(self._rounds, self._model, result)
        self._model = result.model
        self._rounds += 1
        setting = self._workload.setting
        self.trained += len(result.participants) * setting.steps * setting.batch

    def parameters(self) -> list[np.ndarray]:
        """Return the model in the shared network's layout."""
        return parameters(self._engine.layout, self._model, self._workload)


def run(workload: Workload, watch: Stopwatch, threads: int, tracking: bool) -> None:
    """Run `SimulatedFederation.run_round` behind `engine_from_spec`, float32."""
    ours, everyone = Ours(workload, tracking), np.arange(workload.setting.clients)
    watch.count_with(lambda: ours.trained)
    while True:
        # While the work is checked, only the scheduled clients are active; afterwards the engine draws its own.
        scheduled = watch.rounds < watch.warmup
        ours.round(np.array(workload.participants(watch.rounds)) if scheduled else everyone)
        if not watch.round_done(ours.parameters):
            return


if __name__ == "__main__":
    main(run, ["torch", "numpy"], tracking="track Psi and keep models, as a recorded run does")
