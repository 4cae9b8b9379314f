"""Tables of texts for benchmarks/backbones.py, and the committed table that its rows are added to."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import backbones
import backbones_page
import pytest
from texts import sets

PACKAGE = """Package: {name}
Maintainer: {maintainer}
Source: {source}
Section: {section}
Description-en: Tool number {name}
 does something
 .
 and more
"""


def rows_of(file: Path) -> list[dict[str, str]]:
    with file.open(encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


def test_packages_of_one_source_are_one_row_of_their_maintainer(tmp_path: Path) -> None:
    packages = [
        PACKAGE.format(
            name=f"tool-{number}{part}", maintainer=f"m{number % 3}", source=f"tool-{number}", section=section
        )
        for number in range(9)
        for part, section in (("-dev", "libdevel"), ("", "utils"))
    ]
    (tmp_path / "debian-packages.txt").write_text("\n".join(packages))
    given = {"clients": 2, "samples_per_client": 2, "partition": "identity"}
    data = sets.text_table("debian", tmp_path, tmp_path, given, 0)
    rows = rows_of(tmp_path / "debian.csv")
    assert [row["client"] for row in rows] == ["m0", "m0", "m1", "m1"]
    assert {row["label"] for row in rows} == {"utils"}  # the package named like its source
    assert rows[0]["text"] == f"Tool number {rows[0]['id']} does something . and more"
    assert (data["classes"], data["held_out"], data["text"]) == ("utils", 0.2, "text")


def test_a_post_is_its_subject_and_body_and_later_posts_are_the_test_rows(tmp_path: Path) -> None:
    for part in ("train", "test"):
        for group in ("sci.space", "rec.autos"):
            folder = tmp_path / f"20news-bydate-{part}" / group
            folder.mkdir(parents=True)
            for number in range(6):
                post = f"From: secret@host\nSubject: {part} {number}\nLines: 2\n\nBody of\nit."
                (folder / str(number)).write_text(post, encoding="latin-1")
    given = {"clients": 3, "samples_per_client": 100, "partition": "iid"}
    data = sets.text_table("newsgroups", tmp_path, tmp_path, given, 0)
    rows, test = rows_of(tmp_path / "newsgroups.csv"), rows_of(Path(data["test_file"]))
    assert len(rows) == len(test) == 12
    assert len({row["client"] for row in rows}) == 3
    assert all(row["text"] == f"train {row['id'].partition('/')[2]} Body of it." for row in rows)
    assert all(row["text"].startswith("test ") for row in test)
    assert data["classes"] == "rec.autos,sci.space"


def test_lines_that_are_not_measured_again_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (backbones, backbones_page):
        monkeypatch.setattr(module, "RESULTS", tmp_path / "table.csv")
    monkeypatch.setattr(backbones, "write_pages", lambda: None)
    (tmp_path / "table.csv").write_text(backbones_page.ROOT.joinpath("benchmarks/results/backbones.csv").read_text())
    before = rows_of(tmp_path / "table.csv")

    def measured(task: str, leavers: int, accuracy: float) -> dict[str, Any]:
        place = {"hardware": "abacus", "date": "2026-01-01", "commit": "0000000"}
        job = {"task": task, "partition": "people", "setup": "last", "penalty": 0.5, "leavers": leavers}
        return job | {"accuracy": accuracy, "megabytes": 1.0} | place

    for accuracy in (0.5, 0.75):  # the second measurement replaces the first
        lines = [json.dumps(measured("abc", leavers, accuracy)) for leavers in (20, 5)]
        (tmp_path / "rows.jsonl").write_text("\n".join(lines))
        backbones.write_table([tmp_path / "rows.jsonl"])
    after = rows_of(tmp_path / "table.csv")
    assert [row for row in after if row["task"] != "abc"] == before
    assert [(row["leavers"], row["accuracy"]) for row in after if row["task"] == "abc"] == [
        ("5", "75.0"),
        ("20", "75.0"),
    ]
