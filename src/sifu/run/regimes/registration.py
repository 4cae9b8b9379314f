"""Registration of regimes that are not sifu's own."""

from __future__ import annotations

from sifu.core.spec.regime import Regime, add_regime
from sifu.run.clients_and_engine import ENGINES, MakesEngine
from sifu.run.regimes import BEHAVIOURS
from sifu.run.regimes.rounds import RunInRounds


def register_regime(
    regime: type[Regime], behaviour: type[RunInRounds] | None = None, engine: MakesEngine | None = None
) -> None:
    """Add a regime for this process; it is asked before those known so far whether a spec is of it.

    Args:
        regime: Its answers that follow from the spec alone.
        behaviour: Its behaviour that needs the record of a run; None for that of the regime it extends.
        engine: Makes its embedded engine; None for that of the regime it extends.
    """
    add_regime(regime)
    if behaviour is not None:
        BEHAVIOURS[regime] = behaviour
    if engine is not None:
        ENGINES[regime] = engine
