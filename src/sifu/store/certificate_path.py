"""Where a certificate lies as a file."""

from __future__ import annotations

from pathlib import Path

from sifu.core.request_terms import is_request_id
from sifu.errors import RunDamagedError

CERTIFICATES = "certificates"
FORMS = ("auditor", "public")
"""The certificates that a request which is done has."""


def certificate_path(folder: Path, request: str, form: str) -> Path:
    """The file of a certificate; a database from a stranger may name any."""
    if not is_request_id(request) or form not in FORMS:
        raise RunDamagedError(f"{folder} is damaged: it has a certificate {request[:80]!r} ({form[:20]!r})")
    return folder / CERTIFICATES / f"{request}.{form}.json"
