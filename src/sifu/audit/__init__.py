"""Attacks on what a run claims: replays with and without the forgotten, empirical epsilon, membership inference."""

from sifu.audit.audit_report import AuditOptions, AuditReport
from sifu.audit.client_audit import ClientAudit, audit_client
from sifu.audit.controls import Control, run_controls
from sifu.audit.releases import Replays
from sifu.audit.run_audit import audit_run

__all__ = [
    "AuditOptions",
    "AuditReport",
    "ClientAudit",
    "Control",
    "Replays",
    "audit_client",
    "audit_run",
    "run_controls",
]
