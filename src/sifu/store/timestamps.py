"""RFC 3161 timestamps: an outside authority signs when a head of the ledger, or a public certificate, existed.

    timestamps/SEQ.checkpoint.json.tsr    over the canonical JSON of the checkpoint, as witnesses keep it
    timestamps/REQUEST.public.json.tsr    over the bytes of the certificate's file

Each file is the unchanged response of the authority. An authority is asked only if the environment or the command line
names one, at the end of a command that wrote something. If the authority does not answer, the command continues: an
event records the missing timestamps, and `sifu timestamp` asks again.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import sqlite3
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sifu.core.ledger import canonical_json
from sifu.errors import InputError, MissingPackageError, SifuError, install_extra
from sifu.store.checkpoints import latest_checkpoint
from sifu.store.files import TIMESTAMPS, certificate_path, write_atomically
from sifu.store.projection import NewEvent
from sifu.store.reader import RunReader

AUTHORITY = "SIFU_TIMESTAMP"
"""Environment variable: http or https URL of a timestamp authority."""
NAME = re.compile(r"([1-9][0-9]{0,17})\.checkpoint\.json\.tsr|([A-Za-z0-9][A-Za-z0-9._-]{0,63})\.public\.json\.tsr")
MISSING = "timestamp missing"
TIMEOUT_SECONDS = 10.0
LARGEST_ANSWER = 1 << 20
GRANTED = (0, 1)
log = logging.getLogger(__name__)


def timestamp_authority() -> str | None:
    """Return the authority that the environment names, or None.

    Raises:
        InputError: If the name is not a URL.
    """
    address = os.environ.get(AUTHORITY, "").strip()
    return check_authority(address) if address else None


def check_authority(address: str) -> str:
    """Return the URL of an authority after checking it.

    Raises:
        InputError: If the address is not a URL, or the package for timestamps is not installed.
    """
    if not re.fullmatch(r"https?://[^\s]+", address):
        raise InputError(f"a timestamp authority must be an http or https URL, found {address[:80]!r}")
    protocol()
    return address


def protocol() -> Any:
    """Return the optional package that implements RFC 3161."""
    try:
        import rfc3161_client
    except ImportError as error:
        raise MissingPackageError(
            f"timestamps need the package rfc3161-client: {install_extra('timestamps')}"
        ) from error
    return rfc3161_client


def timestamp_path(folder: Path, name: str) -> Path:
    """Return the path of the timestamp of `SEQ.checkpoint.json` or of a certificate's file."""
    return folder / TIMESTAMPS / f"{name}.tsr"


def stamped_content(reader: RunReader) -> Iterator[tuple[str, bytes]]:
    """Yield the name and content of everything to timestamp: the latest signed head and each public certificate."""
    checkpoint = latest_checkpoint(reader)
    if checkpoint is not None:
        yield f"{checkpoint.seq}.checkpoint.json", canonical_json(checkpoint.to_mapping())
    for (request, form), content in sorted(reader.certificates().items()):
        if form == "public":
            yield certificate_path(reader.folder, request, form).name, content.encode()


def fetch_timestamps(reader: RunReader, authority: str) -> tuple[list[str], list[str], str]:
    """Request every missing timestamp.

    The first failure ends the requests, so that the command does not wait repeatedly for an unavailable authority.

    Returns:
        Names of the new timestamps, names of the missing timestamps, and the reason why they are missing.
    """
    folder, came = reader.folder, list[str]()
    wanted = {name: text for name, text in stamped_content(reader) if not timestamp_path(folder, name).exists()}
    try:
        for name, content in wanted.items():
            write_atomically(timestamp_path(folder, name), ask_authority(authority, content))
            came.append(name)
    except (OSError, ValueError, InputError) as error:
        return came, [name for name in wanted if name not in came], str(error)[:200] or type(error).__name__
    return came, [], ""


def ask_authority(authority: str, content: bytes) -> bytes:
    """Return the authority's response for `content`.

    Raises:
        InputError: If the request was refused, or the response is not for this content and request.
    """
    client = protocol()
    builder = client.TimestampRequestBuilder().data(content).hash_algorithm(client.base.HashAlgorithm.SHA256)
    question = builder.build()
    headers = {"Content-Type": "application/timestamp-query", "Accept": "application/timestamp-reply"}
    request = urllib.request.Request(authority, data=question.as_bytes(), headers=headers)
    with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as stream:
        answer: bytes = stream.read(LARGEST_ANSWER + 1)
    if len(answer) > LARGEST_ANSWER:
        raise InputError(f"the timestamp authority {authority} sent an answer too large for a timestamp")
    response = read_timestamp(answer)
    if response.tst_info.nonce != question.nonce:
        raise InputError(f"the timestamp authority {authority} answered a different request")
    if response.tst_info.message_imprint.message != hashlib.sha256(content).digest():
        raise InputError(f"the timestamp authority {authority} signed different content")
    return answer


def read_timestamp(answer: bytes) -> Any:
    """Parse a timestamp response.

    Raises:
        InputError: If the content is not a response of RFC 3161, or the authority refused.
    """
    try:
        response = protocol().decode_timestamp_response(answer)
        if int(response.status) not in GRANTED:
            raise InputError(f"the timestamp authority refused (status {int(response.status)})")
        response.tst_info.message_imprint  # noqa: B018  (raises an error for a refusal, which has no imprint)
    except (ValueError, TypeError) as error:
        raise InputError(f"not a timestamp of RFC 3161: {error}"[:200]) from error
    return response


def stamp_at_the_end(writer: Any, authority: str) -> None:
    """Request missing timestamps when a writer closes. Failures are recorded and logged, not raised."""
    try:
        _, missing, reason = fetch_timestamps(writer, authority)
        if missing:
            log.warning(
                "the authority %s gave no timestamp (%s); nothing is lost, sifu timestamp asks again",
                authority[:80],
                reason,
            )
            writer.record(NewEvent(MISSING, {"authority": authority, "missing": missing, "reason": reason}))
    except (OSError, SifuError, sqlite3.Error) as error:
        log.warning("timestamps could not be kept: %s", error)
