"""Whether a request was carried out by the method that was asked for, or by the one that `auto` had to take.

The figures that the choice compares are forecasts: nothing is promised by them, and they are not recomputed. That the
rule was kept is: the way taken is the one the rule takes from the recorded figures, its level is the one that its
premises give, and no certificate is below the level asked for (docs/theory.md, section 9.7).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sifu.choices import LEVELS
from sifu.core.method_info import METHOD_INFOS
from sifu.core.premises import level_of
from sifu.core.request_terms import AUTO
from sifu.core.spec import RIDGE
from sifu.planning.ways import Compared, choose_way, least_level
from sifu.requests.certification import RecordedRequest
from sifu.store.table_rows import RequestRow


def check_choice_of_method(request: RequestRow, recorded: RecordedRequest, content: dict[str, Any]) -> Iterator[str]:
    """The method, what it was held against, and the level asked for."""
    name, auto = f"request {request.request}", content.get("auto")
    level = level_of(recorded.premises(), exact=recorded.untouched, fresh=request.source_node is None)
    history = recorded.view.record_history
    restored = bool(history.complete or history.older)
    floor = request.terms.level
    if floor is not None and not restored and LEVELS.index(level) < LEVELS.index(floor):
        yield f"{name}: level {floor} was asked for, and it was carried out at level {level}"
    if request.terms.method != AUTO:
        if request.method != request.terms.method or auto is not None:
            yield f"{name}: method {request.terms.method} was asked for, {request.method} carried it out"
        return
    if auto is None:
        yield f"{name}: the method was left to auto, and what {request.method} was held against is not recorded"
        return
    least = auto["least_level"]
    compared = [Compared(way["method"], way["level"], way["rounds"]) for way in auto["ways"]]
    methods = [way.method for way in compared]
    always = "closed_form" if recorded.view.spec.model.kind == RIDGE else "scratch"
    wrong = len(set(methods)) < len(methods) or set(methods) - set(METHOD_INFOS)
    if wrong or (request.terms.sigma == AUTO and always not in methods):
        yield f"{name}: auto had {', '.join(methods) or 'nothing'} to choose from, which cannot be all there was"
    if LEVELS.index(least) < LEVELS.index(least_level(recorded.request.terms, least)):
        yield f"{name}: auto chose among levels from {least} on, below the {floor} asked for"
    approved = least_level(request.terms)
    if recorded.view.spec.requests.approval != "none" and least != approved:
        yield f"{name}: auto chose among levels from {least} on, but the terms approved say {approved}"
    taken = choose_way(compared, least)
    if taken != request.method:
        yield f"{name}: {request.method} carried it out, by the recorded figures auto had to take {taken}"
    stated = next((way.level for way in compared if way.method == request.method), None)
    if stated != level and not restored:
        yield f"{name}: auto took {request.method} for its level {stated}, recomputed {level}"
