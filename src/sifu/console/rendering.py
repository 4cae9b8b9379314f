"""Filling templates: jinja2 escapes everything, and letters that cannot be shown become visible marks."""

from __future__ import annotations

import functools
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from sifu.choices import terms_on_offer
from sifu.console.charts import charts
from sifu.console.live import Live
from sifu.core.wording import attacker_words
from sifu.planning.ways import Way
from sifu.report.words import LEVEL_WORDS, moment
from sifu.version import __version__


@functools.cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("sifu.console", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_printable,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(moment=moment, percent=_percent, number=_number, names=_names, attacker=_attacker)
    environment.filters.update(charts=charts, expected=expected_words)
    environment.globals["level_words"] = LEVEL_WORDS
    environment.globals["version"] = __version__
    environment.globals["terms_on_offer"] = terms_on_offer()
    return environment


def render(template: str, **values: Any) -> str:
    """A page."""
    return _environment().get_template(template).render(**values)


def _printable(value: object) -> object:
    if isinstance(value, Markup):
        return value
    return "".join(letter if letter.isprintable() or letter in "\n\t\u00a0" else "\ufffd" for letter in str(value))


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f}\u00a0%"


def _number(value: float | str | None) -> str:
    if value is None:
        return "–"
    return value if isinstance(value, str) else f"{value:.4g}"


def expected_words(live: Live) -> str:
    """How many rounds the work at hand takes in all."""
    if not live.at_work:
        return "nothing is at work"
    about = "as many as it takes" if live.expected is None else f"of about {live.expected:,}, as predicted"
    return f"of exactly {live.limit:,}" if live.target <= 0 else f"{about}; at most {live.limit:,}"


def _attacker(way: Way, scope: str) -> str:
    """What an attacker can do at most after this way."""
    return attacker_words(way.level, way.attacker_rate, scope)


def _names(names: tuple[str, ...] | list[str], most: int = 3) -> str:
    """Some names, and how many more there are."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")
