"""Comparison of random runs with the truth, and sifu's audit of random runs.

    python benchmarks/random_audits.py --requests 1000 --jobs 4 --log FILE.jsonl [--result FILE.json]
    python benchmarks/random_audits.py --requests 5000 --small    the same with little training: an hour of one core
    python benchmarks/random_audits.py --releases 1000        every release against a fresh run of exactly its clients
    python benchmarks/random_audits.py --control all          operators who cheat; each must be caught
    python benchmarks/random_audits.py --audits 20            `sifu audit` on random certified runs

The first command makes journeys (`tests/random_journeys.py`) until enough requests are executed, and compares every
claim with the truth (`tests/claims_against_truth.py`): true distances with Psi, the delta of all releases together with
the certificates, `exact` bit for bit, levels with premises, and both verifiers. Each finished run is a line of --log,
and a repeated call continues from there (`tests/journey_log.py`). The exit code is 3 if a statement is untrue or a
cheat is not found. The last command makes the figures of docs/audit.md, with noise from the operating system and the
full number of replays.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from broken_promises import CONTROLS, Control
from claims_against_truth import Findings, audit_journey
from journey_log import EVERY_FAMILY, Log, make_journeys
from random_runs import random_run
from release_journeys import release_journey
from sifu.audit import AuditOptions, AuditReport, audit_run

FIRST_SEED = 500


# -- requests against the truth --------------------------------------------------------------------------------


def summary(findings: Findings) -> list[str]:
    """Return the findings in sentences."""
    levels = ", ".join(f"{count} {level}" for level, count in sorted(findings.by_level.items()))
    methods = ", ".join(f"{count} {method}" for method, count in sorted(findings.by_method.items()))
    between = ", ".join(f"{count} {step}" for step, count in sorted(findings.by_step.items()))
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(findings.by_kind.items()))
    counterfactuals = ", ".join(
        f"{count} with {counterfactual}" for counterfactual, count in sorted(findings.by_counterfactual.items())
    )
    return [
        f"{findings.runs} runs, {findings.requests} requests carried out ({levels}; {methods}), {findings.refused} "
        f"refused; between them {between}",
        f"of the requests: {kinds}",
        f"{findings.distances} distances within Psi, up to {findings.closest:.6f} of it; "
        f"{findings.assumed_distances} more where B is assumed, {findings.assumed_exceeded} of them beyond it",
        f"{findings.exact_models} exact models made again ({counterfactuals} for the forgotten); {findings.deltas} "
        f"deltas within what was stated, up to {findings.largest_share_of_delta:.3f} of it; "
        f"{findings.folders_verified} folders verified by both verifiers",
        f"{len(findings.violations)} violations",
        *(json.dumps(violation) for violation in findings.violations),
    ]


def control_is_caught(control: Control, seed: int, most_runs: int = 60) -> bool:
    """Run journeys with a cheat until it is found; return whether it was."""
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


def compare_releases(wanted: int, seed: int) -> bool:
    """Take runs through requests, decisions, joins and restorations until `wanted` requests are
    filed; return success.
    """
    requests = releases = differences = 0
    for number in itertools.count(seed):
        if requests >= wanted:
            break
        with tempfile.TemporaryDirectory(prefix="sifu-releases-") as folder:
            try:
                journey = release_journey(number, Path(folder))
            except AssertionError as error:
                differences += 1
                print(f"journey {number}: {error}", flush=True)
                continue
        requests, releases = requests + journey.filed, releases + journey.compared
        print(f"{requests} requests, {releases} releases, {differences} differences", flush=True)
    return differences == 0


# -- the product's audit -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Audited:
    """One run: the levels of its requests, and the audit's report."""

    seed: int
    levels: tuple[str, ...]
    report: AuditReport

    @property
    def closest(self) -> float:
        """Largest ratio of a true distance to its Psi."""
        return max((subject.closest for subject in self.report.subjects), default=0.0)

    @property
    def shown(self) -> float:
        """Largest share of a certified epsilon that the audit showed."""
        releases = [subject.releases for subject in self.report.subjects if subject.releases is not None]
        return max((release.epsilon_shown / release.epsilon_certified for release in releases), default=0.0)


def audit_random(seed: int) -> Audited:
    """Make a run, audit all its claims, and delete it."""
    with tempfile.TemporaryDirectory(prefix="sifu-audit-") as folder:
        run = random_run(seed, Path(folder) / "run")
        with closing(run.reader()) as reader:
            levels = tuple(request.level or "none" for request in reader.requests())
        return Audited(seed, levels, audit_run(run, AuditOptions(attacks=False, seed=seed)))


def summary_of(runs: list[Audited]) -> str:
    """Return a summary of the runs."""
    levels = [level for run in runs for level in run.levels]
    counts = ", ".join(f"{levels.count(level)} {level}" for level in ("proven", "exact", "conditional", "none"))
    nodes = sum(run.report.nodes_replayed for run in runs)
    missed = sum(run.report.nodes_missed for run in runs)
    contradicted = sum(1 for run in runs if not run.report.holds)
    subjects = sum(len(run.report.subjects) for run in runs)
    return (
        f"* **{len(runs)} random certified runs** (seeds {runs[0].seed} to {runs[-1].seed}; {len(levels)} requests: "
        f"{counts}), {subjects} subjects, {nodes} nodes replayed, {missed} that could not be: **{contradicted} "
        f"contradicted**. The truth came as near as {max(run.closest for run in runs):.3f} of Psi, and at most "
        f"{max(run.shown for run in runs):.0%} of a certified epsilon was shown."
    )


def audit_runs(count: int) -> bool:
    """Run `sifu audit` on random runs; return whether no claim is contradicted."""
    runs = []
    for seed in range(FIRST_SEED, FIRST_SEED + count):
        runs.append(audit_random(seed))
        print(seed, *runs[-1].levels, "holds" if runs[-1].report.holds else runs[-1].report.contradictions, flush=True)
    print(summary_of(runs))
    return all(run.report.holds for run in runs)


def main() -> int:
    """Execute the chosen part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=0, help="number of requests to compare with the truth")
    parser.add_argument("--releases", type=int, default=0, help="number of requests to file in journeys of releases")
    parser.add_argument("--seed", type=int, default=0, help="number of the first journey")
    parser.add_argument("--families", nargs="+", choices=[*dict.fromkeys(EVERY_FAMILY)], default=EVERY_FAMILY)
    parser.add_argument("--small", action="store_true", help="two or three rounds per run")
    parser.add_argument("--jobs", type=int, default=1, help="number of processes")
    parser.add_argument("--seconds", type=float, default=0.0, help="stop after this many seconds")
    parser.add_argument("--log", type=Path, help="file of JSON lines to extend and continue")
    parser.add_argument("--result", type=Path, help="file for the summary of the log, as JSON")
    parser.add_argument("--control", choices=["all", *CONTROLS], help="cheat that must be found")
    parser.add_argument("--audits", type=int, default=0, help="number of random runs for sifu audit")
    options = parser.parse_args()
    if not (options.requests or options.releases or options.control or options.audits):
        parser.error("say what to do: --requests, --releases, --control or --audits")
    good = True
    os.environ["SIFU_HEADS"] = os.devnull  # journeys restore older states
    if options.control:
        chosen = CONTROLS.values() if options.control == "all" else [CONTROLS[options.control]]
        for control in chosen:
            good &= control_is_caught(control, options.seed)
    if options.requests:
        log = Log(options.log)
        training = options.families, options.jobs, options.seconds, options.small
        make_journeys(log, options.requests, options.seed, *training)
        print("\n".join(summary(log.findings)))
        if options.result:
            options.result.write_text(json.dumps(log.summary(), indent=1) + "\n", encoding="utf-8")
        good &= not log.findings.violations
    if options.releases:
        good &= compare_releases(options.releases, options.seed)
    if options.audits:
        good &= audit_runs(options.audits)
    return 0 if good else 3


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
