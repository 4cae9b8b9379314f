"""Options that several commands share."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer


class Format(enum.StrEnum):
    """How results are printed."""

    text = "text"
    json = "json"


FormatOption = Annotated[
    Format, typer.Option("--format", help="text for people; json prints one JSON object on stdout.")
]
DataOption = Annotated[Path | None, typer.Option("--data", help="Folder with data files (or set SIFU_DATA).")]
RunArgument = Annotated[Path, typer.Argument(metavar="DIR", help="The run folder.")]
DeviceOption = Annotated[
    str,
    typer.Option(
        "--device", help="Where to compute; auto takes a GPU where there is one and it pays.", metavar="auto|cpu|cuda"
    ),
]
PrecisionOption = Annotated[
    str, typer.Option("--precision", help="Of networks on a GPU.", metavar="float32|tf32|tf32x3")
]
