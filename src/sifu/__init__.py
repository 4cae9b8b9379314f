"""sifu: lets a federation forget a client, and prove it.

    import sifu

    run = sifu.train(spec, run="my-run")        # FedAvg with tracking; continues an unfinished run
    print(run.plan(["client-007"]))             # what a request would do; changes nothing
    outcome = run.forget(["client-007"])        # roll back, add noise, retrain, certify
    run.verify()                                # recompute every claim, offline

Importing this package is fast; torch is imported only when a model is needed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from sifu.version import __version__

if TYPE_CHECKING:
    from sifu import audit, report
    from sifu.advice import Advice, advise
    from sifu.api import (
        Certificate,
        ClientStatus,
        Evaluated,
        LoadedModel,
        NamedKey,
        OperatorKeys,
        Outcome,
        PendingRequest,
        Plan,
        PredictedRow,
        PublicRequest,
        Purge,
        Released,
        RequestRecord,
        RequestStatus,
        RequestStep,
        Restoration,
        Run,
        RunStatus,
        Verification,
        find_runs,
        load_model,
        load_spec,
        open_run,
        pending_requests,
        restore,
        train,
        verify_certificate,
        verify_run,
    )
    from sifu.audit import AuditOptions, AuditReport, audit_client, audit_run
    from sifu.choices import TermsGiven
    from sifu.core.allowed_code import allow_code
    from sifu.core.extensions import SpecKey, register_key
    from sifu.core.record_commitments import new_nonces
    from sifu.core.request_terms import RequestTerms
    from sifu.core.spec import Spec
    from sifu.engines.loop_client import LoopClient
    from sifu.errors import (
        InputError,
        MissingExtensionError,
        NoClientResponseError,
        NoSpaceError,
        NotCertifiableError,
        RoundRejectedError,
        RunBusyError,
        RunDamagedError,
        SifuError,
        VerificationError,
    )
    from sifu.methods.registry import register
    from sifu.report import write_evidence, write_report
    from sifu.server.server_loop import ServerLoop

__all__ = [
    "Advice",
    "AuditOptions",
    "AuditReport",
    "Certificate",
    "ClientStatus",
    "Evaluated",
    "InputError",
    "LoadedModel",
    "LoopClient",
    "MissingExtensionError",
    "NamedKey",
    "NoClientResponseError",
    "NoSpaceError",
    "NotCertifiableError",
    "OperatorKeys",
    "Outcome",
    "PendingRequest",
    "Plan",
    "PredictedRow",
    "PublicRequest",
    "Purge",
    "Released",
    "RequestRecord",
    "RequestStatus",
    "RequestStep",
    "RequestTerms",
    "Restoration",
    "RoundRejectedError",
    "Run",
    "RunBusyError",
    "RunDamagedError",
    "RunStatus",
    "ServerLoop",
    "SifuError",
    "Spec",
    "SpecKey",
    "TermsGiven",
    "Verification",
    "VerificationError",
    "__version__",
    "advise",
    "allow_code",
    "audit",
    "audit_client",
    "audit_run",
    "find_runs",
    "load_model",
    "load_spec",
    "new_nonces",
    "open_run",
    "pending_requests",
    "register",
    "register_key",
    "report",
    "restore",
    "train",
    "verify_certificate",
    "verify_run",
    "write_evidence",
    "write_report",
]
_MODULES = ("audit", "report")
"""Packages that are also attributes of `sifu`; their main functions are `sifu.audit_run` and `sifu.write_report`."""
_ELSEWHERE = {
    "Advice": "sifu.advice",
    "advise": "sifu.advice",
    "Spec": "sifu.core.spec",
    "RequestTerms": "sifu.core.request_terms",
    "SpecKey": "sifu.core.extensions",
    "register": "sifu.methods.registry",
    "register_key": "sifu.core.extensions",
    "TermsGiven": "sifu.choices",
    "allow_code": "sifu.core.allowed_code",
    "new_nonces": "sifu.core.record_commitments",
    "AuditOptions": "sifu.audit",
    "AuditReport": "sifu.audit",
    "audit_client": "sifu.audit",
    "audit_run": "sifu.audit",
    "LoopClient": "sifu.engines.loop_client",
    "ServerLoop": "sifu.server.server_loop",
    "write_evidence": "sifu.report",
    "write_report": "sifu.report",
}
"""Modules of the public names that are neither errors nor in `sifu.api`."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'sifu' has no attribute {name!r}; it has {', '.join(__all__)}")
    if name in _MODULES:
        return importlib.import_module(f"sifu.{name}")
    home = "sifu.errors" if name.endswith("Error") else _ELSEWHERE.get(name, "sifu.api")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
