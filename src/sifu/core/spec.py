"""The spec of a run: what is trained on what, and the promises it must be able to keep.

Each section is a frozen dataclass whose fields carry their own comment, so that `sifu init` writes a
commented file, errors can name the key and its nearest neighbour, and there is one place to look.
"""

from __future__ import annotations

import difflib
import functools
import json
import typing
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from typing import Any, Literal

from sifu.choices import Calibration, Retention, Scope, Unit
from sifu.core.ledger import LARGEST_INTEGER
from sifu.core.noise import NoiseSource
from sifu.core.replies import OnRejection, ReplyRules
from sifu.errors import InputError
from sifu.theory.calibration import check_deliverable, check_noise
from sifu.theory.history import Accounting
from sifu.theory.participation import Participation

RIDGE = "ridge"
"""The model kind that is solved in closed form."""
LINEAR_KINDS = ("softmax", "logistic", "least_squares")
IMAGE_FEATURES = ("random_convolutions", "pretrained")
"""Feature maps that take images as such, with values in [0, 1]."""
MOST_GROUPS = 1000


def _key(default: Any, comment: str) -> Any:
    return field(default=default, metadata={"comment": comment})


@dataclass(frozen=True)
class DataSpec:
    """Which data, and how it is spread over clients."""

    name: str = _key("digits", "digits, mnist, fashion_mnist, cifar10, cifar100, celeba, npz")
    clients: int = _key(160, "how many clients the data is spread over")
    samples_per_client: int = _key(10, "samples of each client; 0 spreads everything evenly")
    partition: Literal["iid", "one_class", "dirichlet", "identity", "given"] = _key(
        "iid", "iid, one_class, dirichlet (see alpha), identity (whole people), given (client ids in an npz)"
    )
    alpha: float = _key(0.1, "concentration of the dirichlet partition; small is unequal")
    normalise: Literal["unit", "standard", "authors"] = _key(
        "unit", "unit scales to [0, 1]; standard also centres, by published constants; authors by those of their code"
    )
    folder: str = _key("", "where data files lie; empty looks in $SIFU_DATA and the cache")
    file: str = _key("", "the file of name = npz")
    watermark: int = _key(0, "pixels of every image of a client set to the maximum, at places of the client's own")
    preprocessing: Literal["unknown", "fixed"] = _key(
        "unknown", "own data only: fixed declares that no client's data shaped it (no mean or scale of the data)"
    )


@dataclass(frozen=True)
class ModelSpec:
    """What is trained."""

    kind: Literal[
        "softmax",
        "logistic",
        "least_squares",
        "mlp",
        "cnn",
        "cnn_fashion_mnist",
        "cnn_cifar10",
        "cnn_cifar100",
        "cnn_celeba",
        "authors_cifar10",
        "authors_cifar100",
        "authors_celeba",
        "ridge",
        "python",
    ] = _key(
        "softmax",
        "softmax, logistic, least_squares (can be proven); ridge (in closed form: exact, one round, see [ridge]); mlp, "
        "cnn, and the paper's cnn_fashion_mnist, cnn_cifar10, cnn_cifar100, cnn_celeba, as its authors' code has them "
        "authors_cifar10, authors_cifar100, authors_celeba (conditional at best)",
    )
    outputs: int = _key(0, "classes or outputs; 0 takes the data set's own, or counts the labels of your own data")
    init: Literal["zeros", "random"] = _key("zeros", "zeros or random; linear models only")
    dtype: Literal["float64", "float32"] = _key("float64", "float64 can be proven; float32 is conditional at best")


@dataclass(frozen=True)
class FeaturesSpec:
    """Public features that a linear model is put on, the same for everyone; no client's data shapes them."""

    kind: Literal["none", "random_convolutions", "random_fourier", "projection", "pretrained"] = _key(
        "none",
        "none (the inputs), random_convolutions (images), random_fourier or projection (tables), pretrained (colour "
        "images, sifu[pretrained])",
    )
    seed: int = _key(0, "draws the map; part of the spec, so anybody can draw it again")
    count: int = _key(0, "how many features of random_fourier (even) and projection; 0 is 512")
    norm: float = _key(10.0, "largest length of a sample's features; ridge shortens plain inputs to it, too")
    bandwidth: float = _key(1.0, "random_fourier: width of the kernel, in units of the inputs")


@dataclass(frozen=True)
class RidgeSpec:
    """The head in closed form, for model.kind = "ridge"."""

    task: Literal["classification", "multi_label", "regression"] = _key(
        "classification", "classification, multi_label (rows of 0 and 1), regression"
    )
    regularisation: float | Literal["auto"] = _key(
        "auto", 'r of lambda = r trace(G)/(k+1); "auto" is cross-validation from the sums of those who stay'
    )
    shift: float = _key(0.5, "regression: what is taken from every target; multi_label: the 0.5 between 0 and 1")
    scale: float = _key(1.0, "regression: what targets are divided by; they may lie 8 scales from shift")
    feature_bits: int = _key(16, "features are rounded to multiples of 2^-feature_bits")
    target_bits: int = _key(16, "targets are rounded to multiples of 2^-target_bits")


@dataclass(frozen=True)
class LocalSpec:
    """What a client does in a round."""

    rate: float | Literal["auto"] = _key("auto", 'local learning rate; "auto" is the largest one certified as convex')
    steps: int = _key(10, "local gradient steps K of each round")
    calibration_steps: int = _key(0, "fed_eraser: local steps of a calibration round; 0 takes half of steps")
    batch: int = _key(0, "mini-batch size; 0 is the whole data of the client")
    momentum: float = _key(0.0, "heavy-ball momentum, reset each round")
    nesterov: bool = _key(False, "Nesterov's momentum (never certified as convex)")
    weight_decay: float = _key(0.0, "coupled weight decay on every parameter; makes losses strongly convex")
    clip: float = _key(0.0, "bound on the norm of each step's gradient, clipped to it; 0 is off (never convex)")


@dataclass(frozen=True)
class ServerSpec:
    """What the server does in a round."""

    rate: float = _key(1.0, "server rate g of FedAvg")
    participation: str = _key("all", "all, poisson(RATE), or fixed(COUNT) (conditional at best)")
    clip: float = _key(0.0, "bound on the norm of a client's update; 0 is off (with it sifu is conditional at best)")
    noise: float = _key(0.0, "noise on every client's update, as a multiple of clip (method dp); 0 is off")
    rejected: OnRejection = _key(
        "stop", "when a reply is refused (NaN, wrong shape...): stop, leave out that reply, or drop the round"
    )
    update_bound: float = _key(0.0, "refuse updates of a larger norm, which bounds every Psi beforehand; 0 is off")


@dataclass(frozen=True)
class StopSpec:
    """When training and retraining stop."""

    target: float = _key(0.95, "stop at this accuracy on the active clients' data; 0 runs max_rounds")
    min_rounds: int = _key(1, "never stop before this many rounds")
    max_rounds: int = _key(2000, "always stop after this many rounds")
    evaluate_every: int = _key(1, "rounds between evaluations")
    evaluation: Literal["fixed", "authors"] = _key(
        "fixed", "fixed: every evaluate_every rounds; authors: every 20, and more often close to the target"
    )


@dataclass(frozen=True)
class GroupsSpec:
    """Groups of clients that train apart before they merge (method groups: exact forgetting for any model)."""

    count: int = _key(0, "how many groups train apart at first; 0: none, everyone trains together from the start")
    rounds: int = _key(0, "rounds apart, fixed beforehand; they count towards stop.max_rounds")
    rebuild: Literal["now", "later", "never"] = _key(
        "now", "a group whose model was erased is built again after the request, by sifu rebuild, or never"
    )


@dataclass(frozen=True)
class PrivacySpec:
    """What a request promises unless it says otherwise."""

    epsilon: float = _key(10.0, "budget epsilon; 1 is strong, 10 is weak")
    delta: float = _key(0.01, "budget delta")
    sigma: float | Literal["auto"] = _key("auto", 'noise; "auto" chooses it at the request, from recorded scalars')
    unit: Unit = _key("client", "client covers each client by itself; joint covers a request's clients together")
    scope: Scope = _key("all", "all covers every later release; latest only the latest one (the paper's rule)")
    calibration: Calibration = _key("exact", "exact (Balle & Wang), or classical (the paper's theorem 2)")
    accounting: Accounting = _key("round", "round; population reproduces the paper's figures, certifies nothing")
    retention: Retention = _key("paper", "paper keeps models from before the rollback; strict erases them too")
    reserve: float = _key(0.0, "fraction of a budget kept back for later requests")
    noise: NoiseSource = _key("system", "system entropy; seeded is for experiments, certifies nothing")


@dataclass(frozen=True)
class RegularitySpec:
    """Which bound on a round's expansion is used."""

    kind: Literal["measured", "assumed"] = _key(
        "measured", "measured from the clients' data, or assumed (the certificate then says so)"
    )
    factor: float = _key(1.0, "the assumed expansion B of one local step; the paper takes 1 for networks")


@dataclass(frozen=True)
class KeepSpec:
    """Which models are kept to go back to, and what else."""

    models: int = _key(64, "at most this many models on disk")
    ratio: float = _key(1.25, "ratio of the ladder of levels when sigma is auto")
    lowest_sigma: float = _key(1e-4, "the ladder's lowest sigma")
    highest_sigma: float = _key(10.0, "the ladder's highest sigma")
    gram_clients: int = _key(0, "keep Gram matrices of rounds with at most this many clients (joint requests)")
    updates_every: int = _key(0, "keep the clients' updates of every Nth round (fed_eraser, fed_accum); 0: never")
    statistics: Literal["clients", "sum"] = _key(
        "clients", "ridge: clients keeps each one's statistics, so a forget asks nobody; sum asks those who stay again"
    )


@dataclass(frozen=True)
class Spec:
    """A whole run."""

    seed: int = _key(1, "seeds data, participation and batches; never the certified noise")
    data: DataSpec = field(default_factory=DataSpec)
    model: ModelSpec = field(default_factory=ModelSpec)
    features: FeaturesSpec = field(default_factory=FeaturesSpec)
    ridge: RidgeSpec = field(default_factory=RidgeSpec)
    local: LocalSpec = field(default_factory=LocalSpec)
    server: ServerSpec = field(default_factory=ServerSpec)
    stop: StopSpec = field(default_factory=StopSpec)
    groups: GroupsSpec = field(default_factory=GroupsSpec)
    privacy: PrivacySpec = field(default_factory=PrivacySpec)
    regularity: RegularitySpec = field(default_factory=RegularitySpec)
    keep: KeepSpec = field(default_factory=KeepSpec)

    def to_mapping(self) -> dict[str, Any]:
        """As plain values, ready for JSON."""
        return asdict(self)

    @staticmethod
    def from_mapping(mapping: Mapping[str, Any]) -> Spec:
        """From plain values; unknown keys, wrong types and values out of range are refused by name."""
        spec: Spec = _parse(Spec, mapping, "")
        _check_ranges(spec)
        return spec


@functools.cache
def _hints(kind: type[Any]) -> dict[str, Any]:
    """The types of a section's keys; finding them evaluates our own annotations, once."""
    return typing.get_type_hints(kind)


def _parse(kind: type[Any], mapping: Any, prefix: str) -> Any:
    if not isinstance(mapping, Mapping):
        raise InputError(f"{prefix.rstrip('.') or 'the spec'} must be a table of keys, found {mapping!r}")
    hints = _hints(kind)  # type: ignore[arg-type]
    names = {entry.name for entry in fields(kind)}
    values = {}
    for key, value in mapping.items():
        if key not in names:
            raise InputError(f"unknown key {prefix}{key!s} in the spec{nearest_hint(prefix, str(key), kind)}")
        hint = hints[key]
        values[key] = (
            _parse(hint, value, f"{prefix}{key}.")
            if isinstance(hint, type) and is_dataclass(hint)
            else _cast(hint, value, prefix + key)
        )
    return kind(**values)


def nearest_hint(prefix: str, key: str, kind: type[Any] = Spec) -> str:
    """A sentence with the nearest known keys, here or in another section."""
    here = [prefix + entry.name for entry in fields(kind)]
    everywhere = [
        f"{section.name}.{entry.name}"
        for section in fields(Spec)
        if section.name != "seed"
        for entry in fields(_hints(Spec)[section.name])
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


def _check_ranges(spec: Spec) -> None:
    def demand(holds: bool, name: str, value: object, wanted: str) -> None:
        if not holds:
            raise InputError(f"{name} must be {wanted}, found {value}")

    demand(spec.seed >= 0, "seed", spec.seed, "0 or more")
    demand(spec.data.clients >= 2, "data.clients", spec.data.clients, "at least 2")
    demand(spec.data.samples_per_client >= 0, "data.samples_per_client", spec.data.samples_per_client, "0 or more")
    demand(spec.data.watermark >= 0, "data.watermark", spec.data.watermark, "0 or more")
    demand(spec.data.alpha > 0, "data.alpha", spec.data.alpha, "positive")
    demand(
        spec.local.rate == "auto" or 0 < spec.local.rate <= 1e200, "local.rate", spec.local.rate, "positive, or auto"
    )
    demand(0 <= spec.model.outputs <= 10**6, "model.outputs", spec.model.outputs, "in 0 to 1000000")
    demand(1 <= spec.local.steps <= 10**6, "local.steps", spec.local.steps, "in 1 to 1000000")
    demand(
        spec.local.momentum == 0 or spec.local.steps <= 1000,
        "local.steps",
        spec.local.steps,
        "at most 1000 with momentum",
    )
    demand(
        0 <= spec.local.calibration_steps <= spec.local.steps,
        "local.calibration_steps",
        spec.local.calibration_steps,
        "in 0 to local.steps",
    )
    demand(spec.local.batch >= 0, "local.batch", spec.local.batch, "0 or more")
    demand(0 <= spec.local.momentum < 1, "local.momentum", spec.local.momentum, "in [0, 1)")
    demand(
        not spec.local.nesterov or spec.local.momentum > 0,
        "local.momentum",
        spec.local.momentum,
        "positive with local.nesterov",
    )
    demand(spec.local.weight_decay >= 0, "local.weight_decay", spec.local.weight_decay, "0 or more")
    demand(
        spec.local.clip == 0 or 1e-9 <= spec.local.clip <= 1e9, "local.clip", spec.local.clip, "0, or in 1e-9 to 1e9"
    )
    demand(0 < spec.server.rate <= 10, "server.rate", spec.server.rate, "in (0, 10]")
    Participation.parse(spec.server.participation)
    server = spec.server
    ReplyRules(server.rejected, server.update_bound)
    demand(server.clip == 0 or 1e-9 <= server.clip <= 1e9, "server.clip", server.clip, "0, or in 1e-9 to 1e9")
    demand(
        server.noise == 0 or (server.clip > 0 and 1e-9 <= server.noise <= 1e6),
        "server.noise",
        server.noise,
        "0, or in 1e-9 to 1e6 with server.clip > 0",
    )
    demand(0 <= spec.stop.target <= 1, "stop.target", spec.stop.target, "in [0, 1]")
    demand(spec.stop.evaluate_every >= 1, "stop.evaluate_every", spec.stop.evaluate_every, "at least 1")
    demand(spec.stop.min_rounds >= 0, "stop.min_rounds", spec.stop.min_rounds, "0 or more")
    demand(
        spec.stop.max_rounds >= max(1, spec.stop.min_rounds),
        "stop.max_rounds",
        spec.stop.max_rounds,
        "at least 1 and at least stop.min_rounds",
    )
    _check_groups(spec)
    check_deliverable(spec.privacy.epsilon, spec.privacy.delta)
    if spec.privacy.sigma != "auto":
        check_noise(spec.privacy.sigma)
    demand(0 <= spec.privacy.reserve < 1, "privacy.reserve", spec.privacy.reserve, "in [0, 1)")
    demand(0 < spec.regularity.factor <= 1e6, "regularity.factor", spec.regularity.factor, "in (0, 1e6]")
    demand(spec.keep.models >= 3, "keep.models", spec.keep.models, "at least 3: the first, the last noised, one more")
    demand(spec.keep.ratio >= 1.001, "keep.ratio", spec.keep.ratio, "at least 1.001")
    demand(
        1e-12 <= spec.keep.lowest_sigma <= spec.keep.highest_sigma <= 1e12,
        "keep.lowest_sigma",
        spec.keep.lowest_sigma,
        "at least 1e-12 and at most keep.highest_sigma, itself at most 1e12",
    )
    demand(spec.keep.gram_clients >= 0, "keep.gram_clients", spec.keep.gram_clients, "0 or more")
    demand(spec.keep.updates_every >= 0, "keep.updates_every", spec.keep.updates_every, "0 or more")
    _check_features(spec, demand)
    if spec.model.kind == RIDGE:
        _check_ridge(spec, demand)


Demand = Callable[[bool, str, object, str], None]
"""Refuses a key (holds, name, found, wanted)."""


def _check_features(spec: Spec, demand: Demand) -> None:
    features, linear = spec.features, spec.model.kind in (*LINEAR_KINDS, RIDGE, "python")
    demand(0 <= features.seed < 2**53, "features.seed", features.seed, "in 0 to 2^53")
    demand(0 <= features.count <= 10**5, "features.count", features.count, "in 0 to 100000")
    fourier_pairs = features.kind != "random_fourier" or features.count % 2 == 0
    demand(fourier_pairs, "features.count", features.count, "even for random_fourier")
    demand(0 < features.norm <= 1e6, "features.norm", features.norm, "in (0, 1e6]")
    demand(0 < features.bandwidth <= 1e6, "features.bandwidth", features.bandwidth, "in (0, 1e6]")
    demand(
        features.kind == "none" or linear,
        "features.kind",
        features.kind,
        f"none for model.kind = {spec.model.kind!r}: features are for linear heads (softmax, ridge...)",
    )
    unit = features.kind not in IMAGE_FEATURES or spec.data.normalise == "unit"
    demand(unit, "data.normalise", spec.data.normalise, f"unit with features.kind = {features.kind!r}")


def _check_ridge(spec: Spec, demand: Demand) -> None:
    """A head in closed form is one sum over all clients: what belongs to rounds of descent has no meaning there."""
    ridge, r = spec.ridge, spec.ridge.regularisation
    demand(r == "auto" or 1e-12 <= r <= 1e6, "ridge.regularisation", r, "in 1e-12 to 1e6, or auto")
    demand(1 <= ridge.feature_bits <= 24, "ridge.feature_bits", ridge.feature_bits, "in 1 to 24")
    demand(1 <= ridge.target_bits <= 24, "ridge.target_bits", ridge.target_bits, "in 1 to 24")
    demand(0 < ridge.scale <= 1e12, "ridge.scale", ridge.scale, "in (0, 1e12]")
    demand(abs(ridge.shift) <= 1e12, "ridge.shift", ridge.shift, "at most 1e12 in size")
    of_labels = ridge.task != "multi_label" or 0 <= ridge.shift <= 1
    demand(of_labels, "ridge.shift", ridge.shift, "in 0 to 1 for multi_label")
    for name, found, wanted in (
        ("server.participation", spec.server.participation, "all"),
        ("server.clip", spec.server.clip, 0.0),
        ("server.rate", spec.server.rate, 1.0),
        ("keep.gram_clients", spec.keep.gram_clients, 0),
        ("keep.updates_every", spec.keep.updates_every, 0),
        ("model.dtype", spec.model.dtype, "float64"),
    ):
        demand(found == wanted, name, found, f"{wanted} with model.kind = {RIDGE!r}")


def _check_groups(spec: Spec) -> None:
    """Groups need rounds apart that are fixed beforehand, and a way of training in which each stands by itself."""
    groups = spec.groups
    if groups.count == 0 and groups.rounds == 0:
        return
    if not 2 <= groups.count <= MOST_GROUPS:
        raise InputError(f"groups.count must be 0 or in 2 to {MOST_GROUPS}, found {groups.count}")
    if not 1 <= groups.rounds < spec.stop.max_rounds:
        raise InputError(
            f"groups.rounds must be at least 1 and below stop.max_rounds = {spec.stop.max_rounds}, found "
            f"{groups.rounds}: it is fixed before training, and common rounds follow"
        )
    if not Participation.parse(spec.server.participation).independent:
        raise InputError(
            f"server.participation = {spec.server.participation} cannot be combined with groups, which would each draw "
            "as many: use all or poisson(RATE)"
        )
    if spec.model.kind == RIDGE:
        raise InputError("groups.count must be 0 with model.kind = 'ridge': its heads are solved, not trained")
    if spec.server.noise > 0:
        raise InputError("server.noise (method dp) cannot be combined with groups: its rounds apart are not counted")


def commented_toml(spec: Spec) -> str:
    """The spec as TOML with a comment beside every key: what `sifu init` writes."""
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
