"""What is kept outside a run folder: the operators' keys as this user knows them, and checkpoints with witnesses.

What lies in a run folder cannot say whose key it should be signed with: a folder can be signed anew as a whole. So the
key of every run that is made or opened is remembered in a file of the user's (as ssh does with `known_hosts`), under
the run's id, which the first event names and which copies, moves and backups keep. From then on the run must be signed
with that key, or with one that it signed for (`sifu key rotate`). The folder's path is remembered, too: another run in
its place is refused, whether or not it was used elsewhere. Opening, verifying, writing and restoring a run remember it;
listing runs does not. `sifu key accept` accepts a change deliberately.

Witnesses are a file, a command or a URL: checkpoints leave the machine to them, and what they kept is held against a
run.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import logging
import os
import shlex
import subprocess
import time
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sifu.core.ledger import canonical_json, read_json
from sifu.errors import InputError, RunDamagedError
from sifu.store.clock import utc_now
from sifu.store.files import TEMPORARY_PREFIX, append_line, private_folder, read_named, sync_folder
from sifu.store.keys import KEY_FILE, Checkpoint, check_keys, is_encrypted, keys_of, latest_checkpoint, signature_holds
from sifu.store.reader import RunReader

KNOWN_KEYS = "SIFU_KNOWN_KEYS"
"""The file to remember keys in, instead of known_keys in the folder sifu of the user's configuration."""
LARGEST_FILE = 64 << 20
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class KnownRun:
    """A run as it was seen here: its keys, the latest last, and whether the private one lay there encrypted."""

    keys: tuple[str, ...]
    encrypted: bool
    folder: str


@dataclass
class KnownKeys:
    """Everything that the file holds."""

    runs: dict[str, KnownRun] = field(default_factory=dict)
    folders: dict[str, str] = field(default_factory=dict)
    """The run that was last seen in each folder."""

    def add(self, run: str, key: str, encrypted: bool, folder: str, accepted: bool) -> None:
        """A line of the file: a later one adds to the earlier ones, unless the user accepted it in their place."""
        earlier = None if accepted else self.runs.get(run)
        keys = () if earlier is None else tuple(before for before in earlier.keys if before != key)
        self.runs[run] = KnownRun((*keys, key), encrypted, folder)
        self.folders[folder] = run

    def held_before(self, folder: Path, run: str) -> str | None:
        """Return the other run that was last seen in this folder, under its path or under one that links to it."""
        seen = (self.folders.get(place) for place in _places(folder))
        return next((other for other in seen if other is not None and other != run), None)


_read: dict[Path, tuple[tuple[int, int, int], KnownKeys]] = {}
"""What was read of a file, as long as it does not change: runs are opened again and again."""


def known_keys_file() -> Path:
    """Where this user's known keys are."""
    named = os.environ.get(KNOWN_KEYS, "").strip()
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")) / "sifu" / "known_keys"


def read_known_keys(path: Path) -> KnownKeys:
    """The file's content; one that cannot be read stops everything, since it could not warn either."""
    try:
        status = path.stat()
        stamp = (status.st_ino, status.st_size, status.st_mtime_ns)
        if path in _read and _read[path][0] == stamp:
            return _read[path][1]
        if status.st_size > LARGEST_FILE:
            raise InputError(f"{path} has {status.st_size} bytes, far more than known keys take")
        lines = path.read_text(encoding="utf-8").splitlines()
    except (FileNotFoundError, NotADirectoryError):
        return KnownKeys()
    except (OSError, ValueError) as error:
        raise InputError(f"the known keys in {path} cannot be read: {error}. See {KNOWN_KEYS}") from error
    content = KnownKeys()
    for number, line in enumerate(lines, start=1):
        try:
            entry: dict[str, Any] = json.loads(line)
            texts = [str(entry[name]) for name in ("run", "key", "folder")]
            content.add(texts[0], texts[1], bool(entry["encrypted"]), texts[2], bool(entry.get("accepted")))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise InputError(f"{path}, line {number}, names no key of a run: mend it, or take the line out") from error
    _read[path] = (stamp, content)
    return content


def key_problem(reader: RunReader) -> str | None:
    """A sentence if the run is not signed with the key that is known here, or with one that it signed for."""
    run, key = reader.value("run"), reader.value("public_key")
    path = known_keys_file()
    remembered = read_known_keys(path)
    earlier = remembered.runs.get(run)
    way_out = f"If the operator published this key, and you know why: sifu key accept {reader.folder} {key}"
    before = remembered.held_before(reader.folder, run)
    if before is not None:
        return (
            f"key: {reader.folder} held run {before} when it was last used here, and now holds run {run[:40]}, signed "
            f"with the key {key} ({path}). {way_out}"
        )
    if earlier is None:
        return None
    if key != earlier.keys[-1] and not _signed_for(reader, earlier.keys[-1]):
        return (
            f"key: run {run} is known here ({path}) by the key {earlier.keys[-1]}, and is now signed with {key}, for "
            f"which that key did not sign: its history was written anew, or is an older one. {way_out}"
        )
    if earlier.encrypted and (reader.folder / KEY_FILE).is_file() and not is_encrypted(reader.folder):
        return (
            f"key: {KEY_FILE} of run {run} was encrypted when it was last used here, and now lies there without a "
            f"passphrase. Put the encrypted one back. {way_out}"
        )
    return None


def _signed_for(reader: RunReader, remembered: str) -> bool:
    """Whether the keys of the ledger lead from a known one to the one in force, each change signed by both."""
    return remembered in [key for _, key in keys_of(reader)] and next(check_keys(reader), None) is None


def check_known_key(reader: RunReader) -> None:
    """Stop if the run's key is not the one that is known here; remember nothing."""
    problem = key_problem(reader)
    if problem:
        raise RunDamagedError(f"{problem}. Nothing was done")


def check_place(folder: Path, run: str) -> None:
    """Stop if a run is about to be restored where another one was last seen."""
    before = read_known_keys(known_keys_file()).held_before(folder, run)
    if before is not None:
        raise InputError(
            f"{folder} held run {before} when it was last used here, and the backup is of run {run[:40]}: restore it "
            "into another folder. Nothing was restored"
        )


def remember_key(reader: RunReader, *, accepted: bool = False) -> None:
    """Note the run's key and folder, if that is new; if the file cannot be written, warn and continue."""
    run, key, places = reader.value("run"), reader.value("public_key"), _places(reader.folder)
    path = known_keys_file()
    remembered = read_known_keys(path)
    earlier, encrypted = remembered.runs.get(run), is_encrypted(reader.folder)
    if earlier is not None and not accepted:
        encrypted = encrypted or earlier.encrypted
        same_place = all(remembered.folders.get(place) == run for place in places)
        if (earlier.keys[-1], earlier.encrypted) == (key, encrypted) and same_place:
            return
    if reader.folder.name.startswith(TEMPORARY_PREFIX):
        # A restoration that is still at work: its folder is remembered under the name that it gets.
        if earlier is None or not accepted:
            return
        places = (earlier.folder,)
    seen = () if earlier is None or accepted else earlier.keys
    new_keys = [named for _, named in keys_of(reader) if named != key and named not in seen] + [key]
    named_at = [(named, places[0]) for named in new_keys] + [(key, place) for place in places[1:]]
    entries = [{"run": run, "key": named, "encrypted": encrypted, "folder": place} for named, place in named_at]
    if accepted:
        entries[0]["accepted"] = True
    try:
        private_folder(path.parent, parents=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            os.write(descriptor, b"".join(json.dumps(entry).encode() + b"\n" for entry in entries))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        sync_folder(path.parent)
    except OSError as error:
        log.warning(
            "the key of %s cannot be remembered in %s (%s), so a change of it would go unnoticed: name a file that can "
            "be written with %s",
            reader.folder,
            path,
            error.strerror,
            KNOWN_KEYS,
        )


def known_key_problem(run: str, key: str) -> str | None:
    """A sentence if a certificate of a run that is known here is signed with a key that never was that run's."""
    earlier = read_known_keys(known_keys_file()).runs.get(run)
    if earlier is None or key in earlier.keys:
        return None
    return f"key: run {run} is known here by the key {earlier.keys[-1]}, the certificate is signed with {key}"


def _places(folder: Path) -> tuple[str, ...]:
    """Return the paths of a folder: where it lies, and the one it was named by if that leads through a link."""
    return tuple(dict.fromkeys((str(folder.resolve()), os.path.abspath(folder))))


WITNESSES = "SIFU_WITNESS"
"""Targets, one per line: `file:PATH`, `command:PROGRAM ARGUMENTS`, or an http or https URL."""
EVERY_SECONDS = 60.0
"""How often witnesses hear of a run that is being written to; at its first event and at its last they always do."""
TIMEOUT_SECONDS = 10.0


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


def check_witnesses_know(reader: RunReader) -> None:
    """Stop if the file of a witness knows runs that this folder may have held, and not the run that it holds.

    A run tells its witnesses of its first event, so one signed under a new id is missing there. Several runs may share
    a witness: the folders of those that are known here were compared before (`check_known_key`).
    """
    run, known = reader.value("run"), read_known_keys(known_keys_file())
    for path, lines in files_of_witnesses().items():
        others: dict[str, Checkpoint] = {}
        for line in lines:
            with suppress(InputError):
                checkpoint = Checkpoint.from_json(line)
                others.setdefault(checkpoint.run, checkpoint)
        suspects = [name for name, first in others.items() if name not in known.runs and first.holds]
        if run not in others and suspects:
            raise RunDamagedError(
                f"{reader.folder}: the witness {path} does not know run {run[:40]}, and knows run {suspects[0][:40]}, "
                "which this folder may have held. Nothing was done. If this run is the right one, name another witness"
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
    content = read_named(path, LARGEST_WITNESS_BYTES, "a witness keeps")
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
        checkpoint = Checkpoint.in_certificate(certificate["body"], certificate["public_key"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return checkpoint if signature_holds(certificate) else None


def check_witnesses(reader: RunReader, files: Iterable[Path]) -> Iterator[str]:
    """Every checkpoint that was signed for this run must be in its chain; two that contradict each other are a fork."""
    run, keys, hashes = reader.value("run"), {key for _, key in keys_of(reader)}, reader.hashes()
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
                yield _two_heads(seq, other, where, head, path)
            if hashes.get(seq) != head:
                yield _not_in_the_run(path, checkpoint, max(hashes))


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
            "put back, or its end was taken away"
        )
    return (
        f"fork: {path} has another event {seq} than the run, signed with the operator's key: the history was rewritten "
        "after it was shown"
    )


def contradictions(reader: RunReader, kept: Mapping[Path, Sequence[bytes]]) -> Iterator[str]:
    """What files that several runs may write to hold of this run and the run does not; half a line is passed over."""
    run, keys, heads = reader.value("run"), {key for _, key in keys_of(reader)}, reader.hashes()
    for path, line in ((path, line) for path, lines in kept.items() for line in lines):
        try:
            checkpoint = Checkpoint.from_json(line)
        except InputError:
            continue
        if checkpoint.run != run or heads.get(checkpoint.seq) == checkpoint.head or not checkpoint.holds:
            continue
        if checkpoint.public_key not in keys:
            by = f"signed with the key {checkpoint.public_key}, which the run never had"
            yield f"fork: {path} has event {checkpoint.seq}, {by}"
        else:
            yield _not_in_the_run(path, checkpoint, max(heads))


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
            yield _two_heads(checkpoint.seq, other.head, where, checkpoint.head, path)
    ordered = [by_number[number] for number in sorted(by_number)]
    for (_, earlier), (path, later) in itertools.pairwise(ordered):
        if later.time < earlier.time <= utc_now():  # a date ahead of us is of a clock that was wrong
            yield f"witness: event {later.seq} in {path} is dated before event {earlier.seq}: they are of two histories"
