"""Attacks on the claims of a run: counterfactual replays, empirical epsilon, and membership inference.

Importing this package loads no training library, so that `sifu client-audit` works without one.
"""

import importlib
from typing import TYPE_CHECKING, Any

from sifu.audit.audit_report import AuditOptions, AuditReport
from sifu.audit.before_after import BeforeAfterAttack
from sifu.audit.client_audit import ClientAudit, audit_client
from sifu.audit.releases import Replays

if TYPE_CHECKING:
    from sifu.audit.compare_releases import FileComparison, compare_files
    from sifu.audit.controls import Control, run_controls
    from sifu.audit.run_audit import audit_run

__all__ = [
    "AuditOptions",
    "AuditReport",
    "BeforeAfterAttack",
    "ClientAudit",
    "Control",
    "FileComparison",
    "Replays",
    "audit_client",
    "audit_run",
    "compare_files",
    "run_controls",
]

_NEED_TORCH = {
    "Control": "controls",
    "FileComparison": "compare_releases",
    "audit_run": "run_audit",
    "compare_files": "compare_releases",
    "run_controls": "controls",
}
"""Names that are imported on first use, with their modules."""


def __getattr__(name: str) -> Any:
    if name not in _NEED_TORCH:
        raise AttributeError(f"module 'sifu.audit' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(f"sifu.audit.{_NEED_TORCH[name]}"), name)
