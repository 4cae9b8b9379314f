"""Attacks on the claims of a run: counterfactual replays, empirical epsilon, and membership inference.

Importing this package loads no training library, so that `sifu client-audit` works without one.
"""

from sifu.audit.audit_report import AuditOptions, AuditReport
from sifu.audit.before_after import BeforeAfterAttack
from sifu.audit.client_audit import ClientAudit, audit_client
from sifu.audit.compare_releases import FileComparison, compare_files
from sifu.audit.controls import Control, run_controls
from sifu.audit.releases import Replays
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
