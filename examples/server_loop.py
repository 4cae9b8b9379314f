"""Forgetting without a framework: your loop communicates with the clients; sifu averages, forgets and certifies."""

import tempfile
from pathlib import Path

import numpy as np

import sifu

SPEC = {
    "local": {"rate": 0.1, "steps": 1},
    "regularity": {"kind": "assumed", "factor": 1.0},  # your clients' training is unknown to sifu
    "stop": {"max_rounds": 10, "target": 0.0},
}
random = np.random.default_rng(0)
DATA = {f"site-{n}": (random.normal(size=(20, 4)), random.normal(size=20) + n) for n in range(6)}


def train(name: str, model: dict) -> dict:
    """Train one client; replace this by HTTP, gRPC or a message queue. Here a client is a function."""
    x, y = DATA[name]
    return {"w": model["w"] - 0.1 * x.T @ (x @ model["w"] - y) / len(y)}


def serve(folder: Path) -> None:
    """Run rounds until no work is left: training, then requests."""
    samples = {name: len(y) for name, (_, y) in DATA.items()}
    with sifu.ServerLoop(folder, SPEC, samples, initial=lambda: {"w": np.zeros(4)}) as run:
        while task := run.next():
            run.take({name: train(name, model) for name, model in task.models.items()})


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "run"
        serve(folder)
        run = sifu.open_run(folder)
        run.request(["site-2"], "case-1")
        serve(folder)
        print(run.outcomes()[0], "verified:", run.verify().holds)
