"""How many common rounds a merge of groups needs to come back to the target (docs/theory.md, section 15).

The run has done it once: after the first merge of all S groups, moved on by the same factor as every later one, the
common phase took r rounds to the target, after R rounds apart. A request merges the share q of the groups that is left.
What those left out had learned must be learned again, by everyone together:

    rounds = r + c (1 - q) R,    c = 0.1,

never more than the R + r that a fresh model is given. A request that was carried out by groups before corrects it: the
median of what such requests took over what the formula says of them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from sifu.planning.forecast import Forecast, Prediction
from sifu.run.run_view import RunView
from sifu.store.reader import RunReader

LEARNED_AGAIN = 0.1
"""c: a common round is worth about ten of those apart that the left-out groups had done."""
WIDTH = 2.0
"""The interval reaches this factor either way, and a round: merges scatter (22 and 46 rounds for two seeds)."""


def healing_rounds(common: float, apart: float, share_left: float) -> float:
    """Rounds after a merge of a share of the groups.

    >>> healing_rounds(10.0, 100.0, 0.9), healing_rounds(10.0, 100.0, 0.5)
    (11.0, 15.0)
    """
    return min(common + LEARNED_AGAIN * (1.0 - share_left) * apart, common + apart)


def predict_healing(view: RunView, forecast: Forecast, merged: int) -> tuple[float, Prediction | None]:
    """Common rounds after a merge of this many groups: what is expected, and a prediction where there was a target."""
    apart, count = view.spec.groups.rounds, view.spec.groups.count
    common = max(0.0, float(forecast.first.length - apart))
    expected = healing_rounds(common, apart, merged / count) * _correction(view.reader, common, apart, count)
    if forecast.training is None:
        return expected, None
    low, high = expected / WIDTH - 1.0, expected * WIDTH + 1.0
    return expected, Prediction(round(expected), max(0, math.floor(low)), math.ceil(high))


def _correction(reader: RunReader, common: float, apart: float, count: int) -> float:
    """What earlier requests by groups took over what was to be expected; 1 where there were none."""
    nodes = reader.nodes_by_number()
    parts: dict[int, int] = {}
    for row in reader.merges():
        parts[row.node] = parts.get(row.node, 0) + 1
    ratios: Sequence[float] = [
        (nodes[request.final_node].node.position + 1.0)
        / (healing_rounds(common, apart, parts[request.noise_node] / count) + 1.0)
        for request in reader.requests()
        if request.noise_node in parts and request.final_node is not None
    ]
    return statistics.median(ratios) if ratios else 1.0


def rebuild_client_rounds(view: RunView, members: Sequence[int]) -> int:
    """Client-rounds of building groups again with this many remaining members each."""
    return sum(members) * view.spec.groups.rounds
