"""The paper's settings, the experiments' files, and the resulting work."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sifu.data.client_data import ClientData
from sifu.errors import InputError
from sifu_paper.options import Options
from sifu_paper.requests import choose_requests
from sifu_paper.runner import Bench
from sifu_paper.settings import Requests, experiment_names, load_experiment, run_spec, shared_settings
from sifu_paper.sources import LETTERS
from sifu_paper.work import parse_variant, plan_work

# K, batch, m, sigma, eta, C, stop, partition: table 1 of the paper's appendix, and its section 5.
TABLE = {
    "mnist": (10, 100, "fixed(10)", 0.05, 0.01, 0.5, 0.93, "one_class"),
    "fashion_mnist": (5, 20, "fixed(10)", 0.1, 0.02, 0.5, 0.9, "one_class"),
    "cifar10": (5, 20, "fixed(5)", 0.05, 0.01, 0.2, 0.9, "dirichlet"),
    "cifar100": (5, 20, "fixed(5)", 0.05, 0.02, 0.2, 0.9, "dirichlet"),
    "celeba": (10, 20, "fixed(20)", 0.1, 0.01, 0.5, 0.999, "identity"),
}


@pytest.mark.parametrize("dataset", TABLE)
def test_the_settings_are_those_of_the_papers_table(dataset: str) -> None:
    spec, _ = run_spec(load_experiment("sequential"), dataset, "paper", 7, "paper")
    clip = shared_settings().dataset(dataset).clip
    written = (spec.local.steps, spec.local.batch, spec.server.participation, spec.privacy.sigma, spec.local.rate, clip)
    assert (*written, spec.stop.target, spec.data.partition) == TABLE[dataset]
    assert (spec.data.clients, spec.data.samples_per_client, spec.seed) == (100, 100, 7)
    assert (spec.privacy.epsilon, spec.privacy.delta, spec.local.momentum) == (10.0, 0.01, 0.9)
    assert (spec.regularity.kind, spec.regularity.factor) == ("assumed", 1.0)
    assert (spec.stop.min_rounds, spec.stop.max_rounds) == (50, 10000)
    if spec.data.partition == "dirichlet":
        assert spec.data.alpha == 0.1


def test_the_presets_differ_in_what_they_promise_and_in_nothing_else() -> None:
    paper, ours = (
        run_spec(load_experiment("sequential"), "cifar10", name, 1, "paper")[0] for name in ("paper", "ours")
    )
    assert (paper.privacy.accounting, paper.privacy.calibration, paper.privacy.scope) == (
        "population",
        "classical",
        "latest",
    )
    assert (ours.privacy.accounting, ours.privacy.calibration, ours.privacy.scope) == ("round", "exact", "all")
    assert ours.privacy.sigma == "auto"
    for section in ("data", "model", "local", "server", "stop", "regularity"):
        assert getattr(paper, section) == getattr(ours, section)


LETTER = {
    "mnist": ("softmax", (0.5, "authors", "authors", 10000)),
    "fashion_mnist": ("cnn_fashion_mnist", (0.5, "authors", "authors", 10000)),
    "cifar10": ("authors_cifar10", (0.5, "authors", "authors", 10000)),
    "cifar100": ("authors_cifar100", (0.5, "authors", "authors", 10000)),
    "celeba": ("authors_celeba", (0.5, "authors", "authors", 10000)),
}


@pytest.mark.parametrize("dataset", LETTER)
def test_the_preset_to_the_letter_trains_as_the_authors_code_does(dataset: str) -> None:
    paper, authors, unclipped, ours = (
        run_spec(load_experiment("sequential"), dataset, name, 1, "paper")[0]
        for name in ("paper", "authors", "authors_unclipped", "authors_ours")
    )
    trained = (authors.local.clip, authors.data.normalise, authors.stop.evaluation, authors.stop.max_rounds)
    assert (authors.model.kind, trained) == LETTER[dataset]
    assert authors.privacy == paper.privacy
    assert (paper.local.clip, paper.data.normalise, paper.stop.evaluation) == (0.0, "standard", "fixed")
    assert replace(unclipped, local=authors.local) == authors
    assert unclipped.local.clip == 0.0
    assert replace(ours, privacy=authors.privacy) == authors
    assert ours.privacy.accounting == "round"
    for section in ("server", "regularity", "keep"):
        assert getattr(paper, section) == getattr(authors, section)


def test_every_training_is_compared_with_its_own_scratch() -> None:
    chosen = ("paper", "ours", "authors", "authors_unclipped", "authors_ours")
    planned = work("sequential", ("sifu", "scratch"), presets=chosen, seeds=(1,))
    pairs = [(trajectory.method, trajectory.training.preset) for trajectory in planned.trajectories]
    scratch = [("scratch", name) for name in ("paper", "authors", "authors_unclipped")]
    assert pairs == [*(("sifu", name) for name in chosen), *scratch]


def test_the_exact_methods_stand_beside_the_others() -> None:
    planned = work("sequential", ("closed_form", "groups"), datasets=("cifar10",), presets=("authors",), seeds=(1,))
    closed, groups = (trajectory.spec for trajectory in planned.trajectories)
    assert (closed.model.kind, closed.server.participation, closed.local.clip) == ("ridge", "all", 0.0)
    assert (groups.model.kind, groups.server.participation, groups.local.clip) == (
        "authors_cifar10",
        "poisson(0.05)",
        0.5,
    )
    assert groups.groups.count == 10


def test_every_experiment_of_the_issue_is_there_and_makes_specs_at_both_scales() -> None:
    wanted = {
        "sequential",
        "watermark",
        "time-limited",
        "sigma",
        "request-sets",
        "psi-alpha",
        "scale",
        "groups",
        "exact",
        "metrics",
        *LETTERS,
    }
    assert set(experiment_names()) == wanted
    for name, scale in itertools.product(wanted, ("paper", "smoke")):
        experiment = load_experiment(name, scale)  # type: ignore[arg-type]
        for dataset in experiment.datasets:
            spec, _ = run_spec(experiment, dataset, "paper", 1, scale)  # type: ignore[arg-type]
            assert scale == "paper" or spec.stop.max_rounds <= 60


def test_the_watermark_experiment_marks_ten_pixels_on_a_dirichlet_1_partition() -> None:
    spec, _ = run_spec(load_experiment("watermark"), "mnist", "paper", 1, "paper")
    assert (spec.data.watermark, spec.data.partition, spec.data.alpha) == (10, "dirichlet", 1.0)


def test_the_scale_experiment_can_be_proven() -> None:
    spec, _ = run_spec(load_experiment("scale"), "mnist", "ours", 1, "paper")
    assert (spec.model.kind, spec.model.dtype, spec.server.participation) == ("softmax", "float64", "all")
    assert (spec.regularity.kind, spec.local.rate, spec.local.momentum) == ("measured", "auto", 0.0)
    assert (spec.privacy.accounting, spec.privacy.calibration, spec.privacy.noise) == ("round", "exact", "system")


@pytest.mark.parametrize(("name", "hint"), [("sequentail", "sequential"), ("nothing", "Known are")])
def test_an_unknown_experiment_is_named_with_its_neighbour(name: str, hint: str) -> None:
    with pytest.raises(InputError, match=hint):
        load_experiment(name)


def work(name: str, methods: tuple[str, ...], **more):
    options = {"datasets": ("mnist",), "seeds": (1, 2), "presets": ("paper", "ours"), "scale": "paper"} | more
    return plan_work(load_experiment(name), methods=methods, **options)  # type: ignore[arg-type]


def test_both_presets_are_run_where_they_matter_and_one_training_serves_all_the_others() -> None:
    planned = work("sequential", ("sifu", "scratch", "fine_tuning", "last", "noisy_scratch"))
    per_seed = [trajectory for trajectory in planned.trajectories if trajectory.training.seed == 1]
    pairs = [(trajectory.method, trajectory.training.preset) for trajectory in per_seed]
    assert pairs == [
        ("sifu", "paper"),
        ("sifu", "ours"),
        ("scratch", "paper"),
        ("fine_tuning", "paper"),
        ("last", "paper"),
        ("last", "ours"),
        ("noisy_scratch", "paper"),
    ]
    assert len({trajectory.training for trajectory in per_seed}) == 2
    assert len({trajectory.name for trajectory in planned.trajectories}) == len(planned.trajectories)


def test_an_unknown_method_is_refused_with_those_there_are(tmp_path: Path) -> None:
    bench = Bench(Options("sequential", tmp_path, seeds=(1,), methods=("sifu", "magic")))
    with pytest.raises(InputError, match="method 'magic' is not known: write some of sifu"):
        bench.work()


def test_only_methods_that_take_a_sigma_are_run_along_sigma() -> None:
    planned = work("sigma", ("sifu", "last", "scratch"), presets=("paper",), seeds=(1,))
    count = {
        method: sum(trajectory.method == method for trajectory in planned.trajectories)
        for method in ("sifu", "last", "scratch")
    }
    assert count == {"sifu": 6, "last": 1, "scratch": 1}
    sigmas = sorted(trajectory.terms["sigma"] for trajectory in planned.trajectories if trajectory.method == "sifu")
    assert sigmas == pytest.approx([0.0005, 0.005, 0.015, 0.05, 0.15, 0.5])
    assert len({trajectory.training for trajectory in planned.trajectories}) == 1


def test_what_would_take_too_long_is_left_out_by_method() -> None:
    planned = work("exact", ("closed_form", "sifu", "scratch"), presets=("ours",), seeds=(1,))
    variants = [(trajectory.method, trajectory.variant) for trajectory in planned.trajectories]
    assert variants == [
        ("closed_form", "requests=10x3"),
        ("closed_form", "requests=1x50"),
        ("sifu", "requests=10x3"),
        ("scratch", "requests=10x3"),
    ]


def test_requests_of_one_class_go_through_the_classes_in_turn() -> None:
    spec, _ = run_spec(load_experiment("exact"), "mnist", "ours", 1, "paper")
    clients = [ClientData(f"c{number:02d}", np.zeros((3, 1)), np.full(3, number % 4)) for number in range(20)]
    requests = choose_requests(clients, spec, Requests(count=9, clients=2, choose="class"))
    classes = [{int(name[1:]) % 4 for name in names} for names in requests]
    assert [len(names) for names in requests] == [2] * 8 + [1]  # a class of five gives two pairs and one single client
    assert all(len(labels) == 1 for labels in classes)
    assert classes[:4] == classes[4:8]
    assert len({name for names in requests for name in names}) == 17
    uneven = [*clients[:1], *(client for client in clients if int(client.y[0]))]
    with pytest.raises(InputError, match="class 0 has 1 clients"):
        choose_requests(uneven, spec, Requests(count=9, clients=1, choose="class"))


def test_scratch_is_also_run_without_a_time_limit() -> None:
    planned = work("time-limited", ("sifu", "scratch"), presets=("paper",), seeds=(1,))
    limits = {
        method: {trajectory.limit for trajectory in planned.trajectories if trajectory.method == method}
        for method in ("sifu", "scratch")
    }
    assert limits == {"sifu": {0.25, 0.33, 0.5}, "scratch": {0.25, 0.33, 0.5, None}}


def test_the_scale_experiment_asks_at_the_sigmas_of_the_prototypes() -> None:
    planned = work("scale", ("sifu", "scratch"), presets=("ours",), seeds=(1,))
    at = {
        (v["requests"], v["epsilon"], v["sigma_scale"]): trajectory.terms["sigma"]
        for trajectory in planned.trajectories
        if trajectory.method == "sifu" and (v := parse_variant(trajectory.variant))["clients"] == "1000"
    }
    assert at[("10", "10", "1")] == pytest.approx(0.007, rel=0.01)
    assert at[("10", "1", "0.7")] == pytest.approx(0.0263, rel=0.01)
    assert at[("1x10", "10", "auto")] == "auto"
    ten = next(trajectory for trajectory in planned.trajectories if "requests=1x10" in trajectory.variant)
    assert (ten.requests.count, ten.requests.clients) == (10, 1)
