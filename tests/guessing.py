"""Adversary with a run folder and all other clients' data, who tests guesses of a forgotten record."""

from __future__ import annotations

import hashlib
import re
import struct
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np

import sifu
from folder_values import values_by_place
from sifu.core.closed_form_engine import recorded_fixed_point
from sifu.data import ClientData
from sifu.store.files import model_bytes
from sifu.store.own_statistics import OwnStatistics
from sifu.store.reader import RunReader
from sifu.store.statistics_files import read_statistics
from sifu.theory.closed_form import total

RANDOM = (
    "*.nonce", "*.digest", "*.sealed", "*.signature", "*.commitment", "*.salt", "*.hash", "*.head", "*.time",
    "*.public_key", "*.run", "*.received", "*.carried_out", "*.finished", "*.issued", "*.sum", "*.sample_digests",
    "*.sample_digest", "*.clients_digest", "*.figures_salt", "*.group_key", "*.all_figures.events", "*.verified",
    "*.commitments.*", "events.request done.certificates.*", "run.head", "file head", "file salts.json",
    "file operator.key", "file models/*", "file statistics/*", "file updates/*",
)  # fmt: skip
"""Places that differ between any two runs: random bytes, times, digests of salted content, files of
remaining clients.
"""
RIDGE: dict[str, Any] = {
    "data": {"preprocessing": "fixed"},
    "model": {"kind": "ridge", "outputs": 3},
    "features": {"norm": 8.0},
}
ROUNDS: dict[str, Any] = {
    "data": {"preprocessing": "fixed"},
    "model": {"kind": "softmax", "outputs": 3},
    "local": {"rate": 0.2, "steps": 2},
    "stop": {"max_rounds": 4, "target": 0.0},
}
AUTOMATIC = ROUNDS | {"local": {"rate": "auto", "steps": 2}}
NETWORK = ROUNDS | {
    "model": {"kind": "mlp", "outputs": 3},
    "regularity": {"kind": "assumed", "factor": 1.05},
}
GONE, ROW, TRUTH = 2, 3, 1
OUTLIER = 12
"""Number of a guess so far from the other samples that rounding is not bounded at the rate of `ROUNDS`."""
GUESSES = range(12)
"""Guesses of one record: each of three labels, with the true features and with three others."""
DIGITS = 6
"""Digits of a figure that suffice to distinguish guesses."""


def federation(guessed: int, steepest: int = GONE) -> list[ClientData]:
    """Return all clients' data with the adversary's guess of one record; guesses 0 to 2 change only its label."""
    generator = np.random.default_rng(5)
    clients = []
    for number in range(5):
        y = generator.integers(0, 3, 8)
        x = generator.normal(size=(8, 4)) + np.eye(4)[y]
        if number == GONE:
            y[ROW] = guessed % 3
            x[ROW] += np.random.default_rng(guessed // 3).normal(size=4) * (guessed > 2)
            x[ROW] *= 40.0 if guessed == OUTLIER else 1.0
        clients.append(ClientData(f"c{number}", x * (1.5 if number == steepest else 1.0), y))
    return clients


def figures(folder: Path) -> set[str]:
    """Return the digests and the figures of many digits in a folder."""
    held: set[str] = set()
    for values in values_by_place(folder).values():
        for value in values:
            if isinstance(value, bytes):
                held.add(value.hex() if len(value) <= 64 else hashlib.sha256(value).hexdigest())
            elif isinstance(value, float) and np.isfinite(value):
                held.add(repr(value))
            elif isinstance(value, str):
                held |= set(re.findall(r"[0-9a-f]{64}", value)) | set(re.findall(r"\d+\.\d+(?:e[+-]\d+)?", value))
    return {figure for figure in held if len(figure.replace(".", "").lstrip("-0")) >= DIGITS}


def worked_out(folder: Path) -> set[str]:
    """Return what an adversary derives from its own federation, including unsalted digests of statistics and models."""
    held = figures(folder)
    with RunReader(folder) as reader:
        for node in reader.models():
            held.add(hashlib.sha256(model_bytes(reader.layout, reader.load_model(node))).hexdigest())
        if reader.spec["model"]["kind"] == "ridge":
            fixed = recorded_fixed_point(sifu.Spec.from_mapping(reader.spec), reader.layout)
            rows = list(reader.statistics().values())
            own = OwnStatistics.among(rows, fixed, None, {})
            held |= {total(fixed, [own.read(folder, client, own.parts())]).digest() for client in own.rows}
            held |= {read_statistics(folder, row, fixed).digest() for row in rows if row.is_sum}
    return held


def guess(spec: dict[str, Any], folder: Path, label: int) -> set[str]:
    """Return all figures of a federation with this guess, before and after the client leaves."""
    run = sifu.train(spec, run=folder, clients=federation(label))
    before = worked_out(folder)
    if spec is RIDGE:
        run.forget([f"c{GONE}"])
    return before | worked_out(folder)


def in_bytes(folder: Path, given: set[str]) -> set[str]:
    """Return the figures and digests that occur in the bytes of any file, free pages included, as
    text or as a number.
    """
    held = b"".join(path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file())

    def forms(figure: str) -> list[bytes]:
        if re.fullmatch(r"[0-9a-f]{64,}", figure):
            return [figure.encode(), bytes.fromhex(figure)]
        return [figure.encode(), *(struct.pack(order, float(figure)) for order in (">d", "<d"))]

    return {figure for figure in given if any(form in held for form in forms(figure))}


def confirmed(folder: Path, guesses: dict[int, set[str]]) -> set[int]:
    """Return the guesses for which the folder contains a figure that no other guess gives."""
    there = figures(folder) | worked_out(folder)
    others = {label: set().union(*(guesses[other] for other in guesses if other != label)) for label in guesses}
    only = {label: given - others[label] for label, given in guesses.items()}
    assert all(only.values()), "every guess must be one that could be told"
    return {label for label, given in only.items() if given & there or in_bytes(folder, given)}


def listed(place: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(place, pattern) or fnmatchcase(place, f"{pattern}.*") for pattern in patterns)


def is_random(place: str) -> bool:
    return any(fnmatchcase(place, pattern) for pattern in RANDOM)
