"""Statistics of clients and the head solved from them (docs/store.md, sections 5a and 5b)."""

from __future__ import annotations

import json
import math

import numpy as np

from sifu_verifier.canonical import sha256
from sifu_verifier.packed import numbers_of
from sifu_verifier.rows import ClientRows, sums, words_of_rows
from sifu_verifier.run_folder import RunFolder
from sifu_verifier.tensors import tensors_of

GRID = [10.0 ** (eighth / 8.0) for eighth in range(-64, 17)]
"""Values of r that cross-validation chooses from (section 5a)."""


def check_statistics(run: RunFolder) -> None:
    """Check the statistics: the sum, the solved head, and the absence of forgotten clients (section 5a)."""
    listed = {row["file"]: row for row in run.tables["statistics"]}
    run.agree("statistics/", run.files_in("statistics"), sorted(listed))
    if run.spec["model"]["kind"] != "ridge":
        run.check(not listed and not run.solves, "there are statistics, but the model is not solved from any")
        return
    rounds = [n for n, row in run.nodes.items() if row["kind"] == "round"]
    run.agree("rounds that are solves", sorted(run.solves), rounds)
    for node, (client_count, left) in run.solvers.items():
        staying = [c for c in range(client_count) if run.clients[c]["name"] not in left]
        absent = run.solves[node].get("absent", [])
        run.agree(f"clients of solve {node}", sorted([*run.rounds[node], *absent]), staying)
        drifts = [run.nodes[node]["mean_shift"], *(row["drift"] for row in run.rounds[node].values())]
        run.check(all(map(math.isinf, drifts)), f"solve {node} has a finite drift")
        chosen, rule = run.solves[node]["relative_penalty"], run.spec["ridge"]["regularisation"]
        run.check(chosen is None or chosen in (GRID if rule == "auto" else [rule]), f"solve {node} has r = {chosen}")
    forgotten = {c for clients in run.subjects.values() for c in clients}
    k, outputs = json.loads(run.entries["layout"])["shapes"][0]
    tuned, places = run.spec["features"].get("tune", "none"), block_places(run, k)
    heading = heading_of(run, k, outputs)
    words, whole, samples_of = {}, None, {}
    rows_of: dict[int, ClientRows] = {}
    nodes = {backbone for row in listed.values() for backbone in json.loads(row["trunks"]) if backbone in run.groups}
    of_groups = {run.groups[node]["grp"] for node in nodes}
    lists = {row["trunks"] for row in listed.values()} if tuned != "blocks" else {""}
    alike = len(of_groups) == len(nodes) and len(lists) <= 1
    run.check(alike, "statistics are through different networks")
    public = [*range(k - sum(len(own) for own in places.values())), k]
    for file, row in listed.items():
        backbones = json.loads(row["trunks"])
        run.check(tuned != "none" or not backbones, f"statistics/{file}: there are no networks of groups")
        for backbone in backbones:
            there = backbone in run.groups and (run.folder / "models" / f"{backbone}.safetensors").exists()
            run.check(there, f"statistics/{file}: the network of node {backbone} is not there")
        data, clients = (run.folder / "statistics" / file).read_bytes(), json.loads(row["clients"])
        run.agree(f"statistics/{file}", [row["bytes"], row["digest"]], [len(data), sha256(data)])
        run.check(not forgotten & set(clients), f"statistics/{file} holds a forgotten client")
        counted = sum(run.clients[c]["samples"] for c in clients)
        through = [run.groups[backbone]["grp"] for backbone in backbones if backbone in run.groups]
        is_sum = file.endswith(".sum.statistics")
        part, in_rows = "-".join(map(str, through)) or "public", file.endswith(".rows.statistics")
        ending = "rows.statistics" if in_rows else "statistics"
        named = f"{row['node']}.{clients[0]}{f'.{part}' if tuned == 'blocks' else ''}.{ending}"
        run.check(is_sum or file == named, f"statistics/{file} does not have the name of its part")
        start = heading.replace(b"sifu statistics", b"sifu rows") if in_rows else heading
        start = start[:-1] + f" part={part}\n".encode() if tuned == "blocks" and not is_sum else start
        numbers = numbers_of(data, start, 4 if in_rows else 8)
        if numbers is None:
            run.check(False, f"statistics/{file}: its form contradicts the spec")
            continue
        if in_rows:
            run.agree(f"statistics/{file}: number of samples", row["samples"], counted)
            columns = list(range(k))
            if tuned == "blocks":
                columns = [*places[through[0]]] if through else public[:-1]
            has_targets = tuned != "blocks" or not through
            wanted = row["samples"] * (len(columns) + outputs * has_targets)
            run.agree(f"statistics/{file}: numbers", len(numbers), wanted)
            own_rows = rows_of.setdefault(clients[0], ClientRows())
            fresh = len(clients) == 1 and part not in own_rows.parts and (tuned == "blocks" or not own_rows.parts)
            run.check(fresh and (tuned != "blocks" or len(through) < 2), f"statistics/{file} is not of one client")
            own_rows.add(part, columns, numbers, row["samples"])
            continue
        square, cross = np.zeros((k + 1, k + 1), dtype=np.int64), np.zeros((k + 1, outputs), dtype=np.int64)
        if is_sum or tuned != "blocks":
            run.agree(f"statistics/{file}: words", len(numbers), (k + 1) * (k + 2) // 2 + (k + 1) * outputs + 2)
            square[np.tril_indices(k + 1)] = numbers[: (k + 1) * (k + 2) // 2]
            cross, there = numbers[(k + 1) * (k + 2) // 2 : -2].reshape(k + 1, outputs), set(through)
            dropped = sorted(place for group, own in places.items() if group not in there for place in own)
            held = square[dropped].any() or square[:, dropped].any() or cross[dropped].any()
            run.check(not held, f"statistics/{file}: a block without a network is not zero")
            run.agree(f"statistics/{file}: samples", row["samples"], int(numbers[-2]))
        else:
            place_part(square, cross, numbers, [list(places[group]) for group in through], public)
        totals = numbers[-2:] if is_sum or not (tuned == "blocks" and through) else np.zeros(2, dtype=np.int64)
        run.agree(f"statistics/{file}: number of samples", row["samples"], counted)
        numbers = np.concatenate([square[np.tril_indices(k + 1)], cross.ravel(), totals])
        if is_sum:
            run.check(whole is None, "there are two sums")
            whole = (row, clients, numbers)
            continue
        own = samples_of.setdefault(clients[0], set()) if len(clients) == 1 else {part}
        fresh = part not in own and (tuned == "blocks" or not own)
        run.check(len(clients) == 1 and fresh, f"statistics/{file} is not of one client")
        own.add(part)
        words[clients[0]] = words[clients[0]] + numbers if clients[0] in words else numbers
    count = len(of_groups)
    needed = 1 + count + count * (count - 1) // 2 if tuned == "blocks" else 1
    for client, own in samples_of.items():
        if len(own) < needed:
            incomplete = whole is not None and client in whole[1]
            run.check(not incomplete, f"parts of the statistics of client {client} are not there")
            words.pop(client)
    for client, own_rows in list(rows_of.items()):
        run.check(client not in samples_of, f"client {client} has both rows and statistics")
        if tuned == "blocks" and {"public", *map(str, of_groups)} - own_rows.parts.keys():
            incomplete = whole is not None and client in whole[1]
            run.check(not incomplete, f"rows of client {client} are not there")
            rows_of.pop(client)
    tip = run.nodes[int(run.entries["tip"])]
    if whole is None or tip["kind"] != "round":
        return
    row, clients, numbers = whole
    solve = run.solves[tip["node"]]
    run.agree("the current head's sum", [solve["sum"], sorted(run.rounds[tip["node"]])], [row["digest"], clients])
    if set(clients) <= words.keys() | rows_of.keys():  # integer sums do not depend on their order
        unit = 2 ** run.spec["ridge"]["feature_bits"]
        added = words_of_rows((rows_of[c] for c in clients if c in rows_of), k, outputs, unit)
        run.check(added is not None, "rows have numbers that are beyond the norm")
        if added is not None:
            added = sum((words[c] for c in clients if c not in rows_of), added)
            run.check(np.array_equal(added, numbers), "the sum differs from the sum of its clients' statistics")
    through = {run.groups[backbone]["grp"] for backbone in json.loads(row["trunks"])}
    lost = {place for group, own in places.items() if group not in through for place in own}
    if tuned == "merge" and not through:
        lost = set(range(k // 2, k))
    check_head(run, tip["node"], numbers, lost)


def heading_of(run: RunFolder, k: int, outputs: int) -> bytes:
    """Return the first line of a file of statistics with `k` features (section 5a)."""
    features, ridge = run.spec["features"], run.spec["ridge"]
    parts = {"none": 1, "merge": 2, "blocks": 1 + run.spec["groups"]["count"]}[features.get("tune", "none")]
    norm = float(features["norm"]) * math.sqrt(parts)
    reach = {"classification": 1.0, "multi_label": math.sqrt(outputs), "regression": 8.0 * math.sqrt(outputs)}
    bits = f"feature_bits={ridge['feature_bits']} target_bits={ridge['target_bits']}"
    norms = f"norm={norm!r} target_norm={reach[ridge['task']]!r}"
    return f"sifu statistics 1 features={k} outputs={outputs} {bits} {norms}\n".encode()


def place_part(
    square: np.ndarray, cross: np.ndarray, numbers: np.ndarray, blocks: list[list[int]], public: list[int]
) -> None:
    """Write the numbers of one part of a client's statistics to their places in G and H (section 5b).

    A file contains only numbers computed by the networks that it names.

    Args:
        square: The matrix G, changed in place.
        cross: The matrix H, changed in place.
        numbers: Numbers of the file.
        blocks: Features of each network that the file names: none, one or two.
        public: Public features and the constant.
    """
    high = np.array(blocks[-1] if blocks else public)
    low = np.array(blocks[0] if len(blocks) == 2 else public if blocks else [], dtype=int)
    rows, columns = np.tril_indices(len(high) if len(blocks) < 2 else 0)
    below, corner = np.split(numbers[: high.size * low.size + len(rows)], [high.size * low.size])
    square[np.ix_(high, low)] = below.reshape(high.size, low.size)
    square[np.ix_(low, high)] = square[np.ix_(high, low)].T
    square[high[rows], high[columns]] = square[high[columns], high[rows]] = corner
    rest = numbers[below.size + corner.size : None if blocks else -2]
    cross[high if len(blocks) < 2 else []] = rest.reshape(-1, cross.shape[1])


def check_head(run: RunFolder, node: int, numbers: np.ndarray, lost: set[int]) -> None:
    """Check that the current head solves the system of its sum with the penalty of the rule (sections 5a and 5b).

    Args:
        run: Run folder to verify.
        node: Node of the head.
        numbers: Numbers of the sum.
        lost: Features without a network; the head uses none of them.
    """
    ridge, chosen = run.spec["ridge"], run.solves[node]["relative_penalty"]
    gram, cross = sums(run, numbers)
    tensors = tensors_of((run.folder / "models" / f"{node}.safetensors").read_bytes(), "<f8")
    head = np.concatenate([tensors["weight"], tensors["bias"]]).reshape(cross.shape)
    run.check(not head[sorted(lost)].any(), "the current head has weights of features without a network")
    kept = [place for place in range(len(gram)) if place not in lost]
    gram, cross, head = gram[np.ix_(kept, kept)], cross[kept], head[kept]
    mean = float(np.trace(gram)) / len(gram)
    if ridge["regularisation"] == "auto":
        energy, n = math.ldexp(int(numbers[-1]), -2 * ridge["target_bits"]), int(numbers[-2])
        values, vectors = np.linalg.eigh(gram)
        rotated, scores = vectors.T @ cross, {}
        for r in GRID:
            penalty = r * mean
            weights = rotated / (np.maximum(values, 0.0) + penalty)[:, None]
            left = energy - float(np.sum(weights * rotated)) - penalty * float(np.sum(weights**2))
            free = 1 - float(np.sum(np.maximum(values, 0.0) / (np.maximum(values, 0.0) + penalty))) / n
            noise = 64 * 2.0**-52 * len(gram) * energy
            if left > noise and free > 1e-9:
                scores[r] = ((left - noise) / n / free**2, (left + noise) / n / free**2)
        least, _ = scores.get(chosen, (math.inf, math.inf))
        smallest = min((most for _, most in scores.values()), default=math.inf)
        good = chosen in GRID and least <= smallest * (1 + 1e-6)
        run.check(good, f"r = {chosen} is not what cross-validation chooses")
    residual, scale = np.linalg.norm(cross - gram @ head - chosen * mean * head), np.linalg.norm(cross)
    run.check(residual <= 1e-9 * scale, f"the current head leaves a residual of {residual}, with ||H|| = {scale}")


def block_places(run: RunFolder, k: int) -> dict[int, range]:
    """Return the features that form the block of each group (section 5b)."""
    features, count = run.spec["features"], run.spec["groups"]["count"]
    if features.get("tune", "none") != "blocks":
        return {}
    block = features["block"]
    if not 0 < block < k - count * block:
        block = k // (count + 1)
    first = k - count * block
    return {group: range(first + group * block, first + (group + 1) * block) for group in range(count)}
