"""Model files: their digests, and how far each model moved (docs/store.md, section 5)."""

from __future__ import annotations

import json
import math

import numpy as np

from sifu_verifier.canonical import sha256
from sifu_verifier.groups import check_merged_model
from sifu_verifier.run_folder import RunFolder
from sifu_verifier.tensors import tensors_of
from sifu_verifier.tolerances import RELATIVE


def erased_digests(run: RunFolder) -> set[str]:
    """Return the digests of all files that were recorded and erased, except initial models (section 5)."""
    kinds = ("models", "statistics")
    payloads = [json.loads(event["payload"]) for event in run.tables["events"]]
    rows = [row for payload in payloads for kind in kinds for row in payload.get(kind, [])]
    kept = {row["digest"] for kind in kinds for row in run.tables[kind]}
    fresh = {row["digest"] for row in rows if "file" not in row and run.nodes[row["node"]]["kind"] == "initial"}
    return {row["digest"] for row in rows} - kept - fresh


def check_models(run: RunFolder) -> None:
    """Check the files of models and certificates, that no erased file is left, and how far each model moved."""
    listed, vectors = {f"{row['node']}.safetensors": row for row in run.tables["models"]}, {}
    files = run.files_in("models")
    run.agree("files in models/", files, sorted(listed))
    expected = sorted(f"{name}.{form}.json" for name in run.done for form in ("auditor", "public"))
    run.agree("certificates/", run.files_in("certificates"), expected)
    run.agree("rows of certificates", len(run.tables["certificates"]), len(expected))
    erased = erased_digests(run)
    for path in (path for path in run.folder.rglob("*") if path.is_file() and not path.is_symlink()):
        name = path.relative_to(run.folder)
        if str(name) in ("run.db", "run.db-shm"):  # closing it would drop this process's own locks (POSIX)
            continue
        run.check(sha256(path.read_bytes()) not in erased, f"{name} holds a model or file that was erased")
    number = {"float64": "<f8", "float32": "<f4"}[run.facts["dtype"]]
    for name in listed.keys() & files:
        data, row = (run.folder / "models" / name).read_bytes(), listed[name]
        run.agree(f"models/{name}", [row["bytes"], row["digest"]], [len(data), sha256(data)])
        tensors = tensors_of(data, number)
        vectors[row["node"]] = np.concatenate([tensors[n] for n in json.loads(run.entries["layout"])["names"]])
    for node, vector in vectors.items():  # check the recorded movement of each model (section 5)
        row, start = run.nodes[node], vectors.get(run.nodes[node]["parent"])
        if row["kind"] == "merge":
            check_merged_model(run, node, vectors, number)
        elif start is not None and row["kind"] != "group":
            moved, slack = np.linalg.norm(vector - start), 8 * np.finfo(number).eps * np.linalg.norm(vector)
            low, high = 0.0, row["mean_shift"] * (1 + RELATIVE)
            if row["kind"] == "noise":
                low, high = (row["noise_std"] * (math.sqrt(vector.size) + z) for z in (-8, 8))
            run.check(low - slack <= moved <= high + slack, f"node {node}: moved by {moved}, not {low} to {high}")
