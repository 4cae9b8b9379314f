"""Blocks of tuned backbones: dropping and subtracting leaves the bits of a federation without the client."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sifu.errors import InputError
from sifu.theory.arrays import Floats
from sifu.theory.closed_form import FixedPoint, Statistics, fit_head, statistics_of, total
from sifu.theory.closed_form.blocks import Blocks, drop, head_at, is_dropped, projection
from sifu.theory.merging import members_by_group

INPUTS, WIDTH, GROUPS, NORM = 5, 8, 3, 10.0
BLOCKS = Blocks(frozen=WIDTH, block=4, count=GROUPS)
FIXED = FixedPoint(features=BLOCKS.features, outputs=2, norm=BLOCKS.norm(NORM))
KEY = bytes(32)
PUBLIC = np.random.default_rng(0).normal(size=(INPUTS, WIDTH))
Federation = Mapping[int, tuple[Floats, Floats]]


def federation(seed: int, clients: int = 9) -> Federation:
    generator = np.random.default_rng(seed)
    data = {}
    for client in range(clients):
        rows = int(generator.integers(3, 9))
        labels = np.eye(2)[generator.integers(0, 2, rows)] - 0.5
        data[client] = (generator.normal(size=(rows, INPUTS)), labels)
    return data


def tuned(data: Federation, members: Collection[int], steps: int = 5) -> Floats:
    """Return a backbone tuned by its members alone, by descent on the error of its features on the labels."""
    backbone, last = PUBLIC.copy(), np.zeros((WIDTH, 2))
    for _ in range(steps):
        moved, lasts, count = np.zeros_like(backbone), np.zeros_like(last), 0
        for client in sorted(members):
            x, t = data[client]
            hidden = np.tanh(x @ backbone)
            error = hidden @ last - t
            lasts += hidden.T @ error
            moved += x.T @ ((error @ (last + 0.1).T) * (1.0 - hidden**2))
            count += len(x)
        backbone, last = backbone - 0.3 * moved / count, last - 0.3 * lasts / count
    return backbone


def backbones_of(data: Federation, *, leave_out: Collection[int] = ()) -> dict[int, Floats]:
    groups = members_by_group(KEY, [f"client-{client}" for client in range(20)], data, GROUPS)
    kept = {group: members for group, members in enumerate(groups) if members and group not in leave_out}
    return {group: tuned(data, members) for group, members in kept.items()}


def part(x: Floats, backbone: Floats, project: Floats | None) -> Floats:
    rows = np.tanh(x @ backbone) if project is None else np.tanh(x @ backbone) @ project
    return rows * (NORM / np.linalg.norm(rows, axis=1, keepdims=True))


def sent(data: Federation, client: int, backbones: Mapping[int, Floats], project: Floats) -> Statistics:
    x, t = data[client]
    nothing = np.zeros((len(x), BLOCKS.block))
    parts = [part(x, backbones[group], project) if group in backbones else nothing for group in range(GROUPS)]
    return statistics_of(FIXED, np.concatenate([part(x, PUBLIC, None), *parts], axis=1), t)


def hit_by(leavers: Collection[int]) -> set[int]:
    groups = members_by_group(KEY, [f"client-{client}" for client in range(20)], leavers, GROUPS)
    return {group for group, members in enumerate(groups) if members}


PROJECT = projection(7, WIDTH, BLOCKS.block)


@given(st.integers(0, 2**32), st.sets(st.integers(0, 8), min_size=1, max_size=5))
def test_dropping_and_subtracting_is_the_federation_without_the_client(seed: int, leavers: set[int]) -> None:
    data = federation(seed)
    backbones = backbones_of(data)
    everyone = {client: sent(data, client, backbones, PROJECT) for client in data}
    left = drop(total(FIXED, everyone.values()), BLOCKS, hit_by(leavers))
    for client in leavers:
        left = left - drop(everyone[client], BLOCKS, hit_by(leavers))
    # The counterfactual has fewer clients, under the plan that leaves the hit groups out.
    others = {client: data[client] for client in data if client not in leavers}
    separate = backbones_of(others, leave_out=hit_by(leavers))
    never = total(FIXED, [sent(others, client, separate, PROJECT) for client in others])
    assert left == never
    assert left.digest() == never.digest()
    places = BLOCKS.left(separate)
    assert head_at(left, places, 0.1).digest() == head_at(never, places, 0.1).digest()
    assert all(is_dropped(left, BLOCKS, group) == (group not in separate) for group in range(GROUPS))


def test_all_groups_hit_leaves_the_head_of_the_frozen_backbone() -> None:
    data = federation(3)
    backbones = backbones_of(data)
    whole = total(FIXED, [sent(data, client, backbones, PROJECT) for client in data])
    frozen = FixedPoint(features=WIDTH, outputs=2, norm=NORM)
    separate = total(frozen, [statistics_of(frozen, part(x, PUBLIC, None), t) for x, t in data.values()])
    for relative in (0.1, None):
        alone = fit_head(separate, relative)
        head = head_at(drop(whole, BLOCKS, range(GROUPS)), BLOCKS.left([]), relative)
        assert np.array_equal(head.weights[[*range(WIDTH), -1]], alone.weights)
        assert not np.any(head.weights[WIDTH:-1])
        # Negative controls: one group left in, and lambda from the number of all features.
        assert not np.array_equal(head_at(whole, BLOCKS.left([0]), relative).weights[:WIDTH], alone.weights[:-1])
    dropped = fit_head(drop(whole, BLOCKS, range(GROUPS)), 0.1)
    assert not np.allclose(dropped.weights[:WIDTH], fit_head(separate, 0.1).weights[:-1])


def two_counterfactuals(seed: int = 5) -> tuple[Federation, Federation, set[int]]:
    data, leaver = federation(seed), 4
    return data, {client: data[client] for client in data if client != leaver}, hit_by([leaver])


def test_control_a_hit_block_left_in_is_told_apart() -> None:
    data, others, hit = two_counterfactuals()
    backbones = backbones_of(data)
    left = total(FIXED, [sent(data, client, backbones, PROJECT) for client in others])
    never = total(FIXED, [sent(others, client, backbones_of(others), PROJECT) for client in others])
    assert left != never
    assert drop(left, BLOCKS, hit) == drop(never, BLOCKS, hit)


def test_control_a_backbone_tuned_together_is_noticed() -> None:
    data, others, hit = two_counterfactuals()
    together, without = tuned(data, data), tuned(others, others)
    kept = [group for group in range(GROUPS) if group not in hit]
    counterfactuals = [
        total(FIXED, [sent(others, client, dict.fromkeys(kept, backbone), PROJECT) for client in others])
        for backbone in (together, without)
    ]
    assert counterfactuals[0] != counterfactuals[1]


def test_control_statistics_of_the_leaver_left_in_are_told_apart() -> None:
    data, others, hit = two_counterfactuals()
    backbones = backbones_of(data)
    with_leaver = drop(total(FIXED, [sent(data, client, backbones, PROJECT) for client in data]), BLOCKS, hit)
    never = total(FIXED, [sent(others, client, backbones_of(others, leave_out=hit), PROJECT) for client in others])
    assert with_leaver != never


def test_control_a_projection_drawn_from_data_is_told_apart() -> None:
    data, others, hit = two_counterfactuals()
    counterfactuals = []
    for seen in (data, others):
        hidden = np.tanh(np.concatenate([x for x, _ in seen.values()]) @ PUBLIC)
        fitted = np.linalg.svd(hidden, full_matrices=False)[2][: BLOCKS.block].T
        backbones = backbones_of(others, leave_out=hit)
        counterfactuals.append(total(FIXED, [sent(others, client, backbones, fitted) for client in others]))
    assert counterfactuals[0] != counterfactuals[1]


def test_the_projection_follows_from_its_seed_and_keeps_lengths() -> None:
    drawn = projection(1, 400, 200)
    assert np.array_equal(drawn, projection(1, 400, 200))
    assert not np.array_equal(drawn, projection(2, 400, 200))
    rows = np.random.default_rng(0).normal(size=(200, 400))
    ratio = np.linalg.norm(rows @ drawn, axis=1) / np.linalg.norm(rows, axis=1)
    assert abs(ratio.mean() - 1.0) < 0.05
    assert set(np.unique(np.abs(drawn))) == {1.0 / np.sqrt(200)}


def test_blocks_that_are_not_there_are_refused() -> None:
    with pytest.raises(InputError, match="3 groups"):
        BLOCKS.columns(3)
    other = statistics_of(FixedPoint(features=2, outputs=1), np.zeros((1, 2)), np.zeros((1, 1)))
    with pytest.raises(InputError, match="no blocks"):
        drop(other, BLOCKS, [0])
