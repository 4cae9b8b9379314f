"""Local learning rates, and the clients that determined an automatic rate (docs/store.md, sections 2 and 4)."""

from __future__ import annotations

import json
import math
from typing import Any

from sifu_verifier.canonical import Row
from sifu_verifier.regularity import momentum_limit
from sifu_verifier.run_folder import RunFolder
from sifu_verifier.subjects import founding_clients, names_gone, there_since
from sifu_verifier.tolerances import RELATIVE


def rate_since(run: RunFolder, node: int) -> int:
    """Return the fresh node at which the local rate of `node` came into use (section 2)."""
    return max((first for first in run.rates if first <= node), default=0)


def largest_rates(run: RunFolder, clients: Any) -> dict[str, float]:
    """Return the largest certified rate of each of these clients, by name.

    An x_max that is an eigenvalue (more than one step with momentum) is rounded down (section 4).
    """

    def limit(steps: int) -> float:
        rounded_down = 1 + RELATIVE if run.facts["momentum"] and steps > 1 else 1.0
        return momentum_limit(steps, run.facts["momentum"]) / rounded_down

    rows = [run.clients[client] for client in clients]
    return {
        row["name"]: limit(row["local_steps"]) / row["smoothness"] if row["smoothness"] else math.inf for row in rows
    }


def set_the_rate(run: RunFolder, request: Row) -> Any:
    """Return the clients that determined the local rate used after the request."""
    since = rate_since(run, request["noise_node"])
    began = [row for row in run.requests.values() if since and row["noise_node"] == since]
    return there_since(run, began[0]) if began else founding_clients(run)


def is_recomputed(run: RunFolder, request: Row) -> bool:
    """Return whether the request recomputed an automatic local rate (section 4)."""
    unknown = any(row["smoothness"] is None or (row["curvature"] or 0) < 0 for row in run.clients.values())
    begins_afresh = request["method"] == "scratch" and not json.loads(request["records"])
    ours = run.facts.get("engine", "") == "the data of its participants"
    if not begins_afresh or not ours or run.spec["groups"]["count"] or unknown:
        return False
    eta = run.rates.get(rate_since(run, request["noise_node"]), run.facts["local_rate"])
    if json.loads(run.entries["asked"])["local"]["rate"] != "auto":
        return False
    recomputed = automatic_rate(run, set_the_rate(run, request))
    return abs((1.0 if math.isinf(recomputed) else recomputed) / eta - 1) <= 2 * RELATIVE


def automatic_rate(run: RunFolder, clients: Any) -> float:
    """Return the automatic local rate of these clients (section 4)."""
    largest = min(largest_rates(run, clients).values())
    return (0.5 if run.spec["model"]["kind"] == "least_squares" else 1.0) * largest


def check_rates(run: RunFolder, request: Row) -> None:
    """Check that a recomputed automatic rate is that of the remaining clients (section 4)."""
    moment, node = run.rolled[request["request"]], request["noise_node"]
    said, at = moment["payload"].get("local_rates"), f"request {request['request']}: local rates"
    if not is_recomputed(run, request):
        run.agree(at, (said, node in run.rates), (None, False))
        return
    recomputed = automatic_rate(run, there_since(run, request))
    rate = 1.0 if math.isinf(recomputed) else recomputed
    earlier = {str(first): value for first, value in run.rates.items() if first < node}
    run.agree(at, said, earlier | {str(node): rate})


def rate_depends(run: RunFolder, request: Row) -> bool:
    """Return whether the request's clients set the automatic local rate, or labels set the number of outputs."""
    if run.facts["shape_from_labels"] or request["method"] == "closed_form":
        return bool(run.facts["shape_from_labels"])
    if any(row["smoothness"] is None or (row["curvature"] or 0) < 0 for row in run.clients.values()):
        return False
    if is_recomputed(run, request):
        return False
    names, since = names_gone(run, request), rate_since(run, request["noise_node"])
    rates = largest_rates(run, set_the_rate(run, request))
    largest, eta = min(rates.values()), run.rates.get(since, run.facts["local_rate"])
    halved = run.spec["model"]["kind"] in ("least_squares", "python")
    copied = any(abs(eta / (share * largest) - 1) <= 0.01 for share in ((1.0, 0.5) if halved else (1.0,)))
    if json.loads(run.entries["asked"])["local"]["rate"] != "auto" and not copied:
        return False
    return largest != min(rate for name, rate in rates.items() if name not in names)
