"""Requests: budgets, rollbacks and erasures (docs/store.md, section 4)."""

from __future__ import annotations

import json
import math

from sifu_verifier.auto import check_auto
from sifu_verifier.calibration import charge_of, delta_of, multiplier
from sifu_verifier.canonical import Row
from sifu_verifier.certificates import check_certificates
from sifu_verifier.heads import check_statistics_of_request
from sifu_verifier.levels import level_of, was_left_out
from sifu_verifier.paths import path_to
from sifu_verifier.premises import premises_of
from sifu_verifier.psi import psi_along
from sifu_verifier.run_folder import RunFolder
from sifu_verifier.subjects import first_name_of, indices_of, names_of
from sifu_verifier.tolerances import FLOOR, RELATIVE


def check_requests(run: RunFolder) -> None:
    """Check that every request names clients of the run, and all executed requests in order."""
    known = {client["name"] for client in run.clients.values()}
    for row in run.requests.values():
        run.check(set(json.loads(row["clients"])) <= known, f"request {row['request']} names an unknown client")
    carried = [row for row in run.requests.values() if row["request_order"] is not None]
    carried.sort(key=lambda row: row["request_order"])
    run.agree("orders of the requests", [r["request_order"] for r in carried], list(range(1, len(carried) + 1)))
    spent = dict.fromkeys(run.subjects, 0.0)
    for request in carried:
        if request["status"] in ("refused", "withdrawn"):
            continue  # the request was undone
        if run.check(request["noise_std"] is not None, f"request {request['request']}: its figures are missing"):
            check_request(run, request, spent)


def check_request(run: RunFolder, request: Row, spent: dict[int, float]) -> None:
    """Check a request: its budget, rollback, noise, charges and erasures; `spent` sums the charges of each subject."""
    name, order, sigma, source = (request[k] for k in ("request", "request_order", "noise_std", "source_node"))
    at, moment, noise = f"request {name}", run.rolled[name], run.nodes[request["noise_node"]]
    chains = [indices_of(run, client) for client in json.loads(request["clients"])]
    forgotten = [client for chain in chains for client in chain]
    own = [clients for i, clients in run.subjects.items() if run.owner[i] is request]
    run.agree(f"{at}: subjects", own, chains)
    run.agree(f"{at}: multiplier", request["multiplier"], multiplier(request))
    run.agree(f"{at}: sigma", sigma, float(request["sigma"]) if sigma and request["sigma"] != "auto" else sigma)
    if request["final_node"] is not None and run.spec["model"]["kind"] != "ridge":
        limit = max(noise["position"], run.spec["stop"]["max_rounds"])
        final = run.nodes[request["final_node"]]
        own = [n for n in run.nodes.values() if n["kind"] == "round" and n["branch"] == final["branch"]]
        rounds = final["position"] - sum(n["node"] <= final["node"] and not n["samples"] for n in own)
        run.check(rounds <= limit, f"{at}: {rounds} rounds, where the spec allows {limit}")
    usual_kind = "merge" if request["method"] == "groups" else "noise"
    expected = {
        "kind": "initial" if source is None else usual_kind,
        "parent": source,
        "request_order": order,
        "branch": order,
        "noise_std": sigma,
        "position": 0,
    }
    run.agree(f"{at}: noise node", {key: noise[key] for key in expected}, expected)

    active, available = path_to(run, int(moment["tip"])), sorted(moment["models"])
    charges = {row["subject"]: row for row in run.tables["charges"] if row["noise_node"] == noise["node"]}
    left, hidden, people, highest = {}, {}, {}, 0.0
    for i, clients in run.subjects.items():
        owner, mine = run.owner[i], run.owner[i] is request
        if owner["request_order"] is None or owner["request_order"] > order:
            continue
        budget, psi, covered = 1 / multiplier(owner) ** 2, psi_along(run, active, clients), False
        left[i] = budget - spent[i]
        hidden[i] = {None: 0.0}
        for n in active:
            row = run.nodes[n]
            later = row["request_order"] >= owner["request_order"]
            fresh, noised = row["kind"] == "initial", row["kind"] == "noise" and row["noise_std"] > 0
            covered = covered or (later and (fresh or noised))
            hidden[i][n] = 0.0 if covered else psi[n]
        here = hidden[i][source]
        if mine or here > 0:
            highest = max(highest, *(psi[n] for n in path_to(run, source)), 0.0)
            charge = charge_of(here, sigma)
            row, pair = charges.get(i, {"psi": "nan", "charge": math.nan}), [here, charge]
            run.agree(f"{at}: psi and charge of subject {i}", [float(row["psi"]), row["charge"]], pair)
            run.check(charge <= left[i] * (1 + RELATIVE), f"{at}: subject {i} owes {charge} of {left[i]}")
            spent[i] += charge
            names = list(dict.fromkeys(first_name_of(run, run.clients[c]["name"]) for c in clients))
            text = "inf" if math.isinf(here) else here
            people[i] = {"clients": names, "psi": text, "charge": charge, "budget": budget}
    run.agree(f"{at}: subjects charged", sorted(charges), sorted(people))
    check_statistics_of_request(run, request)
    untouched = source is None or not (any(h[source] for h in hidden.values())
                                       or was_left_out(run, request, names_of(run, request)))  # fmt: skip
    if request["method"] != "sifu":
        fresh = request["method"] in ("scratch", "closed_form") or noise["kind"] == "initial"
        start = None if fresh else active[0] if noise["kind"] == "merge" else active[-1]
        run.agree(f"{at}: where it starts", [source, request["wanted_node"]], [start, start])
    if request["method"] in ("scratch", "closed_form", "groups"):
        run.agree(f"{at}: no noise", sigma, 0.0)

    def fits(node: int, slack: float) -> bool:
        return all(charge_of(h[node], sigma) <= left[i] * slack for i, h in hidden.items() if h[node])

    for key, among in (("source_node", [n for n in active if n in available]), ("wanted_node", active)):
        chosen = request[key]
        there = request["method"] != "sifu" or run.check(chosen in among, f"{at}: {key} {chosen} is not to be had")
        if request["method"] == "sifu" and sigma and there:
            run.check(fits(chosen, 1 + RELATIVE), f"{at}: {key} {chosen} exceeds a budget")
            later = [n for n in among if n > chosen and fits(n, 1 - RELATIVE)]
            run.check(not later, f"{at}: {key} is {chosen}, but {later} fit too")
    strict = request["retention"] == "strict"
    held = {n for i, h in hidden.items() for n in h if strict and run.owner[i] is request and h[n] > 0}
    hit = {n for n, row in run.groups.items() if set(forgotten) & set(row["members"])}
    groups = run.spec.get("groups", {"count": 0})
    fresh = {0} if groups["count"] else set()
    erased = [n for n in available if n in hit or (n not in run.groups and n not in fresh
              and (source is None or n > source or n in held))]  # fmt: skip
    remaining = [n for n in available if n not in erased]
    run.agree(f"{at}: models erased", sorted(moment["payload"].get("dropped_models", [])), erased)
    run.agree(f"{at}: models that remain", sorted(moment["payload"]["remaining_models"]), remaining)
    if name in run.done:
        level = level_of(run, request, highest, untouched)
        run.agree(f"{at}: level", request["level"], level)
        check_auto(run, request, level)
        premises = premises_of(run, request, highest)
        most = max(delta_of(multiplier(request), request["epsilon"]), FLOOR)
        mine = [charge_of(float(p["psi"]), sigma) for i, p in people.items() if run.owner[i] is request]
        spent_now = max(mine)
        reached = max(delta_of(1 / math.sqrt(spent_now), request["epsilon"]), FLOOR) if spent_now else 0.0
        body = {
            "untouched": untouched,
            "delta_at_most": 0.0 if untouched else most,
            "delta_reached": reached,
            "erased_nodes": erased,
            "remaining_nodes": remaining,
            "solve": solve_of(run, request),
            "psi": max((p["psi"] for i, p in people.items() if run.owner[i] is request), key=float),
        }
        body |= {key: [p for i, p in sorted(people.items()) if (run.owner[i] is request) == (key == "subjects")]
                 for key in ("subjects", "earlier_subjects")}  # fmt: skip
        check_certificates(run, request, body, premises)


def solve_of(run: RunFolder, request: Row) -> Row | None:
    """Return the fields of an auditor's copy that describe a closed-form head, or None for other methods."""
    if request["method"] != "closed_form":
        return None
    return {key: run.solves[request["final_node"]][key] for key in ("sum", "samples")}
