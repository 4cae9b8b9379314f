"""The whole spec of a run, read from plain values: unknown keys, wrong types and values out of range are refused."""

from __future__ import annotations

import difflib
import functools
import json
import typing
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from typing import Any, Literal

from sifu.core.ledger import LARGEST_INTEGER
from sifu.core.replies import ReplyRules, Wait
from sifu.core.spec.sections import (
    IMAGE_FEATURES,
    LINEAR_KINDS,
    RIDGE,
    DataSpec,
    FeaturesSpec,
    GroupsSpec,
    KeepSpec,
    LocalSpec,
    ModelSpec,
    PrivacySpec,
    RegularitySpec,
    RequestsSpec,
    RidgeSpec,
    ServerSpec,
    StopSpec,
    key,
)
from sifu.errors import InputError
from sifu.theory.calibration import check_deliverable, check_noise
from sifu.theory.participation import Participation

MOST_GROUPS = 1000


def demand(holds: bool, name: str, value: object, wanted: str) -> None:
    """Refuse the value of a key that does not hold."""
    if not holds:
        raise InputError(f"{name} must be {wanted}, found {value}")


def check_data(data: DataSpec) -> None:
    """Enough clients, and nothing negative."""
    demand(data.clients >= 2, "data.clients", data.clients, "at least 2")
    demand(data.samples_per_client >= 0, "data.samples_per_client", data.samples_per_client, "0 or more")
    demand(data.watermark >= 0, "data.watermark", data.watermark, "0 or more")
    demand(data.alpha > 0, "data.alpha", data.alpha, "positive")
    demand(0 <= data.held_out <= 0.9, "data.held_out", data.held_out, "in 0 to 0.9")
    both = not (data.held_out > 0 and data.test_file)
    demand(both, "data.held_out", data.held_out, "0 where data.test_file is given")


def check_local(local: LocalSpec) -> None:
    """Rates and steps for which a round can be bounded."""
    demand(local.rate == "auto" or 0 < local.rate <= 1e200, "local.rate", local.rate, "positive, or auto")
    demand(1 <= local.steps <= 10**6, "local.steps", local.steps, "in 1 to 1000000")
    demand(local.momentum == 0 or local.steps <= 1000, "local.steps", local.steps, "at most 1000 with momentum")
    calibration = local.calibration_steps
    demand(0 <= calibration <= local.steps, "local.calibration_steps", calibration, "in 0 to local.steps")
    demand(local.batch >= 0, "local.batch", local.batch, "0 or more")
    demand(0 <= local.momentum < 1, "local.momentum", local.momentum, "in [0, 1)")
    heavy = not local.nesterov or local.momentum > 0
    demand(heavy, "local.momentum", local.momentum, "positive with local.nesterov")
    demand(local.weight_decay >= 0, "local.weight_decay", local.weight_decay, "0 or more")
    demand(local.clip == 0 or 1e-9 <= local.clip <= 1e9, "local.clip", local.clip, "0, or in 1e-9 to 1e9")


def check_server(server: ServerSpec) -> None:
    """A rate, a way of taking part, rules for replies, and noise only where updates are clipped."""
    demand(0 < server.rate <= 10, "server.rate", server.rate, "in (0, 10]")
    Participation.parse(server.participation)
    ReplyRules(server.rejected, server.update_bound)
    Wait.parse(server.wait)
    demand(server.clip == 0 or 1e-9 <= server.clip <= 1e9, "server.clip", server.clip, "0, or in 1e-9 to 1e9")
    noisy = server.clip > 0 and 1e-9 <= server.noise <= 1e6
    demand(server.noise == 0 or noisy, "server.noise", server.noise, "0, or in 1e-9 to 1e6 with server.clip > 0")


def check_stop(stop: StopSpec) -> None:
    """Training stops, and not before it may."""
    demand(0 <= stop.target <= 1, "stop.target", stop.target, "in [0, 1]")
    demand(stop.evaluate_every >= 1, "stop.evaluate_every", stop.evaluate_every, "at least 1")
    demand(stop.min_rounds >= 0, "stop.min_rounds", stop.min_rounds, "0 or more")
    enough = stop.max_rounds >= max(1, stop.min_rounds)
    demand(enough, "stop.max_rounds", stop.max_rounds, "at least 1 and at least stop.min_rounds")


def check_privacy(privacy: PrivacySpec) -> None:
    """A budget and a noise that can be delivered."""
    check_deliverable(privacy.epsilon, privacy.delta)
    if privacy.sigma != "auto":
        check_noise(privacy.sigma)
    demand(0 <= privacy.reserve < 1, "privacy.reserve", privacy.reserve, "in [0, 1)")


def check_keep(keep: KeepSpec) -> None:
    """Room for the models that are always needed, and a ladder that climbs."""
    demand(keep.models >= 3, "keep.models", keep.models, "at least 3: the first, the last noised, one more")
    demand(keep.ratio >= 1.001, "keep.ratio", keep.ratio, "at least 1.001")
    demand(
        1e-12 <= keep.lowest_sigma <= keep.highest_sigma <= 1e12,
        "keep.lowest_sigma",
        keep.lowest_sigma,
        "at least 1e-12 and at most keep.highest_sigma, itself at most 1e12",
    )
    demand(keep.gram_clients >= 0, "keep.gram_clients", keep.gram_clients, "0 or more")
    demand(keep.updates_every >= 0, "keep.updates_every", keep.updates_every, "0 or more")


def check_features(features: FeaturesSpec, model: ModelSpec, data: DataSpec) -> None:
    """A map that can be drawn, for a model that may stand on it."""
    linear = model.kind in (*LINEAR_KINDS, RIDGE, "python")
    demand(0 <= features.seed < 2**53, "features.seed", features.seed, "in 0 to 2^53")
    demand(0 <= features.count <= 10**5, "features.count", features.count, "in 0 to 100000")
    named = bool(features.module) == (features.kind == "module")
    demand(named, "features.module", features.module, 'given with features.kind = "module", and only then')
    fourier_pairs = features.kind != "random_fourier" or features.count % 2 == 0
    demand(fourier_pairs, "features.count", features.count, "even for random_fourier")
    demand(0 < features.norm <= 1e6, "features.norm", features.norm, "in (0, 1e6]")
    demand(0 < features.bandwidth <= 1e6, "features.bandwidth", features.bandwidth, "in (0, 1e6]")
    demand(
        features.kind == "none" or linear,
        "features.kind",
        features.kind,
        f"none for model.kind = {model.kind!r}: features are for linear heads (softmax, ridge...)",
    )
    if features.tune != "none":
        network = features.kind in ("pretrained", "module") and model.kind == RIDGE
        demand(network, "features.tune", features.tune, 'none unless a ridge head stands on "pretrained" or "module"')
        demand(not features.cache, "features.cache", features.cache, "empty where the network is tuned")
        demand(0 <= features.block <= 10**5, "features.block", features.block, "in 0 to 100000")
        demand(bool(features.trainable.strip()), "features.trainable", features.trainable, "all, last or names")
    unit = features.kind not in IMAGE_FEATURES or data.normalise == "unit"
    demand(unit, "data.normalise", data.normalise, f"unit with features.kind = {features.kind!r}")


def check_ridge(ridge: RidgeSpec, model: ModelSpec, server: ServerSpec, keep: KeepSpec) -> None:
    """A head in closed form is one sum over all clients: what belongs to rounds of descent has no meaning there."""
    r = ridge.regularisation
    demand(r == "auto" or 1e-12 <= r <= 1e6, "ridge.regularisation", r, "in 1e-12 to 1e6, or auto")
    demand(1 <= ridge.feature_bits <= 24, "ridge.feature_bits", ridge.feature_bits, "in 1 to 24")
    demand(1 <= ridge.target_bits <= 24, "ridge.target_bits", ridge.target_bits, "in 1 to 24")
    demand(0 < ridge.scale <= 1e12, "ridge.scale", ridge.scale, "in (0, 1e12]")
    demand(abs(ridge.shift) <= 1e12, "ridge.shift", ridge.shift, "at most 1e12 in size")
    of_labels = ridge.task != "multi_label" or 0 <= ridge.shift <= 1
    demand(of_labels, "ridge.shift", ridge.shift, "in 0 to 1 for multi_label")
    for name, value, wanted in (
        ("server.participation", server.participation, "all"),
        ("server.clip", server.clip, 0.0),
        ("server.rate", server.rate, 1.0),
        ("keep.gram_clients", keep.gram_clients, 0),
        ("keep.updates_every", keep.updates_every, 0),
        ("model.dtype", model.dtype, "float64"),
    ):
        demand(value == wanted, name, value, f"{wanted} with model.kind = {RIDGE!r}")


def check_tuning(features: FeaturesSpec, groups: GroupsSpec, local: LocalSpec, ridge: RidgeSpec) -> None:
    """A network is tuned by groups, for rounds and at a rate that are fixed beforehand."""
    if features.tune == "none":
        return
    demand(groups.count > 0, "groups.count", groups.count, "at least 2 with features.tune: groups tune the network")
    demand(groups.rounds > 0, "groups.rounds", groups.rounds, "at least 1 with features.tune, for example 12")
    demand(local.rate != "auto", "local.rate", local.rate, "a number with features.tune, for example 0.003")
    classes = ridge.task == "classification"
    demand(classes, "ridge.task", ridge.task, "classification with features.tune: groups tune by a loss of classes")


def check_groups(
    groups: GroupsSpec, model: ModelSpec, server: ServerSpec, stop: StopSpec, features: FeaturesSpec
) -> None:
    """Groups need rounds apart that are fixed beforehand, and a way of training in which each stands on its own."""
    if groups.count == 0 and groups.rounds == 0:
        return
    if groups.count != 0 and not 2 <= groups.count <= MOST_GROUPS:
        raise InputError(f"groups.count must be 0 or in 2 to {MOST_GROUPS}, found {groups.count}")
    if features.tune == "none" and not 0 <= groups.rounds < stop.max_rounds:
        raise InputError(
            f"groups.rounds must be at least 1 (0: by rule) and below stop.max_rounds = {stop.max_rounds}, found "
            f"{groups.rounds}: it is fixed before training, and common rounds follow"
        )
    demand(1 <= groups.stretch <= 2, "groups.stretch", groups.stretch, "in 1 to 2, and fixed before training")
    if not Participation.parse(server.participation).independent:
        raise InputError(
            f"server.participation = {server.participation} cannot be combined with groups, which would each draw "
            "as many: use all or poisson(RATE)"
        )
    if model.kind == RIDGE and features.tune == "none":
        raise InputError(
            "groups.count must be 0 with model.kind = 'ridge' unless features.tune says that groups tune a network: "
            "heads are solved, not trained"
        )
    if server.noise > 0:
        raise InputError("server.noise (method dp) cannot be combined with groups: its rounds apart are not counted")


@functools.cache
def _hints(kind: type[Any]) -> dict[str, Any]:
    """The types of a section's keys; finding them evaluates our own annotations, once."""
    return typing.get_type_hints(kind)


def parse(whole: type[Any], mapping: Any) -> Any:
    """`mapping` as the dataclass `whole`, section by section."""
    return _parse(whole, mapping, "", whole)


def _parse(kind: type[Any], mapping: Any, prefix: str, whole: type[Any]) -> Any:
    if not isinstance(mapping, Mapping):
        raise InputError(f"{prefix.rstrip('.') or 'the spec'} must be a table of keys, found {mapping!r}")
    hints = _hints(kind)  # type: ignore[arg-type]
    names = {entry.name for entry in fields(kind)}
    values = {}
    for name, value in mapping.items():
        if name not in names:
            raise InputError(f"unknown key {prefix}{name!s} in the spec{_nearest_hint(prefix, str(name), kind, whole)}")
        hint = hints[name]
        values[name] = (
            _parse(hint, value, f"{prefix}{name}.", whole)
            if isinstance(hint, type) and is_dataclass(hint)
            else _cast(hint, value, prefix + name)
        )
    return kind(**values)


def _nearest_hint(prefix: str, key: str, kind: type[Any], whole: type[Any]) -> str:
    """A sentence with the nearest known keys, here or in another section."""
    here = [prefix + entry.name for entry in fields(kind)]
    everywhere = [
        f"{section.name}.{entry.name}"
        for section in fields(whole)
        if section.name != "seed"
        for entry in fields(_hints(whole)[section.name])  # type: ignore[arg-type]
    ]
    near = [name for name in everywhere if name.split(".")[1] == key] or difflib.get_close_matches(
        prefix + key, here, n=1
    )
    near = near or difflib.get_close_matches(prefix + key, everywhere, n=1)
    return f"; did you mean {near[0]}?" if near else f"; known here: {', '.join(sorted(here))}"


def _cast(hint: Any, value: Any, name: str) -> Any:
    """`value` as the type `hint` says, or a sentence."""
    if typing.get_origin(hint) is Literal:
        if value in typing.get_args(hint) and not isinstance(value, bool):
            return value
        options = ", ".join(map(str, typing.get_args(hint)))
        near = difflib.get_close_matches(str(value), [str(choice) for choice in typing.get_args(hint)], n=1)
        raise InputError(
            f"{name} must be one of {options}; found {value!r}" + (f", did you mean {near[0]}?" if near else "")
        )
    alternatives = typing.get_args(hint)
    if alternatives:  # a number or a word
        if isinstance(value, str):
            words = next(alternative for alternative in alternatives if typing.get_origin(alternative) is Literal)
            if value in typing.get_args(words):
                return value
            raise InputError(f"{name} must be a number or {typing.get_args(words)[0]!r}, found {value!r}")
        return _cast(float, value, name)
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        if not abs(value) < 1e308:
            raise InputError(f"{name} must be a finite number, found {str(value)[:40]}")
        return float(value)
    if hint is int and isinstance(value, int) and not isinstance(value, bool):
        if abs(value) > LARGEST_INTEGER:
            raise InputError(f"{name} must be a whole number up to 2^53, which JSON in every language can hold")
        return value
    if hint is bool and isinstance(value, bool):
        return value
    if hint is str and isinstance(value, str):
        return value
    words_for = {float: "a number", int: "a whole number", bool: "true or false", str: "a text"}
    raise InputError(f"{name} must be {words_for[hint]}, found {value!r} ({type(value).__name__})")


@dataclass(frozen=True)
class Spec:
    """A whole run."""

    seed: int = key(1, "seeds data, participation and batches; never the certified noise")
    data: DataSpec = field(default_factory=DataSpec)
    model: ModelSpec = field(default_factory=ModelSpec)
    features: FeaturesSpec = field(default_factory=FeaturesSpec)
    ridge: RidgeSpec = field(default_factory=RidgeSpec)
    local: LocalSpec = field(default_factory=LocalSpec)
    server: ServerSpec = field(default_factory=ServerSpec)
    stop: StopSpec = field(default_factory=StopSpec)
    groups: GroupsSpec = field(default_factory=GroupsSpec)
    privacy: PrivacySpec = field(default_factory=PrivacySpec)
    requests: RequestsSpec = field(default_factory=RequestsSpec)
    regularity: RegularitySpec = field(default_factory=RegularitySpec)
    keep: KeepSpec = field(default_factory=KeepSpec)

    @property
    def is_tuned(self) -> bool:
        """Whether groups tune the network that a head in closed form stands on (docs/theory.md, section 15.5)."""
        return self.features.tune != "none"

    @property
    def has_accuracy(self) -> bool:
        """Whether a prediction is right or wrong; one of a real number is only near or far."""
        return not (
            self.model.kind == "least_squares" or (self.model.kind == RIDGE and self.ridge.task == "regression")
        )

    def to_mapping(self) -> dict[str, Any]:
        """As plain values, ready for JSON."""
        return asdict(self)

    @staticmethod
    def from_mapping(mapping: Mapping[str, Any]) -> Spec:
        """From plain values; unknown keys, wrong types and values out of range are refused by name."""
        spec: Spec = parse(Spec, mapping)
        demand(spec.seed >= 0, "seed", spec.seed, "0 or more")
        check_data(spec.data)
        demand(0 <= spec.model.outputs <= 10**6, "model.outputs", spec.model.outputs, "in 0 to 1000000")
        check_local(spec.local)
        check_server(spec.server)
        check_stop(spec.stop)
        check_groups(spec.groups, spec.model, spec.server, spec.stop, spec.features)
        check_tuning(spec.features, spec.groups, spec.local, spec.ridge)
        check_privacy(spec.privacy)
        factor = spec.regularity.factor
        demand(0 < factor <= 1e6, "regularity.factor", factor, "in (0, 1e6]")
        check_keep(spec.keep)
        check_features(spec.features, spec.model, spec.data)
        if spec.model.kind == RIDGE:
            check_ridge(spec.ridge, spec.model, spec.server, spec.keep)
        return spec


def commented_toml(spec: Spec) -> str:
    """The spec as TOML with a comment next to every key: what `sifu init` writes."""
    lines = [f"seed = {spec.seed}  # {_comment(Spec, 'seed')}"]
    for section in fields(Spec):
        value = getattr(spec, section.name)
        if not is_dataclass(value):
            continue
        heading = (type(value).__doc__ or "").strip().splitlines()[0]
        lines += ["", f"[{section.name}]  # {heading}"]
        keys = [
            (f"{entry.name} = {_toml_value(getattr(value, entry.name))}", _comment(type(value), entry.name))
            for entry in fields(value)
        ]
        width = max(len(text) for text, _ in keys)
        lines += [f"{text:<{width}}  # {comment}" for text, comment in keys]
    return "\n".join(lines) + "\n"


def _comment(kind: type[Any], name: str) -> str:
    return next(str(entry.metadata["comment"]) for entry in fields(kind) if entry.name == name)


def _toml_value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON's escapes are TOML's; only DEL must be escaped too.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)
