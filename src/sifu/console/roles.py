"""Who may do what in the console."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal, get_args

Role = Literal["requester", "approver", "auditor", "operator"]
"""requester files requests and sees their own; approver decides; auditor reads everything; operator carries out."""
Right = Literal[
    "see", "see own", "file", "approve", "refuse", "withdraw own", "withdraw", "set terms", "carry out", "examine"
]
"""`see` covers runs, clients, requests, plans and public certificates; `examine` what is confidential: verification,
the audit trail, the report, the evidence and metrics; `set terms` every term of a request, without it people ask for
`TERMS_OF_REQUESTERS` alone."""

RIGHTS: dict[Role, frozenset[Right]] = {
    "requester": frozenset(("see own", "file", "withdraw own")),
    "approver": frozenset(("see", "see own", "approve", "refuse")),
    "auditor": frozenset(("see", "see own", "examine")),
    "operator": frozenset(
        ("see", "see own", "file", "refuse", "withdraw own", "withdraw", "set terms", "carry out", "examine")
    ),
}
"""Operators cannot approve: carrying out and agreeing are for different people. A person may have several roles."""
TERMS_OF_REQUESTERS = ("records", "epsilon", "delta", "level")
"""Whose data to forget, and a stronger protection than the run's own; what could spoil the model is for operators."""
ROLES: tuple[Role, ...] = get_args(Role)


def rights_of(roles: Collection[Role]) -> frozenset[Right]:
    """Everything that somebody with these roles may do.

    >>> "approve" in rights_of(["operator"]), "approve" in rights_of(["operator", "approver"])
    (False, True)
    """
    return frozenset().union(*(RIGHTS[role] for role in roles))
