"""Note of the last error that interrupted an open request, in a small file on which no claim depends.

The next attempt to execute the request deletes the note.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from sifu.core.ledger import canonical_json
from sifu.errors import SifuError
from sifu.store.files import read_plain, write_atomically

FAILURE_FILE = "failure.json"
LONGEST = 1000


class Failure(NamedTuple):
    """Message of the error that interrupted a request; `damaged` is true if a file of the run is damaged or missing."""

    error: str
    damaged: bool


def note_failure(folder: Path, request: str, error: BaseException, *, damaged: bool) -> None:
    """Note the error that interrupted a request; do nothing if the note cannot be written."""
    words = " ".join(str(error).split()) or "no further information"
    sentence = words if isinstance(error, SifuError) else f"{type(error).__name__}: {words}"
    note = {"request": request, "error": sentence[:LONGEST], "damaged": damaged}
    with suppress(OSError, SifuError):
        write_atomically(folder / FAILURE_FILE, canonical_json(note))


def last_failure(folder: Path, request: str) -> Failure | None:
    """Return the last error that interrupted a request, or None if none is noted."""
    try:
        content = json.loads(read_plain(folder / FAILURE_FILE))
        return Failure(str(content["error"]), content.get("damaged") is True) if content["request"] == request else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def remove_failure(folder: Path) -> None:
    """Delete the note if it exists."""
    with suppress(OSError):
        (folder / FAILURE_FILE).unlink(missing_ok=True)
