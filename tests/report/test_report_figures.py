"""Figures of the report in extreme cases, and their texts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sifu.plots.style import figure_bytes
from sifu.report import collect
from sifu.report.figures import FIGURES, figures_of
from sifu.report.psi_figure import draw_history, history_message
from sifu.report.report_words import verdict
from sifu.report.run_data import AccuracyTrace, Branch, ReportData


@pytest.fixture(scope="module")
def busy(busy_run: Path) -> ReportData:
    return collect(busy_run)


def stretched(data: ReportData, requests: int, rounds: int) -> ReportData:
    """Return the run with other numbers of requests and rounds; each request goes back to the middle of the previous
    one.
    """
    branches = [Branch(0, "training", 0, rounds, None, 0.0, rounds // 2 if requests else rounds)]
    for number in range(1, requests + 1):
        before = branches[-1]
        middle = before.rounds // 2
        last = number == requests
        branches.append(
            Branch(
                number,
                f"r{number}",
                before.start + middle,
                rounds,
                (number - 1, middle),
                0.1,
                rounds if last else rounds // 2,
            )
        )
    count = rounds * (requests + 1)
    trace = AccuracyTrace(
        np.arange(count + 1),
        np.linspace(0.1, 0.95, count + 1),
        np.minimum(np.arange(count + 1) // max(rounds, 1), requests),
        tuple((rounds * number, number) for number in range(1, requests + 1)),
    )
    first = data.requests[0]
    copies = tuple(replace(first, request=f"r{number}", rounds=rounds) for number in range(1, requests + 1))
    return replace(
        data,
        branches=tuple(branches),
        rounds_in_all=count,
        requests=copies,
        trace=trace,
        psi_panels=data.psi_panels[:1] * min(requests, 6),
    )


@pytest.mark.long
@pytest.mark.parametrize(("requests", "rounds"), [(0, 0), (1, 1), (30, 5000)])
def test_figures_stand_any_number_of_requests_and_rounds(busy: ReportData, requests: int, rounds: int) -> None:
    data = stretched(busy, requests, rounds)
    shown = figures_of(data)
    assert len(shown) == (len(FIGURES) if requests else 2)
    for entry in shown:
        figure = entry.draw(data)
        width, height = figure.get_size_inches()
        assert width < 8
        assert height < 18
        assert len(figure_bytes(figure, "svg")) < 600_000
        assert entry.message(data)
        assert entry.caption.endswith(".")


def test_a_long_history_leaves_lanes_out_and_says_so(busy: ReportData) -> None:
    figure = draw_history(stretched(busy, 120, 3))
    labels = [text.get_text() for text in figure.axes[0].get_yticklabels()]
    assert labels[:3] == ["training", "… 81 more", "r82"]
    assert labels[-1] == "r120"


def words_of(figure: Any) -> list[Any]:
    """Return all texts of a figure except tick labels, some of which matplotlib does not draw."""
    legends = [*figure.legends, *(axes.get_legend() for axes in figure.axes if axes.get_legend())]
    texts = [*figure.texts, *(text for legend in legends for text in legend.get_texts())]
    for axes in figure.axes:
        texts += [*axes.texts, axes.xaxis.label, axes.yaxis.label, axes._left_title]
    return [text for text in texts if text.get_text()]


@pytest.mark.long
def test_no_word_leaves_its_figure(busy: ReportData) -> None:
    for data in (busy, stretched(busy, 8, 90)):
        for entry in FIGURES:
            figure = entry.draw(data)
            figure.draw_without_rendering()
            words = words_of(figure)
            assert words
            for text in words:
                box = text.get_window_extent()
                assert figure.bbox.x0 - 2 <= box.x0, (entry.name, text)
                assert box.x1 <= figure.bbox.x1 + 2, (entry.name, text)
                assert figure.bbox.y0 - 2 <= box.y0, (entry.name, text)
                assert box.y1 <= figure.bbox.y1 + 2, (entry.name, text)


def test_drawing_leaves_the_users_settings_alone(busy: ReportData) -> None:
    import matplotlib

    before = dict(matplotlib.rcParams)
    figure_bytes(draw_history(busy), "svg")
    assert dict(matplotlib.rcParams) == before


def test_the_history_is_that_of_the_run(busy: ReportData) -> None:
    first, strict, fresh, fourth = busy.branches[1:]
    assert first.source == (0, 6)
    assert strict.source is not None
    assert strict.noise_std in (0.0, 0.5)
    assert (fresh.source, fresh.start) == (None, 0)
    assert fourth.source is not None
    assert busy.branches[0].active_until == -1  # after Scratch, no round of the first training is in use
    active = sum(max(0, branch.active_until) for branch in busy.branches)
    assert history_message(busy).startswith(f"After 4 requests, {active} of 30 rounds lead")
    assert busy.trace.x[-1] == busy.rounds_in_all == 6 * 5


def test_psi_at_the_chosen_model_is_what_the_certificate_says(busy: ReportData) -> None:
    certificates = {request.request: request.certificate for request in busy.done}
    assert [panel.request for panel in busy.psi_panels] == ["first", "strict", "fourth"]
    for panel in busy.psi_panels:
        certificate = certificates[panel.request]
        assert certificate is not None
        assert panel.source_psi == certificate.body["psi"]
        assert panel.psi_star == certificate.body["psi_star"]
        assert panel.source_psi <= panel.psi_star or panel.noise_std == 0.0


def test_words_never_promise_more_than_the_level(busy: ReportData) -> None:
    request = busy.requests[0]
    nothing = replace(busy, requests=(replace(request, level="none"),))
    assert "certified" not in verdict(nothing)
    assert "removed without any guarantee" in verdict(nothing)
