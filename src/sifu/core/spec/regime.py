"""Regimes of training: in rounds, or in closed form.

A spec has exactly one regime (`Spec.regime`). The regime answers every question that depends on the kind of training
and on the spec alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar, Literal

from sifu.core.spec.sections import RIDGE, RidgeSpec, Sections
from sifu.errors import InputError

Demand = tuple[str, bool, str]
"""Condition on a key of the spec: the key's name, whether its value is valid, and a description of valid values."""

CROSS_VALIDATED = 4096
"""Largest number of features for which `auto` chooses the penalty by cross-validation."""
WIDE_PENALTY = 0.01
"""Relative penalty of wider heads, a good value for deep features of images."""


class Regime:
    """Kind of training: in rounds of FedAvg, perhaps of groups first; a subclass overrides the differences."""

    exact_method: ClassVar[str] = "scratch"
    """Name of the method that can execute every request; `auto` always considers it."""
    solves: ClassVar[bool] = False
    """True if clients send statistics from which the model is solved.

    The record then holds no figures of rounds such as drifts and Psi, stored statistics may replace clients' data, and
    a request cannot end with an unfinished model.
    """

    def __init__(self, spec: Sections) -> None:
        self.spec = spec

    def demands(self) -> Iterator[Demand]:
        """Yield the conditions on the keys of a spec in this regime."""
        yield from ()

    @property
    def has_accuracy(self) -> bool:
        """True for classification, whose predictions are right or wrong; a regression has only errors."""
        return self.spec.model.kind != "least_squares"

    @property
    def squared_error_per_loss(self) -> float | None:
        """Factor that converts a mean loss into the mean squared error of raw targets, or None for classification."""
        return None if self.has_accuracy else 2.0 / max(1, self.spec.model.outputs)

    def squared_error(self, loss: float | None) -> float | None:
        """Return the mean squared error for a mean loss, or None for classification."""
        factor = self.squared_error_per_loss
        return None if factor is None or loss is None else factor * loss

    @property
    def penalty(self) -> float | None:
        """Relative penalty r of a head, or None if the spec does not fix it."""
        return None

    @property
    def maps_samples(self) -> bool:
        """True if a feature map is applied to samples before the model; this is always so for a closed-form head."""
        return self.solves or self.spec.features.kind != "none"

    @property
    def maps_before_training(self) -> bool:
        """True if features are computed before the engine receives the clients; engines of heads compute their own."""
        return self.maps_samples and not self.solves

    def settled(self, keep: Literal["clients", "sum"] = "clients", features: int = 0) -> dict[str, Any]:
        """Return the sections of the spec with the settings that the engine determines.

        Args:
            keep: Statistics to keep if the spec says `auto`.
            features: Number of features of a head in closed form.

        Returns:
            The changed sections of the spec, by name.
        """
        return {}

    def check_method(self, name: str) -> None:
        """Refuse a method that does not apply to runs of this regime."""
        if name == ClosedForm.exact_method:
            raise InputError(
                f"method {name} is for runs with model.kind = {RIDGE!r}; this one has {self.spec.model.kind!r}. Use "
                "sifu or scratch"
            )

    def check_joining(self) -> None:
        """Refuse to add clients unless the model is a closed-form head, which adds their statistics to its sum."""
        if not self.solves:
            raise InputError(
                f"sifu join needs a head in closed form (model.kind = {RIDGE!r}); this run has "
                f"{self.spec.model.kind!r}. On Flower clients join while the server runs"
            )


class ClosedForm(Regime):
    """Regime in which a head is solved from the sum of the clients' statistics."""

    exact_method = "closed_form"
    solves = True

    def demands(self) -> Iterator[Demand]:
        """Yield the conditions on the head, and the required values of settings that only rounds use."""
        ridge, server, kind = self.spec.ridge, self.spec.server, self.spec.model.kind
        r = ridge.regularisation
        yield "ridge.regularisation", r == "auto" or 1e-12 <= r <= 1e6, "in 1e-12 to 1e6, or auto"
        yield "ridge.scale", 0 < ridge.scale <= 1e12, "in (0, 1e12]"
        yield "ridge.shift", abs(ridge.shift) <= 1e12, "at most 1e12 in size"
        yield "ridge.shift", ridge.task != "multi_label" or 0 <= ridge.shift <= 1, "in 0 to 1 for multi_label"
        yield "server.participation", server.participation == "all", f"all with model.kind = {kind!r}"
        yield "model.dtype", self.spec.model.dtype == "float64", f"float64 with model.kind = {kind!r}"

    @property
    def has_accuracy(self) -> bool:
        """True unless the head is a regression."""
        return self.spec.ridge.task != "regression"

    @property
    def squared_error_per_loss(self) -> float | None:
        """Factor that converts a mean loss, of targets divided by their scale, into the mean squared error."""
        return None if self.has_accuracy else self.spec.ridge.scale**2 / max(1, self.spec.model.outputs)

    @property
    def penalty(self) -> float | None:
        """Relative penalty r in the spec, or None for cross-validation."""
        return None if self.spec.ridge.regularisation == "auto" else self.spec.ridge.regularisation

    def settled(self, keep: Literal["clients", "sum"] = "clients", features: int = 0) -> dict[str, Any]:
        """Return the sections with one round (the solve), the kept statistics, and the fixed penalty of a wide head."""
        ridge, penalty = self.spec.ridge, penalty_of(self.spec.ridge, features)
        stop = replace(self.spec.stop, target=0.0, min_rounds=1, max_rounds=1, evaluate_every=1)
        kept = keep if self.spec.keep.statistics == "auto" else self.spec.keep.statistics
        if self.spec.release.noise != 0.0 and kept == "sum":
            raise InputError(
                "release.noise needs the statistics of each client, and this engine keeps only their sum: set "
                'keep.statistics = "clients"'
            )
        settled_ridge = ridge if penalty is None else replace(ridge, regularisation=penalty)
        return {"stop": stop, "keep": replace(self.spec.keep, statistics=kept), "ridge": settled_ridge}

    def check_method(self, name: str) -> None:
        """Refuse methods for models that are trained in rounds."""
        if name != self.exact_method:
            raise InputError(
                f"method {name} needs a model trained in rounds, and this run solves a ridge head in closed form: use "
                f"method {self.exact_method}, which is exact and takes no rounds or one"
            )


def penalty_of(ridge: RidgeSpec, features: int) -> float | None:
    """Return the relative penalty r of a head on `features` features, or None if cross-validation chooses it.

    Cross-validation reduces G to tridiagonal form in every request, which takes minutes for 8,000 features. Wide heads
    have a fixed penalty instead.

    >>> penalty_of(RidgeSpec(), 2048), penalty_of(RidgeSpec(), 8384), penalty_of(RidgeSpec(regularisation=0.1), 8384)
    (None, 0.01, 0.1)
    """
    if ridge.regularisation != "auto":
        return ridge.regularisation
    return WIDE_PENALTY if features > CROSS_VALIDATED else None


def regime_of(spec: Sections) -> Regime:
    """Return the regime of a spec."""
    return ClosedForm(spec) if spec.model.kind == RIDGE else Regime(spec)
