"""Cached accuracy of clients at the current model: plans read it, and nothing of the forgotten stays in it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import sifu
from run_tools import copy_run, small_spec
from sifu.core.engine import Evaluation
from sifu.core.request_terms import RequestTerms
from sifu.planning.forecast import Forecast
from sifu.run.run_view import RunView
from sifu.store.client_accuracy import STANDING_FILE, read_standing, remove_standing, write_standing
from sifu.store.writer import RunWriter

SPEC = small_spec(
    data={"clients": 30, "samples_per_client": 10}, local={"steps": 4}, stop={"target": 0.9, "max_rounds": 200}
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("standing") / "run"
    sifu.train(SPEC, run=folder)
    return folder


def forecast_of(folder: Path, *clients: str) -> Forecast:
    terms = RequestTerms(clients, 10.0, 0.01) if clients else None
    return Forecast(RunView(sifu.open_run(folder).reader()), terms)


def test_training_writes_down_how_everyone_stands(trained: Path) -> None:
    run = sifu.open_run(trained)
    reader, standing = run.reader(), read_standing(trained)
    assert standing is not None
    truth = run.engine().evaluate(reader.load_model(reader.tip), np.arange(30))
    assert standing.node == reader.tip
    for counted, right in ((standing.samples, truth.samples), (standing.correct, truth.correct)):
        np.testing.assert_array_equal(counted, right)


def test_the_gain_is_that_of_counting_without_them(trained: Path) -> None:
    standing = read_standing(trained)
    assert standing is not None
    worst = [int(index) for index in np.argsort(standing.correct)[:3]]
    rest = np.delete(np.arange(30), worst)
    gain = standing.correct[rest].sum() / 270 - standing.correct.sum() / 300
    assert standing.gain_without(set(worst)) == pytest.approx(gain)
    assert gain > 0.0
    names = [f"client-{k:03d}" for k in worst]
    assert forecast_of(trained, *names).gain == pytest.approx(gain)
    tip = RunView(sifu.open_run(trained).reader()).path.tip
    # Without the clients of lowest accuracy the target is nearer.
    assert forecast_of(trained, *names).expected(tip, 0.2) < forecast_of(trained).expected(tip, 0.2)
    assert standing.gain_without(set(range(30))) == 0.0


@pytest.mark.parametrize("content", [None, b"", b"[]", b"{}", b'{"node":1,"clients":[0],"samples":[1],"correct":[2]}'])
def test_without_a_standing_plans_are_made_all_the_same(trained: Path, tmp_path: Path, content: bytes | None) -> None:
    folder = copy_run(trained, tmp_path / "run")
    remove_standing(folder)
    remove_standing(folder)
    if content is not None:
        (folder / STANDING_FILE).write_bytes(content)
    assert read_standing(folder) is None
    assert forecast_of(folder, "client-003").gain == 0.0
    assert sifu.open_run(folder).plan(["client-003"]).predicted_rounds is not None
    assert sifu.open_run(folder).verify().holds


def test_a_standing_of_another_model_does_not_count(trained: Path, tmp_path: Path) -> None:
    folder = copy_run(trained, tmp_path / "run")
    standing = read_standing(folder)
    assert standing is not None
    worst = f"client-{int(np.argmin(standing.correct)):03d}"
    assert forecast_of(folder, worst).gain > 0.0
    content = json.loads((folder / STANDING_FILE).read_bytes()) | {"node": standing.node - 1}
    (folder / STANDING_FILE).write_bytes(json.dumps(content).encode())
    assert forecast_of(folder, worst).gain == 0.0


@pytest.mark.parametrize("retention", ["paper", "strict"])
def test_nothing_of_the_forgotten_stays(trained: Path, tmp_path: Path, retention: str) -> None:
    folder = copy_run(trained, tmp_path / "run")
    run = sifu.open_run(folder)
    run.forget(["client-003", "client-007"], sigma=0.3, retention=retention)
    standing = read_standing(folder)
    assert standing is not None
    assert standing.node == run.reader().tip
    assert standing.clients.tolist() == [k for k in range(30) if k not in (3, 7)]


def test_an_erasure_that_was_cut_short_takes_the_standing_along(trained: Path, tmp_path: Path) -> None:
    """After a kill between the event of a strict request and its last steps, the next opening of
    the run finishes them.
    """
    folder = copy_run(trained, tmp_path / "run")
    kept = (folder / STANDING_FILE).read_bytes()
    sifu.open_run(folder).forget(["client-003"], sigma=0.3, retention="strict")
    (folder / STANDING_FILE).write_bytes(kept)
    (folder / "scrub").touch()
    RunWriter.open(folder).close()
    assert not (folder / STANDING_FILE).exists()


def test_a_backup_brings_it_along(trained: Path, tmp_path: Path) -> None:
    from sifu.api.safekeeping import restore

    sifu.open_run(copy_run(trained, tmp_path / "run")).backup(tmp_path / "file.sifu")
    restore(tmp_path / "file.sifu", tmp_path / "again")
    assert (tmp_path / "again" / STANDING_FILE).read_bytes() == (trained / STANDING_FILE).read_bytes()


def test_a_hundred_thousand_clients_are_a_small_file(tmp_path: Path) -> None:
    count = 100_000
    ones = np.ones(count, dtype=np.int64)
    write_standing(tmp_path, 7, Evaluation(np.arange(count), 9 * ones, 8 * ones, np.ones(count)))
    assert (tmp_path / STANDING_FILE).stat().st_size < 2_000_000
    standing = read_standing(tmp_path)
    assert standing is not None
    assert standing.gain_without({5, 6}) == pytest.approx(0.0)
