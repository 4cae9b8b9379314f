"""The page's tables are those of the results file, and the counts behind the roofline are right."""

from __future__ import annotations

import pytest
import torch
from contest import ConvNet
from roofline import ACTIVATIONS, WORK
from summary import PAGE, Measured, Results, blocks, filled, headline_rows, machines
from torch.utils.flop_counter import FlopCounterMode
from workloads import B


@pytest.mark.parametrize("machine", machines())
def test_the_tables_of_the_page_come_from_the_results(machine: str) -> None:
    page = PAGE.read_text(encoding="utf-8")
    parts = blocks(machine)
    assert filled(page, parts) == page, "run python benchmarks/summary.py"
    for name in parts:  # a changed result changes the page
        assert filled(page, {**parts, name: "something else"}) != page


def test_operations_of_b_are_those_torch_counts() -> None:
    module, images = ConvNet(), torch.rand(2, *B.shape)
    with FlopCounterMode(display=False) as counter:
        module(images).sum().backward()
    (work,) = [row for row in WORK if row.setting == "B"]
    assert work.operations == counter.get_total_flops() / len(images) * B.samples_a_round


def test_activations_of_b_are_those_of_the_network() -> None:
    module, count = ConvNet(), 0
    x = torch.rand(1, *B.shape)
    for convolution, pooled in ((module.conv1, True), (module.conv2, True), (module.conv3, False)):
        x = convolution(x)
        count += x.numel()
        if pooled:
            x = torch.nn.functional.max_pool2d(x, 2)
            count += x.numel()
    assert count + 64 + 10 == ACTIVATIONS


def test_gram_matrices_save_most_of_the_operations_of_a() -> None:
    direct, gram = (row.operations for row in WORK if row.setting == "A")
    assert direct == 10 * 10 * 2 * 2 * 100 * 784 * 10
    assert 6 < direct / gram < 6.2


def test_a_contestant_that_failed_is_in_the_table_with_its_reason() -> None:
    rows = (
        Measured("plain", "plain PyTorch loop", "A", False, 1, {"torch": "2"}, {}, (2.0, 1.0, 3.0)),
        Measured("pfl", "pfl-research", "A", True, problem="not installed: no wheel"),
    )
    results = Results("2024-01-01", "abc", {}, 3, 1.0, {"A": "synthetic"}, {}, rows)
    _, table = headline_rows(results)
    assert table[0][4:7] == ["2", "1..3", "1.00"]
    assert "not installed: no wheel" in table[1]
