"""The page of a report, rendered from the template `report.html` and written after its figures."""

from __future__ import annotations

import html
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from markupsafe import Markup

from sifu.api import Run
from sifu.api.history import csv_of
from sifu.core import certificate_words
from sifu.core.certificate_words import CertificateWords
from sifu.core.held_out_figures import TRAINING_DATA
from sifu.core.operator_words import forgotten_words, names_words
from sifu.errors import InputError
from sifu.plots.style import byte_size, counted, figure_bytes, inline_svg, narrow_figures
from sifu.report import report_words as words
from sifu.report.collect import collect
from sifu.report.figures import figures_of
from sifu.report.run_data import ReportData, ReportedRequest
from sifu.store.files import check_output, private_folder, write_atomically
from sifu.version import __version__

OPEN_UP_TO = 3  # number of articles above which long parts are collapsed


@dataclass(frozen=True)
class Article:
    """Requests whose certificates say the same; `words` is None for a request without a certificate."""

    words: CertificateWords | None
    requests: list[ReportedRequest]


def _articles(data: ReportData) -> list[Article]:
    """Return the requests in order, with those that say the same together, so that no sentence is repeated."""
    articles: list[Article] = []
    for request in data.requests:
        words = None if request.certificate is None else request.certificate.words
        same = next((article for article in articles if words is not None and article.words == words), None)
        if same is None:
            articles.append(Article(words, [request]))
        else:
            same.requests.append(request)
    return articles


def render_page(data: ReportData, drawings: Mapping[str, str]) -> str:
    """Return the page; `drawings` holds each figure's SVG by name, and its narrow version with the suffix `-phone`."""
    environment, articles = words.templates("sifu.report"), _articles(data)
    environment.filters.update(moment=words.moment, counted=counted, number=words.number, subject_row=words.subject_row)
    environment.globals.update(words=words, certificate_words=certificate_words)
    environment.globals.update(forgotten_words=forgotten_words, names_words=names_words)
    return environment.get_template("report.html").render(
        data=data,
        title=data.status.run.rstrip("/").rsplit("/", 1)[-1] or data.run,
        style=Markup(files("sifu.report").joinpath("report.css").read_text(encoding="utf-8")),
        facts=_facts(data),
        request_table=_request_table(data),
        figures=list(_figures(data, drawings)),
        articles=articles,
        folded=len(articles) > OPEN_UP_TO,
        folder_word=shlex.quote(data.status.run),
        version=__version__,
    )


def _facts(data: ReportData) -> list[tuple[str, str, str]]:
    """Return the name, value and note of each number at the top of the page."""
    target = f"target {100 * data.status.target:g} %" if data.status.target > 0 else "no target"
    rounds = sum(request.rounds for request in data.requests)
    rebuilding = data.rounds_in_all - data.training_rounds - rounds
    more = f", {rebuilding:,} rebuilding groups" if rebuilding else ""
    models = data.status.models
    active = sum(client.state == "active" for client in data.status.clients)
    held = data.status.held_out
    held_out: list[tuple[str, str, str]] = []
    if held is not None and held.accuracy is not None:
        held_out = [
            ("Held-out accuracy", words.percent(held.accuracy), held.where + (held.details and f"; {held.details}"))
        ]
    elif held is not None:
        held_out = [("Held-out mean squared error", f"{held.mean_squared_error:.4g}", held.where)]
        if held.r2 is not None:
            held_out.insert(0, ("Held-out R²", f"{held.r2:.3f}", held.where))
    training = ("Training accuracy", words.percent(data.status.accuracy), f"{TRAINING_DATA}; {target}")
    if data.regression:
        training = ("Training mean squared error", words.number(data.status.mean_squared_error, 4), TRAINING_DATA)
    work = [
        ("Rounds run", f"{data.rounds_in_all:,}", f"{data.training_rounds:,} training, {rounds:,} forgetting{more}"),
        ("Models on disk", f"{len(models):,}", byte_size(sum(model.bytes for model in models))),
    ]
    if data.status.closed_form:
        kept = data.status.statistics
        work = [("Statistics kept", counted(kept.files, "file"), byte_size(kept.bytes))]
    records = [("Records forgotten", f"{data.records_count:,}", "their clients stay")] if data.records_count else []
    facts = [
        ("Clients that remain", f"{active:,}", f"of {len(data.status.clients):,}"),
        ("Clients forgotten", f"{data.forgotten_count:,}", counted(len(data.done), "request") + " done"),
        *records,
        *held_out,
        training,
        ("Model", data.status.model, counted(data.status.parameters, "parameter")),
        *work,
    ]
    return [fact for fact in facts if fact[1] != "–"]


def _figures(data: ReportData, drawings: Mapping[str, str]) -> Iterator[tuple[Markup, Markup, str]]:
    """Yield each figure's drawings, for wide screens and for phones, with its caption."""
    for kind in figures_of(data):
        label = html.escape(f"{kind.message(data)}. {kind.caption}")
        caption = kind.caption + (_small_print(data) if kind.name == "psi" else "")
        wide, narrow = (Markup(inline_svg(drawings[name], name, label)) for name in (kind.name, f"{kind.name}-phone"))
        yield wide, narrow, caption


def _small_print(data: ReportData) -> str:
    """Return a sentence that says how many requests are not drawn."""
    rolled_back = sum(request.noise_std is not None and request.rollback is not None for request in data.requests)
    if rolled_back <= len(data.psi_panels):
        return ""
    return f" The latest {len(data.psi_panels)} of {rolled_back:,} requests are drawn; the table has all of them."


ROUND_COLUMNS = ("#ε", "#δ", "#σ", "#Ψ", "#Ψ*", "Rolled back to", "#Rounds")


def _request_table(data: ReportData) -> tuple[list[str], list[list[str]]]:
    """Return the header and rows of the table of requests; a head in closed form has no noise and no source model."""
    figure = "mean squared error" if data.regression else "accuracy"
    heads = ["Request", "Forgotten", "Level", *ROUND_COLUMNS, f"#Training {figure}"]
    rows = [[*_request_row(request), request.fits["remaining_after"]] for request in data.requests]
    left_out = ROUND_COLUMNS if data.status.closed_form else ()
    chosen = [place for place, head in enumerate(heads) if head not in left_out]
    return [heads[place] for place in chosen], [[row[place] for place in chosen] for row in rows]


def _request_row(request: ReportedRequest) -> Sequence[str]:
    certificate = request.certificate.body if request.certificate else {}
    went_back = "fresh model" if request.done else "–"
    if request.rollback is not None:
        branch, position = request.rollback
        went_back = f"{f'request {branch}' if branch else 'training'}, round {position:,}"
    return (
        request.request,
        counted(request.records, "record") if request.records else counted(len(request.clients), "client"),
        request.level or request.status,
        f"{request.terms.epsilon:g}",
        f"{request.terms.delta:g}",
        words.number(request.noise_std, 4),
        words.number(certificate.get("psi"), 4),
        words.number(certificate.get("psi_star"), 4),
        went_back,
        f"{request.rounds:,}" if request.done else (f"{request.rounds:,} so far" if request.rounds else "–"),
    )


PAGE = "index.html"


def write_report(run_folder: str | Path, output: str | Path | None = None) -> Path:
    """Write a self-contained HTML page about a run, with its figures as PNG and SVG files, and the evaluations as CSV.

    The run is only read, the page from one snapshot, so this also works while another process writes to it.

    Args:
        run_folder: Path of the run folder.
        output: The page (`report.html`) or a folder for it, by default RUN/report/index.html.

    Returns:
        The path of the page.
    """
    data = collect(run_folder)
    history = csv_of(Run(run_folder).history())
    page = page_path(Path(run_folder), None if output is None else Path(output))
    check_output(page)
    prefix = "" if page.name == PAGE else f"{page.stem}-"
    try:
        private_folder(page.parent, parents=True)
        write_atomically(page.parent / f"{prefix}history.csv", history.encode())
        drawings = {}
        for kind in figures_of(data):
            figure = kind.draw(data)
            svg = figure_bytes(figure, "svg")
            drawings[kind.name] = svg.decode()
            with narrow_figures():
                drawings[f"{kind.name}-phone"] = figure_bytes(kind.draw(data), "svg").decode()
            write_atomically(page.parent / f"{prefix}{kind.name}.svg", svg)
            write_atomically(page.parent / f"{prefix}{kind.name}.png", figure_bytes(figure, "png"))
        write_atomically(page, render_page(data, drawings).encode("utf-8", "xmlcharrefreplace"))
    except OSError as error:
        raise InputError(f"the report cannot be written to {page}: {error.strerror}; give another folder") from error
    return page


def page_path(run_folder: Path, output: Path | None) -> Path:
    """Return the path of the page: the given file, or index.html in the given folder."""
    if output is None:
        return run_folder / "report" / PAGE
    if output.is_dir() or output.suffix.lower() not in (".html", ".htm"):
        return output / PAGE
    return output
