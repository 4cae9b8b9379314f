"""Nodes of a run: the tables of rounds and of participants (docs/store.md, section 1)."""

from __future__ import annotations

import math
import struct

from sifu_verifier.canonical import sha256
from sifu_verifier.regularity import is_possible
from sifu_verifier.run_folder import RunFolder

KINDS = {"initial": 0, "round": 1, "noise": 2, "group": 3, "merge": 4}


def rows_digest(run: RunFolder, first: int, last: int) -> str:
    """Return the digest of the rows of nodes `first` to `last` (section 6)."""
    nodes = [n for n in range(first, last + 1) if n in run.nodes]
    counts = len(nodes), sum(len(run.rounds[n]) for n in nodes)
    parts = [struct.pack("<2q", *counts)]
    for row in (run.nodes[n] for n in nodes):
        head = row["node"], -1 if row["parent"] is None else row["parent"], KINDS[row["kind"]]
        parts.append(struct.pack("<7q6d", *head, *list(row.values())[3:]))  # the document gives this order of columns
    for row in (p for n in nodes for p in run.rounds[n].values()):
        parts.append(struct.pack("<3qd", row["node"], row["client"], row["samples"], row["drift"]))
    return sha256(*parts)


def check_nodes(run: RunFolder) -> None:
    """Check the table of nodes and the participants of every round (section 1)."""
    gone: dict[int, int] = {}  # node of the first request that forgot each client
    for i, clients in sorted(run.subjects.items()):
        gone |= {c: run.owner[i]["noise_node"] for c in clients if c not in gone}
    for client, row in run.clients.items():
        run.check(is_possible(row, run.spec), f"client {client}: safe steps cannot have its expansion")
    for node, row in run.nodes.items():
        parent, here, at = run.nodes.get(row["parent"]), run.rounds[node], f"node {node}"
        run.check((parent is None) == (row["kind"] == "initial"), f"{at}: kind and parent do not fit")
        bounds = [row["mean_shift"], row["rounding"], *(p["drift"] for p in here.values())]
        run.check(all(bound >= 0 for bound in bounds), f"{at}: a drift, mean shift or rounding is below zero")
        if row["kind"] in ("round", "group") or node == 0:
            run.agree(f"{at}: noise and order", [row["noise_std"], row["request_order"]], [0.0, 0])
        if row["kind"] not in ("round", "merge"):
            run.check(not here, f"{at}: clients took part, but it is no round")
            continue
        if row["kind"] == "round":
            earlier = [n for n, other in run.nodes.items() if n < node and other["kind"] != "group"]
            run.agree(f"{at}: parent", row["parent"], max(earlier, default=None))
            place = [parent["branch"], parent["position"] + 1]
            run.agree(f"{at}: branch and position", [row["branch"], row["position"]], place)
        regular = [(p["samples"], run.regular[c]) for c, p in here.items()]
        run.agree(f"{at}: samples", row["samples"], sum(n for n, _ in regular))
        run.agree(f"{at}: factor_sum", row["factor_sum"], math.fsum(n * p for n, p in regular))
        run.agree(f"{at}: factor_max", row["factor_max"], max((p for _, p in regular), default=1.0))
        for client, p in here.items():
            run.agree(f"{at}: samples of client {client}", p["samples"], run.clients[client]["samples"])
            run.check(gone.get(client, node) >= node, f"{at}: client {client} took part after it was forgotten")


def check_rejections(run: RunFolder) -> None:
    """Check that no round contains a client whose reply it ignored (section 1a)."""
    node_at = {(row["branch"], row["position"] - 1): n for n, row in run.nodes.items() if row["kind"] == "round"}
    names = {row["name"]: client for client, row in run.clients.items()}
    for row in run.tables["rejections"]:
        node = node_at.get((row["branch"], row["round"]))
        missing = node is not None and names.get(row["client"]) not in run.rounds[node]
        run.check(missing or not row["left_out"], f"node {node}: {row['client']} was left out, but is in it")
