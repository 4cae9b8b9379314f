"""The curve of a plan: what each noise would do, predicted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from sifu.plots.style import BLUE, GREY, ORANGE, VERMILLION, headline, new_figure, only_ticks, say_instead, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class NoiseOption(Protocol):
    """What one noise would do."""

    @property
    def noise_std(self) -> float: ...
    @property
    def rounds(self) -> int: ...
    @property
    def predicted_rounds(self) -> int | None: ...
    @property
    def predicted_interval(self) -> tuple[int, int] | None: ...


class PlanCurve(Protocol):
    """What the figure needs of a plan."""

    @property
    def noise_std(self) -> float: ...
    @property
    def source_rounds(self) -> int: ...
    @property
    def predicted_rounds(self) -> int | None: ...
    @property
    def scratch_rounds(self) -> int | None: ...
    @property
    def options(self) -> Sequence[NoiseOption]: ...


def plan_message(plan: PlanCurve) -> str:
    """The plan in a sentence."""
    if plan.predicted_rounds is None or plan.scratch_rounds is None:
        return "No prediction: the first training did not reach its target."
    noise = f"sigma {plan.noise_std:.3g} at round {plan.source_rounds}" if plan.noise_std else "No noise"
    return f"{noise}: perhaps {plan.predicted_rounds} rounds, Scratch {plan.scratch_rounds}."


@styled
def draw_plan(plan: PlanCurve) -> Figure:
    """Predicted rounds against sigma with their interval, Scratch, and the node each sigma goes back to."""
    shown = [option for option in plan.options if option.noise_std > 0.0 and option.predicted_rounds is not None]
    figure = new_figure(3.4)
    headline(figure, plan_message(plan))
    if len(shown) < 2:
        return say_instead(figure, "Nothing to show: fewer than two noises could be predicted.")
    axes = figure.add_subplot()
    sigmas = [option.noise_std for option in shown]
    intervals = [option.predicted_interval or (option.predicted_rounds or 0,) * 2 for option in shown]
    axes.fill_between(
        sigmas, [low for low, _ in intervals], [high for _, high in intervals], color=BLUE, alpha=0.15, lw=0
    )
    axes.plot(
        sigmas, [option.predicted_rounds or 0 for option in shown], "o-", color=BLUE, ms=3.5, label="predicted rounds"
    )
    axes.plot(sigmas, [option.rounds for option in shown], ".:", color=ORANGE, label="round it goes back to")
    if plan.scratch_rounds is not None:
        axes.axhline(plan.scratch_rounds, color=GREY, ls="--", lw=1, label="Scratch")
    if plan.noise_std > 0.0 and plan.predicted_rounds is not None:
        axes.plot([plan.noise_std], [plan.predicted_rounds], "*", color=VERMILLION, ms=13, label="this plan")
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.set(xlabel="noise sigma", ylabel="rounds")
    only_ticks(axes, grid="y")
    axes.legend()
    return figure
