"""Signed heads sent to witnesses automatically: a history shown to two parties is found by either."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest

import runs
import sifu
from forged_runs import execute, rebuild_chain, sign_again
from run_tools import Command, copy_run, small_spec
from sifu.api import verify_run
from sifu.errors import InputError, RunDamagedError
from sifu.store.checkpoints import latest_checkpoint
from sifu.store.files import certificate_path
from sifu.store.kept_heads import WITNESSES, read_witness
from sifu.store.reader import RunReader
from sifu.store.writer import RunWriter


def head_of(run: sifu.Run) -> str:
    with run.reader() as reader:
        return reader.value("head")


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file that a witness keeps."""
    path = tmp_path / "kept.jsonl"
    monkeypatch.setenv(WITNESSES, str(path))
    return path


def test_a_witness_hears_of_the_first_event_and_of_the_last_of_every_command(tmp_path: Path, kept: Path) -> None:
    run = sifu.train(small_spec(), run=tmp_path / "run")
    heard = read_witness(kept)
    assert heard[0].seq == 1
    assert f"{heard[-1].seq}:{heard[-1].head}" == head_of(run)
    run.request(["client-000"], "mine")
    assert f"{read_witness(kept)[-1].seq}:{read_witness(kept)[-1].head}" == head_of(run)
    assert all(checkpoint.holds for checkpoint in read_witness(kept))
    assert run.verify(heads=[kept]).problems == []


def test_a_fork_shown_to_two_parties_is_found_by_either(own_trained: Path, tmp_path: Path, kept: Path) -> None:
    """The operator, who has the key, continues the same run in two ways."""
    other = tmp_path / "other"
    shutil.copytree(own_trained, other)
    sifu.open_run(own_trained).request(["client-000"], "mine")
    shown_to_one = kept.rename(tmp_path / "one.jsonl")
    sifu.open_run(other).request(["client-001"], "theirs")
    shown_to_two = kept.rename(tmp_path / "two.jsonl")
    assert verify_run(own_trained, heads=[shown_to_one]).problems == []
    (problem,) = verify_run(own_trained, heads=[shown_to_two]).problems
    assert problem.startswith("fork: ")
    (problem,) = verify_run(other, heads=[shown_to_one]).problems
    assert problem.startswith("fork: ")
    both = verify_run(other, heads=[shown_to_two, shown_to_one]).problems
    assert any("the operator signed two heads" in problem for problem in both)


def test_a_history_rewritten_with_the_key_and_an_older_state_are_found(
    own_trained: Path, tmp_path: Path, kept: Path, cli: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = tmp_path / "older"
    shutil.copytree(own_trained, older)
    sifu.open_run(own_trained).request(["client-000"], "mine")
    monkeypatch.delenv(WITNESSES)
    answer = cli("verify", older, "--head", kept)
    assert answer.code == 3
    assert "an older state was put back" in " ".join(answer.err.split())
    execute(own_trained, "UPDATE participation SET drift = drift / 1000 WHERE client = 0")
    rebuild_chain(own_trained)
    assert verify_run(own_trained).problems == []  # with the operator's own key
    assert any("was rewritten after it was shown" in p for p in verify_run(own_trained, heads=[kept]).problems)


def test_verify_reads_the_file_that_a_witness_keeps_unasked(
    tmp_path: Path, kept: Path, heads: Path, cli: Command
) -> None:
    """`verify` reads the witness file of the setting for writing commands; entries of other runs do not matter."""
    run = sifu.train(small_spec(), run=tmp_path / "run")
    other = sifu.train(small_spec(seed=8), run=tmp_path / "other")
    shutil.copytree(run.folder, tmp_path / "older")
    run.request(["client-000"], "mine")
    assert cli("verify", run.folder).code == cli("verify", other.folder).code == 0
    shutil.rmtree(run.folder)
    (tmp_path / "older").rename(run.folder)
    heads.unlink()
    answer = cli("verify", run.folder)
    assert answer.code == 3
    assert "an older state was put back" in " ".join(answer.err.split())


def test_a_public_certificate_is_a_witness(run_with_requests: Path, own_trained: Path) -> None:
    certificate = certificate_path(run_with_requests, "strictly", "public")
    assert read_witness(certificate)[0].holds
    assert verify_run(run_with_requests, heads=[certificate]).problems == []
    assert any("another run" in problem for problem in verify_run(own_trained, heads=[certificate]).problems)


def test_a_fork_shown_in_two_public_certificates_is_found_by_either(own_trained: Path, tmp_path: Path) -> None:
    """Two clients get certificates from two histories of one run; each certificate reveals the fork."""
    other = tmp_path / "other"
    shutil.copytree(own_trained, other)
    certificates = []
    for folder, client in ((own_trained, "client-000"), (other, "client-001")):
        sifu.open_run(folder).forget([client], client, sigma=0.5)
        certificates.append(certificate_path(folder, client, "public"))
    first, second = certificates
    for folder, own, theirs in ((own_trained, first, second), (other, second, first)):
        assert verify_run(folder, heads=[own]).problems == []
        (problem,) = verify_run(folder, heads=[theirs]).problems
        assert problem.startswith("fork: ")


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"format": 1}', "not json", "7" * 5000, "[" * 100_000])
def test_what_is_no_witness_is_a_sentence(own_trained: Path, tmp_path: Path, content: str, cli: Command) -> None:
    (tmp_path / "strange").write_text(content)
    with pytest.raises(InputError):
        verify_run(own_trained, heads=[tmp_path / "strange"])
    assert cli("verify", own_trained, "--head", tmp_path / "strange").code == 2


def test_a_forged_checkpoint_proves_nothing(own_trained: Path, kept: Path, tmp_path: Path) -> None:
    sifu.open_run(own_trained).request(["client-000"], "mine")
    content = json.loads(kept.read_text().splitlines()[-1])
    (tmp_path / "forged").write_text(json.dumps(content | {"head": "0" * 64}))
    problems = verify_run(own_trained, heads=[tmp_path / "forged"]).problems
    assert any("is not signed with a key of this run" in problem for problem in problems)


def test_a_program_is_told_and_its_failure_is_logged(
    own_trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(WITNESSES, f"tee -a {tmp_path / 'out'}\nfalse")
    with caplog.at_level(logging.WARNING):
        sifu.open_run(own_trained).request(["client-000"], "mine")
        sifu.open_run(own_trained).request(["client-001"], "also")
    assert len(read_witness(tmp_path / "out")) == 2
    # Failures are logged, and nothing is lost.
    assert caplog.text.count("the witness false did not accept") == 2
    assert verify_run(own_trained).problems == []


@pytest.mark.parametrize("target", ["ftp://example.org/heads", "no/such/folder/heads"])
def test_a_target_that_cannot_be_a_witness_is_refused(
    own_trained: Path, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    monkeypatch.setenv(WITNESSES, target)
    with pytest.raises(InputError, match="a witness must be"):
        sifu.open_run(own_trained).request(["client-000"])
    monkeypatch.delenv(WITNESSES)
    sifu.open_run(own_trained).request(["client-000"])


def test_the_option_before_the_command(own_trained: Path, tmp_path: Path, cli: Command) -> None:
    assert cli("--witness", tmp_path / "kept", "request", own_trained, "--clients", "client-000").code == 0
    assert read_witness(tmp_path / "kept")[0].holds


def test_an_incomplete_last_line_is_skipped(own_trained: Path, tmp_path: Path, cli: Command) -> None:
    with RunReader(own_trained) as reader:
        checkpoint = latest_checkpoint(reader)
    assert checkpoint is not None
    line = json.dumps(checkpoint.to_mapping()) + "\n"
    kept = tmp_path / "kept.jsonl"
    kept.write_text(line + line[:40])
    assert cli("verify", own_trained, "--head", kept).code == 0
    kept.write_text(line[:40] + "\n" + line)
    assert cli("verify", own_trained, "--head", kept).code == 2


def test_a_witness_is_read_before_anything_is_added(
    own_trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: Path, cli: Command
) -> None:
    older, other = copy_run(own_trained, tmp_path / "older"), copy_run(own_trained, tmp_path / "other")
    sifu.open_run(own_trained).request(["client-000"], "mine")
    content = kept.read_bytes()
    answer = cli("forget", older, "--clients", "client-001")
    assert answer.code == 5
    assert "an older state was put back" in " ".join(answer.err.split())
    # The other copy continued differently, without notifying the witness.
    monkeypatch.delenv(WITNESSES)
    sifu.open_run(other).request(["client-002"], "theirs")
    sifu.open_run(other).request(["client-003"], "theirs-too")
    monkeypatch.setenv(WITNESSES, str(kept))
    with pytest.raises(RunDamagedError, match="fork: "):
        sifu.open_run(other).request(["client-004"], "more")
    assert kept.read_bytes() == content
    # Another run may use the same file, and a truncated line after a kill is accepted.
    kept.write_bytes(content + content[:40])
    sifu.train(small_spec(), run=tmp_path / "another")
    sifu.open_run(own_trained).request(["client-005"], "goes-on")


def test_a_witness_that_knows_only_another_run_stops_writers(
    tmp_path: Path, kept: Path, heads: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    sifu.train(small_spec(), run=folder)
    sign_again(folder, run="0123456789abcdef")
    heads.unlink()  # another person, who has the witness's file
    with pytest.raises(RunDamagedError, match="does not know run 0123456789abcdef"):
        RunWriter.open(folder)
    # A run from before the witness was configured may join the runs known here, in another folder.
    monkeypatch.delenv(WITNESSES)
    earlier = sifu.open_run(runs.own("trained", tmp_path))
    monkeypatch.setenv(WITNESSES, str(tmp_path / "shared.jsonl"))
    sifu.train(small_spec(), run=tmp_path / "first")
    earlier.request(["client-000"], "mine")
