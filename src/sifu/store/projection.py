"""What each event does to the tables: one function, used to write them and to check them.

The small tables hold nothing that the ledger does not say. `changes` turns an event into row changes; the
store applies them to SQLite inside the event's own transaction, and verification applies them to dictionaries and
compares. Nodes, participations and Gram matrices are tied to their event by a digest instead (`rows`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sifu.core.ledger import canonical_json

KEYS: dict[str, tuple[str, ...]] = {
    "run": ("key",),
    "evaluations": ("node", "subset"),
    "models": ("node",),
    "updates": ("file",),
    "statistics": ("file",),
    "group_models": ("node",),
    "merges": ("node", "grp"),
    "requests": ("request",),
    "subjects": ("subject",),
    "charges": ("noise_node", "subject"),
    "comparisons": ("request", "method"),
    "rejections": ("branch", "round", "number"),
}
"""The tables an event writes, with their primary keys."""

DECIDED = {f"request {status}": status for status in ("verified", "planned", "refused", "withdrawn")}
"""Events that change nothing of a request but its status."""

Key = tuple[Any, ...]
Tables = dict[str, dict[Key, dict[str, Any]]]


@dataclass(frozen=True)
class Change:
    """Set `values` in the row of `table` with this key, making it if need be; None deletes the row."""

    table: str
    key: Key
    values: dict[str, Any] | None


def changes(kind: str, time: str, payload: dict[str, Any]) -> Iterator[Change]:
    """The row changes of one event."""
    for key, value in payload.get("run", {}).items():
        yield Change("run", (key,), {"value": value if isinstance(value, str) else canonical_json(value).decode()})
    for node in payload.get("dropped_models", []):
        yield Change("models", (node,), None)
    for row in payload.get("models", []):
        yield Change("models", (row["node"],), {key: row[key] for key in row if key != "node"})
    for file in payload.get("dropped_updates", []):
        yield Change("updates", (file,), None)
    for row in payload.get("updates", []):
        values = {key: row[key] for key in ("node", "part", "bytes", "digest")}
        yield Change("updates", (row["file"],), values | {"clients": canonical_json(row["clients"]).decode()})
    for file in payload.get("dropped_statistics", []):
        yield Change("statistics", (file,), None)
    for row in payload.get("statistics", []):
        values = {key: row[key] for key in ("node", "samples", "bytes", "digest")}
        listed = {key: canonical_json(row[key]).decode() for key in ("clients", "trunks")}
        yield Change("statistics", (row["file"],), values | listed)
    for row in payload.get("group_models", []):
        values = {key: row[key] for key in ("grp", "rounds", "samples")}
        yield Change("group_models", (row["node"],), values | {"members": canonical_json(row["members"]).decode()})
    for row in payload.get("merges", []):
        values = {key: row[key] for key in ("source_node", "samples")}
        yield Change("merges", (row["node"], row["grp"]), values)
    for row in payload.get("evaluations", []):
        values = {key: row[key] for key in ("samples", "accuracy", "loss")}
        yield Change("evaluations", (row["node"], row["subset"]), values)
    for row in payload.get("rejections", []):
        values = {key: row[key] for key in ("client", "reason", "left_out")}
        yield Change("rejections", (row["branch"], row["round"], row["number"]), values)
    if kind == "request received":
        terms = dict(payload["request"])
        request, deadline_days = terms.pop("request"), terms.pop("deadline_days")
        values = {"terms": canonical_json(terms).decode(), "method": terms["method"], "deadline_days": deadline_days}
        yield Change("requests", (request,), values | {"status": "received", "received": time})
    elif kind == "rolled back":
        yield Change("requests", (payload["request"],), payload["choice"] | {"status": "running", "carried_out": time})
        for row in payload["subjects"]:
            clients = canonical_json(row["clients"]).decode()
            yield Change("subjects", (row["subject"],), {"request": payload["request"], "clients": clients})
        for row in payload["charges"]:
            key = (payload["choice"]["noise_node"], row["subject"])
            yield Change("charges", key, {"psi": row["psi"], "charge": row["charge"]})
    elif kind == "request done":
        values = {"status": "done", "final_node": payload["final_node"], "level": payload["level"], "finished": time}
        yield Change("requests", (payload["request"],), values)
    elif kind in DECIDED:
        yield Change("requests", (payload["request"],), {"status": DECIDED[kind]})
    elif kind == "comparison":
        values = {key: payload[key] for key in ("rounds", "reached", "accuracy")}
        values["forgotten_accuracy"] = payload.get("forgotten_accuracy")
        yield Change("comparisons", (payload["request"], payload["method"]), values)
