"""Rounds a request took against the rounds of training again from scratch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sifu.plots.run_data import ReportData, Request
from sifu.plots.style import (
    BLUE,
    GREY,
    INK,
    counted,
    empty_figure,
    headline,
    new_figure,
    note,
    only_ticks,
    plain,
    styled,
    whole_numbers,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_ROWS = 30
TOTAL_BESIDE_UP_TO = 8  # with more requests the total gets its own scale
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
        return empty_figure(rounds_message(data), "no request has been carried out yet")
    shown, hidden = done[-MOST_ROWS:], len(done) - len(done[-MOST_ROWS:])
    lines = len(shown) + (1 if len(done) > 1 else 0)
    figure = new_figure(1.25 + lines * (0.52 if lines <= 12 else 0.38))
    if len(done) == 1:
        axes = total = figure.add_subplot()
    elif len(shown) <= TOTAL_BESIDE_UP_TO:
        axes, total = figure.subplots(2, 1, sharex=True, height_ratios=[len(shown), 1.25])
    else:
        axes, total = figure.subplots(2, 1, height_ratios=[len(shown), 1.6])
    for line, request in enumerate(shown):
        words = _comparison(request)
        _draw_pair(axes, -line, request.rounds, request.scratch_rounds, words, more=not request.scratch_reached)
    longest = max(max(request.rounds, request.scratch_rounds or 0) for request in shown)
    _finish(axes, [plain(request.request) for request in shown], longest, bold=False)
    if len(done) > 1:
        compared = data.compared
        rounds = sum(request.rounds for request in compared or done)
        scratch = sum(request.scratch_rounds or 0 for request in compared) if compared else None
        more = not all(request.scratch_reached for request in compared)
        ratio = fewer(rounds, scratch, at_least=more) if scratch is not None else ""
        _draw_pair(total, 0, rounds, scratch, ratio, more=more, many=True)
        words = "total" if not compared or len(compared) == len(done) else f"total of {len(compared):,}\ncompared"
        _finish(
            total, [words], max(longest if len(shown) <= TOTAL_BESIDE_UP_TO else 1, rounds, scratch or 0), bold=True
        )
        axes.tick_params(labelbottom=not axes.get_shared_x_axes().joined(axes, total))
    note = f" (the latest {len(shown)} above, all in the total)" if hidden else ""
    total.set_xlabel(f"Rounds{note}")
    _legend(figure, done)
    headline(figure, rounds_message(data))
    return figure


def _finish(axes: Axes, labels: list[str], longest: int, *, bold: bool) -> None:
    axes.set_yticks([-line for line in range(len(labels))], labels=labels)
    for text in axes.get_yticklabels():
        text.set(parse_math=False, color=INK, fontweight="bold" if bold else "normal")
    axes.set_ylim(-len(labels) + 0.4, 0.6)
    axes.set_xlim(0, 1.32 * max(longest, 1))
    whole_numbers(axes)
    only_ticks(axes, grid="x")
    axes.spines["left"].set_visible(False)


def rounds_message(data: ReportData) -> str:
    """What the bars show, in one sentence."""
    done, compared = data.done, data.compared
    if not done:
        return "Rounds spent on forgetting"
    if not compared:
        total = sum(request.rounds for request in done)
        if data.target <= 0:
            return f"Forgetting took {counted(total, 'round')}, a fixed number for each request: no target was set"
        return f"Forgetting took {counted(total, 'round')}; there is no training from scratch to compare with"
    rounds, scratch = (
        sum(request.rounds for request in compared),
        sum(request.scratch_rounds or 0 for request in compared),
    )
    at_least = not all(request.scratch_reached for request in compared)
    ratio = fewer(rounds, scratch, at_least=at_least)
    return f"Forgetting took {counted(rounds, 'round')}, from scratch it takes {scratch:,}: {ratio}"


def _comparison(request: Request) -> str:
    """How a request's rounds stand against Scratch's, where that says something."""
    if request.reached is False:
        return "target not reached"
    if not request.compared or request.scratch_rounds is None:
        return ""
    return fewer(request.rounds, request.scratch_rounds, at_least=not request.scratch_reached)


def _draw_pair(
    axes: Axes, place: float, rounds: int, scratch: int | None, words: str, *, more: bool, many: bool = False
) -> None:
    """`words` stand next to the upper bar; with `more`, Scratch would have needed even more rounds."""
    height = 0.36
    upper = place + height / 2 if scratch is not None else place
    axes.barh(upper, rounds, height=height, color=BLUE, linewidth=0)
    text = f"{rounds:,}   {words}".rstrip()
    if scratch is not None:
        axes.barh(place - height / 2, scratch, height=height, color=SCRATCH_COLOUR, linewidth=0)
        stopped = (" or more" if many else ", target not reached") if more else ""
        _beside(axes, scratch, place - height / 2, f"{scratch:,}{stopped}", GREY)
    _beside(axes, rounds, upper, text, INK, bold=True)


def _beside(axes: Axes, x: float, y: float, text: str, colour: str, *, bold: bool = False) -> None:
    weight = "bold" if bold else "normal"
    note(axes, text, (x, y), (4, 0), va="center", fontsize=8.5, color=colour, fontweight=weight)


def _legend(figure: Figure, done: tuple[Request, ...]) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=BLUE, label="as it was done")]
    if any(request.scratch_rounds is not None for request in done):
        handles.append(Patch(color=SCRATCH_COLOUR, label="training again from scratch"))
    figure.legend(handles=handles, loc="outside lower left", ncols=2, handlelength=1.2, columnspacing=1.8)
