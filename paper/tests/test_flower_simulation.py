"""Every method on Flower's simulation: the same rows as on the embedded engine, through the same code."""

from __future__ import annotations

import importlib.util
import math
import threading
from pathlib import Path

import pytest
from memory_grid import MemoryGrid

from sifu.engines.flower.exchange import Exchange
from sifu.engines.flower.wire import profile_message, read_profile
from sifu.errors import InputError
from sifu_paper.engines import ClientCache, engine_source
from sifu_paper.flower_simulation import _InterruptibleGrid
from sifu_paper.options import Options
from sifu_paper.runner import Bench
from sifu_paper.settings import shared_settings

WITH_RAY = importlib.util.find_spec("ray") is not None


def rows_of(folder: Path, engine: str) -> dict[tuple, dict]:
    """Return the rows of a small `sequential` on one engine, by the columns that identify them."""
    options = Options(
        "sequential", folder, (1,), scale="smoke", datasets=("digits",), max_rounds=2, device="cpu", engine=engine
    )
    result = Bench(options).run()
    assert result.failures == []
    return {tuple(row[key] for key in ("preset", "method", "variant", "request")): row for row in result.table.rows}


@pytest.mark.flower
@pytest.mark.skipif(not WITH_RAY, reason="Flower's simulation is not installed")
def test_all_methods_on_the_simulation_give_the_rows_of_the_embedded_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(shared_settings().smoke["spec"]["data"], "clients", 8)  # every message is a task for ray
    embedded, flower = (rows_of(tmp_path / engine, engine) for engine in ("embedded", "flower"))
    assert set(embedded) == set(flower)
    methods = {place[1] for place in flower}
    assert methods >= {"sifu", "scratch", "fine_tuning", "last", "dp", "fed_eraser", "fed_accum"}
    compared = 0
    # Certified noise comes from the system, so the runs differ from the first noised request on.
    noised = [place for rows in (embedded, flower) for place, row in rows.items() if (row["sigma"] or 0.0) > 0.0]
    for place, row in flower.items():
        parted = [other[3] for other in noised if place[0] == "ours" and other[:3] == place[:3]]
        if parted and place[3] >= min(parted):
            assert place[3] > min(parted) or row["sigma"] == embedded[place]["sigma"], place
            continue
        for column, value in row.items():
            expected = embedded[place][column]
            if column == "seconds":
                continue
            if isinstance(value, float) and isinstance(expected, float):
                same = math.isclose(value, expected, rel_tol=1e-6, abs_tol=1e-9)
                assert same or (math.isnan(value) and math.isnan(expected)), (place, column, value, expected)
            else:
                assert value == expected, (place, column)
        compared += 1
    assert compared >= 28


def test_ctrl_c_reaches_the_thread_that_waits_for_answers() -> None:
    interrupted = threading.Event()
    grid = MemoryGrid()
    grid.add(1, object())
    grid.trouble[1] = lambda message: interrupted.set()  # pressed while nothing answers
    exchange = Exchange(_InterruptibleGrid(grid, interrupted), poll=0.01)  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        exchange.ask({0: profile_message(1, "", 600.0)}, 600.0, read_profile)


def test_an_engine_that_is_not_there_is_refused_with_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = ClientCache(None)
    with pytest.raises(InputError, match="embedded or flower"):
        engine_source("cpu", None, cache, engine="other")
    with pytest.raises(InputError, match="leave out --device"):
        engine_source("cuda", None, cache, engine="flower")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"paper\[simulation\]"):
        engine_source("cpu", None, cache, engine="flower")
