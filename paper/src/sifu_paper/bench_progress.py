"""Progress of an experiment: a bar with the remaining time on a terminal, otherwise a line per finished trajectory."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from sifu.cli.output import ShownBar, duration, err

if TYPE_CHECKING:
    from sifu_paper.runner import Update


class BenchProgress(ShownBar):
    """Display of `Update`s from one or several threads."""

    def __init__(self, quiet: bool) -> None:
        self._quiet, self._terminal = quiet, err.is_terminal
        self._bar = Progress(
            TextColumn("{task.description:<44}"),
            BarColumn(bar_width=18),
            MofNCompleteColumn(),
            TextColumn("{task.fields[text]}"),
            TimeElapsedColumn(),
            console=err,
            transient=True,
            disable=quiet or not err.is_terminal,
        )
        self._task = self._bar.add_task("", total=None, text="")
        self._started, self._done_before = time.monotonic(), -1
        self._lock = threading.Lock()

    def __call__(self, update: Update) -> None:
        """Show the progress of the experiment."""
        with self._lock:
            if self._done_before < 0:
                self._done_before = 0 if update.finished else update.done
            if self._quiet:
                return
            left = self._time_left(update)
            if self._terminal:
                self._bar.update(
                    self._task,
                    description=update.task[:44],
                    completed=update.done,
                    total=update.total or None,
                    text=update.text + left,
                )
            if update.finished:
                line = f"{update.done}/{update.total} {update.task}: {update.text}"
                err.print(line if self._terminal else line + left, markup=False, soft_wrap=True)

    def say(self, sentence: str) -> None:
        """Print a sentence above the bar."""
        if not self._quiet:
            err.print(sentence, markup=False, soft_wrap=True)

    def _time_left(self, update: Update) -> str:
        """Estimate the remaining time from the requests done in this session."""
        done = update.done - self._done_before
        if done <= 0 or update.done >= update.total:
            return ""
        each = (time.monotonic() - self._started) / done
        return f", about {duration(each * (update.total - update.done))} left"
