"""`sifu metrics`, and `--metrics` of the commands that train."""

from __future__ import annotations

from typing import Annotated

import typer

from sifu.cli.options import Format, FormatOption, RunArgument

TARGETS = "FILE.csv, FILE.jsonl, FILE.tfevents (TensorBoard) or mlflow:EXPERIMENT"
MetricsOption = Annotated[
    str | None,
    typer.Option("--metrics", help=f"Also write training accuracy and loss as they come: {TARGETS}.", metavar="TARGET"),
]


def metrics(
    run: RunArgument,
    output: Annotated[
        str | None, typer.Option("--out", "--output", help=f"{TARGETS}; lines that are missing are added.")
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="Go on until nothing is at work on the run any more.")
    ] = False,
    format: FormatOption = Format.text,
) -> None:
    """Accuracy and loss of every evaluation, for a spreadsheet, TensorBoard or MLflow.

    Everything comes from the ledger: what is there already is not written again, and a file that a kill left behind is
    made whole. Without --out, CSV goes to the standard output.
    """
    import csv
    import sys
    from dataclasses import asdict, astuple

    from sifu.cli.output import print_json, tell
    from sifu.errors import InputError
    from sifu.report.metrics import COLUMNS, rows_after, write_metrics
    from sifu.store.known_keys import check_known_key
    from sifu.store.reader import RunReader

    if output is not None:
        count = write_metrics(run, output, follow=follow)
        tell(format, {"lines": count, "target": output}, f"Added {count} lines to {output}")
        return
    if follow:
        raise InputError("--follow needs --out: where the metrics are to go")
    with RunReader(run) as reader:
        check_known_key(reader)
        rows = rows_after(reader, -1)
    if format is Format.json:
        print_json({"metrics": [asdict(row) for row in rows]})
    else:
        csv.writer(sys.stdout, lineterminator="\n").writerows([COLUMNS, *(astuple(row) for row in rows)])


def warn(sentence: str) -> None:
    """Say that metrics fail, beside what the command prints."""
    from sifu.cli.output import err

    err.print(f"sifu: {sentence}", markup=False, highlight=False, soft_wrap=True)
