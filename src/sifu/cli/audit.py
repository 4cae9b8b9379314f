"""Output of `sifu audit` and `sifu client-audit`: verdict first, then the evidence."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from sifu.cli.output import Answer, ShownBar, level_text, names_text, number, out, percent, table
from sifu.core.ledger import plain_values

if TYPE_CHECKING:
    from sifu.audit import AuditReport, BeforeAfterAttack, ClientAudit, Control, FileComparison
    from sifu.audit.exact_releases import ExactAudit

MOST_SUBJECTS = 12
MODELS = ("before", "released", "scratch")


class AuditProgress(ShownBar):
    """Progress bar for each step of an audit, on a terminal only."""

    def __init__(self) -> None:
        super().__init__("{task.completed:.0f} of {task.total:.0f}", width=20)

    def __call__(self, phase: str, done: int, total: int) -> None:
        """Show a step and how much of it is done."""
        self.begin(phase, total)
        self.update(done, total)


def show_audit(
    report: AuditReport | None, controls: Sequence[Control], output: Path | None, *, compared_only: bool = False
) -> Answer:
    """Return the answer of `sifu audit DIR`; exit code 3 for a contradicted claim or a failed control."""
    values: dict[str, Any] = {"holds": True} if report is None else report.values()
    printed = print_compared if compared_only else print_report
    shown: list[Callable[[], None]] = [] if report is None else [partial(printed, report)]
    if controls:
        values["controls"] = [asdict(control) | {"passed": control.passed} for control in controls]
        values["holds"] = values["holds"] and all(control.passed for control in controls)
        shown.append(partial(_print_controls, controls))
    files = [] if report is None or output is None else write_audit(report, values, output)
    shown += [partial(out.print, f"Wrote {path}", markup=False) for path in files]
    return Answer(values | {"files": [str(path) for path in files]}, *shown, code=0 if values["holds"] else 3)


def write_audit(report: AuditReport, values: dict[str, Any], output: Path) -> list[Path]:
    """Write the audit as JSON and as a figure; both are confidential, because they show distances and nodes."""
    from sifu.audit.audit_report import draw_audit
    from sifu.plots.style import figure_bytes
    from sifu.store.files import private_folder, write_atomically

    private_folder(output, parents=True)
    content = {
        output / "audit.json": (json.dumps(plain_values(values), indent=2) + "\n").encode(),
        output / "audit.png": figure_bytes(draw_audit(report), "png"),
    }
    for path, data in content.items():
        write_atomically(path, data)
    return list(content)


def show_comparison(compared: Sequence[FileComparison]) -> Answer:
    """Return the answer of `sifu audit --before FILE --after FILE`, which compares two exported releases."""
    return Answer({"compared": [asdict(each) for each in compared]}, partial(_print_comparison, compared))


def _print_comparison(compared: Sequence[FileComparison]) -> None:
    for each in compared:
        shown = table(each.what, "-score", "-cosine", title=f"\nMost likely deleted of {each.candidates} {each.what}s")
        for named in each.named:
            shown.add_row(escape(named.candidate), number(named.score, 3), number(named.cosine, 3))
        out.print(shown)
        out.print(f"The first is {number(each.stands_out, 3)} standard deviations above the mean of the others.")


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
    if report.holds:
        out.print(
            f"[bold green]No contradiction[/] in {escape(report.run)}: no attempted attack breaks a certified claim."
        )
    else:
        out.print(f"[bold red]Contradicted[/]: {len(report.contradictions)} certified statement(s) do not hold.")
        for sentence in report.contradictions:
            out.print(f"  [red]![/] {escape(sentence)}")
    for sentence in report.observations:
        out.print(f"[yellow]Not certified, and does not hold:[/] {escape(sentence)}")
    nodes = sum(len(subject.nodes) for subject in report.subjects)
    out.print(
        f"{report.nodes_replayed} nodes replayed with and without {len(report.subjects)} subject(s): {nodes} distances "
        "compared with Psi"
    )
    _print_subjects(report)
    if report.noise:
        sound = sum(1 for edge in report.noise if edge.as_recorded)
        out.print(f"{sound} of {len(report.noise)} noise edges contain the recorded noise")
    for release in report.exact[:MOST_SUBJECTS]:
        out.print(f"Request {release.request}, {names_text(release.clients, 1)}: the release {exact_words(release)}")
    if report.attacks is not None:
        _print_attacks(report)
    print_compared(report)


def exact_words(release: ExactAudit) -> str:
    """Return a clause on how an exact release compares with the model trained without its clients."""
    if release.without is None:
        return "was not compared with the model trained without them"
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
            names_text(subject.clients, 1),
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


def _print_attacks(report: AuditReport) -> None:
    attacks = report.attacks
    assert attacks is not None
    forgetting, membership = attacks.forgetting, attacks.membership
    shown = table(
        "", "-before", "-released", "-Scratch", title=f"\nRequest {attacks.request}: {names_text(attacks.clients)}"
    )
    labels = any(value > 0.0 for value in forgetting.accuracy.values())
    figures = forgetting.accuracy if labels else forgetting.loss
    row = [percent(figures.get(name)) if labels else number(figures.get(name)) for name in MODELS]
    shown.add_row(f"{'accuracy' if labels else 'loss'} on their data", *row)
    if membership is not None and membership.loss is not None:
        for title, pick in (("1 %", "at_1_percent"), ("10 %", "at_10_percent")):
            rates = [
                percent(getattr(shown_by, pick)) if (shown_by := membership.loss.get(name)) else "-" for name in MODELS
            ]
            shown.add_row(f"spotted by loss at {title} false alarms", *rates)
    if forgetting.relearn:
        rounds = [forgetting.relearn.get(name) for name in ("released", "scratch")]
        limit = f"> {forgetting.relearn_limit}"
        shown.add_row("rounds to relearn them", "-", *(limit if count is None else str(count) for count in rounds))
    out.print(shown)
    if membership is not None and membership.lira is not None:
        found_by, limits = membership.lira, membership.bound
        out.print(
            f"Shadow federations ({membership.shadows} with and {membership.shadows} without the client) against "
            f"{escape(membership.lira_client)}:"
        )
        for title, pick in (("1 %", "at_1_percent"), ("10 %", "at_10_percent")):
            most = f", at most {percent(getattr(limits, pick))} by the certificate" if limits else ""
            out.print(f"  at {title} false alarms they spot {percent(getattr(found_by, pick))}{most}")
        out.print(
            f"  at 10 % they flag {percent(membership.lira_released)} of the samples in the released model, "
            f"{percent(membership.lira_scratch)} in Scratch"
        )
    parts = [f"{percent(value)} of the {name} samples" for name, value in forgetting.disagreement.items()]
    if parts:
        out.print(f"Released model and Scratch predict different classes on {' and '.join(parts)}.")
    out.print(
        f"Their distance is {number(forgetting.distance_to_scratch)}; Scratch moved "
        f"{number(forgetting.distance_from_start)} from its start in {forgetting.scratch_rounds} rounds."
    )


def _print_controls(controls: Sequence[Control]) -> None:
    shown = table("control", "-eps certified", "-eps true", "-eps shown", "caught", "as expected", title="\nControls")
    for control in controls:
        shown.add_row(
            control.name,
            number(control.epsilon_certified, 3),
            number(control.epsilon_true, 3),
            number(control.epsilon_shown, 3),
            "yes" if control.caught else "no",
            "[green]yes[/]" if control.passed else "[bold red]no[/]",
        )
    out.print(shown)


def show_client_audit(audit: ClientAudit) -> Answer:
    """Return the answer of `sifu client-audit`; exit code 3 if there is a problem."""
    values = {"holds": audit.holds, **asdict(audit)}
    return Answer(values, partial(_print_client_audit, audit), code=0 if audit.holds else 3)


def _print_client_audit(audit: ClientAudit) -> None:
    verdict = "[bold green]No problem found[/]" if audit.holds else "[bold red]Problems found[/]"
    out.print(f"{verdict} in the files of {escape(audit.client)} for request {escape(audit.request)}.")
    for sentence in audit.problems:
        out.print(f"  [red]![/] {escape(sentence)}")
    pair = (audit.before, audit.after)
    if any(pair):
        facts = table("", "-before", "-after")
        facts.add_row(
            "accuracy on your data", *(percent(evaluation.accuracy) if evaluation else "-" for evaluation in pair)
        )
        facts.add_row("loss on your data", *(number(evaluation.loss) if evaluation else "-" for evaluation in pair))
        out.print(facts)
    if audit.distance is not None:
        out.print(
            f"The distance of the two models is {number(audit.distance)}; noise of {number(audit.sigma)} was added in "
            "between."
        )
    if audit.committed:
        out.print("The later model is the one the certificate commits to.")
    for sentence in audit.statements:
        out.print(f"* {escape(sentence)}")
