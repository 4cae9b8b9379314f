"""Output of `sifu audit`: verdict first, then the evidence."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.markup import escape

from sifu.cli.output import Answer, ShownBar, level_text, number, out, percent, table
from sifu.core.ledger import plain_values
from sifu.core.operator_words import names_words

if TYPE_CHECKING:
    from sifu.audit import AuditReport, BeforeAfterAttack
    from sifu.audit.exact_releases import ExactAudit
    from sifu.audit.membership import MembershipAudit

MOST_SUBJECTS = 12


class AuditProgress(ShownBar):
    """Progress bar for each step of an audit, on a terminal only."""

    def __init__(self) -> None:
        super().__init__("{task.completed:.0f} of {task.total:.0f}", width=20)

    def __call__(self, phase: str, done: int, total: int) -> None:
        """Show a step and how much of it is done."""
        self.begin(phase, total)
        self.update(done, total)


def show_audit(report: AuditReport, output: Path | None) -> Answer:
    """Return the answer of `sifu audit DIR`; exit code 3 for a contradicted claim.

    The JSON is written to the folder `output` if given; it is confidential, because it shows distances and nodes.
    """
    from sifu.store.files import check_output, private_folder, write_atomically

    values = report.values()
    if output is None:
        return Answer(values, partial(print_compared, report), code=0 if report.holds else 3)
    check_output(output / "audit.json")
    private_folder(output, parents=True)
    write_atomically(output / "audit.json", (json.dumps(plain_values(values), indent=2) + "\n").encode())
    wrote = f"Wrote {output / 'audit.json'}"
    return Answer(values, partial(print_report, report), wrote, code=0 if report.holds else 3)


def _print_before_after(found: Sequence[BeforeAfterAttack]) -> None:
    shown = table("deleted", "where", "-named", "-of", "-cosine", "-public", "-control", title="\nBefore and after")
    for each in found:
        where = each.source if each.attempts == 1 else f"{each.attempts} {each.source}"
        shown.add_row(
            each.what,
            escape(where),
            percent(each.identified),
            str(each.candidates),
            number(each.cosine, 3),
            number(each.nearest_public, 3),
            percent(each.control_identified),
        )
    out.print(shown)
    out.print(
        "named: how often an observer who kept the earlier release names what was deleted; no certificate covers "
        "this. cosine: similarity of the reconstruction; public: that of the nearest public record; control: how "
        "often the observer names a record or client that was not deleted."
    )


def print_compared(report: AuditReport) -> None:
    """Print the comparison of two releases, and the notes."""
    if report.before_after:
        _print_before_after(report.before_after)
    for note in report.notes:
        out.print(f"Note: {escape(note)}")


def print_report(report: AuditReport) -> None:
    """Print the results of an audit as text and tables."""
    nodes = sum(node.psi is not None and math.isfinite(node.psi) for each in report.subjects for node in each.nodes)
    compared = sum(release.without is not None for release in report.exact)
    if report.holds and not (nodes or compared or report.noise):
        out.print(f"[bold yellow]Nothing tested[/] in {escape(report.run)}: no certified claim could be compared.")
    elif report.holds:
        out.print(
            f"[bold green]No contradiction[/] in {escape(report.run)}: no attempted attack breaks a certified claim."
        )
    else:
        out.print(f"[bold red]Contradicted[/]: certified statements that do not hold: {len(report.contradictions)}.")
        for sentence in report.contradictions:
            out.print(f"  [red]![/] {escape(sentence)}")
    for sentence in report.observations:
        out.print(f"[yellow]Not certified, and does not hold:[/] {escape(sentence)}")
    out.print(
        f"{report.nodes_replayed} models replayed with and without what left; {nodes} distances compared with Psi, "
        f"{compared} of {len(report.exact)} exact releases with the model trained without"
    )
    _print_subjects(report)
    if report.noise:
        sound = sum(1 for edge in report.noise if edge.as_recorded)
        out.print(f"{sound} of {len(report.noise)} noise edges contain the recorded noise")
    for release in report.exact[:MOST_SUBJECTS]:
        out.print(
            f"Request {release.request}, {escape(names_words(release.clients, 1))}: the release {exact_words(release)}"
        )
    if report.membership is not None:
        _print_membership(report.membership)
    print_compared(report)


def exact_words(release: ExactAudit) -> str:
    """Return a clause on how an exact release compares with the model trained without its clients."""
    if release.without is None:
        return "was not compared: it was erased since, or nobody can train that model without them here"
    if not release.same_model:
        return "differs in its bits from the model trained without them, see the contradictions and the notes"
    summed = ", and so does the sum over the remaining clients" if release.sum_recorded and release.same_sum else ""
    return f"equals the model trained without them, to the bit{summed}"


def _print_subjects(report: AuditReport) -> None:
    shown = table("request", "client", "level", "-distance", "-Psi", "-eps", "-true", "-shown", title="\nForgotten")
    for subject in report.subjects[:MOST_SUBJECTS]:
        largest = max(subject.nodes, key=lambda node: node.psi, default=None)
        releases, source = subject.releases, subject.at_source if subject.request else largest
        epsilons = (
            (releases.epsilon_certified, releases.epsilon_true, releases.epsilon_shown) if releases else (None,) * 3
        )
        shown.add_row(
            subject.request or "-",
            escape(names_words(subject.clients, 1)),
            level_text(subject.level) if subject.request else "not asked",
            number(source.distance, 3) if source else "-",
            number(source.psi, 3) if source else "-",
            *(number(value, 3) for value in epsilons),
        )
    out.print(shown)
    if len(report.subjects) > MOST_SUBJECTS:
        out.print(f"... and {len(report.subjects) - MOST_SUBJECTS} more in the JSON")
    if any(subject.releases for subject in report.subjects):
        out.print(
            "distance: the true one at the rollback target; Psi: its bound; eps: certified; true: the epsilon that "
            "follows from distance and noise; shown: the epsilon proven by tests that see only releases."
        )


def _print_membership(found: MembershipAudit) -> None:
    before, allowed = (percent(value) if value is not None else "unknown" for value in (found.before, found.bound))
    out.print(
        f"Request {escape(found.request)}, {escape(names_words(found.clients, 1))}: a threshold on the loss calls "
        f"{percent(found.released)} of {found.samples} forgotten samples members, {before} before the request, at 1 % "
        f"false alarms among {found.held_out} held-out samples; the certificate allows {allowed}."
    )
