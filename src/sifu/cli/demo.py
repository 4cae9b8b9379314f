"""The command `sifu demo`: a complete example on embedded data."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sifu.api import Outcome, train
from sifu.cli.output import Answer, Format, RoundsProgress, out, percent
from sifu.core.spec import Spec
from sifu.errors import VerificationError

# The noise is fresh every time, so the rounds vary: over 40 runs of this seed the three requests together took 3.6
# to 23 times fewer rounds than Scratch (benchmarks/demo_spread.py).
DEMO = Spec.from_mapping(
    {
        "seed": 5,
        "data": {
            "name": "digits",
            "clients": 160,
            "samples_per_client": 10,
            "partition": "iid",
            "normalise": "standard",
        },
        "model": {"kind": "softmax"},
        "local": {"steps": 30},
        "stop": {"target": 0.95},
        "privacy": {"epsilon": 10.0, "delta": 0.01, "sigma": "auto"},
    }
)
EXACT = Spec.from_mapping(
    {
        "seed": 5,
        "data": {"name": "digits", "clients": 160, "samples_per_client": 10, "partition": "iid"},
        "model": {"kind": "ridge"},
        "features": {"kind": "random_fourier", "count": 128, "bandwidth": 2.0},
    }
)
"""Spec with the same clients as `DEMO` and a head in closed form."""
REQUESTS = [[f"client-{number:03d}" for number in range(first, first + 5)] for first in (0, 5, 10)]


def run_demo(folder: Path | None) -> Answer:
    """Run the demo: forget exactly with a closed-form head, then with noise."""
    from sifu.report import write_report

    started = time.monotonic()
    target = folder or _free_folder(Path("sifu-demo"))
    as_json = Answer.format is Format.json

    def say(text: str) -> None:
        if not as_json:
            out.print(text)

    exact = _forget_exactly(EXACT, target.with_name(f"{target.name}-exact"), REQUESTS)
    say(
        "[bold]1. Exactly, in a second[/]  160 clients, 10 digits each, a ridge head on public features: one round, "
        f"accuracy {percent(exact['accuracy'])}. Three requests of five clients took {exact['rounds']} rounds and "
        f"{exact['forget_seconds']:.1f} s, without noise. Level: {exact['level']}. The sums are bit for bit those of a "
        f"federation that never had these clients: sifu verify {exact['run']}\n"
    )
    say("[bold]2. With noise[/]  The 160 clients again, softmax regression in rounds, to 95 % accuracy.")
    with RoundsProgress() as progress:
        run = train(DEMO, run=target, progress=progress)
    scratch_rounds = rounds_from_scratch(DEMO)
    with run.reader() as reader:
        rounds = len(reader.path()) - 1
    say(f"   {rounds} rounds; every client's influence on the model was bounded in each of them.\n")
    outcomes: list[Outcome] = []
    for number, (clients, from_scratch) in enumerate(zip(REQUESTS, scratch_rounds, strict=True)):
        say(f"[bold]   Forget[/]  request {number + 1} of {len(REQUESTS)}")
        if not as_json:
            for line in run.plan(clients, method="sifu").lines():
                out.print(line, markup=False, soft_wrap=True)
        with RoundsProgress() as progress:
            outcome = run.forget(clients, method="sifu", progress=progress)[0]
        outcomes.append(outcome)
        say(f"   Rounds: {outcome.rounds}; Scratch took {from_scratch}. Level: {outcome.level}.\n")
    verified = run.verify()
    page = write_report(target)
    total = sum(outcome.rounds for outcome in outcomes)
    scratch = sum(scratch_rounds)
    if not verified.holds:
        raise VerificationError("the demo's run does not verify: " + "; ".join(verified.problems))
    if not as_json:
        for line in (line for outcome in outcomes for line in outcome.lines()):
            out.print(line, markup=False, soft_wrap=True)
    say(f"\n{total} rounds instead of {scratch}: {scratch / max(total, 1):.1f} times fewer than Scratch.")
    say("(Rounds to 95 % on the clients' own data. The noise is fresh every time, so the figures vary.)")
    say(f"Recompute the claims: sifu verify {target}")
    say(f"Look at {page}")
    if not shutil.which("sifu"):
        say("To use the sifu command here: . .venv/bin/activate")
    return Answer(
        {
            "run": str(target),
            "training_rounds": rounds,
            "requests": [outcome.to_mapping() for outcome in outcomes],
            "total_rounds": total,
            "total_scratch_rounds": scratch,
            "verified": verified.holds,
            "report": str(page),
            "exact": exact,
            "seconds": round(time.monotonic() - started, 1),
        }
    )


def rounds_from_scratch(spec: Spec) -> list[int]:
    """Return the rounds that Scratch takes for each of the requests, on a copy of the federation."""
    with tempfile.TemporaryDirectory() as folder:
        copy = train(spec, run=Path(folder) / "scratch")
        return [copy.forget(clients, method="scratch")[0].rounds for clients in REQUESTS]


def _forget_exactly(spec: Spec, folder: Path, requests: Sequence[list[str]]) -> dict[str, Any]:
    """Train and execute requests without noise, and return the results as plain values."""
    run = train(spec, run=folder)
    started = time.monotonic()
    outcomes = [outcome for clients in requests for outcome in run.forget(clients)]
    seconds = time.monotonic() - started
    verified = run.verify()
    if not verified.holds:
        raise VerificationError(f"the demo's run {folder} does not verify: " + "; ".join(verified.problems))
    return {
        "run": str(folder),
        "level": outcomes[-1].level,
        "rounds": sum(outcome.rounds for outcome in outcomes),
        "accuracy": run.evaluate("training").accuracy,
        "forget_seconds": round(seconds, 2),
    }


def _free_folder(wanted: Path) -> Path:
    """Return the first of wanted, wanted-2, wanted-3... that does not exist, so that no earlier demo is overwritten."""
    candidate, number = wanted, 2
    while any(candidate.with_name(f"{candidate.name}{end}").exists() for end in ("", "-exact")):
        candidate, number = wanted.with_name(f"{wanted.name}-{number}"), number + 1
    return candidate
