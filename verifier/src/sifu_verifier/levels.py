"""The level that a request may claim (docs/store.md, section 4)."""

from __future__ import annotations

from sifu_verifier.canonical import Row
from sifu_verifier.paths import path_to
from sifu_verifier.restores import restored_before
from sifu_verifier.run_folder import RunFolder

COUPLES = ("a minimum of", "dropping a masked round in which one client fails", "closing a round before")
"""Prefixes of the items of `facts.outside` by which one client can influence which rounds or replies are used."""


def level_of(run: RunFolder, request: Row, highest: float, untouched: bool) -> str:
    """Return the highest level that a request may claim (section 4).

    Args:
        run: Run folder to verify.
        request: Row of the request.
        highest: Largest Psi of a hidden subject on the path to the source.
        untouched: True if its clients never influenced the source model.
    """
    facts = run.facts
    fresh = request["source_node"] is None or request["method"] == "groups" or from_initial(run, request)
    before = (facts["preprocessing"] not in ("fixed constants", "declared fixed by the operator"),
              request["method"] != "closed_form"
              and facts["initial"] not in ("drawn from the seed", "made by the operator's program"),
              facts["identity"] not in ("in process", "node keys", "authenticated by the operator's program"),
              facts["shape_from_labels"], facts["module"] == "not declared",
              facts.get("engine", "not known") == "not known")  # fmt: skip
    rounds = (facts["participation"].startswith("fixed"), was_left_out(run, request), restored_before(run, request),
              any(what.startswith(COUPLES) for what in facts["outside"]))  # fmt: skip
    if untouched:
        engine = facts.get("engine", "")
        bits = "computed on a GPU" in engine
        return "conditional" if any((*before, bits, not fresh and any(rounds))) else "exact"
    if run.noise_source != "system":
        return "none"
    doubts = (run.spec["regularity"]["kind"] == "assumed", not facts["smooth_model"], bool(facts["outside"]),
              facts["dtype"] != "float64", not facts["rounding_bounded"], highest > 1000)  # fmt: skip
    return "conditional" if any((*before, *rounds, *doubts)) else "proven"


def from_initial(run: RunFolder, request: Row) -> bool:
    """Return whether training resumed without noise from the initial, fresh model."""
    node = run.nodes.get(request["source_node"], {})
    plain = request["noise_std"] == 0 and request["method"] == "sifu"
    return plain and node.get("kind") == "initial"


def was_left_out(run: RunFolder, request: Row, names: list[str] | None = None) -> bool:
    """Return whether a round on the path to the source ignored a reply, by default of any client (section 1a)."""
    rounds = {(run.nodes[n]["branch"], run.nodes[n]["position"] - 1) for n in path_to(run, request["source_node"])
              if run.nodes[n]["kind"] == "round"}  # fmt: skip
    return any(row["left_out"] and (row["branch"], row["round"]) in rounds
               and (names is None or row["client"] in names) for row in run.tables["rejections"])  # fmt: skip
