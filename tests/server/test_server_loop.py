"""A user's own server loop: it passes replies to sifu, which averages, forgets and certifies."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import sifu
from sifu.core.replies import ReplyGate
from sifu.engines.outside import OutsideFederation
from sifu.errors import InputError, NoClientResponseError, RoundRejectedError
from sifu.requests.client_list import listed_clients

if TYPE_CHECKING:  # a test imports this file in another process
    from run_tools import Command

TARGETS = {f"site-{number}": np.array([number, -2.0 * number, 2.0**number]) for number in range(6)}
SAMPLES = {name: 10 * (place + 1) for place, name in enumerate(TARGETS)}
Replies = dict[str, object]


def spec(**sections: object) -> dict:
    return {
        "local": {"rate": 0.5, "steps": 1},
        "regularity": {"kind": "assumed", "factor": 1.0},
        "stop": {"max_rounds": 5, "target": 0.0},
        **sections,
    }


def answers(task: sifu.server.server_loop.Task) -> Replies:
    """Return the replies of honest clients."""
    if task.kind == "evaluate":
        return {
            name: (SAMPLES[name] // 2, float(np.square(model["w"] - TARGETS[name]).sum()))
            for name, model in task.models.items()
        }
    return {name: {"w": model["w"] + 0.5 * (TARGETS[name] - model["w"])} for name, model in task.models.items()}


def loop(folder: Path, given: dict | None = None, samples: dict | None = None, **options: object) -> sifu.ServerLoop:
    return sifu.ServerLoop(folder, given or spec(), samples or SAMPLES, lambda: {"w": np.zeros(3)}, **options)


def run_to_end(
    folder: Path,
    given: dict | None = None,
    change: Callable[[sifu.server.server_loop.Task, Replies], Replies] = lambda task, replies: replies,
    **options: object,
) -> list[sifu.server.server_loop.Task]:
    tasks = []
    with loop(folder, given, **options) as server:
        while task := server.next():
            tasks.append(task)
            server.take(change(task, answers(task)))
    return tasks


def fedavg(names: list[str], rounds: int) -> np.ndarray:
    """Return the model of these clients alone, computed by hand."""
    model, weights = np.zeros(3), np.array([SAMPLES[name] for name in names], dtype=float)
    for _ in range(rounds):
        model = np.average([model + 0.5 * (TARGETS[name] - model) for name in names], axis=0, weights=weights)
    return model


def released(folder: Path) -> np.ndarray:
    with sifu.open_run(folder).reader() as reader:
        return reader.load_model(reader.tip)


def test_a_client_is_forgotten_as_if_it_never_was(tmp_path: Path) -> None:
    run_to_end(tmp_path / "run")
    np.testing.assert_allclose(released(tmp_path / "run"), fedavg(list(TARGETS), 5), rtol=1e-12)
    run = sifu.open_run(tmp_path / "run")
    run.request(["site-4"], "case-1", method="scratch")
    tasks = run_to_end(tmp_path / "run")
    assert all("site-4" not in task.models for task in tasks)
    (outcome,) = run.outcomes()
    assert outcome.method == "scratch"
    assert outcome.level == "conditional"  # clients are identified by the names that the program gives them
    rest = [name for name in TARGETS if name != "site-4"]
    np.testing.assert_allclose(released(tmp_path / "run"), fedavg(rest, 5), rtol=1e-12)
    assert not np.allclose(fedavg(rest, 5), fedavg(list(TARGETS), 5))  # control: the client had influenced the model
    assert run.verify().holds
    assert sifu.verify(tmp_path / "run/certificates/case-1.public.json").holds


def test_noise_forgets_too_and_clients_may_evaluate(tmp_path: Path) -> None:
    tasks = run_to_end(tmp_path / "run", evaluates=True)
    assert {task.kind for task in tasks} == {"train", "evaluate"}
    run = sifu.open_run(tmp_path / "run")
    assert run.status().accuracy == pytest.approx(0.5)
    run.request(["site-1"], "case-1", method="sifu")
    run_to_end(tmp_path / "run", evaluates=True)
    (outcome,) = run.outcomes()
    assert (outcome.method, outcome.level) == ("sifu", "conditional")
    assert outcome.sigma > 0.0
    assert run.verify().holds


def test_no_partition_gives_two_groups_the_same_model() -> None:
    """No partition gives two groups the same mean, because the next test counts models of groups."""
    names = list(TARGETS)
    for size in range(1, len(names)):
        for group in itertools.combinations(names, size):
            others = [name for name in names if name not in group]
            assert not np.allclose(fedavg(list(group), 1), fedavg(others, 1))


def test_groups_get_their_own_models_in_one_task(tmp_path: Path) -> None:
    given = spec(groups={"count": 2, "rounds": 3})
    tasks = run_to_end(tmp_path / "run", given)
    assert [len(task.models) for task in tasks] == [6] * 5
    run = sifu.open_run(tmp_path / "run")
    with run.reader() as reader:  # the partition into groups is secret
        separate = len({row["grp"] for event in reader.events() for row in event.content.get("group_models", ())})
    assert [len({model["w"].tobytes() for model in task.models.values()}) for task in tasks] == [
        1,
        separate,
        separate,
        1,
        1,
    ]
    run.request(["site-2"], "case-1")
    run_to_end(tmp_path / "run", given)
    assert run.outcomes()[0].method == "groups"
    assert run.verify().holds


BAD: dict[str, object] = {
    "not finite": {"w": np.array([1.0, np.nan, 0.0])},
    "wrong shape": {"w": np.zeros(4)},
    "wrong dtype": {"w": np.zeros(3, dtype=np.float32)},
    "not an array": "no model",
    "too large": {"w": np.full(3, 1e13)},
}


@pytest.mark.parametrize("reason", BAD)
def test_what_cannot_be_used_is_refused_and_recorded(tmp_path: Path, reason: str) -> None:
    def change(task: sifu.server.server_loop.Task, replies: Replies) -> Replies:
        replies.pop("site-5")
        return {**replies, "site-0": BAD[reason], "a stranger": {"w": np.zeros(3)}}

    run_to_end(tmp_path / "run", change=change)
    rest = [name for name in TARGETS if name not in ("site-0", "site-5")]
    np.testing.assert_allclose(released(tmp_path / "run"), fedavg(rest, 5), rtol=1e-12)
    run = sifu.open_run(tmp_path / "run")
    with run.reader() as reader:
        refused = {(row.client, row.reason) for row in reader.rejections()}
        incidents = [event.content["incidents"] for event in reader.events() if event.kind == "incidents"]
    assert refused == {("site-0", reason), ("a stranger", "unknown client")}
    assert {(item["client"], item["what"]) for items in incidents for item in items} == {
        ("site-5", "no reply was submitted")
    }
    assert run.verify().holds


def test_a_refused_reply_stops_the_loop_if_told_so_and_the_round_is_asked_for_again(tmp_path: Path) -> None:
    given = spec(server={"rejected": "stop"})
    with loop(tmp_path / "run", given) as server:
        server.take(answers(server.next()))  # type: ignore[arg-type]
        task = server.next()
        with pytest.raises(RoundRejectedError, match="site-0: not finite"):
            server.take({**answers(task), "site-0": BAD["not finite"]})  # type: ignore[arg-type]
        assert server.next() is None
    (first, *_) = run_to_end(tmp_path / "run")  # the run keeps its settings, even if the spec does not repeat them
    assert (first.branch, first.round) == (0, 1)
    assert sifu.open_run(tmp_path / "run").spec.server.rejected == "stop"
    np.testing.assert_allclose(released(tmp_path / "run"), fedavg(list(TARGETS), 5), rtol=1e-12)


def test_rounds_without_any_reply_end_the_loop_with_a_sentence_and_lose_nothing(tmp_path: Path) -> None:
    with pytest.raises(NoClientResponseError, match="5 rounds in a row were lost"):
        run_to_end(tmp_path / "run", change=lambda task, replies: replies if task.round < 2 else {})
    run_to_end(tmp_path / "run")
    np.testing.assert_allclose(released(tmp_path / "run"), fedavg(list(TARGETS), 5), rtol=1e-12)
    assert sifu.open_run(tmp_path / "run").verify().holds


def test_a_request_that_arrives_while_the_loop_runs_is_ingested_between_two_rounds(tmp_path: Path) -> None:
    with loop(tmp_path / "run") as server:
        for _ in range(2):
            server.take(answers(server.next()))  # type: ignore[arg-type]
        server.run.request(["site-3"], "case-1", method="scratch")
        server.take(answers(server.next()))  # type: ignore[arg-type]
        while task := server.next():
            assert "site-3" not in task.models
            server.take(answers(task))
    assert [outcome.request for outcome in server.run.outcomes()] == ["case-1"]
    assert server.run.verify().holds


@pytest.mark.long
def test_a_loop_that_is_left_or_killed_continues_where_it_was(tmp_path: Path) -> None:
    script = f"""
import os, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_server_loop import *
with loop(Path({str(tmp_path / "run")!r})) as server:
    while task := server.next():
        if task.round == 3:
            os._exit(7)
        server.take(answers(task))
"""
    assert subprocess.run([sys.executable, "-c", script]).returncode == 7
    with loop(tmp_path / "run") as server:
        task = server.next()
        assert task is not None
        assert task is server.next()  # the same task until it is answered
        server.take(answers(task))
    run_to_end(tmp_path / "run")
    np.testing.assert_allclose(released(tmp_path / "run"), fedavg(list(TARGETS), 5), rtol=1e-12)
    run = sifu.open_run(tmp_path / "run")
    assert run.status().rounds == 5
    assert run.verify().holds


def test_what_a_loop_cannot_do_is_said(tmp_path: Path) -> None:
    run_to_end(tmp_path / "run")
    with pytest.raises(InputError, match="clients' data are not those"):
        loop(tmp_path / "run", samples={**SAMPLES, "site-0": 11})
    with pytest.raises(InputError, match=r"stop\.max_rounds"):
        loop(tmp_path / "run", spec(stop={"max_rounds": 6, "target": 0.0}))
    with loop(tmp_path / "run") as server, pytest.raises(InputError, match="no task is open"):
        server.take({})
    with loop(tmp_path / "other") as server:
        task = server.next()
        assert task is not None
        with pytest.raises(ValueError, match="read-only"):
            task.models["site-0"]["w"][0] = 1.0
        with pytest.raises(InputError, match="mapping"):
            server.take([1])  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"sifu\.ServerLoop"):
        sifu.open_run(tmp_path / "run").forget(["site-1"])


@pytest.mark.parametrize(("authenticated", "level"), [(True, "exact"), (False, "conditional")])
def test_scratch_is_exact_if_the_program_authenticated_its_clients(
    tmp_path: Path, authenticated: bool, level: str
) -> None:
    given = spec(data={"preprocessing": "fixed"})
    run_to_end(tmp_path / "run", given, authenticated=authenticated)
    run = sifu.open_run(tmp_path / "run")
    run.request(["site-4"], "case-1", method="scratch")
    run_to_end(tmp_path / "run", given, authenticated=authenticated)
    body = run.certificate("case-1").body
    assert body["level"] == level
    (identity,) = [premise for premise in body["premises"] if premise["name"] == "identity"]
    assert (identity["status"], identity["case"]) == (
        ("trusted", "operator") if authenticated else ("assumed", "claimed")
    )
    assert run.verify().holds
    with pytest.raises(InputError):  # the statement from the start of the run cannot be changed
        loop(tmp_path / "run", given, authenticated=not authenticated)


def test_a_round_that_may_close_early_is_named(tmp_path: Path) -> None:
    given = spec(server={"wait": "50%"})
    run_to_end(tmp_path / "run", given, lambda task, replies: dict(list(replies.items())[:3]))
    with sifu.open_run(tmp_path / "run").reader() as reader:
        assert any("closing a round" in what for what in reader.facts["outside"])
    np.testing.assert_allclose(released(tmp_path / "run"), fedavg(list(TARGETS)[:3], 5), rtol=1e-12)


def test_clients_join_between_rounds_and_when_the_loop_is_started_again(tmp_path: Path) -> None:
    first = {name: SAMPLES[name] for name in list(TARGETS)[:4]}
    with loop(tmp_path / "run", samples=first) as server:
        for _ in range(2):
            server.take(answers(server.next()))  # type: ignore[arg-type]
        server.join("site-4", SAMPLES["site-4"])
        with pytest.raises(InputError, match="site-4 is or was a client"):
            server.join("site-4", 3)
        server.take(answers(server.next()))  # type: ignore[arg-type]
        task = server.next()
        assert task is not None
        assert list(task.models) == [*first, "site-4"]
    (task, *_) = run_to_end(tmp_path / "run")  # now with the sixth client
    assert list(task.models) == list(TARGETS)
    model = np.zeros(3)
    for names in (list(TARGETS)[:4],) * 3 + (list(TARGETS),) * 2:
        weights = [SAMPLES[name] for name in names]
        model = np.average([model + 0.5 * (TARGETS[name] - model) for name in names], axis=0, weights=weights)
    np.testing.assert_allclose(released(tmp_path / "run"), model, rtol=1e-12)
    run = sifu.open_run(tmp_path / "run")
    run.request(["site-5"], "case-1", method="scratch")
    run_to_end(tmp_path / "run")
    np.testing.assert_allclose(released(tmp_path / "run"), fedavg(list(TARGETS)[:5], 5), rtol=1e-12)
    assert run.verify().holds


def test_a_departure_is_recorded_and_holds_after_a_restart(tmp_path: Path, cli: Command) -> None:
    folder = tmp_path / "run"
    with loop(folder) as server:
        server.take(answers(server.next()))  # type: ignore[arg-type]
        server.leave("site-5")  # the loop closes before the next round, and the departure must not be lost
    assert all("site-5" not in task.models for task in run_to_end(folder))
    run = sifu.open_run(folder)
    with run.reader() as reader:
        changes = [event.content["change"] for event in reader.events() if event.kind == "clients changed"]
        assert changes == [{"do": "block", "name": "site-5"}]
    with loop(folder) as server:
        server.leave("site-4")  # no round is open, so it is recorded at once
        server.leave("site-4")
    assert [(entry.name, entry.status) for entry in listed_clients(folder)] == [
        ("site-5", "blocked"),
        ("site-4", "blocked"),
    ]
    assert "site-4" in cli("clients", "list", folder).out
    run.request(["site-0"], "case-1", method="scratch")
    tasks = run_to_end(folder)
    assert {tuple(task.models) for task in tasks} == {("site-1", "site-2", "site-3")}
    np.testing.assert_allclose(released(folder), fedavg(list(tasks[0].models), 5), rtol=1e-12)
    assert cli("clients", "block", folder, "--name", "nobody").code != 0
    assert run.verify().holds


def test_a_client_that_left_is_asked_for_nothing_more(tmp_path: Path) -> None:
    with loop(tmp_path / "run") as server:
        for _ in range(2):
            server.take(answers(server.next()))  # type: ignore[arg-type]
        with pytest.raises(InputError, match="no client 'nobody'"):
            server.leave("nobody")
        server.leave("site-5")
        server.take(answers(server.next()))  # type: ignore[arg-type]
        while task := server.next():
            assert list(task.models) == list(TARGETS)[:5]
            server.take(answers(task))
    model = np.zeros(3)
    for names in (list(TARGETS),) * 3 + (list(TARGETS)[:5],) * 2:
        weights = [SAMPLES[name] for name in names]
        model = np.average([model + 0.5 * (TARGETS[name] - model) for name in names], axis=0, weights=weights)
    np.testing.assert_allclose(released(tmp_path / "run"), model, rtol=1e-12)
    run = sifu.open_run(tmp_path / "run")
    assert run.status().incidents == ()  # it was not asked, so its reply is not missing
    run.request(["site-5"], "case-1", method="scratch")
    run_to_end(tmp_path / "run")
    np.testing.assert_allclose(released(tmp_path / "run"), fedavg(list(TARGETS)[:5], 5), rtol=1e-12)
    assert run.verify().holds


def calls_in_a_round(folder: Path, clients: int, taking_part: int = 40) -> int:
    """Return the fewest function calls of a round with `taking_part` participants among `clients`."""
    given = spec(server={"participation": f"fixed({taking_part})"}, stop={"max_rounds": 25, "target": 0.0})
    counts, names = [0], {f"c{number:04}": 10 for number in range(clients)}

    def count(frame: Any, event: str, argument: Any) -> None:
        counts[-1] += event in ("call", "c_call")

    threading.setprofile(count)  # the loop computes in a thread of its own
    try:
        with sifu.ServerLoop(folder, given, names, lambda: {"w": np.zeros((100, 20))}) as server:
            task = server.next()
            while task:
                assert len(task.models) == taking_part
                counts.append(0)
                server.take({name: {"w": model["w"] + 0.5} for name, model in task.models.items()})
                task = server.next()
    finally:
        threading.setprofile(None)
    return min(counts[1:])


def test_a_round_costs_nearly_the_same_with_ten_times_as_many_clients(tmp_path: Path) -> None:
    """Ten times as many clients need at most 1.2 times as many calls; `benchmarks/many_clients.py` measures seconds."""
    few, many = (calls_in_a_round(tmp_path / str(clients), clients) for clients in (100, 1000))
    assert many <= 1.2 * few
    assert calls_in_a_round(tmp_path / "all", 100, taking_part=100) > 1.5 * few, "the control does more work a round"


def test_a_round_draws_once_and_reads_no_table_of_all_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    draw = OutsideFederation.draw
    monkeypatch.setattr(
        OutsideFederation, "draw", lambda self, setup: drawn.append(setup.position) or draw(self, setup)
    )
    monkeypatch.setattr(ReplyGate, "_index_of", property(lambda gate: pytest.fail("every client's name was read")))
    run_to_end(tmp_path / "run")
    assert [position.round for position in drawn] == [0, 1, 2, 3, 4]
