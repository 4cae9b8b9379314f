"""Names of clients and identities of records that look the same but differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sifu
from run_tools import Command
from sifu.core.client_names import Admitted, as_seen, check_lookalikes, plain
from sifu.errors import InputError
from sifu.requests.client_list import _changed

TWINS = [("M\u00fcller", "Mu\u0308ller"), ("north", "nor\u034fth"), ("A B", "A  B"), ("ward 1", "ward \uff11")]
SPEC: dict[str, Any] = {"model": {"kind": "ridge", "outputs": 2}, "data": {"name": "python", "preprocessing": "fixed"}}


def data(*names: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    dice = np.random.default_rng(0)
    return {name: (dice.random((6, 3)), dice.integers(0, 2, 6)) for name in names}


@pytest.mark.parametrize(("name", "twin"), TWINS)
def test_clients_that_look_the_same_are_refused(tmp_path: Path, name: str, twin: str) -> None:
    """Two spellings of one hospital would be two clients, of which a request forgets only one."""
    with pytest.raises(InputError, match="look the same"):
        sifu.train(SPEC, run=tmp_path / "run", clients=data(name, twin, "east"))
    run = sifu.train(SPEC, run=tmp_path / "run", clients=data(name, name.swapcase(), "east"))
    with pytest.raises(InputError, match="look the same"):
        sifu.open_run(run.folder, clients=data(name, name.swapcase(), "east", twin)).join()
    assert sifu.open_run(run.folder, clients=data(name, name.swapcase(), "east", "west")).join() == ["west"]


@pytest.mark.parametrize(("name", "twin"), TWINS)
def test_nodes_that_look_the_same_are_refused(name: str, twin: str) -> None:
    entries = (Admitted(name, "1" * 64),)
    with pytest.raises(InputError, match="look the same"):
        _changed(entries, {"do": "add", "name": twin, "key": "2" * 64})
    assert len(plain(_changed(entries, {"do": "add", "name": name.swapcase(), "key": "2" * 64}))) == 2


def test_names_in_other_scripts_are_kept() -> None:
    check_lookalikes(
        ["Stra\u00dfe", "strasse", "\u6771\u4eac", "\u4eac\u90fd", "\u0628\u064a\u062a", "a", "A", "-x", "..", "a/b"]
    )
    assert as_seen("\u6771\u4eac") == "\u6771\u4eac"


def table_run(folder: Path, *identities: str) -> sifu.Run:
    """Train a head on a table; these identities and a few others belong to `south`."""
    south = [*identities, *(f"s{number}" for number in range(9))]
    names = [(name, "south") for name in south] + [(f"n{number}", "north") for number in range(9)]
    rows = [f"{name},{client},{number / 7:.3f},{number % 3 % 2}" for number, (name, client) in enumerate(names)]
    (folder / "heart.csv").write_text("\n".join(["patient,hospital,marker,ill", *rows]) + "\n", encoding="utf-8")
    table = {
        "name": "table", "partition": "given", "file": str(folder / "heart.csv"), "label": "ill", "classes": "0,1",
        "client": "hospital", "id": "patient", "preprocessing": "fixed",
    }  # fmt: skip
    return sifu.train({"data": table, "model": {"kind": "ridge"}}, run=folder / "run")


@pytest.mark.parametrize(("name", "twin"), TWINS)
def test_records_that_look_the_same_are_named_together(tmp_path: Path, name: str, twin: str) -> None:
    run = table_run(tmp_path, name, twin)
    with pytest.raises(InputError, match="which look the same: name both"):
        run.request(["south"], "r1", records=[name])
    run.request(["south"], "r1", records=[name, twin])
    assert len(run.request_record("r1").terms.records) == 2


def test_a_number_sign_within_an_identity_is_no_comment(tmp_path: Path, cli: Command) -> None:
    """The line `P1#2` named the record P1, which belongs to somebody else."""
    run, names = table_run(tmp_path, "P1", "P1#2"), tmp_path / "names.txt"
    names.write_text("# asked on Monday\nP1#2  # by telephone\n", encoding="utf-8-sig")
    assert cli("request", run.folder, "--client", "south", "--records", names, "--id", "r1").code == 0
    assert run.record_identities("r1") == ("P1#2",)
