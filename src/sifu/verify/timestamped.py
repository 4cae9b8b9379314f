"""Timestamps of heads and certificates, checked against what they are of and, where its certificate is given, against
the authority that signed them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sifu.core.ledger import Event, canonical_json
from sifu.errors import InputError
from sifu.store.certificate_path import certificate_path
from sifu.store.checkpoints import Checkpoint, signed_events
from sifu.store.clock import BEHIND, CLOCK_SET, time_of
from sifu.store.files import TEMPORARY_PREFIX
from sifu.store.reader import RunReader
from sifu.store.regular_files import read_plain
from sifu.store.timestamps import LARGEST_ANSWER, MISSING, NAME, TIMESTAMPS, protocol, read_timestamp, timestamp_path

UNCHECKED = "give the authority's certificate with --authority to check who signed it"


@dataclass(frozen=True)
class Authority:
    """Certificates of a timestamp authority, from a PEM file: those signed by themselves are the roots."""

    certificates: tuple[Any, ...]

    @staticmethod
    def read(path: str | Path) -> Authority:
        """From a file that the verifier trusts."""
        from cryptography.x509 import load_pem_x509_certificates

        protocol()
        try:
            return Authority(tuple(load_pem_x509_certificates(read_plain(Path(path), links=True))))
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror}") from error
        except ValueError as error:
            raise InputError(f"{path} holds no certificates in PEM form: {error}") from error

    def signed(self, answer: bytes, content: bytes) -> str | None:
        """None if the authority signed a timestamp over `content`, otherwise why not."""
        client = protocol()
        builder = client.VerifierBuilder()
        for certificate in self.certificates:
            if certificate.issuer == certificate.subject:
                builder = builder.add_root_certificate(certificate)
            else:
                builder = builder.add_intermediate_certificate(certificate)
        try:
            builder.build().verify_message(read_timestamp(answer), content)
        except (client.VerificationError, InputError, ValueError) as error:
            return str(error)[:200]
        return None


def check_timestamp(name: str, answer: bytes, content: bytes, authority: Authority | None) -> tuple[str, list[str]]:
    """When the authority says that `content` was there, and what is wrong with it."""
    try:
        response = read_timestamp(answer)
    except InputError as error:
        if "pip install" in str(error):
            return "", []
        return "", [f"timestamps: {name}: {error}"]
    time = response.tst_info.gen_time.strftime("%Y-%m-%dT%H:%M:%SZ")
    if response.tst_info.message_imprint.message != hashlib.sha256(content).digest():
        return time, [f"timestamps: {name} is a timestamp of something else: it, or what it is of, was changed"]
    why = authority.signed(answer, content) if authority is not None else None
    return time, [f"timestamps: {name} is not signed by the authority given: {why}"] if why else []


def timestamp_beside(path: Path, authority: Authority | None) -> tuple[list[str], list[str]]:
    """Problems and notes of the timestamp that lies beside a certificate's file, with `.tsr` after its name."""
    beside = path.with_name(f"{path.name}.tsr")
    if not beside.is_file() or beside.stat().st_size > LARGEST_ANSWER:
        missing = [f"timestamps: there is no {beside.name} beside the certificate"] if authority is not None else []
        return missing, []
    time, problems = check_timestamp(beside.name, read_plain(beside), path.read_bytes(), authority)
    return problems, [] if problems else [_note(path.name, time, authority)]


def _note(name: str, time: str, authority: Authority | None) -> str:
    if not time:
        return f"{name} has a timestamp, which this installation cannot read: pip install 'sifu[timestamps]'"
    signed = "" if authority is not None else f"; {UNCHECKED}"
    return f"{name} was there at {time}, says its timestamp{signed}"


def _check_dates(events: list[Event], seq: int, stamped: str) -> Iterator[str]:
    """The clock of the ledger, held against the authority's when it stamped a head.

    The head was there by then, so it is not dated later; what follows it was not there yet, so it is not dated before.
    """
    moment = time_of(stamped)
    head, corrected = events[seq - 1], any(event.kind == CLOCK_SET for event in events[seq:])
    if time_of(head.time) - moment > BEHIND and not corrected:
        yield f"clock: event {seq} is dated {head.time}, and its timestamp says that it was there at {stamped}"
    for event in events[seq:]:
        if moment - time_of(event.time) > BEHIND:
            yield f"clock: event {event.seq} is dated {event.time}, after event {seq} was stamped at {stamped}"
            return


def check_timestamps(reader: RunReader, authority: Authority | None, notes: list[str]) -> Iterator[str]:
    """Every timestamp in the run is of a head or certificate that the run has; what is missing is noted."""
    checkpoints = {
        event.seq: Checkpoint(reader.value("run"), event.seq, event.hash.hex(), event.time, key, event.signature.hex())
        for event, key in signed_events(reader.events())
        if event.signature is not None
    }
    contents = {
        f"{seq}.checkpoint.json": canonical_json(checkpoint.to_mapping()) for seq, checkpoint in checkpoints.items()
    }
    for (request, form), content in reader.certificates().items():
        contents[certificate_path(reader.folder, request, form).name] = content.encode()
    latest: list[tuple[str, str]] = []
    for path in sorted((reader.folder / TIMESTAMPS).glob("*")):
        if path.name.startswith(TEMPORARY_PREFIX):
            continue
        name = path.name.removesuffix(".tsr")
        if not NAME.fullmatch(path.name) or name not in contents:
            yield f"timestamps: {path.name[:80]} is of nothing that this run has signed"
            continue
        if path.stat().st_size > LARGEST_ANSWER:
            yield f"timestamps: {path.name} is far larger than a timestamp"
            continue
        time, problems = check_timestamp(path.name, read_plain(path), contents[name], authority)
        yield from problems
        if not problems:
            latest.append((time, name))
        if time and name.endswith(".checkpoint.json"):
            yield from _check_dates(reader.events(), int(name.partition(".")[0]), time)
    notes.extend(_note(name, time, authority) for time, name in sorted(latest)[-3:])
    wanted = [name for event in reader.events() if event.kind == MISSING for name in event.content["missing"]]
    # A later head covers an earlier one; a certificate has a timestamp of its own.
    still = [
        name for name in wanted if name.endswith(".public.json") and not timestamp_path(reader.folder, name).exists()
    ]
    if still:
        notes.append(
            f"a timestamp was asked for and did not come: {', '.join(dict.fromkeys(still))[:200]}; sifu timestamp asks "
            "again"
        )
