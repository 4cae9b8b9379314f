"""Statistics of clients and the head solved from them (docs/store.md, section 5a)."""

from __future__ import annotations

import json
import math

import numpy as np

from sifu_verifier.canonical import Row, sha256
from sifu_verifier.packed import numbers_of
from sifu_verifier.rows import BITS, Rows, rows_of, sums, words_of_rows
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
        samples = sum(run.clients[client]["samples"] for client in run.rounds[node])
        run.agree(f"samples of solve {node}", run.solves[node]["samples"], samples)
        chosen, rule = run.solves[node]["relative_penalty"], run.spec["ridge"]["regularisation"]
        run.check(chosen is None or chosen in (GRID if rule == "auto" else [rule]), f"solve {node} has r = {chosen}")
    forgotten = {c for clients in run.subjects.values() for c in clients}
    k, outputs = json.loads(run.entries["layout"])["shapes"][0]
    heading = heading_of(run, k, outputs)
    words: dict[int, np.ndarray] = {}
    rows: dict[int, Rows] = {}
    whole = None
    for file, row in listed.items():
        data, clients = (run.folder / "statistics" / file).read_bytes(), json.loads(row["clients"])
        run.agree(f"statistics/{file}", [row["bytes"], row["digest"]], [len(data), sha256(data)])
        run.check(not forgotten & set(clients), f"statistics/{file} holds a forgotten client")
        counted = sum(run.clients[c]["samples"] for c in clients)
        run.agree(f"statistics/{file}: number of samples", row["samples"], counted)
        is_sum, in_rows = file.endswith(".sum.statistics"), file.endswith(".rows.statistics")
        named = f"{row['node']}.{clients[0]}.{'rows.' * in_rows}statistics"
        run.check(is_sum or file == named, f"statistics/{file} does not have the name of its client")
        start = heading.replace(b"sifu statistics", b"sifu rows") if in_rows else heading
        numbers = numbers_of(data, start, 4 if in_rows else 8)
        if numbers is None:
            run.check(False, f"statistics/{file}: its form contradicts the spec")
            continue
        if is_sum:
            run.check(whole is None, "there are two sums")
            whole = (row, clients, numbers)
        else:
            fresh = len(clients) == 1 and clients[0] not in words.keys() | rows.keys()
            run.check(fresh, f"statistics/{file} is not of one client")
        if in_rows:
            wanted = row["samples"] * (k + outputs)
            if run.check(len(numbers) == wanted, f"statistics/{file} holds {len(numbers)} numbers, not {wanted}"):
                rows[clients[0]] = rows_of(numbers, k, outputs)
            continue
        run.agree(f"statistics/{file}: words", len(numbers), (k + 1) * (k + 2) // 2 + (k + 1) * outputs + 2)
        run.agree(f"statistics/{file}: samples", row["samples"], int(numbers[-2]))
        if not is_sum:
            words[clients[0]] = numbers
    tip = run.nodes[int(run.entries["tip"])]
    if whole is None or tip["kind"] != "round":
        return
    row, clients, numbers = whole
    solve = run.solves[tip["node"]]
    run.agree("the current head's sum", [solve["sum"], sorted(run.rounds[tip["node"]])], [row["digest"], clients])
    if set(clients) <= words.keys() | rows.keys():  # integer sums do not depend on their order
        added = words_of_rows((rows[c] for c in clients if c in rows), k, outputs)
        run.check(added is not None, "rows have numbers that are beyond the norm")
        if added is not None:
            added = sum((words[c] for c in clients if c not in rows), added)
            run.check(np.array_equal(added, numbers), "the sum differs from the sum of its clients' statistics")
    check_head(run, tip["node"], numbers)


def heading_of(run: RunFolder, k: int, outputs: int) -> bytes:
    """Return the first line of a file of statistics with `k` features (section 5a)."""
    features, ridge = run.spec["features"], run.spec["ridge"]
    reach = {"classification": 1.0, "multi_label": math.sqrt(outputs), "regression": 8.0 * math.sqrt(outputs)}
    bits = f"feature_bits={BITS} target_bits={BITS}"
    norms = f"norm={float(features['norm'])!r} target_norm={reach[ridge['task']]!r}"
    return f"sifu statistics 1 features={k} outputs={outputs} {bits} {norms}\n".encode()


def check_head(run: RunFolder, node: int, numbers: np.ndarray) -> None:
    """Check that the current head solves the system of its sum with the penalty of the rule (section 5a).

    Args:
        run: Run folder to verify.
        node: Node of the head.
        numbers: Numbers of the sum.
    """
    ridge, chosen = run.spec["ridge"], run.solves[node]["relative_penalty"]
    gram, cross = sums(run, numbers)
    tensors = tensors_of((run.folder / "models" / f"{node}.safetensors").read_bytes(), "<f8")
    head = np.concatenate([tensors["weight"], tensors["bias"]]).reshape(cross.shape)
    mean = float(np.trace(gram)) / len(gram)
    if ridge["regularisation"] == "auto":
        energy, n = math.ldexp(int(numbers[-1]), -2 * BITS), int(numbers[-2])
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


def check_statistics_of_request(run: RunFolder, request: Row) -> None:
    """Check the statistics that a request erased and the sum that it left (section 5a).

    Every file with a forgotten client is erased. The sum without the clients replaces the old one if their own
    statistics are stored.
    """
    moment, at = run.rolled[request["request"]], f"request {request['request']}"
    own = {c for i, clients in run.subjects.items() if run.owner[i] is request for c in clients}
    stored = {file: json.loads(row["clients"]) for (file,), row in moment["statistics"].items()}
    gone = sorted(file for file, clients in stored.items() if own & set(clients))
    run.agree(f"{at}: statistics erased", moment["payload"].get("dropped_statistics", []), gone)
    whole = [clients for file, clients in stored.items() if file.endswith(".sum.statistics")]
    single = {clients[0] for file, clients in stored.items() if not file.endswith(".sum.statistics")}
    leaving = set(whole[0]) & own if whole else set()
    stays = [sorted(set(whole[0]) - own)] if leaving and leaving <= single else []
    written = [row["clients"] for row in moment["payload"].get("statistics", [])]
    run.agree(f"{at}: sum that stays", written, [stay for stay in stays if stay])
