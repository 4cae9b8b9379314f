"""`sifu`: verbs a person would say. Heavy imports happen inside the commands, so `--help` answers at once."""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from sifu.cli.bench import bench
from sifu.cli.clients import clients
from sifu.cli.custody import anchor, backup, key, purge, restore
from sifu.cli.flower import flower
from sifu.cli.options import DataOption, Format, FormatOption, RunArgument
from sifu.cli.requests import certificate, decide, requests
from sifu.core.errors import InputError, SifuError, VerificationError
from sifu.version import __version__

app = typer.Typer(
    name="sifu",
    help="Let a federation forget a client, and prove it.\n\n"
    "Start with [bold]sifu demo[/]; then: init, train, plan, forget, verify, report.\n\n"
    "Exit codes: 0 done, 1 unexpected, 2 bad input, 3 verification failed, 4 cannot be certified as asked "
    "(nothing was changed), 5 the run is damaged or in use.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(bench)
app.add_typer(clients)
app.add_typer(flower)
for command in (anchor, backup, decide, purge, requests, restore):
    app.command()(command)
app.add_typer(key)
app.add_typer(certificate)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"sifu {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """What stands before the command."""


ClientsOption = Annotated[
    str, typer.Option("--clients", help="Names of the clients to forget, separated by commas.", metavar="A,B")
]
EpsilonOption = Annotated[float | None, typer.Option("--epsilon", help="Budget; 1 is strong, 10 is weak.")]
DeltaOption = Annotated[float | None, typer.Option("--delta", help="Budget; 0.01 or smaller is usual.")]
SigmaOption = Annotated[str | None, typer.Option("--sigma", help="Noise: auto, or a number.", metavar="auto|X")]
UnitOption = Annotated[
    str | None, typer.Option("--unit", help="client covers each by itself, joint all together.", metavar="client|joint")
]
ScopeOption = Annotated[
    str | None,
    typer.Option("--scope", help="all covers every later release, latest the last only.", metavar="all|latest"),
]
MethodOption = Annotated[str | None, typer.Option("--method", help="Unlearning method; sifu methods lists them.")]
CalibrationOption = Annotated[
    str | None, typer.Option("--calibration", help="How noise follows from the budget.", metavar="exact|classical")
]
RetentionOption = Annotated[
    str | None,
    typer.Option(
        "--retention", help="paper keeps models from before the rollback, strict erases them.", metavar="paper|strict"
    ),
]
ReserveOption = Annotated[
    float | None, typer.Option("--reserve", help="Fraction of the budget kept back for later requests.")
]

MaxRoundsOption = Annotated[
    int | None, typer.Option("--max-rounds", help="Stop retraining after this many rounds; 0 is the spec's limit.")
]
TargetOption = Annotated[
    float | None, typer.Option("--target", help="Accuracy to stop at, 0 for none; by default the spec's.")
]


def _terms(
    epsilon: float | None,
    delta: float | None,
    sigma: str | None,
    unit: str | None,
    scope: str | None,
    method: str | None,
    calibration: str | None,
    retention: str | None,
    reserve: float | None,
    max_rounds: int | None,
    target: float | None,
) -> dict[str, Any]:
    noise: float | str | None = sigma
    if sigma is not None and sigma != "auto":
        try:
            noise = float(sigma)
        except ValueError:
            raise InputError(f"--sigma must be auto or a number, found {sigma!r}") from None
    return {
        "epsilon": epsilon,
        "delta": delta,
        "sigma": noise,
        "unit": unit,
        "scope": scope,
        "method": method,
        "calibration": calibration,
        "retention": retention,
        "reserve": reserve,
        "max_rounds": max_rounds,
        "target": target,
    }


def _names(clients: str) -> list[str]:
    return [name.strip() for name in clients.split(",") if name.strip()]


@app.command()
def demo(
    run: Annotated[Path | None, typer.Option("--run", help="Folder for the run.", show_default="sifu-demo")] = None,
    format: FormatOption = Format.text,
) -> None:
    """The whole story on embedded data, in about a minute.

    160 clients train a digit classifier; then three requests of five clients each are carried out, each
    beside Scratch, certified and verified, and a report is written.
    """
    from sifu.cli.demo import run_demo

    run_demo(run, as_json=format is Format.json)


@app.command()
def init(
    file: Annotated[Path, typer.Argument(metavar="FILE.toml", help="The spec to write.")],
    format: FormatOption = Format.text,
) -> None:
    """Write a commented spec to start from."""
    from sifu.cli.output import out, print_json
    from sifu.core.spec import Spec, commented_toml
    from sifu.store.files import write_atomically

    if file.exists():
        raise InputError(f"{file} exists: choose another name, or remove it first")
    if not file.parent.is_dir():
        raise InputError(f"there is no folder {file.parent} to write {file.name} into")
    write_atomically(file, commented_toml(Spec()).encode())
    if format is Format.json:
        print_json({"spec": str(file)})
    else:
        out.print(f"Wrote {file}. Next: sifu train {file} --run my-run", markup=False)


@app.command()
def train(
    spec: Annotated[Path, typer.Argument(metavar="SPEC.toml", help="What to train, see sifu init.")],
    run: Annotated[Path, typer.Option("--run", help="Folder for the run; an unfinished one is continued.")],
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Override a key of the spec.", metavar="KEY=VALUE")
    ] = None,
    data: DataOption = None,
    download: Annotated[bool, typer.Option("--download", help="Fetch missing data files.")] = False,
    format: FormatOption = Format.text,
) -> None:
    """FedAvg with tracking; continues an unfinished run.

    Every client's influence on the model is bounded round by round, and the models a later request may
    go back to are kept. Ctrl-C loses nothing: run the same command again.
    """
    from sifu.api import load_spec
    from sifu.api import train as start
    from sifu.cli.commands import download_progress, show_status
    from sifu.cli.progress import RoundsProgress

    merged = load_spec(spec, settings or [])
    with RoundsProgress(quiet=format is Format.json) as progress:
        made = start(
            merged, run=run, data_folder=data, download=download, progress=progress, data_progress=download_progress()
        )
    show_status(made, as_json=format is Format.json)


@app.command()
def status(run: RunArgument, format: FormatOption = Format.text) -> None:
    """Clients, rounds, Psi against Psi*, kept models, requests."""
    from sifu.api import Run
    from sifu.cli.commands import show_status

    show_status(Run(run), as_json=format is Format.json)


@app.command()
def plan(
    run: Annotated[
        Path, typer.Argument(metavar="DIR|SPEC.toml", help="The run folder; with --what-if a spec, before training.")
    ],
    clients: Annotated[
        str | None, typer.Option("--clients", help="Names of the clients to forget.", metavar="A,B")
    ] = None,
    most_expensive: Annotated[
        bool, typer.Option("--most-expensive", help="Plan for the active client whom it costs most to forget.")
    ] = False,
    what_if: Annotated[
        bool, typer.Option("--what-if", help="Before training: would certified unlearning pay? Trains a short pilot.")
    ] = False,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="With --what-if: override a key.", metavar="KEY=VALUE")
    ] = None,
    data: DataOption = None,
    picture: Annotated[
        Path | None, typer.Option("--picture", help="Also draw sigma against predicted rounds.", metavar="FILE.png")
    ] = None,
    epsilon: EpsilonOption = None,
    delta: DeltaOption = None,
    sigma: SigmaOption = None,
    unit: UnitOption = None,
    scope: ScopeOption = None,
    method: MethodOption = None,
    calibration: CalibrationOption = None,
    retention: RetentionOption = None,
    reserve: ReserveOption = None,
    max_rounds: MaxRoundsOption = None,
    target: TargetOption = None,
    format: FormatOption = Format.text,
) -> None:
    """What a request would do: node, noise, rounds saved, level. Changes nothing.

    With --what-if and a spec: whether requests would pay, and what to change, before anything is trained.
    """
    terms = _terms(epsilon, delta, sigma, unit, scope, method, calibration, retention, reserve, max_rounds, target)
    if what_if:
        from sifu.cli.plans import show_what_if

        if clients is not None or most_expensive or picture is not None:
            raise InputError("--what-if takes a spec and no clients: leave out --clients, --most-expensive, --picture")
        given = [key for key, value in terms.items() if value is not None and key not in ("epsilon", "delta")]
        if given:
            raise InputError(f"--what-if takes --epsilon and --delta only; put {', '.join(given)} into the spec")
        budget = [f"privacy.{key}={terms[key]}" for key in ("epsilon", "delta") if terms[key] is not None]
        show_what_if(run, [*(settings or []), *budget], data, as_json=format is Format.json)
        return
    if settings or data is not None:
        raise InputError("--set and --data belong to --what-if: a run has its spec and data already")
    if (clients is None) == (not most_expensive):
        raise InputError("name the clients with --clients A,B, or ask for --most-expensive: one of the two")
    from sifu.api import Run
    from sifu.cli.plans import draw_picture, show_plan

    opened = Run(run)
    names = _names(clients) if clients is not None else [opened.most_expensive()]
    made = opened.plan(names, **terms)
    if picture is not None:
        draw_picture(made, picture)
    show_plan(made, picture, as_json=format is Format.json)


@app.command()
def request(
    run: RunArgument,
    clients: Annotated[
        str | None, typer.Option("--clients", help="Names of the clients to forget.", metavar="A,B")
    ] = None,
    signed: Annotated[
        Path | None, typer.Option("--signed", help="A request signed by the client, see sifu clients sign.")
    ] = None,
    id: Annotated[str | None, typer.Option("--id", help="Your own id; the same id again changes nothing.")] = None,
    epsilon: EpsilonOption = None,
    delta: DeltaOption = None,
    sigma: SigmaOption = None,
    unit: UnitOption = None,
    scope: ScopeOption = None,
    method: MethodOption = None,
    calibration: CalibrationOption = None,
    retention: RetentionOption = None,
    reserve: ReserveOption = None,
    max_rounds: MaxRoundsOption = None,
    target: TargetOption = None,
    deadline: Annotated[int, typer.Option("--deadline", help="Days until it must be done.", metavar="DAYS")] = 30,
    actor: Annotated[str | None, typer.Option("--actor", help="Who enters it; or set SIFU_ACTOR.")] = None,
    format: FormatOption = Format.text,
) -> None:
    """Put a request into the ledger (idempotent by id); sifu forget carries it out."""
    from rich.markup import escape

    from sifu.api import Run
    from sifu.cli.clients import read_statement
    from sifu.cli.output import names_text, out, print_json

    terms = _terms(epsilon, delta, sigma, unit, scope, method, calibration, retention, reserve, max_rounds, target)
    opened = Run(run)
    if signed is not None:
        if clients is not None or id is not None or any(value is not None for value in terms.values()):
            raise InputError("a signed request says everything itself: leave the other options out")
        statement = read_statement(signed)
        names, made = [str(statement["body"].get("client"))], opened.request_signed(statement)
    elif clients is None:
        raise InputError("whom? Give --clients A,B, or --signed FILE")
    else:
        names = _names(clients)
        made = opened.request(names, id, deadline_days=deadline, actor=actor, **terms)
    status = opened.request_status(made)
    if format is Format.json:
        print_json({"request": made, "clients": names, "status": status})
    elif status == "posted":
        out.print(f"Request {made} for {names_text(names)} was handed to the running server, which takes it in soon.")
    elif status == "done":
        out.print(f"Request {made} for {names_text(names)} was carried out already.")
    else:
        out.print(f"Request {made} for {names_text(names)} is in the ledger. Next: sifu forget {escape(str(run))}")


@app.command()
def forget(
    run: RunArgument,
    clients: Annotated[
        str | None, typer.Option("--clients", help="A new request for these clients.", metavar="A,B")
    ] = None,
    request: Annotated[str | None, typer.Option("--request", help="Only this queued request.", metavar="ID")] = None,
    epsilon: EpsilonOption = None,
    delta: DeltaOption = None,
    sigma: SigmaOption = None,
    unit: UnitOption = None,
    scope: ScopeOption = None,
    method: MethodOption = None,
    calibration: CalibrationOption = None,
    retention: RetentionOption = None,
    reserve: ReserveOption = None,
    max_rounds: MaxRoundsOption = None,
    target: TargetOption = None,
    min_level: Annotated[
        str | None,
        typer.Option("--min-level", help="Refuse anything weaker.", metavar="none|conditional|proven|exact"),
    ] = None,
    compare: Annotated[bool, typer.Option("--compare-scratch", help="Also train Scratch, for its rounds.")] = False,
    data: DataOption = None,
    format: FormatOption = Format.text,
) -> None:
    """Carry out the queued requests, one of them, or a new one.

    Rolls back to the last model within the budget, adds calibrated noise, retrains without the clients, and
    writes a signed certificate. An interrupted request is finished first.
    """
    from sifu.api import open_run
    from sifu.cli.commands import show_outcomes
    from sifu.cli.progress import RoundsProgress

    terms = _terms(epsilon, delta, sigma, unit, scope, method, calibration, retention, reserve, max_rounds, target)
    if clients is None and any(value is not None for value in terms.values()):
        given = ", ".join(f"--{key.replace('_', '-')}" for key, value in terms.items() if value is not None)
        raise InputError(f"{given} belong to a new request: add --clients, or leave them out for queued requests")
    with RoundsProgress(quiet=format is Format.json) as progress:
        outcomes = open_run(run, data_folder=data).forget(
            None if clients is None else _names(clients),
            request,
            min_level=min_level,  # type: ignore[arg-type]
            compare_scratch=compare,
            progress=progress,
            **(terms if clients is not None else {}),
        )
    show_outcomes(run, outcomes, as_json=format is Format.json)


@app.command()
def verify(
    target: Annotated[Path, typer.Argument(metavar="DIR|CERTIFICATE", help="A run folder or a certificate file.")],
    public_key: Annotated[
        str | None, typer.Option("--public-key", help="The operator's public key (hex), known from elsewhere.")
    ] = None,
    anchor: Annotated[
        str | None,
        typer.Option("--anchor", help="A head of the chain kept elsewhere (sifu anchor).", metavar="SEQ:HASH"),
    ] = None,
    format: FormatOption = Format.text,
) -> None:
    """Recompute every claim, offline, from the recorded scalars. Exit code 3 if anything is wrong."""
    from rich.markup import escape

    from sifu.api import verify_certificate, verify_run
    from sifu.cli.output import out, print_json

    if not target.exists():
        raise InputError(f"{target} does not exist: give a run folder or a certificate file")
    if anchor is not None and not target.is_dir():
        raise InputError("an anchor belongs to a run folder; a certificate is checked by its signature")
    result = verify_run(target, public_key, anchor) if target.is_dir() else verify_certificate(target, public_key)
    if format is Format.json:
        print_json(
            {
                "subject": result.subject,
                "holds": result.holds,
                "public_key": result.public_key,
                "checked": result.checked,
                "notes": result.notes,
                "problems": result.problems,
            }
        )
    elif result.holds and target.is_dir():
        out.print(f"[bold green]Verified[/] {escape(result.subject)}: {', '.join(result.checked)} all recompute.")
        out.print(f"Signed with the key {result.public_key}.")
        for note in result.notes:
            out.print(f"Note: {note}.")
    elif result.holds:
        out.print(f"[bold green]Consistent[/] {escape(result.subject)}: the signature holds, its figures agree.")
        out.print(f"Signed with the key {result.public_key}.")
        if public_key is None:
            out.print("Compare this key with the one the operator published, or give it with --public-key.")
        out.print("The run behind it was not looked at: the operator checks that with sifu verify DIR.")
    if not result.holds:
        if format is Format.json:
            raise typer.Exit(3)
        raise VerificationError(
            f"{result.subject} does not verify, {len(result.problems)} problem(s):\n  " + "\n  ".join(result.problems)
        )


@app.command()
def audit(
    folder: Annotated[
        Path | None,
        typer.Argument(metavar="DIR", help="The run folder; with --client, a folder with what the client holds."),
    ] = None,
    request: Annotated[
        str | None, typer.Option("--request", help="Attack the release of this request.", show_default="the last")
    ] = None,
    attacks: Annotated[
        bool, typer.Option(help="Membership inference, Scratch and relearning too; they retrain.")
    ] = True,
    subjects: Annotated[int, typer.Option("--subjects", help="Replay at most so many of the forgotten.", min=1)] = 16,
    replays: Annotated[int, typer.Option("--replays", help="Replays of a release in each world.", min=20)] = 100_000,
    shadows: Annotated[
        int, typer.Option("--shadows", help="Shadow federations in each world, 0 for none.", min=0)
    ] = 16,
    seed: Annotated[int | None, typer.Option("--seed", help="Make the audit's own draws repeatable.")] = None,
    controls: Annotated[
        bool, typer.Option("--controls", help="Also audit operators who cheat: each must be caught.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option("--output", help="Folder for audit.json and audit.png.", show_default="DIR/audit")
    ] = None,
    client: Annotated[
        str | None, typer.Option("--client", help="Check as this leaving client, without the run.", metavar="NAME")
    ] = None,
    certificate: Annotated[Path | None, typer.Option("--certificate", help="--client: its public certificate.")] = None,
    before: Annotated[
        Path | None, typer.Option("--before", help="--client: released model before, safetensors.")
    ] = None,
    after: Annotated[Path | None, typer.Option("--after", help="--client: released model after.")] = None,
    own_data: Annotated[
        Path | None, typer.Option("--own-data", help="--client: its data, an npz with x and y.")
    ] = None,
    public_key: Annotated[
        str | None, typer.Option("--public-key", help="--client: the operator's key (hex), known from elsewhere.")
    ] = None,
    nonce: Annotated[
        str | None, typer.Option("--nonce", help="--client: opens the commitment to the model after.")
    ] = None,
    data: DataOption = None,
    format: FormatOption = Format.text,
) -> None:
    """Try to break what was certified. Exit code 3 if any certified claim is contradicted.

    Replays the run with and without the forgotten clients (all data must be at hand), holds true distances
    against Psi and noise against its record, bounds epsilon from below by replaying releases, and attacks the released
    model. With --client: what a leaving client can check with only its certificate, two released models and its data.
    """
    as_json = format is Format.json
    if client is not None:
        from sifu.cli.audit import audit_as_client

        audit_as_client(client, folder, certificate, before, after, own_data, public_key, nonce, as_json)
        return
    clients_only = {"certificate": certificate, "before": before, "after": after, "own-data": own_data, "nonce": nonce}
    for name, value in clients_only.items():
        if value is not None:
            raise InputError(f"--{name} belongs to --client NAME, the audit of a leaving client")
    if folder is None and not controls:
        raise InputError("name the run folder to audit, or give --controls or --client")
    from sifu.cli.audit import audit_folder

    audit_folder(folder, request, attacks, subjects, replays, shadows, seed, controls, output, data, as_json)


@app.command()
def report(
    run: RunArgument,
    output: Annotated[
        Path | None, typer.Option("--output", help="Where to write the page.", show_default="DIR/report")
    ] = None,
    format: FormatOption = Format.text,
) -> None:
    """One self-contained HTML page and its figures (confidential: it shows Psi and nodes)."""
    from sifu.cli.output import out, print_json
    from sifu.report import write_report

    page = write_report(run, output)
    if format is Format.json:
        print_json({"report": str(page)})
    else:
        out.print(f"Wrote {page}", markup=False)


@app.command()
def export(
    run: RunArgument,
    model: Annotated[Path, typer.Option("--model", help="The safetensors file to write.", metavar="FILE")],
    format: FormatOption = Format.text,
) -> None:
    """Write the current released model as safetensors."""
    from sifu.api import Run
    from sifu.cli.output import out, print_json

    path = Run(run).export(model)
    if format is Format.json:
        print_json({"model": str(path)})
    else:
        out.print(f"Wrote {path}", markup=False)


@app.command()
def methods(format: FormatOption = Format.text) -> None:
    """The unlearning methods that --method takes, one line each."""
    from sifu.cli.commands import show_methods

    show_methods(as_json=format is Format.json)


@app.command()
def doctor(format: FormatOption = Format.text) -> None:
    """What is installed, which engines and devices work here."""
    from sifu.cli.commands import show_doctor

    show_doctor(as_json=format is Format.json)


def main() -> None:
    """Entry point: errors become sentences with a stable exit code."""
    as_json = _wants_json(sys.argv[1:])
    try:
        code = app(standalone_mode=False)
    except SifuError as error:
        _fail(str(error), error.exit_code, as_json)
    except typer.Exit as exit_error:
        _leave(exit_error.exit_code, as_json)
    except (KeyboardInterrupt, typer.Abort):
        _leave(INTERRUPTED, as_json)
    except Exception as error:
        if _is_usage_error(error):
            if as_json:
                _fail(error.format_message(), 2, as_json)  # type: ignore[attr-defined]
            error.show()  # type: ignore[attr-defined]
            sys.exit(2)
        if os.environ.get("SIFU_DEBUG"):
            raise
        _fail(f"unexpected {type(error).__name__}: {error} (set SIFU_DEBUG=1 for the traceback)", 1, as_json)
    else:
        _leave(code if isinstance(code, int) else 0, as_json)


INTERRUPTED = 130


def _leave(code: int, as_json: bool) -> None:
    """Exit; Typer turns Ctrl-C into this code without a word, so it is said here."""
    if code == INTERRUPTED:
        _fail("interrupted: every finished round is saved; run the same command again to go on", code, as_json)
    sys.exit(code)


def _wants_json(arguments: list[str]) -> bool:
    """Whether `--format json` stands on the command line; it must be known even if the rest is not understood."""
    separate = any(pair == ("--format", "json") for pair in itertools.pairwise(arguments))
    return separate or "--format=json" in arguments


def _is_usage_error(error: Exception) -> bool:
    """Whether Typer's parser refused the command line; its exception class moved between its releases."""
    return hasattr(error, "show") and hasattr(error, "exit_code")


def _fail(sentence: str, code: int, as_json: bool) -> None:
    if as_json:
        from sifu.cli.output import print_json

        print_json({"error": sentence, "exit_code": code})
    sys.stderr.write(f"sifu: {sentence}\n")
    sys.exit(code)


if __name__ == "__main__":
    main()
