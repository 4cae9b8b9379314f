"""Tools for small runs: build one, copy it, dump it, change it, run the command line on it."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import typer.main

import sifu
from sifu.store.files import SALT_BYTES

SMALL: dict[str, Any] = {
    "data": {"clients": 12, "samples_per_client": 10},
    "local": {"steps": 3},
    "stop": {"target": 0.0, "max_rounds": 8},
}
"""Spec of twelve clients with ten digits each and eight rounds: it trains in a fraction of a second once torch is
loaded.
"""

SOURCES = Path(sifu.__file__).resolve().parent.parent


def small_spec(**sections: Any) -> dict[str, Any]:
    """Return `SMALL` with keys of its sections replaced: small_spec(stop={"max_rounds": 3}, seed=5)."""
    result: dict[str, Any] = {key: dict(value) for key, value in SMALL.items()}
    for name, value in sections.items():
        result[name] = {**result.get(name, {}), **value} if isinstance(value, dict) else value
    return result


def spec_for(method: str, **sections: Any) -> dict[str, Any]:
    """Return `small_spec` with the sections that the method needs."""
    result = small_spec(**sections)
    if method == "closed_form":
        return result | {"model": {"kind": "ridge"}, "features": {"kind": "random_fourier", "count": 32}}
    if method == "groups":
        result["groups"] = {"count": 4, "rounds": 3} | result.get("groups", {})
    return result


class SameNoise:
    """Source of noise with the same draws in every process, so that runs can be compared."""

    def standard_normal(self, size: int) -> np.ndarray[Any, Any]:
        """Return the draw for this size."""
        return np.random.default_rng(size).standard_normal(size)


def copy_run(source: Path, target: Path) -> Path:
    """Copy a run folder as `cp -r` does."""
    try:
        shutil.copytree(source, target)
    except shutil.Error:  # SQLite removed its -wal and -shm files when a reader of this process closed
        shutil.rmtree(target)
        shutil.copytree(source, target)
    return target


@dataclass(frozen=True)
class Column:
    """A column of a table as SQLite describes it."""

    name: str
    kind: str
    nullable: bool
    key: bool


def connect(folder: Path) -> sqlite3.Connection:
    """Connect to the run's database with its checks disabled, for tests that damage it."""
    connection = sqlite3.connect(folder / "run.db", isolation_level=None)
    connection.execute("PRAGMA ignore_check_constraints=ON")
    return connection


def tables(connection: sqlite3.Connection) -> list[str]:
    """Return the names of all tables."""
    rows = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")
    return [name for (name,) in rows]


def columns(connection: sqlite3.Connection, table: str) -> list[Column]:
    """Return the columns of a table."""
    described = connection.execute(f"PRAGMA table_info({table})")
    return [Column(name, kind, not needed and not key, bool(key)) for _, name, kind, needed, _, key in described]


def dump(folder: Path) -> dict[str, list[tuple[Any, ...]]]:
    """Return all content of the database, table by table."""
    connection = sqlite3.connect(folder / "run.db", isolation_level=None)
    try:
        return {name: sorted(connection.execute(f"SELECT * FROM {name}"), key=repr) for name in tables(connection)}
    finally:
        connection.close()


def files_of(folder: Path) -> dict[str, str]:
    """Return digests of the model, update, statistics and certificate files, temporary files included."""
    paths = [
        path
        for name in ("models", "statistics", "certificates")
        for path in (folder / name).rglob("*")
        if path.is_file()
    ]
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in [*paths, folder / "operator.key"]
    }


def numbers_of(folder: Path) -> dict[str, str]:
    """Return digests of these files without their salts, which differ between runs; without certificates and key."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(_without_salts(path)).hexdigest()
        for name in ("models", "statistics")
        for path in (folder / name).rglob("*")
        if path.is_file()
    }


def _without_salts(path: Path) -> bytes:
    if path.suffix != ".safetensors":
        return path.read_bytes()[:-SALT_BYTES]
    try:
        stored = safetensors.numpy.load_file(path)
    except safetensors.SafetensorError:  # a power loss left a partial file that nothing refers to
        return path.read_bytes()
    return safetensors.numpy.save(stored)


def state(folder: Path) -> tuple[Any, Any]:
    """Return database and files; equal values before and after show that nothing changed."""
    return dump(folder), files_of(folder)


def query(folder: Path, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
    """Return the rows of a SELECT on a run."""
    connection = sqlite3.connect(folder / "run.db")
    try:
        return connection.execute(sql, values).fetchall()
    finally:
        connection.close()


def scalars(folder: Path) -> dict[str, Any]:
    """Return everything recorded that must not depend on interruptions: no times, nonces, hashes or key."""
    return {
        "nodes": query(folder, "SELECT * FROM nodes ORDER BY node"),
        "participation": query(folder, "SELECT * FROM participation ORDER BY node, client"),
        "evaluations": query(folder, "SELECT * FROM evaluations ORDER BY node, subset"),
        "models": query(folder, "SELECT node, kept, bytes, psi_max FROM models ORDER BY node"),
        "numbers": numbers_of(folder),
        "statistics": query(folder, "SELECT file, node, clients, samples, bytes FROM statistics ORDER BY file"),
        "requests": query(
            folder,
            "SELECT request, status, terms, method, request_order, multiplier, noise_std, source_node, wanted_node, "
            "noise_node, final_node, level "
            "FROM requests ORDER BY request",
        ),
        "subjects": query(folder, "SELECT * FROM subjects ORDER BY subject"),
        "charges": query(folder, "SELECT * FROM charges ORDER BY noise_node, subject"),
        "clients": query(folder, "SELECT * FROM clients ORDER BY client"),
        "run": query(folder, "SELECT key, value FROM run WHERE key IN ('tip', 'phase', 'spec', 'facts', 'layout')"),
    }


@dataclass(frozen=True)
class Answer:
    """Output and exit code of a command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The JSON object on stdout; any other output is an error."""
        return json.loads(self.out)


Command = Callable[..., Answer]

built_command = functools.cache(typer.main.get_command)
"""Cache of built commands: Typer rebuilds all of them at every call, which takes longer than most commands here."""


def called_in_process(
    main: Callable[[], None], program: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Command:
    """Return a function that calls `program ARGUMENTS` in this process and returns exit code and output."""

    def call(*arguments: object) -> Answer:
        capsys.readouterr()
        monkeypatch.setattr(typer.main, "get_command", built_command)
        monkeypatch.setattr(sys, "argv", [program, *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        code = ended.value.code
        return Answer(code if isinstance(code, int) else 1, printed.out, printed.err)

    return call


def environment(**more: str) -> dict[str, str]:
    """Return the environment of a child process: sifu's sources, one thread, no colours."""
    inherited = {key: value for key, value in os.environ.items() if key not in ("SIFU_DEBUG", "FORCE_COLOR")}
    return inherited | {
        "PYTHONPATH": str(SOURCES),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "120",
        **more,
    }


def start_cli(*arguments: object) -> subprocess.Popen[str]:
    """Start `sifu ARGUMENTS` as a separate process."""
    return subprocess.Popen(
        [sys.executable, "-m", "sifu.cli.main", *map(str, arguments)],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_cli(*arguments: object) -> Answer:
    """Run `sifu ARGUMENTS` as a separate process, to its end."""
    process = start_cli(*arguments)
    out, err = process.communicate(timeout=300)
    return Answer(process.returncode, out, err)
