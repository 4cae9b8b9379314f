"""Attacks on what a run claims: replays with and without the forgotten, empirical epsilon, membership inference."""

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
