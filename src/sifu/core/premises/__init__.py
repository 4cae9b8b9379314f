"""What a certificate rests on, and the level that follows (docs/theory.md, sections 12.1 and 12.2).

Each premise is either `met` (by construction, or measured as an upper bound), `trusted` (what clients report and
the operator declares; every certificate says so), `assumed` (so the level is at most `conditional`) or
`failed` (so the level is `none`). The level is computed from the premises and from nothing else; no one can
write a level down.

`premise` is one premise and the level that follows from all of them; `promises` collects every premise of one kind of
promise from those that `conditions` states.
"""

from sifu.core.premises.conditions import (
    MeasuredRegularity,
    Premise,
    RateSource,
    RecordHistory,
    Status,
    accounting_premise,
    before_training_premises,
    chosen_noise_premise,
    counterfactual_premise,
    groups_record_premises,
    level_of,
    noise_premise,
    premises_that_count,
    preprocessing_premise,
    record_premises,
    regularity_premise,
)
from sifu.core.premises.promises import (
    calibration_premise,
    closed_form_premises,
    collect_premises,
    group_premises,
    grouping_premise,
    heuristic_premise,
    psi_status,
    training_noise_premises,
    tuning_premises,
)

__all__ = [
    "MeasuredRegularity",
    "Premise",
    "RateSource",
    "RecordHistory",
    "Status",
    "accounting_premise",
    "before_training_premises",
    "calibration_premise",
    "chosen_noise_premise",
    "closed_form_premises",
    "collect_premises",
    "counterfactual_premise",
    "group_premises",
    "grouping_premise",
    "groups_record_premises",
    "heuristic_premise",
    "level_of",
    "noise_premise",
    "premises_that_count",
    "preprocessing_premise",
    "psi_status",
    "record_premises",
    "regularity_premise",
    "training_noise_premises",
    "tuning_premises",
]
