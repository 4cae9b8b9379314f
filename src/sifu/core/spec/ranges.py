"""The range of every key of a spec, section by section."""

from __future__ import annotations

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
    RidgeSpec,
    ServerSpec,
    StopSpec,
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
