"""For those who keep Flower's own `Strategy.start()`: FedAvg that also records Psi and keeps the models it needs.

Flower's loop has no way back, so this strategy forgets nobody. It writes down, round by round, what bounds each
client's influence, and the models a rollback could start from; `psi()` answers at any time. Clients are node ids, and
nothing it records is a certificate.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp.strategy import FedAvg

from sifu.core.layout import ModelLayout, Vector
from sifu.engines.flower.averaging import average_replies
from sifu.engines.flower.wire import arrays_of, in_place
from sifu.errors import InputError
from sifu.store.files import model_bytes, write_atomically
from sifu.store.regular_files import private_folder
from sifu.theory.retention import crosses_a_level, level_ladder
from sifu.theory.sensitivity import client_increments

if TYPE_CHECKING:
    from flwr.serverapp import Grid


ROUNDS_FILE = "rounds.jsonl"
Record = TypeVar("Record", ArrayRecord, MetricRecord)


class TrackedFedAvg(FedAvg):
    """FedAvg with Psi(n+1, c) = B^K Psi(n, c) + Delta_c, for an expansion of `factor` per round (1: never more).

    `folder` gets `rounds.jsonl` (who took part, samples, drifts) and the models at which some client's Psi crosses a
    level of a ladder from `lowest` to `highest`.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        factor: float = 1.0,
        lowest: float = 1e-4,
        highest: float = 10.0,
        ratio: float = 1.25,
        **fedavg: Any,
    ) -> None:
        super().__init__(**fedavg)
        self._folder = Path(folder)
        if (self._folder / ROUNDS_FILE).exists():  # Psi would begin at zero again, and say too little
            raise InputError(f"{folder} holds the record of another training: give each one a folder of its own")
        private_folder(self._folder, parents=True)
        self._factor = factor
        self._levels = level_ladder(lowest, highest, ratio)
        self._psi: dict[int, float] = {}
        self._layout: ModelLayout | None = None
        self._start: Vector | None = None

    def psi(self) -> dict[int, float]:
        """Psi of every node that ever took part."""
        return dict(self._psi)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Remember the model the round starts from; Flower does not hand it to `aggregate_train`."""
        named = arrays_of(arrays)
        first = next(iter(named.values()))
        shapes = tuple(tuple(array.shape) for array in named.values())
        self._layout = ModelLayout(tuple(named), shapes, str(first.dtype))
        self._start = self._layout.flatten(named)
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """FedAvg, and one more pass over the replies."""
        kept = list(replies)
        self._track(server_round, [reply for reply in kept if reply.has_content()])
        return super().aggregate_train(server_round, kept)

    def _track(self, server_round: int, replies: list[Message]) -> None:
        if not replies or self._layout is None or self._start is None:
            return
        layout, start = self._layout, self._start
        nodes = [reply.metadata.src_node_id for reply in replies]
        records = [next(_records(reply, ArrayRecord)) for reply in replies]
        metrics = [next(_records(reply, MetricRecord)) for reply in replies]
        weights = np.array([float(metric[self.weighted_by_key]) for metric in metrics])  # type: ignore[arg-type]
        samples = weights.astype(np.int64)
        if (samples != weights).any():
            raise InputError(
                f"{self.weighted_by_key} must be whole numbers to be tracked, found {weights[samples != weights][0]}"
            )
        rows = [layout.flatten({name: in_place(array) for name, array in record.items()}) for record in records]
        mean = average_replies(rows, start, samples, False)
        increments = client_increments(samples, mean.drifts, int(samples.sum()), mean.mean_shift, 1.0)
        if mean.not_finite:  # nothing bounds what such a round does
            increments = np.full(samples.size, np.inf)
        before = np.array([self._psi.get(node, 0.0) for node in nodes])
        self._psi = {node: value * self._factor for node, value in self._psi.items()}
        for node, increment in zip(nodes, increments.tolist(), strict=True):
            self._psi[node] = self._psi.get(node, 0.0) + increment
        if crosses_a_level(self._levels, before, np.array([self._psi[node] for node in nodes])):
            write_atomically(self._folder / f"{server_round - 1}.safetensors", model_bytes(layout, start))
        line = {
            "round": server_round,
            "nodes": [str(node) for node in nodes],
            "samples": samples.tolist(),
            "drifts": mean.drifts.tolist(),
            "mean_shift": mean.mean_shift,
        }
        with (self._folder / ROUNDS_FILE).open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line) + "\n")


def _records(reply: Message, kind: type[Record]) -> Iterator[Record]:
    """The records of a kind in a reply."""
    return (record for record in reply.content.values() if isinstance(record, kind))
