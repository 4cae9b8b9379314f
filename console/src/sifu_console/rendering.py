"""Templates with automatic escaping, and small SVG charts with axes, a line, the target and values on hover."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

from jinja2 import Environment
from markupsafe import Markup, escape

from sifu.api.progress import Progress
from sifu.choices import terms_on_offer
from sifu.report.report_words import moment, number, templates
from sifu.version import __version__

LEVEL_WORDS = {
    "exact": "Exact: the forgotten data have no influence on the models released from this request on.",
    "proven": "Proven: every premise of the theorem is met; what clients report about themselves is trusted.",
    "conditional": "Conditional: the guarantee holds if what is marked as assumed is true.",
    "none": "No guarantee: at least one premise does not hold.",
}


@functools.cache
def _environment() -> Environment:
    environment = templates("sifu_console", "templates", spaces="\n\t\u00a0")
    environment.filters.update(moment=moment, percent=_percent, number=functools.partial(number, digits=4))
    environment.filters.update(names=_names, charts=charts)
    environment.filters.update(limit=limit_words, measured=measured_words)
    environment.globals["level_words"] = LEVEL_WORDS
    environment.globals["version"] = __version__
    environment.globals["terms_on_offer"] = terms_on_offer()
    return environment


def render(template: str, **values: Any) -> str:
    """Return a page: the template filled with the values."""
    return _environment().get_template(template).render(**values)


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f}\u00a0%"


def limit_words(live: Progress) -> str:
    """Return a phrase on the limit of the rounds of the current work."""
    if not live.at_work:
        return "no job is running"
    return f"of at most {live.limit:,}" if live.target > 0 else f"of {live.limit:,}"


def measured_words(live: Progress) -> str:
    """Return a note on the training accuracy: its round, if later rounds were run since, and the target."""
    at = live.curve[-1][0] if live.curve and live.accuracy is not None else live.rounds
    late = f"after round {at:,}; " if at < live.rounds else ""
    return late + (f"target {_percent(live.target)}" if live.target > 0 else "no target")


def _names(names: Sequence[str], most: int = 3) -> str:
    """Return a list of at most `most` names as one string, with the number of names left out."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


WIDTH, HEIGHT = 360, 180
LEFT, RIGHT, TOP, BOTTOM = 46, 350, 26, 150
"""Edges of the plot; labels are drawn outside them."""


def charts(live: Progress) -> Markup:
    """Return charts of accuracy and loss by round; a chart needs at least two points."""
    series: list[tuple[str, list[tuple[int, float | None]], Callable[[float], str], float | None]] = [
        ("Training accuracy", [(point[0], point[1]) for point in live.curve], _axis_percent, live.target or None),
        ("Training loss", [(point[0], point[2]) for point in live.curve], "{:.3g}".format, None),
    ]
    drawn = Markup()
    for title, rows, words, target in series:
        points = [(at, value) for at, value in rows if value is not None and math.isfinite(value)]
        if len(points) > 1:
            drawn += _chart(title, points, words, target)
    return drawn


def _chart(
    title: str, points: Sequence[tuple[int, float]], words: Callable[[float], str], target: float | None
) -> Markup:
    values = [value for _, value in points] + ([] if target is None else [target])
    low, high = min(values), max(values)
    ticks = _ticks(low, high, False)
    low, high = min(low, ticks[0]), max(high, ticks[-1])
    first, last = points[0][0], points[-1][0]

    def across(at: float) -> float:
        return round(LEFT + (RIGHT - LEFT) * (at - first) / (last - first), 1)

    def up(value: float) -> float:
        return round(BOTTOM - (BOTTOM - TOP) * (value - low) / (high - low), 1)

    parts = [f'<text class="name" x="4" y="14">{title}</text>']
    for tick in ticks:
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{RIGHT}" y1="{up(tick)}" y2="{up(tick)}"/>')
        parts.append(f'<text class="up" x="{LEFT - 6}" y="{up(tick) + 3.5}">{words(tick)}</text>')
    for tick in _ticks(first, last, True):
        if first <= tick <= last:
            parts.append(f'<text class="across" x="{across(tick)}" y="{BOTTOM + 15}">{tick:.0f}</text>')
    parts.append(f'<text class="across" x="{(LEFT + RIGHT) / 2}" y="{HEIGHT - 2}">round</text>')
    goal = ""
    if target is not None:
        goal = f", target {words(target)}"
        parts.append(f'<line class="goal" x1="{LEFT}" x2="{RIGHT}" y1="{up(target)}" y2="{up(target)}"/>')
        parts.append(f'<text class="goal-name" x="{LEFT + 4}" y="{up(target) - 4}">target {words(target)}</text>')
    parts.append('<polyline class="line" points="' + " ".join(f"{across(at)},{up(y)}" for at, y in points) + '"/>')
    reach = (RIGHT - LEFT) / (len(points) - 1)
    for at, value in points:
        parts.append(
            f'<g class="point"><rect x="{across(at) - reach / 2:.1f}" y="{TOP}" width="{reach:.1f}" '
            f'height="{BOTTOM - TOP}"/><circle cx="{across(at)}" cy="{up(value)}" r="3.5"/>'
            f"<title>round {at}: {words(value)}</title></g>"
        )
    said = escape(f"{title} by round: {words(points[-1][1])} at round {last}{goal}")
    head = f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{said}">'
    return Markup("".join((head, *parts, "</svg>")))


def _ticks(low: float, high: float, whole: bool) -> list[float]:
    """Return three to six round numbers that span a range.

    >>> _ticks(0.62, 0.94, False), _ticks(0, 40, True)
    ([0.6, 0.7, 0.8, 0.9, 1.0], [0.0, 10.0, 20.0, 30.0, 40.0])
    """
    span = max(high - low, 1e-9 * max(abs(high), 1.0), 1.0 if whole else 1e-3)
    power = 10.0 ** math.floor(math.log10(span / 3))
    step = next(power * factor for factor in (1, 2, 5, 10) if span / (power * factor) <= 4.0 + 1e-9)
    step = max(step, 1.0) if whole else step
    start, end = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(step * number, 10) for number in range(start, max(end, start + 1) + 1)]


def _axis_percent(value: float) -> str:
    return f"{100 * value:.4g}\u00a0%"
