"""The whole spec of a run, read from plain values: unknown keys and wrong types are refused by name."""

from __future__ import annotations

import difflib
import functools
import json
import typing
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from typing import Any, Literal

from sifu.core.ledger import LARGEST_INTEGER
from sifu.core.spec import ranges
from sifu.core.spec import run_spec as parsing
from sifu.core.spec.sections import (
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
        spec: Spec = parsing.parse(Spec, mapping)
        ranges.demand(spec.seed >= 0, "seed", spec.seed, "0 or more")
        ranges.check_data(spec.data)
        ranges.demand(0 <= spec.model.outputs <= 10**6, "model.outputs", spec.model.outputs, "in 0 to 1000000")
        ranges.check_local(spec.local)
        ranges.check_server(spec.server)
        ranges.check_stop(spec.stop)
        ranges.check_groups(spec.groups, spec.model, spec.server, spec.stop, spec.features)
        ranges.check_tuning(spec.features, spec.groups, spec.local, spec.ridge)
        ranges.check_privacy(spec.privacy)
        factor = spec.regularity.factor
        ranges.demand(0 < factor <= 1e6, "regularity.factor", factor, "in (0, 1e6]")
        ranges.check_keep(spec.keep)
        ranges.check_features(spec.features, spec.model, spec.data)
        if spec.model.kind == RIDGE:
            ranges.check_ridge(spec.ridge, spec.model, spec.server, spec.keep)
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
