"""Runs restored from a backup."""

from __future__ import annotations

import json

from sifu_verifier.canonical import Row
from sifu_verifier.run_folder import RunFolder


def check_restored(run: RunFolder) -> None:
    """Check the events of restores from a backup."""
    hashes = {f"{event['seq']}:{event['hash'].hex()}" for event in run.tables["events"]}
    for moment in run.restored:
        said, at = moment["payload"], f"event {moment['seq']}"
        run.agree(f"{at}: branch", said["branch"], run.nodes[int(moment["tip"])]["branch"])
        run.check(said["backup_head"] in hashes, f"{at}: the chain does not hold the head it names")
        run.check(not said["complete"] or said["anchor"] == said["backup_head"], f"{at}: it is not complete")
        number = {row["name"]: n for n, row in run.clients.items()}
        gone = {number[name] for name, row in moment["requests"].items() if name in said["requests"]
                for name in json.loads(row["clients"])}  # fmt: skip
        for what in ("updates", "statistics") if run.tables["events"][moment["seq"] - 1]["nonce"] else ():
            held = {file: {*map(int, json.loads(row["clients"]))} for (file,), row in moment[what].items()}
            expected = sorted(file for file, clients in held.items() if clients & gone)
            run.agree(f"{at}: {what} erased", sorted(said.get(f"dropped_{what}", [])), expected)
        stored = {int(c) for row in said.get("updates", []) for c in row["clients"]}
        run.check(not stored & gone, f"{at}: updates of the forgotten are stored again")


def restored_before(run: RunFolder, request: Row) -> bool:
    """Return whether the run was restored from a backup before the request was certified."""
    return any(event["seq"] < run.done[request["request"]]["seq"] for event in run.restored)
