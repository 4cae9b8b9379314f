"""Requests for records, and clients that rejoin with their remaining records (docs/store.md, sections 4b and 4c)."""

from __future__ import annotations

import json

from sifu_verifier.run_folder import RunFolder
from sifu_verifier.subjects import founding_clients


def check_records(run: RunFolder) -> None:
    """Check that the rows of each request exist, and that the client rejoined with its remaining rows (section 4b)."""
    names, first = {row["name"]: client for client, row in run.clients.items()}, {}
    gone: dict[int, set[int]] = {}
    for name, client in run.rejoined.items():
        request, at = run.requests[name], f"request {name}"
        rows, (name_before,) = json.loads(request["records"]), json.loads(request["clients"])
        before = names[name_before]
        root, earlier = first.get(before, before), gone.get(before, set())
        run.check(rows == sorted(set(rows)) and not earlier & set(rows), f"{at}: rows {rows} are not new ones")
        run.check(rows[0] >= 0 and rows[-1] < run.clients[root]["samples"], f"{at}: rows {rows} do not exist")
        first[client], gone[client] = root, earlier | set(rows)
        left = run.clients[root]["samples"] - len(gone[client])
        run.agree(f"{at}: samples left", run.clients[client]["samples"], left)
        run.check(left > 0, f"{at}: nothing is left of the client")
        base, turn = name_before, 1
        if "~" in name_before and name_before.rpartition("~")[2].isdecimal():
            base, turn = name_before.rpartition("~")[0], int(name_before.rpartition("~")[2])
        turn += 1
        while any(row["name"] == f"{base}~{turn}" for c, row in run.clients.items() if c < client):
            turn += 1
        run.agree(f"{at}: name", run.clients[client]["name"], f"{base}~{turn}")
    for name in run.done:
        if json.loads(run.requests[name]["records"]):
            run.check(name in run.rejoined, f"request {name}: its client did not join again")


def check_salts(run: RunFolder) -> None:
    """Check that each founder has a digest of its samples, and that no forgotten client has a salt (section 4c)."""
    events = [(event["kind"], json.loads(event["payload"])) for event in run.tables["events"]]
    digests = events[0][1].get("sample_digests")
    run.check(digests is None or len(digests) == len(founding_clients(run)), "a digest of samples for each client")
    path = run.folder / "salts.json"
    salts = json.loads(path.read_text()) if path.exists() else {}
    unsolved = {
        name for name, row in run.requests.items()
        if (row["status"], row["method"], str(row["noise_node"])) == ("running", "closed_form", run.entries["tip"])
    }  # fmt: skip
    rows = [row for row in run.tables["subjects"] if row["request"] not in unsolved]
    forgotten = {str(c) for row in rows for c in json.loads(row["clients"])}
    erasing = ("rolled back", "client joined", "rounds", "request refused", "request withdrawn")
    settled = events[-1][0] not in erasing and run.rejoins is None
    run.check(not settled or not forgotten & set(salts), "salts.json holds the salt of a forgotten client")
