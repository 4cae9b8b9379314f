"""Random releases against fresh runs, and sifu's audit of random runs.

    python benchmarks/random_audits.py --releases 1000        every release against a fresh run of exactly its clients
    python benchmarks/random_audits.py --audits 20            `sifu audit` on random certified runs

The last command makes the figures of docs/audit.md, with noise from the operating system and the full number of
replays. The exit code is 3 if a statement is untrue. `tests/test_journeys.py` compares all claims with the truth.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import tempfile
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from random_runs import random_run
from release_journeys import release_journey
from sifu.audit import AuditOptions, AuditReport, audit_run

FIRST_SEED = 500


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
    parser.add_argument("--releases", type=int, default=0, help="number of requests to file in journeys of releases")
    parser.add_argument("--seed", type=int, default=0, help="number of the first journey")
    parser.add_argument("--audits", type=int, default=0, help="number of random runs for sifu audit")
    options = parser.parse_args()
    if not (options.releases or options.audits):
        parser.error("say what to do: --releases or --audits")
    os.environ["SIFU_HEADS"] = os.devnull  # journeys restore older states
    good = not options.releases or compare_releases(options.releases, options.seed)
    if options.audits:
        good &= audit_runs(options.audits)
    return 0 if good else 3


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
