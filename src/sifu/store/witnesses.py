"""Witnesses: checkpoints leave the machine by themselves, to a file, a command or a URL that the operator names.

They are named in the environment or on the command line, never in the run: opening a stranger's folder must not run a
command or speak to an address that the folder chose. A witness that fails is reported and loses nothing; the next
checkpoint covers the one it missed. A file is read before anything is added to it: if it holds a head that the run does
not have, the command stops.
"""

from __future__ import annotations

import logging
import os
import shlex
import subprocess
import time
import urllib.request
from pathlib import Path

from sifu.core.ledger import canonical_json
from sifu.errors import InputError, RunDamagedError
from sifu.store.checkpoints import Checkpoint, latest_checkpoint
from sifu.store.files import append_line
from sifu.store.reader import RunReader
from sifu.store.witnessed import contradictions

WITNESSES = "SIFU_WITNESS"
"""Targets, one a line: `file:PATH`, `command:PROGRAM ARGUMENTS`, or an http or https URL."""
EVERY_SECONDS = 60.0
"""How often witnesses hear of a run that is being written to; at its first event and at its last they always do."""
TIMEOUT_SECONDS = 10.0
log = logging.getLogger(__name__)


def witness_targets() -> tuple[str, ...]:
    """The witnesses that the environment names; what cannot be one is refused."""
    targets = tuple(line.strip() for line in os.environ.get(WITNESSES, "").splitlines() if line.strip())
    for target in targets:
        kind, _, rest = target.partition(":")
        if kind not in ("file", "command", "http", "https") or not rest.strip():
            raise InputError(f"a witness is file:PATH, command:PROGRAM or a URL, found {target[:80]!r}")
    return targets


def check_files_of_witnesses(reader: RunReader) -> None:
    """Stop if the file of a witness holds what this run does not: a fork, or an older state that was put back."""
    for target in witness_targets():
        kind, _, path = target.partition(":")
        problem = next(contradictions(reader, Path(path)), None) if kind == "file" else None
        if problem:
            raise RunDamagedError(
                f"{reader.folder}: {problem}. Nothing was done. If a backup was restored deliberately, keep this file "
                "and name another witness"
            )


def tell(target: str, checkpoint: Checkpoint) -> None:
    """Hand a checkpoint to one witness, as a line of JSON."""
    line = canonical_json(checkpoint.to_mapping())
    kind, _, rest = target.partition(":")
    if kind == "file":
        append_line(Path(rest), line)
    elif kind == "command":
        subprocess.run(
            shlex.split(rest), input=line + b"\n", timeout=TIMEOUT_SECONDS, check=True, stdout=subprocess.DEVNULL
        )
    else:
        request = urllib.request.Request(target, data=line + b"\n", headers={"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS):  # answers other than success are errors
            pass


class WitnessPost:
    """Tells the witnesses of a run: of its first checkpoint at once, then from time to time, and at the end."""

    def __init__(self) -> None:
        self.targets = witness_targets()
        self._told: int | None = None
        self._last = time.monotonic()

    def recorded(self, reader: RunReader, seq: int) -> None:
        """An event was recorded."""
        if self.targets and (seq == 1 or time.monotonic() - self._last >= EVERY_SECONDS):
            self.tell_all(reader)

    def tell_all(self, reader: RunReader) -> None:
        """Hand the latest checkpoint to every witness that has not had it from here."""
        if not self.targets:
            return
        checkpoint = latest_checkpoint(reader)
        if checkpoint is None or checkpoint.seq == self._told:
            return
        check_files_of_witnesses(reader)
        for target in self.targets:
            try:
                tell(target, checkpoint)
            except (OSError, ValueError, subprocess.SubprocessError) as error:
                log.warning(
                    "the witness %s did not take event %d (%s); nothing is lost, the next one covers it",
                    target[:80],
                    checkpoint.seq,
                    error,
                )
        self._told, self._last = checkpoint.seq, time.monotonic()
