"""Method groups: the run and its counterfactual agree to the last bit, in sequences, with negative controls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sifu
import sifu_verifier
from run_tools import copy_run, query, small_spec
from sifu.core.certificate_words import words_of
from sifu.core.engine import Engine, Position
from sifu.errors import InputError
from sifu.store.projection import NewEvent
from sifu.store.reader import JOINED
from sifu.store.writer import RunWriter
from sifu.theory.merging import members_by_group, merge, move_on

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("same_groups")]

COUNT, SEPARATE, COMMON = 4, 3, 5
SPEC = small_spec(
    groups={"count": COUNT, "rounds": SEPARATE},
    local={"steps": 3, "rate": 0.05},
    stop={"target": 0.0, "max_rounds": COMMON},
)

Clients = dict[str, tuple[np.ndarray, np.ndarray]]


def some_clients(count: int = 12, seed: int = 0, outputs: int = 3, more: int = 0) -> Clients:
    rng, sizes = np.random.default_rng(seed), [8 + k % 3 + more for k in range(count)]
    return {
        f"client-{k:03d}": (rng.normal(size=(size, 6)), rng.integers(0, outputs, size=size))
        for k, size in enumerate(sizes)
    }


def own_spec(**sections: Any) -> dict[str, Any]:
    return {
        **SPEC,
        "data": {"preprocessing": "fixed"},
        "model": {"kind": "softmax", "outputs": 3},
        "stop": {"target": 0.0, "max_rounds": COMMON},
    } | sections


def tip_model(run: sifu.Run) -> np.ndarray:
    with run.reader() as reader:
        return reader.load_model(reader.tip)


def groups_of(run: sifu.Run, names: list[str]) -> dict[str, int]:
    with run.reader() as reader:
        key = bytes.fromhex(reader.value("group_key"))
    members = members_by_group(key, names, range(len(names)), COUNT)
    return {names[client]: group for group, clients in enumerate(members) for client in clients}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("groups") / "run"
    sifu.train(SPEC, run=folder)
    return folder


@pytest.fixture
def own(trained: Path, tmp_path: Path) -> sifu.Run:
    return sifu.open_run(copy_run(trained, tmp_path / "own"))


PASSES: dict[str, dict[str, Any]] = {
    "linear, all": {},
    "linear, poisson": {"server": {"participation": "poisson(0.5)"}, "local": {"steps": 3, "rate": 0.05, "batch": 4}},
    "momentum, float32": {
        "local": {"steps": 3, "rate": 0.05, "momentum": 0.9},
        "model": {"kind": "softmax", "outputs": 3, "dtype": "float32"},
    },
    "network": {
        "model": {"kind": "mlp", "outputs": 3, "dtype": "float32"},
        "regularity": {"kind": "assumed"},
        "local": {"steps": 2, "rate": 0.05, "momentum": 0.9, "batch": 4},
    },
}


@pytest.mark.parametrize("name", PASSES)
def test_run_and_counterfactual_give_the_same_model_bit_for_bit(tmp_path: Path, name: str) -> None:
    """The remaining model depends neither on the leavers' data nor on their presence."""
    spec, clients = own_spec(**PASSES[name]), some_clients()
    leaving = ["client-010", "client-011"]
    # The leavers have far more samples than the others, and another number of them in the counterfactual.
    clients |= {client: some_clients(1, seed, more=more)["client-000"] for seed, (client, more) in
                enumerate(zip(leaving, (32, 61), strict=True))}  # fmt: skip
    other = some_clients(seed=99, more=20)
    counterfactuals = [clients, clients | {client: other[client] for client in leaving}]
    models = []
    for number, counterfactual in enumerate(counterfactuals):
        run = sifu.train(spec, run=tmp_path / str(number), clients=counterfactual)
        before = tip_model(run)
        (outcome,) = run.forget(leaving, method="groups")
        assert outcome.level == "exact"
        assert run.verify().problems == []
        models.append((before, tip_model(run)))
    assert not np.array_equal(models[0][0], models[1][0]), "before the request their data are in the model"
    assert np.array_equal(models[0][1], models[1][1])
    run = sifu.open_run(tmp_path / "0", clients=clients)
    never = never_had_them(run, spec, clients, leaving)
    assert np.array_equal(models[0][1], never)


def never_had_them(run: sifu.Run, spec: dict[str, Any], clients: Clients, leaving: list[str]) -> np.ndarray:
    """Train a federation without the leavers by a separate program; they are last, so other numbers stay the same."""
    names = list(clients)
    group = groups_of(run, names)
    hit = {group[name] for name in leaving}
    rest = {name: data for name, data in clients.items() if name not in leaving}
    engine = sifu.train(spec, run=run.folder.with_name("never"), clients=rest).engine()
    models, samples = [], []
    for number in sorted(set(group.values()) - hit):
        members = np.array([k for k, name in enumerate(rest) if group[name] == number])
        models.append(rounds(engine, engine.initial_model(0), members, 0, SEPARATE).astype(np.float64))
        samples.append(sum(len(rest[names[k]][1]) for k in members))
    mean, fresh = merge(models, samples), engine.initial_model(0).astype(np.float64)
    merged = move_on(mean, fresh).astype(engine.layout.dtype)
    return rounds(engine, merged, np.arange(len(rest)), 1, COMMON)


def rounds(engine: Engine, model: np.ndarray, members: np.ndarray, branch: int, count: int) -> np.ndarray:
    for place in range(count):
        model = engine.run_round(model, Position(branch, place), members).model
    return model


def test_a_hit_group_left_in_is_told_apart(tmp_path: Path) -> None:
    """Negative control: with the leaver's group in the merge, run and counterfactual differ."""
    clients, leaving = some_clients(), "client-011"
    counterfactuals = [clients, clients | {leaving: some_clients(seed=99)[leaving]}]
    merged = []
    for number, counterfactual in enumerate(counterfactuals):
        run = sifu.train(own_spec(), run=tmp_path / str(number), clients=counterfactual)
        with run.reader() as reader:
            rows = reader.group_models().values()
            merged.append(merge([reader.load_model(row.node) for row in rows], [row.samples for row in rows]))
    assert not np.array_equal(*merged)


@pytest.mark.parametrize("rule", ["hash of names", "balanced labels", "rounds by accuracy"])
def test_grouping_and_rounds_must_not_follow_from_data(tmp_path: Path, rule: str) -> None:
    """Negative controls: groups balanced by label, or rounds until all are predicted well, change the merge."""
    rng = np.random.default_rng(3)
    clients = {name: (x, np.argmax(x[:, :3], axis=1)) for name, (x, _) in some_clients(24).items()}
    clients["client-023"] = (rng.normal(size=(200, 6)), rng.integers(0, 3, size=200))
    names, models, hit = list(clients), [], -1
    for there in (24, 23):
        counterfactual = {name: clients[name] for name in names[:there]}
        run = sifu.train(own_spec(), run=tmp_path / str(there), clients=counterfactual)
        engine, everyone = run.engine(), np.arange(there)
        by_name = groups_of(run, names)
        group = {client: by_name[names[client]] for client in range(there)}
        if rule == "balanced labels":  # dealt out in order of the mean label
            order = sorted(range(there), key=lambda client: float(clients[names[client]][1].mean()))
            group = {client: place % COUNT for place, client in enumerate(order)}
        separate = SEPARATE
        if rule == "rounds by accuracy":
            model, separate = engine.initial_model(0), 0
            while separate < 60 and engine.evaluate(model, everyone).accuracy < 0.7:
                model, separate = rounds(engine, model, everyone, 7 + separate, 1), separate + 1
        hit = group.get(23, hit)
        parts, samples = [], []
        for number in sorted(set(range(COUNT)) - {hit}):
            members = np.array([client for client in range(there) if group[client] == number])
            parts.append(rounds(engine, engine.initial_model(0), members, 0, separate).astype(np.float64))
            samples.append(sum(len(clients[names[client]][1]) for client in members))
        models.append(merge(parts, samples))
    assert np.array_equal(*models) == (rule == "hash of names")


def test_hit_groups_are_erased_and_built_again_without_the_leavers(own: sifu.Run) -> None:
    with own.reader() as reader:
        leaver = next(min(row.members) for row in reader.group_models().values() if len(row.members) > 1)
    own.forget([f"client-{leaver:03d}"], method="groups")
    rows = query(own.folder, "SELECT g.node, g.grp, g.members FROM group_models g JOIN models USING (node)")
    assert sorted(row[1] for row in rows) == sorted({row[1] for row in rows})
    assert all(str(leaver) not in row[2].strip("[]").split(",") for row in rows)
    (again,) = query(own.folder, "SELECT COUNT(*) FROM nodes WHERE kind = 'group' AND branch = -1")[0]
    assert again == 1
    with own.reader() as reader:
        on_disk = reader.models()
        erased = [node for node, row in reader.group_models().items() if leaver in row.members]
    assert erased
    assert not set(erased) & set(on_disk)
    assert own.verify().problems == []


def test_a_merge_bounds_nobody_and_touches_no_stranger(own: sifu.Run) -> None:
    """Psi through a merge is infinite for members of merged groups and zero for the forgotten client."""
    own.forget(["client-001"], method="groups")
    psi = {client.name: client.psi for client in own.status().clients}
    assert psi["client-001"] == 0.0
    assert max(psi.values()) == np.inf


def test_a_client_that_joins_belongs_to_the_group_of_its_name(tmp_path: Path) -> None:
    """A newcomer takes part in common rounds at once, and in its group's model when the group is next built."""
    everyone = some_clients(13)
    founders = {name: everyone[name] for name in list(everyone)[:12]}
    newcomer = sifu.train(own_spec(), run=tmp_path / "all", clients=everyone).engine().clients[12]
    sifu.train(own_spec(), run=tmp_path / "run", clients=founders)
    with RunWriter.open(tmp_path / "run") as writer:
        writer.record(NewEvent(JOINED, {"client": newcomer.name}, joined=newcomer))
    run = sifu.open_run(tmp_path / "run", clients=everyone)
    group = groups_of(run, list(everyone))
    leaver = next(name for name in founders if group[name] == group[newcomer.name])
    (outcome,) = run.forget([leaver], method="groups")
    assert outcome.level == "exact"
    (members,) = query(run.folder, "SELECT members FROM group_models ORDER BY node DESC LIMIT 1")[0]
    assert 12 in json.loads(members)
    assert run.verify().problems == []


@pytest.mark.parametrize(
    ("groups", "more", "words"),
    [
        ({"count": 1, "rounds": 2}, {}, "groups.count must be in 2"),
        ({"count": 2, "rounds": 8}, {}, "below stop.max_rounds"),
        ({"count": 2, "rounds": 2}, {"server": {"participation": "fixed(3)"}}, "poisson"),
        ({"count": 2}, {}, "groups.rounds must be at least 1"),
    ],
)
def test_specs_that_cannot_be_are_refused(groups: dict[str, Any], more: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        sifu.Spec.from_mapping(small_spec(groups=groups, **more))


def test_the_fresh_model_outlasts_scratch_and_a_purge(own: sifu.Run, tmp_path: Path) -> None:
    """The fresh model is kept after Scratch and a purge, because groups start from it and merges are scaled from it."""
    own.forget(["client-002"], "from-scratch", method="scratch")
    body = json.loads((own.folder / "certificates" / "from-scratch.public.json").read_text())["body"]
    said = words_of(body).remains
    assert len(own.status().models) > 1, "models of groups that never held the client lie on disk"
    assert "the models of groups that never included the client remain" in said
    assert "No model from before" not in said
    own.purge()
    assert 0 in [model.node for model in own.status().models]
    plan = own.plan(["client-004"], method="groups")
    assert "moved on from the fresh model by 1.25" in plan.notes[0]
    own.forget(["client-004"], method="groups", retention="strict")
    assert own.verify().problems == []
    assert sifu_verifier.verify(own.folder) == []
    own.backup(tmp_path / "backup.tar")
    bodies = [json.loads(path.read_bytes())["body"] for path in own.folder.glob("certificates/*.public.json")]
    said = [premise.statement for body in bodies for premise in words_of(body).premises]
    assert sum("was multiplied by 1.25, which was also fixed before training" in statement for statement in said) == 1


def test_a_run_without_groups_refuses_the_method(tmp_path: Path) -> None:
    run = sifu.train(small_spec(stop={"target": 0.0, "max_rounds": 1}), run=tmp_path / "run")
    with pytest.raises(InputError, match="this run has none"):
        run.forget(["client-000"], method="groups")
