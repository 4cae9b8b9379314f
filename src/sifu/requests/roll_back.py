"""Rollback of a request: its event in the ledger, and the files that it erases."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from sifu.core.engine import Engine, Evaluation, evaluate_present
from sifu.core.ledger import finite_or_text
from sifu.core.request_terms import Terms
from sifu.core.round import noise_rounding
from sifu.methods.base import Start
from sifu.planning.plan import Plan
from sifu.requests.certification import committed_model
from sifu.requests.files_to_erase import nodes_to_erase, statistics_to_erase, write_sum_left
from sifu.run.group_state import merge_rows
from sifu.run.psi_of_everyone import track_everyone
from sifu.run.run_view import RunView, evaluation_row, measures_training_rows
from sifu.run.training import LARGEST_PSI, largest_psi
from sifu.store.actors import actor_name
from sifu.store.client_accuracy import remove_standing
from sifu.store.projection import EvaluationRow, NewEvent, NewModel, NewRows
from sifu.store.release_files import released_model, released_node
from sifu.store.writer import RunWriter
from sifu.theory.history import NodeKind, PathNode
from sifu.theory.rounding import norm


def may_measure(writer: RunWriter, view: RunView, terms: Terms) -> bool:
    """Return whether a request may record evaluations on the data of its clients.

    A strict request records none, and a model that was not released is not evaluated: both would record information
    about the data to be forgotten.
    """
    released = released_node(writer) == writer.tip
    return terms.retention != "strict" and released and measures_training_rows(view)


def measured_rows(measured: Iterable[tuple[int, str, Evaluation]]) -> list[EvaluationRow]:
    """Return the rows of the evaluations (node, subset, evaluation) that have samples and a finite loss.

    Clients on other machines are not asked to evaluate once they have asked to be forgotten, so some evaluations have
    no samples. A failed evaluation must not stop the request.
    """
    return [
        evaluation_row(node, subset, evaluation)
        for node, subset, evaluation in measured
        if evaluation.samples.any() and math.isfinite(evaluation.loss)
    ]


@dataclass
class RollBack:
    """Rollback of a request, derived from its plan and the starting model."""

    writer: RunWriter
    engine: Engine
    view: RunView
    plan: Plan
    request: str
    start: Start

    def __post_init__(self) -> None:
        plan, on_disk = self.plan, self.writer.models()
        self.fresh = plan.source_node is None
        self.noise_node = 1 + max(self.writer.nodes_by_number())
        self.source = None if plan.source_node is None else on_disk.get(plan.source_node)
        # A client is still active here if only some of its records are forgotten.
        self.others = np.setdiff1d(self.view.active, self.view.indices(plan.terms.clients))
        erased_by = self.view.exposures(plan.subjects), -1 if self.fresh else plan.source_depth, plan.terms.retention
        self.erased_models = nodes_to_erase(self.view, set(on_disk), *erased_by)

    def record(self) -> None:
        """Record the rollback in the ledger."""
        rows, models, evaluations = self._rows(), self._models(), self._evaluations()
        gone = {client for subject in self.plan.subjects for client in subject.clients}
        dropped_statistics = statistics_to_erase(self.writer.statistics().values(), gone)
        statistics = write_sum_left(self.writer, self.view, gone, self.noise_node)
        rolled_back = NewEvent(
            "rolled back",
            self._payload(),
            rows=rows,
            models=models,
            dropped_models=sorted(self.erased_models),
            statistics=statistics,
            dropped_statistics=dropped_statistics,
            evaluations=evaluations,
            for_good=self.plan.terms.retention == "strict",
        )
        self.writer.record(rolled_back)
        remove_standing(self.writer.folder)

    def _rows(self) -> NewRows:
        """Return the row of the new starting model and, for a merge, the rows of its members."""
        plan, model, merged = self.plan, self.start.model, self.start.merged
        root = model if self.fresh else self.writer.load_model(self.view.nodes[0].node)
        distance = norm(model.astype(np.float64) - root.astype(np.float64))
        if merged is not None:
            row, members = merge_rows(self.view, merged, self.noise_node, plan.order, 0, plan.order, distance)
            return NewRows(nodes=[row], participation=members)
        kind: NodeKind = "initial" if self.fresh else "noise"
        rounded = plan.noise_std > 0.0 and self.view.facts.rounding_bounded
        node = PathNode(
            self.noise_node,
            plan.source_node,
            kind,
            plan.order,
            0,
            rounding=noise_rounding(model) if rounded else 0.0,
            noise_std=plan.noise_std,
            order=plan.order,
            distance=distance,
        )
        return NewRows(nodes=[node])

    def _models(self) -> list[NewModel]:
        """Return the new starting model, and also its source if the source was not kept; later requests may need it."""
        unknown = self.start.merged is not None
        psi_max = LARGEST_PSI if unknown else 0.0
        if not self.fresh and not unknown:
            at_source = track_everyone(RunView(self.writer, tip=self.plan.source_node))
            psi_max = largest_psi(at_source.total(self.others))
        models = [NewModel(self.noise_node, self.start.model, kept=True, psi_max=psi_max)]
        source = self.source
        if source is not None and not source.kept and source.node not in self.erased_models:
            models.append(NewModel(source.node, self.writer.load_model(source.node), kept=True, psi_max=psi_max))
        return models

    def _evaluations(self) -> list[EvaluationRow]:
        """Return evaluations of the current and the new starting model, or [] if the request may record none."""
        if not may_measure(self.writer, self.view, self.plan.terms):
            return []
        tip = self.writer.tip
        asking = np.array(self.view.indices(self.plan.terms.clients), dtype=np.int64)
        current, new = released_model(self.writer), self.start.model
        return measured_rows(
            [
                (tip, f"forgotten:{self.request}", evaluate_present(self.engine, current, asking)),
                (tip, f"remaining:{self.request}", evaluate_present(self.engine, current, self.others)),
                (self.noise_node, f"forgotten:{self.request}", evaluate_present(self.engine, new, asking)),
            ]
        )

    def _payload(self) -> dict[str, Any]:
        plan, source, start = self.plan, self.source, self.start
        payload: dict[str, Any] = {
            "request": self.request,
            "actor": actor_name(),
            "run": {"tip": str(self.noise_node), "phase": "retraining"},
            "choice": {
                "method": plan.terms.method,
                "request_order": plan.order,
                "multiplier": plan.multiplier,
                "noise_std": plan.noise_std,
                "source_node": plan.source_node,
                "wanted_node": plan.wanted_node,
                "noise_node": self.noise_node,
            },
            "subjects": [{"subject": subject.subject, "clients": list(subject.clients)} for subject in plan.subjects],
            "charges": [
                {"subject": cost.subject.subject, "psi": repr(finite_or_text(cost.psi)), "charge": cost.charge}
                for cost in plan.charges
            ],
            "source_model": committed_model(source.node, source.digest) if source else None,
            "left_out": sorted(self.view.left_out - set(self.view.indices(plan.terms.clients))),
            "remaining_models": sorted(set(self.writer.models()) - self.erased_models),
        }
        if start.merged is not None:
            payload["merges"] = start.merged.rows(self.noise_node)
        if plan.auto is not None:
            payload["auto"] = plan.auto.to_mapping()
        return payload
