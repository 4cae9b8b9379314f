"""The audit against random certified runs, and against operators who cheat: the figures of docs/audit.md.

    python benchmarks/random_audits.py                     twenty runs and the controls, about a minute
    python benchmarks/random_audits.py --page docs/audit.md   the same, and write them into the page

The runs are those of `tests/audit`, with the full number of replays: federations of a few digits, any model, steps,
batches, momentum, weight decay and participation that can be certified, two to four requests of any terms each, noise
from the operating system. Exit code 3 if a certified claim is contradicted, or a cheat is not caught.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from sifu.audit import AuditOptions, AuditReport, audit_run, run_controls
from sifu.audit.controls import Control

ROOT = Path(__file__).resolve().parent.parent
FIRST_SEED, RUNS = 500, 20
BEGIN, END = "<!-- random audits: begin -->", "<!-- random audits: end -->"


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
    sys.path.insert(0, str(ROOT / "tests"))
    from random_runs import random_run

    with tempfile.TemporaryDirectory(prefix="sifu-audit-") as folder:
        run = random_run(seed, Path(folder) / "run")
        with closing(run.reader()) as reader:
            levels = tuple(request.level or "none" for request in reader.requests())
        return Audited(seed, levels, audit_run(run, AuditOptions(attacks=False, seed=seed)))


def sentences(runs: list[Audited], controls: list[Control]) -> list[str]:
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


def main() -> int:
    """Audit, print, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--page", type=Path, help="write what was found between the marks of this page")
    options = parser.parse_args()
    runs = []
    for seed in range(FIRST_SEED, FIRST_SEED + options.runs):
        runs.append(audit_random(seed))
        print(seed, *runs[-1].levels, "holds" if runs[-1].report.holds else runs[-1].report.contradictions, flush=True)
    controls = run_controls(seed=1)
    text_lines = sentences(runs, controls)
    print("\n".join(text_lines))
    if options.page:
        text = options.page.read_text(encoding="utf-8")
        before, rest = text.split(BEGIN)
        content = "\n".join([BEGIN, f"Measured on {time.strftime('%Y-%m-%d')}:", "", *text_lines, END])
        options.page.write_text(before + content + rest.split(END)[1], encoding="utf-8")
    honest = all(control.passed for control in controls) and all(run.report.holds for run in runs)
    return 0 if honest else 3


if __name__ == "__main__":
    sys.exit(main())
