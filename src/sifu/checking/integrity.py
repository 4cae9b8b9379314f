"""Integrity check of a run: ledger and tables agree, and clients and rounds match the digests in the events."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from sifu.errors import SifuError
from sifu.run.run_view import RunView
from sifu.store.events_check import check_recorded_nodes
from sifu.store.history_tables import ParticipationRows, clients_digest, rows_digest
from sifu.store.reader import RunReader
from sifu.store.record_check import check_record, refuse_problems
from sifu.theory.history import KINDS_WITH_CLIENTS
from sifu.theory.regularity import RoundRegularity


def check_integrity(reader: RunReader) -> None:
    """Check that tables, clients and rounds match the ledger.

    Raises:
        RunDamagedError: If one of them differs from the ledger.
    """
    check_record(reader)
    refuse_problems(reader, (check_clients, check_recorded_nodes, check_rounds))


@contextmanager
def blaming_damage(reader: RunReader) -> Iterator[None]:
    """Check the run if the block raises an unexpected error; if it is damaged, raise `RunDamagedError` instead."""
    try:
        yield
    except SifuError:
        raise
    except Exception:
        check_integrity(reader)
        raise


def check_clients(reader: RunReader) -> Iterator[str]:
    """Yield a problem if the clients differ from a digest of clients in the ledger."""
    clients = reader.read_clients()
    indices = [row[0] for row in reader.query("SELECT client FROM clients ORDER BY client")]
    commitments = [
        content["run"] for event in reader.events() if "clients_digest" in (content := event.content).get("run", {})
    ]
    if (
        indices != list(range(len(clients)))
        or int(commitments[-1]["client_count"]) != len(clients)
        or any(
            values["clients_digest"] != clients_digest(clients[: int(values["client_count"])]) for values in commitments
        )
    ):
        yield "clients: a client's name, samples, steps or expansion is not what the ledger commits to"
    founders = len(clients) - len(reader.joined())
    for client, seq in zip(clients[founders:], reader.joined(), strict=True):
        if reader.payload(seq)["client"] != client.name:
            yield f"clients: {client.name} is in the place of {reader.payload(seq)['client']}, which event {seq} names"


CHANGED = "a row of nodes or participation (samples, drift)"


def check_rounds(reader: RunReader) -> Iterator[str]:
    """Yield a problem for each node or participation that contradicts the ledger.

    Rows must match the digests in the events, and the regularity sums of a node must follow from its participants.
    """
    everyone = reader.everyone()
    seen = 0
    for event in reader.events():
        rows = event.content.get("rows")
        if rows is None:
            continue
        first, last = int(rows["first"]), int(rows["last"])
        if first != seen:
            yield f"rounds: event {event.seq} records nodes from {first}, {seen} was expected"
        seen = last + 1
        found = rows_digest(reader.nodes(first, last), everyone.between(first, last))
        if found != rows["digest"]:
            yield f"rounds: {CHANGED} of nodes {first} to {last} is not what event {event.seq} commits to"
    for table in ("nodes", "participation"):
        extra = reader.query(f"SELECT COUNT(*) FROM {table} WHERE node >= ? OR node < 0", (seen,))[0][0]
        if extra:
            yield f"rounds: {extra} rows of {table} are in no event of the ledger"
    view = RunView(reader)
    factors_of = view.regularity.factors
    samples_of = np.array([client.samples for client in view.clients], dtype=np.int64)
    for node in reader.nodes():
        part = everyone.between(node.node, node.node)
        if not (node.mean_shift >= 0.0 and node.rounding >= 0.0):  # these are upper bounds
            yield f"rounds: node {node.node} has a mean shift or rounding that is negative or not a number"
        if node.kind not in KINDS_WITH_CLIENTS:
            if part.nodes.size:
                yield f"rounds: node {node.node} is not a round but has participants"
            continue
        if not np.all(part.drifts >= 0):  # infinite if the client never reported it; its Psi is then unbounded
            yield f"rounds: node {node.node} has a drift that is negative or not a number"
        if np.any(part.samples != samples_of[part.clients]):
            yield f"rounds: node {node.node} has a participant with another number of samples than its client"
        if RoundRegularity.of(part.samples, factors_of[part.clients]) != node.regularity:
            yield f"rounds: the sums of node {node.node} do not follow from its participants"
    yield from _check_left_out(view, everyone)


def _check_left_out(view: RunView, everyone: ParticipationRows) -> Iterator[str]:
    """Yield a problem for each client recorded as left out of a round if it took part, or if the round is missing."""
    rounds = (node for node in view.reader.nodes() if node.kind == "round")
    nodes = {(node.branch, node.position - 1): node.node for node in rounds}
    for rejection in view.reader.rejections():
        node = nodes.get((rejection.branch, rejection.round))
        if not rejection.left_out:
            continue
        if node is None or view.index_of.get(rejection.client) in everyone.between(node, node).clients:
            place = f"round {rejection.round} of branch {rejection.branch}"
            yield f"rounds: {rejection.client!r} was left out of {place}, but is in it"
