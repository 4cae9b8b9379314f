"""What the signature of every event costs: the same run with it and with a stub in its place, in turns.

    python benchmarks/signing.py [--repeats N]

Every round is a separate event here, the worst case: by default a run records its rounds once a second. Processor
time of the process, so that other work on the machine does not count. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import sifu
from sifu.run import training
from sifu.store.checkpoints import Checkpoint, Signer
from sifu_paper.provenance import commit, processor

SPEC: dict[str, Any] = {
    "data": {"clients": 20, "samples_per_client": 20},
    "local": {"steps": 5},
    "stop": {"target": 0.0, "max_rounds": 100, "evaluate_every": 100},
}


def seconds_of_a_run(signed: bool) -> tuple[float, int]:
    """Processor seconds of training a hundred rounds, each an event, and how many events there were."""
    sign, holds = Signer.sign, Checkpoint.holds
    if not signed:  # neither made nor looked at when the run is opened
        Signer.sign = lambda self, run, event: bytes(64)  # type: ignore[method-assign]
        Checkpoint.holds = property(lambda self: True)  # type: ignore[method-assign,assignment]
    try:
        with tempfile.TemporaryDirectory() as folder:
            began = time.process_time()
            run = sifu.train(SPEC, run=Path(folder) / "run")
            taken = time.process_time() - began
            with run.reader() as reader:
                return taken, reader.last_event()[0]
    finally:
        Signer.sign = sign  # type: ignore[method-assign]
        Checkpoint.holds = holds  # type: ignore[method-assign]


def seconds_of_a_signature() -> float:
    """Processor seconds of one signature over the checkpoint of an event, alone."""
    with tempfile.TemporaryDirectory() as folder:
        run = sifu.train(SPEC | {"stop": {"target": 0.0, "max_rounds": 1}}, run=Path(folder) / "run")
        with run.reader() as reader:
            event, run_id = reader.events()[-1], reader.value("run")
            signer = Signer(run.folder, reader.value("public_key"))
        began = time.process_time()
        for _ in range(1000):
            signer.sign(run_id, event)
        return (time.process_time() - began) / 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7, help="runs of each kind")
    repeats = parser.parse_args().repeats
    training.COMMIT_SECONDS = 0.0
    _, events = seconds_of_a_run(True)  # which also imports everything
    pairs = [(seconds_of_a_run(True)[0], seconds_of_a_run(False)[0]) for _ in range(repeats)]
    ratios = sorted(signed / stubbed for signed, stubbed in pairs)
    result = {
        "date": time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
        "commit": commit(),
        "hardware": f"{processor()}, {os.cpu_count()} cores",
        "events": events,
        "signed_median_seconds": round(statistics.median(signed for signed, _ in pairs), 4),
        "stubbed_median_seconds": round(statistics.median(stubbed for _, stubbed in pairs), 4),
        "median_ratio": round(statistics.median(ratios), 4),
        "ratios": [round(ratio, 4) for ratio in ratios],
        "microseconds_a_signature": round(1e6 * seconds_of_a_signature(), 1),
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
