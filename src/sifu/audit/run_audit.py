"""`sifu audit DIR`: try to break every claim of a run, where all clients are at hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from sifu.api.certification import RecordedRequest
from sifu.api.federation import PYTHON, clients_from_spec, engine_from_spec, held_out_from_spec
from sifu.api.run import Run
from sifu.audit.evidence import (
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
from sifu.audit.forgetting import ForgettingAudit, WatermarkSuccess, forgetting_audit
from sifu.audit.membership import (
    MembershipAudit,
    RecordedRounds,
    bound_rates,
    lira,
    loss_attack,
    shadow_scores,
)
from sifu.audit.releases import ReleaseAudit, Replays, audit_releases
from sifu.audit.scoring import Samples, Scorer, stacked
from sifu.core.engine import Engine, Position
from sifu.core.errors import InputError
from sifu.core.layout import Vector
from sifu.core.noise import NormalSource, SystemNormals
from sifu.core.randomness import keyed_generator
from sifu.core.spec import Spec
from sifu.methods.coupled import NoisedModel
from sifu.methods.registry import method_named
from sifu.methods.training import retrain_unrecorded
from sifu.methods.view import RunView
from sifu.store.reader import EvaluationRow, RequestRow, RunReader

AuditProgress = Callable[[str, int, int], None]
"""(what is being done, how much of it is done, of how much)."""
MOST_HELD_OUT = 2000


@dataclass(frozen=True)
class AuditOptions:
    """How hard to try.

    `subjects` is how many of the forgotten are replayed; `shadows` how many shadow federations each world gets (0:
    none), `shadow_rounds` and `relearn_rounds` bound their length. `attacks` turns membership inference, Scratch and
    relearning on; they need retraining. `request` names the request they look at (the last one). `seed` makes the
    audit's own draws repeatable; without it they come from the operating system, as certified noise does.
    `as_if_certified` treats requests of level `none` as if they had claimed their budget: for controls that must be
    caught.
    """

    subjects: int = 16
    replays: Replays = field(default_factory=Replays)
    attacks: bool = True
    shadows: int = 16
    shadow_rounds: int = 100
    relearn_rounds: int = 50
    request: str | None = None
    seed: int | None = None
    as_if_certified: bool = False


@dataclass(frozen=True)
class SubjectAudit:
    """One subject: every node's truth beside Psi, and what its releases give away."""

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
        """The truth at the node its request went back to."""
        return next((one for one in self.nodes if one.node == self.source), None)

    @property
    def closest(self) -> float:
        """The largest share of its bound that the truth reached: 1 is a tight bound, more breaks it."""
        shares = [one.distance / one.psi for one in self.nodes if one.psi > 0.0 and math.isfinite(one.psi)]
        broken = any(one.distance > 0.0 and one.psi == 0.0 for one in self.nodes)
        return math.inf if broken else max(shares, default=0.0)


@dataclass(frozen=True)
class AttackAudit:
    """Attacks on the model that a request released."""

    request: str
    clients: tuple[str, ...]
    membership: MembershipAudit | None
    forgetting: ForgettingAudit


@dataclass(frozen=True)
class AuditReport:
    """Everything that was tried. `contradictions` are claims that turned out false; `observations` would be, had
    they been claimed; `notes` say what could not be tried."""

    run: str
    subjects: tuple[SubjectAudit, ...]
    noise: tuple[NoiseDrawn, ...]
    nodes_replayed: int
    nodes_missed: int
    attacks: AttackAudit | None
    contradictions: tuple[str, ...]
    observations: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def holds(self) -> bool:
        """Whether no certified claim was contradicted."""
        return not self.contradictions

    def values(self) -> dict[str, Any]:
        """As plain values."""
        content = asdict(self)
        for found, one in zip(content["subjects"], self.subjects, strict=True):
            found["largest_share_of_psi"] = one.closest
            if one.releases is not None:
                found["releases"]["epsilon_shown"] = one.releases.epsilon_shown
        return {"holds": self.holds, **content}


def audit_run(
    run: Run | str | Path,
    options: AuditOptions | None = None,
    *,
    clients: Any = None,
    data_folder: str | Path | None = None,
    noised: NoisedModel | None = None,
    progress: AuditProgress | None = None,
) -> AuditReport:
    """Replay a run with and without its forgotten clients, attack its releases, and compare with what was certified.

    Needs every client's data, so it works for simulated federations. For a run made from Python, hand over the `Run`
    with its engine, and `clients` with names, x and y for the attacks that look at samples. `noised` tells the
    noise of an edge (by default from the record).
    """
    options = options or AuditOptions()
    run = run if isinstance(run, Run) else Run(run)
    engine = run.engine()
    with closing(run.reader()) as reader, reader.snapshot():
        return _Audit(run, reader, engine, options, clients, data_folder, noised, progress).carry_out()


class _Audit:
    """One audit, step by step."""

    def __init__(
        self,
        run: Run,
        reader: RunReader,
        engine: Engine,
        options: AuditOptions,
        clients: Any,
        data_folder: str | Path | None,
        noised: NoisedModel | None,
        progress: AuditProgress | None,
    ) -> None:
        self.run, self.reader, self.engine, self.options = run, reader, engine, options
        self.data_folder, self.noised = data_folder, noised
        self.progress = progress or (lambda *_: None)
        self.spec = Spec.from_mapping(reader.spec)
        self.view = RunView(reader)
        self.normals: NormalSource = SystemNormals() if options.seed is None else keyed_generator(options.seed, "audit")
        self._clients = clients
        self.notes: list[str] = []
        self.contradictions: list[str] = []
        self.observations: list[str] = []

    def carry_out(self) -> AuditReport:
        attacked = self._attacked()
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
            evidence = gather(
                self.engine,
                self.reader,
                watched,
                self._models_wanted(attacked),
                self.noised,
                lambda done, total: self.progress("replaying the run", done, total),
            )
        if evidence.missed and evidence.lengths:
            self.notes.append(
                f"{evidence.missed} nodes cannot be replayed: the noise before them is no longer known (its model was "
                "erased, as it had to be), or a heuristic made them"
            )
        self._check_replay(evidence)
        noise = tuple(evidence.noise.values())
        self._check_noise(noise)
        rows = distance_rows(self.reader, watched, evidence)
        subjects = []
        for number, one in enumerate(watched):
            subjects.append(self._subject(one, len(watched), rows[one.subject], evidence))
            self.progress("replaying releases", number + 1, len(watched))
        attacks = self._attack(attacked, watched, evidence) if attacked is not None else None
        return AuditReport(
            self.reader.value("run"),
            tuple(subjects),
            noise,
            len(evidence.lengths),
            evidence.missed,
            attacks,
            tuple(self.contradictions),
            tuple(self.observations),
            tuple(self.notes),
        )

    # -- claims --------------------------------------------------------------------------------------------

    def _say(self, certified: bool, sentence: str) -> None:
        (self.contradictions if certified else self.observations).append(sentence)

    def _is_certified(self, level: str | None) -> bool:
        return self.options.as_if_certified or level not in (None, "none")

    def _check_replay(self, evidence: Evidence) -> None:
        """The rounds, carried out again, must end at the models on disk."""
        tolerance = REPLAY_TOLERANCE[self.engine.layout.dtype]
        for node, gap in evidence.deviations.items():
            if gap > tolerance:
                self._say(
                    any(self._is_certified(one.level) for one in self.reader.requests()),
                    f"the model of node {node} is not what the recorded rounds give: it is off by {gap:.3g} of its "
                    f"length",
                )

    def _check_noise(self, noise: tuple[NoiseDrawn, ...]) -> None:
        level_of = {one.request_order: (one.request, one.level) for one in self.reader.requests()}
        for one in noise:
            request, level = level_of.get(one.order, ("?", None))
            if one.p_small < 1e-6:
                self._say(
                    self._is_certified(level),
                    f"request {request}: noise {one.noise_std:.6g} is recorded, {one.measured_std:.6g} was added "
                    f"(so little has probability {one.p_small:.1e})",
                )
            elif not one.as_recorded:
                self._say(
                    self._is_certified(level),
                    f"request {request}: the noise that was added is not normal with deviation {one.noise_std:.6g} "
                    f"(p = {one.p_normal:.1e})",
                )

    def _subject(self, watched: Watched, subjects: int, rows: list[NodeDistance], evidence: Evidence) -> SubjectAudit:
        edges = charged_edges(self.reader, watched)
        findings = list(self._findings(watched, rows, edges, evidence))
        share = replace(self.options.replays, mistake=self.options.replays.mistake / max(subjects, 1))
        releases = audit_releases(self.engine, watched, edges, evidence, self.normals, share)
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
        # A client that did not ask is bounded all the same, unless the run's accounting bounds nobody.
        certified = self._is_certified(watched.level) or (
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
            worst = max(broken, key=lambda one: one.distance - one.psi)
            yield (
                f"the truth is above Psi at {len(broken)} of {len(rows)} nodes, first at node {broken[0].node}; at "
                f"node {worst.node} it is {worst.distance:.6g}, Psi {worst.psi:.6g}"
            )
        yield from wrong_charges(watched, edges, evidence, slack)

    # -- attacks -------------------------------------------------------------------------------------------

    def _attacked(self) -> RequestRow | None:
        """The request whose release is attacked."""
        done = [one for one in self.reader.requests() if one.status == "done"]
        wanted = self.options.request
        if wanted is not None and wanted not in {one.request for one in done}:
            raise InputError(
                f"there is no finished request {wanted!r} in this run; it has "
                f"{', '.join(one.request for one in done) or 'none'}"
            )
        if not self.options.attacks or not done:
            return None
        if wanted is not None:
            return next(one for one in done if one.request == wanted)
        return max(done, key=lambda one: one.request_order or 0)

    def _before(self, row: RequestRow) -> EvaluationRow | None:
        """How the model that was the current one when the request came did on the clients' data."""
        subset = f"forgotten:{row.request}"
        earlier = [
            one for one in self.reader.evaluations() if one.subset == subset and one.node < (row.noise_node or 0)
        ]
        return earlier[0] if earlier else None

    def _models_wanted(self, row: RequestRow | None) -> set[int]:
        if row is None:
            return set()
        before = self._before(row)
        nodes = (None if before is None else before.node, row.final_node)
        return {node for node in nodes if node is not None}

    def _attack(self, row: RequestRow, watched: list[Watched], evidence: Evidence) -> AttackAudit | None:
        reader, engine, options = self.reader, self.engine, self.options
        models = dict(evidence.models)
        on_disk = reader.models()
        for node in self._models_wanted(row) - set(models):
            if node in on_disk:
                models[node] = reader.load_model(node)
        if row.final_node not in models:
            self.notes.append(f"the model that request {row.request} released is gone: it was not attacked")
            return None
        recorded = RecordedRequest(reader, row)
        gone = recorded.gone
        active = np.array([k for k in range(len(recorded.view.clients)) if k not in gone], dtype=np.int64)
        forgotten = np.array([self.view.index_of[name] for name in row.clients], dtype=np.int64)
        stop = recorded.terms.stop(recorded.view.spec.stop)
        scratch, rounds, _, _ = retrain_unrecorded(
            engine,
            active,
            stop,
            recorded.order,
            lambda one: self.progress("training Scratch", one.rounds, one.max_rounds),
        )
        named: dict[str, Vector] = {}
        before = self._before(row)
        if before is not None and before.node in models:
            named["before"] = models[before.node]
        named |= {"released": models[row.final_node], "scratch": scratch}
        data, scorer = self._data(), self._scorer()
        samples = self._samples(data, forgotten) if data is not None and scorer is not None else {}
        everyone = np.sort(np.concatenate([active, forgotten]))
        self.progress("relearning", 0, 1)
        forgetting = forgetting_audit(
            engine,
            scorer,
            named,
            engine.initial_model(recorded.order),
            forgotten,
            everyone,
            recorded.order,
            rounds,
            samples,
            self._watermark(named, forgotten),
            before,
            options.relearn_rounds,
        )
        membership = None
        if samples and scorer is not None:
            membership = self._membership(row, watched, evidence, named, scorer, samples, data)
        return AttackAudit(row.request, row.clients, membership, forgetting)

    def _membership(
        self,
        row: RequestRow,
        watched: list[Watched],
        evidence: Evidence,
        models: dict[str, Vector],
        scorer: Scorer,
        samples: dict[str, Samples],
        data: Any,
    ) -> MembershipAudit:
        options, engine = self.options, self.engine
        held_out = samples.get("held out")
        loss = loss_attack(scorer, models, samples["forgotten"], held_out) if held_out is not None else None
        if loss is None:
            self.notes.append("the data have no samples that nobody held: the loss-threshold attack was left out")
        noise_std, source = row.noise_std or 0.0, row.source_node
        candidates = [
            one
            for one in watched
            if one.request is not None
            and one.request.request == row.request
            and (one.subject, source) in evidence.sources
        ]
        certified = self._is_certified(row.level)
        bound = bound_rates(row.multiplier) if row.multiplier and certified else None
        rates, client, rounds = None, "", self._rounds_of(row).first(options.shadow_rounds)
        shares: list[float] | list[None] = [None, None]
        if candidates and noise_std > 0.0 and options.shadows >= 4 and method_named(row.method).protection == "noise":
            target = max(candidates, key=lambda one: evidence.distances[one.subject, source])  # type: ignore[index]
            client = ", ".join(target.names)
            own = stacked(data, list(target.clients))
            scores = shadow_scores(
                engine,
                scorer,
                evidence.sources[target.subject, source],  # type: ignore[index]
                noise_std,
                rounds,
                own,
                options.shadows,
                self.normals,
                lambda done, total: self.progress("shadow federations", done, total),
            )
            targets = [scorer.confidences(models[name], own) for name in ("released", "scratch")]
            rates, shares = lira(scores, targets)
        return MembershipAudit(
            samples["forgotten"].count,
            held_out.count if held_out is not None else 0,
            loss,
            client,
            rates,
            shares[0],
            shares[1],
            options.shadows if rates is not None else 0,
            len(rounds.positions),
            bound,
        )

    def _rounds_of(self, row: RequestRow) -> RecordedRounds:
        """The rounds between a request's noise and its release."""
        took_part = self.reader.participation()
        nodes = [one.node for one in self.reader.path(row.final_node) if one.node.node > (row.noise_node or 0)]
        rounds = [one for one in nodes if one.kind == "round"]
        return RecordedRounds(
            tuple(Position(one.branch, one.position - 1) for one in rounds),
            tuple(took_part.between(one.node, one.node).clients for one in rounds),
        )

    # -- data ----------------------------------------------------------------------------------------------

    def _data(self) -> Any:
        if self._clients is None and self.spec.data.name != PYTHON:
            self._clients = clients_from_spec(self.spec, self.data_folder)
        if self._clients is None:
            self.notes.append("the clients' samples are not at hand: attacks that look at them were left out")
        return self._clients

    def _scorer(self) -> Scorer | None:
        model = getattr(self.engine, "model", None)
        return None if model is None else Scorer(model, self.engine.layout.dtype)

    def _samples(self, data: Any, forgotten: np.ndarray) -> dict[str, Samples]:
        result = {"forgotten": stacked(data, forgotten.tolist())}
        held = held_out_from_spec(self.spec, self.data_folder)
        if held is not None:
            x, y = held
            rows = keyed_generator(self.spec.seed, "audit held out").permutation(x.shape[0])[:MOST_HELD_OUT]
            result["held out"] = Samples(x[rows], y[rows])
        return result

    def _watermark(self, models: dict[str, Vector], forgotten: np.ndarray) -> dict[str, WatermarkSuccess] | None:
        if not self.spec.data.watermark or self.spec.data.name == PYTHON:
            return None
        fresh, _ = engine_from_spec(self.spec, clients_from_spec(self.spec, self.data_folder, fresh_marks=True))
        return {
            name: WatermarkSuccess(
                self.engine.evaluate(model, forgotten).accuracy, fresh.evaluate(model, forgotten).accuracy
            )
            for name, model in models.items()
        }
