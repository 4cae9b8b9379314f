"""Fuzzer of inputs from strangers: python fuzzing.py TARGET SECONDS [--corpus FOLDER] [--seed N]

Targets: spec, certificate, store, backup, or all of them. Inputs are mutated from a corpus. An input joins the corpus
if its answer (the message without its figures) is new, so that rare branches are mutated further. Failures are:

* an exception that is not a SifuError, or an input that takes longer than `LONGEST` seconds;
* code run: a process, an import, a compilation, or a file written outside the folders given (an audit hook watches);
* a certificate or database that verifies although its content was changed.

Prints one JSON object per target; a failing input is saved next to the corpus. The exit code is 1 after any failure.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import math
import os
import random
import re
import shutil
import signal
import sqlite3
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import runs
import sifu
from sifu.api import load_spec, restore, verify_certificate, verify_run
from sifu.core.spec import Spec, commented_toml
from sifu.errors import SifuError

LONGEST = 30.0
TOKENS = [
    b"0", b"-1", b"1e308", b"nan", b"inf", b"null", b"true", b'""', b"{}", b"[]", b"[[", b"\x00", b"\xff\xfe", b"'",
    b'"', b"\\u0000", b"..", b"../", b"/etc/passwd", b"<script>", b"__import__('os').system('id')", b"\x80\x04.", b"%s",
    b"99999999999999999999", b"9" * 400, b"[" * 2000, b'{"a":' * 1500, b"=", b"\n", b"#", b"SQLite format 3\x00",
    b"PK\x03\x04", b"run.db", b"manifest.json", b"../../x", b"client-000", b"\xf0\x9f\x98\x80", b"e", b".", b"-0",
]  # fmt: skip


class Watch:
    """Audit hook that finds code run because of an input."""

    ALWAYS = ("os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen", "pty.spawn", "ctypes.dlopen")

    def __init__(self) -> None:
        self.on, self.found, self.allowed = False, "", ""
        for encoding in ("utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"):
            bytes(4).decode(encoding)  # JSON may use any of these encodings; Python imports each when it first occurs
        sys.addaudithook(self.hook)

    def hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Check an event of Python's audit."""
        if not self.on:
            return
        if event in self.ALWAYS or event.startswith(("socket.connect", "pickle.")):
            self.found = f"{event} {arguments!r}"[:200]
        elif event == "open" and isinstance(arguments[0], str | bytes) and self._writes(arguments):
            path = os.path.abspath(os.fsdecode(arguments[0]))
            if not path.startswith(self.allowed):
                self.found = f"wrote {path}"[:200]
        elif event == "exec" or (event == "compile" and arguments[1] not in (None, "<string>", "<unknown>")):
            self.found = f"{event} {arguments!r}"[:200]

    @staticmethod
    def _writes(arguments: tuple[Any, ...]) -> bool:
        mode, flags = arguments[1], arguments[2]
        if isinstance(mode, str):
            return any(message in mode for message in "wax+")
        return isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))


class Target:
    """Reader of an input that a stranger wrote."""

    def __init__(self, folder: Path, run: Path) -> None:
        self.folder, self.original = folder, run

    def seeds(self) -> list[bytes]:
        """Return the initial inputs."""
        raise NotImplementedError

    def check(self, content: bytes) -> str:
        """Read the input; return the answer, or raise if something forbidden happened."""
        raise NotImplementedError

    def mutate(self, content: bytes, rng: random.Random) -> bytes:
        """Return the input after a change that respects its format; by default unchanged."""
        return content


class SpecFile(Target):
    """Spec in a TOML file."""

    def seeds(self) -> list[bytes]:
        lines = commented_toml(Spec()).splitlines()
        bare = "\n".join(line.split("#")[0].rstrip() for line in lines if line.split("#")[0].strip())
        return [commented_toml(Spec()).encode(), bare.encode(), b'seed = 1\n[data]\nclients = 3\nsource = "digits"\n']

    def mutate(self, content: bytes, rng: random.Random) -> bytes:
        lines = content.split(b"\n")
        with_values = [k for k, line in enumerate(lines) if b"=" in line]
        if with_values:
            at = rng.choice(with_values)
            name = lines[at].split(b"=")[0]
            lines[at] = name + b"= " + rng.choice([*TOKENS, b'"all"', b"[1, 2]", b"{a = 1}", b"1979-05-27", b"0x1F"])
        return b"\n".join(lines)

    def check(self, content: bytes) -> str:
        path = self.folder / "spec.toml"
        path.write_bytes(content)
        spec = load_spec(path)
        again = Spec.from_mapping(spec.to_mapping())
        assert again == spec, "a spec that was read does not read as itself"
        return "read"


class CertificateFile(Target):
    """Signed certificate in a separate file."""

    def __init__(self, folder: Path, run: Path) -> None:
        super().__init__(folder, run)
        self.texts = [path.read_bytes() for path in sorted((run / "certificates").glob("*.json"))]
        self.meanings = [json.loads(text) for text in self.texts]

    def seeds(self) -> list[bytes]:
        return self.texts

    def mutate(self, content: bytes, rng: random.Random) -> bytes:
        try:
            body = json.loads(content)
        except (ValueError, RecursionError):
            return content
        value: Any = rng.choice([None, True, 0, -1, 1.5, 1e308, "", "x", [], {}, [[]], "exact", "proven", 10**30])
        return json.dumps(changed(body, rng, value), sort_keys=rng.random() < 0.5).encode()

    def check(self, content: bytes) -> str:
        path = self.folder / "certificate.json"
        path.write_bytes(content)
        verification = verify_certificate(path)
        if not verification.holds:
            return " / ".join(verification.problems)
        said = json.loads(content)
        assert any(same(said, meaning) for meaning in self.meanings), "a changed certificate verifies"
        return "holds"


class Store(Target):
    """Database of a run folder whose other files are unchanged."""

    def __init__(self, folder: Path, run: Path) -> None:
        super().__init__(folder, run)
        self.run = folder / "run"
        shutil.copytree(run, self.run)
        connection = sqlite3.connect(self.run / "run.db")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        connection.execute("PRAGMA journal_mode=DELETE")
        connection.close()
        self.content = (self.run / "run.db").read_bytes()
        self.said = dumped(self.run / "run.db")

    def seeds(self) -> list[bytes]:
        return [self.content]

    def mutate(self, content: bytes, rng: random.Random) -> bytes:
        path = self.folder / "changed.db"
        path.write_bytes(content)
        connection = sqlite3.connect(path, isolation_level=None)
        try:
            connection.execute("PRAGMA ignore_check_constraints=ON")
            connection.execute("PRAGMA journal_mode=MEMORY")
            names = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
            table = rng.choice(names)
            columns = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
            column = rng.choice(columns)
            value: Any = rng.choice([None, 0, -1, 2**62, 1.5, 1e308, "", "x", "[]", "{}", b"", b"\xff" * 40, "nan"])
            rows = connection.execute(f"SELECT COUNT(*) FROM {table}").fetchone()[0]
            place = f"(SELECT {columns[0]} FROM {table} LIMIT 1 OFFSET {rng.randrange(max(1, rows))})"
            how = rng.random()
            if how < 0.7:
                connection.execute(f"UPDATE {table} SET {column} = ? WHERE {columns[0]} = {place}", (value,))
            elif how < 0.85:
                connection.execute(f"DELETE FROM {table} WHERE {columns[0]} = {place}")
            elif how < 0.9:
                connection.execute(f"PRAGMA user_version={rng.choice([0, 1, 2, 4, -1])}")
            elif how < 0.95:
                connection.execute(f"DROP TABLE {table}")
            else:
                connection.execute(f"ALTER TABLE {table} RENAME COLUMN {column} TO other")
        except (sqlite3.Error, OverflowError, UnicodeDecodeError):
            pass
        finally:
            connection.close()
        return path.read_bytes()

    def check(self, content: bytes) -> str:
        for name in ("run.db-wal", "run.db-shm", "run.db-journal"):
            (self.run / name).unlink(missing_ok=True)
        (self.run / "run.db").write_bytes(content)
        answers = [answer_of(lambda: holds(self.run))]
        if answers == ["holds"]:
            assert dumped(self.run / "run.db") == self.said, "a changed database verifies"
        answers.append(answer_of(lambda: str(sifu.open_run(self.run).status().phase)))
        answers.append(answer_of(lambda: sifu.open_run(self.run).plan(["client-008"]).level))
        return " | ".join(answers)


class Backup(Target):
    """Backup that is restored."""

    def __init__(self, folder: Path, run: Path) -> None:
        super().__init__(folder, run)
        shutil.copytree(run, folder / "run")
        sifu.open_run(folder / "run").backup(folder / "b.zip")
        self.content = (folder / "b.zip").read_bytes()

    def seeds(self) -> list[bytes]:
        return [self.content]

    def mutate(self, content: bytes, rng: random.Random) -> bytes:
        """Change a file in the backup or its list of files; update the digests, so that the checks behind them run."""
        try:
            with zipfile.ZipFile(io.BytesIO(content)) as archive:
                members = {name: archive.read(name) for name in archive.namelist()}
            listed = json.loads(members.pop("manifest.json"))
        except (zipfile.BadZipFile, ValueError, KeyError, OSError, RecursionError, NotImplementedError, RuntimeError):
            return content
        name, how = rng.choice(sorted(members) or ["run.db"]), rng.random()
        if how < 0.6:
            members[name] = mutated(members.get(name, b""), content[:4096], rng)
        elif how < 0.8:
            other = rng.choice(["../x", "/etc/x", "models/../../x", "models/1.safetensors", "lock", "a" * 300, "head"])
            members[other] = members.pop(name, b"")
        else:
            listed = changed(listed, rng, rng.choice([None, -1, 0, "", [], {}, "sifu backup 1", 10**30]))
        if how < 0.8 and isinstance(listed, dict):
            listed["files"] = {
                name: {"bytes": len(held), "digest": hashlib.sha256(held).hexdigest()} for name, held in members.items()
            }
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w") as archive:
            for name, held in members.items():
                archive.writestr(name, held)
            archive.writestr("manifest.json", json.dumps(listed))
        return packed.getvalue()

    def check(self, content: bytes) -> str:
        path, back = self.folder / "b.zip", self.folder / "back"
        path.write_bytes(content)
        shutil.rmtree(back, ignore_errors=True)
        restore(path, back)
        assert verify_run(back).problems == [], "a changed backup was restored to a run that does not verify"
        return "restored"


def holds(folder: Path) -> str:
    """Return the verdict of verification."""
    verification = verify_run(folder)
    return "holds" if verification.holds else " / ".join(verification.problems[:3])


def answer_of(call: Callable[[], str]) -> str:
    """Return the answer of a call, or the text of its SifuError."""
    try:
        return call()
    except SifuError as error:
        return f"{type(error).__name__}: {error}"


def dumped(path: Path) -> Any:
    """Return all rows of all tables, with their types."""
    connection = sqlite3.connect(path)
    try:
        names = sorted(name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'"))
        return {name: sorted(map(repr, connection.execute(f"SELECT * FROM {name}"))) for name in names}
    finally:
        connection.close()


def same(first: Any, second: Any) -> bool:
    """Return whether two JSON values are equal; true is not 1."""
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(map(same, first, second))
    return isinstance(first, bool) == isinstance(second, bool) and bool(first == second)


def changed(value: Any, rng: random.Random, new: Any) -> Any:
    """Return a copy with one value somewhere in it replaced, removed or duplicated."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(sorted(value))
        if rng.random() < 0.1:
            return {other: inner for other, inner in value.items() if other != key}
        return value | {key: changed(value[key], rng, new)}
    if isinstance(value, list) and value and rng.random() < 0.8:
        at = rng.randrange(len(value))
        if rng.random() < 0.2:
            return value[:at] + value[at + 1 :] + value[:at]
        return [*value[:at], changed(value[at], rng, new), *value[at + 1 :]]
    return new


def mutated(content: bytes, other: bytes, rng: random.Random) -> bytes:
    """Return the content after a few byte operations: set, insert, cut, repeat, swap, splice."""
    for _ in range(rng.choice([1, 1, 1, 2, 3, 6])):
        at = rng.randrange(len(content) + 1)
        length = rng.choice([1, 1, 2, 4, 16, 100, 4096])
        how = rng.randrange(8)
        if how == 0:
            content = content[:at] + bytes([rng.randrange(256)]) + content[at + 1 :]
        elif how == 1:
            content = content[:at] + rng.choice(TOKENS) + content[at:]
        elif how == 2:
            content = content[:at] + rng.choice(TOKENS) + content[at + length :]
        elif how == 3:
            content = content[:at] + content[at + length :]
        elif how == 4:
            content = content[:at] + content[at : at + length] * 2 + content[at + length :]
        elif how == 5 and rng.random() < 0.3:
            content = content[:at]
        elif how == 6:
            begin = rng.randrange(len(other) + 1)
            content = content[:at] + other[begin : begin + length] + content[at + length :]
        elif content:
            place = min(at, len(content) - 1)
            content = content[:place] + bytes([content[place] ^ (1 << rng.randrange(8))]) + content[place + 1 :]
    return content[: 4 << 20]


def kind_of(answer: str) -> str:
    """Return an answer without its figures, names and paths."""
    return re.sub(r"'[^']*'|\"[^\"]*\"|[0-9a-f]{16,}|[-+]?\d[\d.e+-]*|/\S+", "_", answer)[:80]


TARGETS: dict[str, type[Target]] = {
    "spec": SpecFile,
    "certificate": CertificateFile,
    "store": Store,
    "backup": Backup,
}


def make(name: str, folder: Path, run: Path) -> Target:
    """Return the target of this name, working in `folder`, after all its imports."""
    target = TARGETS[name](folder, run)
    for content in target.seeds():
        answer_of(lambda content=content: target.check(content))  # type: ignore[misc]
    return target


def try_one(target: Target, watch: Watch, content: bytes) -> tuple[str, str]:
    """Return (answer, problem) for one input; the problem is empty if there is none."""

    def too_long(*_: object) -> None:
        raise TimeoutError(f"longer than {LONGEST} s")

    before = signal.signal(signal.SIGALRM, too_long)
    signal.setitimer(signal.ITIMER_REAL, LONGEST)
    watch.found, watch.on = "", True
    try:
        answer = answer_of(lambda: target.check(content))
    except Exception as error:  # any other exception is a failure
        return "", f"{type(error).__name__}: {error}"[:400]
    finally:
        watch.on = False
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
    return answer, watch.found


def fuzz(
    name: str, seconds: float, run: Path, corpus: Path | None = None, seed: int = 0, most: float = math.inf
) -> dict[str, Any]:
    """Try inputs until the time is over, at most so many; return the counts and failures."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="sifu-fuzz-") as parent:
        folder = Path(parent)
        target, watch = make(name, folder, run), Watch()
        watch.allowed = str(folder.resolve())
        inputs = list(target.seeds())
        first = len(inputs)
        if corpus:
            corpus.mkdir(parents=True, exist_ok=True)
            inputs += [path.read_bytes() for path in sorted(corpus.iterdir())]
        answers, problems, tried, slowest = set(), [], 0, 0.0
        end = time.monotonic() + seconds
        while tried < most and time.monotonic() < end and len(problems) < 5:
            content = rng.choice(inputs)
            if rng.random() < 0.5:
                content = target.mutate(content, rng)
            if rng.random() < 0.7:
                content = mutated(content, rng.choice(inputs), rng)
            tried += 1
            began = time.monotonic()
            answer, problem = try_one(target, watch, content)
            slowest = max(slowest, time.monotonic() - began)
            kind = kind_of(answer)
            named = f"{'failing-' if problem else ''}{hashlib.sha256(content).hexdigest()[:16]}"
            if problem:
                problems.append(problem)
            elif kind not in answers:
                answers.add(kind)
                inputs.append(content)
            else:
                continue
            if corpus and (problem or len(content) <= 1 << 20):
                (corpus / named).write_bytes(content)
    counts = {"inputs": tried, "answers": len(answers), "corpus": len(inputs) - first}
    return {"target": name, "seed": seed} | counts | {"slowest_seconds": round(slowest, 3), "problems": problems}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", choices=["all", *TARGETS])
    parser.add_argument("seconds", type=float)
    parser.add_argument("--corpus", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    os.environ["SIFU_HEADS"] = os.devnull  # copies of a run may continue
    wrong = 0
    for name in TARGETS if arguments.target == "all" else [arguments.target]:
        corpus = arguments.corpus and (arguments.corpus / name if arguments.target == "all" else arguments.corpus)
        result = fuzz(name, arguments.seconds, runs.run("requests"), corpus, arguments.seed)
        print(json.dumps(result, indent=1), flush=True)
        wrong += len(result["problems"])
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
