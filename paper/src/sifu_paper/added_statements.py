"""Questions of our own to the paper's experiments."""

from __future__ import annotations

from collections.abc import Sequence

from sifu_paper.comparisons import by_dataset, complete, fewer_by_dataset, mean_fewer, our_line, paper_line, titles
from sifu_paper.plots.courses import shape_words
from sifu_paper.plots.growing import Setting, settings_of
from sifu_paper.plots.speed import fewer_words
from sifu_paper.reading import courses_of
from sifu_paper.table import Row
from sifu_paper.verdict import Statement, Verdict


def share_of_the_control(rows: Sequence[Row]) -> tuple[float, float, list[str]] | None:
    """Rounds saved by SIFU and by a fresh model plus the same noise, on the data sets where both always got there."""
    sifu = complete(by_dataset(rows, paper_line("sifu", rows)))
    control = complete(by_dataset(rows, paper_line("noisy_scratch", rows)))
    both = [name for name in sifu if name in control]
    saved = mean_fewer({name: sifu[name] for name in both})
    by_scale = mean_fewer({name: control[name] for name in both})
    return None if saved is None or by_scale is None else (saved, by_scale, both)


def _share_of_the_control(rows: Sequence[Row]) -> Verdict | None:
    shares = share_of_the_control(rows)
    if shares is None:
        return None
    saved, by_scale, both = shares
    part = f", {100 * by_scale / saved:.0f} % of what SIFU saves" if saved > 0.0 < by_scale else ""
    return Verdict(
        f"a fresh model plus the same noise takes {fewer_words(by_scale)}{part}, where both always reached the target "
        f"({titles(both)}): {fewer_by_dataset(by_dataset(rows, paper_line('noisy_scratch', rows)))}",
        None,
        "this part is owed to a larger initial scale, not to the history",
    )


def _both_accountings(rows: Sequence[Row]) -> Verdict | None:
    ours = by_dataset(rows, our_line(rows))
    mean = mean_fewer(complete(ours))
    if mean is None:
        return None
    return Verdict(
        f"{fewer_words(mean)} on average: {fewer_by_dataset(ours)}",
        None,
        "honest weights make Psi about (M-1)/(m-1) times larger, so a request goes back further",
    )


def _scale_pays(rows: Sequence[Row]) -> Verdict | None:
    settings = settings_of(courses_of(rows))
    parts = []
    for requests, epsilon in dict.fromkeys((setting.requests, setting.epsilon) for setting in settings):
        here = [setting for setting in settings if (setting.requests, setting.epsilon) == (requests, epsilon)]
        each = ", ".join(_at_size(setting) for setting in here if setting.automatic)
        if each:
            parts.append(f"{shape_words(requests).lower()} at epsilon {epsilon}: {each}")
    if not parts:
        return None
    draws = {setting.automatic.runs for setting in settings if setting.automatic}
    counted = f"{min(draws)} to {max(draws)} draws" if len(draws) > 1 else f"{min(draws)} draw{'s' * (min(draws) > 1)}"
    return Verdict(
        f"sigma chosen automatically, {counted} of the noise for each: {'; '.join(parts)}",
        None,
        "Psi falls like 1/clients; the best sigma in hindsight is in the table of its section",
    )


def _at_size(setting: Setting) -> str:
    assert setting.automatic is not None
    return f"{setting.automatic.text()} ({setting.clients:,} clients)"


ADDED_STATEMENTS = (
    Statement(
        "how much of the gain does a larger initial scale explain?", "sequential", _share_of_the_control, ours=True
    ),
    Statement(
        "SIFU with honest weights, exact noise, all releases covered", "sequential", _both_accountings, ours=True
    ),
    Statement("where does certified unlearning pay?", "scale", _scale_pays, ours=True),
)
