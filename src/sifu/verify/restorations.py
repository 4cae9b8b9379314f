"""What the ledger says of restorations from a backup: it stays there, and it must be true."""

from __future__ import annotations

import json
from collections.abc import Iterator

from sifu.core.ledger import Event
from sifu.store.reader import RunReader
from sifu.store.replayed_ledger import ReplayedLedger, ReplayedTables
from sifu.verify.anchor import holds_anchor, parse_anchor

RESTORED = "restored"


def restored_notes(reader: RunReader) -> Iterator[str]:
    """That a run was restored is never forgotten."""
    for seq, time, payload in reader.query("SELECT seq, time, payload FROM events WHERE kind = ?", (RESTORED,)):
        content = json.loads(payload)
        gap = (
            "the anchor given then was its last event"
            if content["complete"]
            else "what was done between the backup and then is not in this record"
        )
        yield f"event {seq} restored the run from a backup on {time}; {gap}"


def check_restored(reader: RunReader) -> Iterator[str]:
    """What a restoration says of the chain before it must be so."""
    branches = {row.node.node: row.node.branch for row in reader.node_rows()}
    ledger = ReplayedLedger.of(reader)
    numbers = {client.name: number for number, client in enumerate(reader.clients())}
    for event, before in ledger.moments():
        if event.kind != RESTORED:
            continue
        content, seq = event.content, event.seq
        yield from _check_nothing_came_back(event, before, numbers)
        branch = branches.get(ledger.tips[seq])
        if content["branch"] != branch:
            yield f"restored: event {seq} names branch {content['branch']}, the run was at {branch}"
        head = parse_anchor(content["backup_head"])
        if head[0] >= int(seq) or not holds_anchor(reader, content["backup_head"]):
            yield f"restored: event {seq} names a head that the chain does not hold"
        if content["complete"] and (content["anchor"] is None or parse_anchor(content["anchor"]) != head):
            yield f"restored: event {seq} calls itself complete without the anchor for it"


def _check_nothing_came_back(event: Event, before: ReplayedTables, numbers: dict[str, int]) -> Iterator[str]:
    """Updates and statistics of clients whose requests a restoration brought back are erased by it."""
    received = before.rows["requests"]
    # A second certificate of the same client brings no second request back: it waits already.
    requests = [received[request,] for request in event.content["requests"] if (request,) in received]
    gone = {numbers[name] for row in requests for name in json.loads(row["terms"])["clients"]}
    networks = {node for node in event.content.get("dropped_models", []) if (node,) in before.rows["group_models"]}
    for what in ("updates", "statistics"):
        held = {
            file: {int(client) for client in json.loads(row["clients"])} for (file,), row in before.rows[what].items()
        }
        through = {file: set(json.loads(row.get("trunks", "[]"))) for (file,), row in before.rows[what].items()}
        wanted = sorted(str(file) for file, clients in held.items() if clients & gone or through[file] & networks)
        if sorted(event.content.get(f"dropped_{what}", [])) != wanted:
            yield f"restored: event {event.seq} did not erase the {what} of the clients whose requests it brought back"
    if any({int(client) for client in row["clients"]} & gone for row in event.content.get("updates", [])):
        yield f"restored: event {event.seq} stores updates of clients whose requests it brought back"
