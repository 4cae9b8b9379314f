"""Networks with state outside their parameters: refused, or the same bits as without the client."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn

import sifu
import sifu_verifier
import stateful_modules
from sifu.core.closed_form_engine import recorded_blocks, recorded_fixed_point
from sifu.core.spec import Spec
from sifu.data.client_data import ClientData
from sifu.data.fresh_modules import fixed_generators, fresh_copy
from sifu.errors import InputError
from sifu.store.reader import RunReader
from sifu.store.statistics_files import read_statistics
from sifu.theory.closed_form import Statistics
from sifu.theory.closed_form.blocks import drop
from sifu.theory.merging import group_of
from stateful_modules import Kind

GROUPS, LEAVER = 2, "client-4"
"""Number of groups, and the leaver: it is the last client, so that the others keep their numbers and draws."""
KEY = bytes(32)


@pytest.fixture(autouse=True)
def same_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give both federations the same group key."""
    monkeypatch.setattr("sifu.store.unfinished._group_key", lambda spec: KEY)


def clients_of() -> list[ClientData]:
    """Return clients of different sizes and scales; the leaver has the largest samples and gradients."""
    clients = []
    for number in range(5):
        generator, rows = np.random.default_rng(number), 5 + number % 3
        scale = 3.0 if number == 4 else 1.0
        x = scale * generator.random((rows, 1, 8, 8))
        clients.append(ClientData(f"client-{number}", x, generator.integers(0, 3, rows)))
    return clients


def spec_of(**sections: Any) -> dict[str, Any]:
    sifu.allow_code("stateful_modules:make")
    return {
        "model": {"kind": "ridge", "outputs": 3},
        "data": {"preprocessing": "fixed"},
        "ridge": {"regularisation": 0.01},
        "features": {"kind": "module", "module": "stateful_modules:make", "tune": "blocks", "block": 4},
        "groups": {"count": GROUPS, "rounds": 2, "rebuild": "later"},
        "local": {"rate": 0.5, "steps": 2, "momentum": 0.9},
        "privacy": {"noise": "seeded"},
    } | sections


def whole_sum(folder: Path) -> Statistics:
    with RunReader(folder) as reader:
        fixed = recorded_fixed_point(Spec.from_mapping(reader.spec), reader.layout)
        (row,) = [row for row in reader.statistics().values() if row.is_sum]
        return read_statistics(folder, row, fixed)


def outcome_of(kind: Kind, folder: Path) -> str:
    """Return `refused` if training is refused, else `equal` or `different` compared with a run without the leaver."""
    file = Path(kind.file) if kind.file else None
    stateful_modules.choose(kind)
    try:
        run = sifu.train(spec_of(), run=folder / "run", clients=clients_of())
    except InputError as error:
        reasons = ("state between clients", "the same features", "carries information between clients")
        one_line = "\n" not in str(error) and any(reason in str(error) for reason in reasons)
        return "refused" if one_line else str(error)
    (outcome,) = run.forget([LEAVER], "gone")
    assert outcome.level == "exact"
    if file is not None:
        file.unlink(missing_ok=True)
    stateful_modules.choose(kind)
    others = [client for client in clients_of() if client.name != LEAVER]
    sifu.train(spec_of(), run=folder / "never", clients=others)
    with RunReader(folder / "never") as reader:
        blocks = recorded_blocks(Spec.from_mapping(reader.spec), reader.layout)
    hit = group_of(KEY, LEAVER, GROUPS)
    stays = {group_of(KEY, client.name, GROUPS) for client in others} - {hit}
    assert stays  # otherwise nothing would be compared
    same = whole_sum(folder / "run") == drop(whole_sum(folder / "never"), blocks, {hit})
    return "equal" if same else "different"


CASES = {
    "nothing": (Kind("nowhere", "forward", "scale"), "equal"),
    "unfreezing by a step counter": (Kind("attribute", "training", "unfreeze", 1), "equal"),
    "unfreezing by a counter of the file": (Kind("global", "training", "unfreeze", 20), "equal"),
    "a running maximum in a hook": (Kind("hook", "backward", "gradient"), "equal"),
    "a running maximum in a class": (Kind("class", "backward", "gradient"), "refused"),
    "an autograd function with memory": (Kind("function", "backward", "gradient"), "refused"),
    "numpy noise on gradients": (Kind("noise", "backward", "gradient"), "equal"),
    "mixup from numpy": (Kind("mixup", "training", "scale"), "equal"),
    "Python's generator": (Kind("python", "training", "scale"), "equal"),
    "the system's entropy": (Kind("entropy", "training", "scale"), "refused"),
    "a memory bank": (Kind("attribute", "training", "bank"), "equal"),
    "a memory bank of a class": (Kind("class", "training", "bank"), "refused"),
    "memory while gradients are on": (Kind("closure", "gradients on", "scale"), "equal"),
    "memory of the file while gradients are on": (Kind("global", "gradients on", "scale"), "refused"),
    "a counter in a file": (Kind("file", "training", "unfreeze", 3), "refused"),
}


@pytest.mark.parametrize(("kind", "expected"), CASES.values(), ids=CASES.keys())
def test_hidden_state_is_refused_or_begins_afresh_with_every_client(kind: Kind, expected: str, tmp_path: Path) -> None:
    if kind.place == "file":
        kind = Kind(kind.place, kind.moment, kind.effect, kind.after, str(tmp_path / "state"))
    assert outcome_of(kind, tmp_path) == expected


@pytest.mark.parametrize(
    "seed",
    [
        *range(6),
        *(pytest.param(seed, marks=pytest.mark.long) for seed in range(6, 20)),
        *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(20, 60)),
    ],
)
def test_no_drawn_stateful_network_is_certified_with_other_bits(seed: int, tmp_path: Path) -> None:
    kind = stateful_modules.drawn_kind(seed, tmp_path)
    assert outcome_of(kind, tmp_path) in ("refused", "equal"), kind


def test_every_certificate_of_a_users_module_names_what_cannot_be_seen(tmp_path: Path) -> None:
    stateful_modules.choose(Kind("nowhere", "forward", "scale"))
    run = sifu.train(spec_of(), run=tmp_path / "run", clients=clients_of())
    (outcome,) = run.forget([LEAVER], "gone")
    (premise,) = [each for each in run.certificate("gone").body["premises"] if each["name"] == "module"]
    assert (outcome.level, premise["status"]) == ("exact", "trusted")
    assert run.verify().problems == []
    assert sifu_verifier.verify(tmp_path / "run") == []
    # A seeded feature map runs no user code.
    drawn = spec_of(features={"kind": "projection", "count": 4})
    del drawn["groups"], drawn["local"]
    plain = sifu.train(drawn, run=tmp_path / "plain", clients=clients_of())
    plain.forget([LEAVER], "gone")
    assert "module" not in [each["name"] for each in plain.certificate("gone").body["premises"]]


class Counts(nn.Module):
    """Linear model whose gradient changes after three training steps, counted in a list that copies share or not."""

    shared: ClassVar[list[int]] = []

    def __init__(self, shared: bool) -> None:
        super().__init__()
        self.layer, self.steps = nn.Linear(64, 3), Counts.shared if shared else []
        self.is_shared = shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        steps = Counts.shared if self.is_shared else self.steps
        scores: torch.Tensor = self.layer(x.flatten(1))
        if self.training:
            steps.append(1)
        return scores if len(steps) > 3 else scores + 0.5 * scores.detach()


@pytest.mark.parametrize("shared", [False, True])
def test_a_model_of_a_users_own_begins_afresh_with_every_client(shared: bool, tmp_path: Path) -> None:
    spec = {
        "data": {"preprocessing": "fixed"},
        "local": {"rate": 0.1, "steps": 5},
        "regularity": {"kind": "assumed"},
        "stop": {"max_rounds": 3, "target": 0.0},
    }
    clients = {client.name: (client.x, client.y) for client in clients_of()}
    Counts.shared.clear()
    if shared:
        with pytest.raises(InputError, match="between clients"):
            sifu.train(spec, run=tmp_path / "run", model=lambda: Counts(True), clients=clients)
        assert not (tmp_path / "run").exists()
        return
    run = sifu.train(spec, run=tmp_path / "run", model=lambda: Counts(False), clients=clients)
    (outcome,) = run.forget([LEAVER], "gone", method="scratch")
    assert outcome.level == "exact"
    names = [premise["name"] for premise in run.certificate("gone").body["premises"]]
    assert {"module", "initial model"} <= set(names)
    assert sifu.audit_run(run).contradictions == ()


def test_a_fresh_copy_has_its_own_closures_and_hooks() -> None:
    pristine = stateful_modules.WithHook()
    first, second = fresh_copy(pristine), fresh_copy(pristine)
    x = 100.0 * torch.rand(4, 64, generator=torch.Generator().manual_seed(0))

    def gradient(module: nn.Module) -> torch.Tensor:
        module.zero_grad()
        module(x).square().sum().backward()  # type: ignore[no-untyped-call]
        weight: Any = next(module.parameters()).grad
        return weight.clone()

    alone = gradient(first)
    (100.0 * first(x)).sum().backward()  # type: ignore[no-untyped-call]
    assert not torch.equal(gradient(first), alone)  # the module remembers earlier calls
    assert torch.equal(gradient(second), alone)
    assert torch.equal(gradient(fresh_copy(pristine)), alone)


def test_what_cannot_be_copied_is_refused_in_a_sentence() -> None:
    module = nn.Linear(2, 2)
    module.opened = (number for number in range(3))  # type: ignore[assignment]
    with pytest.raises(InputError, match=r"the module Linear cannot be copied \(TypeError"):
        fresh_copy(module)


def test_generators_are_put_back() -> None:
    np.random.seed(3)  # noqa: NPY002
    torch.manual_seed(3)
    expected = np.random.random(), torch.rand(1)  # noqa: NPY002
    np.random.seed(3)  # noqa: NPY002
    torch.manual_seed(3)
    with fixed_generators(1):
        drawn = np.random.random()  # noqa: NPY002
    with fixed_generators(1):
        assert np.random.random() == drawn  # noqa: NPY002
    assert (np.random.random(), torch.rand(1)) == expected  # noqa: NPY002
