"""`sifu predict`: what a released model says of new rows."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Annotated

import typer

from sifu.cli.options import Format, FormatOption


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
            help="Run this module for the features; it must be the model's.",
            metavar="PACKAGE.FILE:FUNCTION",
        ),
    ] = None,
    format: FormatOption = Format.text,
) -> None:
    """What a released model says of new rows or images, made into inputs and features as its description says."""
    from sifu.api import load_model
    from sifu.cli.output import print_json, tell
    from sifu.store.files import write_atomically

    predicted = load_model(model, module=module).predict_file(data)
    rows = [value if isinstance(value, list) else [value] for value in predicted]
    if output is not None:
        text = io.StringIO()
        header = (
            ["prediction"] if not rows or len(rows[0]) == 1 else [f"prediction_{k + 1}" for k in range(len(rows[0]))]
        )
        csv.writer(text, lineterminator="\n").writerows([header, *rows])
        write_atomically(output, text.getvalue().encode())
        tell(format, {"rows": len(predicted), "file": str(output)}, f"Wrote {len(predicted)} predictions to {output}")
    elif format is Format.json:
        print_json({"predictions": predicted})
    else:
        tell(format, {}, *(",".join(map(str, row)) for row in rows))
