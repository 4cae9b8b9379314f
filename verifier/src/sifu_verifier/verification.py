"""All checks of a run folder, in order."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from sifu_verifier.groups import check_groups
from sifu_verifier.heads import check_statistics
from sifu_verifier.ledger import check_ledger
from sifu_verifier.models import check_models
from sifu_verifier.nodes import check_nodes, check_rejections
from sifu_verifier.paths import parents_come_first
from sifu_verifier.purges import check_purges
from sifu_verifier.records import check_records, check_salts
from sifu_verifier.releases import check_releases
from sifu_verifier.requests import check_requests
from sifu_verifier.restores import check_restored
from sifu_verifier.run_folder import RunFolder

CHECKS: tuple[Callable[[RunFolder], None], ...] = (
    check_nodes,
    check_rejections,
    check_models,
    check_groups,
    check_records,
    check_salts,
    check_statistics,
    check_releases,
    check_requests,
    check_purges,
    check_restored,
)
"""Checks that follow the replay of the ledger; each adds its findings to the problems of the run."""


def on_record(folder: Path) -> list[str]:
    """Return the finished requests that rest on the signed record, at least in part.

    A model of them was erased, or a guarantee over all releases needs distances of heads whose statistics were.
    """
    run = RunFolder(Path(folder))
    stored = {row["node"] for row in run.tables["models"]}
    done = [row for row in run.tables["requests"] if row["status"] == "done"]
    sources = {row["request"]: {row["source_node"]} if row["noise_std"] else set() for row in done}
    certificates = ((row["request"], json.loads(row["content"])["body"]) for row in run.tables["certificates"])
    over_all_releases = {request for request, body in certificates if "before_after" in body}
    return [
        row["request"]
        for row in done
        if row["request"] in over_all_releases
        or not {row["noise_node"], row["final_node"]} | sources[row["request"]] <= stored
    ]


def verify(folder: Path) -> list[str]:
    """Return the problems of a run folder, or an empty list if everything agrees.

    A damaged folder never raises an error: a check that fails with an error is reported as a problem.
    """
    if not (Path(folder) / "run.db").is_file():
        return ["it is no folder of a run: it has no run.db"]
    try:
        run = RunFolder(Path(folder))
    except Exception as error:
        return [f"the folder cannot be read: {error!r}"]
    attempt(check_ledger, run)
    if not parents_come_first(run):
        return [*run.problems, "nodes: a parent does not come before its child, so a path may lead in circles"]
    for check in CHECKS:
        attempt(check, run)
    return run.problems


def attempt(check: Callable[[RunFolder], None], run: RunFolder) -> None:
    """Run a check; an unexpected error in it becomes a problem of the run."""
    try:
        check(run)
    except Exception as error:
        run.problems.append(f"{check.__name__} gave up: {error!r}")
