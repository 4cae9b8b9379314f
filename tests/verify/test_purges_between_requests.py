"""Random requests for Scratch at an automatic rate, with purges between them; both verifiers check every step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import sifu
import sifu_verifier
from sifu.data import ClientData
from sifu.errors import SifuError

SPEC = {
    "data": {"preprocessing": "fixed"},
    "model": {"kind": "softmax", "outputs": 3},
    "features": {"kind": "random_fourier", "count": 6},
    "local": {"rate": "auto", "steps": 2},
    "stop": {"max_rounds": 2, "target": 0.0},
}


def clients_of(count: int, seed: int) -> list[ClientData]:
    draw = np.random.default_rng(seed)
    sizes = draw.integers(3, 8, count)
    return [
        ClientData(f"c{number}", draw.normal(size=(size, 4)) * draw.uniform(0.5, 2.0), draw.integers(0, 3, size))
        for number, size in enumerate(sizes.tolist())
    ]


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(4, 40))])
def test_no_purge_contradicts_an_earlier_certificate(seed: int, tmp_path: Path) -> None:
    dice = np.random.default_rng(seed)
    count = int(dice.integers(4, 7))
    run = sifu.train(SPEC | {"seed": seed}, run=tmp_path / "run", clients=clients_of(count, seed))
    there = list(range(count))
    for step in range(5):
        what = dice.choice(["records", "client", "purge"], p=[0.4, 0.25, 0.35])
        client = int(dice.choice(there))
        try:
            if what == "purge":
                run.purge()
            elif what == "records":
                run.forget([f"c{client}"], f"step-{step}", method="scratch", records=[int(dice.integers(3))])
            elif len(there) > 2:
                run.forget([f"c{client}"], f"step-{step}", method="scratch")
                there.remove(client)
        except SifuError:  # for example, the records were forgotten before
            pass
        assert (run.verify().problems, sifu_verifier.verify(run.folder)) == ([], []), f"{what} at step {step}"
