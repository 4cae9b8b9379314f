"""How much longer a round with tracking is than one of Flower's own FedAvg, in Flower's simulation.

    python benchmarks/flower_rounds.py [--clients 50 200] [--rounds 10]

Both have the same virtual nodes (ray), the same ClientApp and the same model (softmax on digits), and run in turns: one
round of FedAvg as Flower's strategy does it (messages, answers, mean), one of ours (the same, checks and drifts).
Evaluation is left out of both. Figures are medians of elapsed seconds; `longer` is the median over rounds of ours over
the FedAvg round before it, less one.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import ConfigRecord
from flwr.serverapp.strategy import FedAvg

import sifu
from sifu.core.engine import Position
from sifu.engines.flower.wire import Instruction
from sifu.run.clients_and_engine import clients_from_spec
from sifu_paper.flower_simulation import enter_federation, simulate

if TYPE_CHECKING:
    from flwr.serverapp import Grid


def measure(clients: int, rounds: int) -> dict[str, Any]:
    """Rounds of both in turns, on one simulation."""
    spec = sifu.Spec.from_mapping(
        {
            "data": {"name": "digits", "clients": clients, "samples_per_client": 1600 // clients},
            "model": {"kind": "softmax", "outputs": 10},
            "local": {"rate": 0.1, "steps": 5},
            "seed": 1,
        }
    )
    elapsed: dict[str, list[float]] = {"flower": [], "sifu": []}

    def serve(grid: Grid) -> None:
        engine: Any = enter_federation(grid, Path(folder), spec, clients_from_spec(spec), "fixed constants")
        everyone = np.arange(clients)
        strategy = FedAvg(fraction_train=1.0, min_train_nodes=clients, min_available_nodes=clients)
        model = theirs = engine.initial_model(0)
        plan = engine._messenger.blueprint.plan
        arrays = engine.record(theirs)
        for number in range(rounds + 1):
            place = Position(0, number)
            began = time.perf_counter()
            config = ConfigRecord(dict(Instruction(place, 0, 5, plan).to_record()))
            replies = grid.send_and_receive(strategy.configure_train(number + 1, arrays, config, grid), timeout=600)
            averaged, _ = strategy.aggregate_train(number + 1, replies)
            assert averaged is not None
            arrays = averaged
            between = time.perf_counter()
            result = engine.run_round(model, place, everyone)
            model = result.model
            assert result.participants.size == clients
            ended = time.perf_counter()
            if number:  # the first ones wait for processes to start
                elapsed["flower"].append(between - began)
                elapsed["sifu"].append(ended - between)
        ours = engine.layout.unflatten(model)
        for name, array in arrays.items():
            np.testing.assert_allclose(array.numpy(), ours[name], atol=1e-6)

    with tempfile.TemporaryDirectory() as folder:
        logging.getLogger("flwr").setLevel(logging.CRITICAL)
        simulate(Path(folder), clients, serve)
    longer = [ours / theirs - 1.0 for ours, theirs in zip(elapsed["sifu"], elapsed["flower"], strict=True)]
    return {
        "clients": clients,
        "rounds": rounds,
        "seconds": {name: round(statistics.median(spent), 3) for name, spent in elapsed.items()},
        "longer": round(statistics.median(longer), 3),
    }


def main() -> None:
    """Measure each size and print one JSON object a line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[50, 200])
    parser.add_argument("--rounds", type=int, default=10)
    chosen = parser.parse_args()
    for clients in chosen.clients:
        print(json.dumps(measure(clients, chosen.rounds)), flush=True)


if __name__ == "__main__":
    main()
