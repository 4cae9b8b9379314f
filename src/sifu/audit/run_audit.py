"""The audit of a run (`sifu audit DIR`), which attacks every certified claim and needs the data of all clients."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sifu.api.run import Run
from sifu.audit.audited import Audited, AuditOptions, AuditProgress
from sifu.audit.before_after import BeforeAfterAttack
from sifu.audit.compare_releases import RunComparison
from sifu.audit.exact_releases import ExactAudit, exact_audits
from sifu.audit.membership import MembershipAudit, attack_release, attacked_request, models_wanted
from sifu.audit.releases import ReleaseAudit, audit_releases
from sifu.audit.replay_evidence import (
    RARE,
    REPLAY_TOLERANCE,
    SLACK,
    Evidence,
    NodeDistance,
    NoiseDrawn,
    NoiseEdge,
    Watched,
    charged_edges,
    distance_rows,
    gather,
    too_far,
    watched_subjects,
    wrong_charges,
)
from sifu.run.devices import engine_kind
from sifu.store.projection import RequestRow


@dataclass(frozen=True)
class SubjectAudit:
    """Results for one subject: the true distance and Psi at every node, and the leakage of its releases."""

    subject: int
    clients: tuple[str, ...]
    request: str | None
    level: str
    budget: float
    source: int | None
    nodes: tuple[NodeDistance, ...]
    releases: ReleaseAudit | None
    findings: tuple[str, ...]

    @property
    def at_source(self) -> NodeDistance | None:
        """True distance at the node that the subject's request rolled back to, or None."""
        return next((node for node in self.nodes if node.node == self.source), None)

    @property
    def closest(self) -> float:
        """Largest ratio of true distance to Psi: at 1 the bound is tight, above 1 it is violated."""
        shares = [node.distance / node.psi for node in self.nodes if node.psi > 0.0 and math.isfinite(node.psi)]
        broken = any(node.distance > 0.0 and node.psi == 0.0 for node in self.nodes)
        return math.inf if broken else max(shares, default=0.0)


@dataclass(frozen=True)
class AuditReport:
    """All results of an audit.

    `exact` compares digests of exact releases. `before_after` is the attack of an observer who kept an earlier
    release, which certificates do not cover. `contradictions` lists certified claims that are false, `observations`
    lists uncertified statements that are false, and `notes` lists what could not be tested.
    """

    run: str
    subjects: tuple[SubjectAudit, ...]
    noise: tuple[NoiseDrawn, ...]
    nodes_replayed: int
    nodes_missed: int
    membership: MembershipAudit | None
    before_after: tuple[BeforeAfterAttack, ...]
    exact: tuple[ExactAudit, ...]
    contradictions: tuple[str, ...]
    observations: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def holds(self) -> bool:
        """True if no certified claim is contradicted."""
        return not self.contradictions

    def values(self) -> dict[str, Any]:
        """Return the report as plain values for JSON."""
        content = asdict(self)
        for mapping, subject in zip(content["subjects"], self.subjects, strict=True):
            mapping["largest_share_of_psi"] = subject.closest
            if subject.releases is not None:
                mapping["releases"]["epsilon_shown"] = subject.releases.epsilon_shown
        for mapping, release in zip(content["exact"], self.exact, strict=True):
            mapping |= {"same_model": release.same_model, "same_sum": release.same_sum}
        return {"holds": self.holds, **content}


def audit_run(
    run: Run | str | Path,
    options: AuditOptions | None = None,
    *,
    progress: AuditProgress | None = None,
) -> AuditReport:
    """Replay a run with and without its forgotten clients, attack its releases, and compare with the certificates.

    The audit needs every client's data, so it works only for simulated federations.

    Args:
        run: The run or its folder; a run made from Python must be given as `Run` with its engine.
        options: Attacks to run and their numbers of draws.
        progress: Callback that receives the name of the step, the work done, and the total work.
    """
    options = options or AuditOptions()
    run = run if isinstance(run, Run) else Run(run)
    engine = run.complete_engine()
    with closing(run.reader()) as reader, reader.snapshot():
        progress = progress or (lambda *_: None)
        audit = _Audit(run, reader, engine, options, progress)
        return audit.compare() if options.only_before_after else audit.execute()


def _claims(level: str | None) -> bool:
    """Return whether a request of this level promises something."""
    return level not in (None, "none")


@dataclass(eq=False)
class _Audit(Audited):
    """One audit with its findings."""

    contradictions: list[str] = field(default_factory=list)
    observations: list[str] = field(default_factory=list)

    def compare(self) -> AuditReport:
        """Run only the comparison of two releases."""
        row = attacked_request(self)
        wanted = models_wanted(self.reader, row)
        # A closed-form head needs no replay: it is solved again from statistics.
        needed = wanted and not self.view.regime.solves
        evidence = gather(self.engine, self.reader, [], wanted) if needed else Evidence()
        found = tuple(RunComparison(self).execute(row, evidence))
        return AuditReport(self.reader.value("run"), (), (), 0, 0, None, found, (), (), (), tuple(self.notes))

    def execute(self) -> AuditReport:
        attacked = attacked_request(self)
        watched, left_out = watched_subjects(self.reader, self.options.subjects)
        if left_out:
            largest = f"the {len(watched)} with the largest charges were replayed"
            self.notes.append(f"{left_out} more subjects were forgotten; {largest}")
        evidence = self._gathered(watched, attacked)
        if evidence.missed and evidence.lengths:
            self.notes.append(
                f"{evidence.missed} nodes cannot be replayed: the noise before them is no longer known (its model was "
                "erased, as it had to be)"
            )
        self._check_replay(evidence)
        noise = tuple(evidence.noise.values())
        self._check_noise(noise)
        rows = distance_rows(self.reader, watched, evidence)
        subjects = []
        for number, subject in enumerate(watched):
            subjects.append(self._subject(subject, len(watched), rows[subject.subject], evidence))
            self.progress("replaying releases", number + 1, len(watched))
        exact = tuple(self._exact(watched, evidence))
        attacks = attack_release(self, attacked, evidence) if attacked is not None else None
        compared = tuple(RunComparison(self).execute(attacked, evidence)) if self.options.attacks else ()
        return AuditReport(
            self.reader.value("run"),
            tuple(subjects),
            noise,
            len(evidence.lengths),
            evidence.missed,
            attacks,
            compared,
            exact,
            tuple(self.contradictions),
            tuple(self.observations),
            tuple(self.notes),
        )

    def _gathered(self, watched: list[Watched], attacked: RequestRow | None) -> Evidence:
        return gather(
            self.engine,
            self.reader,
            watched,
            models_wanted(self.reader, attacked),
            lambda done, total: self.progress("replaying the run", done, total),
        )

    # -- claims --------------------------------------------------------------------------------------------

    def _say(self, certified: bool, sentence: str) -> None:
        (self.contradictions if certified else self.observations).append(sentence)

    def _check_replay(self, evidence: Evidence) -> None:
        """Check that replayed rounds reproduce the models on disk. A head from another device may deviate."""
        tolerance = REPLAY_TOLERANCE[self.engine.layout.dtype]
        elsewhere = self.spec.regime.solves and engine_kind(self.engine) != self.reader.facts["engine"]
        for node, gap in evidence.deviations.items():
            off = f"it is off by {gap:.3g} of its length"
            if gap > tolerance and elsewhere:
                self.notes.append(f"the head of node {node} is from a GPU, audit it there: on this CPU {off}")
            elif gap > tolerance:
                self._say(
                    any(_claims(request.level) for request in self.reader.requests()),
                    f"the model of node {node} is not what the recorded rounds give: {off}",
                )

    def _check_noise(self, noise: tuple[NoiseDrawn, ...]) -> None:
        level_of = {request.request_order: (request.request, request.level) for request in self.reader.requests()}
        for draw in noise:
            if draw.as_recorded:
                continue
            request, level = level_of.get(draw.order, ("?", None))
            what = (
                f"the noise that was added is not normal with deviation {draw.noise_std:.6g} (p = {draw.p_normal:.1e})"
            )
            if draw.p_small < RARE:
                what = (
                    f"noise {draw.noise_std:.6g} is recorded, {draw.measured_std:.6g} was added (so little has "
                    f"probability {draw.p_small:.1e})"
                )
            self._say(_claims(level), f"request {request}: {what}")

    def _exact(self, watched: list[Watched], evidence: Evidence) -> Iterator[ExactAudit]:
        """Yield the digests of exact releases and of their counterfactuals, and record contradicted claims."""
        for release, same_counterfactuals in exact_audits(self.run.engine_without, self.reader, watched, evidence):
            who = f"request {release.request}, {', '.join(release.clients[:3])}"
            if not release.same_sum:
                self._say(True, f"{who}: its head was not solved from the sum over the remaining clients")
            if release.without is not None and not same_counterfactuals:
                wrong = "its release is called exact, but training without the clients gives another model"
                self._say(True, f"{who}: {wrong}")
            elif not same_counterfactuals:
                self.notes.append(
                    f"{who}: its release was not recomputed without the clients, so it was not audited: no engine "
                    "without their data can be built, or models that the release depends on are gone"
                )
            elif release.without is not None and not release.same_model:
                self.notes.append(
                    f"{who}: training with and without the client gives the same model here, but its bits differ from "
                    "the released model, as on another machine or device"
                )
            yield release

    def _subject(self, watched: Watched, subjects: int, rows: list[NodeDistance], evidence: Evidence) -> SubjectAudit:
        edges = charged_edges(self.reader, watched)
        findings = list(self._findings(watched, rows, edges, evidence))
        options = self.options
        releases = audit_releases(
            watched, edges, evidence, self.normals, options.replays, options.mistake / max(subjects, 1)
        )
        if releases is not None and releases.epsilon_shown > releases.epsilon_certified:
            findings.append(
                f"its releases show an epsilon of at least {releases.epsilon_shown:.4g} (confidence "
                f"{1.0 - options.mistake:.1%}), {releases.epsilon_certified:g} is the budget"
            )
        if releases is not None and releases.missed:
            self.notes.append(
                f"{', '.join(watched.names[:3])}: {releases.missed} of {len(edges)} releases charged to it cannot be "
                "replayed; its true and shown epsilon cover the others only"
            )
        # Psi also bounds the influence of a client without a request.
        certified = _claims(watched.level) or watched.request is None
        request = watched.request.request if watched.request else None
        who = f"request {request}, " if request else ""
        for sentence in findings:
            self._say(certified, f"{who}{', '.join(watched.names[:3])}: {sentence}")
        return SubjectAudit(
            watched.subject,
            watched.names,
            request,
            watched.level,
            watched.budget,
            watched.request.source_node if watched.request else None,
            tuple(rows),
            releases,
            tuple(findings),
        )

    def _findings(
        self, watched: Watched, rows: list[NodeDistance], edges: list[NoiseEdge], evidence: Evidence
    ) -> Iterator[str]:
        slack = SLACK[self.engine.layout.dtype]
        broken = too_far(rows, evidence, slack)
        if broken:
            worst = max(broken, key=lambda node: node.distance - node.psi)
            yield (
                f"the true distance is above Psi at {len(broken)} of {len(rows)} nodes, first at node "
                f"{broken[0].node}; at node {worst.node} it is {worst.distance:.6g} and Psi is {worst.psi:.6g}"
            )
        yield from wrong_charges(watched, edges, evidence, slack)
