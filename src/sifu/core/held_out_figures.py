"""Figures of a model on held-out rows, which no client trained on."""

from __future__ import annotations

from dataclasses import dataclass

TRAINING_DATA = "on the active clients' training data"
"""Data that accuracy is measured on if there are no held-out rows."""


def missed_target_words(accuracy: float | None, target: float) -> str:
    """Return a warning if training stopped at max_rounds below its target, else an empty string."""
    if target <= 0 or accuracy is None or accuracy >= target:
        return ""
    return (
        f"Training stopped at its limit of rounds: the target of {100 * target:.1f} % {TRAINING_DATA} was not reached."
    )


@dataclass(frozen=True)
class HeldOutFigures:
    """Figures of a model on `rows` held-out rows, which belong to remaining clients or to no client.

    Attributes:
        rows: Number of rows.
        accuracy: Accuracy of a classification.
        auc: AUC on a table. With more than two classes, it is the mean of the one-against-rest AUCs.
        f1: F1 score on a table. With more than two classes, it is the mean over the classes.
        calibration_error: Calibration error on a table, if the model gives probabilities.
        mean_squared_error: Mean squared error of a regression, in the squared unit of the target.
        r2: Share of the target's variance on these rows that a regression explains.
        positive: Class that AUC and F1 refer to if there are two classes, or "" if they are means over classes.
    """

    rows: int
    accuracy: float | None = None
    auc: float | None = None
    f1: float | None = None
    calibration_error: float | None = None
    mean_squared_error: float | None = None
    r2: float | None = None
    positive: str = ""

    @property
    def where(self) -> str:
        """Phrase for the rows that the figures were measured on.

        >>> HeldOutFigures(184).where
        'on 184 held-out rows'
        """
        return f"on {self.rows} held-out row{'' if self.rows == 1 else 's'}"

    @property
    def words(self) -> str:
        """All figures in one line.

        >>> HeldOutFigures(184, 0.8204, 0.881, 0.8, positive="ill").words
        "82.0 % on 184 held-out rows (AUC and F1 of class 'ill' 0.881 and 0.800)"
        >>> HeldOutFigures(64, mean_squared_error=0.25, r2=0.9).words
        'R2 0.900, mean squared error 0.25 on 64 held-out rows'
        """
        if self.accuracy is None:
            explained = "" if self.r2 is None else f"R2 {self.r2:.3f}, "
            return f"{explained}mean squared error {self.mean_squared_error:.4g} {self.where}"
        return f"{100 * self.accuracy:.1f} % {self.where}" + (f" ({self.details})" if self.details else "")

    @property
    def details(self) -> str:
        """Figures besides the accuracy, with the class or the averaging that they refer to.

        >>> HeldOutFigures(184, 0.8204, 0.881, 0.8, 0.02).details
        'AUC and F1 as means over classes 0.881 and 0.800, calibration error 0.020'
        """
        pairs = {name: value for name, value in (("AUC", self.auc), ("F1", self.f1)) if value is not None}
        of = f"of class {self.positive!r}" if self.positive else "as means over classes"
        parts = []
        if pairs:
            parts.append(f"{' and '.join(pairs)} {of} {' and '.join(f'{value:.3f}' for value in pairs.values())}")
        if self.calibration_error is not None:
            parts.append(f"calibration error {self.calibration_error:.3f}")
        return ", ".join(parts)
