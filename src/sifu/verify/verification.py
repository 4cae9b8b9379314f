"""Offline verification of a run: claims are recomputed from the recorded scalars and the models that are stored."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sifu.errors import InputError
from sifu.requests.what_remains import copy_notes
from sifu.store import checkpoints, keys
from sifu.store.events_check import check_events, check_recorded_nodes
from sifu.store.files import is_locked, strange_files
from sifu.store.kept_heads import check_given_heads, contradictions, kept_checkpoints
from sifu.store.reader import RunReader
from sifu.store.record_check import check_database, check_ledger, check_tables
from sifu.store.seen_heads import head_problem, remember_head
from sifu.verify import client_checks, group_checks
from sifu.verify.certificate_checks import check_certificates, check_no_other_certificates, unwritten_notes
from sifu.verify.head_checks import check_kept_statistics
from sifu.verify.integrity import check_clients, check_rounds
from sifu.verify.leftover_files import Leftover, files_of_no_row
from sifu.verify.lifecycle_checks import (
    check_approvals,
    check_left_out,
    check_lifecycles,
    check_purges,
    check_restored,
    event_notes,
)
from sifu.verify.release_checks import check_releases, trusted_notes
from sifu.verify.request_checks import check_requests, on_record
from sifu.verify.stored_models import check_models, check_moved


@dataclass
class Verification:
    """Result of a verification; without `problems`, every claim that can be recomputed holds."""

    subject: str
    public_key: str = ""
    checked: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    on_record: list[str] = field(default_factory=list)
    """Requests of which a model was erased, so that their certificates rest on the signed record."""
    leftovers: list[Leftover] = field(default_factory=list)
    """Files left by an interrupted change; no claim depends on them, and the next writer deletes them."""
    content: dict[str, Any] = field(default_factory=dict, repr=False)
    """Parsed content of a verified certificate, or an empty dict for a run."""

    @property
    def holds(self) -> bool:
        """True if there are no problems."""
        return not self.problems

    def __bool__(self) -> bool:
        return self.holds


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
        The checks performed, with problems and notes.

    Raises:
        InputError: If an argument is invalid or the folder is not a run.
        RunDamagedError: If the database is missing or unreadable.
    """
    folder = Path(folder)
    check_public_key(public_key)
    result = Verification(str(folder))
    if folder.is_dir():
        result.problems.extend(f"folder: {problem}" for problem in strange_files(folder))
    if result.problems:  # reading such files could block, or follow a link out of the folder
        result.checked.append("folder")
        return result
    kept = kept_checkpoints()  # read before the run, so that no checkpoint is newer
    with RunReader(folder) as reader, reader.snapshot():
        if is_locked(folder):
            result.notes.append("the run is in use: files that its writer is changing were not checked")
        result.public_key = reader.value("public_key", "")
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
            before = len(result.problems)
            try:
                result.problems.extend(check(reader))
            except Exception as error:  # tampered data can make any check raise; report it as a problem
                result.problems.append(f"{name}: cannot be recomputed: {type(error).__name__}: {error}")
            if name not in result.checked:
                result.checked.append(name)
            if len(result.problems) > before and (name in ("database", "ledger") or check is check_clients):
                break  # later checks would repeat the problem, or trust forged values such as 10^9 steps
        try:
            result.problems.extend(contradictions(reader, kept))
            _check_against_outside(reader, result, public_key, [Path(path) for path in heads])
            result.checked += ["heads"] if kept or heads else []
        except InputError:
            raise
        except Exception as error:
            result.problems.append(f"ledger: cannot be read: {type(error).__name__}: {error}")
    return result


def _check_against_outside(reader: RunReader, result: Verification, public_key: str | None, heads: list[Path]) -> None:
    """Compare the run with the operator's key and with heads; add problems and notes to `result`."""
    named = [key for _, key in keys.keys_of(reader)]
    changed = head_problem(reader)
    if changed:
        result.problems.append(changed)
    if public_key is not None and public_key.lower() not in named:
        result.problems.append("key: the run was signed with another key than the one given")
    result.problems.extend(check_given_heads(reader, heads))
    if result.holds:
        remember_head(reader)
    result.on_record = on_record(reader)
    of_events, of_salts = event_notes, client_checks.lost_salt_notes
    for notes in (
        checkpoints.unsigned_notes,
        of_events,
        unwritten_notes,
        of_salts,
        copy_notes,
        trusted_notes,
    ):
        result.notes.extend(notes(reader))


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
