"""The findings of the page follow from the results files, and the counts behind the roofline are right."""

from __future__ import annotations

import torch
from peers.roofline import ACTIVATIONS, WORK
from peers.speed_tables import PAGE, Measured, Results, headline_rows, read_results, results_of
from peers.workloads import B, ConvNet
from torch.utils.flop_counter import FlopCounterMode


def medians(machine: str, workload: str) -> dict[str, float]:
    rows = read_results(results_of(machine)).of(workload)
    return {row.key: row.median for row in rows} | {"peer": max(row.median for row in rows if row.peer)}


def test_the_findings_of_the_page_follow_from_the_results() -> None:
    page = " ".join(PAGE.read_text(encoding="utf-8").split())
    a, b = medians("aarch64", "A"), medians("aarch64", "B")
    other_a, other_b = medians("x86_64", "A"), medians("x86_64", "B")
    assert f"with tracking {a['ours-tracking'] / a['peer']:.1f} times as fast as the fastest peer on two ARM" in page
    assert f"{other_a['ours-tracking'] / other_a['peer']:.0f} times on x86" in page
    ours = {f"{b[key] / b['peer']:.1f}" for key in ("ours", "ours-tracking")}
    assert len(ours) == 1
    assert f"{ours.pop()} times as fast as the fastest peer on two ARM cores with and without tracking" in page
    assert f"{other_b['ours-tracking'] / other_b['peer']:.1f} and {other_b['ours'] / other_b['peer']:.1f} times" in page
    costs = [f"{100 * (part['ours'] / part['ours-tracking'] - 1):.0f} %" for part in (a, b, other_b)]
    assert f"costs {costs[0]} on A and {costs[1]} on B on ARM; on x86 {costs[2]} on B" in page


def test_operations_of_b_are_those_torch_counts() -> None:
    module, images = ConvNet(), torch.ones(2, *B.shape)
    with FlopCounterMode(display=False) as counter:
        module(images).sum().backward()
    (work,) = [row for row in WORK if row.setting == "B"]
    assert work.operations == counter.get_total_flops() / len(images) * B.samples_a_round


def test_activations_of_b_are_those_of_the_network() -> None:
    module, count = ConvNet(), 0
    x = torch.ones(1, *B.shape)
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
