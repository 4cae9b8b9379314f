"""Federated unlearning with certificates: train a federation, forget clients, and verify the claims.

    import sifu

    run = sifu.train(spec, run="my-run")        # FedAvg with tracking; continues an unfinished run
    print(run.plan(["client-007"]))             # what a request would do; changes nothing
    outcome = run.forget(["client-007"])        # roll back, add noise, retrain, certify
    run.verify()                                # recompute what was claimed, offline

Importing this package is fast; torch is imported only when a model is needed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from sifu.version import __version__

if TYPE_CHECKING:
    from sifu import audit, report
    from sifu.api import (
        Certificate,
        ClientStatus,
        Evaluated,
        LoadedModel,
        NamedKey,
        OperatorKeys,
        Outcome,
        Plan,
        PredictedRow,
        Purge,
        Request,
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
    from sifu.audit import AuditOptions, AuditReport, audit_run
    from sifu.choices import TermsGiven
    from sifu.core.allowed_code import allow_code
    from sifu.core.record_commitments import new_nonces
    from sifu.core.request_terms import RequestTerms
    from sifu.core.spec import Spec
    from sifu.engines.loop_client import LoopClient
    from sifu.engines.sim.own_steps import SafeStep, safe_step
    from sifu.errors import (
        InputError,
        NoClientResponseError,
        NoSpaceError,
        NotCertifiableError,
        RoundRejectedError,
        RunBusyError,
        RunDamagedError,
        SifuError,
        VerificationError,
    )
    from sifu.report import write_report
    from sifu.server.server_loop import ServerLoop

__all__ = [
    "AuditOptions",
    "AuditReport",
    "Certificate",
    "ClientStatus",
    "Evaluated",
    "InputError",
    "LoadedModel",
    "LoopClient",
    "NamedKey",
    "NoClientResponseError",
    "NoSpaceError",
    "NotCertifiableError",
    "OperatorKeys",
    "Outcome",
    "Plan",
    "PredictedRow",
    "Purge",
    "Request",
    "RequestStep",
    "RequestTerms",
    "Restoration",
    "RoundRejectedError",
    "Run",
    "RunBusyError",
    "RunDamagedError",
    "RunStatus",
    "SafeStep",
    "ServerLoop",
    "SifuError",
    "Spec",
    "TermsGiven",
    "Verification",
    "VerificationError",
    "__version__",
    "allow_code",
    "audit",
    "audit_run",
    "find_runs",
    "load_model",
    "load_spec",
    "new_nonces",
    "open_run",
    "pending_requests",
    "report",
    "restore",
    "safe_step",
    "train",
    "verify_certificate",
    "verify_run",
    "write_report",
]
_MODULES = ("audit", "report")
"""Packages that are also attributes of `sifu`; their main functions are `sifu.audit_run` and `sifu.write_report`."""
_HOMES = {
    "sifu.audit": ("AuditOptions", "AuditReport", "audit_run"),
    "sifu.choices": ("TermsGiven",),
    "sifu.core.allowed_code": ("allow_code",),
    "sifu.core.record_commitments": ("new_nonces",),
    "sifu.core.request_terms": ("RequestTerms",),
    "sifu.core.spec": ("Spec",),
    "sifu.engines.loop_client": ("LoopClient",),
    "sifu.engines.sim.own_steps": ("SafeStep", "safe_step"),
    "sifu.report": ("write_report",),
    "sifu.server.server_loop": ("ServerLoop",),
}
"""Modules and their public names, except errors and the names of `sifu.api`."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'sifu' has no attribute {name!r}; it has {', '.join(__all__)}")
    if name in _MODULES:
        return importlib.import_module(f"sifu.{name}")
    usual = "sifu.errors" if name.endswith("Error") else "sifu.api"
    home = next((module for module, names in _HOMES.items() if name in names), usual)
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
