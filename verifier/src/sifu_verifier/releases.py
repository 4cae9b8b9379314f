"""Releases with noise, and the certified guarantee against an observer of all of them (docs/store.md, section 5d)."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np

from sifu_verifier.calibration import delta_of, epsilon_of
from sifu_verifier.canonical import Row, sha256
from sifu_verifier.packed import numbers_of
from sifu_verifier.rows import BITS, Rows, rows_of, sums, words_of_rows
from sifu_verifier.run_folder import RunFolder
from sifu_verifier.subjects import indices_of
from sifu_verifier.tensors import tensors_of

LARGEST_EPSILON = 1e4


def noise_of(run: RunFolder) -> float:
    """Return the noise that the spec asks for, or 0 if it is off."""
    return float(run.spec.get("release", {"noise": 0.0})["noise"])


def take_release(run: RunFolder, event: Row, payload: Row, tip: str | None) -> None:
    """Record a release, which must be of the current head, and check that required releases were made."""
    if event["kind"] == "released":
        run.agree(f"event {event['seq']}: released node", str(payload["node"]), tip)
        run.releases.append(payload | {"seq": event["seq"]})
    if noise_of(run) and event["kind"] in ("training done", "request done"):
        released = [str(row["node"]) for row in run.releases]
        run.check(tip in released, f"event {event['seq']}: the head was not released before")


def check_releases(run: RunFolder) -> None:
    """Check noise, file and distances of releases; only the distances of the latest are recomputed (section 5d)."""
    nodes, files = [row["node"] for row in run.releases], run.files_in("releases")
    run.agree("releases/", files, [f"{nodes[-1]}.safetensors"] if nodes else [])
    run.agree("nodes that were released", len(set(nodes)), len(nodes))
    for row in run.releases:
        at, far = f"release of node {row['node']}", row["release_distances"]
        run.agree(f"{at}: noise", row["noise_std"], noise_of(run))
        run.check(row["noise_std"] > 0, f"{at}: it has no noise")
        run.agree(f"{at}: clients", row["clients"], sorted(run.rounds[row["node"]]))
        run.agree(f"{at}: clients with a distance", sorted(map(int, far["clients"])), row["clients"])
        run.check(set(map(int, far["records"])) <= set(row["clients"]), f"{at}: records of strangers")
        values = [*far["clients"].values(), *far["records"].values()]
        run.check(all(0 <= value < math.inf for value in values), f"{at}: distances {values}")
    if nodes:
        check_latest(run, run.releases[-1], (run.folder / "releases" / files[0]).read_bytes())


def check_latest(run: RunFolder, row: Row, data: bytes) -> None:
    """Check the file of the latest release and, while its head is current, its noise and distances (section 5d)."""
    run.agree("digest of the latest release", row["digest"], sha256(data))
    if str(row["node"]) != run.entries["tip"]:
        return
    solved = (run.folder / "models" / f"{row['node']}.safetensors").read_bytes()
    noisy, head = (np.concatenate(list(tensors_of(content, "<f8").values())) for content in (data, solved))
    moved = float(np.linalg.norm(noisy - head)) / row["noise_std"]
    run.check(abs(moved - math.sqrt(head.size)) <= 8, f"the latest release is {moved} noises from the head")
    words, samples = {}, {}
    k, outputs = json.loads(run.entries["layout"])["shapes"][0]
    for stored in run.tables["statistics"]:
        content, file = (run.folder / "statistics" / stored["file"]).read_bytes(), stored["file"]
        of_rows, start = file.endswith(".rows.statistics"), content[: content.index(b"\n") + 1]
        numbers = numbers_of(content, start, 4 if of_rows else 8)
        client = json.loads(stored["clients"])[0]
        if of_rows:
            samples[client] = rows_of(numbers, k, outputs)
            words[client] = words_of_rows([samples[client]], k, outputs)
        else:
            words["sum" if file.endswith(".sum.statistics") else client] = numbers
    whole = solve(run, words["sum"])
    gram, cross = sums(run, words["sum"])
    eigen = np.linalg.eigh(gram) if samples else None
    for client in row["clients"]:
        left = words["sum"] - words[client]
        truth = float(np.linalg.norm(whole - (solve(run, left) if left[-2] else 0.0)))
        said = row["release_distances"]["clients"][str(client)]
        good = truth * (1 - 1e-6) <= said <= truth * (1 + 1e-4)
        run.check(good, f"the latest release: client {client} is at {said}, recomputed {truth}")
        if client in samples:
            truth = largest_of_records(run, eigen, cross, whole, samples[client])
            said = row["release_distances"]["records"].get(str(client), math.nan)
            good = truth * (1 - 1e-6) <= said <= truth * (1 + 1e-4)
            run.check(good, f"the latest release: a record of client {client} is at {said}, recomputed {truth}")


def largest_of_records(run: RunFolder, eigen: Any, cross: Any, whole: Any, rows: Rows) -> float:
    """Return the largest distance between the head and the heads without one record of a client (section 5d)."""
    ridge, (values, vectors) = run.spec["ridge"], eigen
    features = np.column_stack([np.ldexp(rows[0].astype(float), -BITS), np.ones(len(rows[0]))])
    targets = np.ldexp(rows[1].astype(float), -BITS)
    largest = 0.0
    for phi, wanted in zip(features, targets, strict=True):
        penalty = ridge["regularisation"] * (float(values.sum()) - float(phi @ phi)) / len(values)
        turned, right = vectors.T @ phi, vectors.T @ (cross - np.outer(phi, wanted))
        inverse = 1.0 / (values + penalty)
        # (G + penalty I - phi phi')^-1 applied to the sums without the record, by Sherman and Morrison
        left = inverse[:, None] * right
        left += np.outer(inverse * turned, turned @ left) / (1.0 - turned @ (inverse * turned))
        largest = max(largest, float(np.linalg.norm(whole - vectors @ left)))
    return largest


def solve(run: RunFolder, words: Any) -> Any:
    """Return the head solved from statistics, with lambda from their trace (section 5a)."""
    gram, cross = sums(run, words)
    penalty = run.spec["ridge"]["regularisation"] * float(np.trace(gram)) / len(gram)
    return np.linalg.solve(gram + penalty * np.eye(len(gram)), cross)


def before_after(run: RunFolder, request: Row) -> Row | None:
    """Return the unrounded (epsilon, delta) for an observer of all releases, or None if none is stated (section 7)."""
    noise = noise_of(run)
    rolled = run.rolled[request["request"]]["seq"]
    if not noise or request["method"] != "closed_form" or run.noise_source == "given":
        return None
    if any(event["seq"] < rolled for event in run.restored):
        return None  # the run may have made releases after the backup, which a restored run does not record
    demanded = json.loads(request["terms"]).get("before_after")
    epsilon, delta = map(float, demanded.split(",")) if demanded else (0.0, run.spec["release"]["delta"])
    of, reached = "records" if json.loads(request["records"]) else "clients", 0.0
    for name in json.loads(request["clients"]):
        squares = sum(
            row["release_distances"][of].get(str(client), math.inf) ** 2
            for row in run.releases
            if row["seq"] < rolled
            for client in set(indices_of(run, name)) & set(row["clients"])
        )
        if squares and (math.isinf(squares) or delta_of(noise / math.sqrt(squares), LARGEST_EPSILON) > delta):
            return None
        reached = max(reached, epsilon_of(math.sqrt(squares) / noise, delta))
    if demanded and reached <= epsilon * (1 + 1e-9):
        reached = epsilon
    return {"epsilon": reached, "delta": delta}


def check_before_after(run: RunFolder, request: Row, at: str, stated: Row | None) -> None:
    """Check that a certificate states the guarantee for an observer of all releases, rounded up (section 7)."""
    wanted = before_after(run, request)
    run.agree(f"{at}: before_after is there", stated is not None, wanted is not None)
    if stated is not None and wanted is not None:
        least, most = wanted["epsilon"] * (1 - 1e-9), wanted["epsilon"] * 1.1 + 1e-9
        good = least <= stated["epsilon"] <= most and stated["delta"] == wanted["delta"]
        run.check(good, f"{at}: before_after says {stated}, recomputed {wanted}")
