"""The terms of a request as options, declared once for every command that takes them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from sifu.choices import Calibration, Level, Release, Retention, Scope, Unit


def _parse_sigma(text: str) -> Any:
    from sifu.core.request_terms import parse_sigma

    return parse_sigma(text)


def _complete_method(start: str) -> list[str]:
    from sifu.core.method_info import METHOD_INFOS

    return [name for name in ("auto", *METHOD_INFOS) if name.startswith(start)]


TERM_OPTIONS: dict[str, Any] = {
    "epsilon": Annotated[float | None, typer.Option("--epsilon", help="Budget; 1 is strong, 10 is weak.")],
    "delta": Annotated[float | None, typer.Option("--delta", help="Budget; 0.01 or smaller is usual.")],
    "sigma": Annotated[
        str | None, typer.Option("--sigma", help="Noise: auto, or a number.", metavar="auto|X", parser=_parse_sigma)
    ],
    "unit": Annotated[Unit | None, typer.Option("--unit", help="client covers each by itself, joint all together.")],
    "scope": Annotated[
        Scope | None, typer.Option("--scope", help="all covers every later release, latest the last only.")
    ],
    "method": Annotated[
        str | None,
        typer.Option(
            "--method",
            help="auto takes the fewest predicted rounds at the level asked for; sifu methods lists the others.",
            show_default="auto",
            autocompletion=_complete_method,
        ),
    ],
    "min_level": Annotated[
        Level | None,
        typer.Option("--level", "--min-level", help="Refuse anything weaker.", show_default="conditional"),
    ],
    "calibration": Annotated[
        Calibration | None, typer.Option("--calibration", help="How noise follows from the budget.")
    ],
    "retention": Annotated[
        Retention | None,
        typer.Option("--retention", help="paper keeps models from before the rollback, strict erases them."),
    ],
    "reserve": Annotated[
        float | None, typer.Option("--reserve", help="Fraction of the budget kept back for later requests.")
    ],
    "max_rounds": Annotated[
        int | None, typer.Option("--max-rounds", help="Stop retraining after this many rounds; 0 is the spec's limit.")
    ],
    "release": Annotated[
        Release | None,
        typer.Option("--release", help="healed waits for the target; now releases the starting model, then heals."),
    ],
    "target": Annotated[
        float | None, typer.Option("--target", help="Accuracy to stop at, 0 for none; by default the spec's.")
    ],
}
"""Every term of `TermsGiven`: an option that is not given is None, and the run's spec decides."""


def takes_terms(command: Callable[..., None]) -> Callable[..., None]:
    """Put the options of a request's terms in the place of the command's parameter `terms`.

    The command is called with a `TermsGiven` that holds only the terms that were given.
    """
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        if parameter.name == "terms":
            parameters += [
                inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
                for name, annotation in TERM_OPTIONS.items()
            ]
        else:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    @functools.wraps(command)
    def with_terms(**values: Any) -> None:
        given = {name: values.pop(name) for name in TERM_OPTIONS}
        command(terms={name: value for name, value in given.items() if value is not None}, **values)

    with_terms.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    with_terms.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return with_terms


def flags(terms: Any) -> str:
    """The options by which terms were given: `--epsilon, --max-rounds`."""
    return ", ".join("--level" if name == "min_level" else f"--{name.replace('_', '-')}" for name in terms)


def client_names(clients: str) -> list[str]:
    """The names in `--clients A,B`."""
    return [name.strip() for name in clients.split(",") if name.strip()]
