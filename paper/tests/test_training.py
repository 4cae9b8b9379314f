"""Rounds: the plain loop agrees with sifu's embedded engine, and does what the engine leaves out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from sifu_paper.federation import Federation, federation_of
from sifu_paper.networks import network_named
from sifu_paper.settings import Settings, settings_of
from sifu_paper.training import DivergedError, EmbeddedTrainer, PlainTrainer, average, draw, trainer_for

DIGITS = settings_of("digits", "table")


@pytest.fixture(scope="module")
def digits() -> Federation:
    return federation_of(DIGITS, 1)


def tiny_images(settings: Settings, network: str, classes: int = 3) -> Federation:
    generator = np.random.default_rng(5)
    x = tuple(generator.normal(size=(6, 3, 32, 32)).astype(np.float32) for _ in range(3))
    y = tuple(generator.integers(0, classes, size=6) for _ in range(3))
    return Federation(network_named(network, (3, 32, 32), classes), x, y, x[0], y[0])


def test_the_plain_loop_and_the_embedded_engine_agree(digits: Federation) -> None:
    plain, engine = PlainTrainer(digits, DIGITS, 1), EmbeddedTrainer(digits, DIGITS, 1)
    model = digits.network.initial(1, 0)
    for number in range(5):
        drawn = draw(DIGITS, 1, (0, number), np.arange(100))
        ours, theirs = (trainer.round(model, (0, number), drawn) for trainer in (plain, engine))
        np.testing.assert_allclose(ours.model, theirs.model, atol=1e-5)
        np.testing.assert_allclose(ours.drifts, theirs.drifts, rtol=1e-4)
        model = theirs.model
    assert plain.accuracy(model, np.arange(100)) == pytest.approx(engine.accuracy(model, np.arange(100)), abs=1e-3)


def test_momentum_and_clipping_are_those_of_torch(digits: Federation) -> None:
    settings = replace(DIGITS, clip=0.5, steps=4)
    trained = PlainTrainer(digits, settings, 1).updates(digits.network.initial(1, 0), (0, 0), np.array([3]), 4)[0]
    vector = torch.from_numpy(digits.network.initial(1, 0)).requires_grad_()
    optimiser = torch.optim.SGD([vector], lr=settings.rate, momentum=settings.momentum)
    for _ in range(4):
        optimiser.zero_grad()
        scores = digits.network.scores(vector, torch.from_numpy(digits.x[3]))
        nn.functional.cross_entropy(scores, torch.from_numpy(digits.y[3])).backward()
        nn.utils.clip_grad_norm_([vector], 0.5)
        optimiser.step()
    moved = vector.detach().numpy() - digits.network.initial(1, 0)
    np.testing.assert_allclose(trained, moved, atol=1e-5)
    unclipped = PlainTrainer(digits, DIGITS, 1).updates(digits.network.initial(1, 0), (0, 0), np.array([3]), 4)[0]
    assert np.linalg.norm(unclipped) > 1.1 * np.linalg.norm(moved)  # control: the bound matters here


@pytest.mark.parametrize("name", ["cnn_cifar10", "authors_cifar10", "authors_celeba", "cnn_fashion_mnist"])
def test_a_network_computes_what_a_torch_module_does(name: str) -> None:
    channels = {"cnn_fashion_mnist": (32, 64), "authors_celeba": (8, 16, 32)}.get(name, (32, 64, 64))
    padding, hidden = (0, 64) if "cifar" in name else (1, 256 if name == "cnn_fashion_mnist" else 0)
    layers: list[nn.Module] = []
    for number, (before, after) in enumerate(zip((3, *channels), channels, strict=False)):
        layers.append(nn.Conv2d(before, after, 3, padding=padding))
        if name.startswith("cnn") or (name == "authors_cifar10" and number < 2):
            layers.append(nn.ReLU())
        if padding or number < 2:
            layers.append(nn.MaxPool2d(2))
    layers += [nn.Flatten(), nn.LazyLinear(hidden or 3), *([nn.ReLU(), nn.Linear(hidden, 3)] if hidden else [])]
    module, x = nn.Sequential(*layers), torch.randn(2, 3, 32, 32)
    module(x)
    network = network_named(name, (3, 32, 32), 3)
    parts = [p.T if p.dim() == 2 else p for p in module.parameters()]  # ours multiplies from the right
    vector = torch.cat([part.reshape(-1) for part in parts])
    assert network.size == vector.numel()
    torch.testing.assert_close(network.scores(vector, x), module(x), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["cnn_cifar10", "cnn_fashion_mnist"])
def test_a_client_trains_alike_whoever_else_takes_part_and_together_or_apart(name: str) -> None:
    settings = replace(settings_of("cifar10", "table"), network=name, steps=2, batch=4)
    federation = tiny_images(settings, name)
    model = federation.network.initial(1, 0)
    trainer = PlainTrainer(federation, settings, 1)
    every = trainer.updates(model, (0, 0), np.arange(3), 2)
    alone = trainer.updates(model, (0, 0), np.array([2]), 2)
    np.testing.assert_allclose(every[2], alone[0], atol=1e-6)
    from torch.func import grad, vmap

    trainer._gradients = vmap(grad(trainer._loss), in_dims=(0, 0, 0, 0 if name == "cnn_fashion_mnist" else None))
    np.testing.assert_allclose(trainer.updates(model, (0, 0), np.arange(3), 2), every, atol=1e-5)


def test_noise_in_training_has_the_size_that_is_asked_for_and_clips_first(digits: Federation) -> None:
    model, drawn = digits.network.initial(1, 0), np.arange(10)
    quiet = PlainTrainer(digits, DIGITS, 1, dp_noise=1e-12).round(model, (0, 0), drawn).updates
    assert quiet is not None
    assert np.linalg.norm(quiet, axis=1).max() <= DIGITS.dp_clip * 1.000001
    noisy = PlainTrainer(digits, DIGITS, 1, dp_noise=3.0).round(model, (0, 0), drawn).updates
    assert noisy is not None
    # 6,500 normals: their standard deviation is within 5 % but for a chance below 1e-7
    assert np.std(noisy - quiet) == pytest.approx(3.0 * DIGITS.dp_clip, rel=0.05)


def test_the_engine_trains_only_what_it_can(digits: Federation) -> None:
    assert isinstance(trainer_for(digits, DIGITS, 1), EmbeddedTrainer)
    for needs in ({"dp_noise": 1.0}, {"hand_out": True}):
        assert isinstance(trainer_for(digits, DIGITS, 1, **needs), PlainTrainer)  # type: ignore[arg-type]
    assert isinstance(trainer_for(digits, replace(DIGITS, clip=0.5), 1), PlainTrainer)
    assert isinstance(trainer_for(digits, replace(DIGITS, batch=4), 1), PlainTrainer)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_training_that_ends_in_nan_says_so(digits: Federation) -> None:
    model = np.full(digits.network.size, np.nan, dtype=np.float32)
    for trainer in (PlainTrainer(digits, DIGITS, 1), EmbeddedTrainer(digits, DIGITS, 1)):
        with pytest.raises(DivergedError):
            trainer.round(model, (0, 0), np.arange(3))


def test_batches_cover_a_clients_samples_before_one_comes_again(digits: Federation) -> None:
    trainer = PlainTrainer(digits, replace(DIGITS, batch=7), 1)
    rows = trainer._batches((0, 0), 3, 4, 7) - 3 * 14
    assert sorted(rows[:2].reshape(-1)) == sorted(rows[2:].reshape(-1)) == list(range(14))


def test_means_are_weighted_by_samples() -> None:
    mean, drifts = average(np.array([[0.0, 0.0], [3.0, 4.0]]), np.array([1, 4]))
    np.testing.assert_allclose(mean, [2.4, 3.2])
    np.testing.assert_allclose(drifts, [4.0, 1.0])
