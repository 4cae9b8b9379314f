"""The terms of a request as options, declared once for every command that takes them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from sifu.choices import SigmaChoice, Term, terms_on_offer


def _parse_sigma(text: str) -> Any:
    from sifu.core.request_terms import parse_sigma

    return parse_sigma(text)


def _complete_method(start: str) -> list[str]:
    from sifu.core.method_info import METHOD_INFOS

    return [name for name in ("auto", *METHOD_INFOS) if name.startswith(start)]


def _option(name: str, kind: Any, about: Term) -> Any:
    flag = f"--{name.replace('_', '-')}"
    if kind is SigmaChoice:
        return Annotated[str | None, typer.Option(flag, help=about.help, metavar="auto|X", parser=_parse_sigma)]
    return Annotated[
        kind | None,
        typer.Option(
            flag,
            help=about.help,
            show_default=about.default or True,
            autocompletion=_complete_method if name == "method" else None,
        ),
    ]


TERM_OPTIONS: dict[str, Any] = {
    name: _option(name, term.kind, term.about) for name, term in terms_on_offer().items() if name != "records"
}
"""An option for each term: one that is not given is None, and the run's spec decides. Records come in a file."""


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
    return ", ".join(f"--{name.replace('_', '-')}" for name in terms)


def client_names(clients: str) -> list[str]:
    """The names in `--clients A,B`."""
    return [name.strip() for name in clients.split(",") if name.strip()]
