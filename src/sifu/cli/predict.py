"""`sifu predict`: what a released model says of new rows."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

import sifu
from sifu.cli.options import Format, FormatOption, tell


def predict(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A safetensors file that sifu export wrote.")],
    data: Annotated[Path, typer.Argument(metavar="DATA", help="An npz file with x, or a CSV or Parquet file.")],
    output: Annotated[
        Path | None, typer.Option("--out", "--output", help="Write a CSV file instead of printing.", metavar="FILE.csv")
    ] = None,
    module: Annotated[
        str | None,
        typer.Option(
            "--module",
            help="Run this module of yours, which is the model or makes its features.",
            metavar="PACKAGE.FILE:FUNCTION",
        ),
    ] = None,
    format: FormatOption = Format.text,
) -> None:
    """What a released model says of new rows or images, made into inputs and features as its description says.

    Each line has the row's identity (the column that data.id names) or its number from 0, the class, and a score per
    class.
    """
    from sifu.cli.output import print_json
    from sifu.store.files import write_atomically

    rows = sifu.load_model(model, module=module).predict_rows(data)
    if output is None and format is Format.json:
        print_json({"predictions": [row.to_mapping() for row in rows]})
        return
    text = io.StringIO()
    lines = list(_lines(rows))
    writer = csv.DictWriter(text, list(lines[0]) if lines else ["id"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    if output is None:
        tell(format, {}, text.getvalue().rstrip("\n"))
    else:
        write_atomically(output, text.getvalue().encode())
        tell(format, {"rows": len(rows), "file": str(output)}, f"Wrote {len(rows)} predictions to {output}")


def _lines(rows: Sequence[sifu.PredictedRow]) -> Iterator[dict[str, Any]]:
    """The columns of each row: identity or number, what is predicted, the scores."""
    for row in (row.to_mapping() for row in rows):
        scores = row.pop("scores")
        columns = {"id": row.pop("id")}
        ((name, predicted),) = row.items()
        several = isinstance(predicted, list)
        columns |= {f"{name[:-1]}_{k}": value for k, value in enumerate(predicted)} if several else {name: predicted}
        columns |= {f"score_{output}": score for output, score in scores.items()}
        yield columns
