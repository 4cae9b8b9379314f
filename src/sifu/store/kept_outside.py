"""Records outside the run folder: this user's list of known operator keys, and checkpoints kept by witnesses.

A run folder cannot prove which key should have signed it: the whole folder can be signed again with another key. The
key of every run that is created or opened is therefore remembered in a file of the user, as ssh does in `known_hosts`.
The entry is stored under the run's id, which the first event names and which copies, moves and backups keep. From then
on the run must be signed with that key, or with a successor that the key signed for (`sifu key rotate`). The folder's
path is remembered as well: a different run in the same folder is refused. Opening, verifying, writing and restoring a
run store this entry; listing runs does not. `sifu key accept` accepts a change deliberately.

A witness is a file, a command or a URL that receives signed checkpoints of a run. The run is later compared with the
checkpoints that witnesses kept.
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
from sifu.store.checkpoints import Checkpoint, latest_checkpoint
from sifu.store.clock import utc_now
from sifu.store.files import TEMPORARY_PREFIX, append_line, private_folder, read_named, sync_folder
from sifu.store.keys import KEY_FILE, check_keys, is_encrypted, keys_of, signature_holds
from sifu.store.reader import RunReader

KNOWN_KEYS = "SIFU_KNOWN_KEYS"
"""Environment variable: file of known keys, instead of `sifu/known_keys` in the user's configuration folder."""
LARGEST_FILE = 64 << 20
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class KnownRun:
    """A run as last seen here: its keys in order, whether its private key was encrypted, and its folder."""

    keys: tuple[str, ...]
    encrypted: bool
    folder: str


@dataclass
class KnownKeys:
    """Content of the file of known keys."""

    runs: dict[str, KnownRun] = field(default_factory=dict)
    folders: dict[str, str] = field(default_factory=dict)
    """The run last seen in each folder."""

    def add(self, run: str, key: str, encrypted: bool, folder: str, accepted: bool) -> None:
        """Add an entry of the file.

        Args:
            run: Id of the run.
            key: Public key of its operator.
            encrypted: True if the private key was encrypted.
            folder: Path of the run.
            accepted: True if the user accepted this entry in place of all earlier ones.
        """
        earlier = None if accepted else self.runs.get(run)
        keys = () if earlier is None else tuple(before for before in earlier.keys if before != key)
        self.runs[run] = KnownRun((*keys, key), encrypted, folder)
        self.folders[folder] = run

    def held_before(self, folder: Path, run: str) -> str | None:
        """Return a different run that was last seen in this folder, under its path or a link to it, or None."""
        seen = (self.folders.get(place) for place in _places(folder))
        return next((other for other in seen if other is not None and other != run), None)


_read: dict[Path, tuple[tuple[int, int, int], KnownKeys]] = {}
"""Parsed files of known keys, reused until the file changes."""


def known_keys_file() -> Path:
    """Return the path of this user's file of known keys."""
    named = os.environ.get(KNOWN_KEYS, "").strip()
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")) / "sifu" / "known_keys"


def read_known_keys(path: Path) -> KnownKeys:
    """Return the content of the file of known keys; empty if there is no file.

    Raises:
        InputError: If the file cannot be read. Without it a changed key would go unnoticed.
    """
    try:
        status = path.stat()
        stamp = (status.st_ino, status.st_size, status.st_mtime_ns)
        if path in _read and _read[path][0] == stamp:
            return _read[path][1]
        if status.st_size > LARGEST_FILE:
            raise InputError(f"{path} has {status.st_size} bytes, too many for a file of known keys")
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
            raise InputError(
                f"{path}, line {number}, does not contain a run's key: correct or remove the line"
            ) from error
    _read[path] = (stamp, content)
    return content


def key_problem(reader: RunReader) -> str | None:
    """Return a description of the problem if the run's key is neither the known one nor a signed successor, or None."""
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
            f"which that key did not sign: its history was rewritten, or an older state was restored. {way_out}"
        )
    if earlier.encrypted and (reader.folder / KEY_FILE).is_file() and not is_encrypted(reader.folder):
        return (
            f"key: {KEY_FILE} of run {run} was encrypted when it was last used here, and is now stored without a "
            f"passphrase. Put the encrypted file back. {way_out}"
        )
    return None


def _signed_for(reader: RunReader, remembered: str) -> bool:
    """Return whether the ledger's keys lead from a known key to the current one, each change signed by both keys."""
    return remembered in [key for _, key in keys_of(reader)] and next(check_keys(reader), None) is None


def check_known_key(reader: RunReader) -> None:
    """Check the run's key against the key known here, without remembering anything.

    Raises:
        RunDamagedError: If the run has another key.
    """
    problem = key_problem(reader)
    if problem:
        raise RunDamagedError(f"{problem}. Nothing was done")


def check_place(folder: Path, run: str) -> None:
    """Check that no other run was last seen in the folder that a run will be restored to.

    Raises:
        InputError: If another run was seen there.
    """
    before = read_known_keys(known_keys_file()).held_before(folder, run)
    if before is not None:
        raise InputError(
            f"{folder} held run {before} when last used here, and the backup is of run {run[:40]}: restore it into "
            "another folder. Nothing was restored"
        )


def remember_key(reader: RunReader, *, accepted: bool = False) -> None:
    """Remember the run's key and folder if they are new; only warn if the file cannot be written.

    Args:
        reader: Reader of the run.
        accepted: True if the user accepted this key in place of all earlier ones.
    """
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
        # A restoration in progress: its folder is remembered under its final name.
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
    """Return a description of the problem if a certificate's key never belonged to this known run, or None."""
    earlier = read_known_keys(known_keys_file()).runs.get(run)
    if earlier is None or key in earlier.keys:
        return None
    return f"key: run {run} is known here by the key {earlier.keys[-1]}, the certificate is signed with {key}"


def _places(folder: Path) -> tuple[str, ...]:
    """Return the resolved path of a folder, and its unresolved path if that contains a link."""
    return tuple(dict.fromkeys((str(folder.resolve()), os.path.abspath(folder))))


WITNESSES = "SIFU_WITNESS"
"""Environment variable: witnesses, one per line: `file:PATH`, `command:PROGRAM ARGUMENTS`, or an http or https URL."""
EVERY_SECONDS = 60.0
"""Interval between witness notifications while a run is being written. The first and last event are always sent."""
TIMEOUT_SECONDS = 10.0


def witness_targets() -> tuple[str, ...]:
    """Return the witnesses that the environment names.

    Raises:
        InputError: If one of them is not a valid witness.
    """
    targets = tuple(line.strip() for line in os.environ.get(WITNESSES, "").splitlines() if line.strip())
    for target in targets:
        kind, _, rest = target.partition(":")
        if kind not in ("file", "command", "http", "https") or not rest.strip():
            raise InputError(f"a witness must be file:PATH, command:PROGRAM or a URL, found {target[:80]!r}")
    return targets


def check_files_of_witnesses(reader: RunReader) -> None:
    """Check that the run agrees with the checkpoints in the witnesses' files.

    Raises:
        RunDamagedError: If they differ: the history forked, or an older state was restored.
    """
    problem = next(contradictions(reader, files_of_witnesses()), None)
    if problem:
        raise RunDamagedError(
            f"{reader.folder}: {problem}. Nothing was done. If you restored a backup on purpose, keep this file and "
            "name another witness"
        )


def check_witnesses_know(reader: RunReader) -> None:
    """Check that each witness file that names other, unknown runs names this run too.

    A run sends its first event to its witnesses, so a run signed again under a new id is missing there. Several runs
    may share a witness; runs that are known here are skipped, because `check_known_key` has compared their folders.

    Raises:
        RunDamagedError: If a file names such other runs but not this one.
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
                f"{reader.folder}: the witness {path} does not know run {run[:40]} but knows run {suspects[0][:40]}, "
                "which this folder may have held. Nothing was done. If this is the right run, name another witness"
            )


def files_of_witnesses() -> dict[Path, list[bytes]]:
    """Return the lines of every file that the environment names as a witness."""
    paths = [Path(target.removeprefix("file:")) for target in witness_targets() if target.startswith("file:")]
    try:
        return {path: path.read_bytes().splitlines() if path.is_file() else [] for path in paths}
    except OSError as error:
        raise InputError(f"cannot read the witness's file {error.filename}: {error.strerror}") from error


def tell(target: str, checkpoint: Checkpoint) -> None:
    """Send a checkpoint to one witness, as a line of JSON."""
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
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS):  # any status other than success raises an error
            pass


class WitnessPost:
    """Notifier of a run's witnesses, which sends the first checkpoint, further ones at intervals, and the last one."""

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
        check_files_of_witnesses(reader)
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
        raise InputError(f"{path} contains no checkpoint")
    return checkpoints


def _checkpoint_of_certificate(content: bytes) -> Checkpoint | None:
    """Return the checkpoint named in a certificate; None if the content is not a validly signed certificate."""
    try:
        certificate = read_json(content)
        checkpoint = Checkpoint.in_certificate(certificate["body"], certificate["public_key"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return checkpoint if signature_holds(certificate) else None


def check_witnesses(reader: RunReader, files: Iterable[Path]) -> Iterator[str]:
    """Yield a problem for each checkpoint in these files that does not belong to the run's chain of events.

    Two checkpoints that contradict each other are a fork.

    Args:
        reader: Reader of the run.
        files: Files kept by witnesses, or certificates.
    """
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
            "put back, or its last events were removed"
        )
    return (
        f"fork: {path} has another event {seq} than the run, signed with the operator's key: the history was rewritten "
        "after it was shown"
    )


def contradictions(reader: RunReader, kept: Mapping[Path, Sequence[bytes]]) -> Iterator[str]:
    """Yield the checkpoints of this run in witnesses' files that contradict it.

    Several runs may write to such a file. Incomplete lines are skipped.

    Args:
        reader: Reader of the run.
        kept: Lines of each file.
    """
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
    """Yield a problem for each checkpoint that contradicts the others; the run itself is not needed.

    All checkpoints must be signed, belong to one run, and have one head per event.

    Args:
        heads: Checkpoints that several parties kept, with the files they come from.
    """
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
        if later.time < earlier.time <= utc_now():  # a date in the future comes from a wrong clock
            yield f"witness: event {later.seq} in {path} is dated before event {earlier.seq}: they are of two histories"
