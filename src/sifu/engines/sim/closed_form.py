"""The embedded engine of closed-form heads: clients of this process send statistics, and one round is a solve.

Features are computed when a client's statistics are asked for, a chunk at a time. Those that fit into memory are kept
for evaluations, in float32: statistics never come from the kept ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from sifu.core.engine import Evaluation, Position, Rejection, RoundResult
from sifu.core.layout import ModelLayout, Vector
from sifu.engines.sim.clients import ClientData
from sifu.errors import InputError, RoundRejectedError
from sifu.theory.arrays import Floats
from sifu.theory.closed_form import FixedPoint, Statistics, Targets, check_statistics, fit_head, total
from sifu.theory.closed_form.statistics import statistics_of_chunks
from sifu.theory.closed_form.statistics_check import HostileStatisticsError
from sifu.theory.facts import DRAWN_FROM_SEED, IN_PROCESS, NO_NOISE, ClientProfile, TrainingFacts
from sifu.theory.participation import ClientIndices, Participation
from sifu.theory.rounding import norm_up

if TYPE_CHECKING:
    from sifu.data.feature_maps import FeatureMap

KEPT_BYTES = 1 << 29
"""Of features in memory: 32,000 samples of 2,048 features; those of the rest are computed again."""


class ClosedFormFederation:
    """An `Engine`, and a `StatisticsEngine`, of clients whose data are at hand.

    `declared` says that the operator declares the map to be public; `from_labels` that the number of outputs was
    counted from the clients' labels.
    """

    def __init__(
        self,
        clients: Sequence[ClientData],
        features: FeatureMap,
        targets: Targets,
        fixed: FixedPoint,
        relative_penalty: float | None,
        *,
        preprocessing: str = "fixed constants",
        declared: bool = False,
        from_labels: bool = False,
    ) -> None:
        self._data = tuple(clients)
        self._map, self._targets, self.fixed, self.relative_penalty = features, targets, fixed, relative_penalty
        self._kept: dict[int, NDArray[np.float32]] = {}
        self._kept_bytes = 0
        names = [client.name for client in self._data]
        if len(set(names)) != len(names):
            raise InputError("two clients have the same name; every client needs its own")
        empty = [client.name for client in self._data if not len(client.x)]
        if empty:
            raise InputError(f"client {empty[0]!r} has no samples; leave it out of the federation")
        for client in self._data:
            targets.encode(np.asarray(client.y))  # labels that cannot be used are refused before a run is made
        # A solve does not look at the model before it: no step, nothing that could expand distances.
        self.clients = tuple(ClientProfile(client.name, len(client.x), 1, 0.0, 0.0) for client in self._data)
        self.facts = TrainingFacts(
            local_rate=0.0,
            momentum=0.0,
            nesterov=False,
            weight_decay=0.0,
            batch_size=None,
            server_rate=1.0,
            participation=Participation("all"),
            dtype="float64",
            smooth_model=True,
            rounding_bounded=False,
            preprocessing=preprocessing,
            shape_from_labels=from_labels,
            features=features.digest(),
            features_declared=declared,
            noise_source=NO_NOISE,
            identity=IN_PROCESS,
            initial=DRAWN_FROM_SEED,
        )

    @property
    def layout(self) -> ModelLayout:
        """Weight and bias, as other linear models have them."""
        shapes = ((self.fixed.features, self.fixed.outputs), (self.fixed.outputs,))
        return ModelLayout(("weight", "bias"), shapes, "float64")

    def initial_model(self, branch: int) -> Vector:
        """Zeros."""
        return np.zeros(self.layout.size)

    def collect(self, clients: Sequence[int]) -> Iterator[tuple[int, Statistics | Rejection]]:
        """Statistics of each client, checked as if they came from a stranger."""
        for client in clients:
            sent = self.sent_by(client)
            name = self.clients[client].name
            try:
                if sent.fixed != self.fixed or sent.samples != self.clients[client].samples:
                    raise InputError(f"{sent.samples} samples in [{sent.fixed.describe()}]")
                check_statistics(sent, name)
            except HostileStatisticsError:
                yield client, Rejection(Position(0, 0), name, "impossible statistics", left_out=True)
            except InputError:
                yield client, Rejection(Position(0, 0), name, "wrong samples", left_out=True)
            else:
                yield client, sent

    def sent_by(self, client: int) -> Statistics:
        """What a client sends; an engine of less honest clients says something else."""
        data = self._data[client]
        targets = self._targets.encode(np.asarray(data.y))
        kept = []

        def pieces() -> Iterator[tuple[Floats, Floats]]:
            for rows, phi in self._map.chunks(np.asarray(data.x)):
                kept.append(phi.astype(np.float32))
                yield phi, targets[rows]

        statistics = statistics_of_chunks(self.fixed, pieces())
        self._keep(client, np.concatenate(kept))
        return statistics

    def run_round(
        self,
        model: Vector,
        position: Position,
        active: ClientIndices,
        *,
        want_gram: bool = False,
        want_updates: bool = False,
    ) -> RoundResult:
        """The head of the active clients, whatever the model was; nobody's drift is known."""
        chosen = np.asarray(active, dtype=np.int64)
        parts = []
        for _, sent in self.collect(chosen.tolist()):
            if isinstance(sent, Rejection):
                raise RoundRejectedError(f"the statistics of {sent.client!r} cannot be used: {sent.reason}")
            parts.append(sent)
        head = fit_head(total(self.fixed, parts), self.relative_penalty)
        vector = head.weights.ravel()
        samples = np.array([self.clients[client].samples for client in chosen.tolist()], dtype=np.int64)
        drifts = np.full(chosen.size, np.inf)
        return RoundResult(vector, chosen, samples, drifts, norm_up(vector - model), 0.0)

    def local_updates(
        self, model: Vector, position: Position, clients: ClientIndices, steps: int
    ) -> NDArray[np.floating]:
        """There are none."""
        raise InputError("clients of a closed-form head send statistics once, and no updates")

    def evaluate(self, model: Vector, clients: ClientIndices) -> Evaluation:
        """Correct predictions (0 for regression; every label right for multi_label) and squared errors of targets."""
        chosen = np.asarray(clients, dtype=np.int64)
        weights = np.asarray(model, dtype=np.float64).reshape(self.fixed.width, self.fixed.outputs)
        correct, loss = np.zeros(chosen.size, dtype=np.int64), np.zeros(chosen.size)
        for place, client in enumerate(chosen.tolist()):
            phi, labels = self._features_of(client), np.asarray(self._data[client].y)
            predicted = phi @ weights[:-1] + weights[-1]
            loss[place] = float(np.sum((predicted - self._targets.encode(labels)) ** 2))
            if self._targets.task != "regression":
                right = self._targets.decode(predicted) == labels.reshape(self._targets.decode(predicted).shape)
                correct[place] = int(np.sum(right if right.ndim == 1 else right.all(axis=1)))
        samples = np.array([self.clients[client].samples for client in chosen.tolist()], dtype=np.int64)
        return Evaluation(chosen.copy(), samples, correct, loss)

    def _features_of(self, client: int) -> Floats:
        if client not in self._kept:
            pieces = [phi.astype(np.float32) for _, phi in self._map.chunks(np.asarray(self._data[client].x))]
            phi = np.concatenate(pieces)
            self._keep(client, phi)
            return phi.astype(np.float64)
        return self._kept[client].astype(np.float64)

    def _keep(self, client: int, phi: NDArray[np.float32]) -> None:
        if client not in self._kept and self._kept_bytes + phi.nbytes <= KEPT_BYTES:
            self._kept[client] = phi
            self._kept_bytes += phi.nbytes
