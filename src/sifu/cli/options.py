"""Options that several commands share."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer

from sifu.choices import Device, Precision


class Format(enum.StrEnum):
    """How results are printed."""

    text = "text"
    json = "json"


runs_at_work: list[Path] = []
"""The run folders that this command was given; when it ends, it says what is overdue in them."""


def note_run(folder: Path | None) -> Path | None:
    """Remember a run folder that a command works on."""
    if folder is not None:
        runs_at_work.append(folder)
    return folder


AllOption = Annotated[bool, typer.Option("--all", help="Everything, not only what fits on one screen.")]
FormatOption = Annotated[
    Format, typer.Option("--format", help="text for people; json prints one JSON object on stdout.")
]
DataOption = Annotated[Path | None, typer.Option("--data", help="Folder with data files (or set SIFU_DATA).")]
RunArgument = Annotated[Path, typer.Argument(metavar="DIR", help="The run folder.", callback=note_run)]
RequestArgument = Annotated[str, typer.Argument(metavar="ID", help="The request.")]
ActorOption = Annotated[str | None, typer.Option("--actor", help="Who acts; or set SIFU_ACTOR.")]
SetOption = Annotated[list[str] | None, typer.Option("--set", help="Override a key of the spec.", metavar="KEY=VALUE")]
PublicKeyOption = Annotated[
    str | None, typer.Option("--public-key", help="The operator's public key (hex), known from elsewhere.")
]
DeviceOption = Annotated[
    Device, typer.Option("--device", help="Where to compute; auto takes a GPU where there is one and it pays.")
]
PrecisionOption = Annotated[Precision, typer.Option("--precision", help="Precision of networks on a GPU.")]
