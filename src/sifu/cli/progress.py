"""Progress with time left, on a terminal only."""

from __future__ import annotations

import math
import time
from types import TracebackType
from typing import Self

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from sifu.cli.output import err
from sifu.record.progress import expected_rounds


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


class RoundsProgress(ShownBar):
    """A bar for rounds until a target: how far, how fast, and about how long it still takes."""

    def __init__(self, quiet: bool) -> None:
        self._shown = err.is_terminal and not quiet
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
        if not self._shown:
            return
        phase, rounds = update.phase, update.rounds  # type: ignore[attr-defined]
        accuracy, target, most = update.accuracy, update.target, update.max_rounds  # type: ignore[attr-defined]
        if phase != self._phase or self._task is None:
            if self._task is not None:
                self._bar.remove_task(self._task)  # type: ignore[arg-type]
            self._task = self._bar.add_task(phase, total=most, text="")
            self._phase, self._seen, self._started = phase, [], time.monotonic()
        if not math.isnan(accuracy):
            self._seen.append((rounds, accuracy))
        total = expected_rounds(self._seen, rounds, target, most)
        speed = len(self._seen) and rounds / max(time.monotonic() - self._started, 1e-3)
        left = f", about {duration((total - rounds) / speed)} left" if speed and total > rounds else ""
        text = f"{update.unit} {rounds}"  # type: ignore[attr-defined]
        if target > 0 and not math.isnan(accuracy):
            text += f", {100 * accuracy:.1f} % of {100 * target:g} %"
        self._bar.update(self._task, completed=rounds, total=total, text=text + left)  # type: ignore[arg-type]


def duration(seconds: float) -> str:
    """Seconds in words a person reads."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
