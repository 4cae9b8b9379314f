"""The chain of events, replayed into tables that must equal the stored tables (docs/store.md, section 6)."""

from __future__ import annotations

import json
import re
from typing import Any

from sifu_verifier.canonical import Row, canonical, parsed, sha256
from sifu_verifier.nodes import rows_digest
from sifu_verifier.releases import take_release
from sifu_verifier.request_steps import STEPS, person, take_rejoining, take_step
from sifu_verifier.run_folder import RunFolder, with_terms
from sifu_verifier.signatures import check_signature, take_key

REPLAYED = {"run": ["key"], "models": ["node"], "evaluations": ["node", "subset"], "requests": ["request"], "subjects":
            ["subject"], "charges": ["noise_node", "subject"],
            "statistics": ["file"], "rejections": ["branch", "round", "number"],
            "group_models": ["node"], "merges": ["node", "grp"]}  # fmt: skip


DECIDED = ("request verified", "request planned", "request refused", "request withdrawn")

PHASES = {"run created": "training", "training done": "ready", "rolled back": "retraining", "request done": "ready"}
"""Phase that an event sets; a refusal or withdrawal sets it only if it undoes a running request."""


def approvals_needed(run: RunFolder) -> int:
    """Return the number of people, besides the person who filed it, that must approve a request (section 6)."""
    return {"none": 0, "one": 1, "two": 2}[run.spec.get("requests", {}).get("approval", "none")]


def leaves_out(run: RunFolder, request: Row) -> bool:
    """Return whether a waiting request excludes its clients (section 4d).

    An approved request does unless it names records.
    """
    approved = len(run.approved[request["request"]]) > approvals_needed(run)
    return approved and not json.loads(request["records"])


def check_ledger(run: RunFolder) -> None:
    """Replay the chain of events, and check that the result equals the stored tables."""
    previous, next_node, replayed, dropped = bytes(32), 0, {t: {} for t in REPLAYED}, set()

    def put(table: str, row: Row) -> None:
        key = tuple(row[k] for k in REPLAYED[table])
        replayed[table][key] = replayed[table].get(key, {}) | row

    for number, event in enumerate(run.tables["events"], 1):
        at, text, payload = f"event {event['seq']}", event["payload"], parsed(event["payload"])
        run.agree(f"{at}: number", event["seq"], number)
        run.agree(f"{at}: payload", text, canonical(payload))
        run.agree(f"{at}: length of the nonce", len(event["nonce"]), 32)
        run.agree(f"{at}: commitment", event["commitment"].hex(), sha256(event["nonce"], text.encode()))
        fields = [str(event["seq"]).encode(), event["time"].encode(), event["kind"].encode(), event["commitment"]]
        run.agree(f"{at}: hash", event["hash"].hex(), sha256(previous, b"\0".join(fields)))
        previous, models, name = event["hash"], replayed["models"], payload.get("request")
        moment = {"seq": event["seq"], "payload": payload, "models": {n: row for (n,), row in models.items()}}
        moment["tip"] = replayed["run"].get(("tip",), {}).get("value")
        moment["clients"] = int(replayed["run"].get(("client_count",), {"value": 0})["value"])
        moment["statistics"] = dict(replayed["statistics"])
        moment["requests"] = {n: with_terms(row) for (n,), row in replayed["requests"].items()}
        asking = [row for row in moment["requests"].values() if row["status"] not in ("refused", "withdrawn")]
        if event["kind"] == "rolled back" or "solve" in payload:
            begun = [row for row in asking if row["status"] in ("running", "done") or row["request"] == name]
            waiting = [row for row in asking if row not in begun and leaves_out(run, row)]
            names = {client for row in waiting for client in json.loads(row["clients"])}
            numbers = sorted(row["client"] for row in run.clients.values() if row["name"] in names)
            run.agree(f"{at}: left out", payload.get("solve", payload)["left_out"], numbers)
            asking = begun + waiting
        moment["asked"] = [row["clients"] for row in asking]
        check_signature(run, event, payload)
        if "public_key" in payload.get("run", {}):
            take_key(run, event["seq"], payload)
        if event["kind"] == "restored":
            run.restored.append(moment)
        if event["kind"] == "purged":
            run.purges.append(moment | {"known": sorted(i for (i,) in replayed["subjects"])})
        said, recorded = payload.get("run", {}), payload.get("rows", {})
        fixed = {"facts", "spec", "asked", "layout", "versions", "run"} & said.keys()
        fixed -= set() if event["seq"] > 1 else said.keys()
        run.check(not fixed, f"{at}: changes {sorted(fixed)}")
        moves = recorded and event["kind"] != "group rounds"
        run.agree(f"{at}: current model", said.get("tip"), str(recorded["last"]) if moves else None)
        moment["kind"], moment["gone"] = event["kind"], [c for s in replayed["subjects"].values()
                                                         for c in json.loads(s["clients"])]  # fmt: skip
        moment["order"] = sum(row.get("request_order") is not None for row in replayed["requests"].values())
        moment["method"] = payload.get("choice", {}).get("method")
        current = int(moment["tip"] or 0)
        if event["kind"] in PHASES:
            run.agree(f"{at}: phase", said.get("phase"), PHASES[event["kind"]])
        if event["kind"] == "training done":
            run.agree(f"{at}: node", payload["node"], current)
        measured = [row["node"] for row in payload.get("evaluations", [])]
        there = all(current <= node <= (recorded["last"] if moves else current) for node in measured)
        run.check(there, f"{at}: evaluates another model than the current one")
        if event["kind"] in ("merged", "rolled back"):
            run.merged.append(moment)
        if event["kind"] == "group rounds":
            run.separate.append(moment)
        if event["kind"] == "rolled back":
            order, noise_node = payload["choice"]["request_order"], payload["choice"]["noise_node"]
            run.agree(f"{at}: order and node", [order, noise_node], [len(run.rolled) + 1, recorded.get("last")])
        for row in payload.get("models", []):
            if row["node"] < recorded.get("first", next_node):
                run.agree(f"{at}: model", row["digest"], models.get((row["node"],), {}).get("digest"))
        again = {row["node"] for row in payload.get("models", [])} & dropped
        run.check(not again, f"{at}: erased models {sorted(again)} are there again")
        dropped.update(payload.get("dropped_models", []))
        for key, value in said.items():
            put("run", {"key": key, "value": value if isinstance(value, str) else canonical(value)})
        for node in payload.get("dropped_models", []):
            run.check(models.pop((node,), None), f"{at}: drops model {node}, which is not there")
        for row in payload.get("group_models", []):
            put("group_models", row | {"members": canonical(row["members"])})
        for row in payload.get("models", []):
            put("models", {"psi_max": payload.get("psi_max", {}).get(str(row["node"]), 0.0)} | row)
        for table in ("evaluations", "rejections", "merges"):
            for row in payload.get(table, []):
                put(table, row)
        for file in payload.get("dropped_statistics", []):
            there = replayed["statistics"].pop((file,), None)
            run.check(there, f"{at}: drops statistics {file}, which are not there")
        for row in payload.get("statistics", []):
            put("statistics", row | {"clients": canonical(row["clients"])})
            node, owner = row["file"].split(".")[:2]
            own = owner == "sum" or [owner] == [str(client) for client in row["clients"]]
            run.check(own and node == str(row["node"]), f"{at}: statistics {row['file']} are of another node or client")
        if "solve" in payload:
            known = moment | {"clients": int(replayed["run"][("client_count",)]["value"])}
            take_solve(run, event, known, [name for row in asking for name in json.loads(row["clients"])])
        take_approval(run, event, payload, name)
        take_rejoining(run, event, payload)
        take_release(run, event, payload, moment["tip"])
        if event["kind"] in STEPS:
            take_step(run, event, name["request"] if isinstance(name, dict) else name)
        if "rows" in payload:
            rows = payload["rows"]
            run.agree(f"{at}: first node", rows["first"], next_node)
            run.agree(f"{at}: digest of nodes", rows["digest"], rows_digest(run, next_node, rows["last"]))
            next_node = rows["last"] + 1
        if "clients_digest" in said:
            columns = ("client", "name", "samples", "local_steps", "expansion")
            rows = [canonical([row[c] for c in columns]).encode() for row in run.tables["clients"]]
            digest = sha256(*rows[: int(said["client_count"])])
            run.agree(f"{at}: clients_digest", said["clients_digest"], digest)
        if event["kind"] == "request received":
            terms = {key: value for key, value in name.items() if key not in ("request", "deadline_days")}
            fresh = {"status": "received", "received": event["time"], "method": name["method"]}
            row = {key: name[key] for key in ("request", "deadline_days")} | {"terms": canonical(terms)}
            put("requests", row | fresh)
        elif event["kind"] == "rolled back":
            run.rolled[name], choice = moment, payload["choice"]
            put("requests", choice | {"request": name, "status": "running", "carried_out": event["time"]})
            for row in payload["subjects"]:
                put("subjects", row | {"request": name, "clients": canonical(row["clients"])})
            for row in payload["charges"]:
                put("charges", row | {"noise_node": choice["noise_node"]})
        elif event["kind"] == "request done":
            run.done[name], result = moment, {k: payload[k] for k in ("request", "final_node", "level")}
            put("requests", result | {"status": "done", "finished": event["time"]})
        elif event["kind"] in DECIDED:
            put("requests", {"request": name, "status": event["kind"].split()[1]})
    head = f"{len(run.tables['events'])}:{previous.hex()}"
    put("run", {"key": "head", "value": head})
    compare_tables(run, replayed)
    run.agree("nodes", list(run.nodes), list(range(next_node)))
    run.check(run.rounds.keys() == run.nodes.keys(), "rows of rounds name nodes that do not exist")
    run.agree("client_count", run.entries["client_count"], str(len(run.clients)))


def take_solve(run: RunFolder, event: Row, moment: Row, asking: list[str]) -> None:
    """Record a solve and the clients that it excluded, as described in section 5a.

    Args:
        run: Run folder to verify.
        event: Row of the event.
        moment: State of the run at the event.
        asking: Names of the clients whose requests exclude them.
    """
    at, payload = f"event {event['seq']}", moment["payload"]
    first, node = payload["rows"]["first"], payload["rows"]["last"]
    run.agree(f"{at}: rounds of a solve", [event["kind"], first], ["rounds", node])
    run.solves[node] = payload["solve"] | {"relative_penalty": payload.get("relative_penalty")}
    refused = {row["client"] for row in payload.get("rejections", []) if row["left_out"]}
    run.solvers[node] = (moment["clients"], {*asking, *refused})


def take_approval(run: RunFolder, event: Row, payload: Row, name: Any) -> None:
    """Record the filer and the approvers of a request, and check its approvals when it runs (section 6).

    Args:
        run: Run folder to verify.
        event: Row of the event.
        payload: Payload of the event.
        name: Id of the request, or its id and terms if the event files it.
    """
    at = f"event {event['seq']}"
    if event["kind"] == "request received":
        if "commitments" in payload:
            commitments = payload["commitments"]
            good = commitments == sorted(commitments) and all(re.fullmatch("[0-9a-f]{64}", c) for c in commitments)
            run.check(good and 0 < len(commitments) <= len(name["records"]), f"{at}: commitments to records")
            run.committed[name["request"]] = commitments
        run.approved[name["request"]] = [person(payload["actor"])]
        filed = {key: value for key, value in name.items() if key != "deadline_days"}
        run.filed[name["request"]] = sha256(canonical(filed).encode())
    elif event["kind"] == "request approved":
        people, actor = run.approved[name], person(payload["actor"])
        good = actor not in people and 0 < run.steps.get(name, 0) < 4
        run.agree(f"{at}: terms approved", payload.get("terms"), run.filed[name])
        run.check(good, f"{at}: {actor} cannot approve {name}")
        people.append(actor)
    elif event["kind"] == "rolled back":
        needed = approvals_needed(run)
        run.check(len(run.approved[name]) > needed, f"{at}: {name} ran without its {needed} approvals")


def compare_tables(run: RunFolder, replayed: dict[str, dict]) -> None:
    """Check that the stored tables equal the replayed tables; a null value equals a missing value."""
    for table, keys in REPLAYED.items():
        rows = {tuple(row[k] for k in keys): row for row in run.tables[table]}
        for key in rows.keys() | replayed[table].keys():
            both = (rows.get(key, {}), replayed[table].get(key, {}))
            here, there = ({k: v for k, v in row.items() if v is not None} for row in both)
            run.check(here == there, f"table {table}: {here} is not what the ledger says, {there}")
