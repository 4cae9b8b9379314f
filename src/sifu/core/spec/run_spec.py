"""Complete spec of a run, parsed from plain values; unknown keys, wrong types and values out of range are refused."""

from __future__ import annotations

import difflib
import functools
import itertools
import json
import typing
from collections.abc import Iterator, Mapping
from dataclasses import Field, asdict, dataclass, fields, is_dataclass
from typing import Any, Literal

from sifu.core.ledger import LARGEST_INTEGER
from sifu.core.replies import ReplyRules, Wait
from sifu.core.spec.regime import Demand, Regime, regime_of
from sifu.core.spec.sections import HEAD_KINDS, IMAGE_FEATURES, PRETRAINED, Sections
from sifu.errors import InputError
from sifu.theory.calibration import check_deliverable, check_noise
from sifu.theory.participation import Participation

MOST_GROUPS = 1000


def _demands_of_sections(spec: Spec) -> Iterator[Demand]:
    """Yield the conditions on keys that apply in every regime."""
    data, local, server, stop, keep, features = spec.data, spec.local, spec.server, spec.stop, spec.keep, spec.features
    yield "seed", spec.seed >= 0, "0 or more"
    yield "data.clients", data.clients >= 2, "at least 2"
    yield "data.samples_per_client", data.samples_per_client >= 0, "0 or more"
    yield "data.alpha", data.alpha > 0, "positive"
    yield "data.held_out", 0 <= data.held_out <= 0.9, "in 0 to 0.9"
    yield "data.held_out", not (data.held_out > 0 and data.test_file), "0 where data.test_file is given"
    yield "model.outputs", 0 <= spec.model.outputs <= 10**6, "in 0 to 1000000"
    yield "local.rate", local.rate == "auto" or 0 < local.rate <= 1e200, "positive, or auto"
    yield "local.steps", 1 <= local.steps <= 10**6, "in 1 to 1000000"
    yield "local.steps", local.momentum == 0 or local.steps <= 1000, "at most 1000 with momentum"
    yield "local.batch", local.batch >= 0, "0 or more"
    yield "local.momentum", 0 <= local.momentum < 1, "in [0, 1)"
    yield "local.weight_decay", local.weight_decay >= 0, "0 or more"
    Participation.parse(server.participation)
    ReplyRules(server.rejected, server.update_bound)
    Wait.parse(server.wait)
    yield "stop.target", 0 <= stop.target <= 1, "in [0, 1]"
    yield "stop.evaluate_every", stop.evaluate_every >= 1, "at least 1"
    yield "stop.min_rounds", stop.min_rounds >= 0, "0 or more"
    enough = stop.max_rounds >= max(1, stop.min_rounds)
    yield "stop.max_rounds", enough, "at least 1 and at least stop.min_rounds"
    check_deliverable(spec.privacy.epsilon, spec.privacy.delta)
    if spec.privacy.sigma != "auto":
        check_noise(spec.privacy.sigma)
    yield "regularity.factor", 0 < spec.regularity.factor <= 1e6, "in (0, 1e6]"
    yield "keep.models", keep.models >= 3, "at least 3: the first, the last noised, one more"
    yield "features.seed", 0 <= features.seed < 2**53, "in 0 to 2^53"
    yield "features.count", 0 <= features.count <= 10**5, "in 0 to 100000"
    deep_enough = isinstance(features.layers, str) or 1 <= features.layers <= 1000
    yield "features.layers", deep_enough, "last, deep, or a number of blocks in 1 to 1000"
    yield "features.size", 0 <= features.size <= 4096, "in 0 to 4096"
    named = bool(features.module) == (features.kind == "module")
    yield "features.module", named, 'given with features.kind = "module", and only then'
    if features.kind == "pretrained":
        yield "features.model", features.model in ("", *PRETRAINED), f"one of {', '.join(PRETRAINED)}"
    else:
        named = bool(features.model) == (features.kind == "transformers")
        yield "features.model", named, 'given with features.kind = "transformers" or "pretrained", and only then'
    yield "data.separator", len(data.separator) == 1 and data.separator not in '\r\n"', "one character"
    read = not data.text or features.kind == "transformers"
    yield "data.text", read, 'empty unless features.kind = "transformers": a text needs a model that reads it'
    yield "features.count", features.kind != "random_fourier" or features.count % 2 == 0, "even for random_fourier"
    yield "features.norm", 0 < features.norm <= 1e6, "in (0, 1e6]"
    yield "features.bandwidth", 0 < features.bandwidth <= 1e6, "in (0, 1e6]"


def _demands_of_groups(spec: Spec) -> Iterator[Demand]:
    """Yield the conditions on groups: a fixed number of separate rounds, and groups that train independently."""
    groups, server, most = spec.groups, spec.server, spec.stop.max_rounds
    if groups.count == 0 and groups.rounds == 0:
        return
    yield "groups.count", 2 <= groups.count <= MOST_GROUPS, f"in 2 to {MOST_GROUPS}"
    common_follow = f"at least 1 and below stop.max_rounds = {most}, so that common rounds follow"
    yield "groups.rounds", 1 <= groups.rounds < most, common_follow
    if not Participation.parse(server.participation).independent:
        raise InputError(
            f"server.participation = {server.participation} cannot be combined with groups, each of which would draw "
            "that many: use all or poisson(RATE)"
        )
    if spec.regime.solves:
        raise InputError("groups.count must be 0 with model.kind = 'ridge': heads are solved, not trained")


def _demands_of_features(spec: Spec) -> Iterator[Demand]:
    """Yield the conditions that a feature map imposes on its input samples and on the model that uses its features."""
    features, kind = spec.features, spec.model.kind
    linear = kind in (*HEAD_KINDS, "python")
    heads = f"none for model.kind = {kind!r}: features are for linear heads (softmax, ridge...)"
    yield "features.kind", features.kind == "none" or linear, heads
    unit = features.kind not in IMAGE_FEATURES or spec.data.normalise == "unit"
    yield "data.normalise", unit, f"unit with features.kind = {features.kind!r}"


def _demands_of_releases(spec: Spec) -> Iterator[Demand]:
    """Yield the conditions on noise added to releases: computable distances between heads, and fixed settings."""
    release = spec.release
    if release.noise == 0.0:
        return
    yield (
        "release.noise",
        spec.regime.solves,
        "0 unless model.kind = 'ridge': only then distances are known and nothing else "
        "that clients shaped leaves with the head",
    )
    fixed_r = spec.ridge.regularisation != "auto"
    yield "ridge.regularisation", fixed_r, "a number with release.noise: cross-validation chooses it from the data"
    kept = spec.keep.statistics != "sum"
    yield "keep.statistics", kept, "clients with release.noise: distances need each client's statistics"
    yield "release.noise", 1e-12 <= release.noise <= 1e12, "0, or in 1e-12 to 1e12"
    check_deliverable(1.0, release.delta)


@functools.cache
def _hints(kind: type[Any]) -> dict[str, Any]:
    """Return the types of a section's keys."""
    return typing.get_type_hints(kind)


def _parse(kind: type[Any], mapping: Any, prefix: str) -> Any:
    """Parse `mapping` into the dataclass `kind`, section by section."""
    if not isinstance(mapping, Mapping):
        raise InputError(f"{prefix.rstrip('.') or 'the spec'} must be a table of keys, found {mapping!r}")
    hints = _hints(kind)  # type: ignore[arg-type]
    names = {entry.name for entry in fields(kind)}
    values = {}
    for name, value in mapping.items():
        if name not in names:
            raise InputError(f"unknown key {prefix}{name!s} in the spec{_nearest_hint(prefix, str(name), kind)}")
        hint = hints[name]
        values[name] = (
            _parse(hint, value, f"{prefix}{name}.")
            if isinstance(hint, type) and is_dataclass(hint)
            else _cast(hint, value, prefix + name)
        )
    return kind(**values)


def _nearest_hint(prefix: str, key: str, kind: type[Any]) -> str:
    """Return a hint that names the nearest known key of any section, or else all keys of this section."""
    here = [prefix + entry.name for entry in fields(kind)]
    everywhere = [
        f"{section.name}.{entry.name}" for section in _sections() for entry in fields(_hints(Spec)[section.name])
    ]
    near = [name for name in everywhere if name.split(".")[1] == key] or difflib.get_close_matches(
        prefix + key, here, n=1
    )
    near = near or difflib.get_close_matches(prefix + key, everywhere, n=1)
    return f"; did you mean {near[0]}?" if near else f"; known here: {', '.join(sorted(here))}"


KINDS: dict[Any, tuple[Any, str]] = {
    float: ((int, float), "a number"),
    int: (int, "a whole number"),
    bool: (bool, "true or false"),
    str: (str, "a text"),
}


def _cast(hint: Any, value: Any, name: str) -> Any:
    """Return `value` converted to the type `hint`; raise an `InputError` if it does not fit."""
    if typing.get_origin(hint) is Literal:
        if value in typing.get_args(hint) and not isinstance(value, bool):
            return value
        options = ", ".join(map(str, typing.get_args(hint)))
        near = difflib.get_close_matches(str(value), [str(choice) for choice in typing.get_args(hint)], n=1)
        raise InputError(
            f"{name} must be one of {options}; found {value!r}" + (f", did you mean {near[0]}?" if near else "")
        )
    alternatives = typing.get_args(hint)
    if alternatives:  # this key accepts a number or one of several strings
        if isinstance(value, str):
            words = next(alternative for alternative in alternatives if typing.get_origin(alternative) is Literal)
            if value in typing.get_args(words):
                return value
            listed = " or ".join(map(repr, typing.get_args(words)))
            raise InputError(f"{name} must be a number or {listed}, found {value!r}")
        return _cast(next(alternative for alternative in alternatives if alternative in KINDS), value, name)
    allowed, words_for = KINDS[hint]
    if not isinstance(value, allowed) or (isinstance(value, bool) and hint is not bool):
        raise InputError(f"{name} must be {words_for}, found {value!r} ({type(value).__name__})")
    if hint is float and not abs(value) < 1e308:
        raise InputError(f"{name} must be a finite number, found {str(value)[:40]}")
    if hint is int and abs(value) > LARGEST_INTEGER:
        raise InputError(f"{name} must be a whole number up to 2^53, the range of JSON numbers")
    return float(value) if hint is float else value


@dataclass(frozen=True)
class Spec(Sections):
    """Complete spec of a run: every key of its TOML file, with defaults. `sifu init` writes all keys.

    Attributes:
        seed: Seed of data, participation and batches, never of the certified noise.
        data: Where the clients' data come from.
        model: Kind and size of the model.
        features: Features of the samples on which the model is trained.
        ridge: Penalty of a head in closed form.
        local: Training on each client.
        server: Participation, waiting times and unusable replies.
        stop: Stop rule of training and retraining.
        groups: Groups of clients that train separately before they merge.
        privacy: Default guarantee of a request.
        release: Noise on every release of a head in closed form.
        requests: Approval of requests.
        regularity: Knowledge of the clients' losses.
        keep: What a run keeps of statistics.

    Raises:
        InputError: By `from_mapping`, if a key is unknown, or a value has the wrong type or is out of range.
    """

    @property
    def regime(self) -> Regime:
        """Kind of training that the spec describes."""
        return regime_of(self)

    def to_mapping(self) -> dict[str, Any]:
        """Return the spec as plain values, ready for JSON."""
        return asdict(self)

    @staticmethod
    def from_mapping(mapping: Mapping[str, Any]) -> Spec:
        """Parse the spec from plain values.

        Raises:
            InputError: If a key is unknown, or a value has the wrong type or is out of range.
        """
        spec: Spec = _parse(Spec, mapping, "")
        checks = (_demands_of_sections, _demands_of_groups, _demands_of_features, _demands_of_releases)
        demands = (demand for check in checks for demand in check(spec))
        for name, holds, wanted in itertools.chain(demands, spec.regime.demands()):
            if not holds:
                value = functools.reduce(getattr, name.split("."), spec)
                raise InputError(f"{name} must be {wanted}, found {value}")
        return spec


def _sections() -> tuple[Field[Any], ...]:
    """Return the fields of a spec that are sections."""
    return tuple(entry for entry in fields(Spec) if entry.name != "seed")


def commented_toml(spec: Spec) -> str:
    """Return the spec as TOML with a comment next to every key, as `sifu init` writes it."""
    lines = [f"seed = {spec.seed}  # {fields(Spec)[0].metadata['comment']}"]
    for section in _sections():
        value = getattr(spec, section.name)
        heading = (type(value).__doc__ or "").strip().splitlines()[0]
        lines += ["", f"[{section.name}]  # {heading}"]
        keys = [
            (f"{entry.name} = {_toml_value(getattr(value, entry.name))}", entry.metadata["comment"])
            for entry in fields(value)
        ]
        width = max(len(text) for text, _ in keys)
        lines += [f"{text:<{width}}  # {comment}" for text, comment in keys]
    return "\n".join(lines) + "\n"


def _toml_value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON escapes are valid in TOML; only DEL must be escaped as well.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)
