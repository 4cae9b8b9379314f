"""Held-out accuracy: measured on rows of remaining clients, shown with their number, erased by a forget."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import f1_score, roc_auc_score

from sifu.api import Run, open_run, train
from sifu.core.held_out_figures import HeldOutFigures
from sifu.errors import SifuWarning
from sifu.run.clients_and_engine import held_out_rows_from_spec
from sifu.run.held_out import area_under_curve, calibration_error
from sifu.store.client_accuracy import STANDING_FILE, read_held_out

HOSPITALS = ("north", "south", "east", "west")


def write_table(path: Path, *, regression: bool = False, without: str = "") -> Path:
    generator = np.random.default_rng(5)
    lines = ["hospital,patient,age,pressure,disease"]
    for hospital in HOSPITALS:
        for patient in range(60):
            age, pressure = generator.normal(), generator.normal()
            value = age + 0.5 * pressure + 0.4 * generator.normal()
            label = f"{value:.4f}" if regression else int(value > 0)
            if hospital != without:
                lines.append(f"{hospital},P{patient:03d},{age:.4f},{pressure:.4f},{label}")
    path.write_text("\n".join(lines) + "\n")
    return path


def spec_of(file: Path, kind: str = "softmax", **data: Any) -> dict[str, Any]:
    table = {"name": "table", "file": str(file), "client": "hospital", "id": "patient", "label": "disease"}
    task = {"ridge": {"task": "regression"}} if kind == "ridge" and "classes" not in data else {}
    return {
        "data": table | {"partition": "given", "preprocessing": "fixed", "held_out": 0.3} | data,
        "model": {"kind": kind},
        "local": {} if kind == "ridge" else {"rate": 0.5, "steps": 2},
        "stop": {"target": 0.0, "max_rounds": 8} if kind != "ridge" else {},
    } | task


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("held-out")
    train(spec_of(write_table(folder / "heart.csv"), classes="0,1"), run=folder / "run")
    return folder / "run"


def test_the_figures_are_those_of_the_current_model_on_the_held_out_rows(trained: Path) -> None:
    run = Run(trained)
    held = run.status().held_out
    rows = held_out_rows_from_spec(run.spec)
    assert held is not None
    assert rows is not None
    with run.reader() as reader:
        weight, bias = np.split(reader.load_model(reader.tip), [4])
    scores = rows.x @ weight.reshape(2, 2) + bias
    predicted = scores.argmax(axis=1)
    margin = 1 / (1 + np.exp(scores[:, 0] - scores[:, 1]))
    assert held.rows == len(rows.y) > 40
    assert held.accuracy == pytest.approx(np.mean(predicted == rows.y))
    assert held.auc == pytest.approx(roc_auc_score(rows.y, margin))
    assert held.f1 == pytest.approx(f1_score(rows.y, predicted))
    both = np.stack([1 - margin, margin], axis=1)
    assert held.calibration_error == pytest.approx(calibration_error(rows.y, both))
    assert held.accuracy != pytest.approx(run.status().accuracy)


def test_rows_of_a_forgotten_client_are_in_no_figure_after_it(trained: Path, tmp_path: Path) -> None:
    table = write_table(tmp_path / "heart.csv")
    run = train(spec_of(table, classes="0,1"), run=tmp_path / "run")
    everyone = run.status().held_out
    (outcome,) = run.forget(["south"], method="scratch")
    after = run.status().held_out
    assert everyone is not None
    assert after is not None
    assert outcome.held_out == after
    rows = held_out_rows_from_spec(run.spec)
    assert rows is not None
    assert rows.clients is not None
    assert after.rows == int(np.sum(rows.clients != "south")) < everyone.rows
    # The counterfactual without the client has the same number of held-out rows.
    never = train(spec_of(write_table(tmp_path / "never.csv", without="south"), classes="0,1"), run=tmp_path / "never")
    assert never.status().held_out is not None
    assert never.status().held_out.rows == after.rows  # type: ignore[union-attr]
    assert "south" not in (tmp_path / "run" / STANDING_FILE).read_text()


def test_figures_measured_with_the_client_are_gone_once_it_is_rolled_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = train(spec_of(write_table(tmp_path / "heart.csv"), classes="0,1"), run=tmp_path / "run")
    assert (tmp_path / "run" / STANDING_FILE).exists()
    monkeypatch.setattr("sifu.requests.worker.Worker._retrain", lambda self, *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run.forget(["south"])
    assert not (tmp_path / "run" / STANDING_FILE).exists()
    assert Run(tmp_path / "run").status().held_out is None


@pytest.mark.parametrize("kind", ["least_squares", "ridge"])
def test_regression_has_a_mean_squared_error_in_the_unit_of_the_target(tmp_path: Path, kind: str) -> None:
    run = train(spec_of(write_table(tmp_path / "heart.csv", regression=True), kind), run=tmp_path / "run")
    held = run.status().held_out
    assert held is not None
    assert held.accuracy is None
    assert held.mean_squared_error is not None
    assert 0.05 < held.mean_squared_error < 0.6
    assert held.words.startswith("R2 ")
    assert "mean squared error " in held.words


def test_rows_of_a_test_file_belong_to_its_clients_and_the_file_is_found_from_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_table(Path("heart.csv"))
    write_table(Path("test.csv"))
    spec = spec_of(Path("heart.csv"), "ridge", classes="0,1", held_out=0.0, test_file="test.csv")
    train(spec, run=tmp_path / "run")
    monkeypatch.chdir("/")
    run = open_run(tmp_path / "run")
    run.forget(["west"])
    held = run.status().held_out
    assert held is not None
    assert held.rows == 180
    assert held.calibration_error is None
    assert held.auc is not None


def test_without_held_out_rows_only_the_training_accuracy_is_shown(tmp_path: Path) -> None:
    run = train(spec_of(write_table(tmp_path / "heart.csv"), classes="0,1", held_out=0.0), run=tmp_path / "run")
    assert run.status().held_out is None
    assert run.status().accuracy is not None
    assert not (tmp_path / "run" / STANDING_FILE).exists()


def test_a_run_whose_data_are_gone_shows_no_held_out_figures(tmp_path: Path) -> None:
    table = write_table(tmp_path / "heart.csv")
    run = train(spec_of(table, classes="0,1"), run=tmp_path / "run")
    (tmp_path / "run" / STANDING_FILE).unlink()
    table.unlink()
    with run.writer() as writer, pytest.warns(SifuWarning, match="no accuracy is measured on held-out rows"):
        run.measure_held_out(writer)
    assert run.status().held_out is None


def test_images_of_a_named_data_set_are_held_out_too(tmp_path: Path) -> None:
    spec = {"data": {"name": "digits", "clients": 6, "samples_per_client": 20}, "stop": {"max_rounds": 3}}
    held = train(spec, run=tmp_path / "run").status().held_out
    assert held is not None
    assert held.accuracy is not None
    assert held.auc is None
    assert held.rows > 100


@pytest.mark.parametrize(
    "content", ['{"rows": 3}', '{"rows": "x", "accuracy": 1}', '{"rows": 3, "accuracy": 1, "odd": 2}', "[]", "3"]
)
def test_a_damaged_standing_counts_as_none(trained: Path, tmp_path: Path, content: str) -> None:
    standing = json.loads((trained / STANDING_FILE).read_bytes()) | {"held_out": json.loads(content)}
    (tmp_path / STANDING_FILE).write_text(json.dumps(standing))
    assert read_held_out(tmp_path, standing["node"]) is None


def test_figures_read_back_are_those_written(trained: Path) -> None:
    with Run(trained).reader() as reader:
        assert isinstance(read_held_out(trained, reader.tip), HeldOutFigures)
        assert read_held_out(trained, reader.tip + 1) is None


def test_a_class_without_rows_has_no_area_under_the_curve() -> None:
    assert area_under_curve(np.zeros(4, dtype=np.int64), np.zeros((4, 2))) is None
    assert area_under_curve(np.array([0, 1, 2, 2]), np.eye(3)[[0, 1, 2, 2]]) == 1.0


def test_a_confident_model_that_is_wrong_is_badly_calibrated() -> None:
    sure = np.array([[0.0, 1.0]] * 8)
    assert calibration_error(np.zeros(8, dtype=np.int64), sure) == 1.0
    assert calibration_error(np.ones(8, dtype=np.int64), sure) == 0.0
