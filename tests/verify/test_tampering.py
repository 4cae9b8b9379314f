"""Changes to a run folder by someone without the operator's key: `verify` reports and names each.

Every column of every table, every row, every field of every certificate and every model file is changed in turn; the
tables are enumerated from the database itself, so a new column is covered at once.
"""

from __future__ import annotations

import json
import re
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mutations import ALIASES, CRASH, Pristine, caught, changed, leaves, spread, tamper_with_values, with_leaf
from run_tools import columns, connect, copy_run, dump, run_cli
from sifu.api import verify_certificate, verify_run
from sifu.errors import SifuError
from sifu.verify.stored_models import agree
from suite_setup import examples


@pytest.fixture(scope="module")
def pristine(run_with_requests: Path, tmp_path_factory: pytest.TempPathFactory) -> Pristine:
    return Pristine(copy_run(run_with_requests, tmp_path_factory.mktemp("tampering") / "run"))


def test_an_untouched_run_verifies(run_with_requests: Path, tmp_path: Path) -> None:
    assert verify_run(run_with_requests).problems == []
    elsewhere = copy_run(run_with_requests, tmp_path / "another" / "place")
    assert verify_run(elsewhere).problems == []
    for path in sorted((elsewhere / "certificates").iterdir()):
        assert verify_certificate(path).problems == []
    answer = run_cli("verify", elsewhere)
    assert answer.code == 0, answer.err


ALL_TABLES = [
    "certificates",
    "charges",
    "clients",
    "evaluations",
    "events",
    "models",
    "nodes",
    "participation",
    "requests",
    "run",
    "subjects",
]


ELSEWHERE = ("rejections", "statistics", "group_models", "merges")


def test_every_table_is_tampered_with(pristine: Pristine) -> None:
    # Other suites cover refused replies (test_hostile_clients) and groups (test_group_tampering).
    tables = dump(pristine.folder)
    assert sorted(tables) == sorted([*ALL_TABLES, *ELSEWHERE])
    assert all(rows for table, rows in tables.items() if table not in ELSEWHERE)


@pytest.mark.long
@pytest.mark.parametrize("table", ALL_TABLES)
def test_every_column_is_protected(pristine: Pristine, table: str) -> None:
    tried, wrong = tamper_with_values(pristine, table, everything=False)
    print(f"{table}: {tried} values changed, {tried - len(wrong)} caught and named")
    assert tried > 0
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("table", ALL_TABLES)
def test_every_value_of_every_row_is_protected(pristine: Pristine, table: str) -> None:
    if table == "participation":
        pytest.skip("384 rows of four columns: the fast suite samples them")
    tried, wrong = tamper_with_values(pristine, table, everything=True)
    print(f"{table}: {tried} values changed, {tried - len(wrong)} caught and named")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("table", ALL_TABLES)
def test_rows_cannot_be_dropped_repeated_or_swapped(pristine: Pristine, table: str) -> None:
    pristine.restore_database()
    connection = connect(pristine.folder)
    described = columns(connection, table)
    names = [column.name for column in described]
    keys = [column.name for column in described if column.key]
    rows = connection.execute(f"SELECT * FROM {table} ORDER BY {', '.join(keys)}").fetchall()
    connection.close()
    key_places = [names.index(key) for key in keys]
    where = " AND ".join(f"{key} = ?" for key in keys)
    tried, wrong = 0, []

    def attempt(what: str, *statements: tuple[str, tuple[Any, ...]]) -> None:
        nonlocal tried
        connection = connect(pristine.folder)
        try:
            for sql, values in statements:
                connection.execute(sql, values)
        except sqlite3.IntegrityError:
            return
        finally:
            connection.close()
        tried += 1
        problems = caught(pristine.folder)
        if not problems or CRASH in problems[0] or not re.search(ALIASES.get(table, table), "\n".join(problems)):
            wrong.append(f"{what}: {problems[:2]}")
        pristine.restore_database()

    insert = f"INSERT INTO {table} VALUES ({', '.join('?' * len(names))})"
    delete = f"DELETE FROM {table} WHERE {where}"
    for row in spread(rows, 1, 3):
        key = tuple(row[place] for place in key_places)
        attempt(f"row {key} dropped", (delete, key))
        # The same row again under a free key.
        again = list(row)
        last = key_places[-1]
        again[last] = row[last] + 1000 if isinstance(row[last], int) else f"{row[last]}-again"
        attempt(f"row {key} repeated", (insert, tuple(again)))
    attempt("all rows dropped", (f"DELETE FROM {table}", ()))
    if len(rows) > 1:
        # Two rows swap their keys.
        first, second = rows[0], rows[-1]
        swapped = [list(first), list(second)]
        for place in key_places:
            swapped[0][place], swapped[1][place] = second[place], first[place]
        if [tuple(row) for row in swapped] != [second, first]:
            removals = [(delete, tuple(row[place] for place in key_places)) for row in (first, second)]
            attempt("first and last swapped", *removals, *((insert, tuple(row)) for row in swapped))
    print(f"{table}: {tried} rows dropped, repeated or swapped")
    assert tried >= 2
    assert not wrong, "\n".join(wrong)


def test_one_flipped_byte_of_the_database_is_caught_or_changes_nothing(
    run_with_requests: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Bytes of free pages and unused header fields mean nothing; every other flipped byte is found."""
    folder = copy_run(run_with_requests, tmp_path_factory.mktemp("bytes") / "run")
    original, content = dump(folder), (folder / "run.db").read_bytes()

    @settings(max_examples=examples(40), deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(st.integers(0, len(content) - 1), st.integers(1, 255))
    def flip(place: int, change: int) -> None:
        for leftover in ("run.db-wal", "run.db-shm"):
            (folder / leftover).unlink(missing_ok=True)
        (folder / "run.db").write_bytes(content[:place] + bytes([content[place] ^ change]) + content[place + 1 :])
        problems = caught(folder)
        assert not problems or CRASH not in problems[0], problems
        if not problems:
            assert dump(folder) == original

    flip()


# -- certificates -------------------------------------------------------------------------------------------


def alone(path: Path) -> list[str]:
    """Return the problems that verification of the file alone finds."""
    try:
        return verify_certificate(path).problems
    except SifuError as error:
        return [str(error)]


@pytest.mark.long
def test_every_field_of_every_certificate_is_protected(pristine: Pristine) -> None:
    pristine.restore()
    tried, wrong = 0, []
    for path in sorted((pristine.folder / "certificates").iterdir()):
        original = path.read_text()
        content = json.loads(original)
        every = list(leaves(content))
        for number, (place, value) in enumerate(every):
            for new in changed(value):
                path.write_text(json.dumps(with_leaf(content, place, new), indent=1, sort_keys=True))
                tried += 1
                if not alone(path):
                    wrong.append(f"{path.name} alone: {place}: {value!r} -> {new!r}")
                # Checking the folder is slower, and the file is compared with the ledger's copy, so a sample suffices.
                if number % 60 == 0:
                    name = str(place[-1] if isinstance(place[-1], str) else place[-2])
                    # A changed last digit is within the tolerance of the recomputation; then the bytes differ.
                    same = isinstance(value, float) and agree(value, new)
                    expected = "its fields are the same, its bytes are not" if same else name
                    problems = [problem for problem in caught(pristine.folder) if path.name in problem]
                    if not any(expected in problem for problem in problems):
                        wrong.append(f"{path.name} in its run: {place}: {value!r} -> {new!r}")
        for key in content["body"]:
            body = {name: value for name, value in content["body"].items() if name != key}
            path.write_text(json.dumps({**content, "body": body}))
            tried += 1
            if not alone(path):
                wrong.append(f"{path.name}: {key} removed")
        path.write_text(json.dumps({**content, "body": {**content["body"], "note": "added"}}))
        if not alone(path):
            wrong.append(f"{path.name}: a field added")
        path.write_text(original)
    print(f"certificates: {tried} fields changed or removed")
    assert tried > 400
    assert not wrong, "\n".join(wrong[:40])
    assert caught(pristine.folder) == []


@pytest.mark.parametrize("damage", ["deleted", "empty", "truncated", "not JSON", "another's", "spaces"])
def test_a_damaged_certificate_file_is_named(pristine: Pristine, damage: str) -> None:
    pristine.restore()
    path = pristine.folder / "certificates" / "strictly.auditor.json"
    other = pristine.folder / "certificates" / "to-the-middle.auditor.json"
    content = path.read_bytes()
    if damage == "deleted":
        path.unlink()
    else:
        path.write_bytes(
            {
                "empty": b"",
                "truncated": content[: len(content) // 2],
                "not JSON": b"\xff\xfe" + content,
                "another's": other.read_bytes(),
                "spaces": content + b"\n",
            }[damage]
        )
    problems = caught(pristine.folder)
    assert any(path.name in problem for problem in problems), problems
    pristine.restore()


def test_a_mutated_certificate_is_refused_by_the_command(pristine: Pristine, cli: Any) -> None:
    pristine.restore()
    path = pristine.folder / "certificates" / "to-the-middle.public.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps(with_leaf(content, ("body", "epsilon"), 1.0)))
    answer = cli("verify", path)
    assert answer.code == 3
    assert "signature" in answer.err
    answer = cli("verify", path, "--format", "json")
    assert answer.code == 3
    assert answer.json["holds"] is False
    pristine.restore()


def test_there_is_one_way_to_write_a_certificate(pristine: Pristine, tmp_path: Path) -> None:
    """A certificate has one valid form: hex digits in upper case, a duplicate key or an extra field are refused."""
    text = (pristine.folder / "certificates" / "strictly.public.json").read_text()
    content = json.loads(text)
    path = tmp_path / "certificate.json"
    for name in ("public_key", "signature"):
        path.write_text(json.dumps(content | {name: content[name].upper()}))
        assert alone(path), name
    path.write_text(json.dumps(content | {"remark": "level: exact"}))
    assert alone(path)
    path.write_text('{"body": {"level": "exact"}, ' + text.strip()[1:])
    assert alone(path)
    path.write_text(text)
    assert alone(path) == []


# -- models ---------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_every_model_file_is_protected(pristine: Pristine) -> None:
    pristine.restore()
    paths = sorted((pristine.folder / "models").iterdir())
    tried = 0
    for number, path in enumerate(paths):
        content = path.read_bytes()
        other = paths[number - 1].read_bytes()
        place = number * (len(content) - 1) // (len(paths) - 1)
        flipped = content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]
        for new in (flipped, content[:-1], other):
            path.write_bytes(new)
            problems = caught(pristine.folder)
            assert any(f"node {path.stem}" in problem for problem in problems), (path.name, problems)
            tried += 1
        path.unlink()
        assert any(f"node {path.stem} is missing" in problem for problem in caught(pristine.folder))
        path.write_bytes(content)
        tried += 1
    print(f"models: {tried} files changed")
    assert caught(pristine.folder) == []


@pytest.mark.parametrize("name", ["3.safetensors", "20.safetensors", "0.safetensors"])
def test_a_model_put_back_after_its_erasure_is_named(pristine: Pristine, name: str) -> None:
    pristine.restore()
    models = pristine.folder / "models"
    assert not (models / name).exists()
    shutil.copy(models / "44.safetensors", models / name)
    assert any(name in problem for problem in caught(pristine.folder))
    pristine.restore()


@pytest.mark.parametrize("name", ["3.safetensors.bak", "old/3.safetensors", "03.safetensors", "model-3.safetensors"])
def test_a_model_put_back_under_another_name_is_named(pristine: Pristine, name: str) -> None:
    """A model file under an unrecorded name is reported by that name."""
    pristine.restore()
    target = pristine.folder / "models" / name
    target.parent.mkdir(exist_ok=True)
    shutil.copy(pristine.folder / "models" / "44.safetensors", target)
    assert any(Path(name).name in problem for problem in caught(pristine.folder))
    pristine.restore()
