"""The example for NVIDIA FLARE trains, forgets and verifies in FLARE's simulator."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import sifu

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "nvflare"


def test_the_controller_is_short() -> None:
    assert len((EXAMPLE / "controller.py").read_text(encoding="utf-8").splitlines()) <= 60


@pytest.mark.long
@pytest.mark.parametrize(("variant", "method"), [((), "scratch"), (("head",), "closed_form")])
def test_the_example_trains_forgets_and_verifies_in_the_simulator(
    tmp_path: Path, variant: tuple[str, ...], method: str
) -> None:
    pytest.importorskip("nvflare")
    ran = subprocess.run(
        [sys.executable, str(EXAMPLE / "job.py"), str(tmp_path), *variant],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=540,
    )
    assert "verified: True" in ran.stdout, ran.stdout[-2000:] + ran.stderr[-2000:]
    run = sifu.open_run(tmp_path / "run")
    (outcome,) = run.outcomes()
    assert (outcome.method, outcome.clients) == (method, ("site-2",))
    assert run.verify().holds
