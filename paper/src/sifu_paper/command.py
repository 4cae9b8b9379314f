"""`sifu-bench`: the paper's experiments, one command per figure."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from sifu import InputError
from sifu.cli.main import run_app
from sifu.cli.options import DataOption, DeviceOption, FormatOption, PrecisionOption
from sifu.cli.output import Format

if TYPE_CHECKING:
    from sifu_paper.runner import Result

bench = typer.Typer(
    name="sifu-bench",
    help="The paper's experiments: list, run, plot, and an appendix of results.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="An experiment, see sifu-bench list.")]
OutOption = Annotated[
    Path | None, typer.Option("--out", help="Folder of the results.", show_default="bench-NAME", metavar="DIR")
]


def main() -> None:
    """Run the command line."""
    run_app(bench)


@bench.command("list")
def list_experiments(format: FormatOption = Format.text) -> None:
    """List the experiments that can be run."""
    from sifu.cli.output import out, print_json, table
    from sifu_paper.settings import experiment_names, load_experiment

    experiments = [load_experiment(name) for name in experiment_names()]
    if format is Format.json:
        print_json(
            {
                "experiments": [
                    {
                        "name": experiment.name,
                        "title": experiment.title,
                        "question": experiment.question,
                        "paper_figure": experiment.paper_figure,
                        "datasets": experiment.datasets,
                        "methods": experiment.methods,
                        "variants": experiment.grid,
                    }
                    for experiment in experiments
                ]
            }
        )
        return
    shown = table("experiment", "what it asks", "in the paper")
    for experiment in experiments:
        shown.add_row(experiment.name, experiment.question, experiment.paper_figure or "not in it")
    out.print(shown)
    out.print("Run one with: sifu-bench run NAME (--scale smoke for a first look)")


@bench.command("download")
def download_data(
    name: Annotated[str, typer.Argument(metavar="NAME", help="mnist, fashion_mnist, cifar10 or cifar100.")],
    data: DataOption = None,
) -> None:
    """Fetch the official files of a public data set; existing files are kept."""
    from sifu.cli.output import out
    from sifu_paper.data.public import download

    out.print(f"The files of {name} are in {download(name, data)}")


@bench.command("run")
def run_experiment(
    name: NameArgument,
    seeds: Annotated[
        str | None,
        typer.Option("--seeds", help="How many (3) or which ones (4,7).", show_default="3, smoke 1", metavar="N|LIST"),
    ] = None,
    datasets: Annotated[str | None, typer.Option("--datasets", help="Only these.", metavar="A,B")] = None,
    methods: Annotated[str | None, typer.Option("--methods", help="Only these.", metavar="A,B")] = None,
    preset: Annotated[
        str | None,
        typer.Option(
            "--preset",
            help="paper or ours (rules), both, authors (the paper to the letter), authors_unclipped, authors_ours, "
            "authors_unclipped_ours.",
            metavar="A,B",
        ),
    ] = None,
    scale: Annotated[Literal["smoke", "paper"], typer.Option("--scale", help="smoke shrinks everything.")] = "paper",
    max_rounds: Annotated[
        int | None, typer.Option("--max-rounds", help="Stop trainings and requests after this many rounds.")
    ] = None,
    where: Annotated[
        list[str] | None,
        typer.Option("--where", help="Only these values of the grid; may be repeated.", metavar="KEY=A,B"),
    ] = None,
    out: OutOption = None,
    data: DataOption = None,
    device: DeviceOption = "auto",
    lanes: Annotated[int | None, typer.Option("--lanes", help="Runs computed at once on a GPU.")] = None,
    precision: PrecisionOption = "float32",
    engine: Annotated[
        Literal["embedded", "flower"], typer.Option("--engine", help="Who runs the rounds: this program, or Flower.")
    ] = "embedded",
    jobs: Annotated[
        int, typer.Option("--jobs", help="Processes at once: a data set and a seed each; on a GPU, several seeds.")
    ] = 1,
    keep_runs: Annotated[bool, typer.Option("--keep-runs", help="Keep the run folders of what is done.")] = False,
    plots: Annotated[bool, typer.Option("--plots/--no-plots", help="Draw the figures at the end.")] = True,
    format: FormatOption = Format.text,
) -> None:
    """Run an experiment, or continue an interrupted one.

    Every finished request is a row of DIR/results.csv. Ctrl-C loses nothing: run the same command again.

    """
    from sifu_paper.bench_progress import BenchProgress
    from sifu_paper.jobs import run_in_processes
    from sifu_paper.options import Options, default_seeds, parse_names, parse_seeds
    from sifu_paper.runner import Bench

    if max_rounds is not None and max_rounds < 1:
        raise InputError(f"--max-rounds must be at least 1, found {max_rounds}")
    if data is not None and not data.expanduser().is_dir():
        raise InputError(f"the data folder {data} does not exist; create it, or name another one (--data DIR)")
    folder = out or Path(f"bench-{name}")
    # The experiment copies runs within its folder; the user's own file of known keys must not notice.
    os.environ.setdefault("SIFU_KNOWN_KEYS", str(folder.absolute() / "known_keys"))
    options = Options(
        name=name,
        out=folder,
        seeds=tuple(default_seeds(scale)) if seeds is None else parse_seeds(seeds),
        scale=scale,
        datasets=parse_names(datasets),
        methods=parse_names(methods),
        presets=() if preset in (None, "both") else parse_names(preset),
        max_rounds=max_rounds,
        data=data,
        device=device,
        lanes=lanes,
        precision=precision,
        engine=engine,
        keep_runs=keep_runs,
        where=tuple(where or ()),
        command=("sifu-bench", *sys.argv[1:]),
    )
    as_json = format is Format.json
    with BenchProgress(quiet=as_json) as progress:
        if jobs == 1:
            result = Bench(options, progress, progress.say).run()
        else:
            result = run_in_processes(options, jobs, progress, progress.say)
    figures = _plot(folder) if plots and result.table.rows else []
    _show(result, folder, figures, as_json)
    if result.failures:
        raise typer.Exit(1)


@bench.command("plot")
def plot_experiment(name: NameArgument, out: OutOption = None, format: FormatOption = Format.text) -> None:
    """Draw the figures of an experiment from its results."""
    from sifu.cli.output import Answer
    from sifu_paper.provenance import read_record
    from sifu_paper.settings import load_experiment

    load_experiment(name)  # raises for an unknown name
    folder = out or Path(f"bench-{name}")
    recorded = read_record(folder)["asked"]["experiment"]
    if recorded != name:
        raise InputError(f"{folder} holds results of {recorded}, not of {name}")
    figures = [str(path) for path in _plot(folder)]
    Answer({"experiment": name, "figures": figures}, *(f"Wrote {path}" for path in figures)).print(format)


@bench.command("appendix")
def results_appendix(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[DIR...]", help="Result folders, or that of an appendix.", show_default="every bench-*"
        ),
    ] = None,
    out: Annotated[Path, typer.Option("--out", help="Folder of the appendix.", metavar="DIR")] = Path("results"),
    format: FormatOption = Format.text,
) -> None:
    """Write the appendix of results: a page for each experiment with its figure and its tables, also as CSV files."""
    from sifu.cli.output import Answer
    from sifu_paper.appendix import write_appendix

    chosen = folders or sorted(path for path in Path().glob("bench-*") if path.is_dir())
    if not chosen:
        raise InputError("there are no results here: make some with sifu-bench run NAME, or name their folders")
    pages = [str(page) for page in write_appendix(chosen, out)]
    values = {"pages": pages, "results": [str(folder) for folder in chosen]}
    Answer(values, *(f"Wrote {page}" for page in pages)).print(format)


def _plot(folder: Path) -> list[Path]:
    from sifu_paper.figures import write_figures

    return write_figures(folder)


def _show(result: Result, folder: Path, figures: list[Path], as_json: bool) -> None:
    from sifu.cli.output import err, print_json
    from sifu.cli.output import out as console
    from sifu_paper.summary import summary_rows

    rows: list[dict[str, Any]] = summary_rows(result.experiment, result.table.rows)
    if as_json:
        print_json(
            {
                "experiment": result.experiment.name,
                "out": str(folder),
                "table": str(result.table.path),
                "rows": len(result.table.rows),
                "summary": rows,
                "figures": [str(path) for path in figures],
                "notes": result.notes,
                "failures": [{"unit": failure.task.name, "error": failure.error} for failure in result.failures],
            }
        )
    else:
        _print_summary(rows)
        console.print(f"{len(result.table.rows)} rows in {result.table.path}", markup=False)
        for path in figures:
            console.print(f"Wrote {path}", markup=False)
        for note in result.notes:
            console.print(f"Note: {note}.", style="yellow", markup=False)
    for failure in result.failures:
        err.print(
            f"failed: {failure.task.name}: {failure.error} (see {folder / 'failures.txt'})", style="red", markup=False
        )


def _print_summary(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console

    from sifu.cli.output import out as console
    from sifu.cli.output import table

    if not rows:
        return
    columns = list(rows[0])
    shown = table(*(name if isinstance(rows[0][name], str) else f"-{name}" for name in columns))
    for row in rows:
        shown.add_row(*(_cell(row[name]) for name in columns))
    # A file or a pipe has no width, so names are not shortened there.
    wide = console if console.is_terminal else Console(file=console.file, width=160, highlight=False)
    wide.print(shown)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3g}" if isinstance(value, float) else str(value)
