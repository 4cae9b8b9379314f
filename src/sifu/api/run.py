"""A run from Python: train, plan, request, forget, verify, export."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from sifu.api.certification import RecordedRequest
from sifu.api.federation import clients_from_spec, engine_from_spec
from sifu.core.certificate import auditor_form, public_form
from sifu.core.engine import Engine
from sifu.core.errors import InputError, NotCertifiableError
from sifu.core.history import PathNode
from sifu.core.ledger import finite_or_text
from sifu.core.premises import Level
from sifu.core.retention import depths_to_erase
from sifu.core.spec import Spec
from sifu.core.terms import RequestTerms, SigmaChoice, check_request_id
from sifu.methods.plan import Plan
from sifu.methods.registry import method_named
from sifu.methods.training import (
    ProgressCallback,
    RecordedTraining,
    evaluation_row,
    retrain_unrecorded,
    should_stop,
    uninterrupted,
)
from sifu.methods.view import RunView
from sifu.store import keys
from sifu.store.database import DATABASE
from sifu.store.reader import EvaluationRow, RequestRow, RunReader
from sifu.store.rows import NodeRow
from sifu.store.writer import NewModel, NewRows, RunWriter, utc_now
from sifu.version import __version__

LEVELS: tuple[Level, ...] = ("none", "conditional", "proven", "exact")


@dataclass(frozen=True)
class Outcome:
    """What came of one request."""

    request: str
    clients: tuple[str, ...]
    method: str
    level: str
    epsilon: float
    delta: float
    delta_reached: float
    sigma: float
    psi: float
    psi_star: float
    rollback_to: int
    rounds: int
    scratch_rounds: int | None
    accuracy: float | None
    accuracy_forgotten_before: float | None
    accuracy_forgotten_after: float | None


class Run:
    """A run folder and, where training is needed, the engine that goes with it."""

    def __init__(self, folder: str | Path, make_engine: Callable[[Spec], Engine] | None = None) -> None:
        self.folder = Path(folder)
        RunReader(self.folder).close()  # refuses at once what is not a run
        self._make_engine = make_engine
        self._engine: Engine | None = None

    # -- reading -----------------------------------------------------------------------------------------

    def reader(self) -> RunReader:
        """A fresh reader; close it when done."""
        return RunReader(self.folder)

    @property
    def spec(self) -> Spec:
        """The merged spec of the run."""
        reader = self.reader()
        try:
            return Spec.from_mapping(reader.spec)
        finally:
            reader.close()

    def plan(self, clients: Sequence[str], **terms: Any) -> Plan:
        """What a request would do: node, noise, rounds, level. Changes nothing.

        `terms` are those of a request: epsilon, delta, sigma, unit, scope, calibration, retention, reserve,
        method; what is not given comes from the run's spec.
        """
        reader = self.reader()
        try:
            with reader.snapshot():
                view = RunView(reader)
                asked = make_terms(view.spec, clients, terms)
                return method_named(asked.method).plan(view, asked)
        finally:
            reader.close()

    def verify(self, public_key: str | None = None) -> Any:
        """Recompute every claim of the run from its recorded scalars, offline."""
        from sifu.api.verification import verify_run

        return verify_run(self.folder, public_key)

    def outcomes(self) -> list[Outcome]:
        """What came of the requests that are done, in order."""
        reader = self.reader()
        try:
            with reader.snapshot():
                return [outcome_of(reader, one) for one in reader.requests() if one.status == "done"]
        finally:
            reader.close()

    def export(self, path: str | Path) -> Path:
        """Write the current released model as safetensors."""
        from sifu.store.files import model_bytes, write_atomically

        target = Path(path)
        reader = self.reader()
        try:
            if reader.phase != "ready":
                raise InputError(
                    f"the run is still {reader.phase}: its current model is not a released one. "
                    "Finish it first (sifu train or sifu forget)"
                )
            if not target.parent.is_dir():
                raise InputError(f"there is no folder {target.parent} to write {target.name} into")
            write_atomically(target, model_bytes(reader.layout, reader.load_model(reader.tip)))
        finally:
            reader.close()
        return target

    # -- writing -----------------------------------------------------------------------------------------

    def engine(self) -> Engine:
        """The engine of this run, built when it is first needed."""
        if self._engine is None:
            spec = self.spec
            if self._make_engine is None:
                self._engine, _ = engine_from_spec(spec, clients_from_spec(spec))
            else:
                self._engine = self._make_engine(spec)
            self._check_engine(self._engine)
        return self._engine

    def _check_engine(self, engine: Engine) -> None:
        reader = self.reader()
        try:
            recorded = reader.clients()
        finally:
            reader.close()
        if recorded != engine.clients:
            different = [a.name for a, b in zip(recorded, engine.clients, strict=False) if a != b]
            raise InputError(
                f"the clients' data are not those the run was made with: {len(engine.clients)} clients, "
                f"{len(recorded)} recorded, first difference at {different[0] if different else 'the end'}"
            )

    def train(self, progress: ProgressCallback | None = None) -> Run:
        """Go on with the first training until its stop rule holds; nothing to do if it already does."""
        engine = self.engine()
        writer = RunWriter.open(self.folder)
        try:
            if writer.phase == "training":
                RecordedTraining(engine, writer, RunView(writer)).run("training", progress)
                with uninterrupted():
                    writer.record("training done", {"run": {"phase": "ready"}, "node": writer.tip})
        finally:
            writer.close()
        return self

    def request(self, clients: Sequence[str], request: str | None = None, **terms: Any) -> str:
        """Put a request into the ledger; the same id with the same terms again changes nothing."""
        writer = RunWriter.open(self.folder)
        try:
            view = RunView(writer)
            asked = make_terms(view.spec, clients, terms)
            return self._receive(writer, view, asked, request)
        finally:
            writer.close()

    def _receive(self, writer: RunWriter, view: RunView, asked: RequestTerms, request: str | None) -> str:
        known = {one.request: one for one in view.requests}
        if request is not None:
            check_request_id(request)
            if request in known:
                if terms_of(known[request]) != asked:
                    raise InputError(f"request {request} is already in the ledger with other terms: use another id")
                return request
        method_named(asked.method)
        view.new_subjects(asked, view.next_order)
        for one in view.requests:
            both = set(one.clients) & set(asked.clients)
            if one.status == "received" and both:
                raise InputError(f"client {', '.join(sorted(both))} already waits in request {one.request}")
        waiting = sum(len(one.clients) for one in view.requests if one.status == "received")
        if len(view.forgotten) + waiting + len(asked.clients) >= len(view.clients):
            raise InputError("the requests together would forget every client: nobody would be left to train with")
        number = len(known) + 1
        while request is None:
            request = f"r{number}" if f"r{number}" not in known else None
            number += 1
        content = asdict(asked) | {"request": request, "clients": list(asked.clients), "sigma": str(asked.sigma)}
        with uninterrupted():
            writer.record("request received", {"request": content})
        return request

    def forget(
        self,
        clients: Sequence[str] | None = None,
        request: str | None = None,
        *,
        min_level: Level | None = None,
        compare_scratch: bool = False,
        progress: ProgressCallback | None = None,
        **terms: Any,
    ) -> list[Outcome]:
        """Carry out the queued requests, or one of them, or a new one for `clients`.

        `min_level` is the least level that is accepted (by default `conditional` for methods that certify):
        a plan below it is refused and nothing is changed. `compare_scratch` also trains Scratch beside each, for the rounds it takes.
        """
        engine = self.engine()
        writer = RunWriter.open(self.folder)
        try:
            self._finish_running(writer, engine, progress)
            if clients is not None:
                view = RunView(writer)
                asked = make_terms(view.spec, clients, terms)
                known = {one.request for one in view.requests}
                if request is None or request not in known:
                    check_level(method_named(asked.method).plan(view, asked), min_level)
                request = self._receive(writer, view, asked, request)
            rows = {one.request: one for one in writer.requests()}
            if request is not None and request not in rows:
                raise InputError(f"there is no request {request!r} in this run; it has {', '.join(rows) or 'none'}")
            chosen = [request] if request is not None else [r for r, one in rows.items() if one.status == "received"]
            for one in chosen:
                if rows[one].status == "received":
                    self._carry_out(writer, engine, one, min_level, progress)
                if compare_scratch:
                    self._compare(writer, engine, one, progress)
            by_id = {one.request: one for one in writer.requests()}
            return [outcome_of(writer, by_id[one]) for one in chosen]
        finally:
            writer.close()

    def _finish_running(self, writer: RunWriter, engine: Engine, progress: ProgressCallback | None) -> None:
        """Go on with a request that an interruption left half-way."""
        for one in writer.requests():
            if one.status == "running":
                self._retrain(writer, engine, one.request, progress)

    def _carry_out(
        self,
        writer: RunWriter,
        engine: Engine,
        request: str,
        min_level: Level | None,
        progress: ProgressCallback | None,
    ) -> None:
        row = next(one for one in writer.requests() if one.request == request)
        view = RunView(writer)
        method = method_named(row.method)
        plan = method.plan(view, terms_of(row))
        check_level(plan, min_level)
        self._roll_back(writer, engine, view, plan, request, method.starting_model(view, plan, engine))
        self._retrain(writer, engine, request, progress)

    def _roll_back(
        self, writer: RunWriter, engine: Engine, view: RunView, plan: Plan, request: str, start: np.ndarray
    ) -> None:
        """One event: the noised model, the charges, the cut, and everything that is erased."""
        tip = view.rows[-1].node.node
        asking = np.array([index for one in plan.subjects for index in one.clients], dtype=np.int64)
        noise_node = 1 + max(row.node.node for row in writer.node_rows())
        fresh = plan.source_node is None
        node = PathNode(
            noise_node,
            plan.source_node,
            "initial" if fresh else "noise",
            plan.order,
            0,
            noise_std=plan.noise_std,
            order=plan.order,
        )
        on_disk = writer.models()
        depth_of = view.path.depth_of
        exposures = view.exposures(plan.subjects)
        cut_after = -1 if fresh else plan.source_depth
        erased_depths = depths_to_erase(
            sorted(depth_of[number] for number in on_disk if number in depth_of),
            cut_after,
            plan.terms.retention,
            lambda depth: any(one.psi_to_hide(depth) > 0.0 for one in exposures),
        )
        erased = {view.path.nodes[depth].node for depth in erased_depths} | (set(on_disk) - set(depth_of))
        root = start if fresh else writer.load_model(view.rows[0].node.node)
        distance = float(np.linalg.norm(start.astype(np.float64) - root.astype(np.float64)))
        psi_max = float(
            RunView.tracker(RunView(writer, tip=plan.source_node)).total(view.active).max(initial=0.0)
            if not fresh
            else 0.0
        )
        models = [NewModel(noise_node, start, kept=True, psi_max=psi_max)]
        source = on_disk.get(plan.source_node) if plan.source_node is not None else None
        if source is not None and not source.kept and source.node not in erased:
            # The request stays at the current model: keep it, later requests may go back to it.
            models.append(NewModel(source.node, writer.load_model(source.node), kept=True, psi_max=psi_max))
        current = writer.load_model(tip)
        evaluations = [
            evaluation_row(tip, f"forgotten:{request}", engine.evaluate(current, asking)),
            evaluation_row(tip, f"remaining:{request}", engine.evaluate(current, view.active)),
            evaluation_row(noise_node, f"forgotten:{request}", engine.evaluate(start, asking)),
        ]
        payload: dict[str, Any] = {
            "request": request,
            "run": {"tip": str(noise_node), "phase": "retraining"},
            "choice": {
                "request_order": plan.order,
                "multiplier": plan.multiplier,
                "noise_std": plan.noise_std,
                "source_node": plan.source_node,
                "wanted_node": plan.wanted_node,
                "noise_node": noise_node,
            },
            "subjects": [{"subject": one.subject, "clients": list(one.clients)} for one in plan.subjects],
            "charges": [
                {"subject": one.subject.subject, "psi": repr(finite_or_text(one.psi)), "charge": one.charge}
                for one in plan.charges
            ],
            "source_model": {"node": source.node, "digest": source.digest, "nonce": source.nonce} if source else None,
            "remaining_models": sorted(set(on_disk) - erased),
        }
        with uninterrupted():
            writer.record(
                "rolled back",
                payload,
                rows=NewRows(nodes=[NodeRow(node, distance)]),
                models=models,
                dropped_models=sorted(erased),
                evaluations=evaluations,
            )

    def _retrain(
        self, writer: RunWriter, engine: Engine, request: str, progress: ProgressCallback | None
    ) -> None:
        """Rounds without the client, then the certificate."""
        RecordedTraining(engine, writer, RunView(writer)).run(f"retraining {request}", progress)
        row = next(one for one in writer.requests() if one.request == request)
        recorded = RecordedRequest(writer, row)
        asking = np.array([recorded.view.index_of[name] for name in row.clients], dtype=np.int64)
        final = writer.tip
        after = evaluation_row(
            final, f"forgotten:{request}", engine.evaluate(writer.load_model(final), asking)
        )
        rolled = rolled_back_payload(writer, request)
        on_disk = {number: asdict(one) for number, one in writer.models().items()}
        last = list(writer.events())[-1]
        noised = next(one for one in rolled["models"] if one["node"] == row.noise_node)
        models = {"source": rolled["source_model"] or noised, "noised": noised, "final": on_disk[final]}
        facts = recorded.facts(
            final_node=final,
            models=models,
            erased=tuple(rolled.get("dropped_models", [])),
            remaining=tuple(rolled["remaining_models"]),
            ledger=(last.seq, last.hash.hex()),
            issued=utc_now(),
        )
        public_key = writer.value("public_key")
        certificates = {
            (request, "auditor"): keys.sign(self.folder, auditor_form(facts), public_key),
            (request, "public"): keys.sign(self.folder, public_form(facts), public_key),
        }
        payload = {
            "request": request,
            "final_node": final,
            "level": facts.level,
            "run": {"phase": "ready"},
            "final_model": {key: models["final"][key] for key in ("node", "digest", "nonce")},
        }
        # The final node may have been evaluated for this request already, when it is the noised one itself.
        known = {(one.node, one.subset) for one in writer.evaluations()}
        evaluations = [] if (after.node, after.subset) in known else [after]
        with uninterrupted():
            writer.record("request done", payload, evaluations=evaluations, certificates=certificates)

    def _compare(
        self, writer: RunWriter, engine: Engine, request: str, progress: ProgressCallback | None
    ) -> None:
        """How many rounds Scratch takes for the same request, by doing it beside the run."""
        if any(one.request == request and one.method == "scratch" for one in writer.comparisons()):
            return
        row = next(one for one in writer.requests() if one.request == request)
        recorded = RecordedRequest(writer, row)
        gone = {index for one in recorded.new_exposures() + recorded.earlier_exposures() for index in one.subject.clients}
        active = np.array([k for k in range(len(recorded.view.clients)) if k not in gone], dtype=np.int64)
        asking = np.array([recorded.view.index_of[name] for name in row.clients], dtype=np.int64)
        model, rounds, accuracy, reached = retrain_unrecorded(
            engine, active, recorded.view.spec.stop, recorded.order, progress
        )
        forgotten = engine.evaluate(model, asking).accuracy
        payload = {
            "request": request,
            "method": "scratch",
            "rounds": rounds,
            "reached": int(reached),
            "accuracy": accuracy,
            "forgotten_accuracy": forgotten,
        }
        with uninterrupted():
            writer.record("comparison", payload)


def rolled_back_payload(reader: RunReader, request: str) -> dict[str, Any]:
    """The payload of the event that carried a request out."""
    import json

    for (payload,) in reader.query("SELECT payload FROM events WHERE kind = 'rolled back' ORDER BY seq"):
        content: dict[str, Any] = json.loads(payload)
        if content["request"] == request:
            return content
    raise InputError(f"request {request} was not carried out")


def make_terms(spec: Spec, clients: Sequence[str], given: Mapping[str, Any]) -> RequestTerms:
    """The terms of a request: what is given, the spec's defaults for the rest."""
    known = {one.name for one in fields(RequestTerms)} - {"clients"}
    unknown = sorted(set(given) - known)
    if unknown:
        raise InputError(f"unknown term {', '.join(unknown)}; a request takes {', '.join(sorted(known))}")
    if isinstance(clients, str):
        raise InputError(f"clients must be a list of names, found the text {clients!r}")
    privacy = spec.privacy
    base = RequestTerms(
        tuple(clients),
        privacy.epsilon,
        privacy.delta,
        privacy.sigma,
        privacy.unit,
        privacy.scope,
        privacy.calibration,
        privacy.retention,
        privacy.reserve,
    )
    return replace(base, **{key: value for key, value in given.items() if value is not None})


def terms_of(row: RequestRow) -> RequestTerms:
    """The terms of a request as recorded."""
    sigma: SigmaChoice = "auto" if row.sigma == "auto" else float(row.sigma)
    return RequestTerms(
        row.clients,
        row.epsilon,
        row.delta,
        sigma,
        row.unit,
        row.scope,
        row.calibration,
        row.retention,
        row.reserve,
        row.method,
    )


def check_level(plan: Plan, min_level: Level | None) -> None:
    """Refuse a plan below the least level accepted."""
    method = method_named(plan.terms.method)
    least = min_level or ("conditional" if method.certifies else "none")
    if least not in LEVELS:
        raise InputError(f"the least level must be one of {', '.join(LEVELS)}, found {least!r}")
    if LEVELS.index(plan.level) < LEVELS.index(least):
        wanted = {"failed"} if least == "conditional" else {"failed", "assumed"}
        reasons = " ".join(one.statement for one in plan.premises if one.status in wanted)
        raise NotCertifiableError(
            f"the request can only be carried out at level {plan.level!r}, and {least!r} was asked for: "
            f"nothing was changed. {reasons}"
        )


def outcome_of(reader: RunReader, row: RequestRow) -> Outcome:
    """What came of a finished request, from what is recorded."""
    recorded = RecordedRequest(reader, row)
    statements = [recorded.statement(one) for one in recorded.new_exposures()]
    final = next((one for one in reader.node_rows() if one.node.node == row.final_node), None)
    evaluations = {(one.node, one.subset): one for one in reader.evaluations()}
    scratch = next((c for c in reader.comparisons() if c.request == row.request and c.method == "scratch"), None)
    before = [one for (node, subset), one in evaluations.items() if subset == f"forgotten:{row.request}" and node < (row.noise_node or 0)]
    from sifu.core.calibration import delta_reached, hidden_sensitivity

    def accuracy(key: tuple[int | None, str]) -> float | None:
        found: EvaluationRow | None = evaluations.get(key)  # type: ignore[arg-type]
        return found.accuracy if found else None

    exact = recorded.noise_std == 0.0
    return Outcome(
        request=row.request,
        clients=row.clients,
        method=row.method,
        level=row.level or "none",
        epsilon=row.epsilon,
        delta=row.delta,
        delta_reached=0.0 if exact else delta_reached(row.epsilon, recorded.multiplier),
        sigma=recorded.noise_std,
        psi=max((one.psi for one in statements), default=0.0),
        psi_star=hidden_sensitivity(recorded.noise_std, recorded.multiplier),
        rollback_to=recorded.source_depth,
        rounds=final.node.position if final else 0,
        scratch_rounds=scratch.rounds if scratch else None,
        accuracy=accuracy((row.final_node, "active")),
        accuracy_forgotten_before=before[0].accuracy if before else None,
        accuracy_forgotten_after=accuracy((row.final_node, f"forgotten:{row.request}")),
    )


def open_run(
    folder: str | Path, *, model: Any = None, clients: Any = None, data_folder: str | Path | None = None
) -> Run:
    """An existing run. `model` and `clients` are needed to go on with one that was made from Python."""

    def make_engine(spec: Spec) -> Engine:
        data = clients if clients is not None else clients_from_spec(spec, data_folder)
        return engine_from_spec(spec, as_clients(data, spec), as_model(model))[0]

    return Run(folder, make_engine)


def train(
    spec: Spec | Mapping[str, Any] | str | Path | None = None,
    *,
    run: str | Path,
    model: Any = None,
    clients: Any = None,
    data_folder: str | Path | None = None,
    download: bool = False,
    progress: ProgressCallback | None = None,
    data_progress: Callable[[int, int], None] | None = None,
) -> Run:
    """FedAvg with tracking into the folder `run`; continues a run that was not finished.

    `spec` is a Spec, a mapping, or the path of a TOML file. Python users may bring their own: `model` a
    function that makes a torch module (or a `sifu.sim` model), `clients` a mapping from names to (x, y)
    arrays or to torch data sets.
    """
    from sifu.api.spec_files import load_spec

    if spec is None:
        spec = Spec()
    elif isinstance(spec, str | Path):
        spec = load_spec(spec)
    elif not isinstance(spec, Spec):
        spec = Spec.from_mapping(spec)
    if model is not None:
        spec = replace(spec, model=replace(spec.model, kind="python"))
        if spec.regularity.kind == "measured" and not _is_linear(model):
            raise InputError(
                "a module of your own has no measured smoothness: set regularity.kind = 'assumed' (and its factor), "
                "and every certificate will say that this was assumed"
            )
    folder = Path(run)
    if (folder / DATABASE).exists():
        existing = open_run(folder, model=model, clients=clients, data_folder=data_folder)
        _check_same_spec(existing, spec)
        return existing.train(progress)
    data = clients if clients is not None else clients_from_spec(spec, data_folder, download, data_progress)
    engine, resolved = engine_from_spec(spec, as_clients(data, spec), as_model(model))
    from sifu.methods.view import Regularities

    Regularities.of(engine.clients, engine.facts, resolved)  # refuses what can never be tracked
    writer = RunWriter.create(
        folder,
        resolved.to_mapping() | ({} if resolved == spec else {}),
        engine.layout,
        engine.clients,
        engine.facts,
        versions(),
        engine.initial_model(0),
    )
    writer.close()
    made = open_run(folder, model=model, clients=clients, data_folder=data_folder)
    made._engine = engine
    return made.train(progress)


def _check_same_spec(existing: Run, asked: Spec) -> None:
    """A run is continued with the spec it was made with; `auto` stands for whatever was found then."""
    recorded, wanted = existing.spec.to_mapping(), asked.to_mapping()
    if wanted["local"]["rate"] == "auto":
        wanted["local"]["rate"] = recorded["local"]["rate"]
    for section, values in wanted.items():
        pairs = values.items() if isinstance(values, dict) else [("", values)]
        for key, value in pairs:
            found = recorded[section][key] if key else recorded[section]
            if found != value:
                name = f"{section}.{key}" if key else section
                raise InputError(
                    f"{existing.folder} was made with {name} = {found!r}, the spec says {value!r}: "
                    "use the same spec to continue it, or another folder"
                )


def as_clients(data: Any, spec: Spec) -> Any:
    """Clients as the engine takes them: from ClientData, (x, y) arrays, or torch data sets."""
    from sifu.data import from_arrays, from_torch

    if not isinstance(data, Mapping):
        return data
    if all(isinstance(value, tuple | list) for value in data.values()):
        return from_arrays(data, dtype=spec.model.dtype)
    return from_torch(data, dtype=spec.model.dtype)


def as_model(model: Any) -> Any:
    """A model as the engine takes it: a function that makes a module becomes a ModuleModel."""
    if model is None or _is_linear(model):
        return model
    from sifu.sim import ModuleModel

    return model if isinstance(model, ModuleModel) else ModuleModel(model)


def _is_linear(model: Any) -> bool:
    from sifu.sim import LinearModel

    return isinstance(model, LinearModel)


def versions() -> dict[str, str]:
    """What the run was made with."""
    import torch

    return {
        "sifu": __version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "torch": torch.__version__,
    }


def is_finished(view: RunView, accuracy: float | None) -> bool:
    """Whether the stop rule of the run holds at its tip."""
    return should_stop(view.spec.stop, view.rows[-1].node.position, accuracy)
