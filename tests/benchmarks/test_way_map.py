"""Map of methods: drawn from committed tables alone, and every mark follows from the rows."""

from __future__ import annotations

from choices.way_map import MARKS, Measured, draw, measured_points, places_of


def test_every_way_is_on_the_map_and_no_two_marks_share_a_place() -> None:
    places = places_of(measured_points())
    assert {place.way for place in places} == set(MARKS)
    assert len({(place.clients, place.parameters) for place in places}) == len(places)
    assert draw(places).axes[0].get_xlabel() == "clients"


def test_the_fewest_rounds_win_and_scratch_where_nothing_saves_a_tenth() -> None:
    measured = [
        Measured(100, 1000, "noise", 0.5, "a"),
        Measured(100, 1000, "groups", 0.2, "a"),
        Measured(100, 1000, "groups", 0.3, "b"),
        Measured(50, 1000, "noise", 0.95, "a"),
    ]
    few, many = places_of(measured)
    assert (few.way, many.way, many.label) == ("scratch", "groups", "20-30 %")
