"""Stored updates of clients (docs/store.md, section 5)."""

from __future__ import annotations

import json
import struct
from typing import Any

from sifu_verifier.canonical import Row, sha256
from sifu_verifier.methods import REPLAYING
from sifu_verifier.paths import path_to
from sifu_verifier.psi import psi_along
from sifu_verifier.run_folder import RunFolder
from sifu_verifier.tensors import tensors_of


def replayed_updates(run: RunFolder, node: int, number: str) -> Any:
    """Return the movement of a heuristic node: the server rate times the sum of its weighted mean updates."""
    total: Any = 0.0
    for row in (row for row in run.tables["updates"] if row["node"] == node):
        updates = tensors_of((run.folder / "updates" / row["file"]).read_bytes(), number)
        samples = {c: run.clients[int(c)]["samples"] for c in updates}
        mean = sum(samples[c] * updates[c] for c in updates) / sum(samples.values())
        total = total + run.facts["server_rate"] * mean
    return total


def check_updates(run: RunFolder) -> None:
    """Check the stored updates, and that none of them belongs to a forgotten client (section 5)."""
    active, forgotten = path_to(run, int(run.entries["tip"])), {c for clients in run.subjects.values() for c in clients}
    every, first = run.spec["keep"].get("updates_every", 0), {}
    for row in run.written:
        node, at = run.nodes[row["node"]], f"updates {row['file']}"
        before = first.setdefault((row["node"], row["part"]), row["clients"])
        run.check(row["clients"].items() <= before.items(), f"{at}: other updates than were recorded first")
        if node["kind"] == "round":
            run.agree(f"{at}: clients", sorted(map(int, before)), sorted(run.rounds[row["node"]]))
            run.agree(f"{at}: part", row["part"], 0)
        else:
            run.agree(f"{at}: kind of the node", node["kind"], "heuristic")
    due = [n for n, row in run.nodes.items() if every and row["kind"] == "round" and run.rounds[n]
           and (row["position"] - 1) % every == 0]  # fmt: skip
    run.agree("rounds with updates", sorted(n for n, part in first if part == 0), due)
    listed = {row["file"]: row for row in run.tables["updates"]}
    run.agree("files in updates/", run.files_in("updates"), sorted(listed))
    for file, row in listed.items():
        data, clients = (run.folder / "updates" / file).read_bytes(), json.loads(row["clients"])
        run.agree(f"updates/{file}", [row["bytes"], row["digest"]], [len(data), sha256(data)])
        run.check(not forgotten & {int(c) for c in clients}, f"updates/{file} holds a forgotten client")
        run.check(row["node"] in active, f"updates/{file} is of a round that was cut off")
        end = 8 + struct.unpack_from("<Q", data)[0]
        header = json.loads(data[8:end])
        places = {c: header[c]["data_offsets"] for c in header}
        run.agree(f"updates/{file}: size", len(data), end + max(stop for _, stop in places.values()))
        first, last = (end + place for place in places.pop("salts"))
        salts = {c: data[first + 32 * k : first + 32 * (k + 1)] for k, c in enumerate(sorted(places, key=int))}
        run.agree(f"updates/{file}: salts", last - first, 32 * len(places))
        digests = {c: sha256(salts[c] + data[end + start : end + stop]) for c, (start, stop) in places.items()}
        run.agree(f"updates/{file}: tensors", digests, clients)


def check_updates_of_request(run: RunFolder, request: Row, active: list[int], hidden: dict[int, dict]) -> None:
    """Check which updates a request erased and which it kept."""
    name, source, heuristic = request["request"], request["source_node"], request["method"] in REPLAYING
    moment, at = run.rolled[name], f"request {name}"
    mine = {i for i in hidden if run.owner[i] is request}
    own = {c for i in mine for c in run.subjects[i]}
    forgotten = {row["client"] for row in run.clients.values() for text in moment["asked"]
             if row["name"] in json.loads(text)}  # fmt: skip
    rows = sorted(moment["updates"].values(), key=lambda row: (active.index(row["node"]), row["part"]))
    dropped, stay, replayed = [], {}, []
    promised: dict[int, dict] = {i: hidden[i] for i in hidden.keys() - mine}
    for i, clients in run.subjects.items():  # noise in training does not cover replayed updates
        order = run.owner[i]["request_order"]
        if heuristic and run.owner[i]["method"] == "dp" and order < request["request_order"]:
            fresh = run.nodes[active[0]]["request_order"] >= order
            promised[i] = dict.fromkeys(active, 0.0) if fresh else psi_along(run, active, clients)
    promised = {i: held for i, held in promised.items() if run.owner[i]["level"] not in (None, "none")}
    for row in rows:
        node, clients = run.nodes[row["node"]], json.loads(row["clients"])
        start = node["node"] if node["kind"] == "heuristic" else node["parent"]
        cut = source is None or active.index(row["node"]) > active.index(source)
        strict = request["retention"] == "strict" and any(hidden[i][start] for i in mine)
        if cut or strict or own & {int(c) for c in clients}:
            dropped.append(row["file"])
            rest = {c: digest for c, digest in clients.items() if int(c) not in own}
            if rest and not cut and not strict:
                stay[row["node"], row["part"]] = rest
        left = {c: digest for c, digest in clients.items() if int(c) not in forgotten}
        replayed += [left] if left and heuristic else []
        for i, held in promised.items() if heuristic else ():
            run.check(not held[start], f"{at}: breaks what subject {i} was promised")
    rounds = 0
    if request["method"] == "fed_eraser":
        replayed = replayed[: request["max_rounds"] or run.spec["stop"]["max_rounds"]]
        rounds = len(replayed)
    stay |= {(request["noise_node"], part): left for part, left in enumerate(replayed, 1)}
    recorded = {(row["node"], row["part"]): row["clients"] for row in moment["payload"].get("updates", [])}
    if request["method"] == "fed_eraser":  # fed_eraser computes new updates, of which only the clients can be checked
        stay, recorded = ({key: sorted(value) for key, value in updates.items()} for updates in (stay, recorded))
    run.agree(f"{at}: updates erased", sorted(moment["payload"].get("dropped_updates", [])), sorted(dropped))
    run.check(recorded == stay, f"{at}: the updates that stay are not those of the remaining clients")
    run.agree(f"{at}: extra rounds", moment["payload"]["extra"]["rounds"], rounds)
    run.agree(f"{at}: position of the new node", run.nodes[request["noise_node"]]["position"], rounds)
