"""Witnesses: files or programs outside the run folder that receive signed heads of a run.

The run is later compared with the heads that witnesses kept.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sifu.core.ledger import canonical_json, read_json
from sifu.errors import InputError, RunDamagedError
from sifu.store.checkpoints import Checkpoint, kept_in, latest_checkpoint
from sifu.store.files import append_line, check_output, read_named
from sifu.store.keys import keys_of, signature_holds
from sifu.store.reader import RunReader
from sifu.store.seen_heads import seen_heads

WITNESSES = "SIFU_WITNESS"
"""Environment variable: witnesses, one per line: a program with its arguments, or a file."""
EVERY_SECONDS = 60.0
"""Interval between witness notifications while a run is being written. The first and last event are always sent."""
TIMEOUT_SECONDS = 10.0
log = logging.getLogger(__name__)


def witness_targets() -> tuple[str, ...]:
    """Return the witnesses that the environment names.

    Raises:
        InputError: If one of them is not a valid witness.
    """
    targets = tuple(line.strip() for line in os.environ.get(WITNESSES, "").splitlines() if line.strip())
    for target in targets:
        if not _is_program(target) and not Path(target).parent.is_dir():
            raise InputError(f"a witness must be a program, or a file in an existing folder, found {target[:80]!r}")
        if not _is_program(target):
            check_output(Path(target))
    return targets


def _is_program(target: str) -> bool:
    try:
        words = shlex.split(target)
    except ValueError:
        return False
    return bool(words) and shutil.which(words[0]) is not None


def check_witnesses(reader: RunReader) -> None:
    """Check that the run agrees with the heads in the witnesses' files, and that a file with heads knows the run.

    A run sends its first event to its witnesses, so a run signed again under a new id is missing there. Several runs
    may share a witness, so runs that this user has seen are skipped.

    Raises:
        RunDamagedError: If a head differs, or if a file knows only other runs.
    """
    _check_kept(reader)
    run, known = reader.value("run"), {head.run for head in seen_heads()}
    for path, checkpoints in kept_checkpoints().items():
        others = [checkpoint.run for checkpoint in checkpoints if checkpoint.run not in known and checkpoint.holds]
        if others and all(checkpoint.run != run for checkpoint in checkpoints):
            raise RunDamagedError(
                f"{reader.folder}: the witness {path} does not know run {run[:40]} but knows run {others[0][:40]}, "
                "which this folder may have held. Nothing was done. If this is the right run, name another witness"
            )


def _check_kept(reader: RunReader) -> None:
    """Check that no head in the witnesses' files shows a fork or a later state of the run."""
    problem = next(contradictions(reader, kept_checkpoints()), None)
    if problem:
        raise RunDamagedError(
            f"{reader.folder}: {problem}. Nothing was done. If you restored a backup on purpose, keep this file and "
            "name another witness"
        )


def kept_checkpoints() -> dict[Path, list[Checkpoint]]:
    """Return the checkpoints, of any runs, in every file that the environment names as a witness."""
    return {Path(name): kept_in(Path(name)) for name in witness_targets() if not _is_program(name)}


def tell(target: str, checkpoint: Checkpoint) -> None:
    """Send a checkpoint to one witness, as a line of JSON."""
    line = canonical_json(checkpoint.to_mapping())
    if not _is_program(target):
        append_line(Path(target), line)
        return
    subprocess.run(
        shlex.split(target), input=line + b"\n", timeout=TIMEOUT_SECONDS, check=True, stdout=subprocess.DEVNULL
    )


class WitnessPost:
    """Notifier of a run's witnesses: it sends the first checkpoint, further ones at intervals, and the last one."""

    def __init__(self) -> None:
        self.targets = witness_targets()
        self._told: int | None = None
        self._last = time.monotonic()

    def recorded(self, reader: RunReader, seq: int) -> None:
        """Notify the witnesses of a recorded event if it is the first one or the interval has passed."""
        if self.targets and (seq == 1 or time.monotonic() - self._last >= EVERY_SECONDS):
            self.tell_all(reader)

    def tell_all(self, reader: RunReader) -> None:
        """Send the latest checkpoint to every witness, unless it was sent before."""
        if not self.targets:
            return
        checkpoint = latest_checkpoint(reader)
        if checkpoint is None or checkpoint.seq == self._told:
            return
        _check_kept(reader)
        for target in self.targets:
            try:
                tell(target, checkpoint)
            except (OSError, ValueError, subprocess.SubprocessError) as error:
                log.warning(
                    "the witness %s did not accept event %d (%s); nothing is lost, the next event covers it",
                    target[:80],
                    checkpoint.seq,
                    error,
                )
        self._told, self._last = checkpoint.seq, time.monotonic()


LARGEST_WITNESS_BYTES = 256 << 20


def read_witness(path: Path) -> list[Checkpoint]:
    """Return the checkpoints in a file: a witness's file with one JSON object per line, or a certificate."""
    certificate = _certificate_in(path)
    if certificate is not None and signature_holds(certificate):
        return [Checkpoint.in_certificate(certificate["body"], certificate["public_key"])]
    checkpoints = []
    for number, line in enumerate(_content(path).splitlines(keepends=True), start=1):
        if line.strip():
            try:
                checkpoints.append(Checkpoint.from_json(line))
            except InputError as error:
                if checkpoints and not line.endswith(b"\n"):  # an interrupted process wrote a part of the last line
                    break
                raise InputError(f"{path}, line {number}: {error}") from error
    if not checkpoints:
        raise InputError(f"{path} contains no checkpoint")
    return checkpoints


def _content(path: Path) -> bytes:
    return read_named(path, LARGEST_WITNESS_BYTES, "a file of heads is")


def _certificate_in(path: Path) -> dict[str, Any] | None:
    """Return the certificate in a file or bundle, whether its signature holds or not, or None if there is none."""
    try:
        content: dict[str, Any] = read_json(_content(path))
        certificate: dict[str, Any] = content.get("certificate", content)
        Checkpoint.in_certificate(certificate["body"], certificate["public_key"])
    except (AttributeError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return certificate


def check_given_heads(reader: RunReader, files: Iterable[Path]) -> Iterator[str]:
    """Yield a problem for each head in these files that does not belong to the run's chain of events.

    The files are witnesses' files or certificates. A certificate must be one that the run recorded. Two checkpoints
    that contradict each other prove a fork.
    """
    run, keys, hashes = reader.value("run"), {key for _, key in keys_of(reader)}, reader.hashes()
    recorded = [json.loads(text) for text in reader.certificates().values()]
    heads: dict[int, tuple[str, Path]] = {}
    for path in files:
        certificate = _certificate_in(path)
        other_certificate = certificate is not None and certificate not in recorded
        if certificate is not None and not signature_holds(certificate):
            yield f"witness: the signature of the certificate {path} does not hold"
            continue
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
                yield _two_heads(seq, other, where, head, path)
            if hashes.get(seq) != head:
                yield _not_in_the_run(path, checkpoint, max(hashes))
            elif other_certificate:
                yield f"witness: {path} is not a certificate that this run recorded"


def covered_by(reader: RunReader, path: Path) -> int:
    """Return the last event of the run whose head is in a file, or 0 if the file covers none."""
    hashes = reader.hashes()
    return max((head.seq for head in read_witness(path) if hashes.get(head.seq) == head.head), default=0)


def _two_heads(seq: int, head: str, path: Path, other: str, where: Path) -> str:
    return (
        f"fork: the operator signed two heads for event {seq}, {head[:16]}... ({path}) and {other[:16]}... ({where}): "
        "two histories were shown"
    )


def _not_in_the_run(path: Path, checkpoint: Checkpoint, last: int) -> str:
    seq = checkpoint.seq
    if seq > last:
        return (
            f"witness: {path} has event {seq} of {checkpoint.time}, the run ends at event {last}: an older state was "
            "put back, or its last events were removed"
        )
    return (
        f"fork: {path} has another event {seq} than the run, signed with the operator's key: the history was rewritten "
        "after it was shown"
    )


def contradictions(reader: RunReader, kept: Mapping[Path, Sequence[Checkpoint]]) -> Iterator[str]:
    """Yield a problem for each kept checkpoint of this run that contradicts the run's chain of events."""
    run, keys, heads = reader.value("run"), {key for _, key in keys_of(reader)}, reader.hashes()
    for path, checkpoint in ((path, checkpoint) for path, checkpoints in kept.items() for checkpoint in checkpoints):
        if checkpoint.run != run or heads.get(checkpoint.seq) == checkpoint.head or not checkpoint.holds:
            continue
        if checkpoint.public_key not in keys:
            by = f"signed with the key {checkpoint.public_key}, which the run never had"
            yield f"fork: {path} has event {checkpoint.seq}, {by}"
        else:
            yield _not_in_the_run(path, checkpoint, max(heads))
