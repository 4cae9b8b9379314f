"""The time of events: by this machine's clock, held against the ledger, and by an authority's timestamps.

RFC 3161 timestamps: an authority outside signs that a head of the ledger, or a public certificate, was there.

    timestamps/SEQ.checkpoint.json.tsr    over the canonical JSON of the checkpoint, as witnesses keep it
    timestamps/REQUEST.public.json.tsr    over the bytes of the certificate's file

Each file is the authority's answer as it came. An authority is asked only if the environment or the command line names
one, at the end of a command that wrote something. One that does not answer holds nothing up: an event says what is
missing, and `sifu timestamp` asks again.
"""

from __future__ import annotations

import datetime
import getpass
import hashlib
import itertools
import logging
import os
import re
import sqlite3
import unicodedata
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sifu.core.ledger import Event, canonical_json
from sifu.errors import InputError, RunDamagedError, SifuError
from sifu.store.files import TIMESTAMPS, certificate_path, write_atomically
from sifu.store.keys import latest_checkpoint
from sifu.store.projection import NewEvent
from sifu.store.reader import RunReader

CLOCK_SET = "clock set"
"""The event by which the operator says that the clock is right now, whatever the event before it was dated."""
TIME_FORMAT = "%Y-%m-%dT%H:%M:%SZ"
BEHIND = datetime.timedelta(hours=1)
"""How far clocks may differ, of several machines for example, before one of them is called wrong."""
AHEAD = datetime.timedelta(days=366)
"""How long a run may rest before its clock has to be confirmed."""
WAY_OUT = "If the clock is right now, sifu sign DIR --clock says so permanently; otherwise set it first"


def current_time() -> datetime.datetime:
    """The clock of this machine."""
    return datetime.datetime.now(datetime.UTC)


def utc_now() -> str:
    """The clock of this machine, to the second and in UTC."""
    return current_time().strftime(TIME_FORMAT)


def clock_problem(last: str, now: str) -> str | None:
    """A sentence if the clock and the time of the last event cannot both be right."""
    gap = time_of(now) - time_of(last)
    if gap < -BEHIND:
        return f"clock: the last event is dated {last}, and the clock says {now}: one of them is wrong"
    if gap > AHEAD:
        return f"clock: the clock says {now}, {gap.days} days after the last event ({last}): did it jump?"
    return None


def time_after(last: str, now: str) -> str:
    """The time of the event after one of the time `last`."""
    problem = clock_problem(last, now)
    if problem:
        raise RunDamagedError(f"{problem} Nothing was done. {WAY_OUT}")
    return max(last, now)


def check_order_of_times(events: Sequence[Event]) -> Iterator[str]:
    """Times neither run backwards nor jump, unless the operator recorded that in an event."""
    for before, after in itertools.pairwise(events):
        if after.kind == CLOCK_SET:
            if after.content.get("before") != before.time:
                yield f"clock: event {after.seq} sets the clock and names another time than that of event {before.seq}"
        elif after.time < before.time:
            yield f"ledger: event {after.seq} is dated before event {before.seq}: {after.time[:20]}, {before.time[:20]}"
        elif time_of(after.time) - time_of(before.time) > AHEAD:
            yield (
                f"clock: event {after.seq} is dated {after.time}, over a year after event {before.seq} "
                f"({before.time}), and the operator did not confirm the clock"
            )


def check_not_ahead(reader: RunReader) -> Iterator[str]:
    """No event is dated after the moment at which it is read, unless the clock was set since."""
    last, now = reader.events()[-1], utc_now()
    if time_of(last.time) - time_of(now) > BEHIND:
        yield f"clock: event {last.seq} is dated {last.time}, and the clock here says {now}: one of them is wrong"


def time_of(text: str) -> datetime.datetime:
    """A time as the ledger writes it."""
    return datetime.datetime.strptime(text, TIME_FORMAT).replace(tzinfo=datetime.UTC)


ACTOR = "SIFU_ACTOR"
LONGEST_ACTOR = 120


def actor_name(given: str | None = None) -> str:
    """The name given, or of the environment, or of the user of this machine."""
    name = given or os.environ.get(ACTOR)
    if not name:
        try:
            name = getpass.getuser()
        except (OSError, KeyError):  # a container without a user database
            name = "unknown"
    if len(name) > LONGEST_ACTOR or not name.isprintable() or not name.strip():
        raise InputError(f"an actor's name is printable, not blank, and has at most {LONGEST_ACTOR} characters")
    return name


def same_person(actor: str) -> str:
    """A name without what makes two spellings of one name: case, spaces, and characters that only look different.

    >>> same_person(" Ann  LEE") == same_person("\uff21nn Lee"), same_person("Rene\u0301") == same_person("Ren\u00e9")
    (True, True)
    """
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", actor).casefold())
    return " ".join(folded.split())


AUTHORITY = "SIFU_TIMESTAMP"
"""The address of a timestamp authority, http or https."""
NAME = re.compile(r"([1-9][0-9]{0,17})\.checkpoint\.json\.tsr|([A-Za-z0-9][A-Za-z0-9._-]{0,63})\.public\.json\.tsr")
MISSING = "timestamp missing"
TIMEOUT_SECONDS = 10.0
LARGEST_ANSWER = 1 << 20
GRANTED = (0, 1)
log = logging.getLogger(__name__)


def timestamp_authority() -> str | None:
    """The authority that the environment names; what cannot be one is refused."""
    address = os.environ.get(AUTHORITY, "").strip()
    return check_authority(address) if address else None


def check_authority(address: str) -> str:
    """The address of an authority; what cannot be one is refused."""
    if not re.fullmatch(r"https?://[^\s]+", address):
        raise InputError(f"a timestamp authority is an http or https URL, found {address[:80]!r}")
    protocol()
    return address


def protocol() -> Any:
    """The library that speaks RFC 3161; it is an extra."""
    try:
        import rfc3161_client
    except ImportError as error:
        raise InputError("timestamps need the package rfc3161-client: pip install 'sifu[timestamps]'") from error
    return rfc3161_client


def timestamp_path(folder: Path, name: str) -> Path:
    """The file of a timestamp of `SEQ.checkpoint.json` or of a certificate's file."""
    return folder / TIMESTAMPS / f"{name}.tsr"


def stamped_content(reader: RunReader) -> Iterator[tuple[str, bytes]]:
    """What is to have a timestamp: the latest signed head, and every public certificate."""
    checkpoint = latest_checkpoint(reader)
    if checkpoint is not None:
        yield f"{checkpoint.seq}.checkpoint.json", canonical_json(checkpoint.to_mapping())
    for (request, form), content in sorted(reader.certificates().items()):
        if form == "public":
            yield certificate_path(reader.folder, request, form).name, content.encode()


def fetch_timestamps(reader: RunReader, authority: str) -> tuple[list[str], list[str], str]:
    """Ask for every timestamp that is not there yet: those that came, those that are missing, and why.

    After the first failure nothing more is asked: an authority that is down would be waited for again and again.
    """
    came: list[str] = []
    missing: list[str] = []
    reason = ""
    for name, content in stamped_content(reader):
        path = timestamp_path(reader.folder, name)
        if path.exists():
            continue
        if not reason:
            try:
                write_atomically(path, ask_authority(authority, content))
                came.append(name)
                continue
            except (OSError, ValueError, InputError) as error:
                reason = str(error)[:200] or type(error).__name__
        missing.append(name)
    return came, missing, reason


def ask_authority(authority: str, content: bytes) -> bytes:
    """The authority's answer for `content`, checked to be one: granted, over this content, to this question."""
    client = protocol()
    builder = client.TimestampRequestBuilder().data(content).hash_algorithm(client.base.HashAlgorithm.SHA256)
    question = builder.build()
    headers = {"Content-Type": "application/timestamp-query", "Accept": "application/timestamp-reply"}
    request = urllib.request.Request(authority, data=question.as_bytes(), headers=headers)
    with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as stream:
        answer: bytes = stream.read(LARGEST_ANSWER + 1)
    if len(answer) > LARGEST_ANSWER:
        raise InputError(f"the timestamp authority {authority} answered with far more than a timestamp")
    response = read_timestamp(answer)
    if response.tst_info.nonce != question.nonce:
        raise InputError(f"the timestamp authority {authority} answered another question than was asked")
    if response.tst_info.message_imprint.message != hashlib.sha256(content).digest():
        raise InputError(f"the timestamp authority {authority} signed something else")
    return answer


def read_timestamp(answer: bytes) -> Any:
    """A timestamp response that was granted."""
    try:
        response = protocol().decode_timestamp_response(answer)
        if int(response.status) not in GRANTED:
            raise InputError(f"the timestamp authority refused (status {int(response.status)})")
        response.tst_info.message_imprint  # noqa: B018  a refusal has none
    except (ValueError, TypeError) as error:
        raise InputError(f"not a timestamp of RFC 3161: {error}"[:200]) from error
    return response


def stamp_at_the_end(writer: Any, authority: str) -> None:
    """What a writer does as it is closed: fetch what is missing, or record that it is; nothing fails because of it."""
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
