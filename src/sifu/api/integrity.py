"""Whether a run's records are what its ledger commits to; checked before anything is built on them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from sifu.api.events_check import check_events
from sifu.core.errors import RunDamagedError, SifuError
from sifu.core.ledger import NONCE_BYTES, Event, broken_links, canonical_json
from sifu.core.regularity import RoundRegularity
from sifu.methods.view import RunView
from sifu.store.database import schema_problems
from sifu.store.projection import KEYS, changes, replay
from sifu.store.reader import RunReader, readable
from sifu.store.rows import ParticipationRows, clients_digest, rows_digest


def check_integrity(reader: RunReader) -> None:
    """Refuse to build on records that are not what the ledger commits to; done before anything is written."""
    for check in (check_schema, check_ledger, check_events, check_tables, check_rounds):
        with readable(reader.folder):
            problem = next(iter(check(reader)), None)
        if problem is not None:
            raise RunDamagedError(
                f"{reader.folder} is damaged or was changed by hand, nothing was done. {problem}. See sifu verify"
            )


@contextmanager
def blaming_damage(reader: RunReader) -> Iterator[None]:
    """An unexpected error while reading is put down to damage if there is any, and is ours otherwise."""
    try:
        yield
    except SifuError:
        raise
    except Exception:
        check_integrity(reader)
        raise


def check_database(reader: RunReader) -> Iterator[str]:
    """SQLite's own check of its pages, and whether they hold our tables and nothing else."""
    for (line,) in reader.query("PRAGMA integrity_check(5)"):
        if line != "ok":
            yield f"database: {line}"
    yield from check_schema(reader)


def check_schema(reader: RunReader) -> Iterator[str]:
    """A trigger would change what is written, a table beside ours could keep what was erased."""
    for problem in schema_problems(reader.connection):
        yield f"database: {problem}"


def check_ledger(reader: RunReader) -> Iterator[str]:
    """The hash chain, from the creation of the run to its head."""
    events = list(reader.events())
    if not events or events[0].kind != "run created":
        yield "ledger: it does not begin with the creation of the run"
        return
    yield from broken_links(iter(events))
    for event in events:
        # Read one way only: another program might take the first of two equal keys, or refuse what we let pass.
        if len(event.nonce) != NONCE_BYTES or canonical_json(payload_of(event)) != event.payload:
            yield f"ledger: the content of event {event.seq} is not written as canonical JSON, or has no proper nonce"
    last = events[-1]
    if reader.value("head") != f"{last.seq}:{last.hash.hex()}":
        yield f"ledger: it ends at event {last.seq}, but the run table's head is {reader.value('head')[:24]}..."


def check_tables(reader: RunReader) -> Iterator[str]:
    """The small tables must be what the ledger says, row by row."""
    events = list(reader.events())
    expected = replay(change for event in events for change in changes(event.kind, event.time, payload_of(event)))
    expected["run"][("head",)] = {"value": f"{events[-1].seq}:{events[-1].hash.hex()}"}
    for table, keys in KEYS.items():
        columns = [row[1] for row in reader.query(f"PRAGMA table_info({table})")]
        found = {}
        for row in reader.query(f"SELECT * FROM {table}"):
            values = dict(zip(columns, row, strict=True))
            found[tuple(values.pop(key) for key in keys)] = values
        for key in sorted(set(expected[table]) | set(found), key=str):
            name = f"{table} {', '.join(map(str, key))}"
            if key not in found:
                yield f"tables: the row of {name} is missing"
            elif key not in expected[table]:
                yield f"tables: the row of {name} is not in the ledger"
            else:
                wanted = dict.fromkeys(found[key]) | expected[table][key]
                for column, value in found[key].items():
                    if value != wanted.get(column):
                        yield f"tables: {name}: {column} is {value!r}, the ledger says {wanted.get(column)!r}"
    clients = reader.read_clients()
    indices = [row[0] for row in reader.query("SELECT client FROM clients ORDER BY client")]
    said = [one["run"] for event in events if "clients_digest" in (one := payload_of(event)).get("run", {})]
    if (
        indices != list(range(len(clients)))
        or int(said[-1]["client_count"]) != len(clients)
        or any(one["clients_digest"] != clients_digest(clients[: int(one["client_count"])]) for one in said)
    ):
        yield "clients: a client's name, samples, steps or smoothness is not what the ledger commits to"


def check_rounds(reader: RunReader) -> Iterator[str]:
    """Nodes, participations and Gram matrices: their digests, and the sums drawn from them."""
    everyone = reader.everyone()
    seen = 0
    for event in reader.events():
        rows = payload_of(event).get("rows")
        if rows is None:
            continue
        first, last = int(rows["first"]), int(rows["last"])
        if first != seen:
            yield f"rounds: event {event.seq} records nodes from {first}, {seen} was expected"
        seen = last + 1
        found = rows_digest(reader.node_rows(first, last), everyone.between(first, last), reader.grams(first, last))
        if found != rows["digest"]:
            yield (
                f"rounds: a row of nodes, participation (samples, drift) or grams of nodes {first} to {last} is not "
                f"what event {event.seq} commits to"
            )
    for table in ("nodes", "participation", "grams"):
        extra = reader.query(f"SELECT COUNT(*) FROM {table} WHERE node >= ? OR node < 0", (seen,))[0][0]
        if extra:
            yield f"rounds: {extra} rows of {table} are in no event of the ledger"
    view = RunView(reader)
    regularities = view.regularities
    samples_of = np.array([one.samples for one in view.clients], dtype=np.int64)
    for row in reader.node_rows():
        one = row.node
        part = everyone.between(one.node, one.node)
        if one.kind != "round":
            if part.nodes.size:
                yield f"rounds: node {one.node} is not a round but has participants"
            continue
        if not np.all(part.drifts >= 0):  # infinite: its client never told it, and its Psi is unbounded
            yield f"rounds: node {one.node} has a drift that is negative or not a number"
        if np.any(part.samples != samples_of[part.clients]):
            yield f"rounds: node {one.node} has a participant with another number of samples than its client"
        factors, averagedness = regularities.factors[part.clients], regularities.averagedness[part.clients]
        if RoundRegularity.of(part.samples, factors, averagedness) != one.regularity:
            yield f"rounds: the sums of node {one.node} do not follow from its participants"
    yield from _check_left_out(view, everyone)


def _check_left_out(view: RunView, everyone: ParticipationRows) -> Iterator[str]:
    """Whoever was left out of a round must not be in it."""
    nodes = {(row.node.branch, row.node.position - 1): row.node.node for row in view.reader.node_rows()
             if row.node.kind == "round"}  # fmt: skip
    for one in view.reader.rejections():
        node = nodes.get((one.branch, one.round))
        if not one.left_out:
            continue
        if node is None or view.index_of.get(one.client) in everyone.between(node, node).clients:
            yield f"rounds: {one.client!r} was left out of round {one.round} of branch {one.branch}, but is in it"


def payload_of(event: Event) -> dict[str, Any]:
    """The content of an event."""
    content: dict[str, Any] = json.loads(event.payload)
    return content
