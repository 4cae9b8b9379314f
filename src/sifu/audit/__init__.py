"""Attacks on the claims of a run: counterfactual replays, empirical epsilon, membership, and pairs of releases."""

from sifu.audit.audited import AuditOptions
from sifu.audit.before_after import BeforeAfterAttack
from sifu.audit.run_audit import AuditReport, audit_run

__all__ = ["AuditOptions", "AuditReport", "BeforeAfterAttack", "audit_run"]
