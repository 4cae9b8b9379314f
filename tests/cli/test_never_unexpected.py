"""Commands on hostile input: known cases and seeded draws over all commands never end with exit code 1, an unexpected
error.
"""

from __future__ import annotations

import errno
import io
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forged_runs import execute
from run_tools import Command, copy_run, small_spec
from sifu.cli.main import app

pytestmark = pytest.mark.usefixtures("no_debugging")


@pytest.fixture
def no_debugging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SIFU_DEBUG", raising=False)


def check(answer: Any, *codes: int) -> None:
    assert answer.code in codes, (answer.code, answer.err)
    assert "unexpected" not in answer.err
    assert answer.err.strip()


def test_a_list_of_records_longer_than_a_file_name(own_trained: Path, cli: Command) -> None:
    records = ",".join(map(str, range(900, 1200)))
    check(cli("forget", own_trained, "--client", "client-000", "--records", records), 2)
    check(cli("request", own_trained, "--client", "client-000", "--records", "x" * 5000), 2)


@pytest.mark.parametrize("place", ["header", "row"])
def test_a_csv_field_over_the_limit(tmp_path: Path, cli: Command, place: str) -> None:
    long = "x" * 140_000
    lines = [f"who,{long},y", "a,1,2"] if place == "header" else ["who,x,y", f"a,{long},2"]
    (tmp_path / "t.csv").write_text("\n".join(lines) + "\n")
    check(cli("init", tmp_path / "s.toml", "--from", tmp_path / "t.csv", "--label", "y", "--client-column", "who"), 2)


DEEP = "[" * 60_000 + "]" * 60_000


@pytest.mark.parametrize("line", [DEEP, '{"node": 1e400, "path": "x"}'])
def test_files_of_a_run_that_are_nested_too_deeply(own_trained: Path, cli: Command, line: str) -> None:
    (own_trained / "exports.jsonl").write_text(f"{line}\n")
    assert cli("purge", own_trained).code == 0  # lines that cannot be read name no export
    (own_trained / "clients.json").write_text(line)
    check(cli("clients", "list", own_trained), 2)
    (own_trained / "clients.json").unlink()
    (own_trained / "certificates" / "odd.public.json").write_text('{"body": {"ledger": {"seq": 1e400, "head": "x"}}}')
    answer = cli("verify", own_trained)
    check(answer, 3)
    assert "odd.public.json" in answer.err


@pytest.mark.parametrize("clients", [DEEP, "[1e400]", "7"])
def test_a_report_of_records_that_cannot_be_read(own_run: Path, cli: Command, clients: str) -> None:
    execute(own_run, f"UPDATE subjects SET clients = '{clients}'")
    check(cli("report", own_run), 5)
    execute(own_run, "UPDATE subjects SET request = 'nobody'")
    check(cli("report", own_run), 5)


def test_a_memory_that_ends_in_a_line_nested_too_deeply(own_trained: Path, heads: Path, cli: Command) -> None:
    """An append removes an incomplete last line, which an interrupted process left, whatever it contains."""
    heads.parent.mkdir()
    heads.write_text(DEEP[:60_000])
    assert cli("verify", own_trained).code == 0
    assert [json.loads(line)["folder"] for line in heads.read_text().splitlines()] == [str(own_trained)]


@pytest.mark.parametrize(
    "networks",
    [7, "x", [], [1], {}, {"sha256": 1}, {"sha256": "a" * 64},
     {"sha256": "0", "groups": 2, "stretch": 1, "samples": {}},
     {"sha256": None, "groups": "2", "stretch": 1.0, "samples": {"0": 3}}],
)  # fmt: skip
def test_malformed_networks_of_a_description(own_trained: Path, tmp_path: Path, cli: Command, networks: Any) -> None:
    model = tmp_path / "m.safetensors"
    assert cli("export", own_trained, "--model", model).code == 0
    (described,) = tmp_path.glob("m*.json")
    content = json.loads(described.read_text()) | {"networks": networks}
    described.write_text(json.dumps(content))
    (tmp_path / "rows.npz").write_bytes(b"")
    check(cli("predict", model, tmp_path / "rows.npz"), 2)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ENAMETOOLONG])
def test_a_deletion_that_fails(own_trained: Path, cli: Command, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def fail(path: Any, *rest: Any, **named: Any) -> None:
        raise OSError(code, os.strerror(code), str(path))

    monkeypatch.setattr(os, "unlink", fail)
    monkeypatch.setattr(Path, "unlink", fail)
    check(cli("forget", own_trained, "--client", "client-000", "--retention", "strict", "--method", "scratch"), 2, 5)


@pytest.mark.parametrize("seconds", [-1.0, 253402300799.0, 1e18])
def test_a_clock_beyond_what_can_be_written(
    own_trained: Path, tmp_path: Path, cli: Command, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    import sifu.store.times as clock

    monkeypatch.setattr(clock, "time", type("Clock", (), {"time": staticmethod(lambda: seconds)}), raising=False)
    for arguments in (("request", own_trained, "--client", "client-000"),
                      ("requests", own_trained, "--pending"),
                      ("token", "create", tmp_path, "--name", "a", "--role", "auditor", "--days", "3650")):  # fmt: skip
        check(cli(*arguments), 2, 5)


def odd_files(folder: Path, run: Path) -> list[str]:
    """Write files and folders of every kind that a user might pass to a command."""
    folder.mkdir()
    contents: dict[str, bytes] = {
        "empty": b"", "zeros": bytes(4096), "deep.json": b"[" * 100_000, "deep.toml": b"a = " + b"[" * 100_000,
        "long.csv": b"a,b\n" + b"x" * 140_000 + b",1\n", "quote.csv": b'a,b\n"1,2\n', "latin.csv": b"a,b\n\xff,1\n",
        "number.json": b"7", "text.json": b'"x"', "list.json": b"[1]", "object.json": b"{}",
        "half.json": b'{"a": "\\ud800"}',
        "nan.json": b'{"body": NaN}', "key.pem": b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n",
        "zip.zip": b"PK\x05\x06" + bytes(18), "spec.toml": b"[data]\nclients = 1e999\n",
        "model.safetensors": b"\xff" * 64,
        "rows.npz": b"PK\x03\x04" + bytes(60),
    }  # fmt: skip
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    (folder / "folder").mkdir()
    (folder / "loop").symlink_to(folder / "loop")
    damaged = copy_run(run, folder / "damaged")
    execute(damaged, "UPDATE run SET value = '[[[' WHERE key = 'spec'")
    emptied = copy_run(run, folder / "emptied")
    (emptied / "run.db").write_bytes(b"")
    return [str(path) for path in sorted(folder.iterdir())]


WORDS = (
    *("", " ", "-1", "0", "1e999", "nan", "9" * 400, "x" * 300, "x" * 5000, "a,b", "../..", "\u202e", "\udcff", "%00"),
    *("file:", "http://", "command:", "client-000", "client-000,client-000", "auto", "\n", "[", "a=b", "1,2,3"),
)
LEFT_OUT = {"demo", "serve", "--help", "--install-completion", "--show-completion", "--follow"}
"""Commands that run for long, and commands or options that typer provides."""


def every_command() -> list[tuple[list[str], list[Any]]]:
    """Return the words and parameters of each command of the command line."""
    import typer.main

    def walk(command: Any, words: list[str]) -> list[tuple[list[str], list[Any]]]:
        if hasattr(command, "commands"):
            return [found for name, inner in sorted(command.commands.items()) for found in walk(inner, [*words, name])]
        return [(words, command.params)]

    return [entry for entry in walk(typer.main.get_command(app), []) if entry[0][0] not in LEFT_OUT]


def drawn_arguments(draw: random.Random, parameters: list[Any], odd: list[str], run: str) -> list[str]:
    """Draw some arguments and options of a command, with correct, odd or absurd values."""

    def value(parameter: Any) -> str:
        choices = list(getattr(parameter.type, "choices", ())) or [run]
        pick: Callable[[], Any] = draw.choice(
            (lambda: draw.choice(odd), lambda: draw.choice(WORDS), lambda: draw.choice(choices))
        )
        return str(pick())

    words: list[str] = []
    for parameter in parameters:
        names = [name for name in parameter.opts if name.startswith("-")]
        if not names:
            words += [run if draw.random() < 0.5 else value(parameter)]
        elif names[0] not in LEFT_OUT and draw.random() < 0.3:
            words += [draw.choice(names)] + ([] if getattr(parameter, "is_flag", False) else [value(parameter)])
    return words


@pytest.mark.parametrize("share", range(4))
def test_random_bad_input_to_every_command(
    own_trained: Path, tmp_path: Path, cli: Command, monkeypatch: pytest.MonkeyPatch, share: int
) -> None:
    draw, odd = random.Random(share), odd_files(tmp_path / "odd", own_trained)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    (tmp_path / "spec.toml").write_text(json.dumps(small_spec()["data"]))
    for words, parameters in every_command()[share::4]:
        for _ in range(6):
            arguments = [*words, *drawn_arguments(draw, parameters, odd, str(own_trained))]
            answer = cli(*arguments)
            assert answer.code != 1, (arguments, answer.err[-600:])
            assert "Traceback" not in answer.err, arguments
