"""FedAccum and FedEraser: heuristics that replay kept rounds of stored updates.

Both start from the initial model and apply stored updates U_i of the remaining clients, in every kept round

    theta' = theta + g sum_i w_i U_i        with w_i the weights of its remaining participants;

rounds that were not kept are skipped without a substitute. Then training continues without the clients. The updates
were made from models that the forgotten clients influenced, so nothing bounds anyone's influence on the new model: its
node is of kind `heuristic`, from which on every Psi is infinite.

FedAccum uses the stored updates unchanged: no client works for it, so it takes no rounds. FedEraser (Liu et al. 2021)
gets directions from new training and lengths from stored updates: the remaining participants take K_cali local steps
d_i from the calibrated model, and U~_i = ||U_i|| d_i / ||d_i|| replaces U_i, also for later requests.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from sifu import InputError, NotCertifiableError, RequestTerms, RoundRejectedError
from sifu.core.engine import Engine, Position
from sifu.core.layout import Vector
from sifu.core.method_info import MethodInfo
from sifu.methods.base import Method, RecordedReplay, Replay, RoundUpdates, Start, plan_from
from sifu.planning.plan import Plan
from sifu.run.run_view import RunView
from sifu.store.statistics_files import UpdatesRow, read_updates
from sifu.theory.arrays import Floats
from sifu.theory.participation import ClientIndices
from sifu_paper.baselines.spec_keys import CALIBRATION_STEPS, UPDATES_EVERY


@dataclass(frozen=True)
class KeptRound:
    """Kept round with its remaining participants."""

    row: UpdatesRow
    clients: ClientIndices


def rounds_to_replay(stored: Iterable[UpdatesRow], gone: set[int]) -> list[KeptRound]:
    """Return the kept rounds without the clients that are `gone`; skip rounds without other clients."""
    remaining = ((row, sorted(set(row.clients) - gone)) for row in stored)
    return [KeptRound(row, np.array(clients, dtype=np.int64)) for row, clients in remaining if clients]


def clients_gone(view: RunView, terms: RequestTerms) -> set[int]:
    """Return all clients forgotten before, by this request, or left out by an approved one that still waits."""
    return view.forgotten | view.left_out | {view.index_of[name] for name in terms.clients}


def promises_broken(view: RunView, stored: Iterable[UpdatesRow], before_order: int) -> list[str]:
    """Return the requests whose certificate would no longer hold if the stored updates were used.

    An update is a function of the model it was made from. If that model has an uncovered influence of a client
    forgotten earlier, any use of the update releases it again. Training noise covers nobody here: it was counted for
    the whole sums of the rounds, and a replay uses only some of their noised updates.
    """
    path = view.path
    starts = {
        depth if path.nodes[depth].kind == "heuristic" else depth - 1
        for depth in (path.depth_of[row.node] for row in stored)
    }
    promised = {
        request.request: request.request_order
        for request in view.requests
        if request.request_order is not None
        and request.request_order < before_order
        and request.level not in (None, "none")
    }
    broken = set()
    for protection in ("noise", "training noise"):
        for exposure in view.exposures(view.earlier_subjects(before_order, protection)):
            held = exposure.psi_to_hide if protection == "noise" else exposure.psi_without_noise
            order = exposure.subject.order
            if order in promised.values() and any(held(depth) > 0.0 for depth in starts if depth >= 0):
                broken.add(order)
    return [request for request, order in promised.items() if order in broken]


class Replaying(Method):
    """Method that replays stored updates from the initial model; `note` describes the replay, with the number of
    {rounds}.
    """

    note: ClassVar[str]

    def check_run(self, view: RunView) -> None:
        """Refuse if there is nothing to replay, or if replaying would break a certificate."""
        if view.spec.extension(UPDATES_EVERY) == 0:
            raise InputError(
                f"{self.info.name} replays stored updates of clients and this run keeps none: set keep.updates_every "
                "in the spec (2, for every second round) and train again"
            )
        broken = promises_broken(view, view.stored_updates, view.next_order)
        if broken:
            raise NotCertifiableError(
                f"{self.info.name} would replay updates made from models that held clients forgotten with a "
                f"certificate (request {', '.join(broken)}), which would then no longer hold: nothing was changed. "
                "Use sifu or scratch"
            )

    def plan(self, view: RunView, terms: RequestTerms) -> Plan:
        """Plan to replay every kept round from the initial model, without noise, charges or promises."""
        replayed = len(rounds_to_replay(view.stored_updates, clients_gone(view, terms)))
        return replace(
            plan_from(self, view, terms, 0),
            psi=math.inf,
            untouched=False,
            predicted_rounds=None,
            predicted_interval=None,
            expected_rounds=None,
            notes=(self.note.format(rounds=replayed),),
        )

    def bytes_kept(self, view: RunView) -> int:
        """Return the size of all stored updates on disk."""
        return sum(row.bytes for row in view.reader.updates().values())

    def expected_replay(self, recorded: RecordedReplay) -> Replay:
        """Return the rounds that the request had to replay, and the certificates that replaying them breaks."""
        kept = rounds_to_replay(recorded.stored, recorded.gone)
        broken = tuple(
            f"it replayed updates that hold clients of request {request}, whose certificate that breaks"
            for request in promises_broken(recorded.view, recorded.stored, recorded.order)
        )
        return Replay(tuple(tuple(kept_round.clients.tolist()) for kept_round in kept), 0, broken)

    def check_replayed_model(self, view: RunView, node: int, parts: Sequence[UpdatesRow]) -> Iterator[str]:
        """Yield a problem if the model is not the initial one plus the updates stored as its parts."""
        model = initial_model(view).astype(np.float64)
        for row in parts:
            clients = np.array(sorted(row.clients), dtype=np.int64)
            model = move(view, model, load(view, KeptRound(row, clients)))
        recorded = view.reader.load_model(node).astype(np.float64)
        if np.linalg.norm(recorded - model) > 1e-6 * np.linalg.norm(recorded):
            yield f"updates: the model of node {node} is not the initial one moved by the updates stored with it"


def move(view: RunView, model: Floats, updates: RoundUpdates) -> Floats:
    """Return theta + g sum_i w_i U_i, with weights over the clients in `updates`."""
    samples = np.array([view.clients[client].samples for client in updates.clients.tolist()], dtype=np.float64)
    total = float(samples.sum())
    if total == 0.0:
        return model
    moved = model + view.facts.server_rate * (samples / total) @ updates.values.astype(np.float64)
    if not np.all(np.isfinite(moved)):
        raise RoundRejectedError("a replayed round made a model with NaN or Inf: nothing was changed; use scratch")
    return moved


def initial_model(view: RunView) -> Vector:
    """Return the first model of the active history."""
    return view.reader.load_model(view.path.nodes[0].node)


def load(view: RunView, kept: KeptRound) -> RoundUpdates:
    """Return the stored updates of the remaining participants of a kept round."""
    stored, clients = read_updates(view.reader.folder, kept.row), kept.clients.tolist()
    values, salts = (np.stack([held[client] for client in clients]) for held in (stored.values, stored.salts))
    return RoundUpdates(kept.clients, values, salts)


class FedAccum(Replaying):
    """Method that replays without calibration."""

    info: ClassVar[MethodInfo] = MethodInfo(
        "fed_accum",
        "add the kept updates of the others up again from the initial model; proves nothing",
        certifies=False,
        protection="nothing",
        starts_from="initial",
        control=True,
    )
    note: ClassVar[str] = "the updates of {rounds} kept rounds are added up again"

    def expected_replay(self, recorded: RecordedReplay) -> Replay:
        """Return the rounds to replay; their updates must be unchanged, bit for bit."""
        changed = tuple(
            f"{written['file']} does not hold the updates of {kept.row.file}"
            for kept, written in zip(rounds_to_replay(recorded.stored, recorded.gone), recorded.written, strict=False)
            if any(kept.row.clients[int(client)] != digest for client, digest in written["clients"].items())
        )
        replay = super().expected_replay(recorded)
        return replace(replay, problems=(*replay.problems, *changed))

    def starting_model(self, view: RunView, plan: Plan, engine: Engine) -> Start:
        """Return the sum; keep its updates for the next request."""
        kept = rounds_to_replay(view.stored_updates, clients_gone(view, plan.terms))
        model = initial_model(view).astype(np.float64)
        replayed = []
        for kept_round in kept:
            updates = load(view, kept_round)
            model = move(view, model, updates)
            replayed.append(updates)
        return Start(model.astype(engine.layout.dtype), replayed=tuple(replayed))


class FedEraser(Replaying):
    """Method that replays with calibration."""

    info: ClassVar[MethodInfo] = MethodInfo(
        "fed_eraser",
        "replay the kept rounds without the client, calibrated by a few local steps; proves nothing",
        certifies=False,
        protection="nothing",
        starts_from="initial",
        control=True,
    )
    note: ClassVar[str] = "{rounds} kept rounds are replayed, each with a round of calibration"

    def expected_replay(self, recorded: RecordedReplay) -> Replay:
        """Return the rounds to replay, at most as many as the request may take; each counts as a round."""
        replay = super().expected_replay(recorded)
        parts = replay.parts[: recorded.terms.stop(recorded.view.spec.stop).max_rounds]
        return replace(replay, parts=parts, rounds=len(parts))

    def starting_model(self, view: RunView, plan: Plan, engine: Engine) -> Start:
        """Return the calibrated model; every calibration round counts, with its local steps and traffic."""
        kept = rounds_to_replay(view.stored_updates, clients_gone(view, plan.terms))
        kept = kept[: plan.terms.stop(view.spec.stop).max_rounds]
        steps = view.spec.extension(CALIBRATION_STEPS) or max(1, view.spec.local.steps // 2)
        dtype = engine.layout.dtype
        model = initial_model(view).astype(np.float64)
        replayed = []
        for number, kept_round in enumerate(kept):
            directions = engine.local_updates(
                model.astype(dtype), Position(plan.order, number), kept_round.clients, steps
            )
            directions = directions.astype(np.float64)
            lengths = np.linalg.norm(load(view, kept_round).values.astype(np.float64), axis=1)
            norms = np.linalg.norm(directions, axis=1)
            # A client that does not move gives no direction, so it does not move the model either.
            scale = np.divide(lengths, norms, out=np.zeros_like(norms), where=norms > 0.0)
            updates = RoundUpdates(kept_round.clients, (scale[:, None] * directions).astype(dtype))
            model = move(view, model, updates)
            replayed.append(updates)
        trained = sum(kept_round.clients.size for kept_round in kept)
        return Start(
            model.astype(dtype),
            rounds=len(kept),
            local_steps=trained * steps,
            bytes_sent=2 * trained * engine.layout.size * np.dtype(dtype).itemsize,
            replayed=tuple(replayed),
        )
