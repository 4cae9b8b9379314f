"""The terms of a request: what is given, the spec's defaults for the rest, and the least level accepted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from sifu.choices import LEVELS, Level, TermsGiven
from sifu.core.request_terms import TERMS, RequestTerms
from sifu.core.spec import Spec
from sifu.errors import InputError, NotCertifiableError
from sifu.planning.plan import Plan
from sifu.planning.ways import least_level
from sifu.record.run_view import RunView


def make_terms(view: RunView, clients: Sequence[str], given: TermsGiven) -> RequestTerms:
    """The terms of a request: what is given, the spec's defaults for the rest; clients by the names they have now."""
    spec = view.spec
    chosen = {name: value for name, value in given.items() if value is not None}
    if "records" in chosen:
        chosen["records"] = _rows(chosen["records"])
    names = clients if isinstance(clients, str) else view.names_now(clients)
    terms = RequestTerms.from_mapping(_usual(spec) | chosen | {"clients": names})
    check_retention(spec, terms)
    return terms


def usual_terms(spec: Spec, clients: Sequence[str]) -> RequestTerms:
    """The terms of a request for these clients that gives none itself."""
    return RequestTerms.from_mapping(_usual(spec) | {"clients": list(clients)})


def _usual(spec: Spec) -> dict[str, Any]:
    return {name: value for name, value in asdict(spec.privacy).items() if name in TERMS}


def _rows(records: Any) -> Any:
    """Row numbers as a list; naming none is a mistake, since without records a client is forgotten whole."""
    rows = records.tolist() if hasattr(records, "tolist") else records
    if isinstance(rows, Sequence) and not isinstance(rows, str) and not rows:
        raise InputError("no record is named: give the rows to forget, or leave records out to forget the client")
    return list(rows) if isinstance(rows, Sequence) and not isinstance(rows, str) else rows


def check_level(plan: Plan, level: Level | None) -> None:
    """Refuse a plan below the least level accepted."""
    least = least_level(plan.terms, level)
    if LEVELS.index(plan.level) < LEVELS.index(least):
        wanted = {"failed"} if least == "conditional" else {"failed", "assumed"}
        reasons = " ".join(premise.statement for premise in plan.premises if premise.status in wanted)
        raise NotCertifiableError(
            f"the request can only be carried out at level {plan.level!r}, and {least!r} is the least accepted "
            f"(see --level): nothing was changed. {reasons}"
        )


def check_retention(spec: Spec, terms: RequestTerms) -> None:
    """Strict retention would have to erase Gram matrices, which earlier joint certificates are recomputed from."""
    if terms.retention == "strict" and spec.keep.gram_clients > 0:
        raise InputError(
            f"retention strict is not possible in a run that keeps Gram matrices (keep.gram_clients = "
            f"{spec.keep.gram_clients}): they hold the client's part. Use retention paper, or keep.gram_clients = 0"
        )
