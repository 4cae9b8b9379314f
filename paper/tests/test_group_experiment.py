"""The experiment `groups`: its measurements on digits, and statements about invented tables with known answers."""

from __future__ import annotations

import math
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from sifu.core.spec.run_spec import COSTS, REACHED, TRIED, USUAL_COST
from sifu.engines.sim import ConvNet, Convolution, ModuleModel, make_model
from sifu.errors import InputError
from sifu.theory.participation import Participation
from sifu_paper.aligned_models import align
from sifu_paper.group_measurements import TREE_ROUNDS, Training, Yardstick, _between
from sifu_paper.group_trials import TEST_CLIENT, TrialClients, trials_of
from sifu_paper.options import Options, narrowed
from sifu_paper.plots.group_cases import USUAL_STRETCH, Task, cases_of, first_trainings_of, sequences_of
from sifu_paper.reading import title_of
from sifu_paper.runner import Bench
from sifu_paper.settings import load_experiment
from sifu_paper.table import read_table


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("groups") / "finished"
    result = Bench(Options("groups", out, (1,), "smoke", device="cpu")).run()
    assert not result.failures
    return out


def test_a_trial_measures_scratch_plain_groups_and_sequences(finished: Path) -> None:
    rows = read_table(finished / "results.csv")
    methods = [row["method"] for row in rows]
    assert (methods.count("plain"), methods.count("scratch")) == (1, 2)
    cases = cases_of(rows)
    assert {(case.groups, case.separate, case.leavers, case.stretch) for case in cases} == {
        (4, 2, 1, 1.25), (4, 2, 2, 1.25), (4, 4, 1, 1.0), (4, 4, 2, 1.0), (4, 4, 1, 1.25), (4, 4, 2, 1.25),
    }  # fmt: skip
    firsts = [(first.groups, first.separate, first.stretch) for first in first_trainings_of(rows)]
    assert firsts == [(4, 4, 1.25), (4, 4, 1.0), (4, 2, 1.25)]
    assert {sequence.rebuild for sequence in sequences_of(rows)} == {"now", "never"}
    for row in rows:
        if row["method"] == "scratch":
            assert row["target"] == pytest.approx(row["accuracy"] - 0.01)
            assert row["client_rounds"] == row["rounds"] * (20 - row["leavers"])


def test_a_tree_of_merges_counts_its_own_rounds(finished: Path) -> None:
    rows = read_table(finished / "results.csv")
    trees = cases_of(rows, merges=("tree",))
    assert {(case.groups, case.separate, case.leavers) for case in trees} == {(4, 4, 1), (4, 4, 2)}
    for row in rows:
        if "merge=tree" in row["variant"]:
            levels = math.ceil(math.log2(row["groups_left"]))
            assert row["rounds"] >= TREE_ROUNDS * (levels - 1)
            assert (row["client_rounds"] > 0) == (row["rounds"] > 0)


def test_units_are_put_back_in_order() -> None:
    """A network with shuffled hidden units computes the same, and alignment restores its bits."""
    network = ConvNet((2, 6, 6), (Convolution(5, 1), Convolution(4, 1)), (7,), 3)
    model = ModuleModel(network)
    layout, reference = model.layout("float32"), model.initial(1, 0, "float32")
    arrays = {name: values.copy() for name, values in layout.unflatten(reference).items()}
    generator, before = np.random.default_rng(2), 2
    order = np.arange(before)
    for name in ("conv1", "conv2", "fc1", "fc2"):
        weight = arrays[f"{name}.weight"]
        weight = weight.reshape(weight.shape[0], order.size, -1)[:, order].reshape(weight.shape)
        order = generator.permutation(weight.shape[0]) if name != "fc2" else np.arange(3)
        arrays[f"{name}.weight"], arrays[f"{name}.bias"] = weight[order], arrays[f"{name}.bias"][order]
    shuffled = layout.flatten(arrays)
    assert np.abs(shuffled - reference).max() > 0.1
    scores = []
    for vector in (reference, shuffled):
        module = model.build("float32")
        torch.nn.utils.vector_to_parameters(torch.from_numpy(vector), module.parameters())
        scores.append(module(torch.ones(2, 2, 6, 6)).detach().numpy())
    assert scores[0] == pytest.approx(scores[1], abs=1e-6)
    assert align(shuffled, reference, layout).tobytes() == reference.tobytes()
    residual = make_model("resnet_small", (2, 6, 6), 3).layout("float32")
    with pytest.raises(InputError, match="only in a chain of layers with weight and bias"):
        align(np.zeros(residual.size), np.zeros(residual.size), residual)


def test_what_is_done_is_not_done_again(finished: Path) -> None:
    before = (finished / "results.csv").read_bytes()
    started: list[Any] = []
    bench = Bench(Options("groups", finished, (1,), "smoke", device="cpu"), started.append)
    assert not bench.run().failures
    assert (finished / "results.csv").read_bytes() == before
    assert not started


def test_trials_are_chosen_by_what_they_are() -> None:
    experiment = load_experiment("groups")
    chosen = narrowed(experiment, ["model=resnet_small", "partition=iid"])
    ((trial,),) = trials_of(chosen, ["cifar10"], [3], "paper")
    assert (trial.spec.model.kind, trial.partition) == ("resnet_small", "iid")
    assert trial.task == "partition=iid participation=all clients=100 model=resnet_small"
    own = narrowed(experiment, ["model=own"])
    assert len(own.trials) == len(experiment.trials) - 2
    with pytest.raises(InputError, match=r"model=vgg is not part of groups: known are own, resnet_small"):
        narrowed(experiment, ["model=vgg"])
    with pytest.raises(InputError, match=r"KEY one of partition, participation, clients, model"):
        narrowed(experiment, ["sigma=1"])


def test_test_images_are_held_by_clients_that_never_train() -> None:
    ((trial,),) = trials_of(load_experiment("groups", "smoke"), ["digits"], [3], "smoke")
    clients = TrialClients(None).clients(trial.spec)
    held_out = [client.name.startswith(TEST_CLIENT) for client in clients]
    assert held_out[:20] == [False] * 20
    assert all(held_out[20:])
    assert len(held_out) > 20


def test_the_end_is_the_mean_of_the_last_looks_and_what_reaches_it_the_first_look_there() -> None:
    training = Training([(2, 0.5), (4, 0.9), (6, 0.7), (8, 0.7), (10, 0.7), (12, 0.8)], {}, np.zeros(1))
    assert training.end == pytest.approx(0.76)
    assert training.reaches(0.75) == 4
    assert training.reaches(0.95) is None
    between = _between({1: Yardstick(0.5, 10, 100), 5: Yardstick(0.7, 30, 300)}, 2)
    assert (between.target, between.rounds, between.client_rounds) == pytest.approx((0.55, 15, 150))


NAMES = (
    "one", "five", "fifth", "first", "first of a fifth", "residual", "residual five", "residual first", "merges",
    "elsewhere", "sequences", "storage",
)  # fmt: skip


def with_variant(rows: list[dict[str, Any]], old: str, new: str) -> list[dict[str, Any]]:
    return [row | {"variant": row["variant"].replace(old, new)} for row in rows]


def named(task: Task) -> str:
    """Return the name of a task in `EVIDENCE`."""
    partition = "" if task.partition == "identity" else f" {task.partition.replace('-', ' ', 1)}"
    count = "" if task.clients == "100" else f", {task.clients} clients"
    return f"{title_of(task.dataset)}{partition.replace('dirichlet', 'Dirichlet')}{count}"


EVIDENCE = (
    ("FashionMNIST iid", 1.0, 10, 80, 94, 8, 10),
    ("FashionMNIST Dirichlet 0.3", 1.0, 10, 80, 102, 14, 10),
    ("CIFAR-10 iid", 1.0, 10, 150, 224, 32, 28),
    ("CIFAR-10 Dirichlet 0.3", 1.0, 10, 150, 214, 34, 42),
    ("CIFAR-10 Dirichlet 0.1", 1.0, 10, 150, 204, 40, 46),
    ("CIFAR-10 iid, 50 clients", 1.0, 10, 150, 220, 32, 38),
    ("FashionMNIST iid", 0.2, 5, 160, 156, 8, 8),
    ("FashionMNIST Dirichlet 0.3", 0.2, 5, 160, 136, 20, 16),
    ("CIFAR-10 iid", 0.2, 5, 320, 412, 156, 168),
    ("CIFAR-10 Dirichlet 0.3", 0.2, 5, 320, 356, 64, 72),
    ("CIFAR-10 Dirichlet 0.1", 0.2, 5, 320, 356, 124, 96),
    ("CIFAR-10 iid, 1000 clients", 0.1, 10, 150, 182, 36, 22),
    ("FashionMNIST iid", 0.05, 2, 320, 240, 8, None),
    ("CIFAR-10 iid", 0.05, 2, 670, 640, 160, None),
    ("CelebA", 1.0, 10, 106, 120, 100, None),
    ("CIFAR-100 iid", 1.0, 10, 150, 206, None, None),
)
"""Task, participating share, groups, separate rounds, Scratch's rounds, and rounds after one and five leavers."""


def test_what_advice_says_of_groups_is_what_was_measured() -> None:
    """`EVIDENCE` equals the medians of the committed table; a request that half of the seeds never finished has none.

    If every group was hit there is no request to count.
    """
    cases = cases_of(read_table(Path(__file__).parents[1] / "results" / "groups.csv"))
    costs = [math.inf if single is None else single / scratch for *_, scratch, single, _ in EVIDENCE]
    reached = [cost for cost in costs if cost < math.inf]
    assert (len(costs), len(reached), min(reached), max(reached)) == (TRIED, REACHED, *COSTS)
    assert statistics.median(costs) == pytest.approx(USUAL_COST, abs=5e-5)
    for task, taking_part, groups, separate_rounds, scratch, single_leaver, five_leavers in EVIDENCE:
        measured = {}
        for case in cases:
            share = Participation.parse(case.task.participation).rate
            setting = (named(case.task), share, case.groups, case.separate, case.stretch)
            if setting == (task, taking_part, groups, separate_rounds, USUAL_STRETCH):
                measured[case.leavers] = case
        single, five = measured[1], measured[5]
        assert scratch == single.scratch, task
        for case, rounds in ((single, single_leaver), (five, five_leavers)):
            lost = 2 * len(case.speed.ratios) <= len(single.requests)
            assert rounds == (None if lost else case.rounds), task
