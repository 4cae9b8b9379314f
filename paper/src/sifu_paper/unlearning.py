"""Experiments with requests: train once, let every method answer the same requests, and measure."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass, replace
from pathlib import Path

import numpy as np

from sifu_paper.budgets import largest_psi
from sifu_paper.experiment import SMOKE_CLIENTS, Experiment, Options, parse_variant, variant_text
from sifu_paper.federation import federation_of, requests_of
from sifu_paper.methods import METHODS
from sifu_paper.running import State, Subject, initial_state, run_rounds
from sifu_paper.settings import preset_named, settings_of
from sifu_paper.table import Row, Table
from sifu_paper.training import DivergedError, accuracy_on, test_accuracy, trainer_for

TRAINING = "training"
"""First word of the `method` of rows with the cost of a training; then follows its kind."""
OUTCOME = ("clients", "rounds", "extra_rounds", "depth", "psi", "sigma", "forget_before", "mark_before", "mark_after")
"""Columns of what a request took: rounds of retraining and of calibration, and the model that it went back to."""
SECONDS_BETWEEN_COPIES = 120.0


@dataclass(frozen=True)
class Job:
    """Answers of one method to the requests of an experiment, on one data set and seed."""

    dataset: str
    seed: int
    preset: str
    method: str
    variant: str

    @property
    def training(self) -> tuple[str, str]:
        """Preset and kind of the training that it starts from."""
        return self.preset, METHODS[self.method].training

    def place(self, number: int) -> Row:
        """Return the columns that identify the row of a request."""
        names = ("dataset", "seed", "preset", "method", "variant")
        return {name: getattr(self, name) for name in names} | {"number": number}


def jobs_of(experiment: Experiment, options: Options, dataset: str, seed: int) -> Iterator[Job]:
    """Yield the jobs of a data set and seed.

    Methods to which it makes no difference how influence is counted run under the first preset of each training.
    """
    presets = [preset_named(name) for name in options.presets or experiment.presets]
    for method in options.methods or experiment.methods:
        first: dict[str, str] = {}
        for preset in presets:
            first.setdefault(preset.name if METHODS[method].by_rules else preset.training, preset.name)
        for name in first.values():
            for variant in experiment.variants(options, method):
                yield Job(dataset, seed, name, method, variant_text(variant))


def run_requests(
    experiment: Experiment, options: Options, dataset: str, seed: int, table: Table, say: Callable[[str], None]
) -> None:
    """Do the missing jobs of a data set and seed."""
    jobs = list(jobs_of(experiment, options, dataset, seed))
    for training in dict.fromkeys(job.training for job in jobs):
        missing = [job for job in jobs if job.training == training and not table.has(job.place(experiment.requests))]
        if not missing:
            continue
        state = trained(experiment, options, missing[0], table)
        name = f"{dataset}, seed {seed}, {' '.join(training)}"
        say(f"{name}: trained in {state.training_rounds} rounds")
        if experiment.only_reached and options.scale == "paper" and 1.0 - state.errors < state.settings.target:
            say(f"{name}: below the target, so no requests")
            continue
        for job in missing:
            rounds = []
            for row in answer(experiment, options, job, state.copy()):
                table.add(row)
                rounds.append(str(row["rounds"] + row["extra_rounds"]))
            say(f"{name}: {job.method} {job.variant}: {' + '.join(rounds)} rounds")


def trained(experiment: Experiment, options: Options, job: Job, table: Table) -> State:
    """Return the state after the first training, which goes on from its latest copy on disk."""
    preset, kind = preset_named(job.preset), METHODS[job.method].training
    settings = settings_of(job.dataset, preset.training, options.scale, experiment.settings).limited(options.max_rounds)
    federation = federation_of(settings, job.seed, options.data)
    noise = preset.rules.multiplier(settings.epsilon, settings.delta) if kind == "dp" else 0.0
    trainer = trainer_for(federation, settings, job.seed, options.device, noise, hand_out=kind == "updates")
    state = initial_state(trainer, settings, preset.rules, job.seed, fine=experiment.fine_models)
    path = _scratch_file(options, replace(job, method=kind, variant=""))
    _load(state, path)
    copied = started = time.monotonic()

    def copy_now_and_then(now: State) -> None:
        nonlocal copied
        if time.monotonic() - copied > SECONDS_BETWEEN_COPIES:
            _save(now, path)
            copied = time.monotonic()

    diverged = False
    try:
        run_rounds(state, settings.max_rounds, copy_now_and_then, settings.kept_every if kind == "updates" else 0)
    except DivergedError:
        diverged = True  # requests go on from the last good model
    state.training_rounds, state.errors = state.history.rounds, 1.0 - (state.history.accuracy or 0.0)
    _save(state, path)
    place = job.place(0) | {"method": f"{TRAINING} {kind}", "variant": ""}
    outcome = {"rounds": state.training_rounds}
    table.add(place | measured(state, options, outcome, diverged, time.monotonic() - started))
    return state


def _scratch_file(options: Options, job: Job) -> Path:
    """Return the file from which an interrupted job goes on; a run without failures removes them all."""
    return options.out / "unfinished" / "-".join(str(value) for value in astuple(job) if value)


def _save(state: State, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.new")
    temporary.write_bytes(pickle.dumps((state.history, state.subjects, state.requests)))
    os.replace(temporary, path)


def _load(state: State, path: Path) -> None:
    if path.exists():
        state.history, state.subjects, state.requests = pickle.loads(path.read_bytes())


def answer(experiment: Experiment, options: Options, job: Job, state: State) -> Iterator[Row]:
    """Yield a row for each request. After a retraining that diverged, the requests that follow count as missed."""
    variant, settings = parse_variant(job.variant), state.settings
    clients = SMOKE_CLIENTS if options.scale == "smoke" else experiment.clients
    requests = experiment.requests, clients, experiment.by_class
    chosen = requests_of(state.trainer.federation, settings, *requests, job.seed, int(variant.get("set", 0)))
    if "sigma_factor" in variant:
        state.sigma = settings.sigma * variant["sigma_factor"]
    most = max(1, round(variant["limit"] * state.training_rounds)) if "limit" in variant else settings.max_rounds
    path, diverged = _scratch_file(options, job), False
    _load(state, path)
    for number, asking in enumerate(chosen[state.requests :], start=state.requests + 1):
        started = time.monotonic()
        outcome = {"clients": len(asking), "rounds": most}
        if not diverged:
            try:
                outcome |= forget(state, job.method, asking, number, most)
            except DivergedError:
                diverged = True
        yield job.place(number) | measured(state, options, outcome, diverged, time.monotonic() - started)
        if not diverged:
            _save(state, path)  # its row is on disk
    path.unlink(missing_ok=True)


def forget(state: State, method: str, asking: list[int], number: int, most: int) -> Row:
    """Carry out one request, and return what it took."""
    clients = np.array(asking)
    before = {
        "forget_before": state.trainer.accuracy(state.history.model, clients),
        "mark_before": mark(state, clients),
    }
    state.requests = number
    state.subjects += [Subject(client, number) for client in asking]
    state.history.rounds, state.history.accuracy = 0, None
    extra = METHODS[method].start(state, most)
    history = state.history
    start = {
        "extra_rounds": extra,
        "psi": largest_psi(state, history.depth),
        "sigma": history.noises[-1][1] if history.noises and history.noises[-1][0] == history.depth else 0.0,
        "depth": history.rounds_until(history.depth),
    }
    kept_every = state.settings.kept_every if METHODS[method].training == "updates" else 0
    history.rounds = extra  # they count as rounds of the request
    run_rounds(state, most, kept_every=kept_every)
    after = {"rounds": history.rounds - extra, "mark_after": mark(state, clients)}
    return before | start | after


def measured(state: State, options: Options, outcome: Row, diverged: bool, seconds: float) -> Row:
    """Return the columns of a row after its place: the outcome of a request, and what the model knows now."""
    model, settings, trainer = state.history.model, state.settings, state.trainer
    retain = None if diverged else trainer.accuracy(model, state.active)
    forgotten = trainer.accuracy(model, state.forgotten) if state.subjects and not diverged else None
    return (
        dict.fromkeys(OUTCOME)
        | {"extra_rounds": 0}
        | outcome
        | {
            "training_rounds": state.training_rounds,
            "target": settings.target,
            "reached": retain is not None and retain >= settings.target,
            "retain": retain,
            "forgotten": forgotten,
            "test": None if diverged else test_accuracy(trainer.federation, model),
            "seconds": round(seconds, 3),
            "device": options.device,
        }
    )


def mark(state: State, clients: np.ndarray) -> float | None:
    """Return the accuracy with the clients' own watermarks minus that with fresh ones; None without watermarks."""
    federation = state.trainer.federation
    if not federation.fresh:
        return None
    x, y = (np.concatenate([rows[client] for client in clients]) for rows in (federation.fresh, federation.y))
    own = state.trainer.accuracy(state.history.model, clients)
    return own - accuracy_on(federation, state.history.model, x, y)
