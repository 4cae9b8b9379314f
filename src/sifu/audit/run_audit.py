"""The audit of a run (`sifu audit DIR`), which attacks every certified claim and needs the data of all clients."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sifu.api.run import Run
from sifu.audit.audited import Audited, AuditOptions, AuditProgress
from sifu.audit.before_after import BeforeAfterAttack
from sifu.audit.compare_releases import RunComparison
from sifu.audit.exact_releases import ExactAudit, exact_audits
from sifu.audit.membership import MembershipAudit, attack_release
from sifu.audit.releases import MISTAKE, ReleaseAudit, audit_releases
from sifu.audit.replay_evidence import (
    RARE,
    REPLAY_TOLERANCE,
    SLACK,
    Evidence,
    NodeDistance,
    NoiseDrawn,
    Watched,
    charged_edges,
    distance_rows,
    gather,
    watched_subjects,
    wrong_claims,
)
from sifu.run.devices import engine_kind


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
    run = run if isinstance(run, Run) else Run(run)
    engine = run.complete_engine()
    with run.view() as view:
        audited = Audited(run, view, engine, options or AuditOptions(), progress or (lambda *_: None))
        return _only_compared(audited) if audited.options.only_before_after else _execute(audited)


def _claims(level: str | None) -> bool:
    """Return whether a request of this level promises something."""
    return level not in (None, "none")


def _only_compared(audited: Audited) -> AuditReport:
    # A closed-form head needs no replay: it is solved again from statistics.
    if audited.attacked is not None and not audited.view.regime.solves:
        gather(audited, [])
    found = tuple(RunComparison(audited).execute())
    return AuditReport(audited.reader.value("run"), (), (), 0, 0, None, found, (), (), (), tuple(audited.notes))


def _execute(audited: Audited) -> AuditReport:
    watched = watched_subjects(audited)
    evidence = gather(audited, watched)
    if evidence.missed and evidence.lengths:
        audited.notes.append(
            f"{evidence.missed} nodes cannot be replayed: the noise before them is no longer known (its model was "
            "erased, as it had to be)"
        )
    _check_replay(audited, evidence)
    _check_noise(audited, evidence)
    rows = distance_rows(audited, watched, evidence)
    subjects = []
    for number, subject in enumerate(watched):
        subjects.append(_subject(audited, subject, len(watched), rows[subject.subject], evidence))
        audited.progress("replaying releases", number + 1, len(watched))
    exact = tuple(exact_audits(audited, watched, evidence))
    attack = attack_release(audited)
    compared = tuple(RunComparison(audited).execute()) if audited.options.attacks else ()
    return AuditReport(
        audited.reader.value("run"),
        tuple(subjects),
        tuple(evidence.noise.values()),
        len(evidence.lengths),
        evidence.missed,
        attack,
        compared,
        exact,
        tuple(audited.contradictions),
        tuple(audited.observations),
        tuple(audited.notes),
    )


def _check_replay(audited: Audited, evidence: Evidence) -> None:
    """Check that replayed rounds reproduce the models on disk. A head from another device may deviate."""
    tolerance = REPLAY_TOLERANCE[audited.engine.layout.dtype]
    elsewhere = audited.view.regime.solves and engine_kind(audited.engine) != audited.reader.facts["engine"]
    for node, gap in evidence.deviations.items():
        off = f"it is off by {gap:.3g} of its length"
        if gap > tolerance and elsewhere:
            audited.notes.append(f"the head of node {node} is from a GPU, audit it there: on this CPU {off}")
        elif gap > tolerance:
            certified = any(_claims(request.level) for request in audited.view.requests)
            audited.say(certified, f"the model of node {node} is not what the recorded rounds give: {off}")


def _check_noise(audited: Audited, evidence: Evidence) -> None:
    level_of = {request.request_order: (request.request, request.level) for request in audited.view.requests}
    for draw in evidence.noise.values():
        if draw.as_recorded:
            continue
        request, level = level_of.get(draw.order, ("?", None))
        what = f"the noise that was added is not normal with deviation {draw.noise_std:.6g} (p = {draw.p_normal:.1e})"
        if draw.p_small < RARE:
            what = (
                f"noise {draw.noise_std:.6g} is recorded, {draw.measured_std:.6g} was added (so little has "
                f"probability {draw.p_small:.1e})"
            )
        audited.say(_claims(level), f"request {request}: {what}")


def _subject(
    audited: Audited, watched: Watched, subjects: int, rows: list[NodeDistance], evidence: Evidence
) -> SubjectAudit:
    edges, slack = charged_edges(audited, watched), SLACK[audited.engine.layout.dtype]
    findings = list(wrong_claims(watched, rows, edges, evidence, slack))
    releases = audit_releases(audited, watched, edges, evidence, MISTAKE / subjects)
    if releases is not None and releases.epsilon_shown > releases.epsilon_certified:
        findings.append(
            f"its releases show an epsilon of at least {releases.epsilon_shown:.4g} (confidence "
            f"{1.0 - MISTAKE:.1%}), {releases.epsilon_certified:g} is the budget"
        )
    if releases is not None and releases.missed:
        audited.notes.append(
            f"{', '.join(watched.names[:3])}: {releases.missed} of {len(edges)} releases charged to it cannot be "
            "replayed; its true and shown epsilon cover the others only"
        )
    # Psi also bounds the influence of a client without a request.
    certified = _claims(watched.level) or watched.request is None
    request = watched.request.request if watched.request else None
    who = f"request {request}, " if request else ""
    for sentence in findings:
        audited.say(certified, f"{who}{', '.join(watched.names[:3])}: {sentence}")
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
