"""Checkpoints: signatures with the operator's key, each over an event and thereby over all events before it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from sifu.core.ledger import Event, canonical_json, read_json
from sifu.errors import InputError, RunDamagedError
from sifu.store.keys import ROTATED, load_key, signature_holds
from sifu.store.reader import RunReader
from sifu.version import FORMAT

HEAD = f"sifu head {FORMAT}"
VOUCHED = "checkpoint"
"""Kind of the event by which an operator vouches for events written without a signature."""
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


def checkpoint_body(run: str, seq: int, head: str, time: str) -> dict[str, Any]:
    """Return the part of a checkpoint that the operator signs."""
    return {"format": HEAD, "run": run, "seq": seq, "head": head, "time": time}


class Signer:
    """Signer of events with the operator's key; it warns once if the key is not available."""

    def __init__(self, folder: Path, public_key: str) -> None:
        self.public_key = public_key
        self.key: Any = None
        self.reason, self.lost, self.noted = "", False, False
        try:
            self.key = load_key(folder, public_key)
        except (InputError, RunDamagedError) as error:
            self.reason = str(error)
            self.lost = isinstance(error, RunDamagedError)  # the key is missing or wrong, not merely locked
        self._said = False

    def sign(self, run: str, event: Event) -> bytes | None:
        """Return the signature over an event, or None if the key is not available."""
        if self.key is None:
            if not self._said:
                log.warning(
                    "events written now have no signature: %s. Nothing is lost; sign them later with sifu sign",
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


def unsigned_tail(events: list[Event]) -> tuple[int, int] | None:
    """Return the numbers of the first and last event after the last signature, or None if the last event is signed."""
    covered = next((event.seq for event in reversed(events) if event.signature is not None), 0)
    return (covered + 1, events[-1].seq) if covered < len(events) else None


def check_checkpoints(reader: RunReader, only_last: bool = False) -> Iterator[str]:
    """Yield a problem for each invalid signature, and for unsigned events that no signed event vouches for.

    With `only_last`, only the last signature is verified.
    """
    events = reader.events()
    run = str(events[0].content["run"]["run"])
    tail, first_unsigned = unsigned_tail(events), 0
    last = tail[0] - 1 if tail else len(events)
    for event, key in signed_events(events):
        if event.signature is None:
            first_unsigned = first_unsigned or event.seq
            continue
        gap = [first_unsigned, event.seq - 1] if first_unsigned else None
        if (gap or event.kind == VOUCHED) and (event.kind != VOUCHED or event.content.get("unsigned") != gap):
            yield (
                f"signatures: events {first_unsigned or event.seq} to {event.seq - 1} have no signature, and event "
                f"{event.seq} ({event.kind}) does not vouch for them"
            )
        first_unsigned = 0
        if only_last and event.seq != last:
            continue
        if not Checkpoint.of(run, event, key).holds:
            yield (
                f"signatures: the signature of event {event.seq} ({event.kind}) is not valid for the operator's key: "
                f"the signature or an event up to {event.seq} was changed"
            )


def check_covered(reader: RunReader) -> Iterator[str]:
    """Yield a problem if no signature covers the last events."""
    tail = unsigned_tail(reader.events())
    if tail is not None:
        yield f"signatures: {uncovered(tail)}"


def uncovered(tail: tuple[int, int]) -> str:
    """Return a note on the unsigned events at the end of the ledger."""
    first, last = tail
    which = f"event {first}" if first == last else f"events {first} to {last}"
    return (
        f"no signature covers {which}: written without the operator's key, or changed by someone without it. "
        "An operator who knows them to be right, for example from a witness, vouches for them with sifu sign"
    )


def latest_checkpoint(reader: RunReader) -> Checkpoint | None:
    """Return the checkpoint of the last signed event, or None."""
    rows = reader.query(
        "SELECT seq, time, hash, signature FROM events WHERE signature IS NOT NULL ORDER BY seq DESC LIMIT 1"
    )
    if not rows:
        return None
    seq, time, digest, signature = rows[0]
    # The event of a rotation is signed with the old key, which it names.
    old = reader.query("SELECT payload FROM events WHERE seq = ? AND kind = ?", (seq, ROTATED))
    key = str(read_json(old[0][0])["old_key"]) if old else reader.value("public_key")
    return Checkpoint(reader.value("run"), int(seq), bytes(digest).hex(), str(time), key, bytes(signature).hex())
