"""The whole spec of a run, and reading it from plain values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from typing import Any

from sifu.core.spec import parsing, ranges
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
