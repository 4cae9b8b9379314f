"""`sifu predict`: what a released model says of new rows."""

from __future__ import annotations

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
    format: FormatOption = Format.text,
) -> None:
    """What a released linear model says of new rows, made into inputs as its description says."""
    from sifu.api import load_model
    from sifu.cli.output import print_json, tell
    from sifu.store.files import write_atomically

    predicted = load_model(model).predict_file(data)
    if output is not None:
        write_atomically(output, ("prediction\n" + "".join(f"{value}\n" for value in predicted)).encode())
        tell(format, {"rows": len(predicted), "file": str(output)}, f"Wrote {len(predicted)} predictions to {output}")
    elif format is Format.json:
        print_json({"predictions": predicted})
    else:
        tell(format, {}, *(str(value) for value in predicted))
