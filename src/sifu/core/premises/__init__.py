"""What a certificate rests on, and the level that follows (docs/theory.md, sections 12.1 and 12.2).

Each premise is either `met` (by construction, or measured as an upper bound), `trusted` (what clients report and
the operator declares; every certificate says so), `assumed` (so the level is at most `conditional`) or
`failed` (so the level is `none`). The level is computed from the premises and from nothing else; nobody can
write a level down.

`premise` is one premise, `level` what follows from all of them. `noised_release`, `training_noise` and `without_noise`
collect every premise of one kind of promise; `regularity`, `before_training`, `history` and `noise` state the premises
that these collect.
"""

from sifu.core.premises.before_training import RateSource, before_training_premises, preprocessing_premise
from sifu.core.premises.history import (
    RecordHistory,
    accounting_premise,
    counterfactual_premise,
    groups_record_premises,
    record_premises,
)
from sifu.core.premises.level import level_of, premises_that_count
from sifu.core.premises.noise import chosen_noise_premise, noise_premise
from sifu.core.premises.noised_release import calibration_premise, collect_premises, psi_status
from sifu.core.premises.premise import Premise, Status
from sifu.core.premises.regularity import MeasuredRegularity, regularity_premise
from sifu.core.premises.training_noise import training_noise_premises
from sifu.core.premises.without_noise import (
    closed_form_premises,
    group_premises,
    grouping_premise,
    heuristic_premise,
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
