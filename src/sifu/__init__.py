"""Federated unlearning with certificates: train a federation, forget clients, and verify the claims.

    import sifu

    run = sifu.train(spec, run="my-run")        # FedAvg with tracking; continues an unfinished run
    print(run.plan(["client-007"]))             # what a request would do; changes nothing
    outcome = run.forget(["client-007"])        # roll back, add noise, retrain, certify
    run.verify()                                # recompute what was claimed, offline

Importing this package is fast; torch is imported only when a model is needed. Everything else is in its module: answers
of a run in `sifu.api`, audits in `sifu.audit`, reports in `sifu.report`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from sifu.version import __version__

if TYPE_CHECKING:
    from sifu.api import Run, load_model, open_run, restore, train, verify
    from sifu.core.allowed_code import allow_code
    from sifu.core.request_terms import Terms
    from sifu.core.spec import Spec
    from sifu.engines.loop_client import LoopClient
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
    from sifu.server.server_loop import ServerLoop

__all__ = [
    "InputError",
    "LoopClient",
    "NoClientResponseError",
    "NoSpaceError",
    "NotCertifiableError",
    "RoundRejectedError",
    "Run",
    "RunBusyError",
    "RunDamagedError",
    "ServerLoop",
    "SifuError",
    "Spec",
    "Terms",
    "VerificationError",
    "__version__",
    "allow_code",
    "load_model",
    "open_run",
    "restore",
    "train",
    "verify",
]
_HOMES = {
    "LoopClient": "sifu.engines.loop_client",
    "Terms": "sifu.core.request_terms",
    "ServerLoop": "sifu.server.server_loop",
    "Spec": "sifu.core.spec",
    "allow_code": "sifu.core.allowed_code",
}
"""Modules of public names, except errors and the names of `sifu.api`."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'sifu' has no attribute {name!r}; it has {', '.join(__all__)}")
    usual = "sifu.errors" if name.endswith("Error") else "sifu.api"
    return getattr(importlib.import_module(_HOMES.get(name, usual)), name)


def __dir__() -> list[str]:
    return sorted(__all__)
