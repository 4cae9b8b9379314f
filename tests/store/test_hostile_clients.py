"""Replies that no honest client sends: refused before they touch the model, and recorded with the reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sifu
from run_tools import query, small_spec
from sifu.core.engine import Position
from sifu.core.layout import ModelLayout
from sifu.core.replies import Reply, ReplyGate, ReplyRules
from sifu.core.round import RoundSetup
from sifu.core.spec import Spec
from sifu.engines.sim import SimulatedFederation, SimulationSettings
from sifu.errors import InputError, RoundRejectedError
from sifu.run.clients_and_engine import clients_from_spec, engine_from_spec
from sifu.theory.facts import FIXED_CONSTANTS, ClientProfile
from sifu_verifier import verify
from suite_setup import examples

VICTIM, FORGOTTEN = 3, 0
Corruption = Callable[[Reply], list[Reply]]


class Evil:
    """Object that looks like an array until it is used."""

    def __array__(self, *_: Any) -> Any:
        raise AssertionError("code of a client ran")

    __eq__ = __ne__ = __array__  # type: ignore[assignment]
    __hash__ = object.__hash__


def filled(value: float) -> Corruption:
    return lambda reply: [Reply(reply.client, reply.position, reply.samples, np.full_like(reply.vector, value))]


def with_vector(change: Callable[[Any], Any]) -> Corruption:
    return lambda reply: [Reply(reply.client, reply.position, reply.samples, change(reply.vector))]


def with_samples(samples: Any) -> Corruption:
    return lambda reply: [Reply(reply.client, reply.position, samples, reply.vector)]


def one_entry(value: float) -> Callable[[Any], Any]:
    def change(vector: Any) -> Any:
        vector = vector.copy()
        vector[len(vector) // 2] = value
        return vector

    return change


def elsewhere(branch: int, number: int) -> Corruption:
    return lambda reply: [Reply(reply.client, Position(branch, number), reply.samples, reply.vector)]


BAD: dict[str, tuple[Corruption, str]] = {
    "NaN": (with_vector(one_entry(np.nan)), "not finite"),
    "Inf": (with_vector(one_entry(np.inf)), "not finite"),
    "all NaN": (filled(np.nan), "not finite"),
    "huge": (filled(1e30), "too large"),
    "squares overflow": (filled(1e200), "too large"),
    "largest float": (filled(1.7e308), "too large"),
    "shorter": (with_vector(lambda v: v[:-1].copy()), "wrong shape"),
    "longer": (with_vector(lambda v: np.append(v, 0.0)), "wrong shape"),
    "matrix": (with_vector(lambda v: v.reshape(1, -1)), "wrong shape"),
    "scalar": (with_vector(lambda v: np.array(0.0)), "wrong shape"),
    "empty": (with_vector(lambda v: v[:0]), "wrong shape"),
    "float32": (with_vector(lambda v: v.astype(np.float32)), "wrong dtype"),
    "integers": (with_vector(lambda v: v.astype(np.int64)), "wrong dtype"),
    "complex": (with_vector(lambda v: v.astype(complex)), "wrong dtype"),
    "big-endian": (with_vector(lambda v: v.astype(">f8")), "wrong dtype"),
    "objects": (with_vector(lambda v: v.astype(object)), "wrong dtype"),
    "texts": (with_vector(lambda v: v.astype(str)), "wrong dtype"),
    "a list": (with_vector(list), "not an array"),
    "bytes": (with_vector(lambda v: v.tobytes()), "not an array"),
    "nothing": (with_vector(lambda v: None), "not an array"),
    "an object with code": (with_vector(lambda v: Evil()), "not an array"),
    "a masked array": (with_vector(np.ma.masked_array), "not an array"),
    "no samples": (with_samples(0), "wrong samples"),
    "negative samples": (with_samples(-10), "wrong samples"),
    "absurd samples": (with_samples(10**30), "wrong samples"),
    "half a sample more": (with_samples(10.5), "wrong samples"),
    "samples as text": (with_samples("10"), "wrong samples"),
    "samples true": (with_samples(True), "wrong samples"),
    "samples NaN": (with_samples(float("nan")), "wrong samples"),
    "samples with code": (with_samples(Evil()), "wrong samples"),
    "the next round": (elsewhere(0, 10**6), "another round"),
    "another branch": (elsewhere(9, 0), "another round"),
    "no position": (lambda reply: [Reply(reply.client, None, reply.samples, reply.vector)], "another round"),
    "a position with code": (lambda reply: [Reply(reply.client, Evil(), reply.samples, reply.vector)], "another round"),
}
"""Replies after which the client is missing from the round."""

STRAY: dict[str, tuple[Corruption, str]] = {
    "twice": (lambda reply: [reply, Reply(reply.client, reply.position, reply.samples, reply.vector * 3)], "twice"),
    "a forgotten client": (
        lambda reply: [reply, Reply(FORGOTTEN, reply.position, 10, reply.vector + 1)],
        "forgotten client",
    ),
    "an unknown client": (
        lambda reply: [reply, Reply("mallory\n", reply.position, 10, reply.vector)],
        "unknown client",
    ),
    "an unknown number": (lambda reply: [reply, Reply(10**9, reply.position, 10, reply.vector)], "unknown client"),
    "a negative number": (lambda reply: [reply, Reply(-1, reply.position, 10, reply.vector)], "unknown client"),
    "client true": (lambda reply: [reply, Reply(True, reply.position, 10, reply.vector)], "unknown client"),
    "a client with code": (lambda reply: [reply, Reply(Evil(), reply.position, 10, reply.vector)], "unknown client"),
    "late": (lambda reply: [reply, Reply(reply.client, Position(0, 0), reply.samples, reply.vector)], "another round"),
}
"""Replies in addition to the honest one: the round has all its clients."""


class HostileFederation(SimulatedFederation):
    """Embedded engine with one client whose replies `corrupt` changes, from the third round on."""

    corrupt: Corruption

    def collect(self, setup: RoundSetup, drawn: Any) -> list[Reply]:
        honest = self.replies(setup, drawn)
        if setup.position.round < 2:
            return honest
        return [bad for reply in honest for bad in (self.corrupt(reply) if reply.client == VICTIM else [reply])]


def federation(kind: type[SimulatedFederation], rules: ReplyRules, **more: Any) -> Any:
    spec = Spec.from_mapping(small_spec())
    clients = clients_from_spec(spec)
    model = engine_from_spec(spec, clients)[0]
    settings = SimulationSettings(seed=spec.seed, replies=rules, preprocessing=FIXED_CONSTANTS, **more)
    return kind(clients, model.model, model.training, settings)


def hostile(corrupt: Corruption, rule: Any = "reply") -> Any:
    engine = federation(HostileFederation, ReplyRules(rule))
    engine.corrupt = staticmethod(corrupt)
    return engine


ACTIVE = np.arange(1, 12)
PLACE = Position(0, 5)


@pytest.mark.parametrize("name", BAD)
def test_a_bad_reply_changes_nothing(name: str) -> None:
    """The round ends bit for bit as if the client had been absent."""
    corrupt, reason = BAD[name]
    engine = hostile(corrupt)
    model = engine.initial_model(0)
    result = engine.run_round(model, PLACE, ACTIVE)
    honest = hostile(lambda reply: [])
    expected = honest.run_round(model, PLACE, ACTIVE)
    assert [(rejection.client, rejection.reason, rejection.left_out) for rejection in result.rejections] == [
        ("client-003", reason, True)
    ]
    assert result.model.tobytes() == expected.model.tobytes()
    assert result.participants.tolist() == [c for c in ACTIVE.tolist() if c != VICTIM]
    assert result.drifts.tobytes() == expected.drifts.tobytes()
    assert result.mean_shift == expected.mean_shift


@pytest.mark.parametrize("name", STRAY)
def test_a_stray_reply_changes_nothing(name: str) -> None:
    corrupt, reason = STRAY[name]
    engine = hostile(corrupt)
    model = engine.initial_model(0)
    result = engine.run_round(model, PLACE, ACTIVE)
    expected = hostile(lambda reply: [reply]).run_round(model, PLACE, ACTIVE)
    assert [(rejection.reason, rejection.left_out) for rejection in result.rejections] == [(reason, False)]
    assert result.model.tobytes() == expected.model.tobytes()
    assert result.participants.tolist() == ACTIVE.tolist()


@pytest.mark.parametrize("name", BAD)
def test_a_round_can_be_dropped_whole(name: str) -> None:
    engine = hostile(BAD[name][0], "round")
    model = engine.initial_model(0) + 0.25
    result = engine.run_round(model, PLACE, ACTIVE)
    assert result.model.tobytes() == model.tobytes()
    assert result.participants.size == 0
    reasons = [rejection.reason for rejection in result.rejections]
    assert reasons.count("round dropped") == ACTIVE.size - 1
    assert all(rejection.left_out for rejection in result.rejections)


@pytest.mark.parametrize("name", ["NaN", "wrong shape", "absurd samples"])
def test_by_default_the_round_stops_with_a_sentence(name: str) -> None:
    engine = hostile(BAD.get(name, BAD["longer"])[0], "stop")
    with pytest.raises(RoundRejectedError, match=r"client-003.*changed nothing|changed nothing.*client-003"):
        engine.run_round(engine.initial_model(0), PLACE, ACTIVE)


def test_honest_replies_make_the_round_of_the_engine_without_a_gate() -> None:
    """Replies averaged as models agree with the vectorised engine up to rounding."""
    plain = federation(SimulatedFederation, ReplyRules("reply"))
    gated = hostile(lambda reply: [reply])
    model = plain.initial_model(0)
    for number in range(4):
        a, b = (engine.run_round(model, Position(0, number), ACTIVE) for engine in (plain, gated))
        assert a.rejections == b.rejections == ()
        assert np.allclose(a.model, b.model, rtol=1e-11, atol=1e-13)
        assert np.allclose(a.drifts, b.drifts, rtol=1e-9)
        model = a.model


@pytest.mark.parametrize("rule", ["reply", "round"])
def test_a_client_whose_own_data_diverge_is_left_out(rule: Any) -> None:
    """A client of the embedded engine with enormous data returns NaN and is left out."""
    from types import SimpleNamespace

    from sifu.engines.sim import LocalTraining, ModuleModel

    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(3)
    data = [(rng.normal(size=(8, 5)) * (1e200 if k == 2 else 1.0), rng.integers(2, size=8)) for k in range(4)]
    clients: Any = [SimpleNamespace(name=f"c{k}", x=x, y=y) for k, (x, y) in enumerate(data)]
    module = ModuleModel(lambda: torch.nn.Linear(5, 2, dtype=torch.float64))
    engine = SimulatedFederation(clients, module, LocalTraining(0.05, 6), SimulationSettings(replies=ReplyRules(rule)))
    result = engine.run_round(engine.initial_model(0), Position(0, 0), np.arange(4))
    assert np.isfinite(result.model).all()
    assert [rejection.client for rejection in result.rejections if rejection.reason in ("not finite", "too large")] == [
        "c2"
    ]
    assert result.participants.tolist() == ([0, 1, 3] if rule == "reply" else [])


@pytest.mark.parametrize("rule", ["reply", "round"])
@pytest.mark.parametrize("name", ["NaN", "huge", "twice", "a forgotten client", "wrong samples"])
def test_a_run_with_a_hostile_client_is_recorded_and_verifies(tmp_path: Path, rule: Any, name: str) -> None:
    corrupt, reason = (BAD | STRAY).get(name, BAD["absurd samples"])
    engine = hostile(corrupt, rule)
    spec = small_spec(server={"rejected": rule})
    run = sifu.train(spec, run=tmp_path / "run", engine=engine)
    rows = query(tmp_path / "run", "SELECT round, client, reason, left_out FROM rejections WHERE reason = ?", (reason,))
    left_out = name not in STRAY
    if name != "a forgotten client":  # nobody is forgotten yet: client 0 is asked too, and its reply arrives twice
        assert [row[0] for row in rows] == list(range(2, 8))
        assert {row[3] for row in rows} == {int(left_out)}
    (outcome,) = run.forget(["client-000"], "first", sigma=0.5)
    premises = {row["name"] for row in run.certificate(outcome.request).body["premises"] if row["status"] == "assumed"}
    # The engine that makes replies hostile is not part of sifu.
    assert (outcome.level, premises) == ("conditional", {"replies", "engine"} if left_out else {"engine"})
    assert run.verify().problems == []
    assert verify(tmp_path / "run") == []
    if name == "a forgotten client":
        later = query(
            tmp_path / "run", "SELECT DISTINCT client FROM rejections WHERE branch = 1 AND reason = ?", (reason,)
        )
        assert later == [("client-000",)]


@given(st.floats(0.01, 2.0), st.integers(0, 5))
@settings(max_examples=examples(20), deadline=None, derandomize=True)
def test_a_bound_on_updates_bounds_every_psi_beforehand(bound: float, seed: int) -> None:
    """Delta_c <= 2 w_c U holds whatever the clients send, for the drifts that the engine reports."""
    from sifu.theory.tracking import client_increments

    rng = np.random.default_rng(seed)

    class Liars(HostileFederation):
        def collect(self, setup: RoundSetup, drawn: Any) -> list[Reply]:
            directions = rng.normal(size=(drawn.size, setup.start.size))
            lengths = rng.uniform(0.0, 2.0 * bound, drawn.size) / np.linalg.norm(directions, axis=1)
            moved = setup.start + directions * lengths[:, None]
            counts = [self.clients[c].samples for c in drawn]
            return [Reply(c, setup.position, n, v) for c, n, v in zip(drawn.tolist(), counts, moved, strict=True)]

    engine = federation(Liars, ReplyRules("reply", bound))
    result = engine.run_round(engine.initial_model(0), PLACE, ACTIVE)
    total = int(result.samples.sum())
    increments = client_increments(result.samples, result.drifts, total, result.mean_shift)
    for samples, increment in zip(result.samples.tolist(), increments.tolist(), strict=True):
        assert increment <= (1.0 if samples == total else 2.0 * samples / total) * bound * (1 + 1e-9)
    assert result.participants.size + len(result.rejections) == ACTIVE.size
    assert "leaving out updates beyond a bound" in engine.facts.outside


LAYOUT = ModelLayout(("w",), ((3,),))
CLIENTS = (ClientProfile("a", 5, 1), ClientProfile("b", 7, 1))


@given(
    st.one_of(st.integers(), st.text(max_size=9), st.none(), st.floats(), st.sampled_from(["a", "b", 0, 1])),
    st.one_of(st.none(), st.builds(Position, st.integers(0, 1), st.integers(0, 1))),
    st.one_of(st.integers(-9, 9), st.floats(), st.text(max_size=3)),
    st.one_of(st.none(), st.lists(st.floats(), max_size=4).map(np.array), st.binary(max_size=24)),
)
@settings(max_examples=examples(300), deadline=None, derandomize=True)
def test_whatever_arrives_the_gate_answers(client: Any, position: Any, samples: Any, vector: Any) -> None:
    gate = ReplyGate(np.zeros(3), Position(0, 1), [0, 1], LAYOUT, CLIENTS, ReplyRules("reply"))
    refused = gate.take(Reply(client, position, samples, vector))
    assert (refused is None) == (len(gate.accepted) == 1)
    for accepted in gate.accepted.values():
        assert accepted.shape == (3,)
        assert np.isfinite(accepted).all()
    assert all(rejection.client.isprintable() for rejection in gate.finish())


def test_an_accepted_reply_cannot_be_changed_afterwards() -> None:
    gate = ReplyGate(np.zeros(3), Position(0, 1), [0], LAYOUT, CLIENTS, ReplyRules("reply"))
    sent = np.ones(3)
    assert gate.take(Reply("a", Position(0, 1), 5, sent)) is None
    sent[:] = np.nan
    assert gate.accepted[0].tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(("rejected", "bound"), [("ignore", 0.0), ("reply", -1.0), ("reply", float("nan"))])
def test_rules_that_make_no_sense_are_refused(rejected: Any, bound: float) -> None:
    with pytest.raises(InputError):
        Spec.from_mapping({"server": {"rejected": rejected, "update_bound": bound}})
