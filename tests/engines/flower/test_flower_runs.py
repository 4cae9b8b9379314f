"""Whole runs over Flower's messages: the same as embedded, requests while it runs, identities, and kills."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from deployment import make_node_key
from flower_federation import HASTY, grid_of, small_spec
from flwr.app import Message, MetricRecord, RecordDict
from memory_grid import MemoryGrid

import sifu
from sifu.choices import Level
from sifu.core.spec import Spec, commented_toml
from sifu.engines.flower.exchange import Patience
from sifu.engines.flower.ready import ReadyClient
from sifu.engines.flower.wire import EVALUATE_SEVERAL, TRAIN
from sifu.errors import InputError, NoClientResponseError
from sifu.requests.client_list import ask_for_change, fingerprint_of_file, listed_clients, run_id
from sifu.requests.messages import sign_request
from sifu.run.clients_and_engine import clients_from_spec
from sifu.run.rehearsal import RECOVERED, REHEARSED
from sifu.run.run_view import RunView
from sifu.run.training import Progress, track_everyone
from sifu.server import flower_app as flower_server
from sifu.server.flower_app import Settings, serve_on_flower
from sifu.store.writer import RunWriter
from sifu.theory.regularity import largest_certified_rate
from sifu.theory.tracking import client_increments


def new_key(folder: Path, name: str) -> tuple[Path, bytes]:
    """Make a node's key pair as ssh-keygen does: the .pub file, and the PEM that SuperLink knows the node by."""
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    key = ec.generate_private_key(ec.SECP384R1()).public_key()
    path = folder / f"{name}.pub"
    path.write_bytes(key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH))
    return path, key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


class Federation:
    """Nodes with keys, their list, and the server's settings."""

    def __init__(
        self, folder: Path, spec: Spec, *, keyed: bool = True, data: list | None = None, **settings: object
    ) -> None:
        folder.mkdir(exist_ok=True)
        self.folder, self.run_folder, self.spec = folder, folder / "run", spec
        self.data = list(clients_from_spec(spec)) if data is None else data
        self.grid: MemoryGrid = grid_of(self.data)
        self.nodes = dict(zip([client.name for client in self.data], self.grid.apps, strict=True))
        (folder / "spec.toml").write_text(commented_toml(spec))
        if keyed:
            for client in self.data:
                path, pem = new_key(folder, client.name)
                self.grid.keys[self.nodes[client.name]] = pem
                ask_for_change(self.run_folder, {"do": "add", "name": client.name, "key": fingerprint_of_file(path)})
        self.settings = Settings(str(self.run_folder), str(folder / "spec.toml"), not keyed, wait=0.2, **settings)  # type: ignore[arg-type]

    def serve(
        self,
        at_round: dict[tuple[str, int], object] | None = None,
        level: Level | None = None,
        patience: Patience = HASTY,
    ) -> list[str]:
        """Run the server; `at_round` maps (phase, rounds) to what happens right after that round."""
        waiting = dict(at_round or {})

        def progress(update: Progress) -> None:
            act = waiting.pop((update.phase, update.rounds), None)
            if act:
                act()  # type: ignore[operator]

        return serve_on_flower(self.grid, self.settings, patience=patience, progress=progress, level=level)

    def contacted(self) -> set[str]:
        """Return the clients that were sent anything since the grid's list was last cleared."""
        names = {node: name for name, node in self.nodes.items()}
        return {names.get(message.metadata.dst_node_id, "stranger") for message in self.grid.sent}


SPEC = small_spec(data={"clients": 12, "samples_per_client": 12}, stop={"max_rounds": 14, "target": 0.0})


def psi_of(folder: Path, node: int | None = None) -> np.ndarray:
    """Return Psi of everybody at a node."""
    reader = sifu.open_run(folder).reader()
    try:
        view = RunView(reader, tip=node)
        return track_everyone(view).total(np.arange(len(view.clients)))
    finally:
        reader.close()


@pytest.mark.parametrize("sections", [{}, {"server": {"participation": "poisson(0.7)"}, "local": {"batch": 5}}])
def test_the_same_problem_gives_the_same_psi_node_and_model(tmp_path: Path, sections: dict) -> None:
    spec = small_spec(
        data={"clients": 12, "samples_per_client": 12, "preprocessing": "fixed"},
        stop={"max_rounds": 14, "target": 0.0},
        privacy={"sigma": 0.12},
        **sections,
    )
    flower = Federation(tmp_path, spec)
    assert flower.serve() == []
    embedded = sifu.train(spec, run=tmp_path / "embedded")
    np.testing.assert_allclose(psi_of(flower.run_folder), psi_of(tmp_path / "embedded"), rtol=1e-6)
    name = flower.data[3].name
    plan, expected = sifu.open_run(flower.run_folder).plan([name]), embedded.plan([name])
    assert (plan.source_node, plan.wanted_node, plan.level) == (
        expected.source_node, expected.wanted_node, expected.level,
    )  # fmt: skip
    assert 0 < plan.source_node < 14
    assert plan.level == "proven"
    assert plan.noise_std == pytest.approx(expected.noise_std, rel=1e-9)
    a, b = (sifu.open_run(folder).reader() for folder in (flower.run_folder, tmp_path / "embedded"))
    for node in (0, plan.source_node, a.tip):
        np.testing.assert_allclose(a.load_model(node), b.load_model(node), rtol=0, atol=1e-11)
    a.close()
    b.close()
    assert sifu.open_run(flower.run_folder).verify().problems == []


AUTO = small_spec(
    data={"clients": 12, "samples_per_client": 12, "preprocessing": "fixed"}, stop={"max_rounds": 14, "target": 0.8}
)


@pytest.mark.parametrize("method", ["sifu", "noise_here"])
def test_an_automatic_sigma_is_planned_as_on_the_embedded_engine(tmp_path: Path, method: str) -> None:
    flower = Federation(tmp_path, AUTO)
    flower.serve()
    embedded = sifu.train(AUTO, run=tmp_path / "embedded")
    name = flower.data[3].name
    plan, expected = (
        run.plan([name], method=method, epsilon=30.0) for run in (sifu.open_run(flower.run_folder), embedded)
    )
    assert plan.noise_std > 0.0
    assert plan.noise_std == pytest.approx(expected.noise_std, rel=1e-9)
    assert (plan.source_node, plan.predicted_rounds, plan.predicted_interval, plan.scratch_rounds, plan.level) == (
        expected.source_node, expected.predicted_rounds, expected.predicted_interval, expected.scratch_rounds,
        expected.level,
    )  # fmt: skip
    assert [(option.depth, option.predicted_rounds, option.predicted_interval) for option in plan.options] == [
        (option.depth, option.predicted_rounds, option.predicted_interval) for option in expected.options
    ]


def test_the_rehearsal_is_one_message_to_each_client_and_says_what_the_embedded_one_says(tmp_path: Path) -> None:
    flower = Federation(tmp_path, AUTO)
    flower.serve()
    several = [message for message in flower.grid.sent if message.metadata.message_type == EVALUATE_SEVERAL]
    assert sorted(message.metadata.dst_node_id for message in several) == sorted(flower.nodes.values())
    on_flower, expected = rehearsed(flower.run_folder), rehearsed(sifu.train(AUTO, run=tmp_path / "embedded").folder)
    assert len(on_flower) == len(expected) == 3
    np.testing.assert_allclose(on_flower, expected, rtol=1e-12)


LONGER = replace(AUTO, stop=replace(AUTO.stop, max_rounds=24, target=0.0))


@pytest.mark.parametrize("masked", [False, True])
def test_rounds_are_rehearsed_as_on_the_embedded_engine(tmp_path: Path, masked: bool) -> None:
    flower = Federation(tmp_path, LONGER, masked_updates=masked)
    flower.serve()
    on_flower, expected = recovered(flower.run_folder), recovered(sifu.train(LONGER, run=tmp_path / "embedded").folder)
    assert list(on_flower) == list(expected)
    assert len(on_flower) == 4
    # Masked updates are rounded to whole numbers.
    np.testing.assert_allclose(list(on_flower.values()), list(expected.values()), rtol=1e-5 if masked else 1e-12)
    assert sifu.open_run(flower.run_folder).verify().problems == []


@pytest.mark.parametrize("answer", ["once", "always", "wrong"])
def test_who_does_not_rehearse_rounds_holds_up_nobody(tmp_path: Path, answer: str) -> None:
    flower = Federation(tmp_path, LONGER)
    victim, late_messages = list(flower.nodes.values())[2], []

    def trouble(message: Message) -> Message | None:
        reply = flower.grid.answer(message)
        if message.metadata.message_type != TRAIN or int(message.content["config"]["round"]) < 24:  # type: ignore[call-overload, arg-type]
            return reply
        late_messages.append(message)
        if answer == "wrong":
            return Message(RecordDict({"metrics": MetricRecord({"num-examples": 3})}), reply_to=message)
        return None if answer == "always" or len(late_messages) == 2 else reply

    flower.grid.trouble[victim] = trouble
    flower.serve()
    assert late_messages
    run = sifu.open_run(flower.run_folder)
    assert run.status().phase == "ready"
    # Missing from one of the three it spoils the comparison; missing from all of them it is simply not there.
    assert len(recovered(flower.run_folder)) == (0 if answer == "once" else 4)
    assert run.plan([flower.data[3].name]).noise_std >= 0.0


def recovered(folder: Path) -> dict[tuple[str, bool], tuple[float, float, float]]:
    """Return samples, accuracy and loss after rehearsed rounds, by their number and whether there was noise."""
    reader = sifu.open_run(folder).reader()
    rows = [evaluation for evaluation in reader.evaluations() if evaluation.subset.startswith(RECOVERED)]
    reader.close()
    places = [row.subset.removeprefix(RECOVERED).split(":") for row in rows]
    return {
        (rounds, float(sigma) > 0.0): (row.samples, row.accuracy, row.loss)
        for (rounds, sigma), row in zip(places, rows, strict=True)
    }


def rehearsed(folder: Path) -> list[tuple[float, float, float, float]]:
    """Return sigma, samples, accuracy and loss of the rehearsal."""
    reader = sifu.open_run(folder).reader()
    rows = [evaluation for evaluation in reader.evaluations() if evaluation.subset.startswith(REHEARSED)]
    reader.close()
    return [(float(row.subset.removeprefix(REHEARSED)), row.samples, row.accuracy, row.loss) for row in rows]


@pytest.mark.parametrize("answer", ["silence", "nonsense", "too few", "not a number"])
def test_who_does_not_rehearse_holds_up_nobody(tmp_path: Path, answer: str) -> None:
    flower = Federation(tmp_path, AUTO)
    victim, everybody = list(flower.nodes.values())[2], list(flower.nodes.values())

    def trouble(message: Message) -> Message | None:
        reply = flower.grid.answer(message)
        if message.metadata.message_type != EVALUATE_SEVERAL:
            return reply
        if answer == "silence":
            return None
        records = {
            "nonsense": MetricRecord({"num-examples": 3, "loss": 0.1}),
            "too few": MetricRecord({"num-examples": [12] * 5, "correct": [1] * 5, "loss-sum": [0.0] * 5}),
            "not a number": MetricRecord({"num-examples": [math.nan] * 6, "correct": [1] * 6, "loss-sum": [0.0] * 6}),
        }
        return Message(RecordDict({"metrics": records[answer]}), reply_to=message)

    flower.grid.trouble[victim] = trouble
    flower.serve()
    assert [row[1] for row in rehearsed(flower.run_folder)] == [11 * 12] * 3
    reader = sifu.open_run(flower.run_folder).reader()
    told = [json.loads(event.payload)["incidents"] for event in reader.events() if event.kind == "incidents"]
    reader.close()
    assert [incident["client"] for many in told for incident in many] == [flower.data[2].name]
    # If no client rehearses, training is done all the same; plans then rest on the law.
    other = Federation(tmp_path / "other", AUTO)
    other.grid.trouble = dict.fromkeys(everybody, trouble)
    flower.grid.apps = other.grid.apps
    flower.grid.contexts.clear()  # its nodes keep the head of the first run there, and refuse another one
    other.serve()
    assert rehearsed(other.run_folder) == []
    assert sifu.open_run(other.run_folder).plan([other.data[3].name]).noise_std >= 0.0


def test_requests_that_arrive_while_it_trains_are_carried_out_and_training_goes_on(tmp_path: Path) -> None:
    fed = Federation(tmp_path, replace(SPEC, model=replace(SPEC.model, outputs=10)))
    names = [client.name for client in fed.data]

    def ask(client: str, id: str | None) -> None:
        fed.grid.sent.clear()
        other = sifu.open_run(fed.run_folder)
        posted = other.request([client], id)
        assert other.request_status(posted) == "posted"
        assert posted == (id or posted)
        assert other.request([client], posted) == posted  # the same again changes nothing
        with pytest.raises(InputError, match="other terms"):
            other.request([names[9]], posted)

    done = fed.serve(
        {
            ("training", 4): lambda: ask(names[2], "first"),
            ("retraining first", 3): lambda: ask(names[5], None),
        }
    )
    assert len(done) == 2
    assert done[0] == "first"
    run = sifu.open_run(fed.run_folder)
    outcomes = run.outcomes()
    assert [outcome.clients for outcome in outcomes] == [(names[2],), (names[5],)]
    assert {outcome.level for outcome in outcomes} <= {"proven", "exact", "conditional"}
    assert run.verify().problems == []
    assert not list((fed.run_folder / "inbox").iterdir())
    for path in (fed.run_folder / "certificates").iterdir():
        assert sifu.api.verify_certificate(path).problems == []
    # From the moment the second request was ingested, neither was spoken to.
    assert fed.contacted() <= set(names) - {names[2], names[5]}
    reader = run.reader()
    kinds = [event.kind for event in reader.events()]
    reader.close()
    assert kinds.index("rolled back") < len(kinds) - 1 - kinds[::-1].index("request received")
    # Also after a restart, with the nodes still there, and with a fresh key of the forgotten party.
    _, fresh = new_key(tmp_path, "fresh")
    fed.grid.add(1234, fed.grid.apps[fed.nodes[names[2]]], fresh)
    fed.grid.sent.clear()
    run.request([names[7]], "third")
    assert fed.serve() == ["third"]
    assert fed.contacted() == set(names) - {names[2], names[5], names[7]}
    assert sifu.open_run(fed.run_folder).verify().problems == []


def test_a_letter_outlives_its_server_and_counts_once(tmp_path: Path) -> None:
    fed = Federation(tmp_path, SPEC)
    names = [client.name for client in fed.data]

    class KilledError(Exception):
        pass

    def die() -> None:
        sifu.open_run(fed.run_folder).request([names[1]], "late")
        raise KilledError

    with pytest.raises(KilledError):
        fed.serve({("training", 3): die})
    assert [path.name for path in (fed.run_folder / "inbox").iterdir()] == ["request.late.json"]
    message = (fed.run_folder / "inbox" / "request.late.json").read_bytes()
    assert fed.serve() == ["late"]
    # As if the kill had come between the event and the deletion: the message is there again.
    (fed.run_folder / "inbox" / "request.late.json").write_bytes(message)
    assert fed.serve() == []
    assert len(sifu.open_run(fed.run_folder).outcomes()) == 1
    assert sifu.open_run(fed.run_folder).verify().problems == []


def test_a_letter_that_cannot_be_received_is_refused_and_recorded(tmp_path: Path) -> None:
    fed = Federation(tmp_path, SPEC)
    fed.serve()
    inbox = fed.run_folder / "inbox"
    inbox.mkdir(exist_ok=True)
    (inbox / "request.broken.json").write_bytes(b"{")
    (inbox / "mischief.x.json").write_bytes(b"{}")
    assert fed.serve() == []
    assert not list(inbox.iterdir())
    reader = sifu.open_run(fed.run_folder).reader()
    refused = [json.loads(event.payload)["letter"] for event in reader.events() if event.kind == "letter refused"]
    reader.close()
    assert sorted(refused) == ["broken", "x"]
    assert sifu.open_run(fed.run_folder).verify().problems == []


def test_certified_runs_refuse_without_keys_and_demos_are_capped(tmp_path: Path) -> None:
    fed = Federation(tmp_path, SPEC, keyed=False)
    strict = replace(fed.settings, insecure_identity=False)
    with pytest.raises(InputError, match="sifu clients add"):
        serve_on_flower(fed.grid, strict, patience=HASTY)
    assert not (fed.run_folder / "run.db").exists()
    fed.settings = replace(fed.settings, clients=12)
    fed.serve()
    run = sifu.open_run(fed.run_folder)
    name = fed.data[0].name
    for method in ("sifu", "scratch"):
        plan = run.plan([name], method=method)
        assert plan.level == "conditional"
        assert any(premise.name == "identity" and premise.status == "assumed" for premise in plan.premises)
    with pytest.raises(InputError, match="sifu clients add"):
        serve_on_flower(fed.grid, strict, patience=HASTY)


def test_a_server_without_tls_is_refused(tmp_path: Path) -> None:
    fed = Federation(tmp_path, SPEC)
    fed.grid._insecure = True  # type: ignore[attr-defined]
    with pytest.raises(InputError, match="--insecure"):
        fed.serve()


def test_unknown_and_blocked_keys_take_no_part(tmp_path: Path) -> None:
    fed = Federation(tmp_path, SPEC)
    names = [client.name for client in fed.data]
    _, stranger = new_key(tmp_path, "stranger")
    fed.grid.add(4321, fed.grid.apps[fed.nodes[names[0]]], stranger)
    fed.serve({("training", 5): lambda: ask_for_change(fed.run_folder, {"do": "block", "name": names[4]})})
    assert "stranger" not in fed.contacted()
    reader = sifu.open_run(fed.run_folder).reader()
    part = reader.participation()
    rounds_of = {client: int((part.clients == client).sum()) for client in range(12)}
    reader.close()
    assert rounds_of[4] == 5
    assert {count for client, count in rounds_of.items() if client != 4} == {14}
    assert sifu.open_run(fed.run_folder).verify().problems == []


def test_the_list_of_clients_changes_only_as_it_may(tmp_path: Path) -> None:
    fed = Federation(tmp_path, SPEC)
    names = [client.name for client in fed.data]
    other, pem = new_key(tmp_path, "other")
    key = fingerprint_of_file(other)
    taken = listed_clients(fed.run_folder)[0].key
    with pytest.raises(InputError, match="belongs to"):
        ask_for_change(fed.run_folder, {"do": "add", "name": "new", "key": taken})
    with pytest.raises(InputError, match="--replace"):
        ask_for_change(fed.run_folder, {"do": "add", "name": names[0], "key": key})
    fed.serve()
    assert not (fed.run_folder / "clients.json").exists()
    assert [client.name for client in listed_clients(fed.run_folder)] == names
    sifu.open_run(fed.run_folder).request([names[1]], "one")
    with pytest.raises(InputError, match="asked to be forgotten"):
        ask_for_change(fed.run_folder, {"do": "replace", "name": names[1], "key": key})
    ask_for_change(fed.run_folder, {"do": "replace", "name": names[3], "key": key})
    fed.grid.sent.clear()
    assert fed.serve() == ["one"]
    assert names[3] not in fed.contacted()  # its node still holds the old key
    fed.grid.keys[fed.nodes[names[3]]] = pem
    sifu.open_run(fed.run_folder).request([names[2]], "two")
    assert fed.serve() == ["two"]
    assert names[3] in fed.contacted()
    assert sifu.open_run(fed.run_folder).verify().problems == []


def joined_federation(folder: Path, phase: str = "training", third: object = None) -> tuple[Federation, str]:
    """Make a run of eleven clients that a twelfth joins after the fifth round, its node a little later."""
    spec = replace(SPEC, data=replace(SPEC.data, preprocessing="fixed"))
    fed = Federation(folder, spec)
    late = fed.data[11].name
    node, app = fed.nodes[late], fed.grid.apps.pop(fed.nodes[late])
    pem = fed.grid.keys[node]
    (folder / "run" / "clients.json").unlink()
    for client in fed.data[:11]:
        ask_for_change(
            fed.run_folder,
            {"do": "add", "name": client.name, "key": fingerprint_of_file(folder / f"{client.name}.pub")},
        )

    def add() -> None:
        key = fingerprint_of_file(folder / f"{late}.pub")
        assert not ask_for_change(fed.run_folder, {"do": "add", "name": late, "key": key})

    fed.serve({("training", 3): third, (phase, 5): add, (phase, 7): lambda: fed.grid.add(node, app, pem)})
    return fed, late


def test_a_client_joins_later_and_takes_part_from_then_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flower_server, "LOOK_FOR_NEWCOMERS", 0.0)
    first = "client-000"

    def forget_first() -> None:
        sifu.open_run(tmp_path / "run").request([first], "early")

    fed, late = joined_federation(tmp_path, "retraining early", forget_first)
    run = sifu.open_run(fed.run_folder)
    reader = run.reader()
    assert [client.name for client in reader.clients()] == [client.name for client in fed.data]
    assert len(reader.joined()) == 1
    part = reader.participation()
    took_part = set(part.nodes[part.clients == 11].tolist())
    recorded, rate = reader.clients(), reader.facts["local_rate"]
    kinds = [event.kind for event in reader.events()]
    reader.close()
    assert kinds.count("client joined") == 1
    # The request was executed while there were eleven, and its certificate still says what it said then.
    assert run.outcomes()[0].clients == (first,)
    assert took_part
    assert run.verify().problems == []
    for path in (fed.run_folder / "certificates").iterdir():
        assert sifu.api.verify_certificate(path).problems == []
    # The rate was found among the first eleven, and stays.
    assert rate == largest_certified_rate(recorded[:11], 0.0)
    # A restarted server knows it; it can be forgotten, exactly, by going back to before it came.
    plan = run.plan([late], sigma=1e-9)
    assert plan.level == "exact"
    assert plan.source_node < min(took_part)
    run.request([late], "late", sigma=1e-9)
    assert fed.serve() == ["late"]
    assert sifu.open_run(fed.run_folder).verify().problems == []


def test_psi_of_everyone_is_the_same_as_if_the_newcomer_had_been_absent_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flower_server, "LOOK_FOR_NEWCOMERS", 0.0)
    fed, _ = joined_federation(tmp_path)
    reader = sifu.open_run(fed.run_folder).reader()
    part = reader.participation()
    rounds = [part.between(node, node) for node in range(1, 15)]
    sizes = [row.clients.size for row in rounds]
    psi = np.zeros(12)
    for taken_part in rounds:
        total = int(taken_part.samples.sum())
        psi[taken_part.clients] += client_increments(taken_part.samples, taken_part.drifts, total, 0.0, 1.0)
    reader.close()
    assert set(sizes) == {11, 12}
    np.testing.assert_allclose(psi_of(fed.run_folder), psi, rtol=1e-6)


def test_a_newcomer_that_would_lower_what_is_proven_is_refused_and_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flower_server, "LOOK_FOR_NEWCOMERS", 0.0)
    usual = ReadyClient.profile

    def steep(self: ReadyClient, question: object) -> object:
        profile = usual(self, question)  # type: ignore[arg-type]
        return replace(profile, smoothness=1e6) if self.name == "client-011" else profile

    monkeypatch.setattr(ReadyClient, "profile", steep)
    fed, late = joined_federation(tmp_path)
    reader = sifu.open_run(fed.run_folder).reader()
    refused = [json.loads(event.payload) for event in reader.events() if event.kind == "client refused"]
    assert [(incident["client"], "smoothness" in incident["reason"]) for incident in refused] == [(late, True)]
    assert len(reader.clients()) == 11
    reader.close()
    assert late not in {client.name for client in listed_clients(fed.run_folder)}
    assert sifu.open_run(fed.run_folder).verify().problems == []


def test_a_server_goes_on_with_clients_missing_and_records_it(tmp_path: Path) -> None:
    fed = Federation(tmp_path, SPEC)
    gone = fed.nodes[fed.data[0].name]
    app, key = fed.grid.apps[gone], fed.grid.keys[gone]
    del fed.grid.apps[gone]
    with pytest.raises(NoClientResponseError, match="still missing"):
        fed.serve()
    fed.grid.add(gone, app, key)
    fed.serve({("training", 6): lambda: fed.grid.apps.pop(gone)})
    reader = sifu.open_run(fed.run_folder).reader()
    told = [json.loads(event.payload)["incidents"] for event in reader.events() if event.kind == "incidents"]
    reader.close()
    # Eight rounds, and the one that is rehearsed with three models.
    assert [incident["round"] for many in told for incident in many] == [*range(6, 14), 14, 14, 14]
    assert told[0][0]["client"] == fed.data[0].name
    assert sifu.open_run(fed.run_folder).verify().problems == []


def test_a_node_whose_key_names_a_clients_key_too_is_a_stranger(tmp_path: Path) -> None:
    """SuperLink checks a node's signature with the first key of what it registered; the list must not see the second.

    What cannot be read as a key must not end the server either: anybody may register it.
    """
    fed = Federation(tmp_path, SPEC)
    victim = fed.nodes[fed.data[0].name]
    app, key = fed.grid.apps[victim], fed.grid.keys[victim]
    _, mine = new_key(tmp_path, "intruder")
    bent = mine.replace(b"-----BEGIN PUBLIC KEY-----\n", b"-----BEGIN PUBLIC KEY-----\nA: b\n\n")
    for number, strange in enumerate((bent + key, b"\x00", b"")):
        fed.grid.add(5 + number, app, strange)
    fed.grid.apps.pop(victim)
    with pytest.raises(NoClientResponseError, match="still missing"):
        fed.serve()
    fed.grid.add(victim, app, key)
    fed.serve()
    assert fed.contacted() == set(fed.nodes)


def test_a_client_asks_for_itself_and_for_nobody_else(tmp_path: Path) -> None:
    fed = Federation(tmp_path, SPEC)
    names = [client.name for client in fed.data]
    fed.serve()
    for name in ("mine", "strange"):
        make_node_key(tmp_path / name)
    key = fingerprint_of_file(tmp_path / "mine.pub")
    ask_for_change(fed.run_folder, {"do": "replace", "name": names[6], "key": key})
    run, number = sifu.open_run(fed.run_folder), run_id(fed.run_folder)
    good = sign_request(tmp_path / "mine", names[6], number, "own")
    bent = json.loads(json.dumps(good))
    bent["body"]["request"] = "other"
    for statement, match in (
        (sign_request(tmp_path / "mine", names[5], number, "a"), "to be forgotten itself"),
        (sign_request(tmp_path / "strange", names[6], number, "b"), "not on the list"),
        (sign_request(tmp_path / "mine", names[6], "another", "c"), "another run"),
        (bent, "signature does not match"),
    ):
        with pytest.raises(InputError, match=match):
            run.request_signed(statement)
    busy = RunWriter.open(fed.run_folder)
    try:  # the writer will refuse it; the sender is told at once
        with pytest.raises(InputError, match=r"to be forgotten itself\. The running server will refuse it"):
            run.request_signed(sign_request(tmp_path / "mine", names[5], number, "a"))
    finally:
        busy.close()
    assert run.request_signed(good) == "own"
    assert run.request_signed(good) == "own"
    reader = run.reader()
    kinds = [event.kind for event in reader.events()]
    assert [request.clients for request in reader.requests()] == [(names[6],)]
    reader.close()
    assert kinds.count("letter refused") == 5
    assert [refusal.what for refusal in run.status().refused] == [
        f"signed {name}" for name in ("a", "b", "c", "other", "a")
    ]
    assert run.verify().problems == []
