"""Levels of requests: both verifiers agree, for any spec and any recorded facts.

sifu records a few small runs. Copies of them get other facts and other keys of the spec, and each verifier recomputes
the level of every request from the same copy.
"""

from __future__ import annotations

import json
import random
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest

import sifu
import sifu.core.premises
import sifu_verifier.levels
import sifu_verifier.requests
from run_tools import copy_run
from sifu.core.spec import Spec
from sifu.errors import InputError
from sifu.requests.certification import RecordedRequest
from sifu.store.reader import RunReader
from sifu.theory import facts as fact
from sifu_verifier.ledger import check_ledger
from sifu_verifier.run_folder import RunFolder

pytestmark = pytest.mark.long

SMALL: dict[str, Any] = {
    "data": {"clients": 12, "samples_per_client": 6},
    "local": {"steps": 2},
    "stop": {"target": 0.0, "max_rounds": 4},
    "requests": {"approval": "none"},
}
RUNS: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "rounds": (
        {"server": {"participation": "poisson(0.5)"}},
        [{"sigma": 0.5}, {"sigma": 0.01}, {"method": "scratch"}],
    ),
    "from a trained model": (
        {"server": {"participation": "poisson(0.3)"}},
        [{"client": client, "sigma": 1e-4} for client in (5, 2)],
    ),
    "records": ({"local": {"rate": 0.05}}, [{"sigma": 0.5, "records": [1]}, {"method": "scratch", "records": [2]}]),
    "groups": (
        {"groups": {"count": 3, "rounds": 2}, "local": {"rate": 0.05}},
        [{"method": "groups"}, {"sigma": 0.3}, {"method": "scratch"}],
    ),
    "closed form": ({"model": {"kind": "ridge"}, "stop": {}, "local": {}}, [{}, {"records": [1]}]),
}
FACTS: dict[str, list[Any]] = {
    "dtype": ["float64", "float32"],
    "smooth_model": [True, False],
    "rounding_bounded": [True, False],
    "participation": ["all", "poisson(0.5)", "fixed(3)"],
    "preprocessing": [fact.FIXED_CONSTANTS, fact.DECLARED_FIXED, fact.UNKNOWN],
    "shape_from_labels": [False, True],
    "identity": [fact.IN_PROCESS, fact.AUTHENTICATED, fact.BY_OPERATOR, fact.CLAIMED, fact.UNKNOWN],
    "initial": [fact.DRAWN_FROM_SEED, fact.MADE_BY_OPERATOR, fact.UNKNOWN],
    "features": ["", "ab" * 32],
    "features_declared": [False, True],
    "module": ["", fact.MODULE_KNOWN, f"{fact.MODULE_DECLARED}net:make", fact.MODULE_NOT_DECLARED],
    "engine": [
        fact.BY_PARTICIPANTS, fact.ON_A_GPU, fact.ON_A_REPEATING_GPU, fact.ON_NODES,
        fact.UNKNOWN,
    ],
    "outside": [
        [], ["dropout"], ["a minimum of 3 answers a round"], [fact.CLOSED_EARLY], [fact.DROPPED_MASKED_ROUND],
        [fact.MASKED_STATISTICS], [fact.BUFFERS, fact.CLOSED_EARLY],
    ],
}  # fmt: skip
"""Values of the facts that premises depend on; the first value allows the most."""
ROOMS = {"number": [0.0, 0.01, 0.3, 1.0, 3.0, 50.0], "count": [0, 1, 2, 5, 20], "text": ["", "row", "hospitals"]}


@pytest.fixture(scope="module", params=RUNS)
def recorded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a run of each kind with its requests."""
    changes, requests = RUNS[request.param]
    spec = SMALL | {name: SMALL.get(name, {}) | section if section else {} for name, section in changes.items()}
    run = sifu.train(spec, run=tmp_path_factory.mktemp("levels") / "run")
    names = [client.name for client in run.engine().clients]
    for number, terms in enumerate(requests):
        given = {"client": number} | terms
        run.forget([names[given.pop("client")]], level="none", **given)
    return run.folder


def spec_keys() -> dict[str, list[Any]]:
    """Return every key of a spec with a few values of its type."""
    found = {}
    for section, kind in get_type_hints(Spec).items():
        if section == "seed":
            continue
        for name, hint in get_type_hints(kind).items():
            parts = [hint] if get_origin(hint) is Literal or not get_args(hint) else list(get_args(hint))
            values: list[Any] = [value for part in parts if get_origin(part) is Literal for value in get_args(part)]
            values += (
                ROOMS["number"] * (float in parts) + ROOMS["count"] * (int in parts) + ROOMS["text"] * (str in parts)
            )
            found[f"{section}.{name}"] = values + [False, True] * (bool in parts)
    return found


def changed(mapping: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    """Return a spec with one key changed."""
    section, key = name.split(".")
    return mapping | {section: mapping[section] | {key: value}}


def vary(folder: Path, dice: random.Random) -> dict[str, Any]:
    """Change a few facts and keys of the spec in a run's table; return the changes."""
    said: dict[str, Any] = {}
    with closing(sqlite3.connect(folder / "run.db")) as db, db:
        table = dict(db.execute("SELECT key, value FROM run WHERE key IN ('facts', 'spec', 'asked')").fetchall())
        facts, spec, asked = (json.loads(table[name]) for name in ("facts", "spec", "asked"))
        for name in dice.sample(sorted(FACTS), dice.choice([0, 1, 1, 2, 4])):
            facts[name] = said[name] = FACTS[name][0] if dice.random() < 0.3 else dice.choice(FACTS[name])
        keys = spec_keys()
        for name in dice.sample(sorted(keys), dice.choice([0, 1, 2, 3])):
            value = dice.choice(keys[name] or [""])
            other = changed(spec, name, value)
            try:
                same_regime = type(Spec.from_mapping(other).regime) is type(Spec.from_mapping(spec).regime)
            except InputError:
                continue
            if same_regime:
                spec, said[name] = other, value
        if dice.random() < 0.3:
            said["asked.local.rate"] = asked["local"]["rate"] = dice.choice(["auto", 0.05])
        if dice.random() < 0.3:
            said["asked.groups.count"] = asked.setdefault("groups", {})["count"] = dice.choice([0, 3])
        for name, content in (("facts", facts), ("spec", spec), ("asked", asked)):
            db.execute("UPDATE run SET value = ? WHERE key = ?", (json.dumps(content), name))
    return said


def first_levels(folder: Path) -> dict[str, str]:
    """Return the level of each request according to sifu."""
    with closing(RunReader(folder)) as reader:
        return {row.request: RecordedRequest(reader, row).level for row in reader.requests()}


def second_levels(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Return the level of each request according to the independent verifier."""
    found: dict[str, str] = {}

    def note(run: RunFolder, request: dict[str, Any], *rest: Any) -> str:
        found[request["request"]] = level = sifu_verifier.levels.level_of(run, request, *rest)
        return level

    monkeypatch.setattr(sifu_verifier.requests, "level_of", note)
    run = RunFolder(folder)
    check_ledger(run)
    sifu_verifier.requests.check_requests(run)
    return found


def pairs(folder: Path, to: Path, seeds: range, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Any, Any]]:
    """Yield random changes with the levels of both verifiers."""
    for seed in seeds:
        copy = copy_run(folder, to / str(seed))
        said = vary(copy, random.Random(seed))
        yield said, first_levels(copy), second_levels(copy, monkeypatch)


def test_both_verifiers_agree_on_the_level(recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random facts and keys give the same level in both verifiers, and more than one level overall."""
    seen = set()
    for said, first, second in pairs(recorded, tmp_path, range(150), monkeypatch):
        assert first == second, said
        seen |= set(first.values())
    assert len(seen) > 1


@pytest.mark.parametrize("recorded", ["from a trained model"], indirect=True)
def test_a_premise_that_one_verifier_lacks_is_found(
    recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: without the premise on rounds that close early, the verifiers disagree."""
    monkeypatch.setattr(sifu.core.premises, "decides_rounds", lambda what: what.startswith("a minimum of"))
    assert any(first != second for _, first, second in pairs(recorded, tmp_path, range(150), monkeypatch))
