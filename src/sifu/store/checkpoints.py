"""Checkpoints: signatures with the operator's key, each over an event and thereby over all events before it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from sifu.core.ledger import Event, canonical_json, read_json
from sifu.errors import InputError, RunDamagedError
from sifu.store.keys import ROTATED, load_key, signature_holds
from sifu.store.reader import RunReader
from sifu.version import FORMAT

HEAD = f"sifu head {FORMAT}"
UNSIGNED = frozenset((
    "request received", "request verified", "request approved", "request refused", "request withdrawn",
    "clients changed", "letter refused", "backup made", "restored",
))  # fmt: skip
"""Kinds of events that may be recorded without the operator's key; the next signed event covers them."""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checkpoint:
    """A signed head of the chain of events, as sent to witnesses."""

    run: str
    seq: int
    head: str
    time: str
    public_key: str
    signature: str

    @staticmethod
    def of(run: str, event: Event, public_key: str, signature: str | None = None) -> Checkpoint:
        """Return the checkpoint of an event, with the event's own signature unless another one (hex) is given."""
        signature = (event.signature or b"").hex() if signature is None else signature
        return Checkpoint(run, event.seq, event.hash.hex(), event.time, public_key, signature)

    @staticmethod
    def in_certificate(body: dict[str, Any], public_key: str) -> Checkpoint:
        """Return the checkpoint that the body of a certificate names, with the certificate's key."""
        ledger = body["ledger"]
        return Checkpoint(body["run"], ledger["seq"], ledger["head"], ledger["time"], public_key, ledger["signature"])

    def to_mapping(self) -> dict[str, Any]:
        """Return the checkpoint as a JSON object."""
        return {"format": HEAD} | asdict(self)

    @staticmethod
    def from_json(text: bytes | str) -> Checkpoint:
        """Parse a line of a witness's file, which anybody may have written.

        Raises:
            InputError: If the line is not a checkpoint.
        """
        try:
            content = read_json(text)
            stated = content.pop("format")
            types = {column.name: column.type for column in fields(Checkpoint)}
            if stated != HEAD or {name: type(value).__name__ for name, value in content.items()} != types:
                raise ValueError("its fields are not those of a checkpoint")
            return Checkpoint(**content)
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise InputError(f"not a checkpoint of sifu: {type(error).__name__} {error}"[:200]) from error

    @property
    def holds(self) -> bool:
        """True if the signature is valid for the key that the checkpoint names."""
        body = checkpoint_body(self.run, self.seq, self.head, self.time)
        return signature_holds({"body": body, "public_key": self.public_key, "signature": self.signature})


def kept_in(path: Path) -> list[Checkpoint]:
    """Return the checkpoints in a file, which may be missing; skip other lines, such as an incomplete last one.

    Raises:
        InputError: If the file cannot be read.
    """
    kept: list[Checkpoint] = []
    try:
        for line in path.read_bytes().splitlines() if path.is_file() else ():
            with suppress(InputError):
                kept.append(Checkpoint.from_json(line))
    except OSError as error:
        raise InputError(f"the kept checkpoints in {path} cannot be read: {error.strerror}") from error
    return kept


def checkpoint_body(run: str, seq: int, head: str, time: str) -> dict[str, Any]:
    """Return the part of a checkpoint that the operator signs."""
    return {"format": HEAD, "run": run, "seq": seq, "head": head, "time": time}


class Signer:
    """Signer of events with the operator's key; it warns once if the key is not available."""

    def __init__(self, folder: Path, public_key: str) -> None:
        self.public_key = public_key
        self.key: Any = None
        self.reason = ""
        try:
            self.key = load_key(folder, public_key)
        except (InputError, RunDamagedError) as error:
            self.reason = str(error)
        self._said = False

    def sign(self, run: str, event: Event) -> bytes | None:
        """Return the signature over an event, or None if the key is not available."""
        if self.key is None:
            if not self._said:
                log.warning(
                    "events written now have no signature: %s. The next command with the key covers them",
                    self.reason,
                )
            self._said = True
            return None
        body = checkpoint_body(run, event.seq, event.hash.hex(), event.time)
        signature: bytes = self.key.sign(canonical_json(body))
        return signature


def signed_events(events: list[Event]) -> Iterator[tuple[Event, str]]:
    """Yield each event with the key that must have signed it.

    This is the last key named by an earlier event; for the first event, it is the key that the event itself names.
    """
    key = ""
    for event in events:
        named = event.content.get("run", {}).get("public_key", key) if event.kind in ("run created", ROTATED) else key
        key = key or str(named)
        yield event, key
        key = str(named)


def check_checkpoints(reader: RunReader, only_last: bool = False) -> Iterator[str]:
    """Yield a problem for each invalid signature, and for each unsigned event of a kind that must be signed.

    With `only_last`, only the last signature is verified.
    """
    events = reader.events()
    run = str(events[0].content["run"]["run"])
    last = max((event.seq for event in events if event.signature is not None), default=0)
    for event, key in signed_events(events):
        if event.signature is None:
            if event.kind not in UNSIGNED:
                yield f"signatures: event {event.seq} ({event.kind}) has no signature"
            continue
        if only_last and event.seq != last:
            continue
        if not Checkpoint.of(run, event, key).holds:
            yield (
                f"signatures: the signature of event {event.seq} ({event.kind}) is not valid for the operator's key: "
                f"the signature or an event up to {event.seq} was changed"
            )


def unsigned_notes(reader: RunReader) -> Iterator[str]:
    """Yield a note on the events without a signature, and on the requests that they file or decide."""
    unsigned = [event for event in reader.events() if event.signature is None]
    if not unsigned:
        return
    about = [event.content.get("request", {}) for event in unsigned]
    named = dict.fromkeys(str(named["request"]) if isinstance(named, dict) else named for named in about if named)
    numbers = ", ".join(str(event.seq) for event in unsigned[:8])
    more = f" and {len(unsigned) - 8} more" if len(unsigned) > 8 else ""
    of = f", on {', '.join(list(named)[:8])}" if named else ""
    covered = "the next signed event covers them" if reader.events()[-1].signature else "no signature covers the last"
    yield f"written without the operator's key: event {numbers}{more}{of}; {covered}"


def latest_checkpoint(reader: RunReader) -> Checkpoint | None:
    """Return the checkpoint of the last signed event, or None."""
    rows = reader.query(
        "SELECT seq, time, hex(hash), signature FROM events WHERE signature IS NOT NULL ORDER BY seq DESC LIMIT 1"
    )
    if not rows:
        return None
    seq, time, digest, signature = rows[0]
    # The event of a rotation is signed with the old key, which it names.
    old = reader.query("SELECT payload FROM events WHERE seq = ? AND kind = ?", (seq, ROTATED))
    key = str(read_json(old[0][0])["old_key"]) if old else reader.value("public_key")
    return Checkpoint(reader.value("run"), int(seq), str(digest).lower(), str(time), key, bytes(signature).hex())
