"""The latest signed head of a run, as the server shows it to every client with every message."""

from __future__ import annotations

import json
import os
from pathlib import Path

from sifu.core.ledger import canonical_json
from sifu.engines.flower.wire import CHECKPOINT, LINKS, LINKS_FROM, ROTATIONS
from sifu.store.checkpoints import ROTATED, latest_checkpoint
from sifu.store.head_file import HEAD_FILE
from sifu.store.reader import RunReader


class ShownCheckpoint:
    """Read from the run folder when its file `head` has changed, which it does with every event."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stamp: tuple[int, int] | None = None
        self._shown: dict[str, str] = {}
        self._links: list[list[str]] = []

    def __call__(self, since: int | None) -> dict[str, str | int]:
        """The checkpoint and every change of keys, as they stand in a message's config; empty if nothing is signed.

        With the number of an event `since` which a client kept, also how the checkpoint follows from it.
        """
        status = os.stat(self._folder / HEAD_FILE)
        stamp = (status.st_ino, status.st_mtime_ns)
        if stamp != self._stamp:
            with RunReader(self._folder) as reader:
                checkpoint = latest_checkpoint(reader)
                payloads = reader.query("SELECT payload FROM events WHERE kind = ? ORDER BY seq", (ROTATED,))
                events = reader.query("SELECT time, kind, commitment FROM events ORDER BY seq")
            rotations = [
                {
                    "old": content["old_key"],
                    "new": content["run"]["public_key"],
                    "signature_by_old": content["signature_by_old"],
                    "signature_by_new": content["signature_by_new"],
                }
                for content in (json.loads(payload) for (payload,) in payloads)
            ]
            self._shown, self._links = {}, []
            if checkpoint is not None:
                self._links = [[time, kind, bytes(commitment).hex()] for time, kind, commitment in events]
                self._links = self._links[: checkpoint.seq]
                self._shown = {CHECKPOINT: canonical_json(checkpoint.to_mapping()).decode()}
                if rotations:
                    self._shown[ROTATIONS] = canonical_json(rotations).decode()
            self._stamp = stamp
        shown: dict[str, str | int] = dict(self._shown)
        if since is not None and 1 <= since < len(self._links):
            shown |= {LINKS_FROM: since, LINKS: canonical_json(self._links[since:]).decode()}
        return shown

    @property
    def seq(self) -> int:
        """The number of the event that was shown last."""
        return len(self._links)
