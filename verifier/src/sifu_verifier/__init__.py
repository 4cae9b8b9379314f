"""Independent verifier of runs of sifu, written from docs/store.md alone.

It imports nothing of sifu. `verify(folder)` returns a list of problems. An empty list means that the ledger, the
tables, the files and the certificates agree with each other and with what this program computes. It cannot tell
whether the operator recorded the truth.
"""

from __future__ import annotations

from sifu_verifier.certificate_file import verify_certificate
from sifu_verifier.verification import verify

__all__ = ["verify", "verify_certificate"]
__version__ = "0.1.0"
