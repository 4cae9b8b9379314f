"""Pinned answers of the public interface for every finished run: state, plans, outcomes, certificates and model.

    python tests/told.py --record      writes what the finished runs tell into told.json

Record again only after an intended change, in a commit that says why. Values that differ between test runs are left
out: times, folders, versions, numbers of events and hashes.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

import runs
import sifu

RECORDED = Path(__file__).with_suffix(".json")
LEFT_OUT = {
    *("run", "subject", "received", "finished", "deadline", "days_left", "last_event", "carried_out", "issued", "time"),
    *("ledger", "versions", "models", "commitments", "public_key", "filed_by", "events"),
}
"""Keys that name a time, a folder, a version, a hash, or an event, whose number depends on the machine's speed."""
VARIES = (
    (re.compile(r"\b[0-9a-f]{16,}\b"), "HASH"),
    (re.compile(r"\bevent \d+"), "EVENT"),
    (re.compile(r"\b\d{4}-\d\d-\d\d(T[\d:.]+Z)?\b"), "TIME"),
)
TERMS: tuple[dict[str, Any], ...] = (
    {"level": "none"},
    {"level": "none", "sigma": 0.3, "epsilon": 4.0, "retention": "strict"},
    {"level": "none", "sigma": 0.1, "method": "sifu"},
    *({"level": "none", "method": method} for method in ("scratch", "groups", "closed_form")),
)
"""Terms of the plans for the first client that is still there; those that a run refuses are told as well."""


def told(name: str, folder: Path) -> dict[str, Any]:
    """Return the answers for a finished run, of which `folder` receives a copy."""
    run = sifu.open_run(runs.own(name, folder))
    status, outcomes = run.status(), run.outcomes()
    stays = next(client.name for client in status.clients if client.state == "active")
    given: dict[str, Any] = {
        "status": status.to_mapping(),
        "progress": asdict(run.progress()),
        "history": [asdict(row) for row in run.history()],
        "verification": run.verify().to_mapping(),
        "outcomes": [outcome.to_mapping() for outcome in outcomes],
        "model": {
            tensor: [values.sum().item(), float(np.linalg.norm(values))]
            for tensor, values in load_file(run.export(folder / f"{name}.safetensors")).items()
        },
    }
    for number, terms in enumerate(TERMS):
        try:
            given[f"plan {number}"] = run.plan([stays], **terms).to_mapping()
        except sifu.InputError as refused:
            given[f"plan {number}"] = str(refused)
    for outcome in outcomes:
        certificate = run.certificate(outcome.request)
        given[f"certificate {outcome.request}"] = [certificate.body, certificate.lines(everything=True)]
    text = json.dumps(_repeatable(given)).replace(str(run.folder), "FOLDER")
    plain: dict[str, Any] = json.loads(text)
    return plain


def _repeatable(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _repeatable(inner) for key, inner in value.items() if key not in LEFT_OUT}
    if isinstance(value, list | tuple):
        return [_repeatable(inner) for inner in value]
    if isinstance(value, str):
        for pattern, name in VARIES:
            value = pattern.sub(name, value)
    return value


def differences(now: Any, before: Any, place: str = "") -> Iterator[str]:
    """Yield each place where two answers differ, numbers by more than a relative 1e-6."""
    if isinstance(now, dict) and isinstance(before, dict):
        for key in sorted(now.keys() | before.keys()):
            yield from differences(now.get(key), before.get(key), f"{place}/{key}")
    elif isinstance(now, list) and isinstance(before, list) and len(now) == len(before):
        for number, (one, other) in enumerate(zip(now, before, strict=True)):
            yield from differences(one, other, f"{place}/{number}")
    elif isinstance(now, float) and isinstance(before, float):
        if abs(now - before) > 1e-6 * abs(before) + 1e-12:
            yield f"{place}: {now} instead of {before}"
    elif now != before:
        yield f"{place}: {now!r} instead of {before!r}"


def recorded() -> dict[str, dict[str, Any]]:
    """Return the recorded answers by run."""
    content: dict[str, dict[str, Any]] = json.loads(RECORDED.read_text(encoding="utf-8"))
    return content


def record() -> None:
    """Write the answers for every finished run, one part a line."""
    with tempfile.TemporaryDirectory() as folder:
        everything = {name: told(name, Path(folder)) for name in runs.BUILT_BY}
    parts = {
        name: [f" {json.dumps(part)}: {json.dumps(answer, sort_keys=True)}" for part, answer in sorted(answers.items())]
        for name, answers in sorted(everything.items())
    }
    texts = [f"{json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n}" for name, lines in parts.items()]
    RECORDED.write_text("{\n" + ",\n".join(texts) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:] != ["--record"]:
        sys.exit(__doc__)
    import suite_setup  # noqa: F401  one memory of heads for all test runs

    record()
