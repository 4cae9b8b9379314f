"""Premises, and the level that follows from them alone (docs/theory.md, section 12.2)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sifu.choices import Level
from sifu.core.premises import MeasuredRegularity, Premise, before_training_premises, collect_premises, level_of
from sifu.theory.facts import (
    AUTHENTICATED,
    BY_PARTICIPANTS,
    DRAWN_FROM_SEED,
    FIXED_CONSTANTS,
    IN_PROCESS,
    ON_A_GPU,
    TrainingFacts,
)
from sifu.theory.participation import Participation

BEST_FACTS = TrainingFacts(
    local_rate=0.1,
    momentum=0.0,
    weight_decay=0.0,
    batch_size=None,
    participation=Participation("poisson", rate=0.5),
    dtype="float64",
    smooth_model=True,
    rounding_bounded=True,
    preprocessing=FIXED_CONSTANTS,
    identity=IN_PROCESS,
    initial=DRAWN_FROM_SEED,
    engine=BY_PARTICIPANTS,
)
MEASURED = MeasuredRegularity("convex", np.ones(1))
BEST: dict[str, Any] = {
    "noise": "system",
    "largest_psi": 1.0,
    "rate_source": "given",
}
RANK = {"none": 0, "conditional": 1, "proven": 2, "exact": 3}

CAPS_AT_CONDITIONAL = {
    "fixed-size sampling": {"participation": Participation("fixed", count=5)},
    "float32": {"dtype": "float32"},
    "rounding not bounded": {"rounding_bounded": False},
    "a ReLU network": {"smooth_model": False},
    "dropout": {"outside": ("dropout",)},
    "batch norm and clipping": {"outside": ("batch norm", "gradient clipping")},
    "preprocessing from data": {"preprocessing": "mean of all clients' data"},
    "an initial model from anywhere": {"initial": "not known"},
    "clients told apart somehow": {"identity": "not known"},
    "an engine that is not sifu's own": {"engine": "not known"},
    "a minimum of answers": {"outside": ("a minimum of 3 answers a round",)},
}
CAPS_AT_NONE = {
    "given noise": {"noise": "given"},
}


def level(facts: TrainingFacts = BEST_FACTS, measured: MeasuredRegularity = MEASURED, **changes: Any) -> Level:
    return level_of(collect_premises(facts, measured, **(BEST | changes)), exact=False)


def test_everything_met_is_proven() -> None:
    assert level() == "proven"
    assert level(replace(BEST_FACTS, participation=Participation("all"))) == "proven"
    for kind in ("strongly convex", "convex"):
        assert level(measured=replace(MEASURED, kind=kind)) == "proven"


@pytest.mark.parametrize("name", CAPS_AT_CONDITIONAL)
def test_an_assumption_is_conditional_and_listed(name: str) -> None:
    facts = replace(BEST_FACTS, **CAPS_AT_CONDITIONAL[name])  # type: ignore[arg-type]
    assert level(facts) == "conditional"
    assumed = [premise for premise in collect_premises(facts, MEASURED, **BEST) if premise.status == "assumed"]
    assert len(assumed) == len(facts.outside or (name,))
    assert all(premise.statement.endswith(".") for premise in assumed)


def test_assumed_regularity_is_conditional_and_says_which_factor() -> None:
    measured = MeasuredRegularity("assumed", np.ones(1), assumed_factor=1.0)
    assert level(measured=measured) == "conditional"
    assert "B = 1;" in collect_premises(BEST_FACTS, measured, **BEST)[0].statement


@pytest.mark.parametrize("psi", [1000.1, 1e300, math.inf, math.nan])
def test_a_psi_beyond_the_range_of_the_rounding_bound_is_conditional(psi: float) -> None:
    assert level(largest_psi=1000.0) == "proven"
    assert level(largest_psi=psi) == "conditional"


def test_where_the_rate_came_from_is_said() -> None:
    """A limit of the operator and the clients' own safe steps both keep the level; the premises state which."""
    assert level(rate_source="given") == level(rate_source="own") == "proven"
    given, own = (
        collect_premises(BEST_FACTS, MEASURED, **(BEST | {"rate_source": source})) for source in ("given", "own")
    )
    assert given != own


def test_outputs_counted_from_labels_are_conditional() -> None:
    assert level(replace(BEST_FACTS, shape_from_labels=True)) == "conditional"


def test_why_a_client_on_another_machine_is_absent_is_trusted() -> None:
    """The reason for a remote client's absence is trusted, because it cannot be seen: one client may delay another."""
    separate = replace(BEST_FACTS, identity=AUTHENTICATED)
    status = {
        facts.identity: premise.status
        for facts in (BEST_FACTS, separate)
        for premise in collect_premises(facts, MEASURED, **BEST)
        if premise.name == "counterfactual"
    }
    assert status == {IN_PROCESS: "met", AUTHENTICATED: "trusted"}


@pytest.mark.parametrize("name", CAPS_AT_NONE)
def test_a_failed_premise_is_none_whatever_else_holds(name: str) -> None:
    assert level(**CAPS_AT_NONE[name]) == "none"
    for change in CAPS_AT_CONDITIONAL.values():
        assert level(replace(BEST_FACTS, **change), **CAPS_AT_NONE[name]) == "none"  # type: ignore[arg-type]


def test_exact_rests_on_preprocessing_and_hyper_parameters_alone() -> None:
    everything_wrong = replace(BEST_FACTS, dtype="float32", smooth_model=False, outside=("dropout",))
    worst = {"noise": "given"}
    worst = BEST | worst | {"largest_psi": math.inf, "rate_source": "own"}
    premises = collect_premises(everything_wrong, MEASURED, **worst)
    assert level_of(premises, exact=True) == "exact"
    shaped = replace(everything_wrong, preprocessing="mean of all clients' data")
    assert level_of(collect_premises(shaped, MEASURED, **worst), exact=True) == "conditional"
    labels = replace(everything_wrong, shape_from_labels=True)
    assert level_of(collect_premises(labels, MEASURED, **worst), exact=True) == "conditional"
    assert level_of(before_training_premises(BEST_FACTS, "own"), exact=True) == "exact"
    assert level_of(before_training_premises(shaped, "own"), exact=True) == "conditional"


STATUSES = ("met", "assumed", "failed")
PREMISES = st.lists(
    st.builds(
        Premise,
        name=st.sampled_from(("regularity", "arithmetic", "noise", "preprocessing")),
        status=st.sampled_from(STATUSES),
    ),
    min_size=1,
    max_size=6,
)


@given(PREMISES, st.booleans(), st.data())
def test_a_worse_premise_never_raises_the_level(premises: list[Premise], exact: bool, data: st.DataObject) -> None:
    index = data.draw(st.integers(0, len(premises) - 1))
    worse = data.draw(st.sampled_from(STATUSES[STATUSES.index(premises[index].status) :]))
    changed = [*premises[:index], replace(premises[index], status=worse), *premises[index + 1 :]]
    assert RANK[level_of(changed, exact=exact)] <= RANK[level_of(premises, exact=exact)]
    more = [*premises, Premise("one more", "assumed")]
    assert RANK[level_of(more, exact=exact)] <= RANK[level_of(premises, exact=exact)]


@given(PREMISES)
def test_failed_and_assumed_never_prove(premises: list[Premise]) -> None:
    statuses = {premise.status for premise in premises}
    level = level_of(premises, exact=False)
    assert (level == "none") is ("failed" in statuses)
    assert (level == "proven") is (statuses == {"met"})


def test_a_failed_preprocessing_premise_is_not_softened_by_exactness() -> None:
    """A failed premise gives level `none`, even if the node is exact."""
    assert level_of([Premise("preprocessing", "failed")], exact=True) == "none"


FACT_CHANGES = st.lists(st.sampled_from(sorted(CAPS_AT_CONDITIONAL)), unique=True)
TERM_CHANGES = st.lists(st.sampled_from(sorted(CAPS_AT_NONE)), unique=True)


@given(FACT_CHANGES, TERM_CHANGES)
def test_any_mixture_of_defects_is_as_weak_as_its_weakest(facts: list[str], terms: list[str]) -> None:
    changed, request = BEST_FACTS, {}
    for name in facts:
        changed = replace(changed, **CAPS_AT_CONDITIONAL[name])  # type: ignore[arg-type]
    for name in terms:
        request |= CAPS_AT_NONE[name]
    expected = "none" if terms else "conditional" if facts else "proven"
    assert level(changed, **request) == expected


def test_control_a_level_that_ignores_the_participation_is_caught() -> None:
    """Negative control: without the premise on participation the level would be too high."""
    fixed = replace(BEST_FACTS, participation=Participation("fixed", count=5))
    premises = [premise for premise in collect_premises(fixed, MEASURED, **BEST) if premise.name != "counterfactual"]
    assert level_of(premises, exact=False) == "proven" != level(fixed)


def test_statements_hold_no_figures_of_clients_data() -> None:
    """Public statements contain no figures from clients' data; P_i is only in the auditor's detail."""
    measured = MeasuredRegularity("strongly convex", np.array([0.5, 0.57721566]))
    for premise in collect_premises(replace(BEST_FACTS, local_rate=0.0123456789), measured, **BEST):
        assert "0.577" not in premise.statement
    assert "0.57721566" in collect_premises(BEST_FACTS, measured, **BEST)[0].detail


def test_bits_of_a_gpu_that_are_not_repeated_lower_exact_and_nothing_else() -> None:
    """Bits that a GPU did not repeat lower only `exact`: noise hides the last bits, and a model without noise shows
    them.
    """
    facts = replace(BEST_FACTS, engine=ON_A_GPU)
    premises = collect_premises(facts, MEASURED, **BEST)
    assert level(facts) == "proven"
    assert level_of(premises, exact=True, fresh=True) == "conditional"
    assert level_of(collect_premises(BEST_FACTS, MEASURED, **BEST), exact=True, fresh=True) == "exact"
