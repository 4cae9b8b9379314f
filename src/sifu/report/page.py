"""The page: a plain template filled with escaped text. Everything that comes from a run goes through `text`."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from string import Template

from sifu.plots.style import counted, inline_svg
from sifu.report.certificates import certificate_article
from sifu.report.data import ReportData, Request
from sifu.report.figures import FIGURES
from sifu.report.markup import badge, table, text
from sifu.report.words import moment, percent, rounds_words, size, verdict
from sifu.version import __version__

OPEN_UP_TO = 3  # with more requests, what every certificate repeats is folded


def render_page(data: ReportData, drawings: Mapping[str, str]) -> str:
    """The whole page; `drawings` holds the SVG of each figure by its name."""
    template = Template(_resource("report.html"))
    return template.substitute(
        title=text(data.folder.rstrip("/").rsplit("/", 1)[-1] or data.run),
        style=_resource("report.css"),
        run=text(data.run),
        verdict=text(verdict(data)),
        time=text(moment(data.last_event)),
        events=f"{data.events:,}",
        source=_source(data),
        facts="\n".join(_facts(data)),
        figures="\n".join(_figures(data, drawings)),
        certificates="\n".join(
            certificate_article(one, folded=len(data.requests) > OPEN_UP_TO) for one in data.requests
        )
        or "<p>No client has asked to be forgotten, so there is no certificate.</p>",
        tables=_tables(data),
        verify=_verify(data),
        version=text(__version__),
    )


def _resource(name: str) -> str:
    return files("sifu.report").joinpath(name).read_text(encoding="utf-8")


def _source(data: ReportData) -> str:
    if data.phase == "ready":
        return ""
    words = {"training": "Training has not finished.", "retraining": "A request is being carried out."}
    return f"<strong>{text(words.get(data.phase, f'The run is {data.phase}.'))}</strong>"


def _facts(data: ReportData) -> Iterable[str]:
    yield _fact("Clients that remain", f"{data.active_count:,}", f"of {data.client_count:,}")
    yield _fact("Clients forgotten", f"{data.forgotten_count:,}", counted(len(data.done), "request") + " done")
    target = f"target {100 * data.target:g} %" if data.target > 0 else "no target"
    yield _fact("Accuracy now", percent(data.accuracy), target)
    rounds = sum(one.rounds for one in data.requests)
    yield _fact("Rounds run", f"{data.rounds_in_all:,}", f"{data.training_rounds:,} training, {rounds:,} forgetting")
    yield _fact("Model", data.model_kind, counted(data.parameters, "parameter"))
    stored = sum(one.bytes for one in data.models)
    yield _fact("Models kept", f"{len(data.models):,}", size(stored))


def _fact(name: str, value: str, note: str) -> str:
    return f"<div><dt>{text(name)}</dt><dd>{text(value)}<small>{text(note)}</small></dd></div>"


def _figures(data: ReportData, drawings: Mapping[str, str]) -> Iterable[str]:
    for one in FIGURES:
        if not data.requests and one.name in ("psi", "rounds", "before-after"):
            continue
        label = html.escape(f"{one.message(data)}. {one.explained(data)}")
        drawing = inline_svg(drawings[one.name], one.name, label)
        caption = text(one.explained(data) + _small_print(one.name, data))
        yield f'<figure><div class="sheet">{drawing}</div>\n<figcaption>{caption}</figcaption></figure>'


def _small_print(name: str, data: ReportData) -> str:
    if name == "before-after":
        fewest = min((one.forgotten_samples for one in data.done if one.forgotten_samples), default=None)
        if fewest is not None and fewest < 200:
            step = 100 / fewest
            return f" With only {counted(fewest, 'sample')}, one of them is worth {step:.1f} points."
    if name == "psi":
        gone_back = sum(1 for one in data.requests if one.sigma is not None and one.rollback is not None)
        if gone_back > len(data.psi_panels):
            return f" The latest {len(data.psi_panels)} of {gone_back:,} requests are drawn; the table has all of them."
    return ""


def _tables(data: ReportData) -> str:
    requests = table(
        "Requests",
        (
            "Request",
            "#Clients",
            "Level",
            "#ε",
            "#δ",
            "#σ",
            "#Ψ",
            "#Ψ*",
            "Went back to",
            "#Rounds",
            "#From scratch",
            "#Accuracy",
        ),
        [_request_row(one) for one in data.requests],
    )
    models = table(
        "Models on disk",
        ("Model", "#Node", "Use", "#Largest Ψ", "#Size"),
        [
            (
                _model_name(one.branch, one.position),
                f"{one.node:,}",
                "current model" if one.current else ("kept to go back to" if one.on_path else "not in use"),
                f"{one.psi_max:.4g}",
                size(one.bytes),
            )
            for one in data.models
        ],
    )
    shown = f'<div class="card">{requests}</div>' if data.requests else '<div class="card"><p>No requests.</p></div>'
    return (
        shown + f'\n<div class="card"><details><summary>Kept models: {len(data.models):,}</summary>{models}'
        "<p>Models from before a rollback still hold what the forgotten clients had put in by then, within the "
        "budget, unless the request asked for strict retention.</p></details></div>"
    )


def _model_name(branch: int, position: int) -> str:
    where = "training" if branch == 0 else f"request {branch}"
    return f"{where}, round {position:,}"


def _request_row(one: Request) -> Sequence[str]:
    certificate = one.certificate or {}
    went_back = "–" if one.rollback is None else _model_name(*one.rollback)
    if one.rollback is None and one.done:
        went_back = "fresh model"
    return (
        one.request,
        f"{len(one.clients):,}",
        badge(one.level)
        if one.level
        else badge("waiting" if one.status in ("received", "verified", "planned") else one.status),
        f"{one.epsilon:g}",
        f"{one.delta:g}",
        "–" if one.sigma is None else f"{one.sigma:.4g}",
        _figure_of(certificate.get("psi")),
        _figure_of(certificate.get("psi_star")),
        went_back,
        rounds_words(one) if one.done else (f"{one.rounds:,} so far" if one.rounds else "–"),
        "–" if one.scratch_rounds is None else f"{one.scratch_rounds:,}" + ("" if one.scratch_reached else "+"),
        percent(one.accuracy),
    )


def _figure_of(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else ("–" if value is None else str(value))


def _verify(data: ReportData) -> str:
    return (
        '<div class="card"><p>Nothing here needs to be believed. Whoever has the run folder can recompute every Ψ, '
        "every budget, every rollback and every level from the recorded scalars, offline:</p>"
        f"<pre>sifu verify {text(_shell_word(data.folder))}</pre>"
        "<p>It also checks the operator's signatures, the chain of hashes that ties the ledger together, and the model "
        "files. Each request has two signed certificates in the folder <code>certificates</code>: "
        "<code>ID.public.json</code> for the client and the public, <code>ID.auditor.json</code> for an auditor "
        "(confidential). A single one is checked with <code>sifu verify FILE</code>.</p>"
        '<div class="scroll"><table><tbody>'
        f'<tr><th scope="row">Public key (Ed25519)</th><td class="long">{text(data.public_key)}</td></tr>'
        f'<tr><th scope="row">Head of the ledger</th><td class="long">{text(data.ledger_head)}</td></tr>'
        "</tbody></table></div></div>"
    )


def _shell_word(path: str) -> str:
    import shlex

    return shlex.quote(path)
