"""What the paper says, what was measured here, whether it is the same, and why.

Each statement is a sentence of the paper (or ours) and a function from the tables to a verdict; a statement whose
experiment was not run says so.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from sifu.experiments.reading import courses_of, datasets_of, title_of
from sifu.experiments.summary import largest_ratio
from sifu.experiments.table import Row
from sifu.plots.courses import Course, Line, fewer_than_scratch, gains_by_clients, scratch_beside, shape_words

Tables = Mapping[str, Sequence[Row]]
PAPER_SIFU, OUR_SIFU = Line("sifu", "paper"), Line("sifu", "ours")
HARDER = ("cifar10", "cifar100")
CONVEX = ("mnist", "digits")
CONTROL = Line("noisy_scratch", "paper")
NOT_COMPARED = ("fine_tuning", "noisy_scratch")
"""Fine-Tuning does not forget; Noisy Scratch is our control and not in the paper's comparison."""
NEAR = 0.10
"""Two accuracies, or two shares of rounds, that differ by at most this are called alike."""


@dataclass(frozen=True)
class Verdict:
    """What was measured; `same` is None where there is nothing to compare with."""

    measured: str
    same: bool | None
    why: str = ""

    @property
    def word(self) -> str:
        """Same or not, as it stands in the table."""
        return "-" if self.same is None else "same" if self.same else "not the same"


@dataclass(frozen=True)
class Statement:
    """A sentence, the experiment it is checked with, and how."""

    says: str
    experiment: str
    check: Callable[[Sequence[Row]], Verdict | None]
    ours: bool = False


def verdicts(tables: Tables, statements: Sequence[Statement] | None = None) -> list[tuple[Statement, Verdict]]:
    """Every statement (of the paper's, if none are given) with what the tables say about it."""
    result = []
    for statement in STATEMENTS if statements is None else statements:
        rows = tables.get(statement.experiment)
        verdict = statement.check(rows) if rows else None
        result.append((statement, verdict or Verdict(f"not measured: run sifu bench run {statement.experiment}", None)))
    return result


def _against_scratch(rows: Sequence[Row], line: Line) -> dict[str, float]:
    return fewer_than_scratch(courses_of(rows), lambda course: course.line == line)


def _per_dataset(values: Mapping[str, float], text: Callable[[float], str]) -> str:
    return ", ".join(f"{title_of(name)} {text(value)}" for name, value in values.items())


def _change(ratio: float) -> str:
    percents = round(100 * (ratio - 1.0))
    return f"{percents:+d} %"


def _sifu_halves(rows: Sequence[Row]) -> Verdict | None:
    ratios = _against_scratch(rows, PAPER_SIFU)
    if not ratios:
        return None
    mean = statistics.fmean(ratios.values())
    same = 0.35 <= mean <= 0.65
    why = "" if same else "see the size of the noise and the share of Noisy Scratch below"
    runs = [course for course in courses_of(rows) if course.line == PAPER_SIFU]
    missed = [course for course in runs if not course.reached]
    if missed and not same:
        where = sorted({title_of(course.first["dataset"]) for course in missed})
        why = (
            f"{len(missed)} of {len(runs)} runs ({', '.join(where)}) missed the target after the paper's noise and "
            f"count with the limit of rounds; {_where_all_reached(rows, ratios)}{why}"
        )
    return Verdict(f"{_change(mean)} rounds on average ({_per_dataset(ratios, _change)})", same, why)


def _always_reached(rows: Sequence[Row], *lines: Line) -> list[str]:
    """Data sets on which no run of these lines missed its target."""
    runs = [course for course in courses_of(rows) if course.line in lines]
    missed = {course.first["dataset"] for course in runs if not course.reached}
    return [
        name
        for name in datasets_of(rows)
        if name not in missed and any(course.first["dataset"] == name for course in runs)
    ]


def _where_all_reached(rows: Sequence[Row], ratios: Mapping[str, float]) -> str:
    names = [name for name in _always_reached(rows, PAPER_SIFU) if name in ratios]
    if not names:
        return ""
    mean = statistics.fmean(ratios[name] for name in names)
    return f"{_change(mean)} on the data sets where none did ({', '.join(map(title_of, names))}); "


def _eraser_costs_more(rows: Sequence[Row]) -> Verdict | None:
    ratios = _against_scratch(rows, Line("fed_eraser", "paper"))
    if not ratios:
        return None
    mean = statistics.fmean(ratios.values())
    why = "" if mean > 1.0 else "the paper does not state the interval between kept rounds; see updates_every"
    return Verdict(f"{_change(mean)} rounds, calibration counted ({_per_dataset(ratios, _change)})", mean > 1.0, why)


def _do_not_forget(rows: Sequence[Row]) -> Verdict | None:
    gaps = {name: gap for name in ("fine_tuning", "fed_accum") if (gap := _forget_gap(rows, name)) is not None}
    if not gaps:
        return None
    shown = ", ".join(
        f"{'Fine-Tuning' if name == 'fine_tuning' else 'FedAccum'} {100 * gap:+.0f} points"
        for name, gap in gaps.items()
    )
    same = all(gap > NEAR for gap in gaps.values())
    why = "" if same else _forgetting_accum(rows)
    return Verdict(f"accuracy on the forgotten less Scratch's: {shown}", same, why)


def _forgetting_accum(rows: Sequence[Row]) -> str:
    """Runs that miss the target do worse on everyone: is that why FedAccum seems to forget?"""
    runs = [course for course in courses_of(rows) if course.first["method"] == "fed_accum"]
    good = [course for course in runs if course.reached]
    gap = _forget_gap(rows, "fed_accum", only_reached=True)
    if gap is None:
        return "a model that misses the target does worse on everyone, the forgotten included"
    return f"FedAccum reached the target in {len(good)} of {len(runs)} runs; in these alone {100 * gap:+.0f} points"


def _forget_gap(rows: Sequence[Row], method: str, *, only_reached: bool = False) -> float | None:
    courses = courses_of(rows)
    beside = scratch_beside(courses)
    gaps = []
    for course in courses:
        scratch = beside(course) if course.first["method"] == method else None
        if only_reached and not course.reached:
            continue
        if scratch is not None and course.forgotten is not None and scratch.forgotten is not None:
            gaps.append(course.forgotten - scratch.forgotten)
    return statistics.fmean(gaps) if gaps else None


def _fail_on_harder(rows: Sequence[Row]) -> Verdict | None:
    parts, failed, missing = [], [], []
    for method, name in (("last", "Last"), ("dp", "DP")):
        courses = [
            course
            for course in courses_of(rows)
            if course.line == Line(method, "paper") and course.first["dataset"] in HARDER
        ]
        if courses:
            missed = sum(not course.reached for course in courses)
            where = [title_of(dataset) for dataset in HARDER if any(run.first["dataset"] == dataset for run in courses)]
            parts.append(f"{name} missed the target in {missed} of {len(courses)} runs on {', '.join(where)}")
            failed.append(2 * missed >= len(courses))
        else:
            missing.append(name)
    if not parts:
        return None
    return Verdict("; ".join(parts) + "".join(f"; {name} not measured there" for name in missing), all(failed))


def _sigma_ends(rows: Sequence[Row]) -> Verdict | None:
    courses = courses_of(rows)
    beside = scratch_beside(courses)
    low, high = [], []
    for course in courses:
        if course.line != PAPER_SIFU or "sigma_factor" not in course.variant:
            continue
        factors = [float(other.variant["sigma_factor"]) for other in courses if "sigma_factor" in other.variant]
        factor, scratch, last = float(course.variant["sigma_factor"]), beside(course), _last_beside(courses, course)
        if factor == min(factors) and scratch is not None:
            low.append(course.total / max(scratch.total, 1))
        if factor == max(factors) and last is not None:
            # A request that diverged has no node; two that diverged have ended alike.
            high.append(course.rows[0]["node"] == last.rows[0]["node"])
    if not low:
        return None
    text = f"lowest sigma: {_change(statistics.fmean(low))} rounds against Scratch"
    same = abs(statistics.fmean(low) - 1.0) <= NEAR
    if high:
        text += f"; highest sigma: the same model as Last, or diverged like it, in {sum(high)} of {len(high)} runs"
        same = same and 2 * sum(high) >= len(high)
    return Verdict(text, same)


def _last_beside(courses: Sequence[Course], course: Course) -> Course | None:
    for other in courses:
        place = [other.first[key] == course.first[key] for key in ("dataset", "seed", "preset")]
        if other.first["method"] == "last" and all(place):
            return other
    return None


def _times(ratio: float) -> str:
    """A ratio as people write it.

    >>> _times(1572.3), _times(1.234)
    ('1,572', '1.2')
    """
    return f"{ratio:,.0f}" if ratio >= 10.0 else f"{ratio:.1f}"


def _bound_holds(accounting: str) -> Callable[[Sequence[Row]], Verdict | None]:
    def check(rows: Sequence[Row]) -> Verdict | None:
        measured = [row for row in rows if row["distance"] and row[accounting]]
        if not measured:
            return None
        broken = sum(row["distance"] > row[accounting] for row in measured)
        text = (
            f"alpha above Psi in {broken:,} of {len(measured):,} measurements with alpha > 0, at most "
            f"{_times(largest_ratio(measured, accounting))} times Psi ({len(datasets_of(measured))} data sets)"
        )
        why = ""
        if broken:
            why = (
                "a client's share of the whole federation is used although only some clients were averaged"
                if accounting == "psi_population"
                else "B = 1 is an assumption: with momentum, or rates above 2/beta, a round may expand distances"
            )
        return Verdict(text, broken == 0, why)

    return check


def _best_on_networks(rows: Sequence[Row]) -> Verdict | None:
    """Figure 2: on each network, does anything else that reaches the target and forgets the mark take fewer rounds?"""
    beaten, by_control, compared = [], [], []
    courses = courses_of(rows)
    for dataset in (name for name in datasets_of(rows) if name not in CONVEX):
        lines = dict.fromkeys(course.line for course in courses if course.first["dataset"] == dataset)
        ratios = {line: ratio for line in lines if (ratio := _mean_ratio(courses, dataset, line)) is not None}
        if PAPER_SIFU not in lines:
            continue
        compared.append(dataset)
        own = ratios.get(PAPER_SIFU)
        quicker = [line for line, ratio in ratios.items() if own is None or ratio < own]
        rivals = [line.label for line in quicker if line.preset == "paper" and line.method not in NOT_COMPARED]
        if rivals:
            beaten.append(f"{title_of(dataset)} ({', '.join(rivals)})")
        if CONTROL in quicker:
            by_control.append(title_of(dataset))
    if not compared:
        return None
    text = f"fewest rounds of all that forget on {len(compared) - len(beaten)} of {len(compared)} networks"
    why = f"Noisy Scratch, which the paper does not have, is quicker on {', '.join(by_control)}" if by_control else ""
    return Verdict(text + (f"; quicker: {'; '.join(beaten)}" if beaten else ""), not beaten, why)


def _mean_ratio(courses: Sequence[Course], dataset: str, line: Line) -> float | None:
    """Rounds against Scratch, or None where a run missed the target."""
    here = [course for course in courses if course.first["dataset"] == dataset]
    if not all(course.reached for course in here if course.line == line):
        return None
    return fewer_than_scratch(here, lambda course: course.line == line).get(dataset)


def _trade_off(rows: Sequence[Row]) -> Verdict | None:
    """Figure 1: among the methods that forget, is SIFU nearest to a full retraining on the remaining clients?"""
    courses = courses_of(rows)
    beside = scratch_beside(courses)
    parts, best = [], []
    for dataset in (name for name in datasets_of(rows) if name not in CONVEX):
        gaps: dict[Line, list[tuple[float, float] | None]] = {}
        for course in courses:
            full = beside(course)
            if "limit" not in course.variant or course.first["dataset"] != dataset or course.line.preset != "paper":
                continue
            after, forgot = course.first["accuracy_retain_after"], course.first["accuracy_forget_after"]
            if full is not None:
                diverged = after is None or forgot is None
                gap = (
                    None
                    if diverged
                    else (
                        full.first["accuracy_retain_after"] - after,
                        forgot - full.first["accuracy_forget_after"],
                    )
                )
                gaps.setdefault(course.line, []).append(gap)
        own = [gap for gap in gaps.get(PAPER_SIFU, ()) if gap is not None]
        if not own:
            continue
        # A method that diverges with some seeds cannot be compared by the others alone: it has no accuracy there.
        rivals = {
            line: statistics.fmean(gap[0] for gap in by_seed if gap)
            for line, by_seed in gaps.items()
            if line not in (CONTROL, PAPER_SIFU)
            and None not in by_seed
            and statistics.fmean(gap[1] for gap in by_seed if gap) <= NEAR
        }
        below, runs = statistics.fmean(gap for gap, _ in own), len(gaps[PAPER_SIFU])
        text = f"{title_of(dataset)}: SIFU {100 * below:.0f} points below"
        if len(own) < runs:
            text += f" in {len(own)} of {runs} runs, diverged in the others"
        if rivals:
            nearest = min(rivals, key=lambda line: rivals[line])
            text += f", nearest of the others {nearest.label} {100 * rivals[nearest]:.0f}"
        forgets = statistics.fmean(forgot for _, forgot in own) <= NEAR
        best.append(len(own) == runs and forgets and all(below < gap for gap in rivals.values()))
        parts.append(text)
    if not parts:
        return None
    return Verdict(
        f"remaining clients, mean over the limits, {'; '.join(parts)}", all(best), "" if all(best) else "see its figure"
    )


def _share_of_the_control(rows: Sequence[Row]) -> Verdict | None:
    control, sifu = _against_scratch(rows, CONTROL), _against_scratch(rows, PAPER_SIFU)
    both = [name for name in control if name in sifu]
    if not both:
        return None
    saved = statistics.fmean(1.0 - sifu[name] for name in both)
    by_scale = statistics.fmean(1.0 - control[name] for name in both)
    share = f", {100 * by_scale / saved:.0f} % of what SIFU saves" if saved > 0.0 else ""
    sure = [name for name in _always_reached(rows, PAPER_SIFU, CONTROL) if name in both]
    sure_saved = sum(1.0 - sifu[name] for name in sure)
    sure_share = ""
    if len(sure) < len(both) and sure_saved > 0.0:
        part = sum(1.0 - control[name] for name in sure) / sure_saved
        sure_share = f"; {100 * part:.0f} % where both always reached the target ({', '.join(map(title_of, sure))})"
    return Verdict(
        f"a fresh model plus the same noise takes {_change(1.0 - by_scale)} rounds{share} "
        f"({_per_dataset({name: control[name] for name in both}, _change)}){sure_share}",
        None,
        "this part is owed to a larger initial scale, not to the history",
    )


def _both_accountings(rows: Sequence[Row]) -> Verdict | None:
    ours = _against_scratch(rows, OUR_SIFU)
    if not ours:
        return None
    mean = statistics.fmean(ours.values())
    return Verdict(
        f"{_change(mean)} rounds on average ({_per_dataset(ours, _change)})",
        None,
        "honest weights make Psi about (M-1)/(m-1) times larger, so a request goes back further",
    )


def _scale_pays(rows: Sequence[Row]) -> Verdict | None:
    courses = courses_of(rows)
    beside = scratch_beside(courses)
    sifu = [course for course in courses if course.first["method"] == "sifu"]
    parts = []
    settings = sorted(
        {(course.variant["requests"], course.variant["epsilon"]) for course in sifu},
        key=lambda setting: (setting[0], float(setting[1])),
    )
    for shape, epsilon in settings:
        here = [
            course for course in sifu if (course.variant["requests"], course.variant["epsilon"]) == (shape, epsilon)
        ]
        gains = gains_by_clients(here, beside, auto=False)
        if gains:
            each = ", ".join(f"{gains[clients][0]:.3g} ({clients:,} clients)" for clients in sorted(gains))
            parts.append(f"{shape_words(shape).lower()} at epsilon {epsilon}, times fewer rounds: {each}")
    if not parts:
        return None
    levels = sorted({row["level"] for course in sifu for row in course.rows})
    seeds = len({course.first["seed"] for course in sifu})
    basis = f"; at the best sigma tried, {seeds} seed{'s' if seeds > 1 else ''}; level {', '.join(levels)}"
    return Verdict("; ".join(parts) + basis, None, "Psi falls like 1/clients")


STATEMENTS = (
    Statement("SIFU takes 52 % fewer rounds than Scratch on average", "sequential", _sifu_halves),
    Statement("FedEraser takes 12 % more rounds than Scratch on average", "sequential", _eraser_costs_more),
    Statement("Fine-Tuning and FedAccum do not forget", "sequential", _do_not_forget),
    Statement("DP and Last do not reach the target on the harder data sets", "sequential", _fail_on_harder),
    Statement(
        "in limited time SIFU alone keeps accuracy on the rest and forgets, on every network",
        "time-limited",
        _trade_off,
    ),
    Statement("with watermarks SIFU outperforms every other method on every network", "watermark", _best_on_networks),
    Statement("with low sigma SIFU is Scratch, with high sigma it is Last", "sigma", _sigma_ends),
    Statement(
        "Psi >= alpha with B = 1 (population weights, as in the authors' code)",
        "psi-alpha",
        _bound_holds("psi_population"),
    ),
    Statement("Psi >= alpha with B = 1 (weights of the round)", "psi-alpha", _bound_holds("psi_round")),
    Statement(
        "how much of the gain does a larger initial scale explain?", "sequential", _share_of_the_control, ours=True
    ),
    Statement(
        "SIFU with honest weights, exact noise, all releases covered", "sequential", _both_accountings, ours=True
    ),
    Statement("where does certified unlearning pay?", "scale", _scale_pays, ours=True),
)
"""The paper's statements first, then what we add."""
