"""The certificate of a request in its two forms (docs/theory.md, section 12.5).

The auditor's copy states everything and is confidential: exact Psi, drift, beta, the node, and any plain
hash of an un-noised model are functions of the forgotten client's data. The public copy leaves them out
and has salted commitments instead of hashes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sifu.core.request_terms import TERMS

FORMAT = "sifu-certificate-4"
LACKING = {FORMAT: frozenset[str](), "sifu-certificate-3": frozenset(("terms",))}
"""The formats that can be read, each with the fields of today that it lacks."""

COMMON_FIELDS = frozenset((
    "format", "run", "request", "method", "clients", "records", "level", "protection", "untouched", "unit", "scope",
    "epsilon", "delta", "delta_at_most", "calibration", "noise_multiplier", "noise_source", "sigma", "training_noise",
    "attacker_true_positive_rate_at_1_percent", "accounting", "participation", "retention", "start", "keeps_updates",
    "keeps_statistics", "terms", "wording", "commitments", "ledger", "received", "carried_out", "issued", "versions",
    "form", "premises",
))  # fmt: skip
FIELDS = {
    "public": COMMON_FIELDS,
    "auditor": COMMON_FIELDS | {
        "delta_reached", "psi", "psi_star", "node", "noise_node", "final_node", "rounds", "subjects",
        "earlier_subjects", "models", "erased_nodes", "remaining_nodes", "solve",
    },
}  # fmt: skip
"""What each form says, and nothing else."""

STATED_TERMS = tuple(name for name in TERMS if name not in ("clients", "records"))
"""The terms of the request that both forms state as they were filed; clients, and how many records, are fields of
their own, and which rows they are stays in the ledger."""
SOLVE_FIELDS = ("sum", "samples")
"""What an auditor's copy says of a head in closed form: the digest of (G, H, n, q), n, r and lambda."""
MODELS = ("source_model", "noised_model", "final_model")
BOTH_ACCOUNTINGS = ("clip", "noise", "epsilon_one_round", "epsilon_composed")
"""What is said of noise in training; of the two epsilons only the composed one counts."""


def public_form(auditor: Mapping[str, Any]) -> dict[str, Any]:
    """What anyone may see of the auditor's form: no Psi, drift, beta, node or plain hash."""
    premises = [{name: premise[name] for name in premise if name != "confidential"} for premise in auditor["premises"]]
    return {name: auditor[name] for name in COMMON_FIELDS} | {"form": "public", "premises": premises}
