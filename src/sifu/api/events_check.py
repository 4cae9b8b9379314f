"""Whether every event of the ledger is one that sifu writes, and changes nothing but what its kind may change.

The chain of hashes says that nobody changed an event; no signature covers those after the last certificate. Whoever can
write to the folder could otherwise add an event that names other facts of training, puts an erased model back or
makes a model the current one that was cut off, and everything would still follow from the ledger.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from sifu.core.ledger import Event
from sifu.store.reader import JOINED, RunReader

_CREATED_WITH = (
    "run", "asked", "spec", "layout", "facts", "versions", "public_key", "client_count", "clients_digest", "tip",
    "phase",
)  # fmt: skip
EFFECTS = (
    "rows",
    "models",
    "dropped_models",
    "updates",
    "dropped_updates",
    "evaluations",
    "rejections",
    "certificates",
)
"""Keys of a payload that change something beside the table `run`."""


@dataclass(frozen=True)
class May:
    """What events of one kind may change: keys of `run`, and other things; `phase` is the only one it may set."""

    run: tuple[str, ...] = ()
    effects: tuple[str, ...] = ()
    phase: str | None = None


KINDS: Mapping[str, May] = {
    "run created": May(_CREATED_WITH, ("rows", "models"), "training"),
    "rounds": May(("tip",), ("rows", "models", "dropped_models", "updates", "evaluations", "rejections")),
    "evaluation": May((), ("models", "dropped_models", "evaluations")),
    "training done": May(("phase",), ("evaluations",), "ready"),
    "request received": May(),
    "request verified": May(),
    "request planned": May(),
    "request refused": May(),
    "request withdrawn": May(),
    "rolled back": May(
        ("tip", "phase"),
        ("rows", "models", "dropped_models", "updates", "dropped_updates", "evaluations"),
        "retraining",
    ),
    "request done": May(("phase",), ("evaluations", "certificates"), "ready"),
    "comparison": May(),
    "key rotated": May(("public_key",)),
    "backup made": May(),
    "restored": May((), ("dropped_models",)),
    "purged": May((), ("dropped_models", "dropped_updates")),
    "migrated": May(),
    JOINED: May(("reported", "client_count", "clients_digest")),
    "client refused": May(("admitted",)),
    "clients admitted": May(("admitted", "reported")),
    "clients changed": May(("admitted",)),
    "incidents": May(),
    "letter refused": May(),
}
"""Every kind of event there is."""


@dataclass
class _Sofar:
    """What the events up to here made: files that exist, files that went, the current model."""

    tip: int = -1
    clients: int = 0
    models: set[int] = field(default_factory=set)
    updates: set[str] = field(default_factory=set)
    gone: set[int | str] = field(default_factory=set)


def check_events(reader: RunReader) -> Iterator[str]:
    """Every event is of a known kind, does what its kind may, and brings nothing back that was erased."""
    sofar = _Sofar()
    for event in reader.events():
        content: dict[str, Any] = json.loads(event.payload)
        for problem in (*_beyond_its_kind(event, content), *_misplaced(event, content, sofar, reader)):
            yield f"events: event {event.seq} ({event.kind[:40]}) {problem}"


def _beyond_its_kind(event: Event, content: dict[str, Any]) -> Iterator[str]:
    may = KINDS.get(event.kind)
    if may is None:
        yield "is of a kind that sifu does not write"
        return
    if (event.kind == "run created") != (event.seq == 1):
        yield "creates the run, which only the first event does"
    values = content.get("run", {})
    wrong = sorted(set(values) - set(may.run)) + sorted(set(content) & set(EFFECTS) - set(may.effects))
    if wrong:
        yield f"changes {', '.join(wrong)[:200]}, which such an event never does"
    if "phase" in values and values["phase"] != may.phase:
        yield f"sets the phase to {str(values['phase'])[:40]!r}"


def _misplaced(event: Event, content: dict[str, Any], sofar: _Sofar, reader: RunReader) -> Iterator[str]:
    """The current model is the last one recorded; clients join one by one; what was erased is not recorded again."""
    values, rows = content.get("run", {}), content.get("rows")
    tip, clients = values.get("tip"), int(values.get("client_count", sofar.clients))
    if event.kind == JOINED and clients != sofar.clients + 1:
        yield f"says that there are {clients} clients, after {sofar.clients}"
    sofar.clients = clients
    if (rows is None) != (tip is None) or (rows is not None and str(rows["last"]) != tip):
        yield f"makes node {tip} the current model, which is not the last one it recorded"
    if rows is not None:
        yield from _out_of_line(event.kind, rows, sofar.tip, reader)
        sofar.tip = int(rows["last"])
    dropped: list[int | str] = [*content.get("dropped_models", []), *content.get("dropped_updates", [])]
    never = [one for one in dropped if one not in sofar.models and one not in sofar.updates]
    if never:
        yield f"erases {never[:5]}, of which there was nothing"
    sofar.models.difference_update(dropped)  # type: ignore[arg-type]
    sofar.updates.difference_update(dropped)  # type: ignore[arg-type]
    sofar.gone.update(dropped)
    models = {int(one["node"]) for one in content.get("models", [])}
    updates = {str(one["file"]) for one in content.get("updates", [])}
    back = sorted(map(str, (models | updates) & sofar.gone))
    if back:
        yield f"records {', '.join(back[:5])} again, which had been erased"
    if any(node > sofar.tip for node in models):
        yield "records a model of a node that there is not"
    if updates & sofar.updates:
        yield "records a file of updates twice"
    sofar.models |= models
    sofar.updates |= updates


def _out_of_line(kind: str, rows: dict[str, Any], tip: int, reader: RunReader) -> Iterator[str]:
    """Rounds go on from the current model, one after the other; a request makes one node, whose kind says how."""
    by_number = reader.nodes_by_number()
    nodes = [by_number[node].node for node in range(int(rows["first"]), int(rows["last"]) + 1) if node in by_number]
    if kind == "rounds":
        if any(one.kind != "round" or one.parent != before for before, one in enumerate(nodes, start=tip)):
            yield "records rounds that do not go on from the current model"
        if any(one.noise_std != 0.0 or one.order != 0 for one in nodes):
            yield "records noise in a round"
    elif len(nodes) != 1 or nodes[0].kind == "round" or (nodes[0].parent is None) != (nodes[0].kind == "initial"):
        yield "records another node than the one model it makes"
    elif kind == "run created" and (nodes[0].kind, nodes[0].order, nodes[0].noise_std) != ("initial", 0, 0.0):
        yield "does not begin with an initial model"
