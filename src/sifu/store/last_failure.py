"""Note of the last error that interrupted a running request, in a small file on which no claim depends.

A request runs from its rollback to its certificate. If an error interrupts it, the error is noted here; the next
attempt deletes it. Losing the file does no harm.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from sifu.core.ledger import canonical_json
from sifu.errors import SifuError
from sifu.store.files import read_plain, write_atomically

FAILURE_FILE = "failure.json"
LONGEST = 1000


def note_failure(folder: Path, request: str, error: BaseException) -> None:
    """Note the error that interrupted a running request; if the note cannot be written, it is skipped."""
    words = " ".join(str(error).split()) or "no further information"
    sentence = words if isinstance(error, SifuError) else f"{type(error).__name__}: {words}"
    with suppress(OSError, SifuError):
        write_atomically(folder / FAILURE_FILE, canonical_json({"request": request, "error": sentence[:LONGEST]}))


def last_failure(folder: Path, request: str) -> str:
    """Return the last error that interrupted a running request; empty if there is none."""
    try:
        content = json.loads(read_plain(folder / FAILURE_FILE))
        return str(content["error"]) if content["request"] == request else ""
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ""


def failure_stamp(folder: Path) -> int:
    """Return a number that changes with the note: the time it was written, or 0 if there is no note."""
    try:
        return (folder / FAILURE_FILE).stat().st_mtime_ns
    except OSError:
        return 0


def remove_failure(folder: Path) -> None:
    """Delete the note if it exists."""
    with suppress(OSError):
        (folder / FAILURE_FILE).unlink(missing_ok=True)
