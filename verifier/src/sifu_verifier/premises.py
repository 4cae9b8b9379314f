"""The premises that a certificate must list, in their order (docs/store.md, section 7)."""

from __future__ import annotations

from sifu_verifier.canonical import Row
from sifu_verifier.groups import STRETCH
from sifu_verifier.levels import COUPLES, from_initial, was_left_out
from sifu_verifier.releases import noise_of
from sifu_verifier.restores import restored_before
from sifu_verifier.run_folder import RunFolder

PROVENANCE = {
    "fixed constants": "met",
    "declared fixed by the operator": "trusted",
    "drawn from the seed": "met",
    "made by the operator's program": "trusted",
}
IDENTITY = {
    "node keys": ("trusted", "trusted"),
    "authenticated by the operator's program": ("trusted", "operator"),
    "claimed names": ("assumed", "claimed"),
}
ENGINE = {
    "its participants, computed on a GPU": ("layout", "assumed", "assumed"),
    "its participants, on a GPU that repeated their bits": ("deterministic device", "trusted", "trusted"),
    "what nodes of their own send": ("engine", "trusted", "trusted"),
}


def premise(name: str, status: str, case: str = "", **values: object) -> Row:
    """Return a premise without the auditor's confidential figures; by default, the case equals the status."""
    return {"name": name, "status": status, "case": case or status, "values": values}


def premises_of(run: RunFolder, request: Row, highest: float) -> list[Row]:
    """Return the premises of a request's certificates.

    Args:
        run: Run folder to verify.
        request: Row of the request.
        highest: Largest Psi of a hidden subject on the path to the source.
    """
    method, before, record = request["method"], _before_training(run, request), _record(run, request)
    if method == "closed_form":
        masked = "masked" if any(what.startswith("masked statistics") for what in run.facts["outside"]) else ""
        noise = [_source(run.noise_source)] if noise_of(run) else []
        found = [*record, *before, premise("statistics", "trusted", masked), *noise]
    elif method == "groups":
        found = [*record, *_groups(run), *before]
    elif method == "scratch" or from_initial(run, request):
        found = [*record, *before]
    else:
        found = [*_by_noise(run, request), *record, _arithmetic(run, highest)]
        found += [_source(run.noise_source), *before, premise("honest reports", "trusted")]
    return found


def _before_training(run: RunFolder, request: Row) -> list[Row]:
    """Return the premises about everything before the first round."""
    facts, solved = run.facts, request["method"] == "closed_form"
    found = [] if solved else [premise("initial model", PROVENANCE.get(facts["initial"], "assumed"))]
    found.append(premise("preprocessing", PROVENANCE.get(facts["preprocessing"], "assumed")))
    if facts.get("features"):
        found.append(premise("features", "trusted" if facts.get("features_declared") else "met"))
    if facts["module"]:
        found.append(_module(facts["module"]))
    found.append(_hyper_parameters(run, request))
    if facts["identity"] != "in process":
        found.append(premise("identity", *IDENTITY.get(facts["identity"], ("assumed", "unknown"))))
    if facts.get("engine") != "the data of its participants":
        engine = premise(*ENGINE.get(facts.get("engine", ""), ("engine", "assumed", "assumed")))
        found += [] if solved and (engine["name"], engine["status"]) == ("engine", "trusted") else [engine]
    return found


def _module(module: str) -> Row:
    """Return the premise on modules of the operator (section 2, `facts`)."""
    named = module.removeprefix("declared: ")
    if named != module:
        return premise("module", "trusted", functions=named)
    return premise("module", "met" if module == "known" else "assumed")


def _hyper_parameters(run: RunFolder, request: Row) -> Row:
    if run.facts["shape_from_labels"]:
        return premise("hyper-parameters", "assumed", "labels")
    if request["method"] == "closed_form":
        return premise("hyper-parameters", "met", "fixed")
    if run.spec["local"]["rate"] == "auto":
        return premise("hyper-parameters", "met", "own")
    return premise("hyper-parameters", "trusted", "given")


def _record(run: RunFolder, request: Row) -> list[Row]:
    """Return the premises on restored records and on events without a signature."""
    seq = run.done[request["request"]]["seq"]
    unsigned = any(event["signature"] is None and event["seq"] < seq for event in run.tables["events"])
    status = "trusted" if request["method"] == "groups" else "assumed"
    found = [premise("record", status)] if restored_before(run, request) else []
    return found + ([premise("signatures", "trusted")] if unsigned else [])


def _groups(run: RunFolder) -> list[Row]:
    """Return the premises on groups that trained separately."""
    groups = run.spec["groups"]
    grouping = premise("grouping", "met", count=groups["count"])
    return [grouping, premise("rounds apart", "met", "moved on", rounds=groups["rounds"], stretch=STRETCH)]


def _path(run: RunFolder, request: Row) -> tuple[Row, list[Row], list[Row]]:
    """Return the premises on the counterfactual, on items of `facts.outside`, and on refused replies."""
    status = "met" if run.facts["identity"] == "in process" else "trusted"
    counterfactual = premise("counterfactual", "assumed" if run.facts["participation"].startswith("fixed") else status)
    outside = [
        premise("schedule" if what.startswith(COUPLES) else "outside the theory", "assumed", what=what)
        for what in run.facts["outside"]
    ]
    return counterfactual, outside, [premise("replies", "assumed")] if was_left_out(run, request) else []


def _by_noise(run: RunFolder, request: Row) -> list[Row]:
    """Return the premises on the bound Psi."""
    counterfactual, outside, replies = _path(run, request)
    return [_regularity(run, request), *outside, counterfactual, *replies]


def _regularity(run: RunFolder, request: Row) -> Row:
    if run.spec["regularity"]["kind"] == "assumed":
        return premise("regularity", "assumed", factor=run.spec["regularity"]["factor"])
    if not run.facts["smooth_model"]:
        return premise("regularity", "assumed", "not smooth")
    factors = [run.regular[c] for c in range(run.rolled[request["request"]]["clients"])]
    return premise("regularity", "met", "strongly convex" if max(factors) < 1 else "convex")


def _arithmetic(run: RunFolder, highest: float) -> Row:
    if highest > 1000:
        return premise("arithmetic", "assumed", "beyond")
    bounded = run.facts["dtype"] == "float64" and run.facts["rounding_bounded"]
    return premise("arithmetic", "met") if bounded else premise("arithmetic", "assumed", dtype=run.facts["dtype"])


def _source(noise: str) -> Row:
    if noise == "system":
        return premise("noise", "trusted")
    return premise("noise", "failed", "given" if noise == "given" else "")
