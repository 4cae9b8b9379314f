"""Evaluation of the current model on held-out rows, or on the clients' training data."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from sifu.choices import MeasuredOn
from sifu.core.held_out_figures import TRAINING_DATA, HeldOutFigures
from sifu.core.spec import Spec
from sifu.errors import InputError
from sifu.run.closed_form_round import training_of
from sifu.run.run_engines import RunEngines
from sifu.run.run_view import RunView
from sifu.store.client_accuracy import read_held_out
from sifu.store.release_files import released_node
from sifu.store.writer import RunWriter


@dataclass(frozen=True)
class Evaluated:
    """Figures of the current model.

    Attributes:
        on: Kind of rows the model was evaluated on, "held-out" or "training".
        rows: Number of rows.
        accuracy: Accuracy of a classifier, or None for regression.
        mean_squared_error: Mean squared error of a regression in the target's squared unit, or None for classifiers.
        held_out: All figures on held-out rows, or None if the model was evaluated on training rows.
    """

    on: MeasuredOn
    rows: int
    accuracy: float | None
    mean_squared_error: float | None
    held_out: HeldOutFigures | None = None

    @property
    def words(self) -> str:
        """All figures in one line.

        >>> Evaluated("training", 900, 0.914, None).words
        "91.4 % on the active clients' training data (900 rows)"
        """
        if self.held_out is not None:
            return self.held_out.words
        figure = f"{100 * self.accuracy:.1f} %" if self.accuracy is not None else ""
        if self.mean_squared_error is not None:
            figure = f"mean squared error {self.mean_squared_error:.4g}"
        return f"{figure} {TRAINING_DATA} ({self.rows} rows)"

    def to_mapping(self) -> dict[str, Any]:
        """Return the figures as plain values."""
        return asdict(self)


def evaluate(writer: RunWriter, engines: RunEngines, on: MeasuredOn | None) -> Evaluated:
    """Evaluate the current model and record the figures (see `Run.evaluate`)."""
    if on not in (None, "training", "held-out"):
        raise InputError(f"a model is evaluated on training or held-out rows, found {on!r}")
    if released_node(writer) != writer.tip:
        raise InputError("the current head was not released, and only releases are evaluated: use sifu update first")
    if on != "training":
        if read_held_out(writer.folder, writer.tip) is None:
            engines.measure_held_out(writer)
        figures = read_held_out(writer.folder, writer.tip)
        if figures is not None:
            return Evaluated("held-out", figures.rows, figures.accuracy, figures.mean_squared_error, figures)
        if on == "held-out":
            raise InputError(
                "the run has no held-out rows, or their file cannot be read: evaluate it on training rows (--on "
                "training), or hold rows out when it is trained (data.held_out, data.test_file)"
            )
    regime = Spec.from_mapping(writer.spec).regime
    evaluation = training_of(engines.current(), writer, RunView(writer)).measure()
    rows = int(evaluation.samples.sum())
    if rows == 0:
        raise InputError("no client's data can be read, so nothing was evaluated")
    accuracy = evaluation.accuracy if regime.has_accuracy else None
    return Evaluated("training", rows, accuracy, regime.squared_error(evaluation.loss))
