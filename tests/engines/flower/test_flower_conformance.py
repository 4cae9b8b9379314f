"""The laws of conformance (tests/test_conformance.py) on Flower's messages, with nodes in memory that have keys."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, ClassVar

import pytest
from flower_federation import HASTY
from served_runs import Federation as Served

import sifu
from adapters import COMPANION, KINDS, LAST, METHODS, Federation, Rows
from secret_draws import repeat_draws
from sifu.data import ClientData
from sifu.server.flower_app import serve_on_flower
from test_conformance import EVERYONE, LEVELS, SIGMAS, Laws, Make, distance, released


class OnFlower(Federation):
    """Nodes in memory; they have sifu's own clients."""

    evaluates = True
    settings: ClassVar[dict[str, bool]] = {}

    def __init__(self, folder: Path, method: str, data: dict[str, Rows], noise: Any = None) -> None:
        super().__init__(folder / "run", method, data, noise)
        clients = [ClientData(name, x, y) for name, (x, y) in data.items()]
        self.served = Served(folder, sifu.Spec.from_mapping(self.spec), data=clients, **self.settings)

    def sections(self) -> dict[str, Any]:
        return {"model": {"kind": "softmax", "outputs": 3}}

    def work(self, stop: int = 0) -> bool:
        steps, grid = itertools.count(1), self.served.grid

        def progress(update: Any) -> None:
            if next(steps) == stop:
                raise KeyboardInterrupt

        grid.sent.clear()
        try:
            serve_on_flower(grid, self.served.settings, patience=HASTY, progress=progress)
        except KeyboardInterrupt:
            return False
        finally:
            self.asked.append(self.served.contacted())
        return True


class Masked(OnFlower):
    """Federation on Flower with masked updates: the server learns only the mean of a round."""

    settings: ClassVar[dict[str, bool]] = {"masked_updates": True}


class Plain(OnFlower):
    """Federation on Flower whose server keeps the statistics of every node."""

    settings: ClassVar[dict[str, bool]] = {"masked_statistics": False}


PAIRS = [("Flower", method) for method in METHODS] + [("masked Flower", "scratch"), ("masked Flower", "sifu")]
PAIRS += [("plain Flower", "closed_form")]
"""Small groups cannot mask their updates, and a head in closed form is masked as it is."""


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: " ".join(pair))
class TestOnFlower(Laws):
    """The laws on Flower."""

    kinds: ClassVar[dict[str, type[Federation]]] = {"Flower": OnFlower, "masked Flower": Masked, "plain Flower": Plain}

    @pytest.fixture(autouse=True)
    def same_noise(self, pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
        """Draw the same noise in every run, because a server on Flower takes no source of noise."""
        repeat_draws(monkeypatch)
        monkeypatch.setitem(LEVELS, "Flower", "proven")
        monkeypatch.setitem(LEVELS, "masked Flower", "conditional")  # nodes report their own drifts
        if pair[0] == "masked Flower":  # without a rollback to the beginning of a branch, which is conditional there
            monkeypatch.setitem(SIGMAS, "sifu", SIGMAS["sifu"][:3])

    def test_it_releases_what_the_embedded_engine_releases(self, make: Make, tmp_path: Path) -> None:
        fed = make()
        feds = fed, KINDS["linear"](tmp_path / "linear", fed.method, EVERYONE)
        assert all(each.work() for each in feds)
        done, expected = (each.forget(LAST, COMPANION, sigma=0.004) for each in feds)
        assert (done.rollback_to, done.sigma) == (expected.rollback_to, expected.sigma)
        assert done.psi == pytest.approx(expected.psi, rel=1e-6)
        models = [released(each) for each in feds]
        assert distance(*models) <= (0.0 if fed.method == "closed_form" else 1e-8)
