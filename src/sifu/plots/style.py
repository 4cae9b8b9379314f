"""Common style of all figures: a palette for colour-blind readers, drawing helpers, and reproducible image files."""

from __future__ import annotations

import io
import re
import textwrap
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, wraps
from typing import TYPE_CHECKING, Any, ParamSpec

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

P = ParamSpec("P")

# Okabe & Ito's palette without its yellow, which is hard to see on white.
BLUE, VERMILLION, GREEN, ORANGE, PURPLE, SKY = "#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7", "#56B4E9"
BRANCH_COLOURS = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY)
INK, GREY, FAINT = "#1f2430", "#6b7280", "#d8dce3"
WIDE, NARROW = 7.6, 3.6
"""Widths of a figure in inches: for paper or a large screen, and for a phone. Text has the same size in both."""
_width: ContextVar[float] = ContextVar("_width", default=WIDE)
DOTS_PER_INCH = 160

STYLE: dict[str, Any] = {
    "svg.hashsalt": "sifu",
    "svg.fonttype": "path",  # gives the same glyphs on every machine, without fonts to load
    "font.family": "DejaVu Sans",
    "font.size": 9.0,
    "mathtext.fontset": "dejavusans",
    "text.color": INK,
    "axes.labelcolor": GREY,
    "axes.edgecolor": "#aab0bb",
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9.5,
    "axes.labelsize": 8.5,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "figure.facecolor": "white",
    "axes.facecolor": "white",
    "savefig.facecolor": "white",
}
_one_at_a_time = threading.RLock()  # matplotlib's settings are global to the process


@contextmanager
def figure_style() -> Iterator[None]:
    """Apply the common style inside the `with` block, in place of the user's matplotlib settings."""
    import matplotlib.style

    with _one_at_a_time, matplotlib.style.context(["default", STYLE]):
        yield


def styled(draw: Callable[P, Figure]) -> Callable[P, Figure]:
    """Decorate a drawing function so that it uses the common style."""

    @wraps(draw)
    def drawn(*args: P.args, **kwargs: P.kwargs) -> Figure:
        with figure_style():
            return draw(*args, **kwargs)

    return drawn


@contextmanager
def narrow_figures() -> Iterator[None]:
    """Draw figures for phones inside the `with` block: narrow, with panels and legends stacked."""
    before = _width.set(NARROW)
    try:
        yield
    finally:
        _width.reset(before)


def is_narrow() -> bool:
    """Return whether figures are currently drawn for a phone."""
    return _width.get() == NARROW


def new_figure(height: float, **options: Any) -> Figure:
    """Return an empty figure with the current width and the given height, in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(_width.get(), height), layout="constrained", **options)


def headline(figure: Figure, message: str) -> None:
    """Write a message above the figure, left-aligned."""
    lines = textwrap.wrap(message, 38 if is_narrow() else 84)
    figure.suptitle("\n".join(lines), x=0.008, ha="left", fontsize=11, fontweight="bold", parse_math=False)
    _make_room(figure, len(lines) - 1)


def legend_below(figure: Figure, handles: Sequence[Any], **options: Any) -> None:
    """Draw a legend below the figure, left-aligned."""
    columns = 1 if is_narrow() else 4
    _make_room(figure, len(handles) - 1)
    figure.legend(handles=handles, loc="outside lower left", ncols=columns, **options)


def _make_room(figure: Figure, lines: int) -> None:
    """Increase the height of a narrow figure by this number of lines of text; leave a wide figure unchanged."""
    if is_narrow():
        figure.set_figheight(figure.get_figheight() + 0.19 * lines)


def counted(number: int, noun: str) -> str:
    """Return a number followed by its noun, in the plural unless the number is 1.

    >>> counted(1, "round"), counted(2500, "round")
    ('1 round', '2,500 rounds')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def byte_size(count: float) -> str:
    """Return a number of bytes in a readable unit.

    >>> byte_size(900), byte_size(5200), byte_size(31_000_000), byte_size(2.5e10)
    ('900 B', '5.2 kB', '31.0 MB', '25.0 GB')
    """
    for size, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"


def note(axes: Axes, text: str, place: tuple[float, float], offset: tuple[float, float], **options: Any) -> None:
    """Write small grey text, `offset` points (1/72 inch) from a `place` in data coordinates.

    It is never parsed as mathematics; `options` are those of matplotlib's `annotate`.
    """
    chosen: dict[str, Any] = {"fontsize": 8, "color": GREY, "parse_math": False} | options
    axes.annotate(text, place, xytext=offset, textcoords="offset points", **chosen)


def whole_numbers(axes: Axes, most: int = 9) -> None:
    """Label the x axis with integers and thousands separators."""
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    axes.xaxis.set_major_locator(
        MaxNLocator(nbins=min(most, 5) if is_narrow() else most, integer=True, steps=[1, 2, 2.5, 5, 10])
    )
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))


def only_ticks(axes: Axes, *, grid: str) -> None:
    """Remove tick marks but keep their labels, and draw faint grid lines (`grid`: "x", "y" or "both")."""
    axes.tick_params(length=0)
    axes.grid(True, axis=grid, color=FAINT, linewidth=0.6)  # type: ignore[arg-type]
    axes.set_axisbelow(True)


def branch_colour(branch: int) -> str:
    """Return the colour of a branch: blue for the first training, and the other colours in turn for later branches."""
    return BRANCH_COLOURS[0] if branch == 0 else BRANCH_COLOURS[1 + (branch - 1) % (len(BRANCH_COLOURS) - 1)]


@cache
def _has_glyph() -> Callable[[int], int]:
    from matplotlib.font_manager import findfont, get_font

    return get_font(findfont("DejaVu Sans")).get_char_index


def plain(name: str, length: int = 18) -> str:
    """Return a name for a figure: at most `length` characters, with "?" for characters that the font lacks."""
    shown = "".join(letter if letter.isprintable() and _has_glyph()(ord(letter)) else "?" for letter in name)
    return shown if len(shown) <= length else shown[: length - 1] + "…"


def figure_bytes(figure: Figure, kind: str) -> bytes:
    """Return the figure as `svg` or `png` without dates, so that equal data give equal bytes."""
    stream = io.BytesIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type")) if kind == "svg" else {"Software": None}
    with figure_style():
        engine = figure.get_layout_engine()
        if engine is not None:
            if figure.axes:
                engine.execute(figure)
            figure.set_layout_engine(None)  # all files of a figure get the same layout
        figure.savefig(stream, format=kind, dpi=DOTS_PER_INCH, metadata=nothing)
    return stream.getvalue()


def inline_svg(svg: str, name: str, label: str) -> str:
    """Return an SVG file's content for use inside a page, with an escaped `label` for screen readers.

    The `name` prefixes all ids, so that two figures on a page never share an id.
    """
    body = svg[svg.index("<svg") :]
    body = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", body)
    body = re.sub(r'\bid="', f'id="{name}-', body)
    body = re.sub(r'\b(?:xlink:)?href="#', f'href="#{name}-', body)
    body = body.replace("url(#", f"url(#{name}-")
    opening = re.match(r"<svg[^>]*>", body)
    if opening is None:
        raise ValueError(f"the figure {name} is not an SVG")
    box = re.search(r'viewBox="[^"]*"', opening[0])
    head = f'<svg role="img" aria-label="{label}" {box[0] if box else ""}>'
    return head + re.sub(r"\n\s*", "\n", body[opening.end() :])
