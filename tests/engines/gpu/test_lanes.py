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
from sifu.engines.sim import LocalTraining
from sifu.engines.sim.client_updates import Clipping
from sifu.engines.sim.gpu.conv_program import ConvProgram, with_border
from sifu.engines.sim.gpu.device_queue import without_collector
from sifu.engines.sim.gpu.lane_stream import ProgramPlan
from sifu.engines.sim.lanes import lane_engines, slots_for
from sifu.engines.sim.networks import ConvNet, Convolution
from sifu.errors import InputError, RoundRejectedError

pytestmark = pytest.mark.long

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
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


def compare(federations: list[Any], data: list[Any], rounds: int, tolerance: float, updates_every: int = 0) -> None:
    """Compare the lanes of one group with each federation trained alone."""
    engines = lane_engines(federations, data, DEVICE)
    active = np.arange(len(federations[0].clients))[1:]
    start = [federation.initial_model(0).astype(np.float64) for federation in federations]
    stop = StopSpec(0.0, 0, rounds, 2)

    def work(place: int) -> Callable[[], Rounds]:
        def run() -> Rounds:
            try:
                return rounds_of(engines[place], RoundsWanted(stop, start[place], updates_every=updates_every), active)
            finally:
                engines[place].close()

        return run

    for place, lane in enumerate(in_threads([work(place) for place in range(len(engines))])):
        wanted = RoundsWanted(stop, start[place], updates_every=updates_every)
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
            assert (streamed.updates is None) == (other.updates is None)
            if streamed.updates is not None and other.updates is not None:
                assert np.abs(streamed.updates - other.updates).max() <= tolerance * scale


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
    compare([federation for federation, _ in federations], [data for _, data in federations], 2, 1e-5, updates_every=2)


@pytest.mark.parametrize(
    ("participation", "samples", "features", "training", "dtype"),
    [
        ("all", 5, 40, LocalTraining(0.01, 4), "float64"),
        ("fixed(3)", 5, 40, LocalTraining(0.01, 4, 2, 0.9, weight_decay=0.1), "float64"),
        ("poisson(0.5)", 30, 4, LocalTraining(0.01, 4, 3, 0.9, nesterov=True), "float64"),
        ("all", 5, 40, LocalTraining(0.01, 4, weight_decay=0.1), "float32"),
    ],
)
def test_linear_models(
    make_federation: Any, participation: str, samples: int, features: int, training: LocalTraining, dtype: str
) -> None:
    federations = [
        make_federation(
            (features, 3),
            seed=seed,
            clients=6,
            samples=samples,
            participation=participation,
            training=training,
            dtype=dtype,
        )
        for seed in (1, 2)
    ]
    tolerance = 1e-12 if dtype == "float64" else 1e-5
    compare(
        [federation for federation, _ in federations], [data for _, data in federations], 25, tolerance, updates_every=3
    )


def test_clipped_updates(make_federation: Any) -> None:
    federations = [
        make_federation((6, 3), seed=seed, clients=5, dtype="float64", clipping=Clipping(0.02, 0.0, "seeded", seed))
        for seed in (1, 2)
    ]
    compare([federation for federation, _ in federations], [data for _, data in federations], 3, 1e-6)


def test_local_updates_and_single_rounds(make_federation: Any) -> None:
    federation, data = make_federation((40, 3), clients=6, participation="fixed(3)", dtype="float64")
    (engine,) = lane_engines([federation], [data], DEVICE)
    start, who = federation.initial_model(0), np.array([4, 1, 0, 5])
    updates = engine.local_updates(start, Position(1, 7), who, 1)
    assert updates == pytest.approx(federation.local_updates(start, Position(1, 7), who, 1), abs=1e-14)
    result = engine.run_round(start, Position(1, 7), np.arange(6), absent=np.array([2]))
    other = federation.run_round(start, Position(1, 7), np.arange(6), absent=np.array([2]))
    assert result.model == pytest.approx(other.model, abs=1e-14)
    assert result.participants.tolist() == other.participants.tolist()
    evaluated = engine.evaluate(start, who)
    assert evaluated.correct.tolist() == federation.evaluate(start, who).correct.tolist()
    with pytest.raises(InputError, match="Gram"):
        engine.run_round(start, Position(0, 0), who, want_gram=True)
    engine.close()


def test_lanes_that_are_done_drop_out(make_federation: Any) -> None:
    """Lanes have different lengths, and the longest ends after the others have left."""
    federations = [make_federation((6, 3), seed=seed, clients=5, dtype="float64") for seed in range(5)]
    engines = lane_engines([federation for federation, _ in federations], [data for _, data in federations], DEVICE)

    def work(place: int) -> Callable[[], int]:
        def run() -> int:
            start = engines[place].initial_model(0)
            wanted = RoundsWanted(StopSpec(0.0, 0, 7 + 23 * place, 10), start.astype(np.float64))
            count = sum(1 for _ in engines[place].run_rounds(start, Position(0, 0), np.arange(5), wanted))
            engines[place].close()
            return count

        return run

    assert in_threads([work(place) for place in range(5)]) == [7 + 23 * place for place in range(5)]


def test_a_diverging_lane_fails_alone(make_federation: Any) -> None:
    calm, data = make_federation((6, 3), seed=1, clients=5, dtype="float64")
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
    federation, data = make_federation((6, 3), seed=1)
    other, more = make_federation((6, 3), seed=2, training=LocalTraining(0.01, 2, 2, 0.9))
    with pytest.raises(InputError, match="must share"):
        lane_engines([federation, other], [data, more], DEVICE)
    with pytest.raises(InputError, match="precision"):
        lane_engines([federation], [data], DEVICE, "half")


def test_a_network_in_float64_is_refused(make_federation: Any) -> None:
    """A float64 network is refused: lanes would compute it in float32, and its facts would state float64."""
    network = ConvNet((2, 6, 6), (Convolution(3, 1),), (), 3)
    federation, data = make_federation(network, dtype="float64")
    with pytest.raises(InputError, match=r"float32 on a GPU, found model.dtype = 'float64'.*device cpu"):
        lane_engines([federation], [data], DEVICE)


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


def test_noise_that_protects_nobody_is_refused(make_federation: Any) -> None:
    """Lanes draw keyed noise, so a run whose certificates promise protection by noise gets no lane engine."""
    honest, data = make_federation((6, 3), dtype="float64", clipping=Clipping(0.02, 1.0, "seeded", 1))
    (engine,) = lane_engines([honest], [data], DEVICE)
    engine.close()
    claiming, data = make_federation((6, 3), dtype="float64", clipping=Clipping(0.02, 1.0, "system", 1))
    with pytest.raises(InputError, match="protects no client"):
        lane_engines([claiming], [data], DEVICE)


def test_certificates_hear_of_a_lower_precision(make_federation: Any) -> None:
    network = ConvNet((2, 6, 6), (Convolution(3, 1),), (), 3)
    federation, data = make_federation(network)
    for precision, outside in (("float32", ()), ("tf32", ("products in tf32",))):
        (engine,) = lane_engines([federation], [data], DEVICE, precision)
        assert engine.facts.outside == (*federation.facts.outside, *outside)
        engine.close()


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
