"""Attacks on the model that a request released: membership, relearning, divergence from Scratch, watermarks."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sifu.api.run import Run
from sifu.audit.audit_report import AttackAudit, AuditOptions, AuditProgress
from sifu.audit.membership import (
    ForgettingAudit,
    MembershipAudit,
    RecordedRounds,
    WatermarkSuccess,
    attack_rates,
    bound_rates,
    lira,
    relearn_rounds,
    shadow_scores,
)
from sifu.audit.replay_evidence import Evidence, Watched
from sifu.core.engine import Engine, Evaluation, Position
from sifu.core.layout import Vector
from sifu.core.method_info import method_info
from sifu.core.operator_words import PYTHON
from sifu.core.round import NormalSource, SystemNormals, keyed_generator
from sifu.core.spec import Spec
from sifu.errors import InputError
from sifu.requests.certification import RecordedRequest
from sifu.requests.outcome import Measured, node_before
from sifu.run.clients_and_engine import clients_from_spec, engine_from_spec, held_out_from_spec
from sifu.run.coupled_replay import NoisedModel, retrain_unrecorded
from sifu.run.recorded_data import arranged_clients
from sifu.run.releases import with_noise
from sifu.run.run_view import RunView
from sifu.store.erased_figures import not_recomputed
from sifu.store.projection import EvaluationRow, RequestRow
from sifu.store.reader import RunReader, joined_remainders, plain_names
from sifu.store.release_files import released_model, released_node
from sifu.theory.participation import ClientIndices

if TYPE_CHECKING:
    from sifu.engines.sim.models import Samples, Scorer

MOST_HELD_OUT = 2000


@dataclass(eq=False)
class Audited:
    """Shared state of an audit; `notes` lists what could not be tested.

    `clients` holds names, x and y, or None to load the data that the spec names. `noised` returns the noised model of
    an edge.
    """

    run: Run
    reader: RunReader
    engine: Engine
    options: AuditOptions
    clients: Any
    data_folder: str | Path | None
    noised: NoisedModel | None
    progress: AuditProgress
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        seed = self.options.seed
        self.spec, self.view = Spec.from_mapping(self.reader.spec), RunView(self.reader)
        self.normals: NormalSource = SystemNormals() if seed is None else keyed_generator(seed, "audit")

    def as_released(self, model: Vector, node: int | None = None, normals: NormalSource | None = None) -> Vector:
        """Return a model as released: unchanged or, with `release.noise`, the stored release or a copy with new noise.

        Args:
            model: Model stored in the run folder.
            node: Its node; None if it is not a model of the run.
            normals: Source of fresh noise; by default the audit's source.
        """
        noise_std = self.spec.release.noise_std
        if noise_std == 0.0:
            return model
        if node is not None and node == released_node(self.reader):
            return released_model(self.reader)
        return with_noise(model, noise_std, normals or self.normals)


class ReleaseAttack:
    """Attacks on one request's release."""

    def __init__(self, audited: Audited) -> None:
        self._audited, self.reader, self.engine = audited, audited.reader, audited.engine
        self.options, self.spec, self.notes = audited.options, audited.spec, audited.notes

    def request(self) -> RequestRow | None:
        """Return the request whose release is attacked.

        None if no request is done, or if the networks of earlier releases no longer exist.
        """
        if self._audited.view.regime.tunes:
            return None
        erased, wanted = not_recomputed(self.reader), self.options.request
        done = [row for row in self.reader.requests() if row.status == "done" and row.request not in erased]
        if wanted in erased:
            raise InputError(
                f"the figures of request {wanted} were erased on {erased[wanted]}: it can no longer be audited"
            )
        if wanted is not None and wanted not in {request.request for request in done}:
            raise InputError(
                f"there is no finished request {wanted!r} in this run; it has "
                f"{', '.join(request.request for request in done) or 'none'}"
            )
        if not self.options.attacks or not done:
            return None
        if wanted is not None:
            return next(request for request in done if request.request == wanted)
        return max(done, key=lambda request: request.request_order or 0)

    def models_wanted(self, row: RequestRow | None) -> set[int]:
        """Return the nodes whose models the attacks need."""
        if row is None:
            return set()
        return {node for node in (node_before(self.reader, row), row.final_node) if node is not None}

    def execute(self, row: RequestRow, watched: list[Watched], evidence: Evidence) -> AttackAudit | None:
        """Run every attack that the available data allow; return None if the released model no longer exists."""
        from sifu.engines.sim.models import scorer_of

        reader, engine, progress = self.reader, self.engine, self._audited.progress
        models, on_disk = dict(evidence.models), reader.models()
        for node in self.models_wanted(row) - set(models):
            if node in on_disk:
                models[node] = reader.load_model(node)
        if row.final_node not in models:
            self.notes.append(f"the model that request {row.request} released is gone: it was not attacked")
            return None
        recorded = RecordedRequest(reader, row)
        gone = recorded.gone
        active = np.array([k for k in range(len(recorded.view.clients)) if k not in gone], dtype=np.int64)
        forgotten = np.array([self._audited.view.index_of[name] for name in row.clients], dtype=np.int64)
        again = [item.client for item in joined_remainders(reader) if item.request == row.request]
        active = np.append(active, np.array(again, dtype=np.int64))  # clients that stay with their remaining records
        scratch, rounds, _, _ = retrain_unrecorded(
            engine,
            active,
            recorded.terms.stop(recorded.view.spec.stop),
            recorded.order,
            lambda done: progress("training Scratch", done.rounds, done.max_rounds),
        )
        as_released = self._audited.as_released
        named = {"released": as_released(models[row.final_node], row.final_node), "scratch": as_released(scratch)}
        before = node_before(reader, row)
        if before is not None and before in models:
            named = {"before": as_released(models[before], before)} | named
        data, scorer = self._data(), scorer_of(engine)
        samples = self._samples(data, forgotten, row) if data is not None and scorer is not None else {}
        progress("relearning", 0, 1)
        forgetting = self._forgetting(recorded, named, forgotten, active, rounds, samples)
        membership = None
        if samples and scorer is not None:
            membership = self._membership(row, watched, evidence, named, scorer, samples, data)
        return AttackAudit(row.request, plain_names(reader, row.clients), membership, forgetting)

    def _forgetting(
        self,
        recorded: RecordedRequest,
        models: dict[str, Vector],
        forgotten: ClientIndices,
        active: ClientIndices,
        scratch_rounds: int,
        samples: dict[str, Samples],
    ) -> ForgettingAudit:
        """Compare the models `released` and `scratch` with each other and with the evaluation before the request."""
        from sifu.engines.sim.models import scorer_of

        engine, order, limit = self.engine, recorded.order, self.options.relearn_rounds
        evaluations = {name: engine.evaluate(models[name], forgotten) for name in ("released", "scratch")}
        accuracy, loss = (
            {name: getattr(probe, kind) for name, probe in evaluations.items()} for kind in ("accuracy", "loss")
        )
        relearn: dict[str, Any] = {}
        before: Evaluation | EvaluationRow | None = Measured.of(self.reader, recorded.request).forgotten_before
        if before is None and "before" in models:
            before = engine.evaluate(models["before"], forgotten)
        if before is not None:
            goal, everyone = (before.accuracy, before.loss), np.sort(np.concatenate([active, forgotten]))
            accuracy, loss = {"before": before.accuracy} | accuracy, {"before": before.loss} | loss
            relearn = {
                name: relearn_rounds(engine, models[name], goal, forgotten, everyone, order, limit)
                for name in evaluations
            }
        disagreement, scorer = {}, scorer_of(engine)
        if scorer is not None and scorer.labels:
            for name, probe in samples.items():
                pair = [scorer.predictions(models[kind], probe.x) for kind in evaluations]
                disagreement[name] = float(np.mean(pair[0] != pair[1]))
        released, scratch, start = (
            model.astype(np.float64) for model in (models["released"], models["scratch"], engine.initial_model(order))
        )
        return ForgettingAudit(
            accuracy,
            loss,
            scratch_rounds,
            relearn,
            limit,
            float(np.linalg.norm(released - scratch)),
            float(np.linalg.norm(scratch - start)),
            disagreement,
            self._watermark(models, forgotten),
        )

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
        from sifu.engines.sim.models import stacked

        options, held_out, loss = self.options, samples.get("held out"), None
        if held_out is None:
            self.notes.append("the data have no held-out samples: the loss-threshold attack was left out")
        else:
            loss = {
                name: attack_rates(-scorer.losses(model, samples["forgotten"]), -scorer.losses(model, held_out))
                for name, model in models.items()
            }
        noise_std, source = row.noise_std or 0.0, row.source_node
        candidates = [
            subject
            for subject in watched
            if subject.request is not None
            and subject.request.request == row.request
            and (subject.subject, source) in evidence.sources
        ]
        bound = bound_rates(row.multiplier) if row.multiplier and options.claims(row.level) else None
        rounds, count = self._rounds_of(row)[: options.shadow_rounds], 0 if held_out is None else held_out.count
        audit = MembershipAudit(samples["forgotten"].count, count, loss, bound, len(rounds))
        noised = noise_std > 0.0 and method_info(row.method).protection == "noise"
        if not candidates or not noised or options.shadows < 4:
            return audit
        target = max(candidates, key=lambda subject: evidence.distances[subject.subject, source])  # type: ignore[index]
        own = stacked(data, list(target.clients))
        scores = shadow_scores(
            self.engine,
            scorer,
            evidence.sources[target.subject, source],  # type: ignore[index]
            noise_std,
            rounds,
            own,
            options.shadows,
            self._audited.normals,
            lambda done, total: self._audited.progress("shadow federations", done, total),
        )
        rates, shares = lira(scores, [scorer.confidences(models[name], own) for name in ("released", "scratch")])
        return replace(
            audit,
            lira_client=", ".join(target.names),
            lira=rates,
            lira_released=shares[0],
            lira_scratch=shares[1],
            shadows=options.shadows,
        )

    def _rounds_of(self, row: RequestRow) -> RecordedRounds:
        """Return the rounds between a request's noise and its release."""
        took_part = self.reader.participation()
        nodes = [node.node for node in self.reader.path(row.final_node) if node.node.node > (row.noise_node or 0)]
        return [
            (Position(node.branch, node.position - 1), took_part.between(node.node, node.node).clients)
            for node in nodes
            if node.kind == "round"
        ]

    def _data(self) -> Any:
        clients = self._audited.clients
        if clients is None and self.spec.data.name != PYTHON:
            return arranged_clients(self.reader, clients_from_spec(self.spec, self._audited.data_folder)).complete()
        if clients is None:
            self.notes.append("the clients' samples are not available: attacks that look at them were left out")
        return clients

    def _samples(self, data: Any, forgotten: np.ndarray, row: RequestRow) -> dict[str, Samples]:
        from sifu.engines.sim.models import Samples, stacked

        result = {"forgotten": stacked(data, forgotten.tolist())}
        if row.records:  # the client's remaining records are not forgotten
            turns = {item.request: item for item in joined_remainders(self.reader)}
            first, gone = data[turns[row.request].first], list(row.records)
            result["forgotten"] = Samples(np.asarray(first.x)[gone], np.asarray(first.y)[gone])
        held = held_out_from_spec(self.spec, self._audited.data_folder)
        if held is not None:
            x, y = held
            rows = keyed_generator(self.spec.seed, "audit held out").permutation(x.shape[0])[:MOST_HELD_OUT]
            result["held out"] = Samples(x[rows], y[rows])
        return result

    def _watermark(self, models: dict[str, Vector], forgotten: np.ndarray) -> dict[str, WatermarkSuccess] | None:
        if not self.spec.data.watermark or self.spec.data.name == PYTHON:
            return None
        fresh, _ = engine_from_spec(
            self.spec, clients_from_spec(self.spec, self._audited.data_folder, fresh_marks=True)
        )
        return {
            name: WatermarkSuccess(
                self.engine.evaluate(model, forgotten).accuracy, fresh.evaluate(model, forgotten).accuracy
            )
            for name, model in models.items()
        }
