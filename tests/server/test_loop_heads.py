"""Closed-form heads in a server loop: the bits of a single process, and exact forgetting."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sifu
from sifu.core.closed_form_engine import recorded_fixed_point
from sifu.core.spec import Spec
from sifu.engines.outside import Task
from sifu.errors import InputError, NoClientResponseError
from sifu.run.clients_and_engine import clients_from_spec
from sifu.store.reader import RunReader
from sifu.store.statistics_files import read_statistics
from sifu.theory.closed_form import Statistics

Change = Callable[[Task, dict[str, Any]], dict[str, Any]]


def head_spec(**sections: Any) -> dict[str, Any]:
    """Return a spec with eight clients of a few digits each and a head on random features."""
    usual: dict[str, Any] = {
        "seed": 3,
        "data": {"clients": 8, "samples_per_client": 12, "preprocessing": "fixed"},
        "model": {"kind": "ridge", "outputs": 10},
        "features": {"kind": "random_fourier", "count": 16, "bandwidth": 3.0},
        "server": {"rejected": "reply"},
    }
    return {**usual, **{name: {**usual.get(name, {}), **values} for name, values in sections.items()}}


class Federation:
    """Clients with their own data, the program between them and the loop, and the tasks it passed on."""

    def __init__(self, folder: Path, spec: dict[str, Any], without: tuple[str, ...] = (), **options: Any) -> None:
        data = [client for client in clients_from_spec(Spec.from_mapping(spec)) if client.name not in without]
        self.folder, self.spec, self.options = folder, spec, {"authenticated": True, **options}
        self.shape = np.shape(data[0].x)[1:]
        self.samples = {client.name: len(client.y) for client in data}
        self.clients = {client.name: sifu.LoopClient(client.name, client.x, client.y) for client in data}
        self.tasks: list[Task] = []

    def loop(self) -> sifu.ServerLoop:
        return sifu.ServerLoop(self.folder, self.spec, self.samples, sample_shape=self.shape, **self.options)

    def answers(self, task: Task) -> dict[str, Any]:
        """Return the replies of honest clients; instructions are passed as JSON."""
        told = json.loads(json.dumps(task.instructions))
        return {name: self.clients[name].answer(arrays, told[name]) for name, arrays in task.models.items()}

    def serve(self, change: Change = lambda task, replies: replies) -> list[str]:
        """Pass tasks on until all work is done; return their kinds."""
        self.tasks = []
        with self.loop() as server:
            while task := server.next():
                self.tasks.append(task)
                server.take(change(task, self.answers(task)))
        return [task.kind for task in self.tasks]

    def forget(self, name: str) -> list[str]:
        """Execute a request of one client; return the kinds of its tasks."""
        run = sifu.open_run(self.folder)
        run.request([name], "gone")
        kinds = self.serve()
        assert all(name not in task.models for task in self.tasks)
        (outcome,) = run.outcomes()
        assert (outcome.level, outcome.method) == ("exact", "closed_form")
        assert run.verify().problems == []
        assert sifu.verify(self.folder / "certificates/gone.public.json").holds
        return kinds


def head_of(folder: Path) -> np.ndarray:
    with RunReader(folder) as reader:
        return reader.load_model(reader.tip)


def kept_sum(folder: Path) -> Statistics:
    with RunReader(folder) as reader:
        row = next(row for row in reader.statistics().values() if row.is_sum)
        return read_statistics(folder, row, recorded_fixed_point(Spec.from_mapping(reader.spec), reader.layout))


def refused(folder: Path) -> list[tuple[str, str]]:
    with RunReader(folder) as reader:
        return [(row.client, row.reason) for row in reader.rejections()]


def incidents(folder: Path) -> list[tuple[str, str]]:
    with RunReader(folder) as reader:
        events = [event.content["incidents"] for event in reader.events() if event.kind == "incidents"]
    return [(incident["client"], incident["what"]) for found in events for incident in found]


@pytest.mark.parametrize("masked", [True, False])
def test_a_head_has_the_bits_of_one_process_before_and_after_a_client_is_forgotten(
    tmp_path: Path, masked: bool
) -> None:
    fed = Federation(tmp_path / "run", head_spec(), masked_statistics=masked, evaluates=True)
    kinds = ["prepare", "masked"] if masked else ["statistics"]
    assert fed.serve() == [*kinds, "evaluate"]
    embedded = sifu.train(head_spec(keep={"statistics": "sum"}), run=tmp_path / "embedded")
    assert kept_sum(fed.folder).digest() == kept_sum(tmp_path / "embedded").digest()
    np.testing.assert_array_equal(head_of(fed.folder), head_of(tmp_path / "embedded"))
    assert sifu.open_run(fed.folder).status().accuracy == embedded.status().accuracy
    before = kept_sum(fed.folder).digest()
    assert [kind for kind in fed.forget("client-002") if kind != "evaluate"] == kinds
    embedded.forget(["client-002"], "gone")
    assert kept_sum(fed.folder).digest() == kept_sum(tmp_path / "embedded").digest() != before
    np.testing.assert_array_equal(head_of(fed.folder), head_of(tmp_path / "embedded"))


def test_kept_statistics_forget_without_a_task(tmp_path: Path) -> None:
    fed = Federation(tmp_path / "run", head_spec(keep={"statistics": "clients"}), masked_statistics=False)
    fed.serve()
    assert fed.forget("client-002") == []
    never = Federation(tmp_path / "never", head_spec(), ("client-002",), masked_statistics=False)
    never.serve()
    np.testing.assert_array_equal(head_of(fed.folder), head_of(never.folder))


def test_the_program_of_a_masked_run_never_holds_anybodys_own_statistics(tmp_path: Path) -> None:
    fed, masked, own = Federation(tmp_path / "run", head_spec()), dict[str, np.ndarray](), dict[str, np.ndarray]()

    def seen(task: Task, replies: dict[str, Any]) -> dict[str, Any]:
        if task.kind == "prepare":
            own.update({name: fed.clients[name]._prepared.words.copy() for name in replies})
            assert not any(isinstance(value, np.ndarray) for reply in replies.values() for value in reply.values())
        if task.kind == "masked":
            masked.update({name: reply["masked"] for name, reply in replies.items()})
        return replies

    fed.serve(seen)
    assert own.keys() == masked.keys() == fed.clients.keys()
    for name, words in own.items():
        assert np.count_nonzero(masked[name] == words) < 3  # uniform words agree almost nowhere
    np.testing.assert_array_equal(sum(masked.values()), sum(own.values()))


def test_a_masked_sum_is_repeated_without_a_client_that_went_missing(tmp_path: Path) -> None:
    fed = Federation(tmp_path / "run", head_spec())

    def lose(task: Task, replies: dict[str, Any]) -> dict[str, Any]:
        return {name: reply for name, reply in replies.items() if task.kind == "prepare" or name != "client-003"}

    assert fed.serve(lose)[:4] == ["prepare", "masked"] * 2
    never = Federation(tmp_path / "never", head_spec(), ("client-003",))
    never.serve()
    np.testing.assert_array_equal(head_of(fed.folder), head_of(never.folder))
    assert ("client-003", "no reply was submitted") in incidents(fed.folder)


def test_a_client_masks_once_with_a_key_and_only_with_its_own(tmp_path: Path) -> None:
    fed = Federation(tmp_path / "run", head_spec())
    fed.serve()
    told = next(task for task in fed.tasks if task.kind == "masked").instructions
    with pytest.raises(InputError, match="sent them already"):
        fed.clients["client-001"].answer({}, told["client-001"])
    prepare = next(task for task in fed.tasks if task.kind == "prepare").instructions
    fed.clients["client-001"].answer({}, prepare["client-001"])
    with pytest.raises(InputError, match="do not include this client's key"):
        fed.clients["client-001"].answer({}, told["client-001"])


def changed(reply: dict[str, Any], change: Callable[[np.ndarray], Any]) -> dict[str, Any]:
    return {key: change(value) if isinstance(value, np.ndarray) else value for key, value in reply.items()}


BAD: dict[str, tuple[str, Callable[[dict[str, Any]], Any]]] = {
    "a row less": ("wrong shape", lambda reply: {**reply, "row-features": reply["row-features"][:-1]}),
    "a column less": ("wrong shape", lambda reply: changed(reply, lambda array: array[:, :-1])),
    "no axes": ("wrong shape", lambda reply: changed(reply, lambda array: np.array(array.flat[0]))),
    "floats": ("wrong shape", lambda reply: changed(reply, lambda array: array.astype(float))),
    "short words": ("wrong shape", lambda reply: {**reply, "statistics": np.zeros(3, dtype=np.int64)}),
    "longer than any sample": ("impossible statistics", lambda reply: changed(reply, lambda array: array + (1 << 24))),
    "other features": ("another feature map", lambda reply: {**reply, "features": "0" * 64}),
    "other numbers": ("wrong shape", lambda reply: {**reply, "numbers": "none"}),
    "other samples": ("wrong samples", lambda reply: {**reply, "samples": 13}),
    "lists": ("not an array", lambda reply: changed(reply, lambda array: array.tolist())),
    "text": ("not an array", lambda reply: "no statistics"),
}


@pytest.mark.parametrize("kind", BAD)
def test_statistics_that_cannot_be_used_and_strangers_are_refused_and_recorded(tmp_path: Path, kind: str) -> None:
    reason, change = BAD[kind]
    fed = Federation(tmp_path / "run", head_spec(), masked_statistics=False)

    def hostile(task: Task, replies: dict[str, Any]) -> dict[str, Any]:
        return {**replies, "client-004": change(replies["client-004"]), "a stranger": replies["client-005"]}

    fed.serve(hostile)
    assert refused(fed.folder) == [("client-004", reason)]
    assert incidents(fed.folder) == [("a stranger", "its reply was refused: unknown client")]
    never = Federation(tmp_path / "never", head_spec(), ("client-004",), masked_statistics=False)
    never.serve()
    np.testing.assert_array_equal(head_of(fed.folder), head_of(never.folder))
    assert sifu.open_run(fed.folder).verify().problems == []


@pytest.mark.parametrize("key", ["of low order", "of another client"])
def test_a_key_that_every_client_refuses_does_not_stop_the_masked_sum(tmp_path: Path, key: str) -> None:
    fed = Federation(tmp_path / "run", head_spec())
    bad = ["client-004"] if key == "of low order" else ["client-004", "client-006"]

    def hostile(task: Task, replies: dict[str, Any]) -> dict[str, Any]:
        if task.kind == "prepare" and "client-004" in replies:
            copied = bytes(32).hex() if key == "of low order" else replies["client-006"]["key"]
            replies["client-004"] = {**replies["client-004"], "key": copied}
        return replies

    assert fed.serve(hostile) == ["prepare", "masked"]
    assert refused(fed.folder) == [(name, "not an array") for name in bad]
    never = Federation(tmp_path / "never", head_spec(), tuple(bad))
    never.serve()
    np.testing.assert_array_equal(head_of(fed.folder), head_of(never.folder))
    assert sifu.open_run(fed.folder).verify().problems == []


def test_masked_replies_that_cannot_be_used_are_refused_and_recorded(tmp_path: Path) -> None:
    fed = Federation(tmp_path / "run", head_spec())

    def hostile(task: Task, replies: dict[str, Any]) -> dict[str, Any]:
        if task.kind == "prepare" and "client-004" in replies:
            replies["client-004"] = {**replies["client-004"], "key": "none"}
        if task.kind == "masked" and "client-005" in replies:
            replies["client-005"] = {"masked": replies["client-005"]["masked"][1:]}
        return {**replies, "a stranger": {}}

    fed.serve(hostile)
    assert refused(fed.folder) == [("client-004", "not an array")]
    recorded = {client: what for client, what in incidents(fed.folder) if client}
    assert recorded.keys() == {"client-005", "a stranger"}
    assert "masked words" in recorded["client-005"]
    never = Federation(tmp_path / "never", head_spec(), ("client-004", "client-005"))
    never.serve()
    np.testing.assert_array_equal(head_of(fed.folder), head_of(never.folder))


def test_an_absent_client_is_included_when_the_loop_is_started_again(tmp_path: Path) -> None:
    fed = Federation(tmp_path / "run", head_spec(), masked_statistics=False)
    assert fed.serve(
        lambda task, replies: {name: reply for name, reply in replies.items() if name != "client-006"}
    ) == ["statistics"]
    assert ("client-006", "no reply was submitted") in incidents(fed.folder)
    fed.serve()
    assert [list(task.models) for task in fed.tasks] == [["client-006"]]
    sifu.train(head_spec(), run=tmp_path / "embedded")
    np.testing.assert_array_equal(head_of(fed.folder), head_of(tmp_path / "embedded"))
    with pytest.raises(NoClientResponseError, match="no client sent its statistics"):
        Federation(tmp_path / "silent", head_spec(), masked_statistics=False).serve(lambda task, replies: {})


def test_clients_of_a_head_join_and_leave(tmp_path: Path) -> None:
    fed = Federation(tmp_path / "run", head_spec(), masked_statistics=False)
    samples = dict(fed.samples)
    fed.samples = {name: samples[name] for name in list(samples)[:6]}
    fed.serve()
    fed.samples = samples
    fed.serve()
    assert [list(task.models) for task in fed.tasks] == [["client-006", "client-007"]]
    sifu.train(head_spec(), run=tmp_path / "embedded")
    np.testing.assert_array_equal(head_of(fed.folder), head_of(tmp_path / "embedded"))
    fed.forget("client-007")
    never = Federation(tmp_path / "never", head_spec(), ("client-007",), masked_statistics=False)
    never.serve()
    np.testing.assert_array_equal(head_of(fed.folder), head_of(never.folder))


@pytest.mark.parametrize("authenticated", [True, False])
def test_the_level_rests_on_the_identity_that_the_program_states(tmp_path: Path, authenticated: bool) -> None:
    fed = Federation(tmp_path / "run", head_spec(), authenticated=authenticated)
    fed.serve()
    run = sifu.open_run(fed.folder)
    run.request(["client-002"], "gone")
    fed.serve()
    assert run.outcomes()[0].level == ("exact" if authenticated else "conditional")


def test_what_a_loop_of_heads_cannot_do_is_said(tmp_path: Path) -> None:
    fed = Federation(tmp_path / "run", head_spec())
    with pytest.raises(InputError, match="sample_shape"):
        sifu.ServerLoop(fed.folder, head_spec(), fed.samples)
    with pytest.raises(InputError, match=r"model\.outputs"):
        sifu.ServerLoop(fed.folder, head_spec(model={"outputs": 0}), fed.samples, sample_shape=fed.shape)
    with pytest.raises(InputError, match=r"keep\.statistics.* or set masked_statistics=False"):
        Federation(tmp_path / "run", head_spec(keep={"statistics": "clients"})).loop()
    assert not fed.folder.exists()
    fed.options["masked_statistics"] = False
    fed.serve()
    fed.options["masked_statistics"] = True
    with pytest.raises(InputError, match="was not started with masked statistics"):
        fed.loop()
    cautious = sifu.LoopClient("client-000", np.zeros((2, 64)), np.zeros(2, dtype=int), masked_only=True)
    with pytest.raises(InputError, match="masked statistics only"):
        cautious.answer({}, fed.tasks[0].instructions["client-000"])
    with pytest.raises(InputError, match="unknown task kind 'dance'"):
        cautious.answer({}, {**fed.tasks[0].instructions["client-000"], "kind": "dance"})


def test_masked_before_may_be_checked_one_by_one_now(tmp_path: Path) -> None:
    fed = Federation(tmp_path / "run", head_spec())
    fed.serve()
    fed.options["masked_statistics"] = False
    assert fed.forget("client-002") == ["statistics"]


def test_a_server_loop_and_its_clients_need_no_flower() -> None:
    script = "import sys; sys.modules['flwr'] = None; import sifu; sifu.ServerLoop, sifu.LoopClient"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0
    control = "import sys; sys.modules['flwr'] = None; import sifu.engines.flower.client"
    assert subprocess.run([sys.executable, "-c", control], capture_output=True).returncode != 0
