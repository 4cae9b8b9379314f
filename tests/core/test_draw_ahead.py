"""Participants drawn ahead equal those drawn on demand, whichever round comes next."""

from __future__ import annotations

import numpy as np
import pytest

from sifu.core import round_stream
from sifu.core.engine import Position
from sifu.core.round import RoundSetup, draw
from sifu.core.round_stream import DrawsAhead
from sifu.theory.participation import Participation, Places

KEY = 12345
SOME, OTHERS = Places.of(np.arange(300)), Places.of(np.arange(20, 300))


@pytest.fixture(autouse=True)
def _many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(round_stream, "MANY", 100)
    monkeypatch.setattr(round_stream, "_cores", lambda: 2)


@pytest.mark.parametrize("kind", ["fixed(30)", "poisson(0.1)", "all"])
def test_the_same_draws_in_any_order_of_rounds(kind: str) -> None:
    participation = Participation.parse(kind)
    ahead = DrawsAhead(participation, KEY)
    order = [(0, 0), (0, 1), (0, 2), (0, 1), (1, 2), (1, 3), (1, 4)]
    setups = [RoundSetup(np.zeros(1), Position(*place), SOME) for place in order]
    setups += [
        RoundSetup(np.zeros(1), Position(1, 5), OTHERS),
        RoundSetup(np.zeros(1), Position(1, 6), OTHERS),
        RoundSetup(np.zeros(1), Position(1, 7), OTHERS),
        RoundSetup(np.zeros(1), Position(1, 8), np.arange(300)),
    ]
    drawn = [ahead.draw(setup) for setup in setups]
    for setup, participants in zip(setups, drawn, strict=True):
        assert np.array_equal(participants, draw(participation, KEY, setup))
    assert not np.array_equal(drawn[0], drawn[1]) or kind == "all"


def test_a_round_that_follows_is_drawn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Position] = []
    plain = DrawsAhead._draw

    def counted(self: DrawsAhead, places: Places, position: Position) -> np.ndarray:
        drawn.append(position)
        return plain(self, places, position)

    monkeypatch.setattr(DrawsAhead, "_draw", counted)
    ahead = DrawsAhead(Participation.parse("fixed(30)"), KEY)
    for number in range(4):
        ahead.draw(RoundSetup(np.zeros(1), Position(0, number), SOME))
    # wait until the draw in the background has ended
    round_stream._helper(round_stream.os.getpid()).submit(int).result()
    assert drawn == [Position(0, number) for number in range(5)]
    monkeypatch.setattr(round_stream, "MANY", 301)
    ahead.draw(RoundSetup(np.zeros(1), Position(0, 7), SOME))
    assert len(drawn) == 5
