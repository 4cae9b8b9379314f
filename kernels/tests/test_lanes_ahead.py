"""Rounds computed ahead of their consumer: they change no bit, no error and no stopping point."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch

from sifu.core.engine import Position
from sifu.core.round_stream import RoundsWanted, StreamedRound, stream_rounds
from sifu.core.spec import StopSpec
from sifu.engines.sim import LocalTraining
from sifu.engines.sim.networks import ConvNet, Convolution
from sifu.errors import RoundRejectedError
from sifu_kernels import lane_group, lanes
from sifu_kernels.lanes import lane_engines

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NETWORK = ConvNet((1, 4, 4), (Convolution(2, 1),), (), 2)
CHUNK, ROUNDS = 2, 5


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane_group, "CHUNK", CHUNK)
    monkeypatch.setattr(lane_group, "LONE_CHUNK", CHUNK)


def stream_of(engine: Any, start: np.ndarray, first: int, rounds: int, **wanted: Any) -> Iterator[StreamedRound]:
    """Return rounds `first` to `rounds` from `start`, measured from the initial model."""
    origin = engine.initial_model(0).astype(np.float64)
    rounds_wanted = RoundsWanted(StopSpec(0.0, 0, rounds, 2), origin, **wanted)
    return stream_rounds(engine, start, Position(0, first), np.arange(len(engine.clients)), rounds_wanted)


def seen(done: StreamedRound) -> tuple[Any, ...]:
    """Return every value of a round, to the bit."""
    evaluation = done.evaluation
    return (
        done.participants.tolist(),
        done.samples.tolist(),
        done.drifts.tolist(),
        (done.mean_shift, done.rounding, done.distance),
        done.fetch_model().tobytes(),
        None if evaluation is None else (evaluation.correct.tolist(), evaluation.loss_sum.tolist()),
    )


def everything(engines: list[Any], **wanted: Any) -> list[list[tuple[Any, ...]]]:
    """Return all rounds of all lanes, each consumed by a separate thread; close the engines."""
    taken: list[Any] = [None] * len(engines)

    def take(place: int) -> None:
        engine = engines[place]
        try:
            taken[place] = [seen(done) for done in stream_of(engine, engine.initial_model(0), 0, ROUNDS, **wanted)]
        finally:
            engine.close()

    threads = [threading.Thread(target=take, args=(place,), daemon=True) for place in range(len(engines))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    assert None not in taken
    return taken


def taken_until_error(stream: Iterator[StreamedRound]) -> tuple[int, BaseException | None]:
    """Return the number of rounds before an error, and the error."""
    count = 0
    try:
        for _ in stream:
            count += 1
    except (RoundRejectedError, MemoryError) as error:
        return count, error
    return count, None


def two_lanes(make_federation: Any, **more: Any) -> list[Any]:
    federations = [make_federation(NETWORK, seed=seed, clients=3, samples=4, **more) for seed in (1, 2)]
    return lane_engines([federation for federation, _ in federations], [data for _, data in federations], DEVICE)


def test_running_ahead_changes_no_bit(make_federation: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ahead = everything(two_lanes(make_federation))
    monkeypatch.setattr(lane_group, "AHEAD", 1)
    assert everything(two_lanes(make_federation)) == ahead
    assert all(len(lane) == ROUNDS for lane in ahead)
    # Negative control: different lanes have different bits.
    assert ahead[0] != ahead[1]


def test_a_network_has_the_same_bits_alone_and_in_company(make_federation: Any) -> None:
    federation, data = make_federation(NETWORK, seed=1, clients=3, samples=4)
    (alone,) = everything(lane_engines([federation], [data], DEVICE))
    assert everything(two_lanes(make_federation))[0] == alone


@pytest.mark.parametrize("taken", [1, 2, 3])
def test_a_stream_may_be_left_anywhere_and_gone_on_from(make_federation: Any, taken: int) -> None:
    """A stream may be left in the middle of a chunk or at its end and continued later; rounds computed ahead are
    dropped.
    """
    federation, data = make_federation(NETWORK, clients=3)
    engine, whole = lane_engines([federation], [data], DEVICE)[0], lane_engines([federation], [data], DEVICE)
    (expected,) = everything(whole)
    start = engine.initial_model(0)
    stream = stream_of(engine, start, 0, ROUNDS)
    first = list(islice(stream, taken))
    stream.close()  # type: ignore[attr-defined]
    assert not engine._group._streams
    rest = list(stream_of(engine, first[-1].fetch_model(), taken, ROUNDS))
    assert [seen(done) for done in (*first, *rest)] == expected
    engine.close()


def test_models_of_earlier_chunks_stay_at_hand(make_federation: Any) -> None:
    federation, data = make_federation(NETWORK, clients=3)
    (engine,), (other,) = (lane_engines([federation], [data], DEVICE) for _ in range(2))
    at_once = [done.fetch_model() for done in stream_of(engine, engine.initial_model(0), 0, ROUNDS)]
    late = [done.fetch_model() for done in list(stream_of(other, other.initial_model(0), 0, ROUNDS))]
    assert [model.tobytes() for model in late] == [model.tobytes() for model in at_once]
    assert len({model.tobytes() for model in late}) == ROUNDS
    engine.close()
    other.close()


def test_two_streams_of_one_lane_do_not_disturb_each_other(make_federation: Any) -> None:
    federation, data = make_federation(NETWORK, clients=3)
    (engine,), alone = lane_engines([federation], [data], DEVICE), lane_engines([federation], [data], DEVICE)
    (expected,) = everything(alone)
    start = engine.initial_model(0)
    pairs = list(zip(*(stream_of(engine, start, 0, ROUNDS) for _ in range(2)), strict=True))
    for place in range(2):
        assert [seen(pair[place]) for pair in pairs] == expected
    engine.close()


@pytest.mark.parametrize("ahead", [1, 2])
def test_a_rejected_round_is_named_when_it_is_reached(
    make_federation: Any, monkeypatch: pytest.MonkeyPatch, ahead: int
) -> None:
    """A rejected round is reported when the consumer reaches it; the rounds before it are valid, however far the device
    ran.
    """
    monkeypatch.setattr(lane_group, "AHEAD", ahead)
    training = LocalTraining(1.0, 3, 2, weight_decay=1e6)  # the model grows by a factor of 1e18 per round
    federation, data = make_federation(NETWORK, clients=3, training=training)
    (engine,) = lane_engines([federation], [data], DEVICE)
    count, error = taken_until_error(stream_of(engine, engine.initial_model(0), 0, 50))
    assert isinstance(error, RoundRejectedError)
    assert count == 1
    assert "round 2 made a model with NaN or Inf" in str(error)
    assert not engine._group._streams
    engine.close()


def test_a_draw_that_does_not_fit_stops_its_own_lane_at_its_own_round(
    make_federation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes, "slots_for", lambda *_: 2)
    federations = [make_federation(NETWORK, seed=seed, clients=4, participation="poisson(0.3)") for seed in range(4)]
    engines = lane_engines([federation for federation, _ in federations], [data for _, data in federations], DEVICE)
    drawn = [
        [done.participants.size for done in stream_of(federation, federation.initial_model(0), 0, 12)]
        for federation, _ in federations
    ]
    good = [next((place for place, size in enumerate(sizes) if size > 2), None) for sizes in drawn]
    assert None in good, "the seeds should show both cases"
    assert any(good), "the seeds should show both cases"
    for engine, expected in zip(engines, good, strict=True):
        count, error = taken_until_error(stream_of(engine, engine.initial_model(0), 0, 12))
        assert count == (12 if expected is None else expected)
        assert (error is None) == (expected is None)
        assert error is None or "drawn for a round" in str(error)
    for engine in engines:
        engine.close()


def test_closing_in_the_middle_ends_the_group(make_federation: Any) -> None:
    federation, data = make_federation(NETWORK, clients=3)
    (engine,) = lane_engines([federation], [data], DEVICE)
    stream = stream_of(engine, engine.initial_model(0), 0, 1000)
    first = next(iter(stream))
    engine.close()
    assert not engine._group._worker.is_alive()
    assert np.isfinite(first.fetch_model()).all()
    stream.close()  # type: ignore[attr-defined]


def test_an_error_of_the_device_reaches_whoever_waits(make_federation: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the device reaches the consumer after the rounds before it; the group continues
    with the next stream.
    """
    federation, data = make_federation(NETWORK, clients=3)
    (engine,) = lane_engines([federation], [data], DEVICE)
    group = engine._group
    run: Callable[..., Any] = group._run

    def broken(streams: list[Any]) -> Any:
        if streams[0].position.round >= 2 * CHUNK:
            raise MemoryError("no room")
        return run(streams)

    monkeypatch.setattr(group, "_run", broken)
    count, error = taken_until_error(stream_of(engine, engine.initial_model(0), 0, 50))
    assert (count, str(error)) == (2 * CHUNK, "no room")
    assert len(list(stream_of(engine, engine.initial_model(0), 0, CHUNK))) == CHUNK
    engine.close()
