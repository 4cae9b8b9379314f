"""How well a model does on rows that no client trained with."""

from __future__ import annotations

from dataclasses import dataclass

TRAINING_DATA = "on the active clients' training data"
"""What an accuracy without held-out rows is measured on."""


@dataclass(frozen=True)
class HeldOutFigures:
    """Figures on `rows` held-out rows of the clients that stay, or that belong to no client.

    Classification has `accuracy`; of tables also `auc` (of several classes the mean of one against the rest), `f1` (of
    several classes their mean) and, where the model gives probabilities, `calibration_error`. Regression has
    `mean_squared_error` in squares of the target's unit.
    """

    rows: int
    accuracy: float | None = None
    auc: float | None = None
    f1: float | None = None
    calibration_error: float | None = None
    mean_squared_error: float | None = None

    @property
    def where(self) -> str:
        """
        >>> HeldOutFigures(184).where
        'on 184 held-out rows'
        """
        return f"on {self.rows} held-out row{'' if self.rows == 1 else 's'}"

    @property
    def words(self) -> str:
        """
        >>> HeldOutFigures(184, 0.8204, 0.881, 0.8).words
        '82.0 % on 184 held-out rows (AUC 0.881, F1 0.800)'
        >>> HeldOutFigures(1, mean_squared_error=0.25).words
        'mean squared error 0.25 on 1 held-out row'
        """
        if self.accuracy is None:
            return f"mean squared error {self.mean_squared_error:.4g} {self.where}"
        return f"{100 * self.accuracy:.1f} % {self.where}" + (f" ({self.details})" if self.details else "")

    @property
    def details(self) -> str:
        """What there is besides the accuracy."""
        named = (("AUC", self.auc), ("F1", self.f1), ("calibration error", self.calibration_error))
        return ", ".join(f"{name} {value:.3f}" for name, value in named if value is not None)
