"""Offline verification of a run: claims are recomputed from the recorded scalars and the models that are stored."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from sifu.checking import client_checks, group_checks
from sifu.checking.certificate_checks import check_certificates, check_no_other_certificates, unwritten_notes
from sifu.checking.head_checks import check_kept_statistics
from sifu.checking.integrity import check_clients, check_rounds
from sifu.checking.leftover_files import Leftover, files_of_no_row
from sifu.checking.lifecycle_checks import (
    check_approvals,
    check_left_out,
    check_lifecycles,
    check_purges,
    check_restored,
    event_notes,
)
from sifu.checking.release_checks import check_releases, trusted_notes
from sifu.checking.request_checks import check_requests
from sifu.checking.stored_models import check_models, check_moved
from sifu.core.ledger import read_json
from sifu.errors import InputError
from sifu.requests.what_remains import copy_notes
from sifu.store import checkpoints, keys
from sifu.store.events_check import check_events, check_recorded_nodes
from sifu.store.files import is_locked, strange_files
from sifu.store.kept_heads import check_given_heads, contradictions, covered_by, kept_checkpoints
from sifu.store.reader import RunReader
from sifu.store.record_check import check_database, check_ledger, check_tables
from sifu.store.seen_heads import head_problem, is_copy, remember_head

SHORT_NOTES = 3
"""Maximum number of notes shown without --all."""


@dataclass(frozen=True)
class CheckedRequest:
    """A finished request; `recomputed` is False if it rests on the signed record, at least in part."""

    request: str
    recomputed: bool


@dataclass(frozen=True)
class Verification:
    """Result of a verification; without `problems`, every claim that can be recomputed holds.

    Attributes:
        subject: The run folder or the file that was verified.
        public_key: The operator's public key, as the subject names it.
        events: Number of events of the run.
        last_event: Time of the last event.
        requests: The finished requests of the run.
        heads: Last event of the run that each given file of heads covers.
        notes: Findings that are no faults.
        leftovers: Files left by an interrupted change; no claim depends on them, and the next writer deletes them.
        problems: Claims that do not hold.
        in_use: True if a writer was active, so that files were not checked.
        content: Parsed content of a certificate, or an empty dict for a run.
    """

    subject: str
    public_key: str = ""
    events: int = 0
    last_event: str = ""
    requests: tuple[CheckedRequest, ...] = ()
    heads: Mapping[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    leftovers: list[Leftover] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    in_use: bool = False
    content: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def holds(self) -> bool:
        """True if there are no problems."""
        return not self.problems

    def __bool__(self) -> bool:
        return self.holds

    def to_mapping(self) -> dict[str, Any]:
        """Return the result as plain values, ready for JSON."""
        values = asdict(self) | {"holds": self.holds}
        del values["content"]
        return values

    def lines(self, everything: bool = False) -> list[str]:
        """Return the findings, what was recomputed, and the conclusion; `everything` includes all notes."""
        if not self.holds:
            return [f"{self.subject} does not verify, problems: {len(self.problems)}", *self.problems]
        few = self.notes if everything else self.notes[:SHORT_NOTES]
        lines = [f"Note: {note}." for note in few]
        if len(self.notes) > len(few):
            lines.append(f"Further notes with --all: {len(self.notes) - len(few)}.")
        if not self.events:
            lines.append(f"Signed with the key {self.public_key}.")
            conclusion = "the signature holds and its figures agree; the run behind it was not checked"
            return [*lines, f"Consistent {self.subject}: {conclusion}."]
        on_record = "Rest on the signed record, at least in part"
        for basis, recomputed in (("Recomputed", True), (on_record, False)):
            named = [request.request for request in self.requests if request.recomputed == recomputed]
            lines += [f"{basis}: {', '.join(named)}."] if named else []
        lines += [f"{file} covers the first {event} of {self.events} events." for file, event in self.heads.items()]
        lines.append(f"{self.events} events until {self.last_event}, signed with the key {self.public_key}.")
        if self.in_use:
            return [*lines, f"No problem in what was checked of {self.subject}, which is in use."]
        return [*lines, f"Verified {self.subject}: its claims follow from its record."]


def verify_run(
    folder: str | Path,
    public_key: str | None = None,
    heads: Sequence[str | Path] = (),
) -> Verification:
    """Verify a run.

    Files that a writer is using at the same time are not checked, and a note says so.

    Args:
        folder: Folder of the run.
        public_key: The operator's public key (hex), if it is known from elsewhere.
        heads: Files of signed heads that others kept, or certificates; a rewritten chain does not contain them.

    Returns:
        The problems, the notes, and what they are about.

    Raises:
        InputError: If an argument is invalid or the folder is not a run.
        RunDamagedError: If the database is missing or unreadable.
    """
    folder, given = Path(folder), [Path(path) for path in heads]
    check_public_key(public_key)
    problems = [f"folder: {problem}" for problem in strange_files(folder)] if folder.is_dir() else []
    if problems:  # reading such files could block, or follow a link out of the folder
        return Verification(str(folder), problems=problems)
    kept = kept_checkpoints()  # read before the run, so that no checkpoint is newer
    with RunReader(folder) as reader, reader.snapshot():
        in_use = is_locked(folder)
        result = Verification(str(folder), reader.value("public_key", ""), problems=problems, in_use=in_use)
        if in_use:
            result.notes.append("the run is in use: files that its writer is changing were not checked")
        for name, check in (
            ("database", check_database),
            ("ledger", check_ledger),
            ("signatures", checkpoints.check_checkpoints),
            ("events", check_events),
            ("events", check_recorded_nodes),
            ("tables", check_tables),
            ("tables", check_clients),
            ("tables", client_checks.check_sample_digests),
            ("rounds", check_rounds),
            ("history", client_checks.check_history),
            ("groups", group_checks.check_groups),
            ("models", check_models),
            ("models", check_moved),
            ("statistics", check_kept_statistics),
            ("releases", check_releases),
            ("keys", keys.check_keys),
            ("certificates", check_certificates),
            ("certificates", check_no_other_certificates),
            ("folder", lambda reader: _check_files_of_no_row(reader, result)),
            ("requests", check_requests),
            ("requests", client_checks.check_remainders),
            ("lifecycles", check_lifecycles),
            ("approvals", check_approvals),
            ("approvals", check_left_out),
            ("purges", check_purges),
            ("restored", check_restored),
        ):
            before = len(problems)
            try:
                problems.extend(check(reader))
            except Exception as error:  # tampered data can make any check raise; report it as a problem
                problems.append(f"{name}: cannot be recomputed: {type(error).__name__}: {error}")
            if len(problems) > before and (name in ("database", "ledger") or check is check_clients):
                break  # later checks would repeat the problem, or trust forged values such as 10^9 steps
        try:
            problems.extend(contradictions(reader, kept))
            problems.extend(_check_against_outside(reader, public_key, given))
            if result.holds and not is_copy(reader):
                remember_head(reader)
            for notes_of in (
                checkpoints.unsigned_notes,
                event_notes,
                unwritten_notes,
                client_checks.lost_salt_notes,
                copy_notes,
                trusted_notes,
            ):
                result.notes.extend(notes_of(reader))
            last = reader.events()[-1]
            covered = {str(path): covered_by(reader, path) for path in given}
            in_use = in_use or is_locked(folder)  # a writer may have started since
            requests = _checked_requests(reader, in_use)
            result = replace(result, events=last.seq, last_event=last.time, heads=covered)
            return replace(result, requests=requests, in_use=in_use)
        except InputError:
            raise
        except Exception as error:
            problems.append(f"ledger: cannot be read: {type(error).__name__}: {error}")
    return result


def _check_against_outside(reader: RunReader, public_key: str | None, heads: list[Path]) -> Iterator[str]:
    """Yield a problem if the run contradicts what this user saw, the operator's key, or heads kept elsewhere."""
    changed = head_problem(reader)
    if changed:
        yield changed
    if public_key is not None and public_key.lower() not in [key for _, key in keys.keys_of(reader)]:
        yield "key: the run was signed with another key than the one given"
    yield from check_given_heads(reader, heads)


def _checked_requests(reader: RunReader, in_use: bool) -> tuple[CheckedRequest, ...]:
    """Return the finished requests.

    A request rests on the signed record if a model of it was erased, if it states a guarantee over all releases, which
    needs distances of heads whose statistics were erased, or if a writer is active and its files were not read.
    """
    stored, certificates = reader.models().keys(), reader.certificates().items()
    over_all_releases = {request for (request, _), text in certificates if "before_after" in read_json(text)["body"]}
    return tuple(
        CheckedRequest(
            row.request,
            {row.noise_node, row.final_node, row.source_node if row.noise_std else row.noise_node} <= stored
            and not in_use
            and row.request not in over_all_releases,
        )
        for row in reader.requests()
        if row.status == "done"
    )


def _check_files_of_no_row(reader: RunReader, result: Verification) -> Iterator[str]:
    """Yield a problem for each unnamed file that no interrupted change explains, and note all other unnamed files."""
    for entry in files_of_no_row(reader):
        if isinstance(entry, str):
            yield entry
        else:
            result.leftovers.append(entry)
    if result.leftovers:
        named = ", ".join(entry.file for entry in result.leftovers[:5])
        more = f" and {len(result.leftovers) - 5} more" if len(result.leftovers) > 5 else ""
        result.notes.append(
            f"files of an interrupted command are left: {named}{more}. No claim depends on them, but they may contain "
            "influence of clients; the next command that writes to the run deletes them"
        )


def check_public_key(public_key: str | None) -> None:
    """Check that a string can be an Ed25519 public key.

    Raises:
        InputError: If the string cannot be such a key.
    """
    if public_key is not None and not re.fullmatch(r"[0-9a-fA-F]{64}", public_key):
        raise InputError(f"a public key must have 64 hexadecimal digits, found {len(public_key)} characters")
