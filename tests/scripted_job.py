"""The job of fault and kill tests: train, forget and, as it says, join, rebuild, purge, back up, be witnessed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import sifu
from run_tools import query
from sifu.api import verify_run
from sifu.core.spec import Spec
from sifu.launch.federation import clients_from_spec
from sifu.store import timestamps, witnesses
from timestamp_authority import make_authority, stamp

AUTHORITY = "authority"
"""The folder of the timestamp authority, beside the runs."""
NOWHERE = "http://127.0.0.1:9/"
"""An address that nobody is asked at: the authority is called directly."""


def prepare(base: Path, job: dict[str, Any]) -> None:
    """Make what the runs in a folder share."""
    if job.get("timestamps"):
        (base / AUTHORITY).mkdir()
        make_authority(base / AUTHORITY)
        timestamps.ask_authority = lambda address, content: stamp(base / AUTHORITY, content)


def work(folder: Path, job: dict[str, Any]) -> None:
    """The whole job; run again after a fault it goes on."""
    if job.get("witness"):
        os.environ[witnesses.WITNESSES] = f"file:{kept_by_witness(folder)}"
    if job.get("timestamps"):
        os.environ[timestamps.AUTHORITY] = NOWHERE
    run = train_and_join(folder, job) if job.get("joining") else sifu.train(job["spec"], run=folder)
    usual = "closed_form" if job["spec"].get("model", {}).get("kind") == "ridge" else "sifu"
    for request in job["requests"]:
        run.forget(request["clients"], request["id"], min_level="none", **{"method": usual} | request["terms"])
    if job.get("rebuild"):
        run.rebuild()
    if job.get("purge", True) and not query(folder, "SELECT 1 FROM events WHERE kind = 'purged'"):
        run.purge()
    if job.get("backup") and not backup_of(folder).exists():
        run.backup(backup_of(folder))
    if job.get("timestamps"):
        run.timestamp()


def train_and_join(folder: Path, job: dict[str, Any]) -> sifu.Run:
    """Train without the last clients, and let them join."""
    clients = list(clients_from_spec(Spec.from_mapping(job["spec"])))
    spec = {section: values for section, values in job["spec"].items() if section != "data"}
    if not (folder / "run.db").exists() or sifu.open_run(folder, clients=clients).status().phase == "training":
        sifu.train(spec, run=folder, clients=clients[: -job["joining"]])
    run = sifu.open_run(folder, clients=clients)
    if run.status().phase == "ready":  # otherwise a request is being carried out, and everybody joined before it
        run.join()
    return run


def kept_by_witness(folder: Path) -> Path:
    """The file that the witness of a run keeps."""
    return folder.with_name(f"{folder.name}.witness")


def backup_of(folder: Path) -> Path:
    """Where the run's backup lies."""
    return folder.with_name(f"{folder.name}.zip")


def witnesses_of(folder: Path) -> list[Path]:
    """The witness's file, if there is one."""
    return [kept_by_witness(folder)] if kept_by_witness(folder).exists() else []


def problems_outside(folder: Path) -> list[str]:
    """What is wrong with a finished run, held against its witness and its timestamps, and with what lies beside it."""
    roots = folder.parent / AUTHORITY / "root.pem"
    result = verify_run(folder, witnesses=witnesses_of(folder), authority=roots if roots.exists() else None)
    problems = list(result.problems)
    if roots.exists():
        done = {f"{request}.public.json.tsr" for (request,) in query(folder, "SELECT request FROM requests")}
        there = {path.name for path in (folder / "timestamps").iterdir()}
        problems += [f"{name} is missing" for name in sorted(done - there)]
    return problems + [f"{path.name} was left beside the run" for path in folder.parent.glob(".tmp-*")]
