"""FedEraser and FedAccum: agreement with a plain numpy federation, certificates they must not break, and complete
erasure.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import sifu
from run_tools import copy_run, files_of, query, scalars, sigma_for, small_spec, spec_for
from sifu.errors import InputError, NotCertifiableError
from sifu.methods.registry import METHODS
from sifu.run.training import Progress
from sifu.store.statistics_files import read_updates
from sifu.theory.history import ActivePath
from sifu_paper.baselines import stored_updates as replay

pytestmark = pytest.mark.long

REPLAYING = ("fed_eraser", "fed_accum")
RATE, STEPS, CALIBRATION, SERVER, EVERY, ROUNDS = 0.1, 4, 2, 0.7, 2, 6
TINY: dict[str, Any] = {
    "model": {"kind": "least_squares", "outputs": 1},
    "local": {"rate": RATE, "steps": STEPS},
    "server": {"rate": SERVER},
    "stop": {"target": 0.0, "max_rounds": ROUNDS},
    "keep": {"updates_every": EVERY},
}
Clients = dict[str, tuple[np.ndarray, np.ndarray]]
Model = np.ndarray  # three weights and a bias


def tiny_clients() -> Clients:
    """Return five clients of different sizes, each with its own linear relation."""
    chosen = np.random.default_rng(7)
    clients = {}
    for number in range(5):
        x = chosen.normal(size=(3 + 2 * number, 3))
        clients[f"c{number}"] = (x, x @ chosen.normal(size=3) + number)
    return clients


def local_update(model: Model, x: np.ndarray, y: np.ndarray, steps: int) -> Model:
    """Return the model's change by gradient descent on half the mean squared error."""
    extended, current = np.hstack([x, np.ones((len(x), 1))]), model.copy()
    for _ in range(steps):
        current = current - RATE * extended.T @ (extended @ current - y) / len(y)
    return current - model


def mean_of(updates: dict[str, Model], clients: Clients) -> Model:
    total = sum(len(clients[name][1]) for name in updates)
    return sum((len(clients[name][1]) / total * update for name, update in updates.items()), np.zeros(4))


class PlainFederation:
    """Oracle: FedAvg, FedEraser and FedAccum with full participation, and nothing else."""

    def __init__(self, clients: Clients) -> None:
        self.clients, self.model = dict(clients), np.zeros(4)
        self.kept: list[dict[str, Model]] = []
        self.train(ROUNDS, 0)

    def train(self, rounds: int, position: int) -> None:
        for start in range(position, position + rounds):
            updates = {name: local_update(self.model, x, y, STEPS) for name, (x, y) in self.clients.items()}
            if start % EVERY == 0:
                self.kept.append(updates)
            self.model = self.model + SERVER * mean_of(updates, self.clients)

    def forget(self, names: list[str], method: str) -> None:
        for name in names:
            del self.clients[name]
        self.model, old, self.kept = np.zeros(4), self.kept, []
        for stored in old:
            updates = {name: stored[name] for name in stored if name in self.clients}
            if method == "fed_eraser":
                for name, (x, y) in self.clients.items():
                    direction = local_update(self.model, x, y, CALIBRATION)
                    updates[name] = np.linalg.norm(stored[name]) * direction / np.linalg.norm(direction)
            self.model = self.model + SERVER * mean_of(updates, self.clients)
            self.kept.append(updates)
        spent = len(old) if method == "fed_eraser" else 0
        self.train(ROUNDS - spent, spent)


def released(run: sifu.Run, folder: Path) -> Model:
    """Return the current model as three weights and a bias."""
    arrays = load_file(run.export(folder / "exported.safetensors"))
    ordered = sorted(arrays.values(), key=lambda values: -values.size)
    return np.concatenate([values.reshape(-1) for values in ordered])


@pytest.mark.parametrize("method", REPLAYING)
def test_an_independent_federation_gets_the_same_models(tmp_path: Path, method: str) -> None:
    clients = tiny_clients()
    run, plain = sifu.train(TINY, run=tmp_path / "run", clients=clients), PlainFederation(clients)
    assert np.allclose(released(run, tmp_path), plain.model, rtol=1e-10)
    for names in (["c1"], ["c0", "c3"]):
        (outcome,) = run.forget(names, method=method)
        plain.forget(names, method)
        assert np.allclose(released(run, tmp_path), plain.model, rtol=1e-9)
        assert (outcome.level, outcome.delta_reached, outcome.psi) == ("none", 1.0, np.inf)
        # The second request replays the first one's three rounds, and one round kept since.
        calibrated = {"c1": 3, "c0": 4}[names[0]] if method == "fed_eraser" else 0
        assert (outcome.rounds, outcome.cost.starting_rounds) == (ROUNDS, calibrated)
        assert run.verify().problems == []


def test_what_fed_eraser_costs(tmp_path: Path) -> None:
    run = sifu.train(TINY, run=tmp_path / "run", clients=tiny_clients())
    (outcome,) = run.forget(["c1"], method="fed_eraser")
    # Three rounds of calibration and three of retraining, by the four remaining clients; float64 down and up.
    assert (outcome.cost.rounds, outcome.cost.starting_rounds) == (6, 3)
    assert outcome.cost.local_steps == 3 * 4 * CALIBRATION + 3 * 4 * STEPS
    assert outcome.cost.bytes_sent == 6 * 4 * 2 * 4 * 8
    assert outcome.cost.bytes_kept == sum(path.stat().st_size for path in (run.folder / "updates").iterdir()) > 0
    (outcome,) = run.forget(["c2"], method="fed_accum")
    assert (outcome.cost.rounds, outcome.cost.starting_rounds) == (6, 0)
    assert outcome.cost.local_steps == 6 * 3 * STEPS
    assert outcome.cost.bytes_sent == 6 * 3 * 2 * 4 * 8
    kept = sum(path.stat().st_size for path in (run.folder / "updates").iterdir())
    assert outcome.cost.bytes_kept == kept == run.status().bytes_kept["fed_eraser"] == run.status().updates.bytes


@pytest.mark.parametrize("change", ["no calibration", "all of K", "weights of everyone", "the client stays"])
def test_the_oracle_tells_a_wrong_method_apart(tmp_path: Path, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: each of these mistakes moves the model far beyond the tolerance."""
    clients = tiny_clients()
    plain = PlainFederation(clients)
    plain.forget(["c1"], "fed_eraser")
    spec = TINY | {"local": TINY["local"] | {"calibration_steps": STEPS}} if change == "all of K" else TINY
    run = sifu.train(spec, run=tmp_path / "run", clients=clients)
    if change == "weights of everyone":
        right = replay.move
        monkeypatch.setattr(
            "sifu_paper.baselines.stored_updates.move", lambda view, model, updates: 0.8 * right(view, model, updates)
        )
    if change == "the client stays":
        monkeypatch.setattr("sifu_paper.baselines.stored_updates.clients_gone", lambda view, terms: set())
    if change == "the client stays":
        run.forget(["c1"], method="fed_eraser")
        # The verifier finds this one without an oracle.
        assert any("updates" in problem for problem in run.verify().problems)
        return
    run.forget(["c1"], method="fed_accum" if change == "no calibration" else "fed_eraser")
    assert not np.allclose(released(run, tmp_path), plain.model, rtol=1e-4)


def test_rounds_that_nobody_is_left_of_are_skipped(tmp_path: Path) -> None:
    spec = small_spec(
        server={"participation": "fixed(1)"}, keep={"updates_every": 1}, stop={"target": 0.0, "max_rounds": 20}
    )
    run = sifu.train(spec, run=tmp_path / "run")
    ((name, alone),) = query(
        run.folder,
        "SELECT name, COUNT(*) FROM participation JOIN clients USING (client) GROUP BY client "
        "ORDER BY COUNT(*) DESC LIMIT 1",
    )
    (outcome,) = run.forget([name], method="fed_eraser")
    assert alone > 0
    assert outcome.cost.starting_rounds == 20 - alone
    assert outcome.rounds == 20
    assert run.verify().problems == []


@pytest.mark.parametrize("method", REPLAYING)
def test_a_run_without_updates_refuses(own_trained: Path, method: str) -> None:
    run = sifu.open_run(own_trained)
    before = files_of(own_trained)
    for ask in (run.plan, run.request, run.forget):
        with pytest.raises(InputError, match=r"keep\.updates_every"):
            ask(["client-001"], method=method)
    assert files_of(own_trained) == before
    assert query(own_trained, "SELECT COUNT(*) FROM requests") == [(0,)]


# -- never claim more than is proven --------------------------------------------------------------------------


def absent_counterfactual(clients: Clients, name: str, folder: Path) -> sifu.Run:
    """Run the same training and first request in a counterfactual without `name`."""
    run = sifu.train(TINY, run=folder, clients={client: data for client, data in clients.items() if client != name})
    run.forget(["c1"], method="fed_eraser")
    return run


def test_after_a_heuristic_only_the_initial_model_can_be_certified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clients = tiny_clients()
    spec = TINY | {"data": {"preprocessing": "fixed"}}
    run = sifu.train(spec, run=tmp_path / "run", clients=clients)
    run.forget(["c1"], method="fed_eraser")
    psi = {client.name: client.psi for client in run.status().clients}
    assert set(psi.values()) == {math.inf}
    for sigma in ("auto", 0.5, 1e6):
        plan = run.plan(["c4"], sigma=sigma)
        assert (plan.source_node, plan.noise_std, plan.level, plan.psi) == (0, 0.0, "exact", 0.0)
        assert any("heuristic" in note for note in plan.notes)

    # Without the rule, the calibrated model would pass for untouched, because c4 has not taken part since.
    with monkeypatch.context() as patched:
        patched.setattr(ActivePath, "unbounded_from", property(lambda path: len(path.nodes)))
        patched.setattr("sifu.theory.tracking.SensitivityTracker.lose_track", lambda tracker: None)
        wrong = sifu.open_run(run.folder).plan(["c4"], sigma=1e-9)  # a new object without cached values
    assert wrong.level == "exact"
    heuristic = query(run.folder, "SELECT node FROM nodes WHERE kind = 'heuristic'")[0][0]
    assert wrong.source_node == heuristic
    without = absent_counterfactual(clients, "c4", tmp_path / "without")
    here, there = (
        np.concatenate(
            [v.reshape(-1) for v in load_file(counterfactual.folder / "models" / f"{heuristic}.safetensors").values()]
        )
        for counterfactual in (run, without)
    )
    assert np.linalg.norm(here - there) > 0.1, "the certificate would have said: the same"

    # With the rule, the model equals training without c4.
    (outcome,) = run.forget(["c4"], sigma=0.5)
    assert outcome.level == "exact"
    plain = PlainFederation({name: data for name, data in clients.items() if name not in ("c1", "c4")})
    assert np.allclose(released(run, tmp_path), plain.model, rtol=1e-10)
    assert run.verify().problems == []


@pytest.mark.parametrize("method", REPLAYING)
def test_a_heuristic_breaks_no_earlier_certificate(
    tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Updates made before the noise that covers a client would release what the noise hides, so they are refused."""
    run = sifu.train(small_spec(keep={"updates_every": 2}), run=tmp_path / "run")
    run.forget(["client-000"], "promised", sigma=0.1)
    assert query(run.folder, "SELECT source_node > 1 FROM requests") == [(1,)]
    with pytest.raises(NotCertifiableError, match="request promised"):
        run.forget(["client-001"], method=method)
    forced = copy_run(run.folder, tmp_path / "forced")
    with monkeypatch.context() as patched:
        patched.setattr("sifu_paper.baselines.stored_updates.promises_broken", lambda *arguments: [])
        sifu.open_run(forced).forget(["client-001"], method=method)
    assert any("whose certificate that breaks" in problem for problem in sifu.open_run(forced).verify().problems)
    # From a fresh model on, no update contains the client, and nothing is broken.
    run.forget(["client-002"], method="scratch")
    for client in ("client-001", "client-003"):
        (outcome,) = run.forget([client], method=method)
        assert outcome.level == "none"
    assert run.verify().problems == []


def test_noise_of_training_promises_nothing_that_a_replay_could_break(tmp_path: Path) -> None:
    """The size of training noise depends on the participants, so it certifies nothing that a replay could break."""
    run = sifu.train(spec_for("dp"), run=tmp_path / "run")
    (outcome,) = run.forget(["client-000"], "promised", method="dp", level="none")
    assert outcome.level == "none"
    run.plan(["client-001"], method="fed_accum")
    run.forget(["client-003"], method="scratch")
    run.forget(["client-001"], method="fed_accum")
    assert run.verify().problems == []


@pytest.mark.parametrize("method", REPLAYING)
def test_what_other_methods_may_say_after_a_replay(tmp_path: Path, method: str) -> None:
    run = sifu.train(spec_for("dp"), run=tmp_path / "run")
    assert run.plan(["client-001"], method="dp").level == "none"
    run.forget(["client-000"], method=method)
    with pytest.raises(NotCertifiableError, match="not bounded"):
        run.plan(["client-001"], method="last")
    plan = run.plan(["client-001"], method="dp")
    assert (plan.level, plan.psi) == ("none", np.inf)
    assert [premise.name for premise in plan.premises if premise.status == "failed"] == [
        "training noise",
        "history",
    ]
    with pytest.raises(NotCertifiableError, match="stored updates"):
        run.forget(["client-001"], method="dp")
    for client, other in enumerate(("dp", "fine_tuning"), start=1):
        (outcome,) = run.forget([f"client-{client:03d}"], method=other, level="none")
        assert (outcome.level, outcome.psi) == ("none", np.inf)
        assert run.verify().problems == []
    (outcome,) = run.forget(["client-003"], method="noisy_scratch", sigma=0.2)
    assert outcome.level == "exact"
    assert run.plan(["client-004"], method="dp").level == "none"


# -- nothing of a forgotten client stays ----------------------------------------------------------------------


def stored_tensors(folder: Path, client: int) -> Iterator[bytes]:
    """Yield the bytes of every stored update of a client."""
    for path in sorted((folder / "updates").iterdir()):
        update = load_file(path).get(str(client))
        if update is not None:
            yield update.tobytes()


# A closed-form head has no rounds: it stores no updates, and its requests have no limit of rounds.
TRAINED = sorted(set(METHODS) - {"closed_form"})


def everything_on_disk(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file())


@pytest.mark.parametrize("method", TRAINED)
def test_no_byte_of_a_forgotten_clients_updates_stays(tmp_path: Path, method: str) -> None:
    run = sifu.train(spec_for(method), run=tmp_path / "run")
    for client, retention in ((3, "paper"), (7, "strict"), (8, "paper")):
        tensors = list(stored_tensors(run.folder, client))
        assert tensors
        assert all(tensor in everything_on_disk(run.folder) for tensor in tensors), "the search finds what is there"
        run.forget(
            [f"client-{client:03d}"], method=method, retention=retention, sigma=sigma_for(method, 0.1), level="none"
        )
        content = everything_on_disk(run.folder)
        assert not any(tensor in content for tensor in tensors)
        assert list(stored_tensors(run.folder, client)) == []
        assert run.verify().problems == []


def test_updates_of_the_others_stay_where_the_history_stays(tmp_path: Path) -> None:
    run = sifu.train(small_spec(keep={"updates_every": 2}, stop={"max_rounds": 9, "target": 0.0}), run=tmp_path / "run")
    before = {path.name: load_file(path) for path in (run.folder / "updates").iterdir()}
    assert sorted(before) == [f"{node}.0.0.safetensors" for node in (1, 3, 5, 7, 9)]
    strict = copy_run(run.folder, tmp_path / "strict")
    (outcome,) = run.forget(["client-004"], sigma=0.1)
    kept = [node for node in (1, 3, 5, 7, 9) if node <= outcome.rollback_to]
    assert kept
    for node in kept:
        after = load_file(run.folder / "updates" / f"{node}.0.1.safetensors")
        expected = {name: values for name, values in before[f"{node}.0.0.safetensors"].items() if name != "4"}
        assert after.keys() == expected.keys()
        # Also the salts of the remaining clients; row 4 belonged to the client that left.
        expected["salts"] = np.delete(expected["salts"], 4, axis=0)
        assert all(np.array_equal(after[name], expected[name]) for name in after)
    # Strict: only the round from the untouched initial model does not depend on the client.
    sifu.open_run(strict).forget(["client-004"], sigma=0.1, retention="strict")
    old = [path.name for path in (strict / "updates").iterdir() if int(path.name.split(".")[0]) <= 9]
    assert old == ["1.0.1.safetensors"]


# -- limits and interruptions ---------------------------------------------------------------------------------


@pytest.mark.parametrize("method", TRAINED)
def test_a_request_has_limits_of_its_own(tmp_path: Path, method: str) -> None:
    little_noise = {"server": {"noise": 0.02}} if method == "dp" else {}
    spec = spec_for(method, stop={"target": 0.3, "max_rounds": 40}, **little_noise)
    terms: dict[str, Any] = {"method": method, "sigma": sigma_for(method, 0.3), "level": "none"}
    run = sifu.train(spec, run=tmp_path / "run")
    assert query(run.folder, "SELECT MAX(position) FROM nodes")[0][0] < 40
    for rounds in (1, 7):
        (outcome,) = run.forget([f"client-{rounds:03d}"], max_rounds=rounds, target=0.0, **terms)
        assert (outcome.rounds, outcome.target) == (rounds, 0.0)
        assert outcome.cost.starting_rounds <= rounds
    (outcome,) = run.forget(["client-010"], max_rounds=35, **terms)
    assert outcome.target == 0.3
    assert outcome.rounds <= 35
    assert run.verify().problems == []


def test_the_replay_stops_at_the_limit(tmp_path: Path) -> None:
    run = sifu.train(small_spec(keep={"updates_every": 1}), run=tmp_path / "run")
    (outcome,) = run.forget(["client-001"], method="fed_eraser", max_rounds=3, target=0.0)
    assert (outcome.rounds, outcome.cost.starting_rounds) == (3, 3)
    assert len(list((run.folder / "updates").iterdir())) == 3
    assert run.verify().problems == []


@pytest.mark.parametrize("terms", [{"max_rounds": -1}, {"max_rounds": 1.5}, {"target": 1.5}, {"target": "high"}])
def test_limits_that_are_none_are_refused(own_trained: Path, terms: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(terms))):
        sifu.open_run(own_trained).forget(["client-001"], **terms)


@pytest.mark.long
@pytest.mark.parametrize("method", REPLAYING)
def test_an_interruption_at_every_stage_changes_nothing(tmp_path: Path, method: str) -> None:
    spec = small_spec(keep={"updates_every": 2}, privacy={"noise": "seeded"})

    def execute(run: sifu.Run, **more: Any) -> None:
        for client in ("client-002", "client-005"):
            run.forget([client], client, method=method, max_rounds=6, target=0.0, **more)

    reference = sifu.train(spec, run=tmp_path / "reference")
    execute(reference)
    folder = tmp_path / "interrupted"
    sifu.train(spec, run=folder)
    waits = {"calls": 0, "until": 0}

    def interrupt(*_: object) -> None:
        waits["calls"] += 1
        if waits["calls"] > waits["until"]:
            waits["until"] += 1
            waits["calls"] = 0
            raise KeyboardInterrupt

    interrupted = 0
    for _ in range(100):
        run = sifu.open_run(folder)
        engine = run.engine()
        trained = engine.local_updates

        def local_updates(*arguments: Any, trained: Any = trained) -> Any:
            interrupt()
            return trained(*arguments)

        engine.local_updates = local_updates
        try:
            execute(run, progress=lambda update: interrupt(update))
            break
        except KeyboardInterrupt:
            interrupted += 1
            assert sifu.open_run(folder).verify().problems == []
    assert interrupted > 3
    assert scalars(folder) == scalars(reference.folder)
    assert list((folder / "updates").glob(".*")) == []


def test_progress_is_that_of_the_request(tmp_path: Path) -> None:
    run = sifu.train(small_spec(), run=tmp_path / "run")
    seen: list[Progress] = []
    run.forget(["client-001"], sigma=0.3, max_rounds=2, target=0.0, progress=seen.append)
    assert [(progress.rounds, progress.max_rounds, progress.target) for progress in seen] == [(1, 2, 0.0), (2, 2, 0.0)]
    payload = query(run.folder, "SELECT payload FROM events WHERE kind = 'rolled back'")[0][0]
    assert json.loads(payload)["extra"] == {"rounds": 0, "local_steps": 0, "bytes_sent": 0}


def test_the_digest_of_an_erased_update_tells_nothing_of_a_guess(tmp_path: Path) -> None:
    """The ledger keeps a digest of every update, but the salt is erased with the update, so no guess can be checked."""
    run = sifu.train(spec_for("sifu"), run=tmp_path / "run")
    row = next(iter(run.reader().updates().values()))
    stored = read_updates(run.folder, row)
    update, salt = stored.values[3].tobytes(), stored.salts[3].tobytes()
    assert hashlib.sha256(salt + update).hexdigest() == row.clients[3]
    assert len({kept.tobytes() for kept in stored.salts.values()}) == len(stored.salts)
    run.forget(["client-003"], method="sifu", sigma=0.5, retention="strict")
    recorded = [payload for (payload,) in query(run.folder, "SELECT payload FROM events")]
    assert any(row.clients[3] in payload for payload in recorded)  # the digest stays, for the auditor
    assert not any(hashlib.sha256(update).hexdigest() in payload for payload in recorded)
    bytes_left = b"".join(path.read_bytes() for path in run.folder.rglob("*") if path.is_file())
    assert salt not in bytes_left
    assert salt.hex().encode() not in bytes_left
