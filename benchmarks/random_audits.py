"""Random runs against the truth, and the product's own audit against random runs and operators who cheat.

    python benchmarks/random_audits.py --requests 1000 --seed 0 --result FILE    requests of random journeys
    python benchmarks/random_audits.py --control all          operators who cheat; each must be caught
    python benchmarks/random_audits.py --audits 20 [--page docs/audit.md]         `sifu audit` on random certified runs

The first makes journeys (`tests/random_journeys.py`) until so many requests were carried out, and holds every claim
against the truth (`tests/claims_against_truth.py`): true distances against Psi, the delta of all releases together
against what certificates state, `exact` bit for bit, levels against premises, both verifiers. With --result it saves
after every run and goes on from there when it is called again, after Ctrl-C too. Exit code 3 if a statement is
untrue, or a cheat is not caught. The last one makes the figures of docs/audit.md: noise from the operating system, the
full number of replays.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from broken_promises import CONTROLS, Control
from claims_against_truth import Findings, audit_journey
from random_journeys import FAMILIES, MASKED
from random_runs import random_run
from sifu.audit import AuditOptions, AuditReport, audit_run, run_controls
from sifu.audit.controls import Control as AuditControl
from sifu.experiments.provenance import provenance

FIRST_SEED = 500
BEGIN, END = "<!-- random audits: begin -->", "<!-- random audits: end -->"


# -- requests against the truth --------------------------------------------------------------------------------


@dataclass
class Progress:
    """What was done so far, in a file that another call goes on from."""

    first_seed: int
    next_seed: int
    seconds: float
    sessions: list[dict[str, Any]]
    """Date, command, commit, hardware and versions of each call."""
    findings: Findings

    @staticmethod
    def of(file: Path | None, seed: int) -> Progress:
        """What the file says; a beginning if there is none, or if it began with another seed."""
        if file is not None and file.exists():
            content = json.loads(file.read_text(encoding="utf-8"))
            if content["first_seed"] == seed:
                return Progress(**content | {"findings": Findings(**content["findings"])})
        return Progress(seed, seed, 0.0, [], Findings())

    def save(self, file: Path | None) -> None:
        """Write it down, whole or not at all."""
        if file is None:
            return
        temporary = file.with_suffix(".part")
        temporary.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        temporary.replace(file)


def audit_requests(wanted: int, seed: int, file: Path | None, families: Sequence[str]) -> Findings:
    """Journeys until `wanted` requests were carried out."""
    progress = Progress.of(file, seed)
    findings = progress.findings
    if findings.requests < wanted:
        progress.sessions.append(provenance("cpu", ["python", "benchmarks/random_audits.py", *sys.argv[1:]]))
    while findings.requests < wanted:
        started, before = time.monotonic(), len(findings.violations)
        with tempfile.TemporaryDirectory(prefix="sifu-journey-") as folder:
            journey = audit_journey(progress.next_seed, Path(folder), findings, families)
        taken = time.monotonic() - started
        progress.next_seed, progress.seconds = progress.next_seed + 1, progress.seconds + taken
        progress.save(file)
        print(
            f"{findings.requests:5d} of {wanted} requests; journey {journey.seed} ({journey.family}): "
            f"{len(journey.steps)} steps in {taken:.1f} s, {len(findings.violations) - before} violations",
            flush=True,
        )
    return findings


def summary(findings: Findings) -> list[str]:
    """What is to be said of them."""
    levels = ", ".join(f"{count} {level}" for level, count in sorted(findings.by_level.items()))
    methods = ", ".join(f"{count} {method}" for method, count in sorted(findings.by_method.items()))
    between = ", ".join(f"{count} {step}" for step, count in sorted(findings.by_step.items()))
    return [
        f"{findings.runs} runs, {findings.requests} requests carried out ({levels}; {methods}), {findings.refused} "
        f"refused; between them {between}",
        f"{findings.distances} distances within Psi, up to {findings.closest:.6f} of it; "
        f"{findings.assumed_distances} more where B is assumed, {findings.assumed_exceeded} of them beyond it",
        f"{findings.exact_models} exact models made again bit for bit; {findings.deltas} deltas within what was "
        f"stated, up to {findings.largest_share_of_delta:.3f} of it; {findings.folders_verified} folders verified "
        "by both verifiers",
        f"{len(findings.violations)} violations",
        *(json.dumps(violation) for violation in findings.violations),
    ]


def control_is_caught(control: Control, seed: int, most_runs: int = 20) -> bool:
    """Journeys of a cheat until it is caught."""
    findings = control.findings()
    for number in range(seed, seed + most_runs):
        with tempfile.TemporaryDirectory(prefix="sifu-journey-") as folder, control.cheat():
            audit_journey(number, Path(folder), findings, control.families)
        if control.is_caught(findings):
            violation = next(row for row in findings.violations if row["kind"] == control.kind)
            print(f"caught after {findings.requests} requests: {control.what}: {violation['what'][:160]}", flush=True)
            return True
    print(f"NOT CAUGHT in {findings.requests} requests: {control.what}", flush=True)
    return False


# -- the product's audit -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Audited:
    """One run: the levels of its requests, and what the audit found."""

    seed: int
    levels: tuple[str, ...]
    report: AuditReport

    @property
    def closest(self) -> float:
        """The largest share of Psi that a true distance reached."""
        return max((subject.closest for subject in self.report.subjects), default=0.0)

    @property
    def shown(self) -> float:
        """The largest share of a certified epsilon that was shown."""
        releases = [subject.releases for subject in self.report.subjects if subject.releases is not None]
        return max((release.epsilon_shown / release.epsilon_certified for release in releases), default=0.0)


def audit_random(seed: int) -> Audited:
    """Make a run, audit all of its claims, and throw it away."""
    with tempfile.TemporaryDirectory(prefix="sifu-audit-") as folder:
        run = random_run(seed, Path(folder) / "run")
        with closing(run.reader()) as reader:
            levels = tuple(request.level or "none" for request in reader.requests())
        return Audited(seed, levels, audit_run(run, AuditOptions(attacks=False, seed=seed)))


def sentences(runs: list[Audited], controls: list[AuditControl]) -> list[str]:
    """What is to be said of them."""
    levels = [level for run in runs for level in run.levels]
    counts = ", ".join(f"{levels.count(level)} {level}" for level in ("proven", "exact", "conditional", "none"))
    nodes = sum(run.report.nodes_replayed for run in runs)
    missed = sum(run.report.nodes_missed for run in runs)
    contradicted = sum(1 for run in runs if not run.report.holds)
    subjects = sum(len(run.report.subjects) for run in runs)
    rows = [
        f"* **{len(runs)} random certified runs** (seeds {runs[0].seed} to {runs[-1].seed}; {len(levels)} requests: "
        f"{counts}), {subjects} subjects, {nodes} nodes replayed, {missed} that could not be: **{contradicted} "
        f"contradicted**. The truth came as near as {max(run.closest for run in runs):.3f} of Psi, and at most "
        f"{max(run.shown for run in runs):.0%} of a certified epsilon was shown."
    ]
    for control in controls:
        verdict = "caught" if control.caught else "not caught" if control.must_be_caught else "passed"
        share = control.epsilon_shown / control.epsilon_certified
        rows.append(
            f"* {control.name} ({control.what}): **{verdict}**; certified {control.epsilon_certified:g}, true "
            f"{control.epsilon_true:.3g}, shown {control.epsilon_shown:.3g} ({share:.0%})."
        )
    return rows


def audit_runs(count: int, page: Path | None) -> bool:
    """`sifu audit` on random runs and on its controls; whether all of them are what they say."""
    runs = []
    for seed in range(FIRST_SEED, FIRST_SEED + count):
        runs.append(audit_random(seed))
        print(seed, *runs[-1].levels, "holds" if runs[-1].report.holds else runs[-1].report.contradictions, flush=True)
    controls = run_controls(seed=1)
    rows = sentences(runs, controls)
    print("\n".join(rows))
    if page:
        text = page.read_text(encoding="utf-8")
        before, rest = text.split(BEGIN)
        content = "\n".join([BEGIN, f"Measured on {time.strftime('%Y-%m-%d')}:", "", *rows, END])
        page.write_text(before + content + rest.split(END)[1], encoding="utf-8")
    return all(control.passed for control in controls) and all(run.report.holds for run in runs)


def main() -> int:
    """Do what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=0, help="hold so many requests against the truth")
    parser.add_argument("--seed", type=int, default=0, help="of the first journey")
    parser.add_argument("--families", nargs="+", choices=[*dict.fromkeys(FAMILIES), MASKED], default=list(FAMILIES))
    parser.add_argument("--result", type=Path, help="a JSON file to save to, and to go on from")
    parser.add_argument("--control", choices=["all", *CONTROLS], help="a cheat that must be caught")
    parser.add_argument("--audits", type=int, default=0, help="put so many random runs to sifu audit")
    parser.add_argument("--page", type=Path, help="write what --audits found between the marks of this page")
    options = parser.parse_args()
    if not (options.requests or options.control or options.audits):
        parser.error("say what to do: --requests, --control or --audits")
    good = True
    if options.control:
        chosen = CONTROLS.values() if options.control == "all" else [CONTROLS[options.control]]
        for control in chosen:
            good &= control_is_caught(control, options.seed)
    if options.requests:
        findings = audit_requests(options.requests, options.seed, options.result, options.families)
        print("\n".join(summary(findings)))
        good &= not findings.violations
    if options.audits:
        good &= audit_runs(options.audits, options.page)
    return 0 if good else 3


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
