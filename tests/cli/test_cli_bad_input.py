"""Bad input gets a one-line message and a stable exit code, never a traceback, and changes nothing."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sifu
from run_tools import Command, copy_run, run_cli, small_spec, state
from sifu.errors import InputError

SPEC = """
[data]
clients = 12
samples_per_client = 10
[local]
steps = 3
[stop]
target = 0.0
max_rounds = 8
"""


@pytest.fixture
def spec_file(tmp_path: Path) -> Path:
    path = tmp_path / "spec.toml"
    path.write_text(SPEC)
    return path


def check_refused(answer: Any, code: int, *words: str) -> None:
    assert answer.code == code, (answer.code, answer.err, answer.out)
    assert answer.err.strip(), "no sentence on stderr"
    assert "Traceback" not in answer.err
    assert "unexpected" not in answer.err
    flat = " ".join(answer.err.split())
    for word in words:
        assert word in flat, f"{word!r} is not in: {flat}"


BAD_REQUESTS: list[tuple[list[str], str]] = [
    (["--clients", "nobody"], "unknown client nobody"),
    (["--clients", "client-007,nobody"], "unknown client nobody"),
    (["--clients", "client-000"], "already forgotten"),
    (["--clients", "client-007,client-007"], "more than once"),
    (["--clients", ""], "no client"),
    (["--clients", " , "], "no client"),
    (["--clients", ",".join(f"client-{k:03d}" for k in range(6, 12))], "every client"),
    (["--clients", ",".join(f"client-{k:03d}" for k in range(5, 12))], "client"),
    (["--clients", "client-007", "--epsilon", "0"], "epsilon must be a positive number"),
    (["--clients", "client-007", "--epsilon", "-1"], "epsilon must be a positive number"),
    (["--clients", "client-007", "--epsilon", "nan"], "epsilon must be a positive number"),
    (["--clients", "client-007", "--epsilon", "inf"], "epsilon must be a positive number"),
    (["--clients", "client-007", "--epsilon", "ten"], "epsilon"),
    (["--clients", "client-007", "--delta", "0"], "delta must lie strictly between 0 and 1"),
    (["--clients", "client-007", "--delta", "1"], "delta must lie strictly between 0 and 1"),
    (["--clients", "client-007", "--delta", "-0.1"], "delta must lie strictly between 0 and 1"),
    (["--clients", "client-007", "--delta", "nan"], "delta must lie strictly between 0 and 1"),
    (["--clients", "client-007", "--sigma", "0"], "sigma must be a positive number"),
    (["--clients", "client-007", "--sigma", "-2"], "sigma must be a positive number"),
    (["--clients", "client-007", "--sigma", "nan"], "sigma must be a positive number"),
    (["--clients", "client-007", "--sigma", "inf"], "sigma must be a positive number"),
    (["--clients", "client-007", "--sigma", "much"], "sigma must be auto or a number"),
    (["--clients", "client-007", "--retention", "loose"], "'loose' is not one of"),
    (["--clients", "client-007", "--method", "sifi"], "did you mean sifu?"),
    (["--clients", "client-007", "--method", "magic"], "unknown method"),
    (["--clients", "client-007", "--epsilon", "1e308"], "epsilon"),
    (["--clients", "client-007", "--epsilon", "1e-320"], "epsilon"),
    (["--clients", "client-007", "--delta", "1e-320"], "delta"),
    (["--clients", "client-007", "--sigma", "1e-320"], "sigma"),
]


@pytest.fixture(scope="module")
def run_read_only(run_with_requests: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_run(run_with_requests, tmp_path_factory.mktemp("bad-input") / "run")


@pytest.mark.parametrize("command", ["plan", "request", "forget"])
@pytest.mark.parametrize(("arguments", "sentence"), BAD_REQUESTS[:-4], ids=lambda value: " ".join(value)[:40])
def test_bad_requests(cli: Command, run_read_only: Path, command: str, arguments: list[str], sentence: str) -> None:
    if command == "plan" and sentence in ("every client", "client"):
        pytest.skip("a plan does not queue, so it may name waiting clients")
    before = state(run_read_only)
    answer = cli(command, run_read_only, *arguments)
    check_refused(answer, 2, sentence)
    assert state(run_read_only) == before


@pytest.mark.parametrize(("arguments", "word"), BAD_REQUESTS[-4:], ids=lambda value: " ".join(value)[:40])
def test_figures_at_the_edge_of_floats_end_in_a_sentence(
    cli: Command, own_run: Path, arguments: list[str], word: str
) -> None:
    """Extreme figures are refused or executed, but never cause an endless loop, a traceback or an unexpected error."""
    for command in ("plan", "forget"):
        answer = cli(command, own_run, *arguments)
        assert answer.code in (0, 2, 4), answer.err
        assert "unexpected" not in answer.err
        if answer.code:
            assert word in answer.err
    assert sifu.open_run(own_run).verify().problems == []


def test_forgetting_everyone_over_several_queued_requests_is_refused(cli: Command, own_trained: Path) -> None:
    for k in range(0, 10, 2):
        assert cli("request", own_trained, "--clients", f"client-{k:03d},client-{k + 1:03d}").code == 0
    before = state(own_trained)
    check_refused(cli("request", own_trained, "--clients", "client-010,client-011"), 2, "every client")
    check_refused(cli("forget", own_trained, "--clients", "client-010,client-011"), 2, "every client")
    assert state(own_trained) == before
    check_refused(cli("request", own_trained, "--clients", "client-003"), 2, "already waits in request r2")
    assert cli("request", own_trained, "--clients", "client-010").code == 0


@pytest.mark.parametrize(
    "request_id", ["", "a b", "../up", "a/b", "-dash", ".hidden", "x" * 65, "é", "a\nb", "con\0trol", "r1\n"]
)
def test_bad_request_ids(cli: Command, own_trained: Path, request_id: str) -> None:
    before = state(own_trained)
    answer = cli("request", own_trained, "--clients", "client-007", f"--id={request_id}")
    check_refused(answer, 2, "request id")
    assert state(own_trained) == before


def test_a_request_id_is_idempotent_with_the_same_terms_only(cli: Command, own_trained: Path) -> None:
    ask = ("request", own_trained, "--clients", "client-007,client-008", "--id", "mine", "--sigma", "0.3")
    assert cli(*ask).code == 0
    before = state(own_trained)
    assert cli(*ask).code == 0
    assert state(own_trained) == before
    check_refused(cli(*ask, "--epsilon", "3"), 2, "request mine is already in the ledger with other terms")
    check_refused(
        cli("request", own_trained, "--clients", "client-007", "--id", "mine", "--sigma", "0.3"), 2, "other terms"
    )
    check_refused(
        cli("forget", own_trained, "--clients", "client-007", "--request", "mine", "--sigma", "0.3"), 2, "other terms"
    )
    assert state(own_trained) == before
    assert cli("forget", own_trained).code == 0
    done = state(own_trained)
    assert cli(*ask).code == 0
    assert cli("forget", own_trained, "--request", "mine").code == 0
    assert state(own_trained) == done


def test_a_done_request_asked_again_is_not_called_received(cli: Command, run_read_only: Path) -> None:
    answer = cli(
        "request", run_read_only, "--clients", "client-001", "--id", "from-scratch", "--method", "scratch",
        "--format", "json",
    )  # fmt: skip
    assert answer.code == 0, answer.err
    assert answer.json["status"] == "done"


def test_terms_without_clients_belong_nowhere(cli: Command, run_read_only: Path) -> None:
    before = state(run_read_only)
    check_refused(cli("forget", run_read_only, "--epsilon", "3"), 2, "--epsilon belongs", "--clients")
    check_refused(cli("forget", run_read_only, "--request", "r99"), 2, "r99", "strictly")
    check_refused(cli("forget", run_read_only, "--clients", "client-007", "--level", "some"), 2, "'some' is not one of")
    assert state(run_read_only) == before


# -- specs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[local]\nsteeps = 3\n", ["unknown key local.steeps", "did you mean local.steps?"]),
        ("[lokal]\nsteps = 3\n", ["unknown key lokal"]),
        ("steps = 3\n", ["unknown key steps", "did you mean"]),
        ("[privacy]\nrate = 3\n", ["unknown key privacy.rate"]),
        ('[local]\nsteps = "three"\n', ["local.steps must be a whole number", "'three'"]),
        ("[local]\nsteps = 3.5\n", ["local.steps must be a whole number"]),
        ('[local]\nrate = "fast"\n', ["local.rate must be a number or 'auto'"]),
        ("[local]\nrate = nan\n", ["local.rate must be a finite number"]),
        ("[local]\nrate = -1\n", ["local.rate must be positive"]),
        ("[stop]\ntarget = 95\n", ["stop.target must be in [0, 1]"]),
        ('[model]\nkind = "sofmax"\n', ["did you mean softmax?"]),
        ('[data]\nname = "digit"\n', ["data.name must be one of", "did you mean digits?"]),
        ("local = 3\n", ["local must be a table of keys"]),
        ("[data]\nclients = 100000\n", ["client"]),
        ('[server]\nparticipation = "poisson(2)"\n', ["participation 'poisson(2)' is not valid"]),
        ("[privacy]\nepsilon = 0\n", ["epsilon must be a positive number"]),
        ("[privacy]\ndelta = 1\n", ["delta must lie strictly between 0 and 1"]),
        ("[privacy]\nsigma = 0\n", ["sigma must be a positive number"]),
        ('[model]\nkind = "mlp"\n[local]\nrate = 0.1\n', ["regularity.kind"]),
        ('[model]\nkind = "cnn"\n', ["local.rate"]),
        ('[model]\nkind = "python"\n', ["Python"]),
        ('[regularity]\nkind = "assumed"\nfactor = 1e300\n', ["regularity.factor"]),
        ("[local]\nrate = 1e300\n", ["local.rate"]),
        ('[data]\nname = "npz"\n', ["data.file"]),
        ('[data]\nname = "npz"\nfile = "missing.npz"\n', ["missing.npz"]),
        ('[data]\npartition = "given"\n', ["client"]),
        ("this is not TOML", ["is not valid TOML"]),
        ("[local\n", ["is not valid TOML"]),
        ("\x00", ["is not valid TOML"]),
        ("seed = -1\n", ["seed"]),
        ("seed = 1e3\n", ["seed"]),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_bad_specs(cli: Command, tmp_path: Path, text: str, words: list[str]) -> None:
    path = tmp_path / "spec.toml"
    path.write_text(text)
    answer = cli("train", path, "--run", tmp_path / "run")
    check_refused(answer, 2, *words)
    assert not (tmp_path / "run" / "run.db").exists()


def test_a_spec_that_is_a_pipe_is_refused_at_once(cli: Command, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "spec.toml")
    answer = cli("train", tmp_path / "spec.toml", "--run", tmp_path / "run")
    check_refused(answer, 2, "it is not a regular file")


def test_a_number_of_five_thousand_digits_is_one_line(cli: Command, tmp_path: Path, spec_file: Path) -> None:
    (tmp_path / "long.toml").write_text(f"seed = {'7' * 5000}\n")
    check_refused(cli("train", tmp_path / "long.toml", "--run", tmp_path / "run"), 2, "not valid TOML")
    answer = cli("train", spec_file, "--run", tmp_path / "run", "--set", f"seed={'7' * 5000}")
    check_refused(answer, 2, "a value of 5000 characters")
    check_refused(cli("train", spec_file, "--run", tmp_path / "run", "--set", f"seed={2**53}"), 2, "up to 2^53")


def test_specs_that_cannot_be_read(cli: Command, tmp_path: Path) -> None:
    check_refused(cli("train", tmp_path / "none.toml", "--run", tmp_path / "run"), 2, "none.toml", "sifu init")
    check_refused(cli("train", tmp_path, "--run", tmp_path / "run"), 2, "cannot read the spec")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe\x00")
    check_refused(cli("train", tmp_path / "bytes.toml", "--run", tmp_path / "run"), 2, "not valid TOML")
    with (tmp_path / "huge.toml").open("wb") as stream:
        stream.truncate(2 << 20)
    check_refused(cli("train", tmp_path / "huge.toml", "--run", tmp_path / "run"), 2, "huge.toml")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("local.steeps=4", ["local.steps"]),
        ("nothing", ["is not understood"]),
        ("a.b.c=1", ["is not understood"]),
        ("seed.x=1", ["seed"]),
        ("=1", ["is not understood"]),
        ("local.steps=many", ["local.steps must be a whole number"]),
    ],
)
def test_bad_overrides(cli: Command, tmp_path: Path, spec_file: Path, setting: str, words: list[str]) -> None:
    spec_file.write_text("seed = 3\n" + SPEC)
    check_refused(cli("train", spec_file, "--run", tmp_path / "run", "--set", setting), 2, *words)


def test_a_run_is_continued_with_its_own_spec_only(cli: Command, tmp_path: Path, spec_file: Path) -> None:
    run = tmp_path / "run"
    assert cli("train", spec_file, "--run", run).code == 0
    before = state(run)
    assert cli("train", spec_file, "--run", run).code == 0
    for setting, name in [("local.steps=4", "local.steps"), ("seed=2", "seed"), ("local.rate=0.5", "local.rate")]:
        check_refused(cli("train", spec_file, "--run", run, "--set", setting), 2, name, "another folder")
    assert state(run) == before


# -- run folders ------------------------------------------------------------------------------------------------------


def test_init_overwrites_nothing(cli: Command, tmp_path: Path) -> None:
    path = tmp_path / "new.toml"
    assert cli("init", path).code == 0
    assert sifu.load_spec(path) == sifu.Spec()
    path.write_text("mine")
    check_refused(cli("init", path), 2, "exists")
    assert path.read_text() == "mine"
    check_refused(cli("init", tmp_path / "no" / "new.toml"), 2, "does not exist: make it")


@pytest.mark.parametrize("command", ["status", "plan", "request", "forget", "verify", "report", "export"])
def test_folders_that_are_no_runs(cli: Command, tmp_path: Path, command: str) -> None:
    more = {
        "plan": ["--clients", "a"],
        "request": ["--clients", "a"],
        "export": ["--model", tmp_path / "model.safetensors"],
    }.get(command, [])
    empty = tmp_path / "empty"
    empty.mkdir()
    check_refused(cli(command, empty, *more), 2, "is not a run folder")
    check_refused(cli(command, tmp_path / "absent", *more), 2)
    other = tmp_path / "other"
    other.mkdir()
    sqlite3.connect(other / "run.db").execute("CREATE TABLE t (x)")
    check_refused(cli(command, other, *more), 2, "is not a sifu run")
    noise = tmp_path / "noise"
    noise.mkdir()
    (noise / "run.db").write_bytes(b"SQLite format 3\0" + b"\xa5" * 5000)
    check_refused(cli(command, noise, *more), 5, "damaged")
    assert not (tmp_path / "model.safetensors").exists()
    for folder in (empty, tmp_path / "absent"):
        assert not folder.exists() or not list(folder.iterdir()), "a command that refuses must not leave files"


@pytest.mark.parametrize("command", ["status", "plan", "request", "forget", "verify", "report", "export", "train"])
def test_another_format_is_refused(cli: Command, own_run: Path, tmp_path: Path, spec_file: Path, command: str) -> None:
    before = state(own_run)
    arguments: list[Any] = {
        "plan": [own_run, "--clients", "client-007"],
        "request": [own_run, "--clients", "client-007"],
        "export": [own_run, "--model", tmp_path / "model.safetensors"],
        "train": [spec_file, "--run", own_run],
    }.get(command, [own_run])
    for version in (99, 10):
        connection = sqlite3.connect(own_run / "run.db")
        connection.execute(f"PRAGMA user_version = {version}")
        connection.close()
        check_refused(cli(command, *arguments), 5, f"the format {version}", "reads only what it wrote itself")
    assert state(own_run) == before


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE run SET value = 'x' WHERE key = 'spec'",
        "UPDATE run SET value = 'x' WHERE key = 'layout'",
        "UPDATE run SET value = 'x' WHERE key = 'tip'",
        "UPDATE run SET value = '999' WHERE key = 'tip'",
        "UPDATE run SET value = '{}' WHERE key = 'facts'",
        "DELETE FROM run",
        "DELETE FROM nodes",
        "DELETE FROM clients",
        "UPDATE requests SET terms = 'x'",
        "UPDATE subjects SET clients = '[99]'",
        "UPDATE nodes SET parent = node",
        "DROP TABLE nodes",
        "DROP TABLE models",
        "UPDATE requests SET multiplier = 0.0",
    ],
)
def test_reading_a_damaged_run_is_no_unexpected_error(cli: Command, own_run: Path, damage: str) -> None:
    """Damage that prevents an answer gives exit code 5 with a message, and exit code 3 in `verify`."""
    connection = sqlite3.connect(own_run / "run.db", isolation_level=None)
    connection.execute(damage)
    connection.close()
    answer = cli("verify", own_run)
    check_refused(answer, 3)
    wrong = []
    for command, more in [("status", []), ("plan", ["--clients", "client-007"]), ("forget", [])]:
        answer = cli(command, own_run, *more)
        if answer.code not in (0, 2, 5) or "unexpected" in answer.err:
            wrong.append((command, answer.code, answer.err.strip()[:200]))
    assert not wrong


def test_training_into_a_folder_with_something_else_in_it_is_refused(
    cli: Command, tmp_path: Path, spec_file: Path
) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    check_refused(cli("train", spec_file, "--run", folder), 2, "not empty")
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]
    check_refused(cli("train", spec_file, "--run", folder / "notes.txt"), 2, "notes.txt")
    assert (folder / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("name", ["models", "certificates", ".new", "operator.key"])
def test_training_never_deletes_what_it_did_not_make(cli: Command, tmp_path: Path, spec_file: Path, name: str) -> None:
    """Training keeps a user's folder or file that has the name of one of sifu's."""
    folder = tmp_path / "project"
    precious = folder / name if name == "operator.key" else folder / name / "precious.bin"
    precious.parent.mkdir(parents=True)
    precious.write_bytes(b"years of work")
    answer = cli("train", spec_file, "--run", folder)
    assert precious.exists(), "a file that sifu did not make was deleted"
    assert precious.read_bytes() == b"years of work"
    assert answer.code == (5 if name == "operator.key" else 2)  # a key without a database belongs to a damaged run


def test_exporting_to_a_place_that_is_not_there(cli: Command, own_run: Path, tmp_path: Path) -> None:
    check_refused(cli("export", own_run, "--model", tmp_path / "no" / "m.safetensors"), 2, "no folder")
    check_refused(cli("export", own_run, "--model", tmp_path), 2)


# -- data -------------------------------------------------------------------------------------------------------------


def npz_spec(path: Path, **arrays: Any) -> str:
    np.savez(path, **arrays)
    return (
        f'[data]\nname = "npz"\nfile = "{path}"\npartition = "given"\n[local]\nsteps = 2\n'
        "[stop]\ntarget = 0.0\nmax_rounds = 2\n"
    )


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["x", "y"])
def test_nan_and_inf_in_the_data_are_refused(cli: Command, tmp_path: Path, value: float, where: str) -> None:
    generator = np.random.default_rng(0)
    x, y, client = generator.random((30, 4)), generator.random(30), np.repeat(np.arange(6), 5)
    (x if where == "x" else y)[17] = value
    spec = tmp_path / "spec.toml"
    spec.write_text(npz_spec(tmp_path / "own.npz", x=x, y=y, client=client) + '[model]\nkind = "least_squares"\n')
    check_refused(cli("train", spec, "--run", tmp_path / "run"), 2)
    assert not (tmp_path / "run" / "run.db").exists()


def test_an_own_npz_trains_and_a_changed_one_is_refused(cli: Command, tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    x, y, client = generator.random((60, 4)), generator.integers(0, 3, 60), np.repeat(np.arange(12), 5)
    spec = tmp_path / "spec.toml"
    spec.write_text(npz_spec(tmp_path / "own.npz", x=x, y=y, client=client))
    run = tmp_path / "run"
    answer = cli("train", spec, "--run", run)
    assert answer.code == 0, answer.err
    before = state(run)
    np.savez(tmp_path / "own.npz", x=x * 2.0, y=y, client=client)
    check_refused(cli("forget", run, "--clients", "3"), 2, "not those the run was made with")
    np.savez(tmp_path / "own.npz", x=x[:-1], y=y[:-1], client=client[:-1])
    check_refused(cli("forget", run, "--clients", "3"), 2, "not those the run was made with")
    (tmp_path / "own.npz").unlink()
    check_refused(cli("forget", run, "--clients", "3"), 2, "own.npz")
    assert state(run) == before


def test_a_client_without_samples_is_refused_from_python(tmp_path: Path) -> None:
    x, y = np.ones((4, 3)), np.array([0, 1, 0, 1])
    clients = {"full": (x, y), "other": (x, y), "empty": (x[:0], y[:0])}
    with pytest.raises(InputError, match="'empty'"):
        sifu.train(small_spec(), run=tmp_path / "run", clients=clients)
    assert not (tmp_path / "run" / "run.db").exists()


def test_divergence_is_rejected_and_the_last_good_state_stays(cli: Command, tmp_path: Path) -> None:
    spec = tmp_path / "spec.toml"
    spec.write_text(
        SPEC.replace("steps = 3", "steps = 3\nrate = 1e200\nmomentum = 0.9")
        + '[model]\nkind = "cnn"\n[regularity]\nkind = "assumed"\n'
    )
    run = tmp_path / "run"
    check_refused(cli("train", spec, "--run", run), 2, "rejected")
    kept = state(run)
    answer = cli("status", run, "--format", "json")
    assert answer.code == 0
    assert answer.json["phase"] == "training"
    check_refused(cli("train", spec, "--run", run), 2, "rejected")
    assert state(run) == kept
    assert sifu.open_run(run).verify().problems == []
    check_refused(cli("export", run, "--model", tmp_path / "m.safetensors"), 2, "training")


# -- levels -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sections", "arguments", "reason"),
    [
        ({"model": {"dtype": "float32"}}, ["--level", "proven"], "float32"),
        ({"server": {"participation": "fixed(6)"}}, ["--level", "proven"], "fixed number"),
        ({"regularity": {"kind": "assumed"}}, ["--level", "proven"], "assumed to expand"),
        ({}, ["--level", "exact"], "exact"),
    ],
    ids=["float32", "fixed", "assumed", "exact"],
)
def test_what_cannot_be_certified_as_asked_changes_nothing(
    cli: Command, tmp_path: Path, sections: dict[str, Any], arguments: list[str], reason: str
) -> None:
    run = sifu.train(small_spec(**sections), run=tmp_path / "run")
    before = state(run.folder)
    answer = cli("forget", run.folder, "--clients", "client-003", "--sigma", "0.5", *arguments)
    check_refused(answer, 4, "nothing was changed", reason)
    assert state(run.folder) == before
    # A request can also wait in the queue, and is refused there too.
    assert cli("request", run.folder, "--clients", "client-003", "--sigma", "0.5").code == 0
    before = state(run.folder)
    check_refused(cli("forget", run.folder, *arguments), 4, reason)
    assert state(run.folder) == before


def test_usage_errors_have_exit_code_2_and_no_traceback() -> None:
    for arguments in (
        ["plan"],
        ["nonsense"],
        ["train", "x.toml"],
        ["status", "x", "--colour"],
        ["plan", "x", "--sigma"],
    ):
        answer = run_cli(*arguments)
        check_refused(answer, 2)
        assert answer.out == ""


def test_a_path_that_cannot_be_used_is_named(cli: Command, tmp_path: Path) -> None:
    """A wrong path is reported as the operator's mistake, not as an unexpected error."""
    file = tmp_path / "file"
    file.write_text("")
    for arguments in (
        ("flower", "new", file / "app"),
        ("clients", "sign", "--key", file, "--name", "a", "--run-id", "r", "--id", "i", "--output", file / "x"),
        ("train", tmp_path / "spec.toml", "--run", file / "run"),
    ):
        check_refused(cli(*arguments), 2)


def test_a_refused_change_of_the_list_makes_no_folder(cli: Command, tmp_path: Path) -> None:
    check_refused(cli("clients", "block", tmp_path / "absent", "--name", "a"), 2, "not on the list")
    assert not (tmp_path / "absent").exists()


def test_a_list_without_a_run_says_what_makes_one(cli: Command, tmp_path: Path) -> None:
    (tmp_path / "clients.json").write_text("[]")
    check_refused(cli("status", tmp_path), 2, "has a list of clients but no run yet", "flwr run")


@pytest.mark.parametrize("given", [True, False])
def test_train_says_when_the_classes_were_counted_from_the_labels(tmp_path: Path, cli: Command, given: bool) -> None:
    draws = np.random.default_rng(0)
    np.savez(tmp_path / "own.npz", x=draws.random((12, 3)), y=np.arange(12) % 3, client=np.arange(12) // 4)
    (tmp_path / "spec.toml").write_text(
        f'data = {{name = "npz", file = "{tmp_path / "own.npz"}", partition = "given"}}\n'
        f'model = {{kind = "ridge"{", outputs = 3" if given else ""}}}\n'
    )
    answer = cli("train", tmp_path / "spec.toml", "--run", tmp_path / "run")
    assert answer.code == 0
    assert ("model.outputs is not set" in " ".join(answer.err.split())) != given
