"""Inputs from strangers (specs, certificates, databases, backups): each gets a message or an answer.

The tests try a fixed sample of inputs and the corpus from longer runs of `fuzzing.py` (`make fuzz`): one input for each
different answer, and inputs that once failed.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fuzzing import Watch, make, try_one
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from run_tools import environment
from sifu.api import load_spec, restore, verify_certificate, verify_run
from sifu.core.spec import Spec, commented_toml
from sifu.errors import SifuError
from suite_setup import examples

pytestmark = pytest.mark.long

CORPUS = Path(__file__).with_name("corpus")
QUICK = settings(
    max_examples=examples(40), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None
)
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=12),
    st.sampled_from([1e308, -1, 0, 10**40, ""]),
)
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner))
mutations = st.lists(
    st.tuples(st.integers(0, 2**31), st.integers(0, 255), st.sampled_from(["set", "cut", "insert"])), max_size=6
)


def mutated(content: bytes, changes: Any) -> bytes:
    """Set a few bytes, insert some, or cut the content off at a place."""
    for place, value, how in changes:
        at = place % max(1, len(content))
        if how == "set":
            content = content[:at] + bytes([value]) + content[at + 1 :]
        elif how == "insert":
            content = content[:at] + bytes([value]) * (1 + value % 9) + content[at:]
        elif value < 32:
            content = content[:at]
    return content


def answers(call: Callable[[], Any]) -> None:
    """Check that a call raises only SifuErrors."""
    with contextlib.suppress(SifuError):
        call()


def fuzz(strategy: Any, check: Callable[[Any], None]) -> None:
    """Try a fixed sample of inputs."""
    QUICK(given(strategy)(check))()


def some_field(body: Any, path: list[int], value: Any) -> Any:
    """Return a copy with one value somewhere in it replaced."""
    if not path or not isinstance(body, dict | list) or not body:
        return value
    if isinstance(body, dict):
        key = sorted(body)[path[0] % len(body)]
        return body | {key: some_field(body[key], path[1:], value)}
    at = path[0] % len(body)
    return [*body[:at], some_field(body[at], path[1:], value), *body[at + 1 :]]


def test_specs_as_values() -> None:
    defaults = Spec().to_mapping()
    strategy = st.one_of(
        values, st.builds(lambda p, v: some_field(defaults, p, v), st.lists(st.integers(0, 99), max_size=3), values)
    )
    fuzz(strategy, lambda value: answers(lambda: Spec.from_mapping(value)))


def test_specs_as_files(tmp_path: Path) -> None:
    content = commented_toml(Spec()).encode()
    tomllib.loads(content.decode())

    def check(changes: Any) -> None:
        (tmp_path / "spec.toml").write_bytes(mutated(content, changes))
        answers(lambda: load_spec(tmp_path / "spec.toml"))

    fuzz(mutations, check)


def test_certificates(run_with_requests: Path, tmp_path: Path) -> None:
    texts = sorted((run_with_requests / "certificates").glob("*.json"))
    contents = [json.loads(path.read_bytes()) for path in texts]
    path = tmp_path / "certificate.json"

    def check(drawn: tuple[int, Any, list[int], Any]) -> None:
        number, changes, where, value = drawn
        number %= len(texts)
        original = texts[number].read_bytes()
        path.write_bytes(mutated(original, changes))
        changed = path.read_bytes() != original
        answers(lambda: changed and verify_certificate(path))
        other = some_field(contents[number], where, value)
        path.write_text(json.dumps(other))
        if other != contents[number] and where:
            with contextlib.suppress(SifuError):
                assert not verify_certificate(path).holds

    fuzz(st.tuples(st.integers(0, 99), mutations, st.lists(st.integers(0, 99), max_size=4), values), check)


@pytest.fixture(scope="module")
def whole_database(run_with_requests: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run whose write-ahead log is merged into its database."""
    import sqlite3

    folder = tmp_path_factory.mktemp("fuzz") / "run"
    shutil.copytree(run_with_requests, folder)
    connection = sqlite3.connect(folder / "run.db")
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    return folder


def test_databases(whole_database: Path) -> None:
    """A damaged database is refused with a message, or verification reports the damage; nothing crashes."""
    content = (whole_database / "run.db").read_bytes()

    def check(changes: Any) -> None:
        for name in ("run.db-wal", "run.db-shm"):
            (whole_database / name).unlink(missing_ok=True)
        (whole_database / "run.db").write_bytes(mutated(content, changes))
        answers(lambda: verify_run(whole_database))

    try:
        fuzz(mutations, check)
    finally:
        (whole_database / "run.db").write_bytes(content)


def test_backups(whole_database: Path, tmp_path: Path) -> None:
    import sifu

    folder = tmp_path / "run"
    shutil.copytree(whole_database, folder)
    sifu.open_run(folder).backup(tmp_path / "b.zip")
    content = (tmp_path / "b.zip").read_bytes()

    def check(changes: Any) -> None:
        with tempfile.TemporaryDirectory(dir=tmp_path) as parent:
            (Path(parent) / "b.zip").write_bytes(mutated(content, changes))
            answers(lambda: restore(Path(parent) / "b.zip", Path(parent) / "back"))

    fuzz(mutations, check)


@pytest.mark.parametrize("target", ["spec", "certificate", "store", "backup"])
def test_what_fuzzing_found_before(run_with_requests: Path, tmp_path: Path, target: str) -> None:
    """Every input of the corpus gets an answer: no other error, no code run, and no changed input that verifies."""
    fuzzed = make(target, tmp_path, run_with_requests)
    watch = Watch()
    watch.allowed = str(tmp_path.resolve())
    with tarfile.open(CORPUS / f"{target}.tar.xz") as archive:
        inputs = [archive.extractfile(getmember).read() for getmember in archive.getmembers()]  # type: ignore[union-attr]
    wrong = [problem for content in inputs if (problem := try_one(fuzzed, watch, content)[1])]
    print(f"{target}: {len(inputs)} inputs of the corpus")
    assert len(inputs) >= 6
    assert wrong == []


@pytest.mark.parametrize("target", ["spec", "certificate"])
def test_the_fuzzer_itself(run_with_requests: Path, tmp_path: Path, target: str) -> None:
    program = [
        sys.executable,
        str(Path(__file__).with_name("fuzzing.py")),
        target,
        "2",
        "--run",
        str(run_with_requests),
    ]
    ended = subprocess.run(program, env=environment(), capture_output=True, text=True, timeout=300)
    result = json.loads(ended.stdout)
    assert ended.returncode == 0, result
    assert result["inputs"] > 0


def test_code_that_runs_is_noticed(tmp_path: Path) -> None:
    """Control of the fuzzer: it notices a target that runs its input, one that writes elsewhere, and one that fails."""
    watch = Watch()
    watch.allowed = str(tmp_path.resolve() / "inside")

    class Runs:
        def check(self, content: bytes) -> str:
            exec(content.decode())
            return "done"

    class Writes:
        def check(self, content: bytes) -> str:
            (tmp_path / "elsewhere").write_bytes(content)
            return "done"

    class Fails:
        def check(self, content: bytes) -> str:
            return str(content[10])

    assert try_one(Runs(), watch, b"1 + 1")[1].startswith("exec")  # type: ignore[arg-type]
    assert "elsewhere" in try_one(Writes(), watch, b"x")[1]  # type: ignore[arg-type]
    assert "IndexError" in try_one(Fails(), watch, b"x")[1]  # type: ignore[arg-type]
