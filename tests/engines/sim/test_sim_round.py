"""Rounds: they depend only on their arguments, average by eq. 5 of the paper, and refuse bad models."""

from __future__ import annotations

import numpy as np
import pytest

from sifu.core.engine import Position
from sifu.engines.sim.local_training import LocalTraining, batch_sequence
from sifu.errors import InputError, RoundRejectedError

ALL = np.arange(5)


@pytest.mark.parametrize("strategy", ["loop", "auto"])
@pytest.mark.parametrize("batch_size", [None, 4])
def test_the_same_round_twice_is_the_same_bits_and_changes_nothing(make_federation, strategy, batch_size):
    options = {"strategy": strategy, "batch_size": batch_size, "momentum": 0.5, "features": 40, "rate": 0.01}
    first, second = make_federation(**options), make_federation(**options)
    start = np.random.default_rng(0).standard_normal(first.layout.size)
    before, active = start.copy(), np.array([4, 0, 2])
    results = [engine.run_round(start, Position(1, 3), active) for engine in (first, first, second)]
    assert start.tobytes() == before.tobytes()
    assert active.tolist() == [4, 0, 2]
    for other in results[1:]:
        for name in ("model", "participants", "samples", "drifts"):
            assert getattr(results[0], name).tobytes() == getattr(other, name).tobytes(), name
        assert results[0].mean_shift == other.mean_shift
    start[:] = 7.0
    assert not np.shares_memory(results[0].model, start)


def test_batches_depend_on_the_position(make_federation):
    federation = make_federation(batch_size=2)
    start = federation.initial_model(0)
    models = [federation.run_round(start, Position(*p), ALL).model for p in ((0, 0), (0, 1), (1, 0))]
    assert len({model.tobytes() for model in models}) == 3


def test_later_changes_to_the_data_have_no_effect(make_clients):
    from sifu.engines.sim import SimulatedFederation, SimulationSettings

    for strategy in ("loop", "auto"):
        clients = make_clients("softmax", sizes=(4, 6))
        federation = SimulatedFederation(
            clients, "softmax", LocalTraining(0.1, 3), SimulationSettings(strategy=strategy)
        )
        before = federation.run_round(federation.initial_model(0), Position(0, 0), np.arange(2)).model
        for client in clients:
            client.x[:] = 0.0
        after = federation.run_round(federation.initial_model(0), Position(0, 0), np.arange(2)).model
        assert before.tobytes() == after.tobytes()


def test_the_round_is_equation_5(make_federation):
    """Mean, shift and drifts agree with single clients' rounds in extended precision."""
    federation = make_federation(batch_size=4)
    start = np.random.default_rng(0).standard_normal(federation.layout.size)
    alone = make_federation(batch_size=4)  # a round of one client returns its local model
    local = np.array([alone.run_round(start, Position(0, 0), np.array([i])).model for i in ALL]).astype(np.longdouble)
    samples = np.array([4, 7, 3, 12, 30], dtype=np.longdouble)
    mean = (samples[:, None] * local).sum(axis=0) / samples.sum()
    result = federation.run_round(start, Position(0, 0), ALL)
    exact = mean
    assert np.abs(result.model - exact).max() < 1e-14
    drifts = np.sqrt(((local - mean) ** 2).sum(axis=1))
    assert (result.drifts >= drifts * (1 - 1e-14)).all()
    assert result.drifts == pytest.approx(drifts.astype(float), rel=1e-11)
    assert result.mean_shift == pytest.approx(float(np.sqrt(((mean - start) ** 2).sum())), rel=1e-11)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("scale", [1e-200, 1.0, 1e30])
def test_drifts_are_never_below_the_distance_to_the_exact_mean(dtype, scale):
    """Drifts of random models are upper bounds against extended precision, even at sizes where squares underflow."""
    import torch

    from sifu.engines.sim.client_updates import average_models

    if dtype == "float32":
        scale = min(max(scale, 1e-30), 1e30)
    generator = np.random.default_rng(3)
    for trial in range(60):
        count, size = int(generator.integers(1, 40)), int(generator.integers(1, 200))
        centre = generator.standard_normal(size) * scale
        models = centre + generator.standard_normal((count, size)) * scale * 10.0 ** -generator.integers(0, 15)
        rows = torch.tensor(models.astype(dtype))
        samples = generator.integers(1, 50, count)
        start = np.zeros(size)
        averaged = average_models(lambda rows=rows, count=count: iter([(slice(0, count), rows)]), start, samples, 8)
        exact = rows.numpy().astype(np.longdouble)
        mean = (samples[:, None].astype(np.longdouble) * exact).sum(axis=0) / np.longdouble(samples.sum())
        norms = np.array([np.sqrt((((r - mean) / scale) ** 2).sum()) * np.longdouble(scale) for r in exact])
        if count == 1:
            assert averaged.drifts[0] == 0.0
        else:
            assert (averaged.drifts >= norms).all(), trial
        shift = np.sqrt(((mean / scale) ** 2).sum()) * np.longdouble(scale)
        assert averaged.mean_shift >= shift


def test_an_empty_round_leaves_the_model_as_it_was(make_federation):
    federation = make_federation(participation="poisson(0.05)")
    start = np.random.default_rng(0).standard_normal(federation.layout.size)
    empty = 0
    for number in range(40):
        result = federation.run_round(start, Position(0, number), ALL)
        if result.participants.size == 0:
            empty += 1
            assert result.model.tobytes() == start.tobytes()
            assert not np.shares_memory(result.model, start)
            assert (result.drifts.size, result.samples.size, result.mean_shift, result.rounding) == (0, 0, 0.0, 0.0)
    assert 20 < empty < 40  # expected: 0.95^5 = 0.77 of 40
    empty = make_federation().run_round(start, Position(0, 0), np.array([], dtype=np.int64))
    assert empty.participants.size == 0


def test_fixed_participation_takes_the_count_or_whoever_is_left(make_federation):
    federation = make_federation(participation="fixed(3)")
    start = federation.initial_model(0)
    seen = set()
    for number in range(30):
        result = federation.run_round(start, Position(0, number), np.array([0, 1, 2, 4]))
        assert result.participants.size == 3
        assert (np.diff(result.participants) > 0).all()
        seen.update(result.participants.tolist())
    assert seen == {0, 1, 2, 4}
    assert federation.run_round(start, Position(0, 0), np.array([1])).participants.tolist() == [1]


@pytest.mark.parametrize("strategy", ["loop", "auto"])
def test_taking_a_client_out_leaves_the_others_local_models(make_federation, strategy):
    """Removing a client from a round keeps the other participants and their local models."""
    federation = make_federation(strategy=strategy, batch_size=3, momentum=0.5, participation="poisson(0.8)")
    start = np.random.default_rng(0).standard_normal(federation.layout.size)
    samples = np.array([4, 7, 3, 12, 30])
    for number in range(6):
        everyone = federation.run_round(start, Position(0, number), ALL)
        without = federation.run_round(start, Position(0, number), np.array([0, 1, 3, 4]))
        assert without.participants.tolist() == [i for i in everyone.participants if i != 2]
        if 2 in everyone.participants:
            total = samples[everyone.participants].sum()
            single = make_federation(strategy=strategy, batch_size=3, momentum=0.5)
            own = single.run_round(start, Position(0, number), np.array([2])).model
            rest = without.model * (total - 3) / total + own * 3 / total if without.participants.size else own
            assert np.abs(rest - everyone.model).max() < 1e-14


def test_batches_walk_permutations_and_end_them_with_a_smaller_one():
    batches = batch_sequence(4, 10, 0, Position(0, 0), 3, steps=7)
    assert [batch.size for batch in batches] == [4, 4, 2, 4, 4, 2, 4]
    assert sorted(np.concatenate(batches[:3])) == sorted(np.concatenate(batches[3:6])) == list(range(10))
    assert np.concatenate(batches[:3]).tolist() != np.concatenate(batches[3:6]).tolist()
    other = batch_sequence(4, 10, 0, Position(0, 0), 4, steps=7)
    assert [batch.tolist() for batch in other] != [batch.tolist() for batch in batches]
    whole = batch_sequence(10, 10, 0, Position(0, 0), 3, steps=2)
    assert [batch.tolist() for batch in whole] == [list(range(10))] * 2
    assert [int(LocalTraining(0.1, 1, size).smallest_batch(np.array(10))) for size in (None, 3, 5, 10, 99)] == [
        10,
        1,
        5,
        10,
        10,
    ]


@pytest.mark.parametrize("strategy", ["loop", "auto"])
def test_a_diverging_client_is_named_and_the_round_rejected(make_federation, strategy):
    """Safe steps never diverge, so the model that the round starts from is too large for float64."""
    federation = make_federation("least_squares", sizes=(3, 3, 3), steps=4, strategy=strategy, outputs=1)
    with pytest.raises(RoundRejectedError, match=r"round 8 of branch 2 .*3 of 3 clients .*'client-0', 'client-1'"):
        federation.run_round(np.full(6, 1e308), Position(2, 8), np.arange(3))


def test_one_diverging_client_among_many_is_found(make_clients):
    from sifu.engines.sim import SimulatedFederation, SimulationSettings

    clients = make_clients("least_squares", sizes=(3, 4, 5), outputs=1)
    clients[1].x = clients[1].x * 1e80
    for strategy in ("loop", "auto"):
        federation = SimulatedFederation(
            clients, "least_squares", LocalTraining(1e-3, 3), SimulationSettings(strategy=strategy)
        )
        with pytest.raises(RoundRejectedError, match=r"1 of 3 clients returned .* \('client-1'\)"):
            federation.run_round(np.full(6, 1e230), Position(0, 0), np.arange(3))


def test_bad_arguments_are_sentences(make_federation):
    federation = make_federation()
    start = federation.initial_model(0)
    with pytest.raises(InputError, match=r"a model of 18 parameters was expected, found shape \(3,\)"):
        federation.run_round(np.zeros(3), Position(0, 0), ALL)
    with pytest.raises(InputError, match=r"active clients must be indices in 0\.\.4, found 0\.\.9"):
        federation.run_round(start, Position(0, 0), np.array([0, 9]))
    with pytest.raises(InputError, match="name some client twice"):
        federation.evaluate(start, np.array([1, 1]))


def test_active_clients_that_change_in_place_are_looked_at_again(make_federation):
    federation = make_federation()
    start, active = federation.initial_model(0), np.array([0, 1, 2])
    assert federation.run_round(start, Position(0, 0), active).participants.tolist() == [0, 1, 2]
    active[2] = 4
    assert federation.run_round(start, Position(0, 0), active).participants.tolist() == [0, 1, 4]
    active[:] = [2, 0, 1]
    assert federation.run_round(start, Position(0, 0), active).participants.tolist() == [0, 1, 2]
    active[2] = 99
    with pytest.raises(InputError, match=r"indices in 0\.\.4"):
        federation.run_round(start, Position(0, 0), active)


def test_constant_active_clients_are_known_by_themselves_until_others_are_asked_for(make_federation):
    federation = make_federation()
    start = federation.initial_model(0)

    def constant(*clients: int) -> np.ndarray:
        array = np.array(clients)
        array.flags.writeable = False
        return array

    def drawn(active: np.ndarray) -> list[int]:
        return federation.run_round(start, Position(0, 0), active).participants.tolist()

    some, others, view = constant(0, 1, 2), constant(1, 3), np.arange(5)
    for active in (some, some, others, some, others):
        assert drawn(active) == active.tolist()
    federation.evaluate(start, np.array([4, 0]))  # unsorted clients leave the cache unchanged
    assert drawn(others) == [1, 3]
    # Read-only through this view but writable through another: compared every time.
    window = view[1:3]
    window.flags.writeable = False
    assert drawn(window) == [1, 2]
    view[1:3] = [0, 4]
    assert drawn(window) == [0, 4]
