"""The terms of a request: what is given, the spec's defaults for the rest, and the least level accepted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from sifu.core.method_info import method_info
from sifu.core.premises import Level
from sifu.core.request_terms import RequestTerms, SigmaChoice
from sifu.core.spec import Spec
from sifu.errors import InputError, NotCertifiableError
from sifu.planning.plan import Plan
from sifu.store.table_rows import RequestRow

LEVELS: tuple[Level, ...] = ("none", "conditional", "proven", "exact")


def make_terms(spec: Spec, clients: Sequence[str], given: Mapping[str, Any]) -> RequestTerms:
    """The terms of a request: what is given, the spec's defaults for the rest."""
    known = {one.name for one in fields(RequestTerms)} - {"clients"}
    unknown = sorted(set(given) - known)
    if unknown:
        raise InputError(f"unknown term {', '.join(unknown)}; a request takes {', '.join(sorted(known))}")
    if isinstance(clients, str):
        raise InputError(f"clients must be a list of names, found the text {clients!r}")
    privacy = spec.privacy
    base = RequestTerms(
        tuple(clients),
        privacy.epsilon,
        privacy.delta,
        privacy.sigma,
        privacy.unit,
        privacy.scope,
        privacy.calibration,
        privacy.retention,
        privacy.reserve,
    )
    asked = replace(base, **{key: value for key, value in given.items() if value is not None})
    check_retention(spec, asked)
    return asked


def terms_of(row: RequestRow) -> RequestTerms:
    """The terms of a request as recorded."""
    sigma: SigmaChoice = "auto" if row.sigma == "auto" else float(row.sigma)
    return RequestTerms(
        row.clients,
        row.epsilon,
        row.delta,
        sigma,
        row.unit,
        row.scope,
        row.calibration,
        row.retention,
        row.reserve,
        row.method,
        row.max_rounds,
        row.target,
    )


def check_level(plan: Plan, min_level: Level | None) -> None:
    """Refuse a plan below the least level accepted."""
    method = method_info(plan.terms.method)
    least = min_level or ("conditional" if method.certifies else "none")
    if least not in LEVELS:
        raise InputError(f"the least level must be one of {', '.join(LEVELS)}, found {least!r}")
    if LEVELS.index(plan.level) < LEVELS.index(least):
        wanted = {"failed"} if least == "conditional" else {"failed", "assumed"}
        reasons = " ".join(one.statement for one in plan.premises if one.status in wanted)
        raise NotCertifiableError(
            f"the request can only be carried out at level {plan.level!r}, and {least!r} is the least accepted "
            f"(see --min-level): nothing was changed. {reasons}"
        )


def check_retention(spec: Spec, asked: RequestTerms) -> None:
    """Strict retention would have to erase Gram matrices, which earlier joint certificates are recomputed from."""
    if asked.retention == "strict" and spec.keep.gram_clients > 0:
        raise InputError(
            f"retention strict cannot be had in a run that keeps Gram matrices (keep.gram_clients = "
            f"{spec.keep.gram_clients}): they hold the client's part. Use retention paper, or keep.gram_clients = 0"
        )
