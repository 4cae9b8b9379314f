"""Labels of a regression in a table are numbers, whether or not one client's labels make all of them whole."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import sifu

SPEC = {
    "data": {"name": "table", "partition": "given", "label": "y", "client": "site", "id": "id"}
    | {"scale": "a=0.5,0.5; b=0.5,0.5", "preprocessing": "fixed", "file": "table.csv"},
    "model": {"kind": "ridge"},
    "ridge": {"task": "regression"},
}


def rows_of(site: str, part: float) -> list[str]:
    """Return the rows of a site whose labels have this fractional part."""
    draw = np.random.default_rng(ord(site[0]))
    return [f"{site}{row},{site},{draw.random():.3f},{draw.random():.3f},{draw.integers(7) + part}" for row in range(8)]


def write(*rows: str) -> None:
    Path("table.csv").write_text("\n".join(["id,site,a,b,y", *rows, ""]), encoding="utf-8")


OTHERS = [row for site in ("south", "east", "west") for row in rows_of(site, 0)]


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_deleted_rows_of_a_forgotten_client_do_not_change_those_of_others() -> None:
    write(*rows_of("north", 0.5), *OTHERS)
    sifu.train(SPEC, run="run").forget(["north"])
    write(*OTHERS)
    (outcome,) = sifu.open_run("run").forget(["south"], records=["south3"])
    assert outcome.level == "exact"
    assert sifu.open_run("run").verify().problems == []


@pytest.mark.parametrize("label", ["8", "0.5"])
def test_control_other_labels_are_refused(label: str) -> None:
    write(*OTHERS)
    sifu.train(SPEC, run="run")
    changed = OTHERS[-1].rpartition(",")[0] + "," + label
    write(*OTHERS[:-1], changed)
    with pytest.raises(sifu.InputError, match="the data of client 'west' are not those"):
        sifu.open_run("run").forget(["south"], records=["south3"])
