"""Load test with many clients, rounds and requests: memory, bytes on disk, times of plan and status. `make load`.

The engine invents its rounds (a model of a few numbers, random drifts), so that the test measures the store and the
planner. By default it uses a tenth of everything and takes a few minutes; `--full` means 100,000 clients, 10,000 rounds
with about 100 participants, and 1,000 requests. It prints one JSON object, and progress on stderr.

`--signatures` measures the cost of the signature of every event instead: the same run with signatures and with a stub,
in turns. Every round is then a separate event, which is the worst case: by default a run records its rounds once a
second. Seconds are processor time, so that other work on the machine does not count.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import sifu
import sifu.run.training
from sifu.core.engine import Evaluation, Position, RoundResult
from sifu.core.layout import ModelLayout
from sifu.errors import SifuError
from sifu.store.checkpoints import Checkpoint, Signer
from sifu.theory.facts import ClientProfile, TrainingFacts
from sifu.theory.participation import Participation, base_key, place_key
from sifu_paper.provenance import commit, processor

SIZE = 8
SHIFT = 1e-3
USUAL = {"clients": 10_000, "rounds": 1_000, "participants": 100, "requests": 100}
FULL = {"clients": 100_000, "rounds": 10_000, "participants": 100, "requests": 1_000}
SIGNED_SPEC: dict[str, Any] = {
    "data": {"clients": 20, "samples_per_client": 20},
    "local": {"steps": 5},
    "stop": {"target": 0.0, "max_rounds": 100, "evaluate_every": 100},
}


class MadeUpFederation:
    """Engine of rounds with random drifts, which depend only on the position."""

    def __init__(self, clients: int, participants: int, seed: int = 1) -> None:
        self.layout = ModelLayout(("w",), ((SIZE,),))
        self.clients = tuple(ClientProfile(f"client-{k:06d}", 10, 5, 1.0) for k in range(clients))
        taking_part = Participation("poisson", rate=participants / clients)
        self.facts = TrainingFacts(0.5, 0.0, 0.0, None, taking_part, "float64", True, True)
        self._key, self._seed = base_key(seed, "load"), seed

    def initial_model(self, branch: int) -> Any:
        return np.zeros(SIZE)

    def run_round(self, model: Any, position: Position, active: Any, **_: Any) -> RoundResult:
        who = self.facts.participation.draw(active, place_key(self._key, position.branch, position.round))
        rng = np.random.default_rng((self._seed, position.branch, position.round))
        if who.size == 0:
            return RoundResult(model, who, np.zeros(0, dtype=np.int64), np.zeros(0), 0.0, 0.0)
        drifts, way = rng.uniform(1e-4, 1e-3, who.size), rng.normal(size=SIZE)
        # As far as recorded: verification compares two kept models with the recorded shifts between them.
        step = way * (SHIFT / np.linalg.norm(way))
        return RoundResult(model + step, who, np.full(who.size, 10), drifts, SHIFT * (1.0 + 1e-6), 0.0)

    def evaluate(self, model: Any, clients: Any) -> Evaluation:
        count = np.asarray(clients).size
        return Evaluation(np.asarray(clients), np.full(count, 10), np.full(count, 9), np.full(count, 1.0))


def peak_megabytes() -> float:
    """Return the peak memory of this process in megabytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def megabytes_now() -> float:
    """Return the current memory of this process in megabytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def seconds(call: Any) -> float:
    """Return the elapsed seconds of a call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def processor_seconds(call: Any) -> tuple[float, float]:
    """Return the elapsed seconds of a call and its processor seconds, which other work does not affect."""
    began = time.process_time()
    return seconds(call), time.process_time() - began


def say(text: str) -> None:
    """Print progress."""
    print(f"{time.strftime('%H:%M:%S')} {text}, {megabytes_now():.0f} MB", file=sys.stderr, flush=True)


def on_disk(run: sifu.Run, folder: Path) -> dict[str, Any]:
    """Return the bytes of the database, and the bytes per participation of the database and of its table."""
    reader = run.reader()
    try:
        taken = int(reader.query("SELECT COUNT(*) FROM participation")[0][0])
        reader.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        try:
            table = reader.query("SELECT SUM(pgsize) FROM dbstat WHERE name = 'participation'")[0][0]
        except SifuError:  # an SQLite without dbstat
            table = None
    finally:
        reader.close()
    size = os.path.getsize(folder / "run.db")
    return {
        "participations": taken,
        "database_bytes": size,
        "database_bytes_a_participation": round(size / taken, 2),
        "table_bytes_a_participation": None if table is None else round(table / taken, 2),
    }


def reading(engine: Any, folder: Path, clients: int) -> dict[str, Any]:
    """Time plan and status in a process that just opened the run, and again later."""
    run = sifu.open_run(folder, engine=engine)
    names = [f"client-{clients - 1 - k:06d}" for k in range(51)]
    first = seconds(lambda: run.plan([names[0]], method="sifu"))
    began = time.process_time()
    plans = [seconds(lambda name=name: run.plan([name], method="sifu")) for name in names[1:]]
    processor = (time.process_time() - began) / len(plans)
    fresh = sifu.open_run(folder, engine=engine)
    status, status_processor = processor_seconds(fresh.status)
    return {
        "plan_first_seconds": round(first, 4),
        "plan_median_seconds": round(statistics.median(plans), 5),
        "plan_mean_processor_seconds": round(processor, 5),
        "plan_slowest_seconds": round(max(plans), 5),
        "status_first_seconds": round(status, 3),
        "status_first_processor_seconds": round(status_processor, 3),
        "status_again_seconds": round(seconds(fresh.status), 3),
    }


def measure(clients: int, rounds: int, participants: int, requests: int, batch: int) -> dict[str, Any]:
    """Train, plan, file and execute requests; return the measurements."""
    engine: Any = MadeUpFederation(clients, participants)
    spec = {
        "data": {"clients": clients},
        "server": {"participation": str(engine.facts.participation)},
        "stop": {"target": 0.0, "max_rounds": rounds, "evaluate_every": max(1, rounds // 4)},
        "privacy": {"sigma": 5.0},
    }
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "run"
        memory = {"before": round(megabytes_now())}
        training = seconds(lambda: sifu.train(spec, run=folder, engine=engine))
        memory["after training"] = round(megabytes_now())
        say(f"trained in {training:.0f} s")
        run = sifu.open_run(folder, engine=engine)
        trained = on_disk(run, folder) | reading(engine, folder, clients)
        say(f"plan {trained['plan_median_seconds']} s, status {trained['status_first_seconds']} s")
        asking, forgetting, forgetting_processor = [], [], []
        for begin in range(0, requests, batch):
            ids = range(begin, min(begin + batch, requests))
            asking += [seconds(lambda k=k: run.request([f"client-{k:06d}"], f"r{k}", method="sifu")) for k in ids]
            taken, processor = processor_seconds(lambda: run.forget(level="none"))
            forgetting.append(taken / len(ids))
            forgetting_processor.append(processor / len(ids))
            memory[f"after {ids[-1] + 1} requests"] = round(megabytes_now())
            say(f"{ids[-1] + 1} requests, the last ones {forgetting[-1]:.2f} s each")
        after = on_disk(run, folder) | reading(engine, folder, clients)
        say(f"plan {after['plan_median_seconds']} s, status {after['status_first_seconds']} s")
        back = [f"client-{requests:06d}"]
        going_back = seconds(lambda: run.forget(back, "goes-back", sigma=1e-6, level="none"))
        say("went back to the beginning")
        began, processor = time.perf_counter(), time.process_time()
        verification = run.verify()
        verifying, verifying_processor = time.perf_counter() - began, time.process_time() - processor
        return {
            "clients": clients,
            "rounds": rounds,
            "participants": participants,
            "requests": requests,
            "training_seconds": round(training, 1),
            "after_training": trained,
            "after_requests": after,
            "request_received_median_seconds": round(statistics.median(asking), 4),
            "request_carried_out_seconds": [round(seconds, 3) for seconds in forgetting],
            "request_carried_out_processor_seconds": [round(seconds, 3) for seconds in forgetting_processor],
            "request_that_goes_back_to_the_start_seconds": round(going_back, 2),
            "verify_seconds": round(verifying, 1),
            "verify_processor_seconds": round(verifying_processor, 1),
            "problems": verification.problems[:5],
            "megabytes": memory,
            "peak_megabytes": round(peak_megabytes()),
        }


def seconds_of_a_run(signed: bool) -> tuple[float, int]:
    """Return the processor seconds of a hundred rounds, each an event, and the number of events."""
    sign, holds = Signer.sign, Checkpoint.holds
    if not signed:  # signatures are neither made nor checked
        Signer.sign = lambda self, run, event: bytes(64)  # type: ignore[method-assign]
        Checkpoint.holds = property(lambda self: True)  # type: ignore[method-assign,assignment]
    try:
        with tempfile.TemporaryDirectory() as folder:
            began = time.process_time()
            run = sifu.train(SIGNED_SPEC, run=Path(folder) / "run")
            taken = time.process_time() - began
            with run.reader() as reader:
                return taken, reader.last_event()[0]
    finally:
        Signer.sign = sign  # type: ignore[method-assign]
        Checkpoint.holds = holds  # type: ignore[method-assign]


def seconds_of_a_signature() -> float:
    """Return the processor seconds of a single signature over the checkpoint of an event."""
    with tempfile.TemporaryDirectory() as folder:
        run = sifu.train(SIGNED_SPEC | {"stop": {"target": 0.0, "max_rounds": 1}}, run=Path(folder) / "run")
        with run.reader() as reader:
            event, run_id = reader.events()[-1], reader.value("run")
            signer = Signer(run.folder, reader.value("public_key"))
        began = time.process_time()
        for _ in range(1000):
            signer.sign(run_id, event)
        return (time.process_time() - began) / 1000


def measure_signatures(repeats: int) -> dict[str, Any]:
    """Compare a run with signatures to one without, `repeats` times."""
    sifu.run.training.COMMIT_SECONDS = 0.0
    _, events = seconds_of_a_run(True)  # this also imports everything
    pairs = [(seconds_of_a_run(True)[0], seconds_of_a_run(False)[0]) for _ in range(repeats)]
    ratios = sorted(signed / stubbed for signed, stubbed in pairs)
    return {
        "events": events,
        "signed_median_seconds": round(statistics.median(signed for signed, _ in pairs), 4),
        "stubbed_median_seconds": round(statistics.median(stubbed for _, stubbed in pairs), 4),
        "median_ratio": round(statistics.median(ratios), 4),
        "ratios": [round(ratio, 4) for ratio in ratios],
        "microseconds_a_signature": round(1e6 * seconds_of_a_signature(), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true", help="use the full size")
    for name, size in USUAL.items():
        parser.add_argument(f"--{name}", type=int, help=f"default {size}, {FULL[name]} with --full")
    parser.add_argument("--signatures", action="store_true", help="measure the cost of signing every event instead")
    parser.add_argument("--repeats", type=int, default=7, help="number of runs of each kind with --signatures")
    options = parser.parse_args()
    sizes = {name: getattr(options, name) or size for name, size in (FULL if options.full else USUAL).items()}
    began = time.strftime("%Y-%m-%d %H:%M", time.gmtime())
    if options.signatures:
        result = measure_signatures(options.repeats)
    else:
        result = measure(**sizes, batch=max(1, sizes["requests"] // 10))
    print(
        json.dumps(
            {"date": began, "commit": commit(), "hardware": f"{processor()}, {os.cpu_count()} cores", **result},
            indent=1,
        )
    )
    if result.get("problems"):
        raise SystemExit(3)


if __name__ == "__main__":
    main()
