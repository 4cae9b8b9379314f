"""`sifu-bench`: the paper's experiments, one command per figure."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from sifu.errors import InputError, SifuError

bench = typer.Typer(
    name="sifu-bench", help="The paper's experiments.", no_args_is_help=True, pretty_exceptions_enable=False
)
NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="An experiment, see sifu-bench list.")]
OutOption = Annotated[
    Path | None, typer.Option("--out", help="Folder of the results.", show_default="bench-NAME", metavar="DIR")
]
DataOption = Annotated[Path | None, typer.Option("--data", help="Folder of the data sets' files.", metavar="DIR")]


def main() -> None:
    """Run the command line; wrong input ends with its message and exit code 2."""
    try:
        bench()
    except SifuError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


@bench.command("list")
def list_experiments() -> None:
    """List the experiments."""
    from sifu_paper.experiments import EXPERIMENTS

    for name, experiment in EXPERIMENTS.items():
        print(f"{name}: {experiment.question} [{experiment.paper_figure}]")


@bench.command("run")
def run_experiment(
    name: NameArgument,
    seeds: Annotated[str, typer.Option("--seeds", help="How many (3) or which ones (4,7).", metavar="N|LIST")] = "3",
    datasets: Annotated[str, typer.Option("--datasets", help="Only these.", metavar="A,B")] = "",
    methods: Annotated[str, typer.Option("--methods", help="Only these.", metavar="A,B")] = "",
    preset: Annotated[
        str,
        typer.Option(
            "--preset", help="paper, ours, authors, authors_unclipped; the last two also with _ours.", metavar="A,B"
        ),
    ] = "",
    scale: Annotated[Literal["smoke", "paper"], typer.Option("--scale", help="smoke shrinks everything.")] = "paper",
    max_rounds: Annotated[int | None, typer.Option("--max-rounds", min=1, help="Limit of rounds.")] = None,
    where: Annotated[
        list[str] | None,
        typer.Option("--where", help="Only these values of the grid; may be repeated.", metavar="KEY=A,B"),
    ] = None,
    out: OutOption = None,
    data: DataOption = None,
    device: Annotated[str, typer.Option("--device", help="cpu or cuda.")] = "cpu",
    jobs: Annotated[int, typer.Option("--jobs", min=1, help="Processes, each with a data set and a seed.")] = 1,
) -> None:
    """Run an experiment, or go on with it: finished requests are rows of a table, and Ctrl-C loses none of them."""
    from sifu_paper.experiment import Options
    from sifu_paper.jobs import FAILURES, run
    from sifu_paper.methods import METHODS
    from sifu_paper.speed import summary

    options = Options(
        name,
        out or Path(f"bench-{name}"),
        parse_seeds(seeds),
        scale,
        _names(datasets),
        _names(methods),
        _names(preset),
        max_rounds,
        {key: tuple(map(float, values.split(","))) for key, _, values in (one.partition("=") for one in where or ())},
        data,
        device,
    )
    unknown = [method for method in options.methods if method not in METHODS]
    if unknown:
        raise InputError(f"method {unknown[0]!r} is unknown: write some of {', '.join(METHODS)}")
    result = run(options, ("sifu-bench", *sys.argv[1:]), jobs)
    _print(summary(result.rows) if result.rows and "retain" in result.rows[0] else [])
    if result.rows:
        _draw(name, options.out)
    for unit, trace in result.failures.items():
        print(f"failed: {unit}: {trace.splitlines()[-1]} (see {options.out / FAILURES})", file=sys.stderr)
    if result.failures:
        raise typer.Exit(1)


@bench.command("plot")
def plot_experiment(name: NameArgument, out: OutOption = None) -> None:
    """Draw the figure of an experiment again, from its results."""
    _draw(name, out or Path(f"bench-{name}"))


@bench.command("download")
def download_data(
    name: Annotated[str, typer.Argument(metavar="NAME", help="mnist, fashion_mnist, cifar10 or cifar100.")],
    data: DataOption = None,
) -> None:
    """Fetch the official files of a public data set; existing files are kept."""
    from sifu_paper.data.public import download

    print(f"The files of {name} are in {download(name, data)}")


def parse_seeds(text: str) -> tuple[int, ...]:
    """Return the seeds of an option.

    >>> parse_seeds("3"), parse_seeds("4,7"), parse_seeds("5,")
    ((1, 2, 3), (4, 7), (5,))
    """
    try:
        if "," in text:
            return tuple(int(part) for part in text.split(",") if part)
        return tuple(range(1, int(text) + 1))
    except ValueError:
        raise InputError(f"--seeds is a number of seeds, or a list like 4,7; found {text!r}") from None


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _print(lines: list[dict[str, str]]) -> None:
    """Print a table with aligned columns."""
    if not lines:
        return
    table = [list(lines[0]), *(list(line.values()) for line in lines)]
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    for row in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _draw(name: str, folder: Path) -> None:
    from sifu_paper.experiments import experiment_named
    from sifu_paper.figures import save
    from sifu_paper.jobs import TABLE
    from sifu_paper.provenance import read_record
    from sifu_paper.table import read_table

    experiment = experiment_named(name)
    if not (folder / TABLE).exists() or read_record(folder)["asked"]["experiment"] != name:
        raise InputError(f"{folder} holds no results of {name}: make them with sifu-bench run {name} --out {folder}")
    rows = read_table(folder / TABLE)
    for kind in ("png", "svg"):
        save(experiment, rows, folder / f"{name}.{kind}")
        print(f"Wrote {folder / name}.{kind}")
