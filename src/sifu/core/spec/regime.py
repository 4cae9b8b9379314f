"""Regimes of training: in rounds, in groups first, in closed form, or in closed form on tuned networks.

A spec has exactly one regime (`Spec.regime`). It answers every question whose answer depends on the kind of training
and follows from the spec alone. What needs the record of a run or its engine is in `sifu.run.regimes`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Protocol, TypeVar

from sifu.core.spec.sections import (
    NETWORK_FEATURES,
    RIDGE,
    DataSpec,
    FeaturesSpec,
    GroupsSpec,
    KeepSpec,
    LocalSpec,
    ModelSpec,
    ReleaseSpec,
    RidgeSpec,
    ServerSpec,
    StopSpec,
)
from sifu.errors import InputError

Demand = tuple[str, bool, str]
"""A key, whether its value holds, and what it must be."""
Found = TypeVar("Found")


class Sections(Protocol):
    """The sections of a spec that a regime looks at."""

    @property
    def data(self) -> DataSpec: ...
    @property
    def model(self) -> ModelSpec: ...
    @property
    def features(self) -> FeaturesSpec: ...
    @property
    def ridge(self) -> RidgeSpec: ...
    @property
    def local(self) -> LocalSpec: ...
    @property
    def server(self) -> ServerSpec: ...
    @property
    def stop(self) -> StopSpec: ...
    @property
    def groups(self) -> GroupsSpec: ...
    @property
    def keep(self) -> KeepSpec: ...
    @property
    def release(self) -> ReleaseSpec: ...


@dataclass(frozen=True)
class SentSettings:
    """The settings that clients on other machines need, besides those of local training and of the model."""

    rate: float
    features: FeaturesSpec | None = None
    ridge: RidgeSpec | None = None
    groups: int = 0
    stretch: float = 1.0


class Regime:
    """One kind of training; its answers are those of training in rounds, and others extend it."""

    name: ClassVar[str]
    exact_method: ClassVar[str] = "scratch"
    """The method that can execute every request, and is always compared by `auto`."""
    solves: ClassVar[bool] = False
    """Whether clients send statistics, of which a model is solved."""
    tunes: ClassVar[bool] = False
    """Whether groups tune the network that features go through (docs/theory.md, section 15.5)."""
    draws_noise: ClassVar[bool] = True
    """Whether the record may hold noise, so that seeded noise makes the run an experiment."""
    needs_data: ClassVar[bool] = True
    """Whether clients' data are needed to go on, even where their statistics are kept."""
    device_bound: ClassVar[bool] = True
    """Whether a run stays on the kind of device that it was begun on, since its bits depend on it."""
    records_figures: ClassVar[bool] = True
    """Whether the record holds figures of rounds, such as drifts and Psi."""
    why_not_compared: ClassVar[str] = ""
    """What a comparison with Scratch would need to do, where that is too much."""
    trusted: ClassVar[tuple[str, ...]] = ()
    """Premises that groups add to a certificate and that the operator is trusted with."""

    def __init__(self, spec: Sections) -> None:
        self.spec = spec

    @classmethod
    def is_for(cls, spec: Sections) -> bool:
        """Return whether a spec describes this regime."""
        raise NotImplementedError(f"{cls.__name__} does not say which specs it is for")

    def demands(self) -> Iterator[Demand]:
        """Yield what the keys of a spec must be in this regime."""
        yield from ()

    def why_no_groups(self) -> str:
        """Return why clients cannot train in groups; empty if they can."""
        return ""

    def allows_separate_rounds(self, rounds: int) -> bool:
        """Return whether groups may train separately for this many rounds."""
        return 0 <= rounds < self.spec.stop.max_rounds

    def separate_rounds(self) -> tuple[str, dict[str, Any]]:
        """Return the case and the values of the premise on the rounds that groups train separately."""
        groups = self.spec.groups
        moved = {"stretch": groups.stretch} if groups.stretch != 1.0 else {}
        return "moved on" if moved else "", {"rounds": groups.rounds} | moved

    @property
    def has_accuracy(self) -> bool:
        """Whether a prediction is right or wrong; one of a real number is only near or far."""
        return self.spec.model.kind != "least_squares"

    @property
    def squared_error_per_loss(self) -> float | None:
        """The factor from a mean loss to the mean squared error in squares of the target's unit, where there is one."""
        return None if self.has_accuracy else 2.0 / max(1, self.spec.model.outputs)

    def squared_error(self, loss: float | None) -> float | None:
        """Return the mean squared error that a mean loss stands for; None where predictions are right or wrong."""
        factor = self.squared_error_per_loss
        return None if factor is None or loss is None else factor * loss

    @property
    def maps_samples(self) -> bool:
        """Whether samples go through a feature map before the model."""
        return self.spec.features.kind != "none"

    @property
    def maps_before_training(self) -> bool:
        """Whether features are computed once, before clients are handed to the engine."""
        return self.maps_samples

    @property
    def finds_rate(self) -> bool:
        """Whether training that begins afresh can find an automatic local rate from the clients that are left."""
        return self.spec.groups.count == 0

    @property
    def rounds_from_scratch(self) -> int | None:
        """Rounds of training from a fresh model where they are known before."""
        return None

    def most_rounds(self, release: str, max_rounds: int) -> float:
        """Return the most rounds that a request may take with these terms."""
        return 0 if release == "now" else max_rounds

    def settled(self, rate: float, keep: Literal["clients", "sum"] = "clients") -> dict[str, Any]:
        """Return the sections of the spec that an engine settles.

        Args:
            rate: The local rate of the engine.
            keep: The statistics to be kept where the spec leaves them open.
        """
        return {"local": replace(self.spec.local, rate=rate)}

    def check_method(self, name: str) -> None:
        """Refuse a method that can do nothing with a run of this regime."""
        if name == ClosedForm.exact_method:
            raise InputError(
                f"method {name} is for runs with model.kind = {RIDGE!r}; this one has {self.spec.model.kind!r}. Use "
                "sifu or scratch"
            )

    def check_joining(self) -> None:
        """Refuse clients that join by a call, where models are trained in rounds."""
        raise InputError(
            f"clients join a head in closed form (model.kind = {RIDGE!r}) this way; this run has "
            f"{self.spec.model.kind!r}. On Flower clients join while the server runs"
        )

    def why_figures_stay(self) -> str:
        """Return why the figures of the record stay even where the operator gives them up; empty if they need not."""
        return ""

    def sent_settings(self) -> SentSettings:
        """Return the settings that clients on other machines need."""
        return SentSettings(self._sent_rate, self.spec.features if self.maps_samples else None)

    @property
    def _sent_rate(self) -> float:
        rate = self.spec.local.rate
        return 1.0 if rate == "auto" else float(rate)  # no bound of a profile depends on the rate

    def described_task(self) -> dict[str, Any] | None:
        """Return how an exported model decides, where its kind does not tell."""
        return None


class Rounds(Regime):
    """Training in rounds of FedAvg."""

    name = "rounds"

    @classmethod
    def is_for(cls, spec: Sections) -> bool:
        """Return True: a spec of no other regime is trained in rounds."""
        return True


class Groups(Regime):
    """Rounds in groups that train separately at first, and are merged."""

    name = "groups"

    @classmethod
    def is_for(cls, spec: Sections) -> bool:
        """Return whether clients train in groups at first."""
        return spec.groups.count > 0 or spec.groups.rounds > 0

    def why_figures_stay(self) -> str:
        """Return why the figures of the record stay: merged models follow from them."""
        return "it has a head in closed form or groups, whose models and sums are told by them"


class ClosedForm(Regime):
    """A head that is solved from the sum of the clients' statistics."""

    name = "closed form"
    exact_method = "closed_form"
    solves = True
    draws_noise = False
    needs_data = False
    device_bound = False  # what is proven, is proven of what was sent
    records_figures = False

    @classmethod
    def is_for(cls, spec: Sections) -> bool:
        """Return whether the model is solved."""
        return spec.model.kind == RIDGE

    def demands(self) -> Iterator[Demand]:
        """Yield the demands of a sum over all clients, for which settings of rounds have no meaning."""
        ridge, server, kind = self.spec.ridge, self.spec.server, self.spec.model.kind
        r = ridge.regularisation
        yield "ridge.regularisation", r == "auto" or 1e-12 <= r <= 1e6, "in 1e-12 to 1e6, or auto"
        yield "ridge.feature_bits", 1 <= ridge.feature_bits <= 24, "in 1 to 24"
        yield "ridge.target_bits", 1 <= ridge.target_bits <= 24, "in 1 to 24"
        yield "ridge.scale", 0 < ridge.scale <= 1e12, "in (0, 1e12]"
        yield "ridge.shift", abs(ridge.shift) <= 1e12, "at most 1e12 in size"
        yield "ridge.shift", ridge.task != "multi_label" or 0 <= ridge.shift <= 1, "in 0 to 1 for multi_label"
        yield "server.participation", server.participation == "all", f"all with model.kind = {kind!r}"
        yield "server.rate", server.rate == 1, f"1.0 with model.kind = {kind!r}"
        yield "keep.gram_clients", self.spec.keep.gram_clients == 0, f"0 with model.kind = {kind!r}"
        yield "model.dtype", self.spec.model.dtype == "float64", f"float64 with model.kind = {kind!r}"

    def why_no_groups(self) -> str:
        """Return that nothing is trained."""
        return (
            "groups.count must be 0 with model.kind = 'ridge' unless features.tune says that groups tune a network: "
            "heads are solved, not trained"
        )

    @property
    def has_accuracy(self) -> bool:
        """Whether a prediction is right or wrong."""
        return self.spec.ridge.task != "regression"

    @property
    def squared_error_per_loss(self) -> float | None:
        """The square of the target's scale: targets are scaled before a head is solved."""
        return None if self.has_accuracy else self.spec.ridge.scale**2 / max(1, self.spec.model.outputs)

    @property
    def maps_samples(self) -> bool:
        """A head always has a map."""
        return True

    @property
    def maps_before_training(self) -> bool:
        """The engine maps samples on its own."""
        return False

    @property
    def finds_rate(self) -> bool:
        """No rate is found from the clients: a solve has none."""
        return False

    @property
    def rounds_from_scratch(self) -> int | None:
        """One solve."""
        return 1

    def most_rounds(self, release: str, max_rounds: int) -> float:
        """Return no limit: a solve is one round, whatever the terms say."""
        return math.inf

    def settled(self, rate: float, keep: Literal["clients", "sum"] = "clients") -> dict[str, Any]:
        """Return the sections with the one round that a solve takes, whatever the accuracy."""
        stop = replace(self.spec.stop, target=0.0, min_rounds=1, max_rounds=1, evaluate_every=1)
        kept = keep if self.spec.keep.statistics == "auto" else self.spec.keep.statistics
        if self.spec.release.noise != 0.0 and kept == "sum":
            raise InputError(
                "release.noise needs the statistics of each client, and this engine keeps only their sum: set "
                'keep.statistics = "clients"'
            )
        return {"stop": stop, "keep": replace(self.spec.keep, statistics=kept)}

    def check_method(self, name: str) -> None:
        """Refuse methods of models that are trained in rounds."""
        if name != self.exact_method:
            raise InputError(
                f"method {name} is for models that are trained in rounds; this run solves a ridge head in closed form: "
                f"use method {self.exact_method}, which is exact and takes no rounds or one"
            )

    def check_joining(self) -> None:
        """Clients may join: the sum grows by their statistics."""

    def why_figures_stay(self) -> str:
        """Return why the figures of the record stay: sums are told by them."""
        return "it has a head in closed form or groups, whose models and sums are told by them"

    def sent_settings(self) -> SentSettings:
        """Return the settings of a head: its map and its targets; nothing is trained."""
        return SentSettings(0.0, self.spec.features, self.spec.ridge)

    def described_task(self) -> dict[str, Any] | None:
        """Return what the scores of the head mean."""
        return {key: getattr(self.spec.ridge, key) for key in ("task", "shift", "scale")}


class TunedNetworks(ClosedForm):
    """A head in closed form on networks that groups tune separately, for rounds and at a rate fixed before."""

    name = "tuned networks"
    tunes = True
    needs_data = True
    device_bound = True
    why_not_compared = "groups would tune the network again"
    trusted = ("tuning",)

    @classmethod
    def is_for(cls, spec: Sections) -> bool:
        """Return whether groups tune a network."""
        return spec.features.tune != "none"

    def demands(self) -> Iterator[Demand]:
        """Yield the demands of groups that tune a network, then those of the head."""
        spec, features = self.spec, self.spec.features
        yield "groups.count", spec.groups.count > 0, "at least 2 with features.tune: groups tune the network"
        yield "groups.rounds", spec.groups.rounds > 0, "at least 1 with features.tune, for example 12"
        yield "local.rate", spec.local.rate != "auto", "a number with features.tune, for example 0.003"
        classes = spec.ridge.task == "classification"
        yield "ridge.task", classes, "classification with features.tune: groups tune by a loss of classes"
        network = features.kind in NETWORK_FEATURES and ClosedForm.is_for(spec)
        yield "features.tune", network, f"none unless a ridge head is on {' or '.join(NETWORK_FEATURES)}"
        yield "features.cache", not features.cache, "empty where the network is tuned"
        yield "features.block", 0 <= features.block <= 10**5, "in 0 to 100000"
        yield "features.trainable", bool(features.trainable.strip()), "all, last or names"
        yield from super().demands()

    def why_no_groups(self) -> str:
        """Return nothing: groups tune the network."""
        return ""

    def allows_separate_rounds(self, rounds: int) -> bool:
        """Return True: no common rounds follow."""
        return True

    def separate_rounds(self) -> tuple[str, dict[str, Any]]:
        """Return the case and the values of the premise: how blocks lie, or how far a merge is moved on."""
        tune, groups = self.spec.features.tune, self.spec.groups
        more = {"stretch": groups.stretch} if tune == "merge" or groups.stretch != 1.0 else {}
        values = {"block": self.spec.features.block} if tune == "blocks" else more
        return f"tuned {tune}", {"rounds": groups.rounds} | values

    @property
    def rounds_from_scratch(self) -> int | None:
        """The rounds of tuning, and a solve."""
        return 1 + self.spec.groups.rounds

    def sent_settings(self) -> SentSettings:
        """Return the settings of the head, and of the rounds in which groups tune the network."""
        groups = self.spec.groups
        return SentSettings(self._sent_rate, self.spec.features, self.spec.ridge, groups.count, groups.stretch)


_REGIMES: list[type[Regime]] = [Rounds, Groups, ClosedForm, TunedNetworks]


def add_regime(regime: type[Regime]) -> None:
    """Let specs be of one more regime, which is asked before those known so far."""
    _REGIMES.append(regime)


def regime_of(spec: Sections) -> Regime:
    """Return the regime of a spec: the last one known that says it is for it."""
    return next(regime for regime in reversed(_REGIMES) if regime.is_for(spec))(spec)


def by_regime(table: Mapping[type[Regime], Found], regime: Regime) -> Found:
    """Return the entry of a table for a regime, or for the nearest one that it extends."""
    return next(table[kind] for kind in type(regime).__mro__ if kind in table)
