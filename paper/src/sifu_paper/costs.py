"""Costs of training, in the columns of a request: local steps, traffic, and bytes kept on disk for later requests."""

from __future__ import annotations

import numpy as np

from sifu import Outcome
from sifu.requests.certification import solves
from sifu.store.reader import RunReader


def training_cost(reader: RunReader) -> dict[str, int]:
    """Return the cost of the first training: a model to and from every participant of every round, and the bytes kept.

    Clients of a closed-form head send statistics once instead, and these are kept.
    """
    steps_of = np.array([client.local_steps for client in reader.clients()], dtype=np.int64)
    took_part = reader.participation().clients
    layout = reader.layout
    return {
        "local_steps": int(steps_of[took_part].sum()),
        "bytes_sent": sum(int(solve["bytes_sent"]) for solve in solves(reader).values())
        or int(2 * took_part.size * layout.size * np.dtype(layout.dtype).itemsize),
        "bytes_kept": sum(row.bytes for row in reader.models().values() if row.node != reader.tip)
        + sum(row.bytes for row in reader.updates().values())
        + sum(row.bytes for row in reader.statistics().values()),
    }


def request_cost(outcome: Outcome) -> dict[str, int]:
    """Return the recorded cost of a request; rounds before retraining (FedEraser's calibration) count separately."""
    cost = outcome.cost
    return {
        "rounds": cost.rounds - cost.starting_rounds,
        "extra_rounds": cost.starting_rounds,
        "local_steps": cost.local_steps,
        "bytes_sent": cost.bytes_sent,
        "bytes_kept": cost.bytes_kept,
    }
