"""Attacks on the model that a request released: membership inference and relearning."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from sifu.audit.audit_report import AttackAudit
from sifu.audit.audited import Audited
from sifu.audit.membership import (
    ForgettingAudit,
    MembershipAudit,
    RecordedRounds,
    attack_rates,
    bound_rates,
    lira,
    relearn_rounds,
    shadow_scores,
)
from sifu.audit.replay_evidence import Evidence, Watched
from sifu.core.engine import Evaluation, Position
from sifu.core.layout import Vector
from sifu.core.method_info import method_info
from sifu.core.round import keyed_generator
from sifu.errors import InputError
from sifu.requests.certification import RecordedRequest
from sifu.requests.outcome import Measured, node_before
from sifu.run.coupled_replay import retrain_unrecorded
from sifu.store.erased_figures import not_recomputed
from sifu.store.projection import EvaluationRow, RequestRow
from sifu.store.reader import RunReader, joined_remainders, plain_names
from sifu.theory.participation import ClientIndices

if TYPE_CHECKING:
    from sifu.engines.sim.scorers import Samples, Scorer

MOST_HELD_OUT = 2000


def attacked_request(audited: Audited) -> RequestRow | None:
    """Return the request whose release is attacked, or None if there is nothing to attack."""
    reader, wanted = audited.reader, audited.options.request
    erased = not_recomputed(reader)
    done = {row.request: row for row in reader.requests() if row.status == "done" and row.request not in erased}
    if wanted in erased:
        raise InputError(
            f"the figures of request {wanted} were erased on {erased[wanted]}: it can no longer be audited"
        )
    if wanted is not None and wanted not in done:
        raise InputError(f"there is no finished request {wanted!r} in this run; it has {', '.join(done) or 'none'}")
    if not audited.options.attacks or not done:
        return None
    return done[wanted] if wanted is not None else max(done.values(), key=lambda row: row.request_order or 0)


def models_wanted(reader: RunReader, row: RequestRow | None) -> set[int]:
    """Return the nodes whose models the attacks need."""
    if row is None:
        return set()
    return {node for node in (node_before(reader, row), row.final_node) if node is not None}


def attack_release(audited: Audited, row: RequestRow, watched: list[Watched], evidence: Evidence) -> AttackAudit | None:
    """Run every attack that the available data allow; return None if the released model no longer exists."""
    from sifu.engines.sim.scorers import scorer_of

    reader, engine, progress = audited.reader, audited.engine, audited.progress
    models, on_disk = dict(evidence.models), reader.models()
    for node in models_wanted(reader, row) - set(models):
        if node in on_disk:
            models[node] = reader.load_model(node)
    if row.final_node not in models:
        audited.notes.append(f"the model that request {row.request} released is gone: it was not attacked")
        return None
    recorded = RecordedRequest(reader, row)
    stay = [client for client in range(len(recorded.view.clients)) if client not in recorded.gone]
    # These clients rejoined with their remaining records.
    again = [item.client for item in joined_remainders(reader) if item.request == row.request]
    active = np.array([*stay, *again], dtype=np.int64)
    forgotten = np.array([audited.view.index_of[name] for name in row.clients], dtype=np.int64)
    scratch, rounds, _, _ = retrain_unrecorded(
        engine,
        active,
        recorded.terms.stop(recorded.view.spec.stop),
        recorded.order,
        lambda done: progress("training Scratch", done.rounds, done.max_rounds),
    )
    as_released = audited.as_released
    named = {"released": as_released(models[row.final_node], row.final_node), "scratch": as_released(scratch)}
    before = node_before(reader, row)
    if before is not None and before in models:
        named = {"before": as_released(models[before], before)} | named
    data, scorer = audited.data(), scorer_of(engine)
    if data is None:
        audited.notes.append("the clients' samples are not available: attacks that look at them were left out")
    samples = _samples(audited, data, forgotten, row) if data is not None and scorer is not None else {}
    progress("relearning", 0, 1)
    forgetting = _forgetting(audited, recorded, named, forgotten, active, rounds, samples)
    membership = None
    if samples and scorer is not None:
        membership = _membership(audited, row, watched, evidence, named, scorer, samples, data)
    return AttackAudit(row.request, plain_names(reader, row.clients), membership, forgetting)


def _forgetting(
    audited: Audited,
    recorded: RecordedRequest,
    models: dict[str, Vector],
    forgotten: ClientIndices,
    active: ClientIndices,
    scratch_rounds: int,
    samples: dict[str, Samples],
) -> ForgettingAudit:
    """Compare the models `released` and `scratch` with each other and with the evaluation before the request."""
    from sifu.engines.sim.scorers import scorer_of

    engine, order, limit = audited.engine, recorded.order, audited.options.relearn_rounds
    evaluations = {name: engine.evaluate(models[name], forgotten) for name in ("released", "scratch")}
    accuracy, loss = (
        {name: getattr(probe, kind) for name, probe in evaluations.items()} for kind in ("accuracy", "loss")
    )
    relearn: dict[str, Any] = {}
    before: Evaluation | EvaluationRow | None = Measured.of(audited.reader, recorded.request).forgotten_before
    if before is None and "before" in models:
        before = engine.evaluate(models["before"], forgotten)
    if before is not None:
        goal, everyone = (before.accuracy, before.loss), np.sort(np.concatenate([active, forgotten]))
        accuracy, loss = {"before": before.accuracy} | accuracy, {"before": before.loss} | loss
        relearn = {
            name: relearn_rounds(engine, models[name], goal, forgotten, everyone, order, limit) for name in evaluations
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
    )


def _membership(
    audited: Audited,
    row: RequestRow,
    watched: list[Watched],
    evidence: Evidence,
    models: dict[str, Vector],
    scorer: Scorer,
    samples: dict[str, Samples],
    data: Any,
) -> MembershipAudit:
    from sifu.engines.sim.scorers import stacked

    options, held_out, loss = audited.options, samples.get("held out"), None
    if held_out is None:
        audited.notes.append("the data have no held-out samples: the loss-threshold attack was left out")
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
    rounds, count = _rounds_of(audited.reader, row)[: options.shadow_rounds], 0 if held_out is None else held_out.count
    audit = MembershipAudit(samples["forgotten"].count, count, loss, bound, len(rounds))
    noised = noise_std > 0.0 and method_info(row.method).protection == "noise"
    if not candidates or not noised or options.shadows < 4:
        return audit
    target = max(candidates, key=lambda subject: evidence.distances[subject.subject, source])  # type: ignore[index]
    own = stacked(data, list(target.clients))
    scores = shadow_scores(
        audited.engine,
        scorer,
        evidence.sources[target.subject, source],  # type: ignore[index]
        noise_std,
        rounds,
        own,
        options.shadows,
        audited.normals,
        lambda done, total: audited.progress("shadow federations", done, total),
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


def _rounds_of(reader: RunReader, row: RequestRow) -> RecordedRounds:
    """Return the recorded rounds between a request's noise and its release."""
    took_part = reader.participation()
    nodes = [node for node in reader.path(row.final_node) if node.node > (row.noise_node or 0)]
    return [
        (Position(node.branch, node.position - 1), took_part.between(node.node, node.node).clients)
        for node in nodes
        if node.kind == "round"
    ]


def _samples(audited: Audited, data: Any, forgotten: np.ndarray, row: RequestRow) -> dict[str, Samples]:
    from sifu.engines.sim.scorers import Samples, stacked

    result = {"forgotten": stacked(data, forgotten.tolist())}
    if row.records:  # the client's remaining records are not forgotten
        turns = {item.request: item for item in joined_remainders(audited.reader)}
        first, gone = data[turns[row.request].first], list(row.records)
        result["forgotten"] = Samples(np.asarray(first.x)[gone], np.asarray(first.y)[gone])
    held = audited.held_out()
    if held is not None:
        x, y = held
        rows = keyed_generator(audited.spec.seed, "audit held out").permutation(x.shape[0])[:MOST_HELD_OUT]
        result["held out"] = Samples(x[rows], y[rows])
    return result
