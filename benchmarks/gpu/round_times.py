"""Times of rounds on a GPU: one run, ten seeds at once, linear models in float64; with tracking, as in a recorded run.

Every figure is wall time between two synchronisations, over whole chunks, after a warm-up that compiles and captures
everything: the best of some repeats in turns, with their range. The error of a precision is the error of one round's
step of each named network, against the plain loop in float64. `--parts kinks`, which needs no GPU, shows how far that
loop itself jumps at a kink of ReLU or pooling. Data are random unless a folder with cifar10.npz is given; speed does
not depend on them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import numpy as np
import torch

from sifu.core.engine import Engine, Position
from sifu.core.round_stream import RoundsWanted, stream_rounds
from sifu.core.spec import StopSpec
from sifu.engines.sim import LinearModel, LocalTraining, ModuleModel, SimulatedFederation, SimulationSettings
from sifu.engines.sim.lanes import PRECISIONS, lane_engines
from sifu.engines.sim.networks import CONV_NETS, ConvNet, Convolution
from sifu.theory.participation import Participation
from sifu.theory.rollback import crosses_a_level
from sifu.theory.tracking import SensitivityTracker, summarise_round
from sifu_paper.provenance import commit

CIFAR10 = ConvNet((3, 32, 32), (Convolution(32), Convolution(64), Convolution(64, pool=False)), (64,), 10)
B = LocalTraining(rate=0.01, steps=5, batch_size=20, momentum=0.9)
PARTS = ("rounds", "errors", "kinks", "linear", "losses")
MOVED = 3e-7
"""Relative change of a model that shows whether a step meets a kink: a few roundings of float32."""


@dataclass(frozen=True)
class RandomClient:
    """Client with random data."""

    name: str
    x: np.ndarray
    y: np.ndarray


def random_clients(count: int, samples: int, shape: tuple[int, ...], classes: int, dtype: str) -> tuple:
    """Return random clients whose labels are a function of their samples."""
    generator = np.random.default_rng(7)
    clients = []
    for number in range(count):
        x = generator.standard_normal((samples, *shape)).astype(dtype)
        y = np.abs(x.reshape(samples, -1)[:, : 8 * classes].reshape(samples, classes, -1).sum(axis=2)).argmax(axis=1)
        clients.append(RandomClient(f"client-{number}", x, y))
    return tuple(clients)


def real_clients(folder: str) -> tuple:
    """Return CIFAR-10 divided among 100 clients of 100 samples each."""
    from sifu.data import from_dataset, load, partition

    dataset = load("cifar10", folder)
    indices = partition("dirichlet", dataset.y_train, 100, 100, np.random.default_rng(1), alpha=0.1)
    return from_dataset(dataset, indices, "float32", False, "standard")


def take(engine: Engine, rounds: int, tracked: bool, evaluate_every: int = 2**40) -> list[float]:
    """Stream rounds as a recorded run does: track Psi of everyone, and fetch a model if a client crosses a level."""
    clients = len(engine.clients)
    active = np.arange(clients)
    start = engine.initial_model(0)
    wanted = RoundsWanted(StopSpec(0.0, 0, rounds, evaluate_every), start.astype(np.float64))
    tracker, levels = SensitivityTracker(clients), np.geomspace(1e-4, 1e3, 73)
    ones, none = np.ones(clients), np.zeros(clients)
    losses, previous = [], lambda: start
    for done in stream_rounds(engine, start, Position(0, 0), active, wanted):
        if tracked:
            who = done.participants
            _, scalars = summarise_round(
                who, done.samples, done.drifts, done.mean_shift, done.rounding,
                factors=ones[who], averagedness=none[who], server_rate=1.0,
            )  # fmt: skip
            before = tracker.total(who)
            tracker.update(scalars)
            if crosses_a_level(levels[::24], before, tracker.total(who)):
                previous()
        previous = done.fetch_model
        if done.evaluation is not None:
            losses.append(done.evaluation.loss)
    return losses


def together(engines: list, work: Callable[[Engine], object]) -> float:
    """Return the seconds that one thread per engine takes; close the engines."""
    failed: list[BaseException] = []

    def run(engine: Engine) -> None:
        try:
            work(engine)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(engine,)) for engine in engines]
    torch.cuda.synchronize()
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    if failed:
        raise failed[0]
    return time.perf_counter() - began


def workload_b(clients: tuple, seed: int) -> SimulatedFederation:
    """Return the federation of workload B."""
    return SimulatedFederation(
        clients,
        ModuleModel(CIFAR10),
        B,
        SimulationSettings(participation=Participation("fixed", count=5), dtype="float32", seed=seed),
    )


def conv_milliseconds(
    clients: tuple, lanes: int, cases: list[tuple[str, bool]], rounds: int, repeats: int
) -> list[list[float]]:
    """Return the milliseconds per round and lane of B in every repeat, for each case (precision, tracking or not).

    The cases run in turns, so that other users of the device slow all of them.
    """
    groups = []
    for precision, _ in cases:
        federations = [workload_b(clients, seed) for seed in range(lanes)]
        groups.append(lane_engines(federations, [clients] * lanes, "cuda", precision))
    taken: list[list[float]] = [[] for _ in cases]
    for repeat in range(repeats + 1):
        for engines, (precision, tracked), times in zip(groups, cases, taken, strict=True):
            count = 120 if repeat == 0 else max(60, rounds // (6 if precision == "float32" and lanes > 1 else 1))
            seconds = together(engines, lambda engine, count=count, tracked=tracked: take(engine, count, tracked))
            if repeat:  # the first repeat compiles and captures
                times.append(seconds / count / lanes * 1000)
    for engine in itertools.chain.from_iterable(groups):
        engine.close()
    return taken


def step_federation(name: str, clip: float, dtype: str) -> tuple[SimulatedFederation, tuple]:
    """Return a federation of four clients with random images for a named network, and their data; the plain loop in
    float64.
    """
    shape = (3, 64, 64) if "celeba" in name else (1, 28, 28) if "fashion" in name else (3, 32, 32)
    clients = random_clients(4, 24, shape, 5, "float32")
    federation = SimulatedFederation(
        clients,
        ModuleModel(CONV_NETS[name](shape, 5)),
        LocalTraining(0.02, 2, 20, 0.9, clip=clip),
        SimulationSettings(
            participation=Participation("fixed", count=2),
            dtype=dtype,  # type: ignore[arg-type]
            seed=1,
            strategy="loop" if dtype == "float64" else "auto",
        ),
    )
    return federation, clients


def step_of(engine: Engine, start: np.ndarray) -> np.ndarray:
    """Return the change of the model in one round."""
    return engine.run_round(start, Position(1, 3), np.arange(4)).model - start


def errors_of_a_step(name: str, clip: float, precisions: list[str]) -> list[float]:
    """Return the largest error of a round's step against the loop in float64, relative to its largest entry."""
    single, clients = step_federation(name, clip, "float32")
    start = single.initial_model(0)
    truth = step_of(step_federation(name, clip, "float64")[0], start.astype("float64"))
    errors = []
    for precision in precisions:
        (engine,) = lane_engines([single], [clients], "cuda", precision)
        errors.append(float(np.abs(step_of(engine, start) - truth).max() / np.abs(truth).max()))
        engine.close()
    return errors


def jumps_of_a_step(name: str, draws: int = 10) -> list[float]:
    """Return the same error for the float64 loop itself, from models changed randomly by `MOVED`."""
    double = step_federation(name, 0.0, "float64")[0]
    start = step_federation(name, 0.0, "float32")[0].initial_model(0).astype("float64")
    truth, generator = step_of(double, start), np.random.default_rng(0)
    jumps = []
    for _ in range(draws):
        moved = start * (1.0 + MOVED * generator.standard_normal(start.shape))
        jumps.append(float(np.abs(step_of(double, moved) - truth).max() / np.abs(truth).max()))
    return jumps


def linear_rounds_a_second(count: int, samples: int, rounds: int) -> float:
    """Return rounds per second for data like MNIST: everyone takes part, float64, K = 10, with tracking."""
    clients = random_clients(count, samples, (784,), 10, "float64")
    federation = SimulatedFederation(clients, LinearModel("softmax", 784, 10), LocalTraining(0.001, 10))
    engines = lane_engines([federation], [clients], "cuda")
    together(engines, lambda engine: take(engine, 120, True))
    seconds = min(together(engines, lambda engine: take(engine, rounds, True)) for _ in range(3))
    engines[0].close()
    return rounds / seconds


def loss_curves(clients: tuple, precision: str, rounds: int) -> float:
    """Return the largest relative difference between the losses of B on the CPU and on the GPU."""

    engines = lane_engines([workload_b(clients, 1)], [clients], "cuda", precision)
    ours = take(engines[0], rounds, False, evaluate_every=5)
    engines[0].close()
    theirs = take(workload_b(clients, 1), rounds, False, evaluate_every=5)
    return float(np.max(np.abs(np.array(ours) / np.array(theirs) - 1.0)))


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this part."""
    parser.add_argument("--data", help="folder with cifar10.npz; random data otherwise")
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    parser.add_argument(
        "--rounds", type=int, default=1200, help="rounds timed at once; a sixth of them for ten slow lanes"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--commit", help="commit to record")


def run(options: argparse.Namespace) -> None:
    """Measure, print, and write the figures."""
    clients = real_clients(options.data) if options.data else random_clients(100, 100, (3, 32, 32), 10, "float32")
    figures: dict[str, float | str] = {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "torch": torch.__version__,
        "date": date.today().isoformat(),
        "commit": options.commit or commit(),
        "repeats": options.repeats,
    }

    def note(name: str, figure: float) -> None:
        figures[name] = figure
        print(name, figure, flush=True)
        if options.out:
            options.out.write_text(json.dumps(figures, indent=1) + "\n")

    cases = [(p, tracked) for p in options.precisions for tracked in ((True, False) if p == "tf32" else (True,))]
    for lanes in (1, 10) if "rounds" in options.parts else ():
        taken = conv_milliseconds(clients, lanes, cases, options.rounds, options.repeats)
        for (precision, tracked), times in zip(cases, taken, strict=True):
            name = f"B, {lanes} lane{'s' if lanes > 1 else ''}, {precision}, tracking {'on' if tracked else 'off'}"
            note(f"{name}: ms a round and lane", min(times))
            note(f"{name}: ms a round and lane, median", float(np.median(times)))
            note(f"{name}: ms a round and lane, slowest repeat", max(times))
    for name, clip in itertools.product(CONV_NETS, (0.0, 0.5)) if "errors" in options.parts else ():
        errors = errors_of_a_step(name, clip, options.precisions)
        for precision, error in zip(options.precisions, errors, strict=True):
            note(f"{name}, clip {clip}, {precision}: largest error of a step, of its largest entry", error)
    for name in CONV_NETS if "kinks" in options.parts else ():
        jumps = jumps_of_a_step(name)
        note(f"{name}, float64 from a model moved by {MOVED:g} of itself: smallest difference of a step", min(jumps))
        note(f"{name}, float64 from a model moved by {MOVED:g} of itself: largest difference of a step", max(jumps))
    for samples in (10, 60) if "linear" in options.parts else ():
        name = f"1,000 clients x {samples}, all, float64, K=10, tracking on: rounds a second"
        note(name, linear_rounds_a_second(1000, samples, options.rounds))
    for precision in options.precisions if "losses" in options.parts else ():
        name = f"B, loss of 60 rounds against the CPU, {precision}: largest relative difference"
        note(name, loss_curves(clients, precision, 60))
