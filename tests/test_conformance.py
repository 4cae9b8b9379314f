"""Conformance: what holds for every method in every kind of federation, seen through `import sifu`, CLI and verifiers.

The laws know files and bytes of a run, and nothing of its tables. An adapter (`adapters.py`) is one kind of federation.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import safetensors.numpy

import runs
import sifu
import sifu_verifier
import told
from adapters import ABSENT, COMPANION, KINDS, LAST, LOCAL, METHODS, NAMES, Federation, Rows, rows_of
from run_tools import Command, copy_run, small_spec

PAIRS = [(kind, method) for kind in KINDS for method in METHODS if (kind, method) not in ABSENT]
EVERYONE = {name: rows_of(name) for name in NAMES}
SIGMAS = {"sifu": (0.0015, 0.0005, 5.0, "auto")}
"""Noise of the planned requests: back to the middle, to the beginning, nowhere; and what sifu chooses."""
LEVELS = {"linear": "proven", "module": "conditional", "loop": "conditional"}
"""Level by kind where noise hides what a client left; where it left nothing, the level is exact."""
Model = dict[str, np.ndarray]
Make = Callable[..., Federation]


def released(fed: Federation) -> Model:
    """Return the released model."""
    return safetensors.numpy.load_file(fed.run().export(fed.folder.with_suffix(".safetensors")))


def same(model: Model, other: Model) -> bool:
    """Return whether two models have the same bits."""
    return model.keys() == other.keys() and all(model[name].tobytes() == other[name].tobytes() for name in model)


def distance(model: Model, other: Model) -> float:
    """Return the distance of two models."""
    return math.sqrt(sum(float(np.sum((model[name] - other[name]) ** 2)) for name in model))


def bytes_of(fed: Federation) -> dict[str, str]:
    """Return a digest of every file of a run but SQLite's log, which readers make and remove."""
    paths = [path for path in fed.folder.rglob("*") if path.is_file() and not path.name.startswith("run.db-")]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def check_verified(fed: Federation) -> None:
    """Check that both verifiers accept the run and each of its certificates."""
    assert fed.run().verify().problems == []
    assert sifu_verifier.verify(fed.folder) == []
    for file in (fed.folder / "certificates").glob("*.json"):
        assert sifu.verify(file).holds
        assert sifu_verifier.verify_certificate(file) == []


def steps_of(fed: Federation, rounds: int, clients: Collection[str]) -> int:
    """Return the local steps of rounds in which these clients take part, and no others."""
    return 0 if fed.method == "closed_form" else rounds * len(clients) * LOCAL["steps"]


def states_of(fed: Federation) -> dict[str, str]:
    """Return the state of each client."""
    return {client.name: client.state for client in fed.run().status().clients}


@pytest.mark.parametrize("name", runs.BUILT_BY)
def test_finished_runs_tell_what_they_told_before(name: str, tmp_path: Path) -> None:
    now = told.told(name, tmp_path)
    assert list(told.differences(now, told.recorded()[name])) == now["verification"]["problems"] == []


@pytest.mark.usefixtures("same_groups")
class Laws:
    """Laws of every pair of a kind of federation and a method; a subclass gives the fixture `pair`."""

    kinds: ClassVar[dict[str, type[Federation]]] = KINDS

    @pytest.fixture
    def make(self, pair: tuple[str, str], tmp_path: Path) -> Make:
        """Return a function that makes a federation, with some rows and some source of noise."""

        def begin(name: str = "run", data: dict[str, Rows] = EVERYONE, noise: Any = None) -> Federation:
            return self.kinds[pair[0]](tmp_path / name, pair[1], data, noise)

        return begin

    @pytest.fixture
    def trained(self, make: Make) -> Federation:
        """Return a trained federation of everybody."""
        fed = make()
        assert fed.work()
        return fed

    def test_the_plan_is_the_outcome(self, pair: tuple[str, str], trained: Federation, cli: Command) -> None:
        kind, method = pair
        leavers, undone = iter(((NAMES[0],), (COMPANION, LAST), (NAMES[2],), (NAMES[3],))), list[str]()
        for sigma, clients in zip(SIGMAS.get(method, ("auto", 0.3)), leavers, strict=False):
            terms: dict[str, Any] = {"method": method, "level": "none", "sigma": sigma}
            before = bytes_of(trained)
            plan = trained.run().plan(list(clients), **terms)
            options = [word for name, value in terms.items() for word in (f"--{name}", value)]
            told = cli("plan", trained.folder, "--clients", ",".join(clients), *options, "--format", "json").json
            assert told.items() >= json.loads(json.dumps(plan.to_mapping())).items()
            assert bytes_of(trained) == before
            outcome = trained.forget(*clients, sigma=sigma)
            done = outcome.method, outcome.level, outcome.sigma, outcome.psi, outcome.rollback_to, outcome.rounds
            assert done == (method, plan.level, plan.noise_std, plan.psi, plan.source_rounds, plan.rounds)
            assert (outcome.clients, outcome.psi_star) == (clients, plan.psi_star)
            assert (outcome.delta_at_most, outcome.delta_reached) == (plan.delta_at_most, plan.delta_reached)
            assert outcome.level == (LEVELS[kind] if outcome.psi else "exact")
            assert trained.run().certificate(outcome.request).body["level"] == outcome.level
            undone.append({plan.tip_rounds: "nothing", 0: "everything"}.get(outcome.rollback_to, "some"))
        assert method != "sifu" or undone[:3] == ["some", "everything", "nothing"]
        assert cli("verify", trained.folder).code == 0

    def test_requests_one_after_the_other_and_several_at_once(self, trained: Federation) -> None:
        first = trained.forget(NAMES[0], sigma=0.05, retention="strict").request
        check_verified(trained)
        trained.asked.clear()
        queued = [trained.request(*clients, sigma=0.5) for clients in ((LAST, NAMES[2]), (NAMES[3],))]
        assert set(states_of(trained).values()) == {"active", "waiting", "forgotten"}
        assert trained.work()
        check_verified(trained)
        outcomes = trained.run().outcomes()
        done = [event.content["request"] for event in trained.run().trail("request done")[0]]
        assert [outcome.request for outcome in outcomes] == done[::-1] == [first, *queued]
        assert [outcome.clients for outcome in outcomes] == [(NAMES[0],), (LAST, NAMES[2]), (NAMES[3],)]
        stay = {COMPANION, *NAMES[4:7]}
        assert set().union(*trained.asked) <= stay  # whoever waits is not asked while others are forgotten
        for outcome in outcomes[1:]:
            assert outcome.cost.local_steps == steps_of(trained, outcome.rounds, stay)
        assert states_of(trained) == {name: "active" if name in stay else "forgotten" for name in NAMES}
        before = bytes_of(trained)
        assert trained.request(NAMES[0], request=first, sigma=0.05, retention="strict") == first
        with pytest.raises(sifu.InputError):
            trained.request(LAST)
        assert trained.work()
        assert bytes_of(trained) == before

    def test_records_of_a_client_are_forgotten_and_then_the_client(self, make: Make, trained: Federation) -> None:
        name, method = NAMES[3], trained.method
        if not trained.has_records:
            before = bytes_of(trained)
            with pytest.raises(sifu.InputError):
                trained.request(name, records=[0, 2])
            assert bytes_of(trained) == before
            return
        outcome = trained.forget(name, records=[0, 2], sigma=0.5)
        assert (outcome.records, outcome.clients, outcome.method) == (2, (name,), method)
        check_verified(trained)
        samples = {client.name: client.samples for client in trained.run().status().clients if client.state == "active"}
        assert samples == {other: len(y) - 2 * (other == name) for other, (_, y) in EVERYONE.items()}
        if method == "closed_form":
            x, y = EVERYONE[name]
            never = make("never", EVERYONE | {name: (np.delete(x, [0, 2], 0), np.delete(y, [0, 2]))})
            assert never.work()
            assert same(released(trained), released(never))
        assert trained.forget(name, sigma=0.5).records is None
        check_verified(trained)
        samples = {client.name for client in trained.run().status().clients if client.state == "active"}
        assert samples == set(NAMES) - {name}

    def test_what_is_interrupted_goes_on_to_the_same_model_and_draws_nothing_twice(self, make: Make) -> None:
        straight, stopped = (make(name, noise=np.random.default_rng(5)) for name in ("straight", "stopped"))
        for leavers in ((), (NAMES[0], LAST)):
            for fed in (straight, stopped) if leavers else ():
                fed.request(*leavers, request="-".join(leavers), sigma=0.004)
            assert straight.work()
            interrupted = 0
            for steps in (1, 2):
                interrupted += not stopped.work(steps)
                assert stopped.run().verify().problems == []
            assert stopped.work()
            assert interrupted or stopped.method == "closed_form"  # kept statistics need no step
            assert same(released(straight), released(stopped))
            check_verified(stopped)
        assert straight.noise.bit_generator.state == stopped.noise.bit_generator.state
        assert (straight.run().outcomes()[0].sigma > 0.0) == (straight.method == "sifu")
        assert straight.run().outcomes() == stopped.run().outcomes()

    def test_whoever_is_forgotten_is_never_asked_again(self, make: Make) -> None:
        fed = make()
        assert not fed.work(2) or fed.method == "closed_form"  # the first request arrives before training is done
        gone: set[str] = set()
        for leavers in ({LAST}, {NAMES[2], NAMES[3]}):
            fed.asked.clear()
            gone |= leavers
            outcome = fed.forget(*sorted(leavers), sigma=0.1)
            assert not any(gone & task for task in fed.asked)
            stay = {name: len(y) for name, (_, y) in EVERYONE.items() if name not in gone}
            assert outcome.cost.local_steps == steps_of(fed, outcome.rounds, stay)
            rows = [row.samples for row in fed.run().history() if row.request == outcome.request]
            assert set(rows) == ({sum(stay.values())} if fed.evaluates else set())
            assert not fed.evaluates or len(rows) >= outcome.rounds
            check_verified(fed)
            for name in leavers & fed.data.keys() if fed.has_records else ():
                del fed.data[name]  # their data need not exist any more
        assert fed.work()
        assert {name for name, state in states_of(fed).items() if state == "forgotten"} == gone

    def test_the_model_is_that_of_a_federation_without_the_leaver(self, pair: tuple[str, str], make: Make) -> None:
        """Both federations also forget another client, so that their draws and their noise are at the same place."""
        never = {name: rows for name, rows in EVERYONE.items() if name != LAST}
        others = {"never": never, "other rows": EVERYONE | {LAST: rows_of(LAST, 33, seed=4)}}
        worlds = {name: make(name, data, np.random.default_rng(5)) for name, data in others.items()}
        fed = worlds["run"] = make("run", EVERYONE, np.random.default_rng(5))
        for world in worlds.values():
            assert world.work()
        assert not same(released(fed), released(worlds["never"]))  # control: the leaver is in the model
        plan = fed.run().plan([COMPANION, LAST], method=fed.method, sigma=5.0, level="none")
        outcomes = {
            name: world.forget(*sorted({COMPANION, LAST} & world.data.keys()), sigma=5.0)
            for name, world in worlds.items()
        }
        models = {name: released(world) for name, world in worlds.items()}
        if fed.method != "sifu":
            assert same(models["run"], models["never"])
            assert same(models["run"], models["other rows"])
            return
        assert {outcome.rollback_to for outcome in outcomes.values()} == {plan.tip_rounds}
        (psi,) = (charge.psi for charge in plan.charges if NAMES.index(LAST) in charge.subject.clients)
        apart = distance(models["run"], models["never"])
        assert 0.5 * psi < apart <= psi <= outcomes["run"].psi  # control: half of Psi bounds it no more


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: " ".join(pair))
class TestHere(Laws):
    """The laws in every kind of federation that needs no Flower."""


@pytest.mark.parametrize("pair", [*ABSENT, ("linear", "scrach")], ids=lambda pair: " ".join(pair))
def test_a_method_that_a_kind_does_not_have_is_refused(pair: tuple[str, str], tmp_path: Path) -> None:
    kind, method = pair
    has = next(way for other, way in PAIRS if other == kind)
    fed = KINDS[kind](tmp_path / "run", has, EVERYONE)
    assert fed.work()
    before = bytes_of(fed)
    for call in (fed.run().plan, fed.run().request):
        with pytest.raises(sifu.InputError):
            call([LAST], method=method, level="none")
    assert bytes_of(fed) == before


@pytest.mark.parametrize("retention", ["paper", "strict"])
def test_strict_retention_erases_the_report_with_the_models(cli: Command, tmp_path: Path, retention: str) -> None:
    folder = runs.own("trained", tmp_path)
    assert cli("report", folder).code == 0
    sifu.open_run(folder).forget(["client-001"], sigma=1.0, retention=retention)
    assert (folder / "report").exists() == (retention == "paper")


@pytest.mark.parametrize("width", [8, 4098])
def test_heads_of_any_width_forget_all_samples_but_one(width: int, tmp_path: Path) -> None:
    """Another algorithm solves heads of more than 4,096 features."""
    spec = runs.HEAD | {"features": {"kind": "random_fourier", "count": width, "bandwidth": 2.0}}
    draw, models = np.random.default_rng(4), []
    clients = {str(rows): (draw.normal(size=(rows, 3)), np.arange(rows) % 3) for rows in (1, 5, 9)}
    for leaver in ("5", "9"):
        run = sifu.train(spec, run=tmp_path / leaver, clients={name: clients[name] for name in ("1", leaver)})
        (outcome,) = run.forget([leaver], method="closed_form")
        assert outcome.level == "exact"
        assert run.verify().problems == sifu_verifier.verify(run.folder) == []
        models.append(safetensors.numpy.load_file(run.export(tmp_path / "head.safetensors")))
    assert distance(*models) <= (0.0 if width == 8 else 1e-7)
    assert distance(models[0], {name: np.zeros_like(values) for name, values in models[0].items()}) > 1e-3


def test_retraining_goes_on_until_the_target(tmp_path: Path) -> None:
    """The accuracy of every method that trains stays near that of the first training."""
    wanted = {"data": {"clients": 60}, "stop": {"target": 0.85, "max_rounds": 300}}
    sifu.train(small_spec(**wanted), run=tmp_path / "trained")
    for method in ("scratch", "sifu"):
        run = sifu.open_run(copy_run(tmp_path / "trained", tmp_path / method))
        (outcome,) = run.forget(["client-003"], method=method)
        assert outcome.accuracy is not None
        assert outcome.accuracy >= 0.85
        assert 0 < outcome.rounds < 300
