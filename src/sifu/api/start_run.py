"""Entry points that train a new run, and continue or open an existing one."""

from __future__ import annotations

import platform
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from sifu.api.run import Run
from sifu.api.spec_file import load_spec
from sifu.choices import Device
from sifu.core.client_names import check_lookalikes, check_names
from sifu.core.engine import Engine
from sifu.core.operator_words import PYTHON
from sifu.core.premises import MeasuredRegularity
from sifu.core.round import NormalSource
from sifu.core.spec import Spec
from sifu.core.spec.sections import IMAGE_FEATURES
from sifu.data.client_data import is_frame
from sifu.data.dataset import sample_digest
from sifu.data.table import reading_once
from sifu.errors import InputError, SifuWarning
from sifu.run.clients_and_engine import clients_from_spec, columns_of_features, engine_from_spec
from sifu.run.devices import (
    check_choice,
    check_repeats,
    facts_of,
    features_device,
    on_device,
)
from sifu.run.engine_check import BuiltEngine, check_as_specified
from sifu.run.given import ClientsGiven, ModelGiven, as_clients, as_model, check_names_differ
from sifu.run.recorded_data import clients_again
from sifu.run.run_engines import Arrange, Numbers, shown_digests
from sifu.run.training import ProgressCallback
from sifu.store.database import DATABASE
from sifu.store.reader import RunReader
from sifu.store.unfinished import NewRun
from sifu.store.writer import RunWriter
from sifu.theory.facts import BY_PARTICIPANTS
from sifu.theory.participation import Participation
from sifu.version import __version__


def open_run(
    folder: str | Path,
    *,
    model: ModelGiven | None = None,
    clients: ClientsGiven | None = None,
    engine: Engine | None = None,
    device: Device = "auto",
    noise: NormalSource | None = None,
) -> Run:
    """Open the existing run in `folder`.

    Args:
        folder: The run folder.
        model: Model of a run made from Python, as for `train`; needed to continue such a run.
        clients: Clients of a run made from Python, as for `train`; needed to continue such a run.
        engine: Engine to use instead of building one; it must have the same model, clients and training.
        device: As in `train`.
        noise: As for `train`; only for a run that was made with one.

    Returns:
        The run.

    Raises:
        InputError: If the folder holds no run.
    """
    check_choice(device)
    if isinstance(clients, Iterable):
        check_names_differ(clients)

    def make_engine(spec: Spec, arrange: Arrange, numbers: Numbers, trainer: str | None) -> Engine | None:
        if engine is not None:
            return engine if numbers is None else None
        at = features_device(spec, device)
        data = as_clients(clients if clients is not None else clients_again(spec, at), spec, at)
        data = arrange(data)
        built, _ = engine_from_spec(spec, data, as_model(model), numbers, trainer)
        if numbers is not None and not spec.regime.solves:
            return built
        # `auto` stays on the device the run began on: a GPU rounds differently, except for heads on other features.
        bound = not spec.regime.solves or spec.features.kind in IMAGE_FEATURES
        with RunReader(Path(folder)) as reader:
            begun_on_cpu = reader.facts.get("engine") == BY_PARTICIPANTS and bound
        return on_device(built, data, spec, "cpu" if device == "auto" and begun_on_cpu else device, trainer)

    opened = Run(folder, make_engine, noise=noise)
    given = opened._engines
    given.model, given.frame = model, clients if is_frame(clients) else None
    given.given = clients is not None or engine is not None
    given.clients = None if clients is None else lambda: as_clients(clients, opened.spec)
    return opened


@reading_once()
def train(
    spec: Spec | Mapping[str, Any] | str | Path | None = None,
    *,
    run: str | Path,
    model: ModelGiven | None = None,
    clients: ClientsGiven | None = None,
    progress: ProgressCallback | None = None,
    engine: Engine | None = None,
    device: Device = "auto",
    noise: NormalSource | None = None,
    module_is_pure: bool = False,
) -> Run:
    """Train with FedAvg, or solve a closed-form head, in the folder `run`; continue an unfinished run.

    Args:
        spec: A Spec, a mapping, or the path of a TOML file.
        run: The run folder.
        model: A function that makes a torch module, or a `sifu.engines.sim` model, used instead of the spec's model.
        clients: A mapping from names to (x, y) arrays or to torch data sets; or a frame of pandas or polars, or a data
            set of Hugging Face, whose columns the spec names as for a table (`data.label`, `data.client`, ...).
        progress: Callback invoked after each round.
        engine: Engine to use instead of building one from the spec, with which it must agree.
        device: auto, cpu or cuda (`sifu.run.devices`).
        noise: Source of noise on models, such as numpy's `Generator`, by default the operating system. With any other
            source, whoever can repeat its draws can remove the noise, so no level is proven.
        module_is_pure: Declares that `model` computes from its inputs and parameters alone, as `model.module_is_pure`.

    Returns:
        The trained run.

    Raises:
        InputError: If the spec, the model or the clients cannot be used, or the folder holds a run of another spec.
    """
    check_choice(device)
    if spec is None:
        spec = Spec()
    elif isinstance(spec, str | Path):
        spec = load_spec(spec)
    elif not isinstance(spec, Spec):
        spec = Spec.from_mapping(spec)
    if module_is_pure:
        spec = replace(spec, model=replace(spec.model, module_is_pure=True))
    if model is not None:
        from sifu.engines.sim import ModuleModel

        spec = replace(spec, model=replace(spec.model, kind="python"))
        if spec.regularity.kind == "measured" and isinstance(as_model(model), ModuleModel):
            raise InputError(
                "the expansion of your own module's steps is unknown: set regularity.kind = 'assumed' (and factor); "
                "every certificate then states this assumption"
            )
    if clients is not None:
        spec = replace(spec, data=replace(spec.data, name=PYTHON))
    folder, digests, given = Path(run), tuple[str, ...](), engine is None
    again = partial(
        open_run,
        folder,
        model=model,
        clients=clients,
        device=device,
        noise=noise,
    )
    if (folder / DATABASE).exists():
        existing = again(engine=engine)
        check_same_spec(existing, spec)
        return existing.train(progress)
    if engine is None:
        at = features_device(spec, device)
        data = clients if clients is not None else clients_from_spec(spec, device=at)
        data = as_clients(data, spec, at)
        warn_of_data(spec, data)
        engine, resolved = engine_from_spec(spec, data, as_model(model))
        digests = tuple(sample_digest(client) for client in data)
        engine = on_device(engine, data, resolved, device)
    else:
        check_as_specified(spec, engine.facts)
        check_repeats(engine)
        digests = shown_digests(engine) or ()
        resolved = replace(spec, **spec.regime.settled())
    # Record the location of the data, so that later commands find them from any working directory.
    data_spec = resolved.data
    located = replace(
        data_spec,
        file=_absolute(data_spec.file),
        test_file=_absolute(data_spec.test_file),
        columns=columns_of_features(data_spec, clients) if given else "",
    )
    model_at = resolved.features.model
    features = replace(resolved.features, model=_absolute(model_at) if Path(model_at).is_dir() else model_at)
    create_run(folder, spec, replace(resolved, data=located, features=features), engine, digests, noise).close()
    created = again()
    created._engines.use(BuiltEngine(engine))
    return created.train(progress)


def _absolute(place: str | Path) -> str:
    return str(Path(place).expanduser().resolve()) if place else ""


def create_run(
    folder: Path,
    given: Spec,
    resolved: Spec,
    engine: Engine,
    sample_digests: Sequence[str] = (),
    noise: NormalSource | None = None,
) -> RunWriter:
    """Create an untrained run with the clients of an engine."""
    check_names([client.name for client in engine.clients])
    check_lookalikes(client.name for client in engine.clients)
    MeasuredRegularity.of(engine.clients, engine.facts, resolved)  # fail if Psi can never be tracked
    new = NewRun(
        given.to_mapping(),
        resolved.to_mapping(),
        engine.layout,
        engine.clients,
        facts_of(engine),
        versions(),
        engine.initial_model(0),
        sample_digests,
        noise is not None,
    )
    return RunWriter.create(folder, new)


def check_same_spec(existing: Run, given: Spec) -> None:
    """Check that a run is continued with the spec it was created with."""
    with existing.reader() as reader:
        recorded, wanted = reader.asked, given.to_mapping()
    for section, values in wanted.items():
        pairs = values.items() if isinstance(values, dict) else [("", values)]
        for key, value in pairs:
            recorded_value = recorded[section][key] if key else recorded[section]
            if recorded_value != value:
                name = f"{section}.{key}" if key else section
                raise InputError(
                    f"{existing.folder} was made with {name} = {recorded_value!r}, the spec says {value!r}: "
                    "use the same spec to continue it, or another folder"
                )


NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")


def versions() -> dict[str, str]:
    """Return the versions of the software and, if there is a GPU, its name, driver and libraries."""
    import torch

    ours = {"sifu": __version__, "python": platform.python_version()}
    ours |= {"numpy": np.__version__, "torch": torch.__version__}
    if torch.cuda.is_available():
        ours |= {"gpu": torch.cuda.get_device_name(), "cuda": str(torch.version.cuda)}
        ours["cudnn"] = str(torch.backends.cudnn.version())  # type: ignore[no-untyped-call]
        if NVIDIA_DRIVER.exists():
            ours["driver"] = NVIDIA_DRIVER.read_text().splitlines()[0]
    return ours


def warn_of_data(spec: Spec, clients: Sequence[Any]) -> None:
    """Warn about likely mistakes in the data before training; the command line prints each warning on stderr."""
    sentences = []
    participation = Participation.parse(spec.server.participation)
    if participation.kind == "fixed" and participation.count > len(clients):
        sentences.append(
            f"server.participation = {spec.server.participation!r}, but there are {len(clients)} clients: all of them "
            'take part in every round. Write "all", which can be proven'
        )
    empty = [client.name for client in clients if not np.any(client.x)]
    if len(empty) == len(clients):
        sentences.append("every feature of every client is 0: there is nothing to learn from. Check how they were made")
    elif empty:
        sentences.append(f"all features of {len(empty)} of {len(clients)} clients are 0, the first is {empty[0]!r}")
    labels = [np.asarray(client.y) for client in clients]
    if all(y.dtype.kind in "biu" and y.ndim == 1 for y in labels):
        seen = {int(label) for y in labels for label in (y.min(), y.max())}
        if len(seen) == 1:
            sentences.append(f"all labels are the same class, {seen.pop()}: there is nothing to classify")
    for sentence in sentences:
        warnings.warn(sentence, SifuWarning, stacklevel=3)
