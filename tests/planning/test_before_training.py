"""`sifu plan SPEC`: the row of the README that applies, and remarks on a table's columns and rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from run_tools import Command, small_spec
from sifu.api.spec_plan import plan_spec
from sifu.core.spec import Spec, commented_toml


@pytest.mark.parametrize(
    ("spec", "row"),
    [
        (small_spec(data={"clients": 160, "samples_per_client": 5}), "method sifu"),
        (small_spec(data={"clients": 8}), "groups"),
        (small_spec(data={"clients": 160, "samples_per_client": 5}, privacy={"epsilon": 0.1}), "groups"),
        (small_spec(data={"clients": 8}, model={"kind": "mlp"}, local={"rate": 0.05}), "groups"),
        (small_spec(model={"kind": "ridge"}), "a head in closed form on other features"),
    ],
)
def test_the_row_that_applies(spec: dict[str, Any], row: str) -> None:
    assert plan_spec(Spec.from_mapping(spec)).row.startswith(row)


def test_unscaled_columns_and_shortened_rows_are_named(tmp_path: Path, cli: Command) -> None:
    lines = ["client,age,pressure,ill", *(f"{'ab'[k % 2]},{k % 7},{2000 + k},{k % 2}" for k in range(20))]
    (tmp_path / "t.csv").write_text("\n".join(lines))
    columns = ("--label", "ill", "--client-column", "client")
    assert cli("init", tmp_path / "t.toml", "--from", tmp_path / "t.csv", *columns).code == 0
    answer = cli("plan", tmp_path / "t.toml")
    words = " ".join(answer.out.split())
    assert answer.code == 0
    assert "a head in closed form on other features" in words
    assert "'pressure' (" in words
    assert "shortens 100.0% of the rows" in words
    for declared, level in (("unknown", "conditional"), ("fixed", "exact")):
        told = cli("plan", tmp_path / "t.toml", "--set", f"data.preprocessing={declared}", "--format", "json").json
        assert f"no round, {level}" in told["reason"]
    assert cli("plan", tmp_path / "t.toml", "--clients", "a").code == 2


def test_a_spec_that_init_wrote_is_planned(tmp_path: Path, cli: Command) -> None:
    (tmp_path / "s.toml").write_text(commented_toml(Spec()))
    assert "times s sqrt(d)" in " ".join(cli("plan", tmp_path / "s.toml", "--set", "data.clients=20").out.split())
