"""Output of every command: help without heavy imports, one JSON object, and an entry in the docs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest

import sifu
from run_tools import Answer, Command, built_command, environment, query, run_cli, small_spec, spec_for
from sifu.cli.main import FORMER, app

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = sorted(command.name or command.callback.__name__.replace("_", "-") for command in app.registered_commands)  # type: ignore[union-attr]
HEAVY = ["torch", "matplotlib", "flwr", "sklearn", "scipy", "cryptography", "PIL"]


def one_object(answer: Answer) -> dict[str, Any]:
    """Return the JSON object on stdout; fail if there is any other output."""
    value = json.loads(answer.out)
    assert isinstance(value, dict)
    assert "NaN" not in answer.out
    assert "Infinity" not in answer.out
    return value


def test_help_of_every_command_loads_nothing_heavy() -> None:
    """One process asks all commands for their help and then checks which modules were imported."""
    program = f"""
import sys
from sifu.cli.main import main
for name in [None, *{COMMANDS!r}]:
    sys.argv = ["sifu", *([name] if name else []), "--help"]
    try:
        main()
    except SystemExit as ended:
        assert ended.code in (0, None), (name, ended.code)
print("LOADED", [name for name in {HEAVY!r} if name in sys.modules])
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], env=environment(), capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""
    assert ended.stdout.rstrip().endswith("LOADED []"), ended.stdout[-300:]
    for name in COMMANDS:
        assert f"sifu {name}" in ended.stdout


def commands_below(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield every command with its words, the console's excepted: they belong to its distribution."""
    yield name, command
    for word, below in getattr(command, "commands", {}).items():
        if word not in ("serve", "token"):
            yield from commands_below(below, f"{name} {word}")


def test_help_fits_a_screen_and_an_option_means_the_same_everywhere() -> None:
    meanings: dict[str, set[Any]] = {}
    for name, command in commands_below(built_command(app), "sifu"):
        lines = command.get_help(click.Context(command, info_name=name, terminal_width=80)).splitlines()
        assert len(lines) <= 40, name
        assert not any(len(line) > 80 or line.endswith("...") for line in lines[1:]), name
        for parameter in command.params:
            for flag in parameter.opts:
                if flag.startswith("--"):
                    meanings.setdefault(flag, set()).add((parameter.help, parameter.metavar, parameter.type.name))
    assert {flag: said for flag, said in meanings.items() if len(said) > 1} == {}
    assert len(built_command(app).commands) == 26


def test_a_command_of_an_earlier_version_names_the_one_of_today(cli: Command) -> None:
    for word, now in FORMER.items():
        answer = cli(word, "run")
        assert (answer.code, answer.out) == (2, "")
        assert answer.err.endswith(f"use {now}\n")


def test_importing_the_package_loads_nothing_heavy() -> None:
    program = f"import sys, sifu; sifu.Spec(); print([name for name in {HEAVY!r} if name in sys.modules])"
    ended = subprocess.run([sys.executable, "-c", program], env=environment(), capture_output=True, text=True)
    assert ended.stdout.strip() == "[]"


def test_commands_that_only_read_a_run_do_without_torch(run_with_requests: Path, tmp_path: Path) -> None:
    """Commands that only read work in a process in which importing torch fails; they start in half the time."""
    folder, spec = str(run_with_requests), str(tmp_path / "spec.toml")
    commands = [
        ["status", folder],
        ["init", spec],
        ["plan", spec],
        ["plan", folder, "--clients", "client-007"],
        ["verify", folder],
        ["verify", f"{folder}/certificates/strictly.public.json"],
        ["certificate", folder, "strictly", "--all"],
        ["requests", folder],
    ]
    program = f"""
import sys
sys.modules["torch"] = None
from sifu.cli.main import main
for command in {commands!r}:
    sys.argv = ["sifu", *command]
    try:
        main()
    except SystemExit as ended:
        assert ended.code in (0, None), (command, ended.code)
"""
    ended = subprocess.run([sys.executable, "-c", program], env=environment(), capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def test_every_option_has_a_help_text() -> None:
    from typer.main import get_command

    for name, command in get_command(app).commands.items():  # type: ignore[attr-defined]
        assert command.help, name
        for parameter in command.params:
            if parameter.name != "help":
                assert getattr(parameter, "help", None), f"{name} {parameter.name}"


def test_no_arguments_show_the_help(cli: Command) -> None:
    answer = cli()
    assert "sifu demo" in answer.out + answer.err
    assert "Traceback" not in answer.err


@pytest.mark.long
def test_json_of_every_command(cli: Command, own_run: Path, tmp_path: Path) -> None:
    spec = tmp_path / "spec.toml"
    commands: dict[str, list[Any]] = {
        "init": [spec],
        "train": [
            spec, "--run", tmp_path / "new", "--set", "data.clients=12", "--set", "stop.max_rounds=2",
            "--set", "stop.target=0.0",
        ],
        "status": [own_run],
        "plan": [own_run, "--clients", "client-007"],
        "request": [own_run, "--clients", "client-007", "--id", "a"],
        "decide": [own_run, "a", "verify"],
        "requests": [own_run, "a"],
        "forget": [own_run],
        "certificate": [own_run, "a"],
        "key": [own_run],
        "flower": [tmp_path / "app"],
        "verify": [own_run],
        "audit": [own_run, "--no-attacks", "--replays", 2000],
        "export": [own_run, "--model", tmp_path / "model.safetensors"],
        "predict": [tmp_path / "model.safetensors", tmp_path / "rows.npz"],
        "purge": [own_run],
        "backup": [own_run, tmp_path / "backup.zip"],
        "restore": [tmp_path / "backup.zip", tmp_path / "restored"],
        "report": [own_run],  # the report comes after purge, which erases it
    }  # fmt: skip
    np.savez(tmp_path / "rows.npz", x=np.zeros((2, 64)))
    grouped = tmp_path / "grouped"
    sifu.train(spec_for("groups", stop={"max_rounds": 4}), run=grouped)
    commands["update"] = [grouped]
    solved = tmp_path / "solved"
    sifu.train({"data": {"clients": 4}, "model": {"kind": "ridge"}}, run=solved)
    newcomer = tmp_path / "newcomer.npz"
    np.savez(newcomer, x=np.ones((3, 64)), y=np.array([0, 1, 2]))
    commands["join"] = [solved, "--name", "new", "--file", newcomer]
    commands["evaluate"] = [solved, "--on", "training"]
    assert set(commands) | {"demo", "serve"} >= set(COMMANDS), "a new command: add it here"
    answers = {}
    for name, arguments in commands.items():
        answer = cli(name, *arguments, "--format", "json")
        assert answer.code == 0, (name, answer.err)
        answers[name] = one_object(answer)
    assert answers["train"]["phase"] == "ready"
    assert answers["status"]["clients"][5]["state"] == "waiting"
    assert answers["plan"]["clients"] == ["client-007"]
    assert [request["request"] for request in answers["forget"]["requests"]] == ["waits", answers["request"]["request"]]
    assert answers["verify"]["holds"] is True
    assert Path(answers["export"]["model"]).is_file()
    assert Path(answers["report"]["report"]).is_file()


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["status", "/nowhere"], 2),
        (["plan", "RUN", "--clients", "nobody"], 2),
        (["forget", "RUN", "--clients", "client-007", "--sigma", "0.5", "--level", "exact"], 4),
        (["forget", "RUN", "--clients", "client-007", "--epsilon", "-1"], 2),
        (["request", "RUN", "--clients", ""], 2),
        (["verify", "/nowhere"], 2),
        (["export", "RUN", "--model", "/no/where/m.safetensors"], 2),
        (["train", "/no.toml", "--run", "RUN"], 2),
        (["init", "/no/where.toml"], 2),
        (["report", "/nowhere"], 2),
        (["plan", "RUN"], 2),
        (["plan", "RUN", "--clients", "client-007", "--epsilon", "ten"], 2),
        (["status", "RUN", "--colour"], 2),
        (["nonsense"], 2),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
@pytest.mark.parametrize("spelling", [["--format", "json"], ["--format=json"]], ids=["two words", "one word"])
def test_json_of_errors(cli: Command, own_run: Path, arguments: list[str], code: int, spelling: list[str]) -> None:
    answer = cli(*[str(own_run) if argument == "RUN" else argument for argument in arguments], *spelling)
    assert answer.code == code, answer.err
    value = one_object(answer)
    assert value["exit_code"] == code
    assert len(value["error"]) > 10


def test_json_of_a_failed_verification(cli: Command, own_run: Path) -> None:
    (own_run / "models" / "44.safetensors").unlink()
    answer = cli("verify", own_run, "--format", "json")
    assert answer.code == 3
    value = one_object(answer)
    assert value["holds"] is False
    assert any("node 44" in problem for problem in value["problems"])


def test_a_client_called_json_does_not_change_the_format(cli: Command, own_run: Path) -> None:
    """A client called `json` is not read as `--format json`."""
    answer = cli("plan", own_run, "--clients", "json", "--format", "text")
    assert answer.code == 2
    assert answer.out == ""


def test_names_in_brackets_are_printed_as_they_are(cli: Command, tmp_path: Path) -> None:
    """Client names may contain brackets; rich must not read them as markup."""
    import numpy as np

    generator = np.random.default_rng(0)
    clients = {
        name: (generator.random((6, 3)), np.array([0, 1, 2, 0, 1, 2]))
        for name in ("[bold]one[/bold]", "two [/]", "three", "four", "[red]")
    }
    sifu.train(small_spec(stop={"max_rounds": 2}), run=tmp_path / "run", clients=clients)
    for arguments in (
        ["status"],
        ["plan", "--clients", "[bold]one[/bold]"],
        ["plan", "--clients", "two [/]", "--sigma", "0.3"],
        ["request", "--clients", "[bold]one[/bold]"],
    ):
        answer = cli(arguments[0], tmp_path / "run", *arguments[1:])
        assert answer.code == 0, answer.err
        if arguments[0] != "status":
            assert arguments[2] in answer.out
    answer = cli("status", tmp_path / "run", "--all")
    assert "two [/]" in answer.out


@pytest.mark.slow
def test_the_demo_tells_the_whole_story(tmp_path: Path) -> None:
    answer = run_cli("demo", "--run", tmp_path / "demo", "--format", "json")
    assert answer.code == 0, answer.err
    value = one_object(answer)
    assert value["verified"] is True
    assert len(value["requests"]) == 3
    assert value["total_rounds"] < value["total_scratch_rounds"]
    assert query(tmp_path / "demo", "SELECT COUNT(*) FROM certificates") == [(6,)]
    assert (value["exact"]["level"], value["exact"]["rounds"]) == ("exact", 0)
    assert value["exact"]["accuracy"] > 0.9
