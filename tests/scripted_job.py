"""Job of fault and kill tests: train, forget and, if configured, join, rebuild, purge, back up, notify a witness."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import sifu
from run_tools import SameNoise, query
from secret_draws import fix_groups
from sifu.api import verify_run
from sifu.core.spec import Spec
from sifu.run.clients_and_engine import clients_from_spec
from sifu.store.kept_heads import WITNESSES

Step = Callable[[Path, "sifu.Run | None"], sifu.Run]
"""One command of a job: the folder, and the run if an earlier step of this process opened it."""


def work(folder: Path, job: dict[str, Any], begin: int = 0, end: int | None = None) -> None:
    """Execute some or all steps of the job; after a fault they continue."""
    os.environ.pop(WITNESSES, None)
    os.environ.update({WITNESSES: str(kept_by_witness(folder))} if job.get("witness") else {})
    sifu.allow_code(*job.get("allow", []))
    fix_groups(pytest.MonkeyPatch())
    run = None
    for step in steps_of(job)[begin:end]:
        run = step(folder, run)


def steps_of(job: dict[str, Any]) -> list[Step]:
    """Return the commands of a job in their order."""
    steps: list[Step] = [_training_without_the_last(job), _joining(job)] if job.get("joining") else [_training(job)]
    steps += [_forgetting(job, request) for request in job["requests"]]
    if job.get("rebuild"):
        steps.append(_on(job, lambda run: run.update()))
    if job.get("purge", True):
        steps.append(_on(job, _purge_once))
    if job.get("backup"):
        steps.append(_on(job, _back_up_once))
    return steps


def _training(job: dict[str, Any]) -> Step:
    return lambda folder, run: sifu.train(job["spec"], run=folder, noise=SameNoise())


def _everybody(job: dict[str, Any]) -> list[Any]:
    return list(clients_from_spec(Spec.from_mapping(job["spec"])))


def _training_without_the_last(job: dict[str, Any]) -> Step:
    def step(folder: Path, run: sifu.Run | None) -> sifu.Run:
        clients = _everybody(job)
        spec = {section: values for section, values in job["spec"].items() if section != "data"}
        if not (folder / "run.db").exists() or sifu.open_run(folder, clients=clients).status().phase == "training":
            sifu.train(spec, run=folder, clients=clients[: -job["joining"]], noise=SameNoise())
        return sifu.open_run(folder, clients=clients, noise=SameNoise())

    return step


def _joining(job: dict[str, Any]) -> Step:
    def join(run: sifu.Run) -> None:
        if run.status().phase == "ready":  # otherwise a request is running, and all clients joined before it
            run.join()

    return _on(job, join)


def _forgetting(job: dict[str, Any], request: dict[str, Any]) -> Step:
    usual = "closed_form" if job["spec"].get("model", {}).get("kind") == "ridge" else "sifu"
    terms = {"method": usual} | request["terms"]
    return _on(job, lambda run: run.forget(request["clients"], request["id"], level="none", **terms))


def _purge_once(run: sifu.Run) -> None:
    unfinished = (run.folder / "scrub").exists()  # an operator runs an interrupted purge again
    if unfinished or not query(run.folder, "SELECT 1 FROM events WHERE kind = 'purged'"):
        run.purge()


def _back_up_once(run: sifu.Run) -> None:
    if not backup_of(run.folder).exists():
        run.backup(backup_of(run.folder))


def _on(job: dict[str, Any], command: Callable[[sifu.Run], object]) -> Step:
    """Return the step of a command on a run; the step opens the run if no earlier one did."""

    def step(folder: Path, run: sifu.Run | None) -> sifu.Run:
        if run is None:
            clients = _everybody(job) if job.get("joining") else None
            run = sifu.open_run(folder, clients=clients, noise=SameNoise())
        command(run)
        return run

    return step


def kept_by_witness(folder: Path) -> Path:
    """Return the file that the witness of a run keeps."""
    return folder.with_name(f"{folder.name}.witness")


def backup_of(folder: Path) -> Path:
    """Return the path of the run's backup."""
    return folder.with_name(f"{folder.name}.zip")


def witnesses_of(folder: Path) -> list[Path]:
    """Return the witness's file in a list, or an empty list if there is none."""
    return [kept_by_witness(folder)] if kept_by_witness(folder).exists() else []


def problems_of(folder: Path) -> list[str]:
    """Return the problems that verification finds in a run, with its witness."""
    os.environ.pop(WITNESSES, None)  # set by the previous run
    return list(verify_run(folder, heads=witnesses_of(folder)).problems)


def problems_outside(folder: Path) -> list[str]:
    """Return the problems of a finished run, against its witness, and of the files next to it."""
    return problems_of(folder) + [f"{path.name} was left next to the run" for path in folder.parent.glob(".tmp-*")]
