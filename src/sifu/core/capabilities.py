"""Optional capabilities of engines, each declared by inheriting its class.

A misspelled optional method would silently never be called. An engine whose `leave_out` is never called, for example,
would continue to contact forgotten clients. Every engine is therefore checked before use.
"""

from __future__ import annotations

from difflib import get_close_matches

from sifu.core.closed_form_engine import HasRecords, MaskedStatisticsEngine, StatisticsEngine
from sifu.core.engine import (
    Engine,
    LacksData,
    LeavesOut,
    LosesRounds,
    MayNotEvaluate,
    NotesIncidents,
    RunsGroupRounds,
    ShowsSamples,
)
from sifu.core.round_stream import RunsAhead, StreamsGroupRounds
from sifu.errors import InputError

CAPABILITIES: dict[str, type] = {
    "absent": LacksData,
    "collect_sum": MaskedStatisticsEngine,
    "evaluates": MayNotEvaluate,
    "leave_out": LeavesOut,
    "loses": LosesRounds,
    "records_of": HasRecords,
    "run_group_rounds": RunsGroupRounds,
    "run_rounds": RunsAhead,
    "sample_digests": ShowsSamples,
    "stream_group_rounds": StreamsGroupRounds,
    "take_incidents": NotesIncidents,
}
"""Class that an engine must inherit to provide an optional member, by the name of the member."""
NEVER_IGNORED = ("collect_sum", "leave_out", "loses")
"""Members that must be declared even if the engine provides them through `__getattr__`: runs depend on them."""
REQUIRED = {name for protocol in (Engine, StatisticsEngine) for name in dir(protocol) if not name.startswith("_")}
CLOSENESS = 0.85
"""Smallest similarity, by `difflib`, at which a name counts as a misspelling."""


def check_capabilities(engine: Engine) -> None:
    """Refuse an engine that has an optional member, perhaps misspelled, without declaring its capability.

    Args:
        engine: Engine whose public members are checked.

    Raises:
        InputError: If a member's name equals or resembles that of an optional member whose capability the engine lacks.
    """
    own = {name for name in dir(engine) if not name.startswith("_")} - REQUIRED
    passed_on = {name for name in NEVER_IGNORED if hasattr(engine, name)}
    for name in sorted(own | passed_on):
        meant = next(iter(get_close_matches(name, CAPABILITIES, 1, CLOSENESS)), None)
        if meant is None or isinstance(engine, CAPABILITIES[meant]):
            continue
        capability = CAPABILITIES[meant]
        raise InputError(
            f"the engine {type(engine).__name__} has {name!r} but does not declare the capability of {meant!r}, so it "
            f"would not be used: inherit {capability.__module__}.{capability.__name__}, or rename {name!r}"
        )
