"""Sealed parts of events, and the figures that a purge erased (docs/store.md, section 6d)."""

from __future__ import annotations

import math

from sifu_verifier.canonical import Row, canonical, parsed, sha256
from sifu_verifier.run_folder import RunFolder

SEALED = {"evaluations", "relative_penalty", "auto", "psi_max", "figures_salt", "local_rates",
          "release_distances"}  # fmt: skip


def unsealed(run: RunFolder, event: Row, payload: Row) -> Row:
    """Return the sealed measurements of an event, or {} if a purge erased them with their salt (section 6d)."""
    at, part, gone = f"event {event['seq']}", run.sealed.get(event["seq"]), is_erased(run, event)
    run.check(not SEALED & payload.keys(), f"{at}: what it measured lies in the open")
    run.agree(f"{at}: sealed part", part is not None, "sealed" in payload and not gone)
    if part is None:
        return {}
    run.agree(f"{at}: sealed", payload.get("sealed"), sha256(part["salt"], part["content"].encode()))
    run.agree(f"{at}: length of the salt", len(part["salt"]), 32)
    content = parsed(part["content"])
    run.agree(f"{at}: sealed content", part["content"], canonical(content))
    run.check(content.keys() <= SEALED, f"{at}: other things are sealed than what was measured")
    return {key: content[key] for key in SEALED & content.keys()}


def is_erased(run: RunFolder, event: Row) -> bool:
    """Return whether a purge erased the sealed part of an event (section 6d)."""
    if event["seq"] < run.wish:
        return True
    kinds = [(other["seq"], other["kind"]) for other in run.tables["events"]]
    purges = [seq for seq, kind in kinds if kind == "purged" and seq > event["seq"]]
    rolled = max((s for s, kind in kinds if kind == "rolled back" and purges and s < purges[-1]), default=0)
    later = ("request done", "client joined", "purged")
    if event["kind"] == "released":  # later certificates compose the distances of releases
        return False
    return event["seq"] <= rolled or bool(rolled and event["kind"] in later)


def figures_gone(run: RunFolder, node: int) -> bool:
    """Return whether a purge erased the figures of a round or merge (section 6d)."""
    row, drifts = run.nodes[node], [p["drift"] for p in run.rounds[node].values()]
    return node <= run.erased_up_to and all(map(math.isinf, [row["rounding"], row["mean_shift"], *drifts]))


def kept_path(run: RunFolder, active: list[int]) -> list[int]:
    """Return the path whose figures a purge keeps: the active path if the last request began it (section 6e).

    Otherwise it keeps no figures, and the path is empty.
    """
    orders = [row["request_order"] for node, row in run.nodes.items() if node <= active[-1]]
    return active if run.nodes[active[0]]["request_order"] == max(orders) else []
