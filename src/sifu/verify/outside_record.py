"""Checks and notes on restorations from a backup, and a note on a missing key."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from sifu.requests.lost_requests import lost_words, still_lost
from sifu.store.keys import KEY_FILE
from sifu.store.reader import RESTORED, RunReader


def event_notes(reader: RunReader) -> Iterator[str]:
    """Yield a note for each restoration, for each request that it lost, and for a missing key."""
    for event in reader.events():
        if event.kind == RESTORED:
            yield (
                f"event {event.seq} restored the run from a backup on {event.time}; what was done between the backup "
                "and then is not in this record"
            )
    yield from map(lost_words, still_lost(reader))
    if not (reader.folder / KEY_FILE).is_file():
        yield (
            f"the folder has no {KEY_FILE}: it can be verified, but nothing more can be signed until the key is put "
            "back, from a backup for example"
        )


def check_restored(reader: RunReader) -> Iterator[str]:
    """Yield a problem for each restoration whose event does not name the event before it as the backup's last one."""
    for before, event in itertools.pairwise(reader.events()):
        if event.kind == RESTORED and event.content["backup_head"] != before.head:
            yield f"restored: event {event.seq} names a backup that ended at another event than {before.seq}"
