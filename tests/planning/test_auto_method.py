"""All methods side by side, and `--method auto`: its choice, its record in the ledger, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import sifu
from forged_runs import rebuild_chain
from run_tools import Command, SameNoise, copy_run, query, small_spec, spec_for
from sifu.api import verify_run
from sifu.choices import LEVELS
from sifu.errors import InputError, NotCertifiableError
from sifu.planning.plan import MethodOption, choose_method
from sifu_verifier import verify as verify_independently

PRODUCT = ("sifu", "scratch", "groups", "closed_form")
RUNS: dict[str, dict[str, Any]] = {
    "linear": small_spec(data={"clients": 40}, stop={"target": 0.8, "max_rounds": 60}),
    "groups": spec_for("groups", stop={"target": 0.6, "max_rounds": 30}),
    "closed form": spec_for("closed_form"),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("auto")
    for name, spec in RUNS.items():
        sifu.train(spec, run=folder / name)
    return {name: folder / name for name in RUNS}


ways = st.lists(
    st.builds(
        MethodOption,
        st.sampled_from(["sifu", "scratch", "groups", "closed_form"]),
        st.sampled_from(LEVELS),
        st.one_of(st.none(), st.integers(0, 50)),
    ),
    max_size=4,
    unique_by=lambda way: way.method,
)


@given(ways, st.sampled_from(LEVELS))
def test_auto_never_goes_below_the_level_and_takes_exact_unless_it_needs_twice_the_rounds(
    compared: list[MethodOption], least: Any
) -> None:
    chosen = choose_method(compared, least)
    enough = [way for way in compared if LEVELS.index(way.level) >= LEVELS.index(least)]
    if not enough:
        assert chosen is None
        return
    taken = next(way for way in compared if way.method == chosen)
    assert taken in enough
    cost = {way.method: float("inf") if way.rounds is None else way.rounds for way in enough}
    others = [way for way in enough if way.level != "exact"]
    if taken.level == "exact":
        assert all(cost[taken.method] <= 2 * cost[other.method] for other in others)
        return
    assert all(cost[taken.method] <= cost[other.method] for other in others)
    exact = [way for way in enough if way.level == "exact"]
    assert not exact or max(cost[way.method] for way in exact) > 2 * cost[taken.method]


@given(ways, st.data())
def test_no_prediction_decides_between_ways_that_are_exact(compared: list[MethodOption], data: st.DataObject) -> None:
    other = [MethodOption(way.method, way.level, data.draw(st.integers(0, 99))) for way in compared]
    assert choose_method(compared, "exact") == choose_method(other, "exact")


@pytest.mark.parametrize("name", RUNS)
def test_every_method_is_shown_or_refused_with_a_reason(trained: dict[str, Path], name: str) -> None:
    plan = sifu.open_run(trained[name]).plan(["client-003"])
    assert {way.method for way in plan.ways} == set(PRODUCT)
    assert plan.auto is not None
    assert plan.method in {way.method for way in plan.auto.compared}
    allowed = [way for way in plan.ways if not way.refused]
    levels = [LEVELS.index(way.level) > 0 for way in allowed]
    assert levels == sorted(levels, reverse=True), "certified ones first"


def test_a_named_method_is_planned_alone(trained: dict[str, Path]) -> None:
    plan = sifu.open_run(trained["linear"]).plan(["client-003"], method="scratch")
    assert plan.ways == ()
    assert plan.auto is None


@pytest.mark.parametrize(
    ("name", "least", "method"),
    [
        ("groups", "conditional", "groups"),
        ("groups", "exact", "groups"),
        ("closed form", "conditional", "closed_form"),
        ("linear", "exact", "sifu"),  # sifu goes back to the initial model, which no client influenced
    ],
)
def test_what_auto_takes(trained: dict[str, Path], name: str, least: Any, method: str) -> None:
    plan = sifu.open_run(trained[name]).plan(["client-003"], level=least)
    assert plan.terms.method == method
    assert LEVELS.index(plan.level) >= LEVELS.index(least)


def test_exact_is_chosen_alike_whatever_the_client_holds(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    data = {f"c{k:02d}": (generator.normal(size=(6, 4)), generator.integers(3, size=6)) for k in range(12)}
    spec = {
        "data": {"preprocessing": "fixed"},
        "model": {"outputs": 3},
        "local": {"steps": 2, "rate": 0.1},
        "stop": {"target": 0.0, "max_rounds": 4},
    }
    taken = []
    for scale in (0.0, 1.0, 100.0):
        other = dict(data, c03=(scale * data["c03"][0], data["c03"][1]))
        run = sifu.train(spec, run=tmp_path / f"scale-{scale:g}", clients=other)
        plan = run.plan(["c03"], level="exact")
        taken.append((plan.terms.method, plan.source_node, plan.noise_std))
    assert len(set(taken)) == 1


def test_a_sigma_of_the_request_is_honoured(trained: dict[str, Path], tmp_path: Path) -> None:
    run = sifu.open_run(copy_run(trained["linear"], tmp_path / "run"))
    plan = run.plan(["client-003"], sigma=0.4)
    assert plan.terms.method == "sifu"
    assert plan.noise_std in (0.0, 0.4)
    assert {way.method for way in plan.ways if way.may_be_chosen and not way.refused} == {"sifu"}


def test_nothing_reaches_the_level(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = sifu.train(small_spec(), run=folder, noise=SameNoise())
    with pytest.raises(NotCertifiableError, match="below the required level 'proven'"):
        run.forget(["client-003"], sigma=0.5, level="proven")
    assert "no method reaches" in run.plan(["client-003"], sigma=0.5, level="proven").auto.reason  # type: ignore[union-attr]
    assert run.plan(["client-003"], level="proven").level == "exact", "without a given sigma there is Scratch"
    assert run.request_records() == []


def test_an_unknown_level_is_refused(trained: dict[str, Path]) -> None:
    with pytest.raises(InputError, match="level must be one of exact"):
        sifu.open_run(trained["linear"]).plan(["client-003"], level="certain")  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def chosen_run(trained: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = copy_run(trained["groups"], tmp_path_factory.mktemp("chosen") / "run")
    run = sifu.open_run(folder)
    run.forget(["client-003"], "chosen")
    run.forget(["client-004"], "exactly", level="exact")
    run.forget(["client-005"], "named", method="scratch")
    return folder


def test_the_choice_is_in_the_ledger_and_holds(chosen_run: Path) -> None:
    rows = query(
        chosen_run,
        "SELECT request, method, terms ->> 'method', terms ->> 'level' FROM requests ORDER BY request_order",
    )
    assert [row[2:] for row in rows] == [("auto", None), ("auto", "exact"), ("scratch", None)]
    events = [
        json.loads(text) for (text,) in query(chosen_run, "SELECT payload FROM events WHERE kind = 'rolled back'")
    ]
    assert [payload["choice"]["method"] for payload in events] == [row[1] for row in rows]
    compared = [payload.get("auto", {}) for payload in events]
    assert [auto.get("least_level") for auto in compared] == ["conditional", "exact", None]
    assert not verify_run(chosen_run).problems
    assert not verify_independently(chosen_run)
    outcomes = sifu.open_run(chosen_run).outcomes()
    assert [outcome.method for outcome in outcomes] == [row[1] for row in rows]


def test_the_same_request_again_changes_nothing(chosen_run: Path, tmp_path: Path) -> None:
    run = sifu.open_run(copy_run(chosen_run, tmp_path / "run"))
    assert run.request(["client-004"], "exactly", level="exact") == "exactly"
    with pytest.raises(InputError, match="other terms"):
        run.request(["client-004"], "exactly", method="groups")


def _another_way(payload: dict[str, Any]) -> None:
    for way in payload["auto"]["ways"]:
        if way["method"] == "scratch":
            way["level"], way["rounds"] = "proven", -1.0


def _unrecorded(payload: dict[str, Any]) -> None:
    del payload["auto"]


def _lower_level(payload: dict[str, Any]) -> None:
    payload["auto"]["least_level"] = "none"
    payload["auto"]["ways"] = [{"method": "groups", "level": "exact", "rounds": 0.0}]


@pytest.mark.parametrize("forge", [_another_way, _unrecorded, _lower_level])
def test_control_a_choice_against_the_rule_is_caught(chosen_run: Path, tmp_path: Path, forge: Any) -> None:
    folder = copy_run(chosen_run, tmp_path / "run")
    wanted = "exactly" if forge is _lower_level else "chosen"

    def edit(kind: str, content: dict[str, Any]) -> None:
        if kind == "rolled back" and content["request"] == wanted:
            forge(content)

    rebuild_chain(folder, edit)
    assert any("auto" in problem for problem in verify_run(folder).problems)
    assert any("auto" in problem for problem in verify_independently(folder))


@pytest.mark.parametrize("name", RUNS)
def test_a_plan_fits_a_screen_and_shows_no_unused_noise(trained: dict[str, Path], name: str, cli: Command) -> None:
    asked = ("plan", trained[name], "--clients", "client-003,client-004")
    shown, values = cli(*asked).out, json.loads(cli(*asked, "--format", "json").out)
    assert sum(1 + len(line) // 80 for line in shown.splitlines()) <= 24
    assert ("sigma" in shown) == ("epsilon" in shown) == (values["sigma"] > 0) == (name == "linear")


@pytest.mark.parametrize("name", RUNS)
def test_a_status_names_the_most_influential_clients_where_noise_could_hide_them(
    trained: dict[str, Path], name: str, cli: Command
) -> None:
    run = sifu.open_run(trained[name])
    most = max(run.status().clients, key=lambda client: client.psi)
    shown = cli("status", run.folder).out
    assert ("sigma" in shown.lower()) == ("client-0" in shown) == (name == "linear")
    assert (most.name in shown) == (name == "linear")


def test_the_command_shows_the_table(trained: dict[str, Path], cli: Command) -> None:
    answer = cli("plan", trained["groups"], "--client", "client-003", "--all")
    assert answer.code == 0
    values = json.loads(cli("plan", trained["groups"], "--client", "client-003", "--format", "json").out)
    assert values["chosen"] == values["method"] == "groups"
    assert {way["method"] for way in values["ways"]} == set(PRODUCT)
    assert "closed_form" in {way["method"] for way in values["ways"] if not way["allowed"]}
