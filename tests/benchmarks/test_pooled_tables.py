"""User tables: as accurate as scikit-learn on the pooled rows, exact, and with exports that agree."""

from __future__ import annotations

from typing import Any

import numpy as np
import own_tables
import pytest

WITHIN = 0.01


@pytest.fixture(scope="module")
def measured() -> list[dict[str, Any]]:
    pytest.importorskip("sklearn")
    pytest.importorskip("onnx")
    return own_tables.main(["--rows", "8000", "--columns", "100"])


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::sifu.errors.SifuWarning")
def test_tables_are_as_good_as_pooled_ones_and_forget_exactly(measured: list[dict[str, Any]]) -> None:
    assert [row["table"] for row in measured] == [
        "hospitals", "regression", *(["texts"] if own_tables.has_transformers() else []), "wide", "long",
    ]  # fmt: skip
    for row in measured:
        assert row["levels"] == ("exact", "exact"), row
        assert row["ours"] >= row["pooled"] - WITHIN, row
        # Texts are read in single precision, and a batch is summed in another order than a single text.
        assert row["export"] <= (1e-4 if row["table"] == "texts" else 1e-9), row
        assert row["verified"], row


def test_the_pooled_figure_notices_rows_that_say_nothing() -> None:
    """Negative control: with shuffled labels the pooled figure is far lower, so agreement within 0.01 is meaningful."""
    pytest.importorskip("sklearn")
    table = own_tables.hospitals(600)
    halves = np.arange(400), np.arange(400, 600)
    honest = own_tables.pooled_figure(table, *halves)
    table.y = np.random.default_rng(0).permutation(table.y)
    assert honest > 0.85
    assert abs(own_tables.pooled_figure(table, *halves) - 0.5) < 0.15
