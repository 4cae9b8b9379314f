"""Embedded engine of closed-form heads: clients in this process send statistics, and a round solves for the head.

Features are computed in blocks when a client's statistics are requested. Features that fit into memory are cached in
float32 for evaluations; statistics are never computed from the cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from sifu.core.closed_form_engine import HasRecords, head_facts, head_layout, head_profile
from sifu.core.engine import Evaluation, LacksData, Position, Rejection, RoundResult, ShowsSamples
from sifu.core.layout import ModelLayout, Vector
from sifu.data.dataset import sample_digest
from sifu.engines.sim.embedded_clients import ClientData, check_names
from sifu.errors import InputError, RoundRejectedError, UnusableSamplesError
from sifu.theory.arrays import Array, Floats
from sifu.theory.closed_form import FixedPoint, Rows, Statistics, Targets, fit_head, total
from sifu.theory.closed_form.rows import rows_are_smaller, rows_of_chunks
from sifu.theory.closed_form.statistics_check import find_flaw
from sifu.theory.closed_form.sums import statistics_of_chunks
from sifu.theory.facts import IN_PROCESS, ClientProfile
from sifu.theory.participation import ClientIndices
from sifu.theory.rounding import norm_up

if TYPE_CHECKING:
    from sifu.data.feature_maps import FeatureMap

BLOCK = 4096
KEPT_BYTES = 1 << 29
"""Size of the feature cache in bytes, enough for 65,536 samples of 2,048 features; further features are recomputed."""
PROBED = 128
"""Number of samples whose features a device computes twice before it is used."""


class ClosedFormFederation(LacksData, ShowsSamples, HasRecords):
    """Engine for closed-form heads of clients whose data are available in this process.

    `declared` is True if the operator declares the feature map to be public, and `module` is the value of
    `TrainingFacts.module` for a module of the operator that computes it; `from_labels` is True if the number of
    outputs was counted from the clients' labels.
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
        module: str = "",
        from_labels: bool = False,
    ) -> None:
        self._data = tuple(clients)
        self._map, self.targets, self.fixed, self.relative_penalty = features, targets, fixed, relative_penalty
        self._kept: dict[int, NDArray[np.float32]] = {}
        self._kept_bytes = 0
        check_names(self._data)
        for client in self._data:
            targets.encode(np.asarray(client.y))  # refuse unusable labels before a run is created
        self.clients = tuple(head_profile(client.name, len(client.x)) for client in self._data)
        self._samples = np.array([client.samples for client in self.clients], dtype=np.int64)
        self.facts = head_facts(
            features.digest(),
            declared=declared,
            module=module,
            from_labels=from_labels,
            preprocessing=preprocessing,
            identity=IN_PROCESS,
        )

    @cached_property
    def sample_digests(self) -> tuple[str, ...]:
        """Digest of each client's samples as given; a run continues only with the samples it was created with."""
        return tuple(map(sample_digest, self._data))

    @property
    def layout(self) -> ModelLayout:
        """Layout of weight and bias, as in other linear models."""
        return head_layout(self.fixed)

    def with_features_on(self, device: str) -> ClosedFormFederation:
        """Return an engine that computes features on a device; an exact map stays on the CPU."""
        if self._map.exact:
            return self
        moved = HeadsOnDevice(self._data, self._map.on(device), self.targets, self.fixed, self.relative_penalty)
        moved.facts = self.facts
        return moved

    def initial_model(self, branch: int) -> Vector:
        """Return a head of zeros."""
        return np.zeros(self.layout.size)

    def reachable(self, clients: Sequence[int]) -> list[int]:
        """Return all clients: their data are available."""
        return list(clients)

    def collect(
        self, clients: Sequence[int], position: Position
    ) -> Iterator[tuple[int, Statistics | Rows | Rejection]]:
        """Yield each client's statistics, checked as if they came from an untrusted client, or its rejection."""
        for client in clients:
            profile = self.clients[client]
            try:
                sent = self.sent_by(client)
            except UnusableSamplesError as error:
                yield client, Rejection(position, profile.name, "unusable samples", left_out=True, detail=str(error))
                continue
            yield client, checked(sent, self.fixed, profile, position)

    def sent_by(self, client: int) -> Statistics | Rows:
        """Return the statistics or the rows of a client, whichever are smaller."""
        records = self.records_of(client)
        if rows_are_smaller(self.fixed, len(self._data[client].x)):
            return rows_of_chunks(self.fixed, records)
        return statistics_of_chunks(self.fixed, records)

    def records_of(self, client: int) -> Iterator[tuple[Floats, Floats]]:
        """Yield features and targets of a client's records in blocks."""
        targets = self.targets.encode(np.asarray(self._data[client].y))
        for rows, phi in self._blocks(client):
            yield phi, targets[rows]

    def _blocks(self, client: int) -> Iterator[tuple[slice, Floats]]:
        """Yield the client's features in blocks; cache them in float32 for evaluations if they fit."""
        x = np.asarray(self._data[client].x)
        size = len(x) * self.fixed.features * np.dtype(np.float32).itemsize
        fits = client not in self._kept and self._kept_bytes + size <= KEPT_BYTES
        pieces = []
        for rows, phi in self._map.chunks(x):
            if fits:
                pieces.append(phi.astype(np.float32))
            yield rows, phi
        if fits:
            self._kept[client] = np.concatenate(pieces)
            self._kept_bytes += size

    def run_round(self, model: Vector, position: Position, active: ClientIndices) -> RoundResult:
        """Solve for the head of the active clients, ignoring `model`; drifts are unknown."""
        chosen = np.asarray(active, dtype=np.int64)
        parts = []
        for _, sent in self.collect(chosen.tolist(), position):
            if isinstance(sent, Rejection):
                raise RoundRejectedError(f"the statistics of {sent.client!r} cannot be used: {sent.reason}")
            parts.append(sent)
        head = fit_head(total(self.fixed, parts), self.relative_penalty)
        vector = head.weights.ravel()
        drifts = np.full(chosen.size, np.inf)
        return RoundResult(vector, chosen, self._samples[chosen], drifts, norm_up(vector - model), 0.0)

    def features(self, x: Array) -> Floats:
        """Return the features of samples, one row per sample, without the constant column."""
        blocks = [phi for _, phi in self._map.chunks(np.asarray(x))]
        return np.concatenate(blocks) if blocks else np.zeros((0, self.fixed.features))

    def predict(self, model: Vector, x: Array) -> Floats:
        """Return the predicted real-valued targets of samples, before decoding."""
        weights = self._weights(model)
        blocks = [phi @ weights[:-1] + weights[-1] for _, phi in self._map.chunks(np.asarray(x))]
        return np.concatenate(blocks) if blocks else np.zeros((0, self.fixed.outputs))

    def _weights(self, model: Vector) -> Floats:
        return np.asarray(model, dtype=np.float64).reshape(self.fixed.width, self.fixed.outputs)

    def evaluate(self, model: Vector, clients: ClientIndices) -> Evaluation:
        """Return each client's number of correct predictions and summed squared error.

        Regression has no correct predictions; in `multi_label` all labels of a sample must be correct. A client whose
        samples cannot be mapped to features counts as a client without samples.
        """
        chosen = np.asarray(clients, dtype=np.int64)
        weights, samples = self._weights(model), self._samples[chosen]
        correct, loss = np.zeros(chosen.size, dtype=np.int64), np.zeros(chosen.size)
        for place, client in enumerate(chosen.tolist()):
            try:
                correct[place], loss[place] = self._evaluate_client(weights, client)
            except UnusableSamplesError:
                samples[place] = 0
        return Evaluation(chosen.copy(), samples, correct, loss)

    def _evaluate_client(self, weights: Floats, client: int) -> tuple[int, float]:
        """Return the number of correct predictions and the summed squared error of a client."""
        labels = np.asarray(self._data[client].y)
        correct, loss = 0, 0.0
        for rows, phi in self._features_of(client):
            predicted = phi @ weights[:-1] + weights[-1]
            loss += float(np.sum((predicted - self.targets.encode(labels[rows])) ** 2))
            if self.targets.task != "regression":
                decided = self.targets.decode(predicted)
                right = decided == labels[rows].reshape(decided.shape)
                correct += int(np.sum(right if right.ndim == 1 else right.all(axis=1)))
        return correct, loss

    def _features_of(self, client: int) -> Iterator[tuple[slice, Floats]]:
        """Yield features for an evaluation in blocks, cached or recomputed, in both cases rounded to float32."""
        if client in self._kept:
            kept = self._kept[client]
            for start in range(0, len(kept), BLOCK):
                yield slice(start, start + BLOCK), kept[start : start + BLOCK].astype(np.float64)
        else:
            for rows, phi in self._blocks(client):
                yield rows, phi.astype(np.float32).astype(np.float64)


class HeadsOnDevice(ClosedFormFederation):
    """Variant of `ClosedFormFederation` whose features depend on the device that computes them.

    This is a separate class, because `run.devices` identifies engines by class.
    """

    _repeated = False

    def sent_by(self, client: int) -> Statistics | Rows:
        """Return the statistics or the rows of a client.

        The first call also checks that the device repeats the features of some samples bit for bit.

        Raises:
            InputError: If the features differ the second time.
        """
        if not self._repeated:
            some = np.asarray(self._data[client].x)[:PROBED]
            if not np.array_equal(self._map(some), self._map(some)):
                raise InputError(
                    "the device gave other features for the same samples the second time, so nothing computed on it "
                    "can be exact: use --device cpu"
                )
            self._repeated = True
        return super().sent_by(client)


def checked(
    sent: Statistics | Rows, fixed: FixedPoint, client: ClientProfile, position: Position
) -> Statistics | Rows | Rejection:
    """Return the statistics or rows that a client sent, or a rejection if its data cannot have given them."""
    if sent.fixed != fixed or sent.samples != client.samples:
        detail = f"{sent.samples} samples in [{sent.fixed.describe()}]"
        return Rejection(position, client.name, "wrong samples", left_out=True, detail=detail)
    if isinstance(sent, Rows):
        try:
            sent.check(client.name)
        except InputError as error:
            return Rejection(position, client.name, "impossible statistics", left_out=True, detail=str(error))
    elif (flaw := find_flaw(sent)[0]) is not None:
        return Rejection(position, client.name, "impossible statistics", left_out=True, detail=flaw.value)
    return sent
