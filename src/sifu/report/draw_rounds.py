"""Rounds a request took against the rounds of training again from scratch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sifu.report.data import ReportData, Request
from sifu.report.style import BLUE, GREY, INK, headline, new_figure, only_ticks, plain, say_instead, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_ROWS = 30
SCRATCH_COLOUR = "#b4bac4"


def fewer(rounds: int, scratch_rounds: int, *, at_least: bool = False) -> str:
    """How many times fewer, in words.

    >>> fewer(47, 213), fewer(20, 10), fewer(0, 9), fewer(5, 5)
    ('4.5x fewer', '2.0x more', 'no rounds needed', 'as many')
    """
    if rounds == scratch_rounds:
        return "as many"
    if rounds == 0:
        return "no rounds needed"
    if rounds > scratch_rounds:
        return f"{rounds / max(scratch_rounds, 1):.1f}x more"
    ratio = scratch_rounds / rounds
    digits = 2 if ratio < 1.05 else 1
    return ("at least " if at_least else "") + f"{ratio:.{digits}f}x fewer"


@styled
def draw_rounds(data: ReportData) -> Figure:
    """A pair of bars for each request and one for all of them."""
    done = data.done
    if not done:
        figure = new_figure(1.6)
        headline(figure, rounds_message(data))
        return say_instead(figure, "Nothing to show: no request has been carried out yet.")
    shown, hidden = done[-MOST_ROWS:], len(done) - len(done[-MOST_ROWS:])
    total = len(done) > 1
    lines = len(shown) + (1 if total else 0)
    figure = new_figure(1.15 + lines * (0.52 if lines <= 12 else 0.36))
    axes = figure.add_subplot()
    # Requests from the top down, then the total below a gap.
    for line, one in enumerate(shown):
        _draw_pair(axes, -line, one.rounds, one.scratch_rounds, at_least=not one.scratch_reached)
    labels = [(-line, plain(one.request), "normal") for line, one in enumerate(shown)]
    if total:
        place = -len(shown) - 0.35
        compared = data.compared
        counted = compared or done
        _draw_pair(
            axes,
            place,
            sum(one.rounds for one in counted),
            sum(one.scratch_rounds or 0 for one in compared) if compared else None,
            at_least=not all(one.scratch_reached for one in compared),
        )
        axes.axhline(place + 0.68, color="#aab0bb", linewidth=0.8)
        words = "total" if not compared or len(compared) == len(done) else f"total of {len(compared):,} compared"
        labels.append((place, words, "bold"))
    axes.set_yticks([place for place, _, _ in labels], labels=[text for _, text, _ in labels])
    for text, (_, _, weight) in zip(axes.get_yticklabels(), labels, strict=True):
        text.set(parse_math=False, color=INK, fontweight=weight)
    axes.set_ylim(min(place for place, _, _ in labels) - 0.6, 0.6)
    axes.margins(x=0.2)
    axes.set_xlim(left=0)
    note = f" (the latest {len(shown)}; {hidden:,} earlier ones count in the total)" if hidden else ""
    axes.set_xlabel(f"Rounds{note}")
    axes.xaxis.get_major_locator().set_params(integer=True)
    only_ticks(axes, grid="x")
    axes.spines["left"].set_visible(False)
    _legend(figure, done)
    headline(figure, rounds_message(data))
    return figure


def rounds_message(data: ReportData) -> str:
    """What the bars show, in one sentence."""
    done, compared = data.done, data.compared
    if not done:
        return "Rounds spent on forgetting"
    if not compared:
        total = sum(one.rounds for one in done)
        return f"Forgetting took {total:,} rounds; nobody trained from scratch beside it to compare"
    rounds, scratch = sum(one.rounds for one in compared), sum(one.scratch_rounds or 0 for one in compared)
    at_least = not all(one.scratch_reached for one in compared)
    ratio = fewer(rounds, scratch, at_least=at_least)
    return f"Forgetting took {rounds:,} rounds, training again from scratch {scratch:,}: {ratio}"


def _draw_pair(axes: Axes, place: float, rounds: int, scratch: int | None, *, at_least: bool) -> None:
    height = 0.36
    upper = place + height / 2 if scratch is not None else place
    axes.barh(upper, rounds, height=height, color=BLUE, linewidth=0)
    text = f"{rounds:,}"
    if scratch is not None:
        text += f"   {fewer(rounds, scratch, at_least=at_least)}"
        axes.barh(place - height / 2, scratch, height=height, color=SCRATCH_COLOUR, linewidth=0)
        _beside(axes, scratch, place - height / 2, f"{scratch:,}" + (" (stopped, target not reached)" * at_least), GREY)
    _beside(axes, rounds, upper, text, INK, bold=True)


def _beside(axes: Axes, x: float, y: float, text: str, colour: str, *, bold: bool = False) -> None:
    axes.annotate(
        text,
        (x, y),
        xytext=(4, 0),
        textcoords="offset points",
        va="center",
        fontsize=8.5,
        color=colour,
        fontweight="bold" if bold else "normal",
        parse_math=False,
    )


def _legend(figure: Figure, done: tuple[Request, ...]) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=BLUE, label="as it was done")]
    if any(one.scratch_rounds is not None for one in done):
        handles.append(Patch(color=SCRATCH_COLOUR, label="training again from scratch"))
    figure.legend(handles=handles, loc="outside lower left", ncols=2, handlelength=1.2, columnspacing=1.8)
