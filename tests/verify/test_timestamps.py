"""RFC 3161 timestamps of heads and certificates, by an authority that the tests make with openssl."""

from __future__ import annotations

import http.server
import json
import shutil
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import sifu
from run_tools import Command, copy_run, query, small_spec
from sifu.api import restore, verify_certificate, verify_run
from sifu.errors import InputError, MissingPackageError, install_extra
from sifu.store import timestamps
from sifu_verifier import verify
from timestamp_authority import answer, make_authority

pytest.importorskip("rfc3161_client")
pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="the authority is openssl's")


@dataclass
class Authority:
    """Timestamp authority on this machine; `down` makes it refuse, `spoilt` makes it answer nonsense."""

    folder: Path
    address: str = ""
    down: bool = False
    spoilt: bool = False
    questions: list[bytes] = field(default_factory=list)

    @property
    def roots(self) -> Path:
        return self.folder / "root.pem"

    def answer(self, question: bytes) -> bytes:
        """Return the answer of `openssl ts -reply` to a question."""
        self.questions.append(question)
        return b"nonsense" if self.spoilt else answer(self.folder, question)


@pytest.fixture
def authority(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Authority]:
    folder = tmp_path_factory.mktemp("authority")
    make_authority(folder)
    here = Authority(folder)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            question = self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(503 if here.down else 200)
            self.end_headers()
            if not here.down:
                self.wfile.write(here.answer(question))

        def log_message(self, *arguments: object) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    here.address = f"http://127.0.0.1:{server.server_port}/tsa"
    yield here
    server.shutdown()


def stamped(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "timestamps").iterdir())


def test_heads_and_certificates_are_stamped_and_verified(
    own_trained: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch, cli: Command, tmp_path: Path
) -> None:
    monkeypatch.setenv(timestamps.AUTHORITY, authority.address)
    run = sifu.open_run(own_trained)
    run.forget(["client-000"], "mine", sigma=0.5)
    monkeypatch.delenv(timestamps.AUTHORITY)
    (last,) = query(own_trained, "SELECT MAX(seq) FROM events")[0]
    assert stamped(own_trained) == [f"{last}.checkpoint.json.tsr", "mine.public.json.tsr"]
    result = run.verify(authority=authority.roots)
    assert result.problems == []
    assert any("mine.public.json existed at 20" in note for note in result.notes)
    assert any("give the authority's certificate" in note for note in run.verify().notes)
    assert verify(own_trained) == []
    assert cli("verify", own_trained, "--authority", authority.roots).code == 0
    # Other tools agree.
    certificate = own_trained / "certificates" / "mine.public.json"
    reply = own_trained / "timestamps" / "mine.public.json.tsr"
    command = ["openssl", "ts", "-verify", "-in", reply, "-data", certificate, "-CAfile", authority.roots]
    checked = subprocess.run(
        [*command, "-untrusted", authority.folder / "tsa.pem"], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stderr
    # A client keeps the certificate with its timestamp.
    mine = tmp_path / "mine.json"
    shutil.copy(certificate, mine)
    assert any("no mine.json.tsr" in problem for problem in verify_certificate(mine, None, authority.roots).problems)
    shutil.copy(reply, f"{mine}.tsr")
    assert verify_certificate(mine, None, authority.roots).problems == []
    assert cli("verify", mine, "--authority", authority.roots).code == 0
    # Timestamps are part of a backup.
    run.backup(tmp_path / "b.zip")
    restore(tmp_path / "b.zip", tmp_path / "back")
    assert stamped(tmp_path / "back") == stamped(own_trained)
    assert verify_run(tmp_path / "back", authority=authority.roots).problems == []


def test_an_authority_that_is_down_holds_nothing_up(
    own_trained: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch, cli: Command
) -> None:
    authority.down = True
    monkeypatch.setenv(timestamps.AUTHORITY, authority.address)
    run = sifu.open_run(own_trained)
    (outcome,) = run.forget(["client-000"], "mine", sigma=0.5)
    assert outcome.request == "mine"
    assert stamped(own_trained) == []
    ((payload,),) = query(own_trained, "SELECT payload FROM events WHERE kind = 'timestamp missing'")
    assert "mine.public.json" in json.loads(payload)["missing"]
    result = run.verify()
    assert result.problems == []
    assert any("a timestamp was asked for and did not come: mine.public.json" in note for note in result.notes)
    assert verify(own_trained) == []
    refused = cli("timestamp", own_trained)
    assert refused.code == 2
    assert "try again later" in " ".join(refused.err.split())
    authority.spoilt, authority.down = True, False
    assert "not a timestamp of RFC 3161" in " ".join(cli("timestamp", own_trained).err.split())
    authority.spoilt = False
    fetched = cli("timestamp", own_trained, "--format", "json")
    assert fetched.code == 0, fetched.err
    assert "mine.public.json" in fetched.json["timestamps"]
    assert len(fetched.json["timestamps"]) == 2
    count = len(authority.questions)
    assert cli("timestamp", own_trained, "--format", "json").json == {"timestamps": []}
    assert len(authority.questions) == count
    result = run.verify(authority=authority.roots)
    assert result.problems == []
    assert not any("did not come" in note for note in result.notes)


def test_nobody_is_asked_unless_somebody_is_named(own_trained: Path, authority: Authority, cli: Command) -> None:
    sifu.open_run(own_trained).request(["client-000"], "mine")
    assert authority.questions == []
    assert cli("timestamp", own_trained).code == 2
    assert cli("--timestamp", authority.address, "request", own_trained, "--clients", "client-001").code == 0
    assert len(authority.questions) == 1


@pytest.fixture
def with_timestamps(own_trained: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch) -> Path:
    with monkeypatch.context() as patch:
        patch.setenv(timestamps.AUTHORITY, authority.address)
        sifu.open_run(own_trained).forget(["client-000"], "mine", sigma=0.5)
    return own_trained


def test_changed_stolen_and_foreign_timestamps_are_found(
    with_timestamps: Path, authority: Authority, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = with_timestamps / "timestamps"
    (head,) = folder.glob("*.checkpoint.json.tsr")
    kept = head.read_bytes()

    def problems() -> str:
        return " ".join(verify_run(with_timestamps, authority=authority.roots).problems)

    assert problems() == ""
    head.write_bytes((folder / "mine.public.json.tsr").read_bytes())
    assert "is not a timestamp of its file" in problems()
    assert verify(with_timestamps) != []
    for place in (20, len(kept) // 2, len(kept) - 5):
        head.write_bytes(kept[:place] + bytes([kept[place] ^ 1]) + kept[place + 1 :])
        assert problems(), place
    head.write_bytes(b"")
    assert "not a timestamp" in problems()
    head.write_bytes(kept)
    (folder / "999.checkpoint.json.tsr").write_bytes(kept)
    assert "belongs to no head or certificate of this run" in problems()
    (folder / "999.checkpoint.json.tsr").unlink()
    assert problems() == ""
    # Another authority, with the same names in its certificates.
    other = tmp_path_factory.mktemp("other")
    make_authority(other)
    answers = verify_run(with_timestamps, authority=other / "root.pem").problems
    assert len(answers) == 2
    assert all("is not signed by the authority given" in problem for problem in answers)


@pytest.mark.parametrize("address", ["ftp://example.org", "nothing", "http://"])
def test_what_is_no_authority_is_refused_before_anything_is_written(
    own_trained: Path, monkeypatch: pytest.MonkeyPatch, address: str, tmp_path: Path
) -> None:
    monkeypatch.setenv(timestamps.AUTHORITY, address)
    before = query(own_trained, "SELECT COUNT(*) FROM events")
    with pytest.raises(InputError, match="http or https"):
        sifu.open_run(own_trained).request(["client-000"])
    assert query(own_trained, "SELECT COUNT(*) FROM events") == before
    (tmp_path / "strange.pem").write_text("nothing")
    with pytest.raises(InputError, match="PEM"):
        verify_run(own_trained, authority=tmp_path / "strange.pem")


def test_without_the_package_there_is_one_sentence(
    with_timestamps: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = copy_run(with_timestamps, tmp_path / "copy")

    def absent() -> Any:
        raise MissingPackageError(f"timestamps need the package rfc3161-client: {install_extra('timestamps')}")

    monkeypatch.setattr(timestamps, "protocol", absent)
    monkeypatch.setenv(timestamps.AUTHORITY, "http://127.0.0.1:9/")
    with pytest.raises(InputError, match="pip install"):
        sifu.train(small_spec(), run=tmp_path / "new")
    monkeypatch.delenv(timestamps.AUTHORITY)
    result = verify_run(folder)
    assert result.problems == []
    assert any("cannot read" in note for note in result.notes)
