"""The clients that a request forgets, under every index and name they had (docs/store.md, section 4b)."""

from __future__ import annotations

import json

from sifu_verifier.canonical import Row
from sifu_verifier.run_folder import RunFolder


def indices_of(run: RunFolder, name: str) -> list[int]:
    """Return all indices of the client up to the index with this name, oldest first (section 4b)."""
    (client,) = (number for number, row in run.clients.items() if row["name"] == name)
    for request, number in run.rejoined.items():
        if number == client:
            return [*indices_of(run, json.loads(run.requests[request]["clients"])[0]), client]
    return [client]


def names_of(run: RunFolder, request: Row) -> list[str]:
    """Return every name that the clients of a request have had."""
    return [run.clients[c]["name"] for name in json.loads(request["clients"]) for c in indices_of(run, name)]


def first_name_of(run: RunFolder, name: str) -> str:
    """Return the name under which a client first joined; certificates use this name (section 4b)."""
    return str(run.clients[indices_of(run, name)[0]]["name"])


def founding_clients(run: RunFolder) -> range:
    """Return the clients that founded the run."""
    joined = sum(event["kind"] == "client joined" for event in run.tables["events"])
    return range(len(run.clients) - joined)
