"""The audit of `sifu audit DIR`: attacks on every claim of a run, given the data of all clients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from sifu.api.run import Run
from sifu.audit.attack_release import Audited, ReleaseAttack
from sifu.audit.audit_report import AuditOptions, AuditProgress, AuditReport, SubjectAudit
from sifu.audit.compare_releases import RunComparison
from sifu.audit.releases import ExactAudit, audit_releases, exact_audits
from sifu.audit.replay_evidence import (
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
from sifu.core.closed_form_engine import TunedEngine
from sifu.run.coupled_replay import NoisedModel
from sifu.store.erased_figures import not_recomputed
from sifu.store.projection import RequestRow


def audit_run(
    run: Run | str | Path,
    options: AuditOptions | None = None,
    *,
    clients: Any = None,
    data_folder: str | Path | None = None,
    noised: NoisedModel | None = None,
    progress: AuditProgress | None = None,
) -> AuditReport:
    """Replay a run with and without its forgotten clients, attack its releases, and compare with the certificates.

    The audit needs every client's data, so it works only for simulated federations.

    Args:
        run: The run or its folder; a run made from Python must be given as `Run` with its engine.
        options: Attacks to run and their numbers of draws.
        clients: Names, x and y of the clients, for attacks on samples; by default loaded from the spec's data.
        data_folder: Folder of the data sets.
        noised: Returns the noised model of an edge; by default it comes from the record.
        progress: Callback that receives the name of the step, the work done, and the total work.
    """
    options = options or AuditOptions()
    run = run if isinstance(run, Run) else Run(run)
    engine = run.complete_engine()
    with closing(run.reader()) as reader, reader.snapshot():
        progress = progress or (lambda *_: None)
        audit = _Audit(Audited(run, reader, engine, options, clients, data_folder, noised, progress))
        return audit.compare() if options.only_before_after else audit.execute()


class _Audit:
    """The state and the steps of one audit."""

    def __init__(self, audited: Audited) -> None:
        self._audited, self.reader, self.engine, self.view = audited, audited.reader, audited.engine, audited.view
        self.options, self.spec = audited.options, audited.spec
        self.notes, self.progress = audited.notes, audited.progress
        self.attack = ReleaseAttack(audited)
        self.contradictions: list[str] = []
        self.observations: list[str] = []

    def compare(self) -> AuditReport:
        """Compare two releases only."""
        row = self.attack.request()
        wanted = self.attack.models_wanted(row)
        needed = wanted and self.view.regime.records_figures  # a solve is repeated from statistics, not replayed
        evidence = gather(self.engine, self.reader, [], wanted, self._audited.noised) if needed else Evidence()
        found = tuple(RunComparison(self._audited).execute(row, evidence))
        return AuditReport(self.reader.value("run"), (), (), 0, 0, None, found, (), (), (), tuple(self.notes))

    def execute(self) -> AuditReport:
        attacked = self.attack.request()
        if erased := not_recomputed(self.reader):
            self.notes.append(f"the figures of {', '.join(erased)} were erased, so these requests were not audited")
        if self.view.facts.noise > 0.0 and self.spec.privacy.noise == "system":
            self.notes.append(
                "training added noise from the operating system to every update, which cannot be drawn again: no round "
                "can be replayed, so distances and releases were not audited"
            )
            watched: list[Watched] = []
            evidence = Evidence(missed=len(self.reader.node_rows()))
        else:
            watched, left_out = watched_subjects(self.reader, self.options.subjects)
            if left_out:
                self.notes.append(
                    f"{left_out} more subjects were forgotten; the {len(watched)} with the largest charges were "
                    f"replayed"
                )
            evidence = self._gathered(watched, attacked)
        if evidence.missed and evidence.lengths:
            self.notes.append(
                f"{evidence.missed} nodes cannot be replayed: the noise before them is no longer known (its model was "
                "erased, as it had to be), a heuristic made them, or they were trained at another local rate"
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
        attacks = self.attack.execute(attacked, watched, evidence) if attacked is not None else None
        compared = tuple(RunComparison(self._audited).execute(attacked, evidence)) if self.options.attacks else ()
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
        if isinstance(self.engine, TunedEngine):
            self.notes.append(
                "groups tune networks, and releases go through different ones: exact releases were made again without "
                "their clients; no distances were measured, and no attacks were run"
            )
            return Evidence()
        return gather(
            self.engine,
            self.reader,
            watched,
            self.attack.models_wanted(attacked),
            self._audited.noised,
            lambda done, total: self.progress("replaying the run", done, total),
        )

    # -- claims --------------------------------------------------------------------------------------------

    def _say(self, certified: bool, sentence: str) -> None:
        (self.contradictions if certified else self.observations).append(sentence)

    def _check_replay(self, evidence: Evidence) -> None:
        """Check that the replayed rounds end at the models on disk."""
        tolerance = REPLAY_TOLERANCE[self.engine.layout.dtype]
        for node, gap in evidence.deviations.items():
            if gap > tolerance:
                self._say(
                    any(self.options.claims(request.level) for request in self.reader.requests()),
                    f"the model of node {node} is not what the recorded rounds give: it is off by {gap:.3g} of its "
                    f"length",
                )

    def _check_noise(self, noise: tuple[NoiseDrawn, ...]) -> None:
        level_of = {request.request_order: (request.request, request.level) for request in self.reader.requests()}
        for draw in noise:
            request, level = level_of.get(draw.order, ("?", None))
            if draw.p_small < 1e-6:
                self._say(
                    self.options.claims(level),
                    f"request {request}: noise {draw.noise_std:.6g} is recorded, {draw.measured_std:.6g} was added "
                    f"(so little has probability {draw.p_small:.1e})",
                )
            elif not draw.as_recorded:
                self._say(
                    self.options.claims(level),
                    f"request {request}: the noise that was added is not normal with deviation {draw.noise_std:.6g} "
                    f"(p = {draw.p_normal:.1e})",
                )

    def _exact(self, watched: list[Watched], evidence: Evidence) -> Iterator[ExactAudit]:
        """Yield digests of exact releases and their counterfactuals; another machine may differ in the last bits."""
        for release, same_counterfactuals in exact_audits(
            self._audited.run.engine_without, self.reader, watched, evidence
        ):
            who = f"request {release.request}, {', '.join(release.clients[:3])}"
            if not release.same_sum:
                self._say(True, f"{who}: the sum it was solved from is not that of those who stay")
            if release.without is not None and not same_counterfactuals:
                self._say(True, f"{who}: its release is called exact, but without the clients another model comes out")
            elif release.without is None and not same_counterfactuals:
                self.notes.append(
                    f"{who}: its release was not recomputed without the clients, so it was not audited: no engine "
                    "can be built without their data where one was handed over, or what the release was made of is gone"
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
        share = replace(self.options.replays, mistake=self.options.replays.mistake / max(subjects, 1))
        releases = audit_releases(self.engine, watched, edges, evidence, self._audited.normals, share)
        if releases is not None and releases.epsilon_shown > releases.epsilon_certified:
            findings.append(
                f"its releases show an epsilon of at least {releases.epsilon_shown:.4g} (confidence "
                f"{1.0 - self.options.replays.mistake:.1%}), {releases.epsilon_certified:g} is the budget"
            )
        if releases is not None and releases.missed:
            self.notes.append(
                f"{', '.join(watched.names[:3])}: {releases.missed} of {len(edges)} releases charged to it cannot be "
                "replayed; its true and shown epsilon are those of the others"
            )
        # Psi also bounds a client without a request, unless the run's accounting bounds nobody.
        certified = self.options.claims(watched.level) or (
            watched.request is None and self.spec.privacy.accounting == "round"
        )
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
                f"the truth is above Psi at {len(broken)} of {len(rows)} nodes, first at node {broken[0].node}; at "
                f"node {worst.node} it is {worst.distance:.6g}, Psi {worst.psi:.6g}"
            )
        yield from wrong_charges(watched, edges, evidence, slack)
