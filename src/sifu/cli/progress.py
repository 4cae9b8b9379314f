"""Progress with time left: a bar on a terminal, and elsewhere a line from time to time."""

from __future__ import annotations

import math
import time
from types import TracebackType
from typing import Self

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from sifu.cli.output import err
from sifu.record.progress import expected_rounds
from sifu.report.metrics import MetricsLog


class ShownBar:
    """A bar that is shown while its block runs."""

    _bar: Progress

    def __enter__(self) -> Self:
        self._bar.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.__exit__(kind, error, trace)


LINE_EVERY = 30.0
"""Seconds between two lines where there is no terminal: long work is never silent."""


class RoundsProgress(ShownBar):
    """Rounds until a target: how far, how fast, and about how long it still takes; `metrics` are kept up to date."""

    def __init__(self, quiet: bool, metrics: MetricsLog | None = None) -> None:
        self._shown, self._metrics = err.is_terminal and not quiet, metrics
        self._told = time.monotonic()
        self._bar = Progress(
            TextColumn("{task.description:<16}"),
            BarColumn(bar_width=18),
            TextColumn("{task.fields[text]}"),
            TimeElapsedColumn(),
            console=err,
            transient=True,
            disable=not self._shown,
        )
        self._task: int | None = None
        self._phase = ""
        self._seen: list[tuple[int, float]] = []
        self._started = 0.0

    def __call__(self, update: object) -> None:
        """Takes a `sifu.record.training.Progress`."""
        if self._metrics is not None:
            self._metrics.update()
        phase, rounds = update.phase, update.rounds  # type: ignore[attr-defined]
        accuracy, target, most = update.accuracy, update.target, update.max_rounds  # type: ignore[attr-defined]
        if phase != self._phase:
            if self._task is not None:
                self._bar.remove_task(self._task)  # type: ignore[arg-type]
            self._task = self._bar.add_task(phase, total=most, text="") if self._shown else None
            self._phase, self._seen, self._started = phase, [], time.monotonic()
        if not math.isnan(accuracy):
            self._seen.append((rounds, accuracy))
        total = expected_rounds(self._seen, rounds, target, most)
        speed = len(self._seen) and rounds / max(time.monotonic() - self._started, 1e-3)
        left = f", about {duration((total - rounds) / speed)} left" if speed and total > rounds else ""
        text = f"{update.unit} {rounds}"  # type: ignore[attr-defined]
        if target > 0 and not math.isnan(accuracy):
            text += f", {100 * accuracy:.1f} % of {100 * target:g} %"
        if self._shown:
            self._bar.update(self._task, completed=rounds, total=total, text=text + left)  # type: ignore[arg-type]
        elif time.monotonic() - self._told >= LINE_EVERY:
            self._told = time.monotonic()
            err.print(f"{phase}: {text}{left}", markup=False, highlight=False, soft_wrap=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        if self._metrics is not None:
            self._metrics.update(now=True)


def duration(seconds: float) -> str:
    """Seconds in words a person reads."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
