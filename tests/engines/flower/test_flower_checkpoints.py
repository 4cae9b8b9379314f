"""Clients on Flower: they keep the signed heads they are shown, and refuse to take part in a fork of the ledger."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from flower_federation import HASTY, grid_of, small_spec
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from memory_grid import MemoryGrid

import sifu
from run_tools import Command, query
from sifu.core.ledger import canonical_json
from sifu.core.spec import commented_toml
from sifu.engines.flower.checkpoints_of_nodes import LATEST, STATE, ShownCheckpoint, follow
from sifu.engines.flower.wire import CHECKPOINT, CONFIG, LINKS, LINKS_FROM, PROFILE_QUERY, ROTATIONS
from sifu.errors import InputError, NoClientResponseError
from sifu.flower import witness_mod
from sifu.run import training
from sifu.run.clients_and_engine import clients_from_spec
from sifu.run.training import Progress
from sifu.server.flower_app import serve_on_flower
from sifu.server.flower_settings import Settings
from sifu.store import keys
from sifu.store.checkpoints import Checkpoint, checkpoint_body
from sifu.store.kept_heads import read_witness

SPEC = small_spec(data={"clients": 3, "samples_per_client": 8}, local={"steps": 1}, stop={"max_rounds": 20})


class StopError(Exception):
    """Exception that stops the server."""


class Federation:
    """Three nodes, each with a checkpoint file, and the server's settings."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run = folder, folder / "run"
        self.grid: MemoryGrid = grid_of(list(clients_from_spec(SPEC)))
        self.files = {node: folder / f"node-{node}.jsonl" for node in self.grid.apps}
        for node, file in self.files.items():
            self.grid.configs[node] = {"checkpoints": str(file)}
        (folder / "spec.toml").write_text(commented_toml(SPEC))
        self.settings = Settings(str(self.run), str(folder / "spec.toml"), True, clients=3, wait=0.2)

    def serve(self, until: int = 99) -> None:
        def progress(made: Progress) -> None:
            if made.rounds == until:
                raise StopError

        serve_on_flower(self.grid, self.settings, patience=HASTY, progress=progress, level="none")


@pytest.fixture
def federation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Federation:
    """Return a federation in which every round is a separate event."""
    monkeypatch.setattr(training, "COMMIT_SECONDS", 0.0)
    return Federation(tmp_path)


def test_every_client_keeps_what_it_is_shown(federation: Federation, cli: Command) -> None:
    federation.serve()
    messages = [message for message in federation.grid.sent if message.metadata.message_type != PROFILE_QUERY]
    assert messages
    assert all(CHECKPOINT in message.content[CONFIG] for message in messages)
    for node, file in federation.files.items():
        kept = read_witness(file)
        assert len(kept) >= 6  # one per round
        assert all(checkpoint.holds for checkpoint in kept)
        latest = json.loads(str(federation.grid.contexts[node].state[STATE][LATEST]))
        assert latest["seq"] == kept[-1].seq
    file = next(iter(federation.files.values()))
    assert cli("verify", federation.run, "--head", file).code == 0
    file.write_text(file.read_text() + '{"format": "sifu-che')  # a kill in the middle of a line
    federation.grid.contexts.clear()
    sifu.open_run(federation.run).request(["client-000"], "leaves")
    federation.serve()
    assert sifu.open_run(federation.run).verify().problems == []


def test_clients_take_no_part_in_a_fork(federation: Federation, tmp_path: Path) -> None:
    """The operator copies the run, continues it, and then puts the copy back; clients refuse to train on it."""
    with pytest.raises(StopError):
        federation.serve(until=3)
    shutil.copytree(federation.run, tmp_path / "copy")
    with pytest.raises(StopError):
        federation.serve(until=5)
    shutil.rmtree(federation.run)
    (tmp_path / "copy").rename(federation.run)
    federation.grid.received.clear()
    before = query(federation.run, "SELECT COUNT(*) FROM participation")
    for _ in range(3):  # also when its ledger has become longer than the one shown before
        with pytest.raises(NoClientResponseError):
            federation.serve()
    assert query(federation.run, "SELECT COUNT(*) FROM participation") == before  # no client trained on it
    reasons = {str(reply.error.reason) for reply in federation.grid.received if reply.has_error()}
    assert any("an older state of the run was put back" in reason for reason in reasons)
    assert any("does not follow from event" in reason for reason in reasons)
    # A restarted node has its file; a node without a file has forgotten the head, and is the control.
    federation.grid.contexts.clear()
    with pytest.raises(NoClientResponseError):
        federation.serve()
    for file in federation.files.values():
        file.unlink()
    federation.grid.contexts.clear()
    federation.serve()


def test_a_fork_shown_to_two_clients_is_found_by_either(federation: Federation, tmp_path: Path, cli: Command) -> None:
    """If two branches are shown to different clients, the file of either client reveals the fork."""
    with pytest.raises(StopError):
        federation.serve(until=3)
    other = tmp_path / "other"
    shutil.copytree(federation.run, other)
    first, second, _ = federation.files
    seen_before = federation.files[second].read_bytes()
    federation.serve()
    shown_to_first = federation.files[first]
    # The second client was online only while the other branch was shown.
    federation.grid.contexts.clear()
    for node, file in federation.files.items():
        federation.grid.configs[node] = {"checkpoints": f"{file}.other"}
        Path(f"{file}.other").write_bytes(seen_before)
    federation.settings = replace(federation.settings, run=str(other))
    federation.serve()
    shown_to_second = Path(f"{federation.files[second]}.other")
    for run, own, theirs in (
        (federation.run, shown_to_first, shown_to_second),
        (other, shown_to_second, shown_to_first),
    ):
        assert sifu.open_run(run).verify(heads=[own]).problems == []
        assert any(problem.startswith("fork: ") for problem in sifu.open_run(run).verify(heads=[theirs]).problems)


def signed(key: object, seq: int, head: str = "a", time: str = "2026-01-01T00:00:00Z", run: str = "run") -> Checkpoint:
    signature = key.sign(canonical_json(checkpoint_body(run, seq, head * 64, time))).hex()  # type: ignore[attr-defined]
    return Checkpoint(run, seq, head * 64, time, keys.public_hex(key), signature)


def test_a_usual_app_with_the_mod_takes_no_part_in_a_fork() -> None:
    app, key, grid = ClientApp(mods=[witness_mod]), keys.new_key(), MemoryGrid()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return Message(message.content, reply_to=message)

    grid.add(100, app)
    for head, answers in (("a", True), ("a", True), ("b", False)):
        config = ConfigRecord({CHECKPOINT: canonical_json(signed(key, 5, head).to_mapping()).decode()})
        (reply,) = grid.send_and_receive([Message(RecordDict({CONFIG: config}), 100, "train")])
        assert reply.has_error() != answers
    assert "two heads for event 5" in str(reply.error.reason)


def test_what_may_follow_what_was_kept() -> None:
    key, thief = keys.new_key(), keys.new_key()
    kept = signed(key, 5)
    follow(None, kept, [])
    follow(kept, kept, [])
    with pytest.raises(InputError, match=r"^show event 5: "):
        follow(kept, signed(key, 6, "b"), [])
    with pytest.raises(
        InputError, match="does not follow from event 5"
    ):  # signed by the operator, who has both histories
        follow(kept, signed(key, 6, "b"), [], (5, [["2026-01-01T00:00:00Z", "rounds", "c" * 64]]))
    for shown, words in (
        (signed(key, 5, "b"), "two heads for event 5"),
        (signed(key, 4), "an older state"),
        (signed(key, 6, time="2025-01-01T00:00:00Z"), "dated before"),
        (signed(thief, 6), "did not sign for"),
        (signed(key, 6, run="other"), "takes part in run"),
        (replace(signed(key, 6), head="c" * 64), "not signed by the key"),
    ):
        with pytest.raises(InputError, match=words):
            follow(kept, shown, [])


def test_a_rotated_key_is_followed_and_a_slipped_in_one_is_not(own_trained: Path) -> None:
    shown = ShownCheckpoint(own_trained)
    kept = Checkpoint.from_json(str(shown(None)[CHECKPOINT]))
    run = sifu.open_run(own_trained)
    run.rotate_key()
    run.rotate_key()
    run.request(["client-000"], "later")
    record = ConfigRecord(shown(kept.seq))
    links = (int(str(record[LINKS_FROM])), json.loads(str(record[LINKS])))
    latest, rotations = Checkpoint.from_json(str(record[CHECKPOINT])), json.loads(str(record[ROTATIONS]))
    assert len(rotations) == 2
    follow(kept, latest, rotations, links)
    with pytest.raises(InputError, match="did not sign for"):
        follow(kept, latest, rotations[1:])
    forged = [rotation | {"signature_by_old": rotation["signature_by_new"]} for rotation in rotations]
    with pytest.raises(InputError, match="did not sign for"):
        follow(kept, latest, forged)


def test_a_client_that_was_shown_a_head_wants_one_with_every_message(federation: Federation) -> None:
    with pytest.raises(StopError):
        federation.serve(until=3)
    message = next(m for m in federation.grid.sent if m.metadata.message_type == "train")
    message.content[CONFIG] = ConfigRecord(
        {key: value for key, value in message.content[CONFIG].items() if key != CHECKPOINT}
    )
    reply = federation.grid.answer(message)
    assert reply.has_error()
    assert "shows no checkpoint now" in str(reply.error.reason)
