"""Tables with a column of texts for benchmarks/backbones.py, made from public files that are not committed.

The folder `--data` of the benchmark needs

* for `newsgroups`: `20news-bydate-train` and `20news-bydate-test` from 20news-bydate.tar.gz. A text is the
  subject and the body of a post, without its other headers. The clients are drawn; the test posts are the later ones.
* for `debian`: `debian-packages.txt`, from `apt-get update -o Acquire::Languages=en` and then
  `apt-cache pkgnames | sort | xargs apt-cache show --no-all-versions > debian-packages.txt`. A text is the description
  of a package, the label its section, and the client its maintainer. Packages of one source share most of their
  description, so only one of them is a row.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from sifu.data.partition import partition

LONGEST = 4000
"""Largest number of characters of a text in the table, far more than its first 128 tokens have."""
COLUMNS = ("id", "client", "label", "text")
Row = tuple[str, str, str, str]


def text_table(task: str, source: Path, folder: Path, given: dict[str, Any], seed: int) -> dict[str, Any]:
    """Write the table of a task to `folder` and return the section `[data]` for it.

    Args:
        task: `newsgroups` or `debian`.
        source: Folder with the public files.
        folder: Folder for the table.
        given: `clients`, `samples_per_client`, `partition` and `alpha`, as in a spec; `identity` are the maintainers.
        seed: Draws the clients of posts, and the rows of a maintainer with more than `samples_per_client` packages.

    """
    file, test_file = folder / f"{task}.csv", folder / f"{task}-test.csv"
    roles = {"name": "table", "partition": "given", "label": "label", "client": "client", "id": "id", "text": "text"}
    data: dict[str, Any] = {**roles, "file": str(file), "preprocessing": "fixed"}
    if task == "newsgroups":
        train, test = (list(posts(source / f"20news-bydate-{part}")) for part in ("train", "test"))
        rows = spread(train, given, seed)
        write(test_file, test, client=False)
        data["test_file"] = str(test_file)
    else:
        rows = by_maintainer(source / "debian-packages.txt", given["clients"], given["samples_per_client"], seed)
        data["held_out"] = 0.2
    write(file, rows)
    return {**data, "classes": ",".join(sorted({label for _, _, label, _ in rows}))}


def posts(folder: Path) -> Iterator[Row]:
    """Yield the posts of one part of 20 Newsgroups, without a client."""
    for file in sorted(path for path in folder.glob("*/*") if path.is_file()):
        header, _, body = file.read_text(encoding="latin-1").partition("\n\n")
        subjects = (line.partition(":")[2] for line in header.splitlines() if line.lower().startswith("subject:"))
        yield f"{file.parent.name}/{file.name}", "test", file.parent.name, f"{next(subjects, '')} {body}"


def spread(rows: list[Row], given: dict[str, Any], seed: int) -> list[Row]:
    """Return all rows with clients drawn as for sifu's own data sets."""
    names, labels = np.unique([row[2] for row in rows], return_inverse=True)
    assert len(names) > 1
    draw = np.random.default_rng(seed)
    parts = partition(given["partition"], labels, given["clients"], None, draw, alpha=given.get("alpha"))
    return [(rows[at][0], f"client-{client:03}", *rows[at][2:]) for client, part in enumerate(parts) for at in part]


def by_maintainer(file: Path, clients: int, rows_each: int, seed: int, sections: int = 10) -> list[Row]:
    """Return packages of the maintainers with the most packages, in the most frequent sections."""
    sources: dict[str, dict[str, str]] = {}
    for package in stanzas(file):
        source = package.get("Source", package["Package"]).split()[0]
        known = sources.get(source)
        if known is None or package["Package"] == source:
            sources[source] = package
    frequent = {name for name, _ in Counter(package["Section"] for package in sources.values()).most_common(sections)}
    kept = [package for package in sources.values() if package["Section"] in frequent]
    largest = Counter(package["Maintainer"] for package in kept).most_common(clients)
    draw, rows = np.random.default_rng(seed), list[Row]()
    for maintainer, count in sorted(largest):
        own = [package for package in kept if package["Maintainer"] == maintainer]
        chosen = sorted(draw.choice(count, min(count, rows_each), replace=False))
        rows += [(own[at]["Package"], maintainer, own[at]["Section"], own[at]["Description-en"]) for at in chosen]
    return rows


def stanzas(file: Path) -> Iterator[dict[str, str]]:
    """Yield the packages with a description, as fields with their text."""
    for stanza in file.read_text(encoding="utf-8", errors="replace").split("\n\n"):
        fields, name = dict[str, str](), ""
        for line in stanza.splitlines():
            if line.startswith(" "):
                fields[name] += line
            else:
                name, _, fields[name] = line.partition(":")
        fields = {name: text.strip() for name, text in fields.items()}
        if {"Package", "Maintainer", "Section", "Description-en"} <= fields.keys():
            yield fields


def write(file: Path, rows: Iterable[Row], *, client: bool = True) -> None:
    """Write each row with its text on one line; omit the client column if the rows have no client."""
    with file.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        for row in (COLUMNS, *((*row[:3], " ".join(row[3].split())[:LONGEST]) for row in rows)):
            writer.writerow(row if client else (row[0], *row[2:]))
