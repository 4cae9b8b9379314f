"""Construction of a federation from a spec: its data, its clients, and the embedded engine.

If a model is trained on a public feature map, clients hold features instead of samples. A closed-form head maps the
samples itself.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from sifu.core.closed_form_engine import targets_of
from sifu.core.engine import Engine
from sifu.core.operator_words import FLOWER, LOOP, NPZ, OWN_FILES, PYTHON, TABLE
from sifu.core.replies import ALL, ReplyRules
from sifu.core.round import keyed_generator
from sifu.core.spec import IMAGE_FEATURES, DataSpec, Spec
from sifu.core.spec.regime import penalty_of
from sifu.core.spec.sections import ROW_KINDS
from sifu.data.client_data import ClientData
from sifu.data.digits import CLASSES, DIGITS
from sifu.data.table_keys import parse_classes
from sifu.errors import InputError
from sifu.run.features import map_of, with_features
from sifu.theory.arrays import Array
from sifu.theory.facts import DECLARED_FIXED, FIXED_CONSTANTS
from sifu.theory.participation import Participation

REAL_OUTPUTS = ("logistic", "least_squares")
"""Model kinds that do not have one output per class."""


WITHOUT_FILES = {
    PYTHON: "this run was made from Python with its own data: continue it from Python with sifu.open_run(folder, "
    "clients=...)",
    FLOWER: "this run trains on Flower nodes, which keep their data: file requests with sifu request; its server "
    "executes them while it runs, or when it is started again with flwr run",
    LOOP: "your own program communicates with the clients of this run: file requests with sifu request; its "
    "sifu.ServerLoop executes them while it runs, or when it is started again",
}
"""Error message for each value of `data.name` whose data sifu cannot read."""


def executed_elsewhere(spec: Spec) -> str:
    """Return advice for runs whose requests `sifu forget` cannot execute by itself, or "" for other runs."""
    if spec.data.name == FLOWER:
        return (
            "The clients of this run are nodes of Flower: its server executes the request automatically between "
            "rounds, as soon as nothing is missing. If it is not running, start it with flwr run."
        )
    if spec.data.name == LOOP:
        return (
            "Your own program communicates with the clients of this run: its sifu.ServerLoop executes the request "
            "between rounds. If it is not running, start it."
        )
    if spec.data.name == PYTHON or spec.model.kind == "python":
        return (
            "This run was made from Python with custom data or a custom model: execute the request there, with "
            "sifu.open_run(folder, clients=..., model=...).forget(request=...)."
        )
    return ""


def clients_from_spec(
    spec: Spec,
    *,
    dataset: Any = None,
    device: str = "cpu",
    tested: bool = True,
) -> tuple[Any, ...]:
    """Return the clients' data that a spec describes, as features if the run trains on features.

    `dataset` is the spec's data set, if it is already loaded. Without `tested`, a data.test_file that cannot be read is
    ignored, since no client trains on its rows.
    """
    from sifu.data import from_dataset, given_clients, partition

    data = spec.data
    if data.name in WITHOUT_FILES:
        raise InputError(WITHOUT_FILES[data.name])
    if dataset is None:
        dataset = _dataset(spec, tested=tested)
    given, kind, names = dataset.client_train, data.partition, None
    if given is not None:
        if kind not in ("auto", "given"):
            raise InputError(
                f"{data.file or data.name} names the client of each row: leave data.partition out, found {kind!r}"
            )
        names, indices = given_clients(given)
    elif kind == "given":
        raise InputError('data.partition = "given" needs an npz file with an array client')
    else:
        indices = partition(
            "iid" if kind == "auto" else kind,
            dataset.y_train,
            data.clients,
            data.samples_per_client or None,
            keyed_generator(spec.seed, "partition"),
            alpha=data.alpha,
        )
    clients = from_dataset(dataset, indices, spec.model.array_dtype, takes_rows(spec), data.normalise, names=names)
    return with_features(spec, clients, device)


def _dataset(spec: Spec, *, tested: bool = True) -> Any:
    """Return the data set of a spec; without `tested`, a test file that cannot be read is ignored."""
    from sifu.data import load
    from sifu.data.table import read_table
    from sifu.data.table_coding import TableCoding

    data = spec.data
    if data.name not in OWN_FILES:
        return load(data.name)
    if not data.file:
        raise InputError(f'data.name = "{data.name}" needs data.file, the path of the file')
    if data.name == NPZ:
        return load(data.file)
    coding = TableCoding.from_spec(data, spec.features, regression=not spec.regime.has_accuracy)
    file, testing = Path(data.file).expanduser(), _testing(data, spec.seed)
    try:
        return read_table(file, coding, **testing)
    except (InputError, OSError):
        if tested or not data.test_file:
            raise
    return read_table(file, coding, **testing | {"test_file": None})


def _testing(data: DataSpec, seed: int) -> dict[str, Any]:
    """Return the arguments of `read_table` that say which rows are held out for testing."""
    test_file = Path(data.test_file).expanduser() if data.test_file else None
    return {"held_out": data.held_out, "test_file": test_file, "seed": seed}


def framed(spec: Spec, frame: Any) -> dict[str, Any]:
    """Return keyword arguments for `clients_from_spec`: a `spec` for tabular data, and the `dataset` read from a frame.

    The spec names the columns, as it does for a file.
    """
    from sifu.data.table import read_frame
    from sifu.data.table_coding import TableCoding

    data = replace(spec.data, name=TABLE, partition="given")
    coding = TableCoding.from_spec(data, spec.features, regression=not spec.regime.has_accuracy)
    dataset = read_frame(frame, coding, **_testing(data, spec.seed))
    return {"spec": replace(spec, data=data), "dataset": dataset}


def columns_of_features(data: DataSpec, frame: Any) -> str:
    """Return the feature columns of a table or a frame, joined as in a spec, or an empty string for other data."""
    from sifu.data.client_data import is_frame
    from sifu.data.table import column_names, frame_names
    from sifu.data.table_coding import TableCoding
    from sifu.data.table_keys import join_names

    has_columns = data.name == TABLE if frame is None else is_frame(frame)
    if not has_columns:
        return ""
    coding = TableCoding.from_spec(data)
    names = column_names(Path(data.file).expanduser(), coding) if frame is None else frame_names(frame)
    return join_names(coding.features_of(names))


def is_table(data: DataSpec) -> bool:
    """Return whether the data are rows of a table, which names the client of each row."""
    return bool(data.columns) or data.name == TABLE


def takes_rows(spec: Spec) -> bool:
    """Return whether samples are passed as rows of numbers, not as images."""
    return spec.model.kind in ROW_KINDS and spec.features.kind not in IMAGE_FEATURES


@dataclass(frozen=True)
class HeldOutRows:
    """Test rows as model inputs, and the client of each row; `clients` is None if the rows belong to no client."""

    x: Any
    y: Any
    clients: Array | None = None

    def of(self, names: Collection[str]) -> HeldOutRows:
        """Return the rows of the named clients, or all rows if they belong to no client."""
        if self.clients is None:
            return self
        chosen = np.isin(self.clients.astype(str), list(names))
        return HeldOutRows(self.x[chosen], self.y[chosen], self.clients[chosen])


def held_out_rows_from_spec(spec: Spec, *, dataset: Any = None) -> HeldOutRows | None:
    """Return the test rows of a spec's data set as model inputs, or None; no client trains on them."""
    data = spec.data
    if data.name in WITHOUT_FILES:
        return None
    if data.name == TABLE and not data.held_out and not data.test_file:
        return None  # the table has no held-out rows, so it need not be read
    if dataset is None:
        dataset = _dataset(spec)
    if dataset.x_test.shape[0] == 0:
        return None
    x = dataset.features("test", dtype=spec.model.array_dtype, flat=takes_rows(spec), normalise=data.normalise)
    if spec.regime.maps_before_training:
        (held,) = with_features(spec, [ClientData("held out", x, dataset.y_test)])
        x = held.x
    return HeldOutRows(x, dataset.y_test, dataset.client_test)


def preprocessing_of(spec: Spec) -> str:
    """Return the status of preprocessing: fixed for sifu's data sets, otherwise the operator's declaration."""
    if spec.data.name == DIGITS:
        return FIXED_CONSTANTS
    return DECLARED_FIXED if spec.data.preprocessing == "fixed" else "done before the data were handed over"


def known_outputs(spec: Spec) -> int:
    """Return the number of outputs that the spec or its data set states, or 0 if it must be counted from the labels."""
    listed = len(parse_classes(spec.data.classes)) if spec.data.name in (TABLE, PYTHON) and spec.data.classes else 0
    if listed and spec.model.outputs not in (0, listed) and spec.model.kind not in REAL_OUTPUTS:
        raise InputError(
            f"model.outputs = {spec.model.outputs}, but data.classes lists {listed}: leave model.outputs out"
        )
    if spec.model.outputs or spec.model.kind in REAL_OUTPUTS:
        return spec.model.outputs
    if listed:
        return listed
    return len(CLASSES) if spec.data.name == DIGITS else 0


def _closed_form_engine(spec: Spec, clients: Any) -> tuple[Engine, Spec]:
    """Return the engine of a closed-form head, and the spec with exactly one round, the solve."""
    from sifu.data.feature_maps import fixed_point
    from sifu.data.feature_maps.build import module_of_features
    from sifu.engines.sim.embedded_heads import ClosedFormFederation

    ridge = spec.ridge
    outputs, from_labels = _outputs_of_head(spec, clients)
    targets, features = targets_of(ridge, outputs), map_of(spec, clients)
    assert features is not None  # a closed-form head always has a map
    fixed = fixed_point(features, targets)
    penalty = penalty_of(ridge, fixed.features)
    engine = ClosedFormFederation(
        clients,
        features,
        targets,
        fixed,
        penalty,
        preprocessing=preprocessing_of(spec),
        declared=features.is_declared,
        module=module_of_features(features, spec),
        from_labels=from_labels,
    )
    return engine, replace(spec, **spec.regime.settled(features=fixed.features))


def _outputs_of_head(spec: Spec, clients: Any) -> tuple[int, bool]:
    """Return the number of outputs of a closed-form head, and whether it was counted from the clients' labels."""
    if spec.ridge.task != "classification":
        labels = clients[0].y
        return spec.model.outputs or (np.shape(labels)[1] if np.ndim(labels) == 2 else 1), False
    known = known_outputs(spec)
    counted = 1 + max(int(np.max(client.y)) for client in clients)
    if known and known < counted:
        raise InputError(f"model.outputs = {known}, but the clients' labels need {counted}")
    return max(known or counted, 2), not known


def local_training(spec: Spec) -> Any:
    """Return the settings of a client's local training; without a limit, only its safe step limits a client's rate."""
    from sifu.engines.sim import LocalTraining

    local = spec.local
    rule = local.momentum, local.weight_decay
    rate = math.inf if local.rate == "auto" else local.rate
    return LocalTraining(rate, local.steps, local.batch or None, *rule)


def _rounds_engine(
    spec: Spec, clients: Any, model: Any, numbers: Sequence[int] | None, trainer: str | None
) -> tuple[Engine, Spec]:
    """Return the engine for training in rounds, and the spec."""
    from sifu.engines.sim import SimulatedFederation, SimulationSettings, make_model
    from sifu.engines.sim.embedded_clients import OBJECTIVES, count_outputs, input_shape

    clients = with_features(spec, clients)
    from_labels = False
    if model is None:
        if spec.model.kind == "python":
            raise InputError(
                "this run was made from Python with its own model: continue it from Python with "
                "sifu.open_run(folder, model=..., clients=...)"
            )
        objective = OBJECTIVES[spec.model.kind if spec.model.kind in OBJECTIVES else "softmax"]
        counted = count_outputs(clients, objective)
        outputs = known_outputs(spec)
        if outputs and outputs < counted:
            raise InputError(f"model.outputs = {outputs}, but the clients' labels need {counted}")
        from_labels = not outputs and spec.model.kind not in REAL_OUTPUTS
        outputs = outputs or counted
        model = make_model(spec.model.kind, input_shape(clients), outputs, init=spec.model.init)

    server = spec.server

    federation = SimulatedFederation(
        clients,
        model,
        local_training(spec),
        SimulationSettings(
            participation=Participation.parse(spec.server.participation),
            dtype=spec.model.dtype,
            seed=spec.seed,
            preprocessing=preprocessing_of(spec),
            shape_from_labels=from_labels,
            features=getattr(clients[0], "features", "") if len(clients) else "",
            features_declared=getattr(clients[0], "features_declared", False) if len(clients) else False,
            features_module=getattr(clients[0], "module", "") if len(clients) else "",
            module_is_pure=spec.model.module_is_pure,
            replies=ReplyRules(server.rejected, server.update_bound),
            numbers=numbers,
            trainer=trainer,
        ),
    )
    return federation, spec


def engine_from_spec(
    spec: Spec, clients: Any, model: Any = None, numbers: Sequence[int] | None = None, trainer: str | None = None
) -> tuple[Engine, Spec]:
    """Return the embedded engine, and the spec with automatic values replaced by the engine's values.

    Args:
        spec: Spec of the run.
        clients: Clients with their data.
        model: A `LinearModel` or `ModuleModel` of a Python user, used instead of the spec's model.
        numbers: Indices that key the clients' random draws, if some clients of a run are left out.
        trainer: Trainer that a run recorded, or None for a new run.
    """
    if spec.server.wait != ALL:
        raise InputError(
            f"server.wait = {spec.server.wait!r} is only for Flower, where clients can be late: leave it out, or set "
            "all"
        )
    if spec.regime.solves:
        return _closed_form_engine(spec, clients)
    return _rounds_engine(spec, clients, model, numbers, trainer)
