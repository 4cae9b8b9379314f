"""Charts of a running job: axes, the target, the value of every point, and progress against the prediction."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

import sifu
from sifu.errors import SifuWarning
from sifu_console.rendering import charts


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter() if element.tag == "text"]


def test_accuracy_and_loss_have_axes_values_and_a_target(service: Any) -> None:
    live = sifu.open_run(service.folder / "north").progress()
    drawings = re.findall(r"<svg.*?</svg>", charts(live))
    assert [texts(drawing)[0] for drawing in drawings] == ["Training accuracy", "Training loss"]
    for drawing, column in zip(drawings, (1, 2), strict=True):
        words = texts(drawing)
        assert "round" in words  # the label of the horizontal axis
        figures = [word for word in words if re.fullmatch(r"-?[\d.e-]+(\u00a0%)?", word)]
        assert len(figures) >= 4  # ticks on both axes
        titles = re.findall(r"<title>round (\d+): ([^<]+)</title>", drawing)
        points = [(point[0], point[column]) for point in live.curve if point[column] is not None]
        assert [int(at) for at, _ in titles] == [at for at, _ in points]
        scale = 100 if column == 1 else 1
        shown = [float(value.split("\u00a0")[0]) / scale for _, value in titles]
        for value, (_, recorded) in zip(shown, points, strict=True):
            assert abs(value - recorded) <= 5e-3 * abs(recorded)
    assert ('class="goal"' in drawings[0]) == (live.target > 0)
    assert 'class="goal"' not in drawings[1]


def test_the_points_are_what_was_recorded(service: Any) -> None:
    run = sifu.open_run(service.folder / "north")
    live = run.progress()
    assert live.accuracy == live.curve[-1][1] == run.status().accuracy
    assert live.curve[-1][2] == run.status().loss


def test_an_accuracy_of_an_earlier_round_names_the_round(service: Any) -> None:
    from dataclasses import replace

    live = replace(sifu.open_run(service.folder / "north").progress(), target=0.9)
    last = live.curve[-1][0]
    assert "target 90.0\u00a0%</small>" in render_panel(replace(live, rounds=last))
    assert "after round" not in render_panel(replace(live, rounds=last))
    assert f"after round {last}; target 90.0\u00a0%</small>" in render_panel(replace(live, rounds=last + 3))
    assert "after round" not in render_panel(replace(live, rounds=last + 3, accuracy=None))


def test_a_head_that_was_not_measured_shows_no_earlier_figures(tmp_path: Path) -> None:
    """A release from kept statistics is not evaluated, so the previous accuracy must not be shown for it."""
    generator = np.random.default_rng(6)
    data = {"client": np.repeat([f"site-{n}" for n in range(5)], 9)}
    np.savez(tmp_path / "rows.npz", x=generator.normal(size=(45, 4)), y=generator.integers(0, 2, 45), **data)
    spec = {"name": "npz", "file": str(tmp_path / "rows.npz"), "partition": "given", "preprocessing": "fixed"}
    run = sifu.train({"data": spec, "model": {"kind": "ridge", "outputs": 2}}, run=tmp_path / "run")
    assert run.progress().accuracy == run.status().accuracy
    assert run.progress().accuracy is not None
    (tmp_path / "rows.npz").unlink()
    again = sifu.open_run(tmp_path / "run")
    again.request(["site-1"], "gone")
    with pytest.warns(SifuWarning, match="no accuracy is measured"):
        again.update()
    live, status = again.progress(), again.status()
    assert status.accuracy is status.held_out is None
    assert (live.accuracy, live.mean_squared_error) == (None, None)


def test_a_limit_is_no_share_of_the_work_where_a_target_ends_it(service: Any) -> None:
    from dataclasses import replace

    live = replace(sifu.open_run(service.folder / "north").progress(), at_work=True, rounds=30, limit=2000, target=0.95)
    panel = render_panel(live)
    assert "of at most 2,000" in panel
    assert "<progress aria-label" in panel  # an indeterminate bar, without a share
    assert '<progress max="2000" value="30"' in render_panel(replace(live, target=0.0))


def render_panel(live: Any) -> str:
    from sifu_console.rendering import _environment

    template = _environment().from_string('{% import "macros.html" as macros %}{{ macros.live_panel(live) }}')
    return template.render(live=live)
