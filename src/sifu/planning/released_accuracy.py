"""How accurate the model would be that a request releases: a forecast from recorded evaluations, nothing more.

Retraining that is expected to come to its target ends there. Retraining that its terms end before that, or a model
that is released at once, is as accurate as the recorded curve after as many rounds, less what the new noise still
spoils (`planning.measure`).
"""

from __future__ import annotations

import math

import numpy as np

from sifu.core.method_info import CLOSED_FORM, METHOD_INFOS
from sifu.planning.forecast import Forecast
from sifu.planning.plan import Plan
from sifu.run.run_view import RunView


def released_accuracy(view: RunView, plan: Plan) -> float | None:
    """The accuracy expected on the clients that stay when the request is done; None where the record does not tell."""
    forecast = Forecast(view, plan.terms)
    tip = forecast.first.evaluated.get(view.path.nodes[view.path.tip].node)
    if tip is None or not math.isfinite(tip.accuracy):
        return None
    now = tip.accuracy + forecast.gain
    if plan.terms.method == CLOSED_FORM:
        return min(1.0, now)
    stop = plan.terms.stop(view.spec.stop)
    limit = 0 if plan.terms.release == "now" else stop.max_rounds
    if stop.target > 0.0 and plan.predicted_rounds is not None and plan.predicted_rounds <= limit:
        return stop.target
    if METHOD_INFOS[plan.terms.method].starts_from in ("initial", "merge") and plan.source_node is not None:
        return None  # nothing was recorded of models that are put together from others
    points = [(at, row.accuracy) for at, row in forecast.first.points if math.isfinite(row.accuracy)]
    if not points:
        return None
    done = 0 if plan.source_node is None else plan.source_rounds
    accuracy = float(np.interp(done + limit, [at for at, _ in points], [value for _, value in points]))
    if plan.noise_std > 0.0:
        measure = forecast.measure
        if measure is None or not measure.of_errors:
            return None
        ahead, place = np.array([float(limit)]), np.array([float(done + limit)])
        accuracy -= float(measure.harm(plan.noise_std, ahead, place)[0])
    elif plan.source_node == view.path.nodes[view.path.tip].node:
        accuracy = max(accuracy, now)  # it continues from the current model
    return float(np.clip(accuracy, 0.0, 1.0))
