"""Names for people: a client with forgotten records keeps its original name everywhere, and counts once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sifu
from run_tools import Command

HOSPITALS = ("cleveland", "budapest", "zurich")
TURN = "~2"
"""Suffix of the internal name of a client with forgotten records."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> sifu.Run:
    """Return a run in which one of three hospitals left and another forgot records twice and waits again; read only."""
    folder, generator = tmp_path_factory.mktemp("runs"), np.random.default_rng(0)
    rows = [
        f"P{number:03},{HOSPITALS[number % 3]},{generator.normal():.3f},{number % 2}" for number in range(60)
    ]  # fmt: skip
    (folder / "heart.csv").write_text("patient,hospital,marker,ill\n" + "\n".join(rows) + "\n")
    data = {
        "name": "table", "partition": "given", "file": str(folder / "heart.csv"), "label": "ill", "classes": "0,1",
        "client": "hospital", "id": "patient", "preprocessing": "fixed",
    }  # fmt: skip
    run = sifu.train({"data": data, "model": {"kind": "ridge"}}, run=folder / "run")
    run.forget(["zurich"], "gone")
    run.forget(["cleveland"], "some", records=["P000", "P003"])
    run.forget(["cleveland"], "more", records=["P006"])
    run.request(["cleveland"], "waits", records=["P009"])
    return run


def test_status_counts_hospitals_and_not_their_turns(run: sifu.Run) -> None:
    status = run.status()
    assert [(client.name, client.samples, client.state) for client in status.clients] == [
        ("budapest", 20, "active"), ("cleveland", 17, "active"), ("zurich", 20, "forgotten"),
    ]  # fmt: skip
    assert [request.clients for request in status.requests] == [("zurich",), *[("cleveland",)] * 3]
    assert [request.records for request in status.requests] == [None, 2, 1, 1]
    assert "rounds" not in repr(status)


@pytest.mark.parametrize("form", ["text", "json"])
@pytest.mark.parametrize(
    "command",
    [
        ["status", "RUN", "--all"], ["requests", "RUN"], ["requests", "RUN", "waits"],
        ["plan", "RUN", "--request", "waits"], ["plan", "RUN", "--client", "budapest"],
        ["certificate", "RUN", "more"], ["certificate", "RUN", "more", "--public"], ["verify", "RUN"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_the_command_line_says_plain_names(run: sifu.Run, cli: Command, command: list[str], form: str) -> None:
    given = [str(run.folder) if word == "RUN" else word for word in command]
    answer = cli(*given, "--format", form)
    if answer.code == 2 and "No such option" in answer.err:
        pytest.skip("this command has one form")
    assert answer.code == 0, answer.err
    assert TURN not in answer.out
    assert "~3" not in answer.out


def test_certificates_outcomes_and_report_say_plain_names(run: sifu.Run, tmp_path: Path, cli: Command) -> None:
    texts = [path.read_text() for path in (run.folder / "certificates").iterdir()]
    texts += [repr(run.outcomes()), repr(run.request_records())]
    assert cli("report", run.folder, "--output", tmp_path / "report").code == 0
    texts.append((tmp_path / "report" / "index.html").read_text())
    assert "<dt>Clients that remain</dt><dd>2<small>of 3</small>" in texts[-1]
    for text in texts:
        assert TURN not in text
        assert "~3" not in text
    body: dict[str, Any] = run.certificate("more", "auditor").body
    assert (body["clients"], [subject["clients"] for subject in body["subjects"]]) == (["cleveland"], [["cleveland"]])
    assert run.verify().problems == []


def test_the_console_says_plain_names(run: sifu.Run) -> None:
    pytest.importorskip("starlette.testclient", reason="the console needs the extra console and httpx")
    from starlette.testclient import TestClient

    from sifu_console.app import Settings, make_app
    from sifu_console.tokens import TokenFile, state_folder

    folder = run.folder.parent
    _, secret = TokenFile(state_folder(folder)).create("otto", ["operator"])
    client = TestClient(make_app(Settings([folder], state_folder(folder))), base_url="http://localhost")
    client.headers["Authorization"] = f"Bearer {secret}"
    key = client.get("/api/v1/runs").json()["runs"][0]["run"]
    client.post("/login", data={"token": secret})
    pages = ["/", f"/runs/{key}", f"/runs/{key}/clients", *(f"/runs/{key}/requests/{n}" for n in (1, 2, 3, 4))]
    for page in [*pages, f"/api/v1/runs/{key}", f"/api/v1/runs/{key}/requests/4"]:
        answer = client.get(page)
        assert answer.status_code == 200, page
        assert TURN not in answer.text, page
        assert "~3" not in answer.text, page
    assert ">3<small>1 forgotten" in client.get(f"/runs/{key}").text
    assert "1 record: P009" in client.get(f"/runs/{key}/requests/4").text
