"""Networks tuned by groups, and the statistics that a request erased (docs/store.md, sections 5a and 5b)."""

from __future__ import annotations

import json

from sifu_verifier.canonical import Row
from sifu_verifier.run_folder import RunFolder


def check_networks(run: RunFolder) -> None:
    """Check that every head uses all networks that were finished and stored when it was solved (section 5b)."""
    if run.spec["features"].get("tune", "none") == "none":
        run.check(not any("trunks" in solve for solve in run.solves.values()), "a solve names networks of groups")
        return
    for node, solve in run.solves.items():
        models, gone = run.at_solve[node]
        there = [run.groups[n] for n in models if n in run.groups]
        latest = {row["grp"]: row for row in there}
        wanted = [row for _, row in sorted(latest.items()) if row["rounds"] == run.spec["groups"]["rounds"]]
        run.agree(f"networks of solve {node}", solve.get("trunks"), [row["node"] for row in wanted])
        held = set(gone) & {client for row in wanted for client in row["members"]}
        run.check(not held, f"solve {node} stands on a network that held a forgotten client")


def check_statistics_of_request(run: RunFolder, request: Row) -> None:
    """Check the statistics that a request erased and the sum that it left (sections 5a and 5b).

    Every file with a forgotten client or an erased network is erased. The sum without the clients replaces the old one
    if their own statistics are stored.
    """
    moment, at = run.rolled[request["request"]], f"request {request['request']}"
    own = {c for i, clients in run.subjects.items() if run.owner[i] is request for c in clients}
    stored = {file: json.loads(row["clients"]) for (file,), row in moment["statistics"].items()}
    backbones = {file: json.loads(row["trunks"]) for (file,), row in moment["statistics"].items()}
    erased = {n for n in moment["payload"].get("dropped_models", []) if n in run.groups}
    gone = sorted(file for file, clients in stored.items() if own & set(clients) or erased & set(backbones[file]))
    run.agree(f"{at}: statistics erased", moment["payload"].get("dropped_statistics", []), gone)
    if run.spec["features"].get("tune", "none") != "none":
        check_dropped_statistics(run, request, own, stored, backbones, erased)
        return
    sums = [clients for file, clients in stored.items() if file.endswith(".sum.statistics")]
    single = {clients[0] for file, clients in stored.items() if not file.endswith(".sum.statistics")}
    leaving = set(sums[0]) & own if sums else set()
    stays = [sorted(set(sums[0]) - own)] if leaving and leaving <= single else []
    written = [row["clients"] for row in moment["payload"].get("statistics", [])]
    run.agree(f"{at}: sum that stays", written, [stay for stay in stays if stay])


def check_dropped_statistics(
    run: RunFolder, request: Row, own: set[int], stored: dict[str, list], backbones: dict[str, list], erased: set[int]
) -> None:
    """Check the sums that a request left in a run with tuned networks (section 5b).

    If the networks are separate blocks, the new sum omits the blocks of erased networks. If they are merged and one is
    erased, the sum is erased and not replaced.

    Args:
        run: Run folder to verify.
        request: Row of the request.
        own: Indices of the forgotten clients.
        stored: Clients of each file of statistics before the request.
        backbones: Networks of each file of statistics before the request.
        erased: Networks that the request erased.
    """
    wanted, merge = [], run.spec["features"]["tune"] == "merge"
    for file, clients in stored.items():
        if not file.endswith(".sum.statistics"):
            continue
        left, leaving = [n for n in backbones[file] if n not in erased], set(clients) & own
        files = dict.fromkeys(leaving, 0)
        for part, of in stored.items():
            through = backbones[part] == backbones[file] if merge else set(backbones[part]) <= set(backbones[file])
            if of[0] in files and through and not part.endswith(".sum.statistics"):
                files[of[0]] += 1
        count = len(backbones[file])
        rows = {of[0] for part, of in stored.items() if part.endswith(".rows.statistics")}
        pairs = {client: 0 if client in rows else count * (count - 1) // 2 for client in files}
        needed = {client: 1 if merge else 1 + count + pairs[client] for client in files}
        possible = files == needed and not (merge and left != backbones[file])
        if (leaving or left != backbones[file]) and possible and set(clients) - own:
            wanted.append([True, sorted(set(clients) - own), left])
    written = run.rolled[request["request"]]["payload"].get("statistics", [])
    stated = [[row["file"].endswith(".sum.statistics"), row["clients"], row["trunks"]] for row in written]
    run.agree(f"request {request['request']}: statistics left", sorted(stated), sorted(wanted))
