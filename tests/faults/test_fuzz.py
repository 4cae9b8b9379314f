"""Inputs from strangers (specs, certificates, databases, backups): each gets a message or an answer.

The tests try a fixed sample of inputs and the corpus from longer runs of `fuzzing.py` (`make fuzz`): one input for each
different answer, and inputs that once failed.
"""

from __future__ import annotations

import contextlib
import tarfile
from pathlib import Path

import pytest
from fuzzing import Watch, fuzz, make, try_one
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sifu.core.spec import Spec
from sifu.errors import SifuError
from suite_setup import examples

pytestmark = pytest.mark.long

TARGETS = ["spec", "certificate", "store", "backup"]
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12)
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner))


@settings(deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), max_examples=examples(40))
@given(st.lists(st.integers(0, 99), max_size=2), values)
def test_specs_as_values(path: list[int], value: object) -> None:
    """A mapping from Python may hold values that no file can."""
    spec = Spec().to_mapping()
    for number in path[:1]:
        section = sorted(spec)[number % len(spec)]
        if len(path) == 1 or not isinstance(spec[section], dict):
            spec[section] = value
        else:
            spec[section][sorted(spec[section])[path[1] % len(spec[section])]] = value
    with contextlib.suppress(SifuError):
        Spec.from_mapping(spec if path else value)  # type: ignore[arg-type]


@pytest.mark.parametrize("target", TARGETS)
def test_no_input_of_a_stranger_does_anything(run_with_requests: Path, target: str) -> None:
    """No other error than a message, no code run, and no changed input that verifies."""
    result = fuzz(target, 60.0, run_with_requests, seed=1, most=150)
    print(result)
    assert result["problems"] == []
    assert result["answers"] > 5


@pytest.mark.parametrize("target", TARGETS)
def test_what_fuzzing_found_before(run_with_requests: Path, tmp_path: Path, target: str) -> None:
    fuzzed = make(target, tmp_path, run_with_requests)
    watch = Watch()
    watch.allowed = str(tmp_path.resolve())
    with tarfile.open(Path(__file__).with_name("corpus") / f"{target}.tar.xz") as archive:
        inputs = [archive.extractfile(getmember).read() for getmember in archive.getmembers()]  # type: ignore[union-attr]
    wrong = [problem for content in inputs if (problem := try_one(fuzzed, watch, content)[1])]
    print(f"{target}: {len(inputs)} inputs of the corpus")
    assert len(inputs) >= 6
    assert wrong == []


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
