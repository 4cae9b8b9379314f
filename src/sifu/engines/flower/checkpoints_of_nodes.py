"""Latest signed head of a run's ledger: shown by the server, and kept and checked by each node."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, Context, Message
from flwr.clientapp import ClientApp

from sifu.core.ledger import canonical_json, chain
from sifu.engines.flower.wire import CHECKPOINT, CONFIG, LINKS, LINKS_FROM, PROFILE_QUERY, ROTATIONS
from sifu.errors import InputError
from sifu.store.checkpoints import Checkpoint, kept_in, latest_checkpoint
from sifu.store.files import append_line
from sifu.store.keys import rotation_holds, rotations
from sifu.store.reader import RunReader


class ShownCheckpoint:
    """Latest checkpoint of a run folder, read again with every event."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._head = ""
        self._shown: dict[str, str] = {}
        self._links: list[list[str]] = []
        self.kept: dict[int, int] = {}
        """Number of the latest event that each client is known to have kept."""

    def __call__(self, since: int | None) -> dict[str, str | int]:
        """Return the checkpoint and all key rotations as entries of a message's config, or {} if nothing is signed.

        Args:
            since: Number of an event that the client kept; the result then includes the links of later events.
        """
        with RunReader(self._folder) as reader:
            head = reader.value("head")
            if head != self._head:
                self._read(reader)
                self._head = head
        shown: dict[str, str | int] = dict(self._shown)
        if since is not None and 1 <= since < len(self._links):
            shown |= {LINKS_FROM: since, LINKS: canonical_json(self._links[since:]).decode()}
        return shown

    def _read(self, reader: RunReader) -> None:
        checkpoint, changes = latest_checkpoint(reader), rotations(reader)
        events = reader.query("SELECT time, kind, commitment FROM events ORDER BY seq")
        self._shown, self._links = {}, []
        if checkpoint is not None:
            self._links = [[time, kind, bytes(commitment).hex()] for time, kind, commitment in events]
            self._links = self._links[: checkpoint.seq]
            self._shown = {CHECKPOINT: canonical_json(checkpoint.to_mapping()).decode()}
            if changes:
                self._shown[ROTATIONS] = canonical_json(changes).decode()

    @property
    def seq(self) -> int:
        """Number of the latest event that was shown, or 0 if none was shown."""
        return len(self._links)


FILE_OPTION = "checkpoints"
"""Key of a node's config that names the file in which the node keeps every checkpoint it was shown."""
STATE = "sifu-checkpoint"
LATEST = "latest"
LARGEST_TEXT = 1 << 20
COMMITMENT = re.compile("[0-9a-f]{64}")
Handler = Callable[[Message, Context], Message]


def guard(app: ClientApp) -> ClientApp:
    """Make every handler of an app, except the profile query, check the checkpoint of a message first."""
    for name, function in list(app._registered_funcs.items()):
        if name != PROFILE_QUERY:  # there may be no run yet
            app._registered_funcs[name] = partial(witness_mod, call_next=function)
    if app._call is not None:
        app._call = partial(witness_mod, call_next=app._call)
    return app


def witness_mod(message: Message, context: Context, call_next: Handler) -> Message:
    """Check and keep the signed head that a message shows, then call the app. This is a Flower client mod."""
    check_checkpoint(message, context)
    return call_next(message, context)


def check_checkpoint(message: Message, context: Context) -> None:
    """Keep the checkpoint of a message, or refuse the message if it contradicts the kept checkpoint."""
    config = message.content.get(CONFIG)
    text = config.get(CHECKPOINT) if isinstance(config, ConfigRecord) else None
    file = context.node_config.get(FILE_OPTION)
    record = context.state.get(STATE)
    kept = Checkpoint.from_json(str(record[LATEST])) if isinstance(record, ConfigRecord) else None
    if text is None:
        if kept is not None:
            raise InputError(
                f"the server showed event {kept.seq} of run {kept.run} before and shows no checkpoint now: this node "
                "takes no part without one"
            )
        return
    if not isinstance(text, str) or len(text) > LARGEST_TEXT or not isinstance(config, ConfigRecord):
        raise InputError("the message holds no readable checkpoint")
    shown = Checkpoint.from_json(text)
    own = kept_in(Path(str(file))) if file else ()
    in_file = {checkpoint.seq: checkpoint for checkpoint in own if checkpoint.run == shown.run and checkpoint.holds}
    if kept is None and in_file:
        kept = in_file[max(in_file)]
    if kept == shown:
        return
    follow(kept, shown, _rotations(config), _links(config))
    if file and shown.seq not in in_file:
        append_line(Path(str(file)), canonical_json(shown.to_mapping()))
    context.state[STATE] = ConfigRecord({LATEST: text})


def follow(
    kept: Checkpoint | None, shown: Checkpoint, changes: list[dict[str, Any]], links: tuple[int, list[Any]] = (0, [])
) -> None:
    """Refuse a checkpoint that is not signed, or that does not follow from the kept checkpoint.

    A head of the same event must equal the kept head, and a head of an earlier event is refused. A head of a later
    event must be computable from the kept head and the links: the number of the event after which they begin, and
    [time, kind, commitment] of each later event.
    """
    if not shown.holds:
        raise InputError(f"the checkpoint of event {shown.seq} is not signed by the key it names")
    if kept is None:
        return
    if shown.run != kept.run:
        raise InputError(f"this node takes part in run {kept.run[:40]}, the message is of run {shown.run[:40]}")
    trusted = {kept.public_key}
    for rotation in changes:
        if rotation.get("old") in trusted and rotation_holds(kept.run, rotation):
            trusted.add(str(rotation["new"]))
    if shown.public_key not in trusted:
        raise InputError(
            f"the checkpoint of event {shown.seq} is signed with the key {shown.public_key[:16]}..., which the key "
            f"known here, {kept.public_key[:16]}..., did not sign for"
        )
    if shown.seq == kept.seq and shown.head != kept.head:
        raise InputError(
            f"fork: the operator signed two heads for event {kept.seq} of run {kept.run}, {kept.head[:16]}... (kept "
            f"here) and {shown.head[:16]}... (shown now): two histories exist. This node takes no part"
        )
    if shown.seq < kept.seq:
        raise InputError(
            f"fork: the server shows event {shown.seq} after it had shown event {kept.seq} ({kept.time}): an older "
            "state of the run was put back. This node takes no part. If the operator restored a backup and you accept "
            "that, remove what this node kept"
        )
    if shown.time < kept.time:
        raise InputError(f"the checkpoint of event {shown.seq} is dated before that of event {kept.seq}")
    if shown.seq == kept.seq:
        return
    if links[0] > kept.seq or links[0] + len(links[1]) != shown.seq:
        raise InputError(f"show event {kept.seq}: this node kept it, and takes part only in a history that has it")
    head = bytes.fromhex(kept.head)
    for seq, (time, kind, commitment) in enumerate(links[1][kept.seq - links[0] :], start=kept.seq + 1):
        head = chain(head, seq, time, kind, bytes.fromhex(commitment))
    if head.hex() != shown.head:
        raise InputError(
            f"fork: event {shown.seq} does not follow from event {kept.seq} ({kept.head[:16]}...), which this node was "
            "shown before: the operator has two histories. This node takes no part. If the operator restored a backup "
            "and you accept that, remove what this node kept"
        )


def _rotations(config: ConfigRecord) -> list[dict[str, Any]]:
    try:
        changes = json.loads(str(config.get(ROTATIONS, "[]"))[:LARGEST_TEXT])
    except (ValueError, RecursionError) as error:
        raise InputError(f"the message's changes of keys cannot be read: {error}") from error
    return [rotation for rotation in changes if isinstance(rotation, dict)] if isinstance(changes, list) else []


def _links(config: ConfigRecord) -> tuple[int, list[Any]]:
    """Return the event after which a message's links begin, and the links, or (0, []) if a link is malformed."""
    try:
        first, links = int(config.get(LINKS_FROM, 0)), json.loads(str(config.get(LINKS, "[]")))  # type: ignore[arg-type]
        sound = isinstance(links, list) and all(
            isinstance(link, list)
            and len(link) == 3
            and all(isinstance(part, str) for part in link)
            and COMMITMENT.fullmatch(link[2])
            for link in links
        )
    except (ValueError, TypeError, RecursionError) as error:
        raise InputError(f"the message's links of the ledger cannot be read: {error}") from error
    return (first, links) if sound else (0, [])
