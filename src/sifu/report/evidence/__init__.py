"""The evidence of a request in one file: what a client, its lawyer or an authority is given to keep and to check."""

from sifu.report.evidence.bundle import evidence_bytes, is_evidence, verify_evidence, write_evidence

__all__ = ["evidence_bytes", "is_evidence", "verify_evidence", "write_evidence"]
