"""Table and figure of the rows of `tuned_networks.py`.

Writes benchmarks/results/tuned_networks.csv: for each federation, method and number of leavers the mean over seeds of
the test accuracy, with the smallest and largest single value, the width of a block, and the commits that measured it;
and docs/images/tuned-networks.png. Blocks of another width than 400 are named in the method. Lines of the table that
were not measured again stay.
"""

from __future__ import annotations

import csv
import json
import re
import statistics
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "benchmarks" / "results" / "tuned_networks.csv"
FIGURE = ROOT / "docs" / "images" / "tuned-networks.png"
BLOCK = 400
LINES = {
    "tuned again + ridge": ("tuned again + solved head, 12 rounds", "black", "s"),
    "merge": ("merge, 1 round", "tab:orange", "^"),
    "blocks": ("blocks, no round", "tab:blue", "o"),
    "frozen": ("frozen network, no round", "tab:gray", "v"),
}


def table_of(files: list[Path]) -> list[dict[str, object]]:
    """Return one row for each federation, method and number of leavers.

    If two files have the same seed, the later one counts.
    """
    measured: dict[tuple[str, str, int], dict[int, tuple[str, list[float]]]] = defaultdict(dict)
    for file in files:
        here: dict[tuple[str, str, int], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        settings = {(row["job"], row["seed"]): row["settings"] for row in rows if row["kind"] == "times"}
        for row in rows:
            if "test_accuracy" not in row:
                continue
            block = settings[row["job"], row["seed"]]["block"]
            named = row["kind"] in ("blocks", "blocks, own zeroed") and block != BLOCK
            kind = row["kind"].replace("blocks", f"blocks of {block}", 1) if named else row["kind"]
            key = (row["job"], kind.replace(f"blocks of {BLOCK}", "blocks"), row["leavers"])
            here[key][row["seed"]].append(row["test_accuracy"])
        for key, seeds in here.items():
            measured[key] |= {seed: (settings[key[0], seed]["commit"], values) for seed, values in seeds.items()}
    table = []
    for (job, kind, leavers), of_seeds in sorted(measured.items()):
        every = [accuracy for _, values in of_seeds.values() for accuracy in values]
        mean = statistics.mean(statistics.mean(values) for _, values in of_seeds.values())
        width = re.search(r"blocks of (\d+)", kind)
        table.append(
            {
                "federation": job,
                "way": kind,
                "leavers": leavers,
                "seeds": len(of_seeds),
                "test_accuracy": f"{mean:.1f}",
                "smallest": f"{min(every):.1f}",
                "largest": f"{max(every):.1f}",
                "block": "" if not kind.startswith("blocks") else width[1] if width else BLOCK,
                "commits": " ".join(sorted({commit for commit, _ in of_seeds.values()})),
            }
        )
    return table


def draw(table: list[dict[str, object]]) -> None:
    """Draw accuracy against the number of single requests, on CIFAR-10 (Dirichlet 0.3) and CIFAR-100 (iid)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.9), layout="constrained")
    for axis, (job, title) in zip(
        axes, {"cifar10-0.3": "CIFAR-10, Dirichlet 0.3", "cifar100-iid": "CIFAR-100, iid"}.items(), strict=True
    ):
        for kind, (label, colour, marker) in LINES.items():
            rows = [row for row in table if row["federation"] == job and row["way"] == kind]
            leavers = [int(str(row["leavers"])) for row in rows]
            values = [float(str(row["test_accuracy"])) for row in rows]
            axis.plot(leavers, values, marker=marker, markersize=4, color=colour, label=label)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("clients forgotten, one request each, nothing rebuilt")
        axis.set_xticks([0, 5, 10, 15, 20])
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("test accuracy (%)")
    figure.legend(*axes[0].get_legend_handles_labels(), frameon=False, fontsize=9, ncols=4, loc="outside upper center")
    figure.savefig(FIGURE, dpi=130)


def write_table(files: list[Path]) -> None:
    """Merge the measurements of these files into the committed table, and draw its figure."""
    measured = table_of(files)
    again = {(row["federation"], row["way"], str(row["leavers"])) for row in measured}
    with TABLE.open(encoding="utf-8") as stream:
        before = [row for row in csv.DictReader(stream) if (row["federation"], row["way"], row["leavers"]) not in again]
    table = sorted([*before, *measured], key=lambda row: (row["federation"], row["way"], int(str(row["leavers"]))))
    with TABLE.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, fieldnames=list(table[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(table)
    draw(table)
