"""The evidence of a request in one file, for a client, its lawyer or an authority to keep and check."""

from sifu.report.evidence.bundle import evidence_bytes, is_evidence, verify_evidence, write_evidence

__all__ = ["evidence_bytes", "is_evidence", "verify_evidence", "write_evidence"]
