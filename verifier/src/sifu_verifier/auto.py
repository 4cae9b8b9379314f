"""The choice of a method by `auto` (docs/store.md, section 4)."""

from __future__ import annotations

import math

from sifu_verifier.canonical import Row
from sifu_verifier.restores import restored_before
from sifu_verifier.run_folder import RunFolder


def check_auto(run: RunFolder, request: Row, level: str) -> None:
    """Check that a request used the requested method or, for `auto`, the method that the rule chooses (section 4)."""
    at, auto = f"request {request['request']}", run.rolled[request["request"]]["payload"].get("auto")
    strength = ("none", "conditional", "proven", "exact").index
    restored = bool(restored_before(run, request))
    least = request["asked_level"] or "none"
    run.check(restored or strength(level) >= strength(least), f"{at}: {level} is below the {least} asked for")
    if request["asked_method"] != "auto":
        run.agree(f"{at}: method", [request["method"], auto], [request["asked_method"], None])
        return
    if not run.check(auto, f"{at}: what auto chose from is not recorded"):
        return
    order = ("closed_form", "groups", "sifu", "scratch")
    places = {way["method"]: order.index(way["method"]) if way["method"] in order else 6 for way in auto["ways"]}
    run.check(strength(auto["least_level"]) >= strength(least), f"{at}: auto chose below {least}")
    if run.spec.get("requests", {}).get("approval", "none") != "none":
        approved = request["asked_level"] or "conditional"
        run.agree(f"{at}: level approved", auto["least_level"], approved)
    enough = [way for way in auto["ways"] if strength(way["level"]) >= strength(auto["least_level"])]
    costs = [(math.inf if way["rounds"] is None else way["rounds"], -strength(way["level"]), places[way["method"]],
              way["method"], way["level"]) for way in enough]  # fmt: skip
    exact = min((cost for cost in costs if cost[4] == "exact"), key=lambda cost: cost[2], default=None)
    other = min((cost for cost in costs if cost[4] != "exact"), default=None)
    chosen = exact if exact and (other is None or exact[0] <= 2 * other[0]) else other
    taken = chosen[3:] if chosen else (None, None)
    run.agree(
        f"{at}: the method that auto chooses", [request["method"], level if not restored else taken[1]], list(taken)
    )
