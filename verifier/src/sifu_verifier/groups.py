"""Groups of clients and the merges of their models (docs/store.md, section 1b)."""

from __future__ import annotations

import hmac
import math
from typing import Any

import numpy as np

from sifu_verifier.run_folder import RunFolder

STRETCH = 1.25  # by which a merge is moved further from the fresh model (section 1b)


def check_groups(run: RunFolder) -> None:
    """Check the members of each group, and the group models of every merge (section 1b)."""
    rounds = run.spec["groups"]["rounds"]
    for moment in run.separate:
        for row in moment["payload"]["group_models"]:
            at, node, members = f"node {row['node']}", run.nodes[row["node"]], row["members"]
            for client in members:
                digest = hmac.digest(
                    bytes.fromhex(run.entries["group_key"]), run.clients[client]["name"].encode(), "sha256"
                )
                group = int.from_bytes(digest[:8], "big") % run.spec["groups"]["count"]
                run.agree(f"{at}: group of client {client}", row["grp"], group)
            run.check(not set(members) & set(moment["gone"]), f"{at}: a forgotten client is in its group")
            run.agree(f"{at}: samples", row["samples"], sum(run.clients[c]["samples"] for c in members))
            before = run.groups.get(node["parent"], {"grp": row["grp"], "members": [], "rounds": 0})
            run.agree(f"{at}: group of its parent", before["grp"], row["grp"])
            run.check(set(before["members"]) <= set(members), f"{at}: members of its earlier rounds are missing")
            run.check(before["rounds"] < row["rounds"] <= rounds, f"{at}: it has {row['rounds']} rounds")
            branch = run.nodes[node["parent"]]["branch"] if node["parent"] else -moment["order"]
            run.agree(f"{at}: place", [node["branch"], node["position"]], [branch, row["rounds"]])
    for moment in run.merged:
        payload, at = moment["payload"], f"event {moment['seq']}"
        leaving = {c for subject in payload.get("subjects", []) for c in subject["clients"]}
        latest = {run.groups[n]["grp"]: run.groups[n] for n in sorted(moment["models"]) if n in run.groups}
        node, takes = payload["rows"]["last"], moment["kind"] == "merged" or moment["method"] == "groups"
        parts = [row for _, row in sorted(latest.items())
                 if takes and row["rounds"] == rounds and not leaving & set(row["members"])]  # fmt: skip
        stated = [[p["node"], p["grp"], p["source_node"], p["samples"]] for p in payload.get("merges", [])]
        run.agree(f"{at}: groups merged", stated, [[node, p["grp"], p["node"], p["samples"]] for p in parts])
        run.agree(f"{at}: it is a merge", run.nodes[node]["kind"] == "merge", bool(parts))
        if parts:
            run.agree(f"{at}: members", sorted(run.rounds[node]), sorted({c for p in parts for c in p["members"]}))
            run.check(all(math.isinf(p["drift"]) for p in run.rounds[node].values()), f"{at}: a drift is known")
            run.agree(f"{at}: kind of the parent", run.nodes[run.nodes[node]["parent"]]["kind"], "initial")


def check_merged_model(run: RunFolder, node: int, vectors: dict[int, Any], number: str) -> None:
    """Check that a merge is bit for bit the stretched mean of the groups' models, if these exist (section 1b)."""
    parts = sorted((row for row in run.tables["merges"] if row["node"] == node), key=lambda row: row["grp"])
    if all(part["source_node"] in vectors for part in parts):
        weights = [float(part["samples"]) for part in parts]
        weights = weights if any(weights) else [1.0] * len(parts)
        total = np.zeros_like(vectors[node])
        for part, weight in zip(parts, weights, strict=True):
            total = total + weight * vectors[part["source_node"]]
        mean = total / sum(weights)
        if not run.check(0 in vectors, f"node {node}: the fresh model that it was stretched from is missing"):
            return
        moved = vectors[0] + STRETCH * (mean - vectors[0])
        below = (moved < 0) & (mean >= 0) & (vectors[0] >= 0)
        mean = np.array([m if stays else v for m, v, stays in zip(mean, moved, below, strict=True)])
        mean = mean.astype(number).astype(float)
        run.check(np.array_equal(mean, vectors[node]), f"node {node}: it is not the merge of the groups' models")
