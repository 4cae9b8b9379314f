"""Keys and backups: replaced keys and restored records are noticed."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sqlite3
import zipfile
from pathlib import Path
from typing import Any

import pytest

import sifu
from run_tools import Command, dump, files_of, query, scalars, small_spec
from sifu.api import restore, verify_run
from sifu.core.ledger import canonical_json
from sifu.errors import InputError, RunDamagedError
from sifu.store import keys
from sifu.store.projection import NewEvent
from sifu.store.writer import RunWriter
from sifu_verifier import verify

# ---- keys


def test_a_key_is_encrypted_with_a_passphrase(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Command) -> None:
    monkeypatch.setenv("SIFU_PASSPHRASE", "correct horse")
    run = sifu.train(small_spec(), run=tmp_path / "run")
    content = (tmp_path / "run" / "operator.key").read_bytes()
    assert b"ENCRYPTED" in content
    assert run.keys().encrypted
    monkeypatch.delenv("SIFU_PASSPHRASE")
    before = dump(tmp_path / "run")
    answer = cli("forget", tmp_path / "run", "--clients", "client-001", "--sigma", "0.5")
    assert answer.code == 2
    assert "SIFU_PASSPHRASE" in answer.err
    assert dump(tmp_path / "run") == before
    monkeypatch.setenv("SIFU_PASSPHRASE", "wrong")
    assert "does not open" in cli("forget", tmp_path / "run", "--clients", "client-001", "--sigma", "0.5").err
    monkeypatch.setenv("SIFU_PASSPHRASE", "correct horse")
    assert cli("forget", tmp_path / "run", "--clients", "client-001", "--sigma", "0.5").code == 0
    monkeypatch.delenv("SIFU_PASSPHRASE")
    public = run.keys().public_keys[0].key
    assert cli("verify", tmp_path / "run", "--public-key", public).code == 0  # the public key and the folder are enough
    assert "correct horse" not in "".join(map(str, dump(tmp_path / "run").values()))


def test_a_rotated_key_signs_from_then_on_and_every_old_certificate_holds(own_trained: Path, cli: Command) -> None:
    run = sifu.open_run(own_trained)
    run.forget(["client-001"], "before", sigma=0.5)
    old = run.keys().public_keys[0].key
    new = cli("key", "--rotate", own_trained, "--format", "json").json["public_key"]
    assert new != old
    run.forget(["client-002"], "after", sigma=0.5)
    for name, key in (("before", old), ("after", new)):
        content = json.loads((own_trained / "certificates" / f"{name}.public.json").read_text())
        assert content["public_key"] == key
    assert run.verify().problems == []
    assert verify(own_trained) == []
    for key in (old, new):
        assert run.verify(key).problems == []
    assert run.verify("ab" * 32).problems
    assert "from event" in cli("key", own_trained).out


def test_a_key_that_was_slipped_in_is_caught(own_trained: Path) -> None:
    """An invented event that replaces the public key without a signature by the old key is found."""
    run = sifu.open_run(own_trained)
    thief = keys.new_key()
    writer = RunWriter.open(own_trained)
    old, new = writer.value("public_key"), keys.public_hex(thief)
    statement = canonical_json(keys.rotation_statement(writer.value("run"), old, new))
    signature = thief.sign(statement).hex()
    writer.record(
        NewEvent(
            "key rotated",
            {"run": {"public_key": new}, "old_key": old, "signature_by_old": signature, "signature_by_new": signature},
        )
    )
    writer.close()
    assert any("not signed by both keys" in problem for problem in run.verify().problems)
    assert any("signature_by_old" in problem for problem in verify(own_trained))


def test_a_rotation_cut_short_leaves_a_key_that_fits(own_trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = sifu.open_run(own_trained)
    record = RunWriter.record

    def fail_before(self: RunWriter, *arguments: Any, **more: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RunWriter, "record", fail_before)
        with pytest.raises(KeyboardInterrupt):
            run.rotate_key()
    assert list(own_trained.glob("operator.key.new-*"))
    RunWriter.open(own_trained).close()
    assert not list(own_trained.glob("operator.key.new-*"))
    keys.load_key(own_trained, run.keys().public_keys[-1].key)

    def fail_after(self: RunWriter, *arguments: Any, **more: Any) -> Any:
        record(self, *arguments, **more)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RunWriter, "record", fail_after)
        with pytest.raises(KeyboardInterrupt):
            run.rotate_key()
    RunWriter.open(own_trained).close()
    assert len(run.keys().public_keys) == 2
    keys.load_key(own_trained, run.keys().public_keys[-1].key)
    assert run.verify().problems == []


def test_a_key_can_be_brought(own_trained: Path, tmp_path: Path, cli: Command) -> None:
    mine = keys.new_key()
    keys.write_key(tmp_path / "mine.pem", mine)
    assert cli("key", "--rotate", own_trained, "--key", tmp_path / "mine.pem").code == 0
    assert sifu.open_run(own_trained).keys().public_keys[-1].key == keys.public_hex(mine)
    # a key that was used before is refused
    assert cli("key", "--rotate", own_trained, "--key", tmp_path / "mine.pem").code == 2
    (tmp_path / "bad.pem").write_text("nothing")
    assert cli("key", "--rotate", own_trained, "--key", tmp_path / "bad.pem").code == 2


# ---- backups


def test_a_backup_brings_everything_back(own_run: Path, tmp_path: Path, cli: Command) -> None:
    assert cli("backup", own_run, tmp_path / "b.zip").code == 0
    assert os.stat(tmp_path / "b.zip").st_mode & 0o777 == 0o600
    answer = cli("restore", tmp_path / "b.zip", tmp_path / "back")
    assert answer.code == 0, answer.err
    assert scalars(tmp_path / "back") == scalars(own_run)
    assert files_of(tmp_path / "back") == files_of(own_run)
    result = verify_run(tmp_path / "back")
    assert result.problems == []
    assert any("restored the run from a backup" in note for note in result.notes)
    assert verify(tmp_path / "back") == []
    for path in [tmp_path / "back", *(tmp_path / "back").rglob("*")]:
        assert os.stat(path).st_mode & 0o077 == 0, path
    (outcome,) = sifu.open_run(tmp_path / "back").forget(["client-006"], "next", sigma=0.5)
    # Nothing shows that the original run stopped there.
    assert outcome.level == "conditional"
    assert query(tmp_path / "back", "PRAGMA journal_mode") == [("wal",)]


@pytest.fixture
def forgotten_since(own_trained: Path, tmp_path: Path) -> tuple[Path, Path, list[str]]:
    """Return a run that forgot a client after its backup, the backup, and the digests of the erased models."""
    run = sifu.open_run(own_trained)
    run.backup(tmp_path / "old.zip")
    models = {row[0]: row[1] for row in query(own_trained, "SELECT node, digest FROM models")}
    run.forget(["client-003"], "since", sigma=0.5, retention="strict")
    left = {row[0] for row in query(own_trained, "SELECT digest FROM models")}
    return own_trained, tmp_path / "old.zip", [value for value in models.values() if value not in left]


def digests(folder: Path) -> set[str]:
    return {hashlib.sha256(path.read_bytes()).hexdigest() for path in (folder / "models").iterdir()}


@pytest.mark.parametrize("form", ["auditor", "public"])
def test_an_older_backup_is_refused_with_a_head(forgotten_since: Any, tmp_path: Path, cli: Command, form: str) -> None:
    run, backup, _ = forgotten_since
    head = run / "certificates" / f"since.{form}.json"
    answer = cli("restore", backup, tmp_path / "back", "--head", head)
    assert answer.code == 2
    assert "not the latest state" in answer.err
    assert not (tmp_path / "back").exists()
    assert list(tmp_path.glob(".tmp-*")) == []


def test_an_older_backup_cannot_bring_an_erased_model_back_unnoticed(forgotten_since: Any, tmp_path: Path) -> None:
    """The backup is restored, but the ledger records it and no later certificate is proven. A head of the original run
    reveals the restoration.
    """
    run, backup, erased = forgotten_since
    restore(backup, tmp_path / "back")
    assert digests(tmp_path / "back") & set(erased)
    result = verify_run(tmp_path / "back")
    assert any("is not in this record" in note for note in result.notes)
    assert verify_run(tmp_path / "back", heads=[run / "certificates" / "since.public.json"]).problems
    again = sifu.open_run(tmp_path / "back")
    (outcome,) = again.forget(["client-005"], "later", sigma=0.5)
    assert outcome.level == "conditional"
    assert again.verify().problems == []
    assert verify(tmp_path / "back") == []


def test_a_certificate_of_somebody_else_brings_nothing_back(
    forgotten_since: Any, own_run: Path, tmp_path: Path
) -> None:
    _, backup, _ = forgotten_since
    other = min((own_run / "certificates").glob("*.public.json"))
    with pytest.raises(InputError, match="does not belong to this run"):
        restore(backup, tmp_path / "back", certificates=[other])
    assert not (tmp_path / "back").exists()


def test_the_purge_names_backups_that_hold_what_was_erased(forgotten_since: Any) -> None:
    run, _, _ = forgotten_since
    assert any("old.zip" in what for what, _ in sifu.open_run(run).purge().remains)


def repacked(source: Path, target: Path, change: Any) -> Path:
    with zipfile.ZipFile(source) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    change(members)
    with zipfile.ZipFile(target, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return target


def relisted(members: dict[str, bytes], name: str, content: bytes) -> None:
    """Add a file to a backup and update the manifest to match."""
    members[name] = content
    listed = json.loads(members["manifest.json"])
    listed["files"][name] = {"bytes": len(content), "digest": hashlib.sha256(content).hexdigest()}
    members["manifest.json"] = json.dumps(listed).encode()


BROKEN = {
    "a model changed": lambda m: m.update({next(n for n in m if n.startswith("models/")): b"x"}),
    "a model taken out": lambda m: m.pop(next(n for n in m if n.startswith("models/"))),
    "no list": lambda m: m.pop("manifest.json"),
    "no database": lambda m: m.pop("run.db"),
    "a path outside": lambda m: relisted(m, "../../evil", b"x"),
    "an absolute path": lambda m: relisted(m, "/tmp/evil", b"x"),
    "a file of no kind of ours": lambda m: relisted(m, "models/evil.pkl", b"x"),
    "a name too long for a file": lambda m: relisted(m, f"models/{'9' * 300}.safetensors", b"x"),
    "a database of another program": lambda m: relisted(m, "run.db", b"SQLite format 3\0" + b"\0" * 84),
    "deep": lambda m: m.update({"manifest.json": b"[" * 100_000}),
    "a list that is none": lambda m: m.update({"manifest.json": b'{"format": "sifu backup 1", "files": 7}'}),
    "a model changed, and the list with it": lambda m: relisted(m, next(n for n in m if n.startswith("models/")), b"x"),
    "another format": lambda m: m.update({"manifest.json": b'{"format": "x", "files": {}}'}),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_backup_leaves_nothing_behind(own_trained: Path, tmp_path: Path, name: str) -> None:
    sifu.open_run(own_trained).backup(tmp_path / "good.zip")
    bad = repacked(tmp_path / "good.zip", tmp_path / "bad.zip", BROKEN[name])
    with pytest.raises((InputError, RunDamagedError)):
        restore(bad, tmp_path / "back")
    assert not (tmp_path / "back").exists()
    assert list(tmp_path.glob(".tmp-*")) == []
    assert not Path("/tmp/evil").exists()


def test_a_backup_that_says_a_forged_record_is_refused(own_trained: Path, tmp_path: Path) -> None:
    """The manifest agrees with the files, but the records differ from what the ledger commits to."""
    sifu.open_run(own_trained).backup(tmp_path / "good.zip")

    def forge(members: dict[str, bytes]) -> None:
        path = tmp_path / "forged.db"
        path.write_bytes(members["run.db"])
        with sqlite3.connect(path) as connection:
            connection.execute("UPDATE participation SET drift = drift / 1e6")
        relisted(members, "run.db", path.read_bytes())

    with pytest.raises(RunDamagedError):
        restore(repacked(tmp_path / "good.zip", tmp_path / "bad.zip", forge), tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_a_folder_that_is_there_is_not_overwritten(own_trained: Path, tmp_path: Path) -> None:
    run = sifu.open_run(own_trained)
    run.backup(tmp_path / "b.zip")
    with pytest.raises(InputError, match="not empty"):
        restore(tmp_path / "b.zip", own_trained)
    with pytest.raises(InputError, match="exists"):
        run.backup(tmp_path / "b.zip")
    shutil.rmtree(own_trained)
    restore(tmp_path / "b.zip", own_trained)
    assert verify_run(own_trained).problems == []


@pytest.mark.parametrize("content", [b"no key at all", None], ids=["garbage", "another one"])
def test_a_backup_without_the_key_of_its_run_is_refused(
    own_trained: Path, tmp_path: Path, content: bytes | None
) -> None:
    """Without the private key everything else verifies, so only the next certificate would show its absence."""
    from sifu.store.keys import create_key

    sifu.open_run(own_trained).backup(tmp_path / "good.zip")
    create_key(tmp_path)
    other = (tmp_path / "operator.key").read_bytes() if content is None else content
    bad = repacked(
        tmp_path / "good.zip", tmp_path / "bad.zip", lambda members: relisted(members, "operator.key", other)
    )
    with pytest.raises(RunDamagedError, match="operator's key"):
        restore(bad, tmp_path / "back")
    assert not (tmp_path / "back").exists()
