"""Python API: train, plan, forget and verify, with the structure of the command line."""

import importlib
from typing import TYPE_CHECKING, Any

from sifu.api.evaluation import Evaluated
from sifu.api.requests import Request, RequestStep
from sifu.api.run import NamedKey, OperatorKeys, Run
from sifu.api.run_search import find_runs, pending_requests
from sifu.api.safekeeping import Restoration, restore
from sifu.api.spec_file import load_spec
from sifu.api.start_run import open_run, train
from sifu.api.status import ClientStatus, RunStatus
from sifu.checking.bundle import verify, verify_certificate
from sifu.checking.verification import Verification, verify_run
from sifu.core.certificate_words import Certificate
from sifu.export.exported_models import load_model
from sifu.planning.plan import Plan
from sifu.requests.erasure import Purge
from sifu.requests.outcome import Outcome

if TYPE_CHECKING:
    from sifu.export.loaded_model import LoadedModel, PredictedRow

__all__ = [
    "Certificate",
    "ClientStatus",
    "Evaluated",
    "LoadedModel",
    "NamedKey",
    "OperatorKeys",
    "Outcome",
    "Plan",
    "PredictedRow",
    "Purge",
    "Request",
    "RequestStep",
    "Restoration",
    "Run",
    "RunStatus",
    "Verification",
    "find_runs",
    "load_model",
    "load_spec",
    "open_run",
    "pending_requests",
    "restore",
    "train",
    "verify",
    "verify_certificate",
    "verify_run",
]


def __getattr__(name: str) -> Any:
    if name in ("LoadedModel", "PredictedRow"):  # torch is imported when a model is used
        return getattr(importlib.import_module("sifu.export.loaded_model"), name)
    raise AttributeError(f"module 'sifu.api' has no attribute {name!r}")
