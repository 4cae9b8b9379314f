"""Lanes: they agree with the embedded engine round by round, end one by one, and pass errors on."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from sifu.core.engine import Position
from sifu.core.round_stream import RoundsWanted, StreamedRound, stream_rounds
from sifu.core.spec import StopSpec
from sifu.engines.sim import LocalTraining, SimulatedFederation
from sifu.engines.sim.gpu.device_queue import without_collector
from sifu.engines.sim.networks import ConvNet, Convolution
from sifu.errors import InputError, RoundRejectedError
from sifu_kernels import NAME
from sifu_kernels.conv_program import ConvProgram, with_border
from sifu_kernels.lane_stream import ProgramPlan
from sifu_kernels.lanes import lane_engines, slots_for

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = ConvNet((1, 4, 4), (Convolution(2, 1),), (), 2)
Rounds = list[tuple[StreamedRound, np.ndarray]]


def rounds_of(engine: Any, wanted: RoundsWanted, active: np.ndarray) -> Rounds:
    start = engine.initial_model(0)
    return [(done, done.fetch_model()) for done in stream_rounds(engine, start, Position(0, 0), active, wanted)]


def in_threads(works: list[Callable[[], Any]]) -> list[Any]:
    results: list[Any] = [None] * len(works)

    def run(place: int) -> None:
        try:
            results[place] = works[place]()
        except BaseException as error:
            results[place] = error

    threads = [threading.Thread(target=run, args=(place,), daemon=True) for place in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def compare(federations: list[Any], data: list[Any], rounds: int, tolerance: float) -> None:
    """Compare the lanes of one group with each federation trained alone."""
    engines = lane_engines(federations, data, DEVICE)
    active = np.arange(len(federations[0].clients))[1:]
    start = [federation.initial_model(0).astype(np.float64) for federation in federations]
    stop = StopSpec(0.0, 0, rounds, 2)

    def work(place: int) -> Callable[[], Rounds]:
        def run() -> Rounds:
            try:
                return rounds_of(engines[place], RoundsWanted(stop, start[place]), active)
            finally:
                engines[place].close()

        return run

    for place, lane in enumerate(in_threads([work(place) for place in range(len(engines))])):
        wanted = RoundsWanted(stop, start[place])
        expected = rounds_of(federations[place], wanted, active)
        assert len(lane) == len(expected) == rounds
        for (streamed, model), (other, reference) in zip(lane, expected, strict=True):
            assert streamed.participants.tolist() == other.participants.tolist()
            assert streamed.samples.tolist() == other.samples.tolist()
            scale = max(float(np.abs(reference).max()), 1e-30)
            assert np.abs(model - reference).max() <= tolerance * scale
            assert streamed.drifts == pytest.approx(other.drifts, rel=100 * tolerance)
            assert streamed.mean_shift == pytest.approx(other.mean_shift, rel=100 * tolerance)
            assert streamed.distance == pytest.approx(other.distance, rel=100 * tolerance)
            assert streamed.rounding == pytest.approx(other.rounding, rel=1e-6)
            assert (streamed.evaluation is None) == (other.evaluation is None)
            if streamed.evaluation and other.evaluation:
                assert streamed.evaluation.loss == pytest.approx(other.evaluation.loss, rel=100 * tolerance)
                assert streamed.evaluation.clients.tolist() == other.evaluation.clients.tolist()


@pytest.mark.parametrize(
    "network",
    [
        ConvNet((2, 6, 6), (Convolution(3, 1),), (5,), 3, dropout=0.2),
        ConvNet((3, 5, 5), (Convolution(8, 1, pool=False), Convolution(8, 0)), (), 2),
        ConvNet((1, 6, 6), (Convolution(16, 1), Convolution(8, 1)), (), 2),
        ConvNet((1, 5, 5), (Convolution(3, 1), Convolution(2, 1)), (), 2),
    ],
    ids=["pooled, dropout", "padded, no hidden layer", "many channels", "odd channels"],
)
def test_networks(make_federation: Any, network: ConvNet) -> None:
    """Together the networks use every form of a weight gradient, on images and on activations."""
    federations = [make_federation(network, seed=seed) for seed in (1, 2)]
    compare([federation for federation, _ in federations], [data for _, data in federations], 2, 1e-5)


def test_single_rounds(make_federation: Any) -> None:
    federation, data = make_federation(SMALL, clients=6, participation="fixed(3)")
    (engine,) = lane_engines([federation], [data], DEVICE)
    start, who = federation.initial_model(0), np.array([4, 1, 0, 5])
    result, other = (each.run_round(start, Position(1, 7), np.arange(6)) for each in (engine, federation))
    assert result.model == pytest.approx(other.model, abs=1e-6)
    assert result.participants.tolist() == other.participants.tolist()
    evaluated = engine.evaluate(start, who)
    assert evaluated.correct.tolist() == federation.evaluate(start, who).correct.tolist()
    engine.close()


def test_lanes_that_are_done_drop_out(make_federation: Any) -> None:
    """Lanes have different lengths, and the longest ends after the others have left."""
    federations = [make_federation(SMALL, seed=seed, clients=5) for seed in range(5)]
    engines = lane_engines([federation for federation, _ in federations], [data for _, data in federations], DEVICE)

    def work(place: int) -> Callable[[], int]:
        def run() -> int:
            start = engines[place].initial_model(0)
            wanted = RoundsWanted(StopSpec(0.0, 0, 3 + 5 * place, 10), start.astype(np.float64))
            count = sum(1 for _ in engines[place].run_rounds(start, Position(0, 0), np.arange(5), wanted))
            engines[place].close()
            return count

        return run

    assert in_threads([work(place) for place in range(5)]) == [3 + 5 * place for place in range(5)]


def test_a_diverging_lane_fails_alone(make_federation: Any) -> None:
    calm, data = make_federation(SMALL, seed=1, clients=5)
    engines = lane_engines([calm, calm], [data, data], DEVICE)
    start = calm.initial_model(0)
    wanted = RoundsWanted(StopSpec(0.0, 0, 5, 10), start.astype(np.float64))

    def good() -> int:
        try:
            return len(list(engines[0].run_rounds(start, Position(0, 0), np.arange(5), wanted)))
        finally:
            engines[0].close()

    def bad() -> str:
        try:
            list(engines[1].run_rounds(start * np.inf, Position(0, 0), np.arange(5), wanted))
        except RoundRejectedError as error:
            return str(error)
        finally:
            engines[1].close()
        return ""

    with np.errstate(invalid="ignore"):
        count, message = in_threads([good, bad])
    assert count == 5
    assert "NaN or Inf" in message


def test_what_cannot_be_a_lane_is_refused(make_federation: Any) -> None:
    federation, data = make_federation(SMALL, seed=1)
    other, more = make_federation(SMALL, seed=2, training=LocalTraining(0.01, 2, 2, 0.9))
    with pytest.raises(InputError, match="must share"):
        lane_engines([federation, other], [data, more], DEVICE)
    linear = SimulatedFederation(data, "softmax", LocalTraining(0.01, 2))
    with pytest.raises(InputError, match="only for the convolutional networks"):
        lane_engines([linear], [data], DEVICE)


def test_certificates_hear_of_a_lower_precision(make_federation: Any) -> None:
    federation, data = make_federation(SMALL)
    (engine,) = lane_engines([federation], [data], DEVICE)
    assert (engine.facts.dtype, engine.facts.trainer, engine.layout.dtype) == ("tf32", NAME, "float32")
    engine.close()


def test_a_program_is_freed_with_its_last_user() -> None:
    """A program is freed with its last reference, not by a later collection, perhaps while another thread captures a
    graph.
    """
    network = ConvNet((2, 6, 6), (Convolution(3, 1),), (), 3)
    images, labels = torch.zeros(4, 6, 6, 2, device=DEVICE), torch.zeros(4, dtype=torch.int64, device=DEVICE)
    images = with_border(network, images)
    with without_collector():
        plan = ProgramPlan(LocalTraining(0.1, 1), batch=2, slots=2, width=2)
        program = ConvProgram(network, images, labels, plan, summed_for=2)
        gone = weakref.ref(program)
        del program
        assert gone() is None


def test_the_collector_rests_until_the_last_capture_is_done() -> None:
    assert gc.isenabled()
    with without_collector():
        with without_collector():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        with without_collector():
            pass
        assert not gc.isenabled()  # a caller that had disabled the collector finds it disabled
    finally:
        gc.enable()


def test_slots_hold_every_likely_draw() -> None:
    from sifu.theory.participation import Participation

    assert slots_for(Participation("all"), 9) == 9
    assert slots_for(Participation("fixed", count=20), 9) == 9
    assert 10 < slots_for(Participation("poisson", rate=0.1), 1000) < 300


@pytest.mark.parametrize("slots", [1, 5, 20, 100])
def test_a_lane_is_summed_alike_whoever_runs_beside_it(slots: int) -> None:
    """The order of a lane's sums does not depend on the other lanes; otherwise runs of one seed could differ."""
    network = ConvNet((2, 6, 6), (Convolution(3, 1),), (), 3)

    def forms(lanes: int) -> tuple[Any, ...]:
        images, labels = torch.zeros(4, 6, 6, 2, device=DEVICE), torch.zeros(4, dtype=torch.int64, device=DEVICE)
        images = with_border(network, images)
        plan = ProgramPlan(LocalTraining(0.1, 1), batch=2, lanes=lanes, slots=slots, width=lanes * slots)
        program = ConvProgram(network, images, labels, plan, summed_for=slots)
        return (*program.plan.forms, *(program.plan.tiles(kernel, 0) for kernel in ("convolve", "input", "weight")))

    assert len({forms(lanes) for lanes in (1, 3, 10)}) == 1
