"""Behaviour of runs that depends on their record, one module per regime (`sifu.core.spec.regime`)."""

from __future__ import annotations

from sifu.core.spec.regime import ClosedForm, Groups, Regime, TunedNetworks, by_regime
from sifu.run.regimes.closed_form import RunInClosedForm
from sifu.run.regimes.groups import RunInGroups
from sifu.run.regimes.rounds import RunInRounds
from sifu.run.regimes.tuned_networks import RunOnTunedNetworks
from sifu.run.run_view import RunView

BEHAVIOURS: dict[type[Regime], type[RunInRounds]] = {
    Regime: RunInRounds,
    Groups: RunInGroups,
    ClosedForm: RunInClosedForm,
    TunedNetworks: RunOnTunedNetworks,
}


def behaviour_of(view: RunView) -> RunInRounds:
    """Return the behaviour of a run."""
    return by_regime(BEHAVIOURS, view.regime)(view)
