"""Where a run stands: clients, rounds, Psi, kept models, requests."""

from __future__ import annotations

import datetime
import math
from dataclasses import asdict
from typing import Any

import numpy as np

from sifu.core.ledger import finite_or_text
from sifu.core.request_terms import RequestTerms
from sifu.methods.registry import METHODS, method_named
from sifu.planning.budgets import budget_lines, outlook_now
from sifu.record.run_view import ACTIVE, RunView
from sifu.requests.cost import cost_of
from sifu.requests.request_record import deadline_of, is_overdue
from sifu.store.inbox import letters
from sifu.store.reader import RunReader

MOST_TOLD = 10
"""Refusals and incidents that are shown; the ledger has them all."""


def status_of(view: RunView) -> dict[str, Any]:
    """Everything `sifu status` shows, as plain values."""
    reader, now = view.reader, datetime.datetime.now(datetime.UTC)
    privacy = view.spec.privacy
    terms = RequestTerms(("any",), privacy.epsilon, privacy.delta, calibration=privacy.calibration)
    multiplier = terms.multiplier
    psi = view.tracker().total(np.arange(len(view.clients))).tolist()
    evaluations = [row for row in reader.evaluations() if row.subset == ACTIVE]
    accuracy = next((row.accuracy for row in evaluations if row.node == reader.tip), None)
    edges = [view.path.nodes[depth].noise_std for depth, _ in view.path.noise_depths]
    sigma = privacy.sigma if privacy.sigma != "auto" else next((one for one in reversed(edges) if one > 0.0), None)
    models, updates = reader.models(), reader.updates()
    by_depth = view.path.depth_of
    measured = view.regularities.measured
    # Budgets as they are: an endless noise would cost nobody anything.
    budgets = budget_lines(view, view.exposures(view.earlier_subjects()), view.path.tip, math.inf)
    ahead = outlook_now(view, terms)
    return {
        "run": str(reader.folder),
        "phase": reader.phase,
        "rounds": sum(1 for node in view.path.nodes if node.kind == "round"),
        "rounds_run": sum(1 for row in reader.node_rows() if row.node.kind == "round"),
        "branch": view.path.nodes[-1].branch,
        "accuracy": accuracy,
        "target": view.spec.stop.target,
        "parameters": reader.layout.size,
        "regularity": measured.kind,
        "local_rate": measured.local_rate,
        "largest_certified_rate": measured.largest_certified_rate,
        "epsilon": privacy.epsilon,
        "delta": privacy.delta,
        "sigma": sigma,
        "psi_star": sigma / multiplier if sigma else None,
        "clients": [
            {
                "name": one.name,
                "samples": one.samples,
                "state": "forgotten" if k in view.forgotten else "waiting" if k in view.waiting else "active",
                "psi": finite_or_text(psi[k]),
                "sigma_needed_now": finite_or_text(psi[k] * multiplier),
            }
            for k, one in enumerate(view.clients)
        ],
        "bytes_kept": {name: method_named(name).bytes_kept(view) for name in METHODS},
        "models": [
            {"node": node, "depth": by_depth.get(node), "kept": row.kept, "bytes": row.bytes}
            for node, row in models.items()
        ],
        "updates": {
            "files": len(updates),
            "bytes": sum(row.bytes for row in updates.values()),
        },
        "budgets": [
            {"clients": list(one.names), "budget": one.budget, "used": one.used, "left": one.left} for one in budgets
        ],
        "outlook": asdict(ahead) if ahead else None,
        "inbox": [{"kind": one.kind, "id": one.id, "trouble": one.trouble} for one in letters(reader.folder)],
        "refused": _refusals(reader),
        "incidents": _incidents(reader),
        "rejections": [asdict(one) for one in reader.rejections()],
        "requests": [
            {
                "request": one.request,
                "status": one.status,
                "clients": list(one.clients),
                "method": one.method,
                "epsilon": one.epsilon,
                "delta": one.delta,
                "sigma": one.noise_std if one.noise_std is not None else one.sigma,
                "level": one.level,
                "received": one.received,
                "deadline": deadline_of(one).strftime("%Y-%m-%dT%H:%M:%SZ"),
                "overdue": is_overdue(one, now),
                "finished": one.finished,
                "cost": asdict(cost_of(reader, one)) if one.status == "done" else None,
            }
            for one in view.requests
        ],
    }


def _refusals(reader: RunReader) -> list[dict[str, str]]:
    """The latest letters and newcomers that were refused, each with the reason."""
    found = reader.latest_events(("letter refused", "client refused"), MOST_TOLD)
    return [
        {
            "time": time,
            "what": f"{one['kind']} {one['letter']}" if kind == "letter refused" else f"client {one['client']}",
            "reason": str(one["reason"]),
        }
        for time, kind, one in found
    ]


def _incidents(reader: RunReader) -> list[dict[str, Any]]:
    """What went otherwise than asked in the latest rounds on Flower."""
    found = reader.latest_events(("incidents",), MOST_TOLD)
    return [{"time": time} | one for time, _, event in found for one in event["incidents"]][-MOST_TOLD:]
