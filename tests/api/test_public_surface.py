"""Names that `import sifu` offers, and completion of the command line's arguments in the shell."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import sifu
from run_tools import environment


@pytest.mark.parametrize("name", sifu.__all__)
def test_every_exported_name_is_there(name: str) -> None:
    assert getattr(sifu, name) is not None


def test_few_names_are_exported_and_errors_besides() -> None:
    others = [name for name in sifu.__all__ if not name.endswith("Error")]
    assert len(others) <= 12
    assert all(issubclass(getattr(sifu, name), sifu.SifuError) for name in set(sifu.__all__) - set(others))
    assert all(getattr(sifu, name).__doc__ for name in sifu.__all__)


def test_a_name_that_is_not_there_is_named() -> None:
    with pytest.raises(AttributeError, match="no attribute 'forgte'"):
        _ = sifu.forgte


def test_status_keys_and_certificates_have_plain_forms(run_with_requests: Path) -> None:
    run = sifu.open_run(run_with_requests)
    status = run.status()
    assert status.to_mapping()["clients"][0]["name"] == status.clients[0].name == "client-000"
    assert run.keys().to_mapping()["public_keys"][0]["key"] == run.keys().public_keys[0].key
    certificate = run.certificate("to-the-middle")
    assert set(certificate.to_mapping()) == {"body", "public_key", "signature"}
    assert certificate.body["request"] == "to-the-middle"
    assert [record.request for record in run.request_records()][-1] == "waits"
    with pytest.raises(sifu.InputError, match="there is no request 'nobody'"):
        run.request_record("nobody")


def test_a_status_is_short_in_a_shell(run_with_requests: Path) -> None:
    status = sifu.open_run(run_with_requests).status()
    text = repr(status)
    assert len(text) < 400
    assert status.model in text
    assert f"{sum(client.state == 'active' for client in status.clients)} active" in text


def test_a_plan_says_which_method_it_takes(run_with_requests: Path) -> None:
    run = sifu.open_run(run_with_requests)
    client = [next(client.name for client in run.status().clients if client.state == "active")]
    plan = run.plan(client)
    assert plan.auto is not None
    assert plan.method in {way.method for way in plan.auto.compared}
    assert run.plan(client, method="scratch").method == "scratch"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("sifu cl", ["clients"]),
        ("sifu plan run --retention s", ["strict"]),
        ("sifu forget run --method s", ["sifu", "scratch"]),
        ("sifu decide run r1 w", ["withdraw"]),
    ],
)
def test_the_shell_completes_commands_and_choices(words: str, expected: list[str]) -> None:
    completion = {"_SIFU_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    program = "import sys; sys.argv = ['sifu']; from sifu.cli.main import main; main()"
    ended = subprocess.run(
        [sys.executable, "-c", program], env=environment() | completion, capture_output=True, text=True, timeout=60
    )
    assert sorted(ended.stdout.split()) == sorted(expected), ended.stderr
