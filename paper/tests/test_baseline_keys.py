"""Spec keys of the baselines: values out of range are refused, and runs record them as before."""

from __future__ import annotations

from typing import Any

import pytest

import sifu
from sifu_paper.baselines import CALIBRATION_STEPS, CLIP, NOISE, UPDATES_EVERY

RIDGE_MODEL = {"kind": "ridge"}


@pytest.mark.parametrize(
    ("mapping", "name"),
    [
        ({"keep": {"updates_every": -1}}, "keep.updates_every"),
        ({"keep": {"updates_every": "often"}}, "keep.updates_every"),
        ({"server": {"clip": 1e10}}, "server.clip"),
        ({"server": {"noise": 1.0}}, "server.noise"),
        ({"local": {"calibration_steps": 10**6}}, "local.calibration_steps"),
        ({"keep": {"updates_every": 2}, "model": RIDGE_MODEL}, "keep.updates_every"),
        ({"server": {"clip": 0.5}, "model": RIDGE_MODEL}, "server.clip"),
        ({"server": {"clip": 1.0, "noise": 1.0}, "groups": {"count": 3, "rounds": 2}}, "server.noise"),
    ],
)
def test_values_out_of_range_are_refused_by_name(mapping: dict[str, Any], name: str) -> None:
    with pytest.raises(sifu.InputError, match=name):
        sifu.Spec.from_mapping(mapping)


def test_keys_are_written_and_read_in_their_sections() -> None:
    mapping = {"server": {"clip": 0.5, "noise": 2.0}, "keep": {"updates_every": 3}, "local": {"calibration_steps": 1}}
    spec = sifu.Spec.from_mapping(mapping)
    assert (spec.extension(CLIP), spec.extension(NOISE)) == (0.5, 2.0)
    assert (spec.extension(UPDATES_EVERY), spec.extension(CALIBRATION_STEPS)) == (3, 1)
    written = spec.to_mapping()
    assert (written["server"]["clip"], written["keep"]["updates_every"]) == (0.5, 3)
    assert sifu.Spec.from_mapping(written) == spec
    off = sifu.Spec.from_mapping({"server": {"clip": 0.0, "noise": 0}})
    assert off == sifu.Spec()
    assert "clip" not in off.to_mapping()["server"]
