"""Whether digests of samples are there for all founders or none, and no salt of anyone forgotten is left."""

from __future__ import annotations

from collections.abc import Iterator

from sifu.errors import InputError
from sifu.store.reader import JOINED, RunReader
from sifu.store.sample_salts import SALTS_FILE, WITHOUT_SALTS, outlived, read_salts, recorded_digests

ERASING = ("rolled back", JOINED, "restored")
"""Events after which salts are erased; a process killed in between leaves them to the next one that writes."""


def check_sample_digests(reader: RunReader) -> Iterator[str]:
    """One digest a founder, and in the file of salts none that had to be erased."""
    founders, digests = len(reader.clients()) - len(reader.joined()), reader.payload(1).get("sample_digests")
    if digests is not None and len(digests) != founders:
        yield f"clients: {len(digests)} digests of samples for {founders} clients that the run was made with"
    try:
        salts = read_salts(reader.folder)
    except InputError as error:
        yield str(error)
        return
    left = sorted(outlived(reader) & salts.keys())
    (last,) = reader.query("SELECT kind FROM events ORDER BY seq DESC LIMIT 1")[0]
    if left and last not in ERASING:
        names = ", ".join(reader.clients()[client].name for client in left[:5])
        yield f"{SALTS_FILE} holds the salts of {names}, which were erased when they were forgotten: delete it"


def lost_salt_notes(reader: RunReader) -> list[str]:
    """That salts are missing: no claim rests on them, but whoever learns it from the next request learns it late."""
    try:
        salts = read_salts(reader.folder)
    except InputError:
        return []  # a problem already
    lost = recorded_digests(reader).keys() - salts.keys() - outlived(reader)
    if not lost:
        return []
    return [
        f"{SALTS_FILE} is missing or lacks the salts of {len(lost)} clients; certificates hold. "
        f"To go on, {WITHOUT_SALTS}"
    ]
