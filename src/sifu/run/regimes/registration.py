"""Registration of regimes from outside sifu."""

from __future__ import annotations

from sifu.core.spec.regime import Regime, add_regime
from sifu.run.clients_and_engine import ENGINES, MakesEngine
from sifu.run.regimes import BEHAVIOURS
from sifu.run.regimes.rounds import RunInRounds


def register_regime(
    regime: type[Regime], behaviour: type[RunInRounds] | None = None, engine: MakesEngine | None = None
) -> None:
    """Add a regime for this process; it takes precedence over the regimes registered so far.

    Args:
        regime: Class of the regime, whose answers follow from the spec alone.
        behaviour: Behaviour that needs the record of a run; None to inherit it from the regime's base class.
        engine: Builder of its embedded engine; None to inherit it from the regime's base class.
    """
    add_regime(regime)
    if behaviour is not None:
        BEHAVIOURS[regime] = behaviour
    if engine is not None:
        ENGINES[regime] = engine
