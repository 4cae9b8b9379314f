"""Bad input: every row ends with its exit code and the name of what is wrong, and writes nothing."""

from __future__ import annotations

import itertools
import math
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file

import sifu
from run_tools import Answer, Command, connect, run_cli, small_spec, state
from sifu.api import load_spec

Words = NDArray[np.int64]
EVERYBODY = ",".join(f"client-{k:03d}" for k in range(6, 12))
TERMS: dict[str, list[str]] = {
    "epsilon": ["0", "-1", "nan", "inf", "ten", "0.00009"], "delta": ["0", "1", "-0.1", "nan", "9e-11"],
    "sigma": ["0", "-2", "nan", "inf", "much"], "retention": ["loose"], "method": ["sifi", "magic"], "level": ["some"],
    "clients": ["nobody", "client-007,nobody", "client-000", "client-007,client-007", "", " , ", EVERYBODY],
    "id": ["", "a b", "../up", "a/b", "-dash", ".hidden", "x" * 65, "é", "a\nb", "con\0trol", "r1\n"],
}  # fmt: skip
"""Bad values of each term of a request."""
SPECS: dict[str, list[str]] = {
    "local.steeps": ["[local]\nsteeps = 3\n"], "lokal": ["[lokal]\nsteps = 3\n"], "steps": ["steps = 3\n"],
    "local.steps": ['[local]\nsteps = "three"\n', "[local]\nsteps = 3.5\n"], "local": ["local = 3\n"],
    "local.rate": ["[local]\nrate = " + value for value in ('"fast"', "nan", "-1", "1e300")],
    "stop.target": ["[stop]\ntarget = 95\n"], "model.kind": ['[model]\nkind = "sofmax"\n'],
    "data.name": ['[data]\nname = "digit"\n'],
    "server.wait": [f'[server]\nwait = "{value}"\n' for value in ("0", "1.5", "0%", "101%", "0s", "5m", "some")],
    "client": ["[data]\nclients = 100000\n", '[data]\npartition = "given"\n'],
    "participation": ['[server]\nparticipation = "poisson(2)"\n'], "epsilon": ["[privacy]\nepsilon = 0\n"],
    "delta": ["[privacy]\ndelta = 1\n"], "sigma": ["[privacy]\nsigma = 0\n"], "privacy.rate": ["[privacy]\nrate = 3\n"],
    "regularity.kind": ['[model]\nkind = "mlp"\n[local]\nrate = 0.1\n'], "rate": ['[model]\nkind = "cnn"\n'],
    "Python": ['[model]\nkind = "python"\n'], "data.file": ['[data]\nname = "npz"\n'],
    "regularity.factor": ['[regularity]\nkind = "assumed"\nfactor = 1e300\n'],
    "ridge.regularisation": ['[model]\nkind = "ridge"\n[ridge]\nregularisation = -1'],
    "features.count": ['[features]\nkind = "random_fourier"\ncount = 7'],
    "features.kind": ['[features]\nknid = "none"', '[model]\nkind = "mlp"\n[features]\nkind = "random_fourier"'],
    "keep.statistics": ['[keep]\nstatistics = "all"'],
    "missing.npz": ['[data]\nname = "npz"\nfile = "missing.npz"\n'],
    "seed": ["seed = -1\n", "seed = 1e3\n", f"seed = {2**53}\n"],
    "TOML": ["this is not TOML", "[local\n", "\0", "\ud800", f"seed = {'7' * 5000}\n"],
}  # fmt: skip
"""Bad specs for each key that the refusal names."""
EDGES = {
    "wait": '[server]\nwait = "1"\n', "wait of all": '[server]\nwait = "100%"\n', "target": "[stop]\ntarget = 1.0\n",
    "everybody": '[server]\nparticipation = "poisson(1)"\n', "one": '[server]\nparticipation = "fixed(1)"\n',
    "epsilon": "[privacy]\nepsilon = 1e-4\n", "delta": "[privacy]\ndelta = 1e-10\n", "seed": f"seed = {2**53 - 1}\n",
    "rounds": "[stop]\nmin_rounds = 2\nmax_rounds = 2\n", "momentum": "[local]\nmomentum = 0.0\n",
}  # fmt: skip
"""Specs with an extreme value that is still allowed."""
TABLE = "hospital,age,pressure,disease\nnorth,50,130,False\nsouth,60,150,True\nnorth,70,120,True\nsouth,30,110,False\n"
TABLE_SPEC = {"name": "table", "partition": "given", "label": "disease", "client": "hospital", "classes": "False,True",
              "scale": "age=50,20; pressure=130,20"}  # fmt: skip
TABLES: dict[str, tuple[str, dict[str, Any]]] = {
    "data.classes": (TABLE, {"classes": ""}), "no,yes": (TABLE, {"classes": "no,yes"}),
    "hospital": (TABLE.replace("north,70", ",70"), {}), "data.missing": (TABLE.replace("120", ""), {}),
    "ill": (TABLE.replace(",", ";"), {"label": "ill"}), "tabel": (TABLE, {"name": "tabel"}),
    "data.scale": (TABLE, {"scale": "aeg=50,20"}), "model.outputs": (TABLE, {"outputs": 3}),
}  # fmt: skip
"""A table and its keys for each name in the refusal."""


def check_refused(answer: Answer, code: int, *names: str) -> None:
    assert answer.code == code, (answer.code, answer.err, answer.out)
    assert "Traceback" not in answer.err
    assert "unexpected" not in answer.err
    said = "".join(answer.err.split())
    assert said
    assert [name for name in names if "".join(name.split()) not in said] == []


@pytest.mark.parametrize("term", TERMS)
def test_terms(cli: Command, run_with_requests: Path, term: str) -> None:
    before = state(run_with_requests)
    clients = [] if term == "clients" else ["--clients", "client-007"]
    commands = {"id": ["request"], "level": ["forget"]}.get(term, ["plan", "request", "forget"])
    for value in TERMS[term]:
        for command in commands[value == EVERYBODY :]:  # a plan may name everybody
            check_refused(cli(command, run_with_requests, *clients, f"--{term}={value}"), 2, term.rstrip("s"))
    assert state(run_with_requests) == before


@pytest.mark.parametrize("term", ["epsilon", "delta", "sigma"])
def test_the_edges_of_floats(cli: Command, own_run: Path, term: str) -> None:
    """Extreme figures are refused or carried out, but never end in a loop or a traceback."""
    for command in ("plan", "forget"):
        answer = cli(command, own_run, "--clients", "client-007", f"--{term}", "1e-320")
        if answer.code:
            check_refused(answer, 4 if answer.code == 4 else 2, term)
    assert sifu.open_run(own_run).verify().problems == []


def test_an_id_stands_for_the_same_terms_only(cli: Command, own_trained: Path) -> None:
    ask = ("request", own_trained, "--clients", "client-007", "--id", "mine", "--sigma", "0.3")
    assert cli(*ask).code == 0
    before = state(own_trained)
    assert cli(*ask).code == 0
    check_refused(cli(*ask, "--epsilon", "3"), 2, "mine")
    check_refused(cli("request", own_trained, "--clients", "client-008", "--id", "mine", "--sigma", "0.3"), 2, "mine")
    check_refused(cli("request", own_trained, "--clients", "client-007"), 2, "mine")
    check_refused(cli("forget", own_trained, "--request", "r99"), 2, "r99")
    check_refused(cli("forget", own_trained, "--epsilon", "3"), 2, "--epsilon")
    check_refused(cli("request", own_trained, "--clients", f"{EVERYBODY},{EVERYBODY.replace('0', '1')}"), 2)
    assert state(own_trained) == before


@pytest.mark.parametrize("key", SPECS)
def test_specs(cli: Command, tmp_path: Path, key: str) -> None:
    for text in SPECS[key]:
        (tmp_path / "spec.toml").write_text(text, errors="surrogatepass")
        check_refused(cli("train", tmp_path / "spec.toml", "--run", tmp_path / "run"), 2, key)
    for setting in ("local.steeps=4", "nothing", "a.b.c=1", "=1", "local.steps=many", f"seed={'7' * 5000}"):
        (tmp_path / "spec.toml").write_text("seed = 3\n")
        answer = cli("train", tmp_path / "spec.toml", "--run", tmp_path / "run", "--set", setting)
        check_refused(answer, 2, setting.partition("=")[0])
    assert [path.name for path in tmp_path.iterdir()] == ["spec.toml"]


@pytest.mark.parametrize("edge", EDGES)
def test_the_last_value_that_is_allowed(cli: Command, tmp_path: Path, edge: str) -> None:
    (tmp_path / "spec.toml").write_text(EDGES[edge])
    answer = cli("plan", tmp_path / "spec.toml")
    assert (answer.code, answer.err) == (0, "")


@pytest.mark.parametrize("name", TABLES)
def test_tables(tmp_path: Path, cli: Command, name: str) -> None:
    text, keys = TABLES[name]
    (tmp_path / "heart.csv").write_text(text)
    data = TABLE_SPEC | {"file": str(tmp_path / "heart.csv")} | keys
    model = {"kind": "ridge"} | ({"outputs": data.pop("outputs")} if "outputs" in data else {})
    lines = ["[data]", *(f"{key} = {value!r}" for key, value in data.items())]
    lines += ["[model]", *(f"{key} = {value!r}" for key, value in model.items())]
    (tmp_path / "spec.toml").write_text("\n".join(lines) + "\n")
    check_refused(cli("train", tmp_path / "spec.toml", "--run", tmp_path / "run"), 2, name)
    assert not (tmp_path / "run").exists()


def test_files_and_folders_that_are_something_else(cli: Command, tmp_path: Path) -> None:
    good, huge, mine = tmp_path / "good.toml", tmp_path / "huge.toml", tmp_path / "mine"
    mine.mkdir()
    (mine / "notes.txt").write_text("mine")
    with huge.open("wb") as stream:
        stream.truncate(2 << 20)
    os.mkfifo(tmp_path / "pipe")
    assert cli("init", good).code == 0
    assert load_spec(good) == sifu.Spec()
    before = sorted(tmp_path.rglob("*"))
    for spec in (tmp_path / "none.toml", tmp_path, huge, tmp_path / "pipe"):
        check_refused(cli("train", spec, "--run", tmp_path / "run"), 2, spec.name)
    for folder in (mine, mine / "notes.txt", good / "run"):
        check_refused(cli("train", good, "--run", folder), 2)
    check_refused(cli("init", good), 2, "good.toml")
    check_refused(cli("init", tmp_path / "no" / "new.toml"), 2, "no")
    check_refused(cli("flower", good / "app"), 2)
    check_refused(cli("clients", "block", tmp_path / "absent", "--name", "a"), 2)
    for words in (["plan"], ["nonsense"], ["train", "x.toml"], ["status", "x", "--colour"], ["plan", "x", "--sigma"]):
        check_refused(cli(*words), 2)
    check_refused(run_cli("nonsense"), 2)
    assert sorted(tmp_path.rglob("*")) == before
    assert (mine / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("command", ["status", "plan", "request", "forget", "verify", "report", "export", "train"])
def test_folders_that_are_no_runs(cli: Command, own_run: Path, tmp_path: Path, command: str) -> None:
    asked = ["--clients", "client-007"]
    more = {"export": ["--model", tmp_path / "m"], "plan": asked, "request": asked}.get(command, [])
    (tmp_path / "spec.toml").write_text("")

    def words(folder: Path) -> list[Any]:
        return ["train", tmp_path / "spec.toml", "--run", folder] if command == "train" else [command, folder, *more]

    for name in ("empty", "other", "noise"):
        (tmp_path / name).mkdir()
    sqlite3.connect(tmp_path / "other" / "run.db").execute("CREATE TABLE t (x)")
    (tmp_path / "noise" / "run.db").write_bytes(b"SQLite format 3\0" + b"\xa5" * 5000)
    for name in ("empty", "absent") if command != "train" else ():
        check_refused(cli(*words(tmp_path / name)), 2)
    check_refused(cli(*words(tmp_path / "other")), 2)
    check_refused(cli(*words(tmp_path / "noise")), 5)
    assert not (tmp_path / "m").exists()
    assert not (tmp_path / "absent").exists()
    assert not list((tmp_path / "empty").iterdir())
    before = state(own_run)
    for version in (99, 10):
        with connect(own_run) as database:
            database.execute(f"PRAGMA user_version = {version}")
        check_refused(cli(*words(own_run)), 5, str(version))
    assert state(own_run) == before


@pytest.mark.parametrize(
    "damage",
    [
        *(f"UPDATE run SET value = 'x' WHERE key = '{key}'" for key in ("spec", "layout", "tip")),
        "UPDATE run SET value = '999' WHERE key = 'tip'", "UPDATE run SET value = '{}' WHERE key = 'facts'",
        "DELETE FROM run", "DELETE FROM nodes", "DELETE FROM clients", "UPDATE requests SET terms = 'x'",
        "UPDATE subjects SET clients = '[99]'", "UPDATE nodes SET parent = node", "DROP TABLE nodes",
        "DROP TABLE models", "UPDATE requests SET multiplier = 0.0",
    ],
)  # fmt: skip
def test_damaged_runs(cli: Command, own_run: Path, damage: str) -> None:
    with connect(own_run) as database:
        database.execute(damage)
    check_refused(cli("verify", own_run), 3)
    for words in (["status"], ["plan", "--clients", "client-007"], ["forget"]):
        answer = cli(words[0], own_run, *words[1:])
        if answer.code:
            check_refused(answer, 2 if answer.code == 2 else 5)


def test_training_never_deletes_what_it_did_not_make(cli: Command, tmp_path: Path) -> None:
    (tmp_path / "spec.toml").write_text("")
    for name in ("models", "certificates", ".new", "operator.key"):
        precious = tmp_path / name / name / ("file" if name != "operator.key" else "")
        precious.parent.mkdir(parents=True)
        precious.write_bytes(b"years of work")
        answer = cli("train", tmp_path / "spec.toml", "--run", tmp_path / name)
        check_refused(answer, 5 if name == "operator.key" else 2)  # a key without a database belongs to a damaged run
        assert precious.read_bytes() == b"years of work"


def test_data_that_are_not_finite_and_another_spec(cli: Command, tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    x, y, client = generator.random((60, 4)), generator.random(60), np.repeat(np.arange(12), 5)
    file, spec, run = tmp_path / "own.npz", tmp_path / "spec.toml", tmp_path / "run"
    spec.write_text(f'[data]\nname = "npz"\nfile = "{file}"\n[model]\nkind = "least_squares"\n[stop]\nmax_rounds = 2\n')
    for array, value in itertools.product((x, y), (np.nan, np.inf, -np.inf)):
        kept, array.flat[17] = array.flat[17], value
        np.savez(file, x=x, y=y, client=client)
        check_refused(cli("train", spec, "--run", run), 2)
        assert not run.exists()
        array.flat[17] = kept
    np.savez(file, x=x, y=y, client=client.astype(bytes))
    check_refused(cli("train", spec, "--run", run), 2, "client")
    np.savez(file, x=1e160 * x, y=y, client=client)
    check_refused(cli("train", spec, "--run", run), 2)
    assert not run.exists()
    np.savez(file, x=x, y=y, client=client)
    assert cli("train", spec, "--run", run).code == 0
    before = state(run)
    for key in ("local.steps=4", "seed=2", "local.rate=0.5"):
        check_refused(cli("train", spec, "--run", run, "--set", key), 2, key.partition("=")[0])
    check_refused(cli("export", run, "--model", tmp_path / "no" / "m.safetensors"), 2)
    assert state(run) == before
    head = {"model": {"kind": "ridge", "outputs": 1}, "ridge": {"task": "regression"}}
    head["data"] = {"preprocessing": "fixed"}
    for given, rows, named in ((small_spec(), (x[:0], y[:0]), "'odd'"), (head, (x, 1e6 * y), "scales from the shift")):
        with pytest.raises(sifu.InputError, match=named):
            sifu.train(given, run=tmp_path / "new", clients={"full": (x, y), "odd": rows})
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("reason", ["float32", "fixed", "assumed", "exact"])
def test_levels_that_cannot_be_certified(cli: Command, tmp_path: Path, reason: str) -> None:
    sections = {"float32": {"model": {"dtype": "float32"}}, "fixed": {"server": {"participation": "fixed(6)"}},
                "assumed": {"regularity": {"kind": "assumed"}}, "exact": {}}  # fmt: skip
    run = sifu.train(small_spec(**sections[reason]), run=tmp_path / "run").folder
    terms, level = (
        ["--clients", "client-003", "--sigma", "0.5"],
        ["--level", "exact" if reason == "exact" else "proven"],
    )
    before = state(run)
    check_refused(cli("forget", run, *terms, *level), 4, reason)
    assert state(run) == before
    assert cli("request", run, *terms).code == 0
    before = state(run)
    check_refused(cli("forget", run, *level), 4, reason)  # the request waits, and is refused there too
    assert state(run) == before


IMPOSSIBLE: dict[str, Callable[[Words], None]] = {
    "a negative square": lambda words: words.__setitem__(0, -2),
    "an odd square of an even sum": lambda words: words.__setitem__(0, words[0] + 1),
    "an entry beyond its squares": lambda words: words.__setitem__(1, math.isqrt(int(words[0]) * int(words[2])) + 2),
    "three entries that contradict each other": lambda words: contradict(words),
    "a sum that is no whole number": lambda words: words.__setitem__(10, words[10] + 1),
    "a sum beyond its square": lambda words: words.__setitem__(10, words[10] + (words[0] << 24)),
    "another constant": lambda words: words.__setitem__(14, words[14] + 1),
    "squares beyond the norm": lambda words: words.__setitem__(0, words[14] * 64 + words[0] % 2),
    "a product beyond the targets": lambda words: words.__setitem__(15, words[15] + (words[0] << 20)),
    "targets beyond their norm": lambda words: words.__setitem__(-1, words[-1] << 20),
    "negative targets": lambda words: words.__setitem__(-1, -1),
    "more samples": lambda words: words.__setitem__(-2, words[-2] + 1),
}
"""Statistics of four features, the constant and three targets that no samples have: the lower triangle of G, then H."""


def contradict(words: Words) -> None:
    """Make the products of three features contradict each other, though each pair of them is possible."""
    for row, column in ((1, 0), (2, 0), (2, 1)):
        squares = (int(words[k * (k + 3) // 2]) for k in (row, column))
        words[row * (row + 1) // 2 + column] = -int(0.9 * math.sqrt(math.prod(squares)))


@pytest.mark.parametrize("what", IMPOSSIBLE)
def test_statistics_that_no_samples_have_are_left_out(tmp_path: Path, what: str) -> None:
    """The head is that of a federation without the client that sends them, and the record names it."""
    draw, heads = np.random.default_rng(8), []
    data = {f"c{k}": (draw.normal(size=(12, 4)), draw.integers(0, 3, 12)) for k in range(4)}
    spec = {"data": {"preprocessing": "fixed"}, "model": {"kind": "ridge", "outputs": 3}, "features": {"norm": 8.0},
            "server": {"rejected": "reply"}}  # fmt: skip
    for names in (["c0", "c1", "c2", "c3"], ["c0", "c2", "c3"]):
        samples, options = dict.fromkeys(names, 12), {"sample_shape": (4,), "masked_statistics": False}
        with sifu.ServerLoop(tmp_path / str(len(names)), spec, samples, **options) as server:  # type: ignore[arg-type]
            while task := server.next():
                replies = {name: sifu.LoopClient(name, *data[name]).answer(model, task.instructions[name])
                           for name, model in task.models.items()}  # fmt: skip
                if "c1" in replies:
                    replies["c1"]["statistics"] = replies["c1"]["statistics"].copy()
                    IMPOSSIBLE[what](replies["c1"]["statistics"])
                server.take(replies)
            run = server.run
        rejected = [(row["client"], row["branch"], row["round"]) for row in run.status().to_mapping()["rejections"]]
        assert rejected == [("c1", 0, 0)] * ("c1" in names)
        assert run.verify().problems == []
        head = load_file(run.export(tmp_path / "head.safetensors"))
        heads.append({name: values.tobytes() for name, values in head.items()})
    assert heads[0] == heads[1]
