"""Cases in which a certificate must not claim more than is true."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import sifu
from run_tools import Command, small_spec
from sifu.api import verify_certificate
from sifu.api.safekeeping import restore
from sifu.core.engine import Position
from sifu.core.replies import Reply, ReplyRules
from sifu.core.round import RoundSetup
from sifu.core.spec import Spec
from sifu.engines.sim import LocalTraining, ModuleModel, SimulatedFederation, SimulationSettings
from sifu.errors import InputError
from sifu.run.clients_and_engine import clients_from_spec, engine_from_spec
from sifu.theory.calibration import delta_reached
from sifu.theory.facts import FIXED_CONSTANTS
from sifu_verifier import verify


def public_text(cli: Command, folder: Path, request: str) -> str:
    answer = cli("certificate", folder, request, "--public")
    assert answer.code == 0, answer.err
    return " ".join(answer.out.split())


# -- 1: statements to clients ------------------------------------------------------------------------------------------


def test_nothing_is_said_to_have_been_done_that_was_not(tmp_path: Path, cli: Command) -> None:
    """If nothing was undone, erased or noised, the text does not claim that it was."""
    run = sifu.train(small_spec(server={"participation": "poisson(0.1)"}, stop={"max_rounds": 2}), run=tmp_path / "run")
    (rows,) = [run.reader().everyone()]
    idle = next(k for k in range(12) if k not in set(rows.clients.tolist()))
    (outcome,) = run.forget([f"client-{idle:03d}"], "idle")
    assert (outcome.level, outcome.sigma, outcome.rollback_to) == ("exact", 0.0, 2)
    text = public_text(cli, tmp_path / "run", "idle")
    for claim in ("went back", "Every kept model", "noise was added", "nothing of its data"):
        assert claim not in text


# -- 3: exact levels after refused replies -----------------------------------------------------------------------------


class Refused(SimulatedFederation):
    """Engine whose client 2 always answers with NaN."""

    def collect(self, setup: RoundSetup, drawn: Any) -> list[Reply]:
        replies = self.replies(setup, drawn)
        return [replace(reply, vector=reply.vector * np.nan) if reply.client == 2 else reply for reply in replies]


@pytest.mark.parametrize("rule", ["round", "reply"])
def test_whoever_was_asked_and_refused_is_not_untouched(tmp_path: Path, rule: Any, cli: Command) -> None:
    """A client whose replies were all refused is not called untouched, whether the server drops the
    reply or the round.
    """
    spec = Spec.from_mapping(small_spec(server={"rejected": rule, "participation": "poisson(0.5)"}))
    clients = clients_from_spec(spec)
    honest, _ = engine_from_spec(spec, clients)
    engine = Refused(
        clients,
        honest.model,  # type: ignore[attr-defined]
        LocalTraining(math.inf, 3),
        SimulationSettings(
            participation=honest.facts.participation, preprocessing=FIXED_CONSTANTS, replies=ReplyRules(rule)
        ),
    )
    run = sifu.train(spec, run=tmp_path / "run", engine=engine)
    plan = run.plan(["client-002"])
    assert plan.psi == 0.0
    assert (plan.level, plan.untouched) == ("conditional", False)
    assert "did not influence that model" not in cli("plan", run.folder, "--clients", "client-000", "--sigma", "9").out
    (outcome,) = run.forget(["client-002"], "refused")
    assert outcome.level == "conditional"
    assert [
        premise["name"] for premise in run.certificate("refused").body["premises"] if premise["status"] == "assumed"
    ] == ["replies", "engine"]  # the refusing engine is not part of sifu
    assert verify_certificate(run.folder / "certificates" / "refused.auditor.json").problems == []
    # The same holds for a client whose rounds were dropped because of others; a fresh model needs only the engine
    # premise.
    (outcome,) = run.forget(["client-005"], method="scratch")
    assert [
        premise["name"]
        for premise in run.certificate(outcome.request).body["premises"]
        if premise["status"] == "assumed"
    ] == ["engine"]
    assert run.verify().problems == []
    assert verify(run.folder) == []


def test_a_fixed_number_of_clients_is_not_exact_on_the_path(tmp_path: Path) -> None:
    run = sifu.train(small_spec(server={"participation": "fixed(2)"}, stop={"max_rounds": 2}), run=tmp_path / "run")
    present = set(run.reader().everyone().clients.tolist())
    idle = [f"client-{k:03d}" for k in range(12) if k not in present]
    (outcome,) = run.forget(idle[:1], method="sifu", sigma=1.0)
    assert outcome.level == "conditional"
    (outcome,) = run.forget(idle[1:2], method="scratch")
    assert outcome.level == "exact"
    assert verify(run.folder) == []


# -- 4: fresh models from a user's factory -----------------------------------------------------------------------------


def test_a_factory_that_returns_its_trained_module_is_refused() -> None:
    cached = torch.nn.Linear(4, 3)
    with pytest.raises(InputError, match="share their parameters"):
        ModuleModel(lambda: cached)
    shared = torch.nn.Linear(4, 4)
    with pytest.raises(InputError, match="share their parameters"):
        ModuleModel(lambda: torch.nn.Sequential(shared, torch.nn.Linear(4, 3)))


def test_a_module_that_a_factory_hands_out_again_is_never_trained() -> None:
    """A factory that passes the check with a new module but later returns the same one again is harmless: copies are
    trained.
    """
    modules: list[torch.nn.Module] = []

    def factory() -> torch.nn.Module:
        if len(modules) < 2:
            modules.append(torch.nn.Linear(4, 3))
        return modules[-1]

    model = ModuleModel(factory)
    rng = np.random.default_rng(0)
    clients: Any = [
        type("Client", (), {"name": f"c{k}", "x": rng.random((6, 4)), "y": rng.integers(0, 3, 6)}) for k in range(3)
    ]
    engine = SimulatedFederation(clients, model, LocalTraining(0.5, 5))
    fresh = engine.initial_model(1)
    engine.run_round(engine.initial_model(0), Position(0, 0), np.arange(3))
    assert np.array_equal(engine.initial_model(1), fresh)


def test_the_initial_model_of_a_users_factory_is_trusted_and_said_so(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    clients = {f"site {k}": (rng.random((6, 4)), rng.integers(0, 3, 6)) for k in range(5)}
    spec = {
        "local": {"steps": 2, "rate": 0.05}, "stop": {"target": 0.0, "max_rounds": 2}, "model": {"outputs": 3},
        "regularity": {"kind": "assumed"}, "data": {"preprocessing": "fixed"},
    }  # fmt: skip
    run = sifu.train(spec, run=tmp_path / "run", clients=clients, model=lambda: torch.nn.Linear(4, 3))
    run.forget(["site 1"], "own", method="scratch")
    said = {premise["name"]: premise["status"] for premise in run.certificate("own").body["premises"]}
    assert said["initial model"] == "trusted"
    ours = sifu.train(small_spec(), run=tmp_path / "ours")
    assert {premise.name: premise.status for premise in ours.plan(["client-001"]).premises}["initial model"] == "met"


# -- 5: another engine -------------------------------------------------------------------------------------------------


def other_engines() -> dict[str, tuple[str, dict[str, Any]]]:
    return {
        "rate": ("local.rate", {"local": {"rate": 0.051}}),
        "momentum": ("local.momentum", {"local": {"momentum": 0.1}}),
        "decay": ("local.weight_decay", {"local": {"weight_decay": 0.01}}),
        "batch": ("local.batch", {"local": {"batch": 3}}),
        "participation": ("server.participation", {"server": {"participation": "fixed(3)"}}),
        "dtype": ("model.dtype", {"model": {"dtype": "float32"}}),
    }


@pytest.mark.parametrize("name", other_engines())
def test_a_run_goes_on_only_with_the_training_it_was_begun_with(tmp_path: Path, name: str) -> None:
    named, change = other_engines()[name]
    base = small_spec(local={"rate": 0.05})
    sifu.train(base, run=tmp_path / "run")
    changed = {key: {**base.get(key, {}), **change.get(key, {})} for key in {*base, *change}}
    spec = Spec.from_mapping(changed)
    engine, _ = engine_from_spec(spec, clients_from_spec(spec))
    with pytest.raises(InputError, match=named):
        sifu.open_run(tmp_path / "run", engine=engine).forget(["client-001"], sigma=1.0)
    with pytest.raises(InputError, match=named):
        sifu.train(base, run=tmp_path / "run", engine=engine)
    with pytest.raises(InputError, match=named):  # a new run is refused too, unless the spec agrees with the engine
        sifu.train(base, run=tmp_path / "new", engine=engine)
    sifu.train(changed, run=tmp_path / "agreed", engine=engine)


def test_what_an_engine_does_not_say_is_not_known(tmp_path: Path) -> None:
    spec = Spec.from_mapping(small_spec(local={"rate": 0.05}))
    clients = clients_from_spec(spec)
    engine = SimulatedFederation(clients, "softmax", LocalTraining(0.05, 3))
    run = sifu.train(spec, run=tmp_path / "run", engine=engine)
    assumed = {premise.name for premise in run.plan(["client-001"], sigma=9.0).premises if premise.status == "assumed"}
    assert {"preprocessing", "hyper-parameters"} <= assumed
    # An engine that states more than was recorded cannot continue the run and claim the additional facts.
    own_engine, _ = engine_from_spec(spec, clients)
    with pytest.raises(InputError, match="shape_from_labels"):
        sifu.open_run(run.folder, engine=own_engine).forget(["client-001"], sigma=9.0)


# -- 6: restored backups -------------------------------------------------------------------------------------


def test_two_copies_of_a_run_cannot_both_prove_on_one_budget(own_trained: Path, tmp_path: Path) -> None:
    run = sifu.open_run(own_trained)
    run.backup(tmp_path / "b.zip")
    (first,) = run.forget(["client-003"], "first", sigma=0.5)
    restore(tmp_path / "b.zip", tmp_path / "back")
    again = sifu.open_run(tmp_path / "back")
    (second,) = again.forget(["client-003"], "second", sigma=0.5)
    assert (first.level, second.level) == ("proven", "conditional")
    together = math.sqrt(2.0) * first.psi / first.sigma
    assert delta_reached(10.0, 1.0 / together) > first.delta_reached
    body = again.certificate("second").body
    assert [premise["name"] for premise in body["premises"] if premise["status"] == "assumed"] == ["record"]
    # Every later certificate states it, even for a fresh model, which does not depend on the restored record.
    (third,) = again.forget(["client-004"], "third", method="scratch")
    assert third.level == "exact"
    assert "record" in {premise["name"] for premise in again.certificate("third").body["premises"]}
    assert again.verify().problems == []
    assert verify(tmp_path / "back") == []


# -- 8 and 9: noise that depends on the forgotten clients; spent budgets -----------------------------------------------


def test_delta_reached_is_what_was_spent(own_trained: Path) -> None:
    run = sifu.open_run(own_trained)
    plan = run.plan(["client-001"], sigma=50.0)
    assert plan.delta_at_most == pytest.approx(0.01)
    assert plan.delta_reached < 1e-6
    (outcome,) = run.forget(["client-001"], "much", sigma=50.0)
    assert (outcome.delta_reached, outcome.delta_at_most) == (plan.delta_reached, plan.delta_at_most)
    spent = run.certificate("much", "auditor").body
    assert spent["delta_reached"] == outcome.delta_reached
    # `delta_reached` reveals Psi, which is confidential: the public copy states only the budget.
    assert "delta_reached" not in run.certificate("much").body
    changed = copy.deepcopy(spent)
    changed["delta_reached"] = 0.0
    path = own_trained / "changed.json"
    path.write_text(json.dumps({"body": changed, "public_key": "", "signature": ""}))
    assert any("delta_reached" in problem for problem in verify_certificate(path).problems)
