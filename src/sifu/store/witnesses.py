"""Witnesses: checkpoints leave the machine to a file, a command or a URL, and what they kept is held against a run."""

from __future__ import annotations

import itertools
import logging
import os
import shlex
import subprocess
import time
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from sifu.core.ledger import canonical_json, read_json
from sifu.errors import InputError, RunDamagedError
from sifu.store.checkpoints import Checkpoint, keys_of, latest_checkpoint
from sifu.store.clock import utc_now
from sifu.store.files import append_line
from sifu.store.keys import signature_holds
from sifu.store.reader import RunReader

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
    problem = next(contradictions(reader, files_of_witnesses()), None)
    if problem:
        raise RunDamagedError(
            f"{reader.folder}: {problem}. Nothing was done. If a backup was restored deliberately, keep this file "
            "and name another witness"
        )


def files_of_witnesses() -> dict[Path, list[bytes]]:
    """The lines of every file that the environment names as a witness."""
    paths = [Path(target.removeprefix("file:")) for target in witness_targets() if target.startswith("file:")]
    try:
        return {path: path.read_bytes().splitlines() if path.is_file() else [] for path in paths}
    except OSError as error:
        raise InputError(f"cannot read the witness's file {error.filename}: {error.strerror}") from error


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


LARGEST_WITNESS_BYTES = 256 << 20


def read_witness(path: Path) -> list[Checkpoint]:
    """The checkpoints in a file: one JSON object a line as witnesses keep them, or a certificate."""
    try:
        if not path.is_file():
            raise InputError(f"{path} is not a file: a witness's file holds one checkpoint a line, or a certificate")
        if path.stat().st_size > LARGEST_WITNESS_BYTES:
            raise InputError(f"{path} has {path.stat().st_size} bytes, far more than a witness keeps")
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    certificate = _checkpoint_of_certificate(content)
    if certificate is not None:
        return [certificate]
    checkpoints = []
    for number, line in enumerate(content.splitlines(), start=1):
        if line.strip():
            try:
                checkpoints.append(Checkpoint.from_json(line))
            except InputError as error:
                raise InputError(f"{path}, line {number}: {error}") from error
    if not checkpoints:
        raise InputError(f"{path} holds no checkpoint")
    return checkpoints


def _checkpoint_of_certificate(content: bytes) -> Checkpoint | None:
    """The checkpoint that a certificate names, if this is one whose signature holds."""
    try:
        certificate = read_json(content)
        body = certificate["body"]
        ledger = body["ledger"]
        checkpoint = Checkpoint(
            body["run"], ledger["seq"], ledger["head"], ledger["time"], certificate["public_key"], ledger["signature"]
        )
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return checkpoint if signature_holds(certificate) else None


def check_witnesses(reader: RunReader, files: Iterable[Path]) -> Iterator[str]:
    """Every checkpoint that was signed for this run must be in its chain; two that contradict each other are a fork."""
    run, keys = reader.value("run"), {key for _, key in keys_of(reader)}
    events = {event.seq: event for event in reader.events()}
    last = max(events)
    heads: dict[int, tuple[str, Path]] = {}
    for path in files:
        for checkpoint in read_witness(path):
            seq, head = checkpoint.seq, checkpoint.head
            if checkpoint.run != run:
                yield f"witness: {path} has a checkpoint of another run ({checkpoint.run[:40]})"
                continue
            if checkpoint.public_key not in keys or not checkpoint.holds:
                yield f"witness: the checkpoint of event {seq} in {path} is not signed with a key of this run"
                continue
            other, where = heads.setdefault(seq, (head, path))
            if other != head:
                yield (
                    f"fork: the operator signed two heads for event {seq}, {other[:16]}... ({where}) and "
                    f"{head[:16]}... ({path}): two histories were shown"
                )
            if seq > last:
                yield (
                    f"witness: {path} has event {seq} of {checkpoint.time}, the run ends at event {last}: an older "
                    "state was put back, or its end was taken away"
                )
            elif events[seq].hash.hex() != head:
                yield (
                    f"fork: {path} has another event {seq} than the run, signed with the operator's key: the history "
                    "was rewritten after it was shown"
                )


def contradictions(reader: RunReader, kept: Mapping[Path, Sequence[bytes]]) -> Iterator[str]:
    """What files that several runs may write to hold of this run and the run does not; half a line is passed over."""
    run, keys = reader.value("run"), {key for _, key in keys_of(reader)}
    heads = {int(seq): bytes(digest).hex() for seq, digest in reader.query("SELECT seq, hash FROM events")}
    for path, line in ((path, line) for path, lines in kept.items() for line in lines):
        try:
            checkpoint = Checkpoint.from_json(line)
        except InputError:
            continue
        if checkpoint.run != run or heads.get(checkpoint.seq) == checkpoint.head or not checkpoint.holds:
            continue
        seq = checkpoint.seq
        if checkpoint.public_key not in keys:
            yield f"fork: {path} has event {seq}, signed with the key {checkpoint.public_key}, which the run never had"
        elif seq > max(heads):
            yield (
                f"witness: {path} has event {seq} of {checkpoint.time}, the run ends at event {max(heads)}: an older "
                "state was put back, or its end was taken away"
            )
        else:
            yield f"fork: {path} has another event {seq} than the run: the history was rewritten after it was shown"


def check_heads(heads: Iterable[tuple[Path, Checkpoint]]) -> Iterator[str]:
    """Heads that several parties kept, without the run: signed, of one run, and one head for each event."""
    first: tuple[Path, Checkpoint] | None = None
    by_number: dict[int, tuple[Path, Checkpoint]] = {}
    for path, checkpoint in heads:
        if not checkpoint.holds:
            yield f"witness: the checkpoint of event {checkpoint.seq} in {path} is not signed by the key it names"
            continue
        first = first or (path, checkpoint)
        if checkpoint.run != first[1].run:
            yield f"witness: {path} has a checkpoint of another run ({checkpoint.run[:40]}) than {first[0]}"
            continue
        where, other = by_number.setdefault(checkpoint.seq, (path, checkpoint))
        if other.head != checkpoint.head:
            yield (
                f"fork: the operator signed two heads for event {checkpoint.seq}, {other.head[:16]}... ({where}) and "
                f"{checkpoint.head[:16]}... ({path}): two histories were shown"
            )
    ordered = [by_number[number] for number in sorted(by_number)]
    for (_, earlier), (path, later) in itertools.pairwise(ordered):
        if later.time < earlier.time <= utc_now():  # a date ahead of us is of a clock that was wrong
            yield f"witness: event {later.seq} in {path} is dated before event {earlier.seq}: they are of two histories"
