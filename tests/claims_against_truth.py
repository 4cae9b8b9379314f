"""Comparison of a run's claims with the truth, by repeating the run with and without the forgotten clients.

Nothing here uses sifu's bounds, calibration or replay. The independent verifier reads the record and recomputes Psi;
the engine computes the rounds; the journey (`random_journeys`) supplies the noise; delta comes from the normal
distribution in fifty digits. Both runs share all randomness and differ only in the clients that are missing from one of
them (docs/theory.md, section 2.2).

The data determine which clients are missing, not the record's `subjects`: the comparison knows whose rows each client
number held, and so which rows each model was trained on.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import mpmath
import numpy as np

import sifu
from counterfactual_runs import CounterfactualRuns, Vector, must_not_diverge
from random_journeys import (
    FAMILIES,
    MASKED,
    Journey,
    go_on,
    replayable_noise,
    start_journey,
    witnessed,
)
from sifu.errors import RoundRejectedError, SifuError
from sifu_verifier import verify
from sifu_verifier.paths import path_to
from sifu_verifier.psi import psi_along

LEVELS = ("none", "conditional", "proven", "exact")
BEFORE_TRAINING = {"preprocessing", "features", "hyper-parameters", "method", "identity", "grouping", "rounds apart",
                   "initial model", "noise size", "engine", "layout"}  # fmt: skip
ON_THE_PATH = {"counterfactual", "replies", "schedule", "record"}


@dataclass
class Findings:
    """Counts of comparisons, and every statement that the truth contradicts."""

    psi_scale: float = 1.0
    """Factor applied to Psi and charges before the comparison; a value below 1 is a negative control."""
    runs: int = 0
    requests: int = 0
    refused: int = 0
    by_family: dict[str, int] = field(default_factory=dict)
    by_method: dict[str, int] = field(default_factory=dict)
    by_level: dict[str, int] = field(default_factory=dict)
    by_step: dict[str, int] = field(default_factory=dict)
    by_kind: dict[str, int] = field(default_factory=dict)
    """Requests of each kind that `kinds_of` names."""
    distances: int = 0
    """Pairs of a client (or set of clients) and a node whose distance was compared with a proven Psi."""
    closest: float = 0.0
    """Largest ratio of such a distance to its Psi."""
    assumed_distances: int = 0
    """Pairs whose Psi depends on an assumption (B of a network)."""
    assumed_exceeded: int = 0
    """Number of these pairs whose distance exceeds Psi: the reason why such a level is only conditional."""
    by_counterfactual: dict[str, int] = field(default_factory=dict)
    """Counterfactuals in which an exact model was recomputed: the forgotten clients have other data or counts, or are
    absent.
    """
    exact_models: int = 0
    """Models recomputed bit for bit from data without the forgotten clients."""
    deltas: int = 0
    largest_share_of_delta: float = 0.0
    folders_verified: int = 0
    violations: list[dict[str, Any]] = field(default_factory=list)

    def count(self, table: dict[str, int], key: str, times: int = 1) -> None:
        table[key] = table.get(key, 0) + times

    def add(self, other: Findings) -> None:
        """Add the findings of another journey."""
        for name, value in vars(other).items():
            if name in ("closest", "largest_share_of_delta"):
                setattr(self, name, max(getattr(self, name), value))
            elif name == "violations":
                self.violations += value
            elif isinstance(value, dict):
                for key, times in value.items():
                    self.count(getattr(self, name), key, times)
            elif name != "psi_scale":
                setattr(self, name, getattr(self, name) + value)


def delta_at(ratio: float, epsilon: float) -> float:
    """Return delta of N(0, 1) against N(ratio, 1) at epsilon (Balle and Wang 2018, theorem 8), in fifty digits."""
    if ratio == 0.0:
        return 0.0
    with mpmath.workdps(50):
        m, eps = mpmath.mpf(ratio), mpmath.mpf(epsilon)
        return float(mpmath.ncdf(m / 2 - eps / m) - mpmath.exp(eps) * mpmath.ncdf(-m / 2 - eps / m))


class Truth(CounterfactualRuns):
    """Run folder whose claims are compared with repeated executions of the run."""

    def __init__(self, journey: Journey, findings: Findings) -> None:
        super().__init__(journey)
        self.findings = findings

    def violation(self, kind: str, request: str, what: str) -> None:
        """Record a statement of the run that is not true."""
        row = {"kind": kind, "seed": self.journey.seed, "family": self.journey.family, "request": request, "what": what}
        if row not in self.findings.violations:
            self.findings.violations.append(row)

    # -- exact levels: no bit depends on the forgotten clients ---------------------------------------------------------

    def check_exact(self, executed: Collection[str]) -> None:
        """Check the current model against models made without the clients certified as exact, or with other data of
        theirs.
        """
        if not self.done or self.done[-1]["request"] not in executed:
            return
        latest = self.done[-1]
        final = latest["final_node"]
        gone: set[int] = set()
        for request in self.done:
            clients, path = self.clients_of(request), path_to(self.record, final)
            if request["level"] == "exact" and (request is latest or not self.touches(clients, final)):
                gone |= clients
            covered = any(
                self.record.nodes[node]["request_order"] >= request["request_order"]
                and (self.record.nodes[node]["kind"] == "initial" or self.record.nodes[node]["noise_std"] > 0.0)
                for node in path
            )
            if request["level"] == "exact" and not covered and self.rows_of(request) & self.rows_in(final):
                self.violation("exact", request["request"], f"node {final} was released, and rows of theirs are in it")
        if not gone:
            return
        released, counterfactuals = self.on_disk()[final], {"other data": self.engine_with_other_data(gone)}
        # otherwise the last bits of other clients' replies may decide whether a reply is refused
        if not self.spec.server.update_bound:
            counterfactuals["other counts"] = self.engine_with_other_data(gone, other_counts=True)
            counterfactuals["fewer clients"] = self.engine_without(gone)
        for counterfactual, engine in counterfactuals.items():
            if engine is None:
                continue
            model = self.models(engine, gone, [final])[final]
            if model is None:
                return
            self.findings.count(self.findings.by_counterfactual, counterfactual)
            if not (self.same if counterfactual == "other data" else self.close)(model, released):
                what = f"node {final} is another model with {counterfactual} for clients {sorted(gone)}"
                self.violation("exact", latest["request"], what)
        self.findings.exact_models += 1

    # -- distances and charges -----------------------------------------------------------------------------------

    @cached_property
    def is_theorem(self) -> bool:
        """True if the distance is bounded by proof, whatever else a certificate assumes."""
        return bool(self.spec.regularity.kind == "measured" and self.record.facts["smooth_model"])

    @cached_property
    def slack(self) -> float:
        """Rounding error allowed relative to the model: 2**-52 if rounding is bounded, larger otherwise."""
        if self.record.facts["dtype"] == "float32":
            return 1e-4
        bounded = self.record.facts["rounding_bounded"] and not self.spec.server.update_bound
        return 2.0**-52 if bounded else 1e-9

    @cached_property
    def real(self) -> dict[int, Vector | None]:
        """Model of every node if every client takes part."""
        return self.models(self.engine, (), self.record.nodes)

    def check_replay(self) -> None:
        """Check that repeating the run gives every model in the folder bit for bit, including noise and merges."""
        for node, model in self.on_disk().items():
            again = self.real[node]
            if again is not None and not self.same(again, model):
                self.violation("replay", "", f"the model of node {node} is not the one the record describes")

    @cached_property
    def subjects(self) -> dict[int, list[int]]:
        """Clients that each subject of the record must represent: all numbers that the requesting client had until
        then.
        """
        subjects: dict[int, list[int]] = {}
        for request in self.record.requests.values():
            numbers = sorted(number for number, owner in self.record.owner.items() if owner is request)
            chains = self.chains_of(request)
            if numbers:
                subjects |= dict(zip(numbers, chains, strict=True))
        return subjects

    def counterfactuals(self) -> dict[int, list[int]]:
        """Return the clients of every request, and two clients that may still ask."""
        forgotten = {client for clients in self.subjects.values() for client in clients}
        active = [client for client in self.record.clients if client not in forgotten]
        return self.subjects | {-1 - place: [client] for place, client in enumerate(active[:2])}

    @cached_property
    def distances(self) -> dict[int, dict[int, float]]:
        """Distance between the models with and without the clients, by counterfactual and node.

        Empty where groups refuse replies: the record does not show whose replies a repeated round would refuse.
        """
        if self.spec.server.update_bound and self.record.groups:
            return {key: {} for key in self.counterfactuals()}
        engine, real = self.engine, self.real
        if (
            self.spec.server.update_bound
        ):  # the run and its counterfactual use the same order of sums, or the last bits differ
            engine, real = self.engine_without_gate, self.models(self.engine_without_gate, (), self.record.nodes)
        distances: dict[int, dict[int, float]] = {}
        for key, clients in self.counterfactuals().items():
            there = [node for node, model in real.items() if model is not None]
            other = self.models(engine, clients, there, may_diverge=True)
            distances[key] = {node: _separate(model, other[node]) for node, model in real.items() if model is not None}
        return distances

    @cached_property
    def psi(self) -> dict[int, dict[int, float]]:
        """Psi by counterfactual and node, recomputed from the rounds' scalars; scaled down in a negative control."""
        parents = {row["parent"] for row in self.record.nodes.values()}
        leaves = [n for n, row in self.record.nodes.items() if n not in parents and row["kind"] != "group"]
        bounds: dict[int, dict[int, float]] = {}
        for key, clients in self.counterfactuals().items():
            bounds[key] = {}
            for leaf in leaves:
                bounds[key] |= psi_along(self.record, path_to(self.record, leaf), clients)
        scale = self.findings.psi_scale
        return {key: {node: scale * value for node, value in values.items()} for key, values in bounds.items()}

    def check_distances(self) -> None:
        """Check that the true distance exceeds Psi at no node and for no client."""
        findings = self.findings
        for key, distances in self.distances.items():
            for node, distance in distances.items():
                psi = self.psi[key].get(node)
                if psi is None or math.isinf(psi):
                    continue
                model = self.real[node]
                length = 0.0 if model is None or psi == 0.0 else float(np.linalg.norm(model.astype(np.float64)))
                beyond = not distance <= psi * (1.0 + 1e-12) + self.slack * length
                if not self.is_theorem and psi > 0.0:
                    findings.assumed_distances += 1
                    findings.assumed_exceeded += beyond
                    continue
                findings.distances += 1
                if psi > 1e-6 * max(length, 1e-6) and self.slack < 1e-6:
                    findings.closest = max(findings.closest, distance / psi)
                if beyond:
                    owner = self.record.owner[key]["request"] if key in self.record.owner else ""
                    who = self.counterfactuals()[key]
                    self.violation("psi", owner, f"clients {who} at node {node}: {distance!r} apart, Psi is {psi!r}")

    def _covered(self, node: int, order: int) -> bool:
        rows = (self.record.nodes[step] for step in path_to(self.record, node))
        return any(
            row["request_order"] >= order and (row["kind"] == "initial" or row["noise_std"] > 0.0) for row in rows
        )

    def check_accounting(self) -> None:
        """Check the true total cost of the releases since a request against what its certificate states."""
        for subject, clients in self.subjects.items():
            request = self.record.owner[subject]
            if request["status"] != "done" or request["level"] == "none":
                continue
            body = self.auditor(request["request"])
            order, name, epsilon = request["request_order"], request["request"], request["epsilon"]
            for later in self.done:
                final = later["final_node"]
                if later["request_order"] < order or self._covered(final, order):
                    continue
                if self.touches(clients, final):
                    self.violation("uncovered", name, f"node {final} was released, and no noise covers {clients}")
            charged = {(row["noise_node"], row["subject"]): row["charge"] for row in self.record.tables["charges"]}
            costs = []
            for node, row in self.record.nodes.items():
                edge = row["kind"] == "noise" and row["request_order"] >= order and row["noise_std"] > 0.0
                if not edge or self._covered(row["parent"], order):
                    continue
                distance = self.distances[subject].get(row["parent"])
                if distance is None:
                    continue
                length = float(np.linalg.norm(np.asarray(self.real[row["parent"]], dtype=np.float64)))
                certain = max(0.0, distance * (1.0 - 1e-12) - self.slack * length)
                cost = (certain / row["noise_std"]) ** 2
                costs.append((row["request_order"], cost))
                paid = charged.get((node, subject), 0.0) * self.findings.psi_scale**2
                if cost > paid and self.is_theorem:
                    self.violation("charge", name, f"noise at node {node} costs {cost!r}, {paid!r} was charged")
            if not self.is_theorem:
                continue
            together = sum(cost for _, cost in costs)
            own = sum(cost for of, cost in costs if of == order)
            for what, cost, stated in (
                ("all releases together", together, body["delta_at_most"]),
                ("its own release", own, body["delta_reached"]),
            ):
                delta = delta_at(math.sqrt(cost), epsilon)
                self.findings.deltas += 1
                if stated > 0.0:
                    self.findings.largest_share_of_delta = max(self.findings.largest_share_of_delta, delta / stated)
                if delta > stated * (1.0 + 1e-9) + 1e-15:
                    self.violation("delta", name, f"{what} reach delta {delta!r}, {stated!r} is stated")
            if body["delta_at_most"] > request["delta"] * (1.0 + 1e-9):
                self.violation("delta", name, f"delta {request['delta']!r} asked, {body['delta_at_most']!r} stated")

    # -- levels and files ----------------------------------------------------------------------------------------

    def auditor(self, request: str) -> dict[str, Any]:
        """Return the body of an auditor's certificate."""
        file = self.journey.folder / "certificates" / f"{request}.auditor.json"
        body: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))["body"]
        return body

    def check_levels(self) -> None:
        """Check that the premises allow the level and agree with the run's history (docs/theory.md, section 12)."""
        restored = [event["seq"] for event in self.record.tables["events"] if event["kind"] == "restored"]
        done_at = {
            json.loads(event["payload"])["request"]: event["seq"]
            for event in self.record.tables["events"]
            if event["kind"] == "request done"
        }
        for request in self.done:
            name, body = request["request"], self.auditor(request["request"])
            statuses = {row["name"]: row["status"] for row in body["premises"]}
            fresh = self._starts_as_drawn(request["noise_node"])
            counted = BEFORE_TRAINING if fresh else BEFORE_TRAINING | ON_THE_PATH
            deciding = {status for what, status in statuses.items() if what in counted or not body["untouched"]}
            allowed = "none" if "failed" in deciding else "conditional" if "assumed" in deciding else (
                "exact" if body["untouched"] else "proven")  # fmt: skip
            if LEVELS.index(body["level"]) > LEVELS.index(allowed) or body["level"] != request["level"]:
                self.violation("level", name, f"level {body['level']}, its premises allow {allowed}")
            if body["level"] in ("exact", "proven"):
                if any(seq < done_at[name] for seq in restored) and statuses.get("record") in (None, "met"):
                    self.violation("level", name, "the run was restored, and no premise on the record says so")
                self._check_steps(request)
            if body["level"] == "proven" and not (self.is_theorem and self.slack == 2.0**-52):
                self.violation("level", name, "proven, but the bound is not a theorem here")

    def _starts_as_drawn(self, number: int) -> bool:
        """Return whether training started from an unchanged initial model."""
        node = self.record.nodes[number]
        while node["kind"] == "noise" and node["noise_std"] == 0.0:
            node = self.record.nodes[node["parent"]]
        return bool(node["kind"] == "initial")

    def _check_steps(self, request: dict[str, Any]) -> None:
        """Check that everybody else takes the same steps without the forgotten, bit for bit."""
        if self.journey.family == "closed form":
            return
        gone = {self.held[client][0] for client in self.clients_of(request)}
        stays = [client for client in range(len(self.data)) if self.held[client][0] not in gone]
        steps, others = (
            self.journey.engine(self.spec, data).plan.rates.tolist()  # type: ignore[attr-defined]
            for data in (self.data, [self.data[client] for client in stays])
        )
        if [steps[client] for client in stays] != others:
            what = f"level {request['level']}, but without the clients others would take other steps"
            self.violation("level", request["request"], what)

    def check_files(self) -> None:
        """Check that both verifiers accept the run, and every certificate by itself."""
        seen = [file for file in [self.journey.witness] if file.exists()]
        checked = sifu.verify(self.journey.folder, heads=seen)
        problems = checked.problems + verify(self.journey.folder)
        for file in sorted((self.journey.folder / "certificates").glob("*.json")):
            problems += sifu.verify(file).problems
        self.findings.folders_verified += 1
        for problem in problems:
            self.violation("verify", "", problem)

    def check(self) -> None:
        """Check every claim of a folder whose requests are done."""
        self.check_replay()
        self.check_distances()
        self.check_accounting()
        self.check_levels()
        self.check_files()


def _separate(model: Vector, other: Vector | None) -> float:
    if other is None:  # the counterfactual diverged
        return math.inf
    return float(np.linalg.norm(model.astype(np.float64) - other.astype(np.float64)))


def kinds_of(truth: Truth, request: dict[str, Any]) -> Iterable[str]:
    """Return the kinds of a request for counting: how the run was trained and opened, and earlier requests."""
    journey, earlier = truth.journey, [row for row in truth.done if row["request_order"] < request["request_order"]]
    several = len(json.loads(request["clients"])) > 1
    restored = any(event["kind"] == "restored" for event in truth.record.tables["events"])
    kinds = {
        "sampling": journey.spec.get("server", {}).get("participation", "all") != "all",
        "sets": several,
        "changing budgets": any(row["epsilon"] != request["epsilon"] for row in earlier),
        "methods in sequence": any(row["method"] != request["method"] for row in earlier),
        "user modules": callable(journey.model),
        "engines handed over": journey.hands_engine_over,
        "after a restore": restored,
        "masks": journey.family == MASKED,
        "records": bool(json.loads(request["records"])),
        "clients that forgot records before": any(len(chain) > 1 for chain in truth.chains_of(request)),
        "records of a head in closed form": journey.family == "closed form" and bool(json.loads(request["records"])),
        "approved": journey.approvals > 0,
        "after a join": any(event["kind"] == "client joined" for event in truth.record.tables["events"]),
        "refused replies": bool(truth.record.tables["rejections"]),
    }
    return [kind for kind, applies in kinds.items() if applies]


class Auditor:
    """Observer that checks a journey at every request, and every folder before the journey leaves it."""

    def __init__(self, findings: Findings) -> None:
        self.findings = findings

    def executed(self, journey: Journey, requests: Collection[str]) -> None:
        """Count the requests and check the new release against `exact` now, because later requests erase its model."""
        truth, findings = Truth(journey, self.findings), self.findings
        for request in truth.done:
            if request["request"] in requests:
                findings.requests += 1
                findings.count(findings.by_method, request["method"])
                findings.count(findings.by_level, request["level"])
                for kind in kinds_of(truth, request):
                    findings.count(findings.by_kind, kind)
        with must_not_diverge():
            truth.check_exact(requests)

    def left(self, journey: Journey) -> None:
        """Check every claim of a folder."""
        with must_not_diverge():
            Truth(journey, self.findings).check()


def audit_journey(
    seed: int,
    folder: Path,
    findings: Findings,
    families: Sequence[str] = FAMILIES,
    most_requests: int = 6,
    small: bool = False,
) -> Journey | None:
    """Make one journey and compare its claims with the truth; return None if training was refused."""
    with replayable_noise(seed), witnessed(folder):
        try:
            journey = start_journey(seed, folder, families, small)
        except RoundRejectedError:  # training of a diverging network is refused with a message, and nothing is claimed
            findings.refused += 1
            return None
        try:
            go_on(journey, Auditor(findings), most_requests)
        except RoundRejectedError:
            journey.refused += 1
        except SifuError as error:
            row = {"kind": "stopped", "seed": seed, "family": journey.family, "request": "", "what": str(error)}
            findings.violations.append(row)
    findings.runs += 1
    findings.refused += journey.refused
    findings.count(findings.by_family, journey.family)
    for step in journey.steps:
        if not step.startswith(("forget", "refused")):
            findings.count(findings.by_step, step)
    return journey
