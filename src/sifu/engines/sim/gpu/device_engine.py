"""Base class of engines that compute the rounds of an embedded federation on a device, several rounds ahead."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing

import numpy as np

from sifu.core.engine import LacksData, Position, RoundResult, ShowsSamples
from sifu.core.layout import Vector
from sifu.core.round_stream import RoundsWanted, RunsAhead, StreamedRound, StreamsGroupRounds
from sifu.core.spec import StopSpec
from sifu.engines.sim.simulator import SimulatedFederation
from sifu.theory.participation import ClientIndices

NONE = np.zeros(0, dtype=np.int64)


class DeviceEngine(LacksData, ShowsSamples, RunsAhead, StreamsGroupRounds):
    """Engine of the clients and the model of `federation`; subclasses stream its rounds."""

    def __init__(self, federation: SimulatedFederation) -> None:
        self._federation = federation
        self.layout, self.clients = federation.layout, federation.clients

    @property
    def sample_digests(self) -> tuple[str, ...]:
        """Digest of each client's samples, as in the embedded engine."""
        return self._federation.sample_digests

    def initial_model(self, branch: int) -> Vector:
        """Return the initial model of a branch, as in the embedded engine."""
        return self._federation.initial_model(branch)

    def run_round(self, model: Vector, position: Position, active: ClientIndices) -> RoundResult:
        """Run one round of FedAvg, with the same bits as in a stream."""
        stop = StopSpec(target=0.0, min_rounds=0, max_rounds=position.round + 1, evaluate_every=1)
        wanted = RoundsWanted(stop, model.astype(np.float64), evaluated=NONE)
        with closing(self._stream([model], position, [active], wanted)) as rounds:
            (done,) = next(rounds)
            return RoundResult(
                done.fetch_model(), done.participants, done.samples, done.drifts, done.mean_shift, done.rounding
            )

    def run_rounds(
        self, model: Vector, position: Position, active: ClientIndices, wanted: RoundsWanted
    ) -> Iterator[StreamedRound]:
        """Yield rounds, of which the device computes the next ones meanwhile."""
        with closing(self._stream([model], position, [active], wanted)) as rounds:
            for (done,) in rounds:
                yield done

    def stream_group_rounds(
        self, models: Sequence[Vector], position: Position, groups: Sequence[ClientIndices], wanted: RoundsWanted
    ) -> Iterator[list[StreamedRound]]:
        """Yield lists of rounds, one round per group; models stay on the device until they are read."""
        return self._stream(models, position, groups, wanted, models_stay=True)

    @abstractmethod
    def _stream(
        self,
        models: Sequence[Vector],
        position: Position,
        groups: Sequence[ClientIndices],
        wanted: RoundsWanted,
        *,
        models_stay: bool = False,
    ) -> Generator[list[StreamedRound]]:
        """Yield lists of rounds, one round per group from the group's own model."""
