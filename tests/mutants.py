"""Mutants: a seed draws small changes of the code that claims rest on, and the five suites must notice each.

A mutant changes a comparison, drops a term, removes a check or swaps two arguments, in a copy of the repository. One
that cannot be imported does not count. The outcome is the first test that fails, or `alive`.
python tests/mutants.py SEED COUNT --log FILE [--slice I/N] [--seconds S]
"""

from __future__ import annotations

import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import long_form

REPOSITORY = Path(__file__).resolve().parents[1]
ROOMS = (
    "theory/**/*.py core/premises.py core/observers.py core/replies.py core/round.py core/round_stream.py "
    "requests/certification.py requests/erasure.py requests/files_to_erase.py requests/roll_back.py methods/*.py "
    "run/training.py run/group_training.py run/group_state.py run/closed_form_round.py run/releases.py "
    "run/clients_view.py checking/*.py"
)
"""Theory, premises, levels, budgets, erasure, training and verification, below src/sifu."""
SUITES = ("test_conformance.py", "cli/test_bad_input.py", "test_tamper.py", "test_journeys.py", "test_crash.py")
LONGEST = 900.0
"""Seconds after which a suite that goes on is taken to hang, which kills the mutant."""
OTHER = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
COMMUTE = {"max", "min", "maximum", "minimum", "array_equal", "hypot", "isclose"}
TERMS = (ast.Add, ast.Sub, ast.Mult, ast.Div)


@dataclass(frozen=True)
class Mutant:
    """One change of a file: the text between two places becomes another."""

    file: str
    start: tuple[int, int]
    end: tuple[int, int]
    becomes: str
    kind: str

    @property
    def name(self) -> str:
        """Place, kind and new text of the change."""
        return f"{self.file}:{self.start[0]}:{self.start[1]} {self.kind}: {' '.join(self.becomes.split())[:80]}"

    def applied(self, text: str) -> str:
        """Return the text of the file with the change."""
        lines = text.encode().splitlines(keepends=True)  # columns of a syntax tree count bytes
        (first, left), (last, right) = self.start, self.end
        head, tail = b"".join(lines[: first - 1]) + lines[first - 1][:left], lines[last - 1][right:]
        return (head + self.becomes.encode() + tail + b"".join(lines[last:])).decode()


def _changes(node: ast.AST) -> Iterator[tuple[ast.AST, str, str]]:
    """Yield the part of a node that changes, the kind of the change, and its new text."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        other = ast.Compare(node.left, [OTHER[type(node.ops[0])]()], node.comparators)
        yield node, "comparison", f"({ast.unparse(other)})"
    if isinstance(node, ast.BinOp) and isinstance(node.op, TERMS):
        yield node, "term", f"({ast.unparse(node.left)})"
    if isinstance(node, ast.BoolOp):
        yield node, "term", f"({ast.unparse(ast.BoolOp(node.op, node.values[:-1]))})"
    if isinstance(node, ast.If) and len(node.body) == 1 and not node.orelse and _rejects(node.body[0]):
        yield node.test, "check", "False"
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and "check" in ast.unparse(node.value.func):
        yield node, "check", "pass"
    if isinstance(node, ast.Call) and len(node.args) > 1 and ast.unparse(node.func).split(".")[-1] not in COMMUTE:
        one, two, *rest = node.args
        if not any(isinstance(argument, ast.Starred) for argument in (one, two)) and ast.dump(one) != ast.dump(two):
            swapped = ast.Call(node.func, [two, one, *rest], node.keywords)
            yield node, "arguments", ast.unparse(swapped)


def _rejects(statement: ast.stmt) -> bool:
    ends = isinstance(statement, ast.Raise | ast.Return | ast.Continue)
    return ends or (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Yield))


def _nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that compute something, not those of types, decorators and sentences."""
    if isinstance(node, ast.Raise | ast.JoinedStr):
        return
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _nodes(child)


def mutants() -> list[Mutant]:
    """Return every mutant of the rooms."""
    source, found = REPOSITORY / "src/sifu", []
    for path in sorted({path for room in ROOMS.split() for path in source.glob(room)}):
        for node in _nodes(ast.parse(path.read_text(encoding="utf-8"))):
            for part, kind, becomes in _changes(node):
                start, end = (part.lineno, part.col_offset), (part.end_lineno, part.end_col_offset)  # type: ignore[attr-defined]
                found.append(Mutant(path.relative_to(REPOSITORY).as_posix(), start, end, becomes, kind))
    return found


def outcome(mutant: Mutant, copy: Path) -> str:
    """Return which test notices a mutant of a copy of the repository, and restore the copy."""
    file, text = copy / mutant.file, (copy / mutant.file).read_text(encoding="utf-8")
    paths = [str(copy / part) for part in ("src", "verifier/src", "console/src")]
    given = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    module = mutant.file.removeprefix("src/").removesuffix(".py").replace("/", ".")
    try:
        file.write_text(mutant.applied(text), encoding="utf-8")
        imported = [sys.executable, "-c", f"import sifu.cli.main, {module}"]
        if subprocess.run(imported, env=given, cwd=copy, capture_output=True).returncode:
            return "cannot be imported"
        suites = [f"tests/{suite}" for suite in SUITES]
        program = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-p", "no:cacheprovider", *suites]
        try:
            ended = subprocess.run(program, env=given, cwd=copy, capture_output=True, text=True, timeout=LONGEST)
        except subprocess.TimeoutExpired:
            return "killed: by its time"
        if ended.returncode == 0:
            return "alive"
        failed = [line.split()[1] for line in ended.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        return f"killed: {failed[0] if failed else ended.stdout[-200:]}"
    finally:
        file.write_text(text, encoding="utf-8")


def main() -> int:
    """Try as many mutants as asked for, in the order that a seed draws."""
    seed, count, *arguments = sys.argv[1:]
    found = mutants()
    random.Random(int(seed)).shuffle(found)
    drawn = {mutant.name: mutant for mutant in found}
    with tempfile.TemporaryDirectory(prefix="sifu-mutants-", dir=os.environ.get("PYTEST_DEBUG_TEMPROOT")) as folder:
        copy = Path(folder) / "copy"
        tracked = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, text=True, check=True)
        for name in filter(None, tracked.stdout.split("\0")):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, copy / name)

        def attempt(trial: str) -> str:
            return outcome(drawn[trial], copy)

        return long_form.work_off("mutants", list(drawn)[: int(count)], attempt, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
