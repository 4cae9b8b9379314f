"""`sifu plan|request|forget`: whom to forget, on which terms, and doing it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from sifu.cli.options import DataOption, DeviceOption, Format, FormatOption, PrecisionOption, RunArgument
from sifu.errors import InputError

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


def request(
    run: RunArgument,
    clients: Annotated[
        str | None, typer.Option("--clients", help="Names of the clients to forget.", metavar="A,B")
    ] = None,
    signed: Annotated[
        Path | None, typer.Option("--signed", help="A request signed by the client, see sifu clients sign.")
    ] = None,
    id: Annotated[
        str | None,
        typer.Option("--id", help="Your own id; the same id again changes nothing.", show_default="r1, r2, ..."),
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
    deadline: Annotated[int, typer.Option("--deadline", help="Days until it must be done.", metavar="DAYS")] = 30,
    actor: Annotated[str | None, typer.Option("--actor", help="Who enters it; or set SIFU_ACTOR.")] = None,
    format: FormatOption = Format.text,
) -> None:
    """Put a request into the ledger (idempotent by id); sifu forget carries it out.

    Nothing is trained: from now on its clients take part in no round. What is not given comes from the run's spec; sifu
    plan shows what a request would do. Beside a command that trains, it waits in the run's inbox.
    """
    from rich.markup import escape

    from sifu.api import Run
    from sifu.cli.clients import read_statement
    from sifu.cli.output import names_text, out, print_json
    from sifu.launch.federation import FLOWER

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
        on_flower = opened.spec.data.name == FLOWER
        way = "flwr run carries it out" if on_flower else f"sifu forget {escape(str(run))}"
        out.print(f"Request {made} for {names_text(names)} is in the ledger. Next: {way}")


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
    device: DeviceOption = "auto",
    precision: PrecisionOption = "float32",
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
        opened = open_run(run, data_folder=data, device=device, precision=precision)  # type: ignore[arg-type]
        outcomes = opened.forget(
            None if clients is None else _names(clients),
            request,
            min_level=min_level,  # type: ignore[arg-type]
            compare_scratch=compare,
            progress=progress,
            **(terms if clients is not None else {}),
        )
    show_outcomes(run, outcomes, as_json=format is Format.json)
