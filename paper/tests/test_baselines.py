"""Promises, refusals and costs of last, fine_tuning, noisy_scratch and dp."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

import sifu
from run_tools import Command, copy_run, query, small_spec, state
from sifu.api import verify_certificate, verify_run
from sifu.core.certificate_words import words_of
from sifu.core.method_info import METHOD_INFOS, MethodInfo
from sifu.core.request_terms import RequestTerms
from sifu.errors import InputError, NotCertifiableError
from sifu.methods.base import Method, plan_from
from sifu.methods.registry import METHODS
from sifu.planning.plan import Plan
from sifu.run.run_view import RunView
from sifu.theory.calibration import exact_multiplier, gaussian_epsilon, one_round_epsilon

NOISED = {"server": {"clip": 0.3, "noise": 3.0}}


def certificate(folder: Path, request: str = "r1", form: str = "auditor") -> dict[str, Any]:
    body: dict[str, Any] = json.loads((folder / "certificates" / f"{request}.{form}.json").read_text())["body"]
    return body


@pytest.fixture(scope="module")
def noised_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run trained with clipped and noised updates; tests only read it."""
    folder = tmp_path_factory.mktemp("runs") / "noised"
    sifu.train(small_spec(**NOISED), run=folder)
    return folder


class TestLast:
    def test_it_adds_the_least_noise_the_current_model_needs(self, own_trained: Path) -> None:
        run = sifu.open_run(own_trained)
        plan = run.plan(["client-001", "client-004"], method="last")
        view = RunView(run.reader())
        psi = max(view.curve(subject).one(view.path.tip) for subject in plan.subjects)
        needed = psi * exact_multiplier(10.0, 0.01)
        assert plan.level == "proven"
        assert plan.source_node == view.path.nodes[-1].node
        # The public certificate states sigma, so it is raised to a power of 1.1 and reveals little about Psi.
        assert needed <= plan.noise_std <= needed * 1.1 * (1 + 1e-9)
        assert math.log(plan.noise_std, 1.1) == pytest.approx(round(math.log(plan.noise_std, 1.1)))
        (outcome,) = run.forget(["client-001", "client-004"], method="last")
        assert (outcome.level, outcome.sigma, outcome.psi) == ("proven", plan.noise_std, psi)

    def test_where_nothing_is_certified_it_is_exactly_the_least(self, tmp_path: Path) -> None:
        spec = small_spec(privacy={"accounting": "population", "calibration": "classical", "sigma": 0.05})
        run = sifu.train(spec, run=tmp_path / "run")
        plan = run.plan(["client-001"], method="last", sigma="auto")
        assert plan.level == "none"
        assert plan.noise_std == pytest.approx(plan.psi * plan.multiplier, rel=1e-9)

    @pytest.mark.parametrize("scale", [0.99, 1.01])
    def test_a_given_sigma_is_used_or_refused(self, own_trained: Path, scale: float, cli: Command) -> None:
        run = sifu.open_run(own_trained)
        plan = run.plan(["client-001"], method="last")
        sigma = plan.psi * plan.multiplier * scale
        if scale > 1:
            (outcome,) = run.forget(["client-001"], method="last", sigma=sigma)
            assert outcome.sigma == sigma
            return
        before = state(own_trained)
        answer = cli("forget", own_trained, "--clients", "client-001", "--method", "last", "--sigma", sigma)
        assert answer.code == 4
        assert "method sifu" in answer.err
        assert state(own_trained) == before

    def test_no_noise_is_enough_where_psi_is_not_bounded(self, tmp_path: Path) -> None:
        spec = small_spec(regularity={"kind": "assumed", "factor": 1e6}, local={"steps": 20, "rate": 0.05})
        run = sifu.train(spec, run=tmp_path / "run")
        before = state(tmp_path / "run")
        with pytest.raises(NotCertifiableError, match="Use method sifu"):
            run.forget(["client-001"], method="last")
        assert state(tmp_path / "run") == before

    def test_whoever_came_before_is_covered_and_pays_nothing(self, own_trained: Path) -> None:
        run = sifu.open_run(own_trained)
        run.forget(["client-001"], method="last")
        run.forget(["client-002"], method="last")
        charges = query(own_trained, "SELECT noise_node, subject FROM charges")
        assert len(charges) == 2


class TestFineTuning:
    def test_its_edge_hides_nobody(self, own_trained: Path) -> None:
        """Negative control of coverage: after fine-tuning, a client is as exposed as before."""
        run = sifu.open_run(own_trained)
        before = run.plan(["client-001"], method="last").psi
        (outcome,) = run.forget(["client-001"], method="fine_tuning")
        assert (outcome.level, outcome.sigma, outcome.delta_reached) == ("none", 0.0, 1.0)
        assert outcome.psi == before > 0
        view = RunView(run.reader())
        (subject,) = (row for row in view.reader.subjects())
        assert subject.clients == (1,)
        assert view.earlier_subjects() == ()  # it promised nothing, so later requests need not consider it
        body = certificate(own_trained)
        assert (body["level"], body["protection"], body["delta_reached"]) == ("none", "nothing", 1.0)
        assert words_of(body).guarantee.startswith("Nothing is guaranteed")
        assert body["subjects"][0]["charge"] is None
        for form in ("auditor", "public"):
            assert verify_certificate(own_trained / "certificates" / f"r1.{form}.json").problems == []

    def test_it_is_none_even_where_the_client_never_came(self, tmp_path: Path) -> None:
        spec = small_spec(server={"participation": "poisson(0.05)"}, stop={"max_rounds": 2})
        run = sifu.train(spec, run=tmp_path / "run")
        came = {client for (client,) in query(tmp_path / "run", "SELECT client FROM participation")}
        absent = f"client-{next(k for k in range(12) if k not in came):03d}"
        assert run.plan([absent]).level == "exact"
        (outcome,) = run.forget([absent], method="fine_tuning")
        assert (outcome.level, outcome.delta_reached) == ("none", 1.0)
        assert run.verify().problems == []

    def test_scratch_is_compared_without_the_clients_that_were_promised_nothing(self, own_trained: Path) -> None:
        run = sifu.open_run(own_trained)
        run.forget(["client-001"], method="fine_tuning")
        (outcome,) = run.forget(["client-002"], method="scratch", compare_scratch=True)
        # The same initial model, schedule and clients: the comparison repeats the request.
        compared = query(own_trained, "SELECT rounds, accuracy FROM comparisons")
        assert compared == [(outcome.rounds, outcome.accuracy)]


class TestNoisyScratch:
    def test_exact_with_the_noise_of_sifu(self, own_trained: Path) -> None:
        run = sifu.open_run(own_trained)
        expected = run.plan(["client-001"]).noise_std
        plan = run.plan(["client-001"], method="noisy_scratch")
        # The forgotten client's influence determined the noise, and the model reveals the noise.
        assert (plan.level, plan.noise_std, plan.delta_reached) == ("conditional", expected, 0.0)
        assert [premise.name for premise in plan.premises if premise.status == "assumed"] == ["noise size"]
        (outcome,) = run.forget(["client-001"], method="noisy_scratch", sigma=0.4)
        assert (outcome.level, outcome.sigma, outcome.rollback_to) == ("exact", 0.4, 0)
        node = query(own_trained, "SELECT noise_node FROM requests")[0][0]
        start = run.reader().load_model(node)
        assert np.std(start) == pytest.approx(0.4, rel=0.15)  # the initial model itself is zero
        erased = words_of(certificate(own_trained, form="public")).erased
        assert erased == "Every model on the way to the current one was erased."
        assert certificate(own_trained)["attacker_true_positive_rate_at_1_percent"] == 0.01


class TestDp:
    def test_it_needs_a_run_trained_for_it(self, own_trained: Path, cli: Command) -> None:
        before = state(own_trained)
        for command in ("plan", "request", "forget"):
            answer = cli(command, own_trained, "--clients", "client-001", "--method", "dp")
            assert answer.code == 2
            assert "server.clip" in answer.err
            assert "server.noise" in answer.err
        assert state(own_trained) == before

    def test_the_certificate_states_the_composed_epsilon(self, noised_run: Path, tmp_path: Path) -> None:
        folder = copy_run(noised_run, tmp_path / "run")
        run = sifu.open_run(folder)
        with pytest.raises(NotCertifiableError, match="would have another size"):
            run.forget(["client-001"], method="dp")
        (outcome,) = run.forget(["client-001"], method="dp", level="none")
        # Twelve clients of ten samples, eight rounds: mu = sqrt(8) 2/12 / (3 sqrt(1/12)).
        mu = math.sqrt(8) * (2 / 12) / (3.0 * math.sqrt(1 / 12))
        for form in ("auditor", "public"):
            body = certificate(folder, form=form)
            noise = body["training_noise"]
            assert noise["epsilon_composed"] == pytest.approx(gaussian_epsilon(mu, 0.01), rel=1e-9)
            assert noise["epsilon_one_round"] == pytest.approx(one_round_epsilon(3.0, 0.01, "exact"), rel=1e-9)
            assert noise["epsilon_composed"] != noise["epsilon_one_round"]
            assert body["protection"] == "training noise"
            assert body["level"] == outcome.level == "none"
            failed = [premise["name"] for premise in body["premises"] if premise["status"] == "failed"]
            assert failed == ["training noise"]
            assert words_of(body).guarantee.startswith("Nothing is guaranteed")
            assert verify_certificate(folder / "certificates" / f"r1.{form}.json").problems == []
        assert outcome.training_noise is not None
        assert outcome.training_noise.counted_rounds == 8
        assert outcome.delta_reached < 0.01

    def test_a_budget_that_one_round_keeps_and_all_rounds_break_is_not_certified(self, tmp_path: Path) -> None:
        """Negative control: the paper's accounting would certify this."""
        run = sifu.train(small_spec(server={"clip": 0.3, "noise": 0.5}), run=tmp_path / "run")
        one_round = one_round_epsilon(0.5, 0.01, "exact")
        plan = run.plan(["client-001"], method="dp", epsilon=one_round)
        assert plan.training_noise is not None
        assert plan.training_noise.epsilon_one_round <= plan.terms.epsilon < plan.training_noise.epsilon_composed
        assert plan.level == "none"
        before = state(tmp_path / "run")
        with pytest.raises(NotCertifiableError, match="training reached epsilon"):
            run.forget(["client-001"], method="dp", epsilon=one_round)
        assert state(tmp_path / "run") == before
        (outcome,) = run.forget(["client-001"], method="dp", epsilon=one_round, level="none")
        assert outcome.level == "none"
        assert run.verify().problems == []

    def test_cut_off_rounds_count_too(self, noised_run: Path, tmp_path: Path) -> None:
        run = sifu.open_run(copy_run(noised_run, tmp_path / "run"))
        first = run.plan(["client-001"], method="dp").training_noise
        run.forget(["client-002"], method="scratch")
        second = run.plan(["client-001"], method="dp").training_noise
        assert first is not None
        assert second is not None
        assert (first.counted_rounds, second.counted_rounds) == (8, 16)
        assert second.epsilon_composed > first.epsilon_composed

    def test_levels(self, tmp_path: Path) -> None:
        """The size of the noise depends on the participants, so nothing is certified, whatever the model."""
        network = {"model": {"kind": "mlp"}, "local": {"steps": 2, "rate": 0.1}, "regularity": {"kind": "assumed"}}
        cases: dict[str, tuple[dict[str, Any], str]] = {
            "network": (network, "none"),
            "fixed": ({"server": {"participation": "fixed(6)"}}, "none"),
            "seeded": ({"privacy": {"noise": "seeded"}}, "none"),
        }
        for name, (sections, level) in cases.items():
            server = NOISED["server"] | sections.get("server", {})
            run = sifu.train(small_spec(**(sections | {"server": server})), run=tmp_path / name)
            assert run.plan(["client-001"], method="dp").level == level, name
            assert run.plan(["client-001"], sigma=50.0).level in ("none", "conditional"), name

    def test_a_joint_request_counts_all_of_its_clients(self, noised_run: Path) -> None:
        run = sifu.open_run(noised_run)
        together = run.plan(["client-001", "client-002"], method="dp", unit="joint").training_noise
        each = run.plan(["client-001", "client-002"], method="dp").training_noise
        assert together is not None
        assert each is not None
        assert together.epsilon_composed > 1.9 * each.epsilon_composed

    def test_spec_refuses_noise_without_a_bound(self) -> None:
        for server in ({"noise": 1.0}, {"clip": -1.0}, {"clip": 0.5, "noise": -0.1}):
            with pytest.raises(InputError, match=r"server\.(noise|clip)"):
                sifu.Spec.from_mapping({"server": server})


class TestCost:
    @pytest.mark.parametrize("method", ["sifu", "scratch", "fine_tuning", "last", "noisy_scratch"])
    def test_rounds_steps_and_bytes(self, own_trained: Path, method: str) -> None:
        run = sifu.open_run(own_trained)
        (outcome,) = run.forget(["client-001", "client-002"], method=method)
        parameters = 65 * 10
        # Eight rounds of the ten remaining clients, three steps each; float64 down and up.
        assert outcome.cost.rounds == 8
        assert outcome.cost.local_steps == 8 * 10 * 3
        assert outcome.cost.bytes_sent == 8 * 10 * 2 * parameters * 8
        kept = query(own_trained, "SELECT bytes FROM models WHERE kept = 1 AND node != (SELECT MAX(node) FROM nodes)")
        assert outcome.cost.bytes_kept == (sum(size for (size,) in kept) if method == "sifu" else 0)
        assert method != "sifu" or outcome.cost.bytes_kept > 0
        later = run.forget(["client-003"], method="scratch")
        # As measured then, whatever comes later; figures on held-out rows refer only to the current model.
        assert run.outcomes() == [replace(outcome, held_out=None), *later]

    def test_float32_and_partial_participation(self, tmp_path: Path, cli: Command) -> None:
        spec = small_spec(model={"dtype": "float32"}, server={"participation": "poisson(0.5)"})
        run = sifu.train(spec, run=tmp_path / "run")
        (outcome,) = run.forget(["client-001"], method="fine_tuning")
        count = query(tmp_path / "run", "SELECT COUNT(*) FROM participation WHERE node > 9")[0][0]
        assert outcome.cost.bytes_sent == count * 2 * 650 * 4
        status = cli("status", tmp_path / "run", "--format", "json").json
        assert status["requests"][0]["cost"]["bytes_sent"] == outcome.cost.bytes_sent
        assert set(status["bytes_kept"]) == set(METHODS)
        assert status["bytes_kept"]["sifu"] > status["bytes_kept"]["scratch"] == 0


class Quiet(Method):
    """Custom method that relies on noise and adds as much as it is told."""

    info: ClassVar[MethodInfo] = MethodInfo(
        "quiet", "noise of a given size", certifies=True, protection="noise", starts_from="current"
    )
    noise_std: ClassVar[float] = 0.0

    def plan(self, view: RunView, terms: RequestTerms) -> Plan:
        return plan_from(self, view, terms, view.path.tip, self.noise_std)


@pytest.mark.parametrize("noise_std", [0.0, 0.1, 1.0])
def test_a_method_that_adds_too_little_noise_promises_nothing(
    own_trained: Path, monkeypatch: pytest.MonkeyPatch, noise_std: float
) -> None:
    """Plan and certificate state `proven` only if the noise suffices."""
    monkeypatch.setitem(METHODS, "quiet", Quiet)
    monkeypatch.setitem(METHOD_INFOS, "quiet", Quiet.info)
    monkeypatch.setattr(Quiet, "noise_std", noise_std)
    run, before = sifu.open_run(own_trained), state(own_trained)
    if noise_std == 1.0:
        assert run.plan(["client-000"], method="quiet").level == "proven"
        run.forget(["client-000"], method="quiet")
        assert certificate(own_trained)["level"] == "proven"
        assert verify_run(own_trained).problems == []
        return
    with pytest.raises(NotCertifiableError, match="does not hide all clients that influenced"):
        run.plan(["client-000"], method="quiet")
    with pytest.raises(NotCertifiableError, match="does not hide all clients that influenced"):
        run.forget(["client-000"], "quietly", method="quiet", level="none")
    assert state(own_trained) == before


def test_methods_are_listed(cli: Command) -> None:
    listed = cli("methods", "--format", "json").json["methods"]
    assert [info["name"] for info in listed] == list(METHODS)
    text = cli("methods").out
    for value in METHODS.values():
        assert value.info.name in text


@pytest.mark.long
def test_the_report_shows_requests_of_every_method(noised_run: Path, tmp_path: Path) -> None:
    from sifu.report import write_report

    run = sifu.open_run(copy_run(noised_run, tmp_path / "run"))
    for number, method in enumerate(("fine_tuning", "last", "dp", "sifu", "noisy_scratch", "dp")):
        run.forget([f"client-{number:03d}"], method=method, level="none")
    page = write_report(tmp_path / "run").read_text()
    assert "removed without any guarantee" in page
    assert "of all rounds together, which counts" in page
    assert run.verify().problems == []
