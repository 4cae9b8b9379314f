"""Networks that groups tune over Flower's messages: forgetting takes no round and leaves other groups' networks
unchanged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flower_federation import HASTY, small_spec
from flower_heads import head_of, kept_sum, last_solve, sound
from flwr.app import Array, ArrayRecord, Message
from served_runs import Federation, new_key
from texts.small_model import save_text_model

import public_backbone
import sifu
from sifu.core.allowed_code import ALLOWED_CODE
from sifu.core.closed_form_engine import recorded_blocks
from sifu.core.replies import Wait
from sifu.core.spec import Spec
from sifu.data import ClientData
from sifu.engines import ready
from sifu.engines.flower.client import client_app
from sifu.engines.flower.wire import (
    ARRAYS,
    MASKED_TRAIN,
    NETWORK,
    PREPARE,
    PREPARE_STATISTICS,
    SEND_MASKED_STATISTICS,
    STATISTICS,
    TRAIN,
)
from sifu.errors import NoClientResponseError
from sifu.requests.client_list import ask_for_change, fingerprint_of_file
from sifu.run.clients_and_engine import clients_from_spec
from sifu.store.reader import RunReader
from sifu.store.writer import RunWriter
from sifu.theory.closed_form.blocks import drop
from sifu.theory.merging import group_of

MODULE, ADAPTED = "public_backbone:make", "public_backbone:make_with_adapter"


def tuned_spec(tune: str = "blocks", **sections: Any) -> Spec:
    """Return a spec with eight clients of a few digits each; three groups tune a backbone of twelve features."""
    sifu.allow_code(MODULE, ADAPTED)
    usual: dict[str, Any] = {
        "model": {"kind": "ridge", "outputs": 10},
        "features": {"kind": "module", "module": MODULE, "tune": tune, "block": 4},
        "ridge": {"regularisation": 0.01},
        "groups": {"count": 3, "rounds": 2, "rebuild": "never"},
        "local": {"rate": 0.05, "steps": 2, "momentum": 0.9},
        "server": {"rejected": "reply"},
        "data": {"preprocessing": "fixed"},
        "keep": {"statistics": "clients"},
        "privacy": {"noise": "seeded"},
    }
    return small_spec(**{name: usual.get(name, {}) | sections.get(name, {}) for name in usual.keys() | sections.keys()})


def plain(folder: Path, spec: Spec, **settings: Any) -> Federation:
    return Federation(folder, spec, masked_statistics=False, **settings)


def kind_of(message: Message) -> str:
    return message.metadata.message_type


def trainings(fed: Federation) -> dict[str, int]:
    """Count the messages of each kind of training that were sent."""
    return dict(Counter(kind for kind in map(kind_of, fed.grid.sent) if kind.startswith("train")))


def forget(fed: Federation, name: str) -> None:
    """Execute a request of one client; afterwards `grid.sent` contains only the messages of this request."""
    run = sifu.open_run(fed.run_folder)
    run.request([name], "gone")
    fed.grid.sent.clear()
    assert fed.serve() == ["gone"]
    assert name not in fed.contacted()
    (outcome,) = run.outcomes()
    assert (outcome.level, outcome.method) == ("exact", "closed_form")
    sound(fed.run_folder)


def networks_of(folder: Path) -> dict[int, np.ndarray]:
    """Return the kept tuned network of each group."""
    with RunReader(folder) as reader:
        kept = reader.models()
        return {row.grp: reader.load_model(node) for node, row in reader.group_models().items() if node in kept}


def group_of_client(folder: Path, name: str, count: int = 3) -> int:
    with RunReader(folder) as reader:
        return group_of(bytes.fromhex(reader.value("group_key")), name, count)


def incidents_of(folder: Path) -> list[tuple[str, str]]:
    with RunReader(folder) as reader:
        events = [event.content["incidents"] for event in reader.events() if event.kind == "incidents"]
    return [(incident["client"], incident["what"]) for incidents in events for incident in incidents]


def refusals_of(folder: Path) -> list[tuple[str, str]]:
    with RunReader(folder) as reader:
        rows = [row for event in reader.events() for row in event.content.get("refusals", ())]
    return [(row["client"], row["reason"]) for row in rows]


@pytest.mark.parametrize("sections", [{}, {"local": {"batch": 5}}])
def test_rounds_apart_are_those_of_the_embedded_engine(tmp_path: Path, sections: dict) -> None:
    spec = tuned_spec(**sections)
    fed = plain(tmp_path, spec)
    fed.serve()
    assert trainings(fed) == {TRAIN: 2 * 8, STATISTICS: 8}
    sifu.train(spec, run=tmp_path / "embedded")
    on_flower, embedded = networks_of(fed.run_folder), networks_of(tmp_path / "embedded")
    assert on_flower.keys() == embedded.keys() == {0, 1, 2}
    for group, vector in on_flower.items():
        np.testing.assert_array_equal(vector, embedded[group])
    np.testing.assert_array_equal(head_of(fed.run_folder), head_of(tmp_path / "embedded"))
    sound(fed.run_folder)


def test_a_server_loop_tunes_and_solves_the_same_bits(tmp_path: Path) -> None:
    spec = tuned_spec(groups={"rounds": 1})
    fed = plain(tmp_path / "flower", spec)
    fed.serve()
    clients = {client.name: sifu.LoopClient(client.name, client.x, client.y) for client in fed.data}
    samples, shape = {client.name: len(client.y) for client in fed.data}, fed.data[0].x.shape[1:]
    with sifu.ServerLoop(tmp_path / "loop", spec, samples, sample_shape=shape, masked_statistics=False) as loop:
        while task := loop.next():
            loop.take({name: clients[name].answer(task.models[name], task.instructions[name]) for name in task.models})
    tuned = networks_of(tmp_path / "loop")
    for group, vector in networks_of(fed.run_folder).items():
        np.testing.assert_array_equal(vector, tuned[group])
    np.testing.assert_array_equal(head_of(fed.run_folder), head_of(tmp_path / "loop"))


def test_blocks_forget_without_a_round_and_are_those_of_a_federation_without_the_client(tmp_path: Path) -> None:
    fed = plain(tmp_path / "run", tuned_spec())
    fed.serve()
    leaver = fed.data[2]
    forget(fed, leaver.name)
    assert trainings(fed) == {}
    never = plain(tmp_path / "never", tuned_spec(), data=[client for client in fed.data if client is not leaver])
    never.serve()
    group = group_of_client(fed.run_folder, leaver.name)
    networks, others = networks_of(fed.run_folder), networks_of(never.run_folder)
    assert networks.keys() == {0, 1, 2} - {group}
    for kept, vector in networks.items():
        np.testing.assert_array_equal(vector, others[kept])
    with RunReader(never.run_folder) as reader:
        blocks = recorded_blocks(Spec.from_mapping(reader.spec), reader.layout)
    whole = kept_sum(never.run_folder)
    assert kept_sum(fed.run_folder) == drop(whole, blocks, {group})
    # negative control: in the counterfactual the client's group still has a network
    assert kept_sum(fed.run_folder) != whole


@pytest.mark.parametrize("masked", [False, True])
def test_a_merge_forgets_in_one_round_of_statistics(tmp_path: Path, masked: bool) -> None:
    spec = tuned_spec("merge", groups={"stretch": 1.5}, keep={"statistics": "sum" if masked else "clients"})
    fed = Federation(tmp_path, spec, masked_statistics=masked)
    fed.serve()
    forget(fed, fed.data[2].name)
    kinds = (PREPARE_STATISTICS, SEND_MASKED_STATISTICS) if masked else (STATISTICS,)
    assert trainings(fed) == dict.fromkeys(kinds, 7)
    # Only the merge is sent, not the networks it was made of, and only to clients that compute with it.
    for message in fed.grid.sent:
        carried = [name for name in message.content if name.startswith(NETWORK)]
        assert carried == ([] if kind_of(message) in (SEND_MASKED_STATISTICS, "query.sifu_profile") else ["network-0"])
    members = [client for client in fed.data if client.name != fed.data[2].name]
    expected = sifu.train(spec, run=tmp_path / "embedded")
    expected.forget([fed.data[2].name], "gone")
    assert last_solve(fed.run_folder)["samples"] == sum(len(client.y) for client in members)
    np.testing.assert_array_equal(head_of(fed.run_folder), head_of(tmp_path / "embedded"))


def test_masked_updates_and_statistics_forget_exactly(tmp_path: Path) -> None:
    spec = tuned_spec(groups={"count": 2}, keep={"statistics": "sum"})
    fed = Federation(tmp_path / "masked", spec, masked_updates=True)
    fed.serve()
    assert trainings(fed) == {
        PREPARE: 2 * 8, MASKED_TRAIN: 2 * 8, PREPARE_STATISTICS: 8, SEND_MASKED_STATISTICS: 8,
    }  # fmt: skip
    clear = plain(tmp_path / "clear", spec)
    clear.serve()
    hidden, seen = networks_of(fed.run_folder), networks_of(clear.run_folder)
    for group, vector in hidden.items():
        np.testing.assert_allclose(vector, seen[group], rtol=0, atol=1e-5)
    forget(fed, fed.data[2].name)
    assert trainings(fed) == {PREPARE_STATISTICS: 7, SEND_MASKED_STATISTICS: 7}


@pytest.mark.parametrize("masked", [False, True])
def test_a_network_that_was_dropped_is_tuned_again_and_asked_for_once(tmp_path: Path, masked: bool) -> None:
    spec = tuned_spec(groups={"rebuild": "now"}, keep={"statistics": "sum" if masked else "clients"})
    fed = Federation(tmp_path, spec, masked_statistics=masked)
    fed.serve()
    name = fed.data[2].name
    run = sifu.open_run(fed.run_folder)
    run.request([name], "gone")
    fed.grid.sent.clear()
    assert fed.serve() == ["gone"]
    group = group_of_client(fed.run_folder, name)
    rest = sum(group_of_client(fed.run_folder, client.name) == group for client in fed.data if client.name != name)
    kinds = (PREPARE_STATISTICS, SEND_MASKED_STATISTICS) if masked else (STATISTICS,)
    solves = 2 if masked else 1  # without clients' separate statistics the forget itself needs a round
    assert trainings(fed) == {TRAIN: 2 * rest} | dict.fromkeys(kinds, 7 * solves)
    assert networks_of(fed.run_folder).keys() == {0, 1, 2}
    assert np.any(kept_sum(fed.run_folder).gram != drop_of(fed.run_folder, group))
    sound(fed.run_folder)


def drop_of(folder: Path, group: int) -> np.ndarray:
    """Return the kept Gram matrix without a group's block."""
    with RunReader(folder) as reader:
        blocks = recorded_blocks(Spec.from_mapping(reader.spec), reader.layout)
    return drop(kept_sum(folder), blocks, {group}).gram


@pytest.mark.parametrize(
    ("module", "trainable", "tuned"), [(MODULE, "all", 492), (MODULE, "4", 444), (ADAPTED, "4.down,4.up", 96)]
)
def test_only_what_is_tuned_travels(tmp_path: Path, module: str, trainable: str, tuned: int) -> None:
    """Messages contain only the tuned parameters, not the whole network; adapters are one case."""
    fed = plain(tmp_path, tuned_spec(features={"module": module, "trainable": trainable}))
    fed.serve()
    size = 4 * (tuned + 12 * 10 + 10)  # plus a last layer that is discarded
    network = public_backbone.make_with_adapter() if module == ADAPTED else public_backbone.make()
    assert tuned <= sum(parameter.numel() for parameter in network.parameters())
    for message in (*fed.grid.sent, *fed.grid.received):
        carried = {
            name: sum(array.numpy().nbytes for array in record.values())
            for name, record in message.content.array_records.items()
        }
        if kind_of(message) == TRAIN:
            assert carried == {ARRAYS: size}
        for name, length in carried.items():
            assert not name.startswith(NETWORK) or length == size
    forget(fed, fed.data[2].name)
    assert trainings(fed) == {}


def test_a_node_runs_no_network_that_it_was_not_told_to_trust(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fed = plain(tmp_path, tuned_spec())
    ready.received_map.cache_clear()
    ready.head_of.cache_clear()
    monkeypatch.setenv(ALLOWED_CODE, "")
    with pytest.raises(NoClientResponseError, match="is code and was not run"):
        fed.serve()


def arrays_changed(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Message], None]:
    def edit(reply: Message) -> None:
        arrays = {name: Array(change(array.numpy())) for name, array in reply.content[ARRAYS].items()}
        reply.content[ARRAYS] = ArrayRecord(arrays)

    return edit


@pytest.mark.parametrize(
    ("reason", "change"),
    [("not finite", arrays_changed(lambda array: array * np.nan)), ("wrong shape", arrays_changed(np.ravel))],
)
def test_a_network_that_cannot_be_used_is_refused_and_the_run_is_that_of_the_others(
    tmp_path: Path, reason: str, change: Callable[[Message], None]
) -> None:
    fed = plain(tmp_path / "run", tuned_spec())
    hostile, node = fed.data[2].name, fed.nodes[fed.data[2].name]

    def answer(message: Message) -> Message:
        reply = fed.grid.answer(message)
        if kind_of(message) == TRAIN:
            change(reply)
        return reply

    fed.grid.trouble[node] = answer
    fed.serve()
    assert refusals_of(fed.run_folder) == [(hostile, reason)] * 2
    silent = plain(tmp_path / "silent", tuned_spec())
    silent.grid.trouble[node] = lambda message: None if kind_of(message) == TRAIN else silent.grid.answer(message)
    silent.serve()
    assert [(client, "no answer" in what) for client, what in incidents_of(silent.run_folder)] == [(hostile, True)] * 2
    for group, vector in networks_of(fed.run_folder).items():
        np.testing.assert_array_equal(vector, networks_of(silent.run_folder)[group])
    forget(fed, hostile)
    assert trainings(fed) == {}


def test_a_node_that_never_returns_is_absent_and_one_with_another_key_does_not_replace_it(tmp_path: Path) -> None:
    fed = plain(tmp_path, tuned_spec())
    gone, leaver = fed.data[5].name, fed.data[2].name
    stranger = fed.grid.apps[fed.nodes[gone]]

    def replaced() -> None:
        """Remove the node after the first separate round, and add one with another key."""
        del fed.grid.apps[fed.nodes[gone]]
        fed.grid.add(77, stranger, new_key(tmp_path, "stranger")[1])

    fed.serve({("separate groups", 1): replaced})
    assert "stranger" not in fed.contacted()
    assert (gone, "its node is not there") in incidents_of(fed.run_folder)
    assert last_solve(fed.run_folder)["absent"] == [5]
    forget(fed, leaver)
    assert "stranger" not in fed.contacted()
    ask_for_change(
        fed.run_folder, {"do": "replace", "name": gone, "key": fingerprint_of_file(tmp_path / "stranger.pub")}
    )
    fed.grid.sent.clear()
    fed.serve()
    # with its new key on the list it is the same client again, and part of the next head
    assert fed.contacted() >= {"stranger"}
    assert "absent" not in last_solve(fed.run_folder)
    sound(fed.run_folder)


def test_a_straggler_is_late_in_rounds_apart_and_in_the_head(tmp_path: Path) -> None:
    fed = plain(tmp_path, tuned_spec(server={"wait": "60%"}))
    late = fed.data[2].name
    fed.grid.trouble[fed.nodes[late]] = lambda message: None if kind_of(message) == TRAIN else fed.grid.answer(message)
    fed.serve(patience=replace(HASTY, wait=Wait.parse("60%")))
    assert (late, True) in [(client, what.startswith("late")) for client, what in incidents_of(fed.run_folder)]
    assert "absent" not in last_solve(fed.run_folder)  # it was late for two rounds but sent its statistics
    sound(fed.run_folder)


class KilledError(Exception):
    """Error that stands for a kill."""


def killed() -> None:
    raise KilledError


@pytest.mark.parametrize("place", [("separate groups", 1), ("statistics", 3)])
def test_a_run_that_is_killed_goes_on_to_the_same_bits(tmp_path: Path, place: tuple[str, int]) -> None:
    fed, whole = plain(tmp_path / "run", tuned_spec()), plain(tmp_path / "whole", tuned_spec())
    with pytest.raises(KilledError):
        fed.serve({place: killed})
    assert sifu.open_run(fed.run_folder).verify().problems == []
    fed.serve()
    whole.serve()
    assert kept_sum(fed.run_folder) == kept_sum(whole.run_folder)
    np.testing.assert_array_equal(head_of(fed.run_folder), head_of(whole.run_folder))
    sound(fed.run_folder)


@pytest.mark.parametrize("event", ["request planned", "rolled back", "rounds"])
def test_a_server_that_is_killed_in_a_forget_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, event: str
) -> None:
    fed = plain(tmp_path, tuned_spec())
    fed.serve()
    whole = kept_sum(fed.run_folder)
    sifu.open_run(fed.run_folder).request([fed.data[2].name], "gone")
    usual = RunWriter._record

    def record(self: RunWriter, kind: str, *rest: Any) -> Any:
        recorded = usual(self, kind, *rest)
        if kind == event:
            killed()  # before any commit
        return recorded

    with monkeypatch.context() as patched:
        patched.setattr(RunWriter, "_record", record)
        with pytest.raises(KilledError):
            fed.serve()
    sound(fed.run_folder)
    fed.grid.sent.clear()
    assert fed.serve() == ["gone"]
    assert trainings(fed) == {}
    assert kept_sum(fed.run_folder) != whole
    sound(fed.run_folder)


def test_a_client_that_joins_later_touches_statistics_only(tmp_path: Path) -> None:
    everyone = list(clients_from_spec(tuned_spec()))
    fed, newcomer = plain(tmp_path, tuned_spec(), data=everyone[:-1]), everyone[-1]
    fed.serve()
    before = networks_of(fed.run_folder)
    path, pem = new_key(tmp_path, newcomer.name)
    own = ready.ReadyClient(newcomer.name, newcomer.x, newcomer.y)
    fed.grid.add(77, client_app(lambda context: own), pem)
    fed.nodes[newcomer.name] = 77
    ask_for_change(fed.run_folder, {"do": "add", "name": newcomer.name, "key": fingerprint_of_file(path)})
    fed.grid.sent.clear()
    fed.serve()
    assert trainings(fed) == {STATISTICS: 1}
    networks = networks_of(fed.run_folder)
    assert all(np.array_equal(networks[group], before[group]) for group in before)
    forget(fed, newcomer.name)
    assert trainings(fed) == {}
    assert networks_of(fed.run_folder).keys() == before.keys()  # the newcomer was in no group during tuning


def test_adapters_of_a_language_model_are_tuned_forgotten_and_all_that_travels(tmp_path: Path) -> None:
    sifu.allow_code("public_backbone:make_language")
    features = {"module": "public_backbone:make_language", "trainable": "mix.down,mix.up"}
    spec = tuned_spec(features=features, groups={"count": 2}, model={"outputs": 3})
    texts = []
    for number in range(4):
        generator = np.random.default_rng(number)
        texts.append(ClientData(f"site-{number}", generator.integers(0, 17, (30, 6)), generator.integers(0, 3, 30)))
    fed = plain(tmp_path, spec, data=texts)
    fed.serve()
    with RunReader(fed.run_folder) as reader:
        adapters = reader.group_layout.size
    assert adapters == 2 * 2 * 8 + 8 * 3 + 3  # with a last layer that is discarded; the model has 240 parameters
    for message in (*fed.grid.sent, *fed.grid.received):
        if kind_of(message) == TRAIN:
            assert sum(array.numpy().size for array in message.content[ARRAYS].values()) == adapters
    forget(fed, "site-1")
    assert trainings(fed) == {}


WORDS = ("good", "bad", "fine", "poor", "film", "book", "very", "the")


def reviews(number: int) -> ready.ReadyClient:
    """Return twelve short reviews of one site as strings, with their verdicts."""
    drawn = np.random.default_rng(number)
    y = np.arange(12) % 2
    texts = [f"the {drawn.choice(WORDS[4:6])} very {WORDS[2 * drawn.integers(2) + 1 - label]}" for label in y]
    return ready.ReadyClient(f"site-{number}", texts, y)


def language_spec(model: Path, **features: Any) -> Spec:
    """Return a spec in which two groups tune adapters of a transformer that reads at most eight tokens."""
    chosen = {"kind": "transformers", "model": str(model), "size": 8, "module": "", "trainable": "lora(2)"}
    return tuned_spec(features=chosen | features, groups={"count": 2}, model={"outputs": 2})


def test_four_nodes_tune_adapters_of_a_transformer_on_their_texts(tmp_path: Path) -> None:
    """Texts stay on the nodes, adapters are sent, and the run equals the embedded engine's run on the same texts."""
    pytest.importorskip("transformers")
    spec = language_spec(save_text_model(tmp_path / "model", WORDS))
    sites = [reviews(number) for number in range(4)]
    fed = plain(tmp_path / "flower", spec, data=sites)
    fed.serve()
    assert trainings(fed) == {TRAIN: 2 * 4, STATISTICS: 4}
    with RunReader(fed.run_folder) as reader:
        adapters, size = reader.group_layout.names, reader.group_layout.size
    assert sum("lora_b" in name for name in adapters) == 2 * 6  # six linear layers in each of two blocks
    for message in (*fed.grid.sent, *fed.grid.received):
        if kind_of(message) == TRAIN:
            assert sum(array.numpy().size for array in message.content[ARRAYS].values()) == size
    given = {site.name: (site.x, site.y) for site in sites}
    sifu.train(spec, run=tmp_path / "embedded", clients=given)
    sifu.train(spec, run=tmp_path / "other", clients=given | {"site-1": (reviews(7).x, sites[1].y)})
    group = group_of_client(fed.run_folder, "site-1", count=2)
    networks, other = networks_of(fed.run_folder), networks_of(tmp_path / "other")
    for tuned, vector in networks_of(tmp_path / "embedded").items():
        np.testing.assert_allclose(networks[tuned], vector, rtol=0, atol=1e-5)
    assert np.abs(networks[group] - other[group]).max() > 1e-4  # different texts give different adapters
    np.testing.assert_array_equal(head_of(fed.run_folder), head_of(tmp_path / "embedded"))
    forget(fed, "site-1")
    assert trainings(fed) == {}
    assert networks_of(fed.run_folder).keys() == {0, 1} - {group}
