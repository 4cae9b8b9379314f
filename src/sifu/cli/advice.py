"""Output of `sifu advise`."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path

from rich.markup import escape

from sifu.advice import Advice
from sifu.advice.release_options import ReleaseAdvice
from sifu.cli.output import Answer, duration, level_text, number, out, percent, table
from sifu.plots.style import byte_size, counted


def show_advice(spec: Path, advice: Advice, everything: bool) -> Answer:
    """Return the answer of `sifu advise`."""
    return Answer({"spec": str(spec), **asdict(advice)}, partial(_print_advice, advice, everything))


def _print_advice(advice: Advice, everything: bool) -> None:
    style = "green" if advice.worthwhile else "yellow"
    out.print(f"[bold {style}]{advice.verdict}[/]")
    if everything:
        _print_pilot(advice)
    _print_training_options(advice, everything)
    if advice.release is not None:
        _print_releases(advice.release)
    if everything:
        for suggestion in advice.suggestions:
            out.print(f"- {escape(suggestion)}")
    out.print("Nothing was kept." + ("" if everything else " --all shows reasons, the pilot, and what to change."))


def _print_releases(advice: ReleaseAdvice) -> None:
    """Print, for each budget, the noise that protects against observers of all releases and the accuracy with it."""
    best = f"{percent(advice.accuracy)} on {advice.rows} held-out rows without it, at r = {advice.relative_penalty:.3g}"
    columns = ("hides", "-epsilon", "-delta", "-r", "-distance", "-noise", "-accuracy", "-without noise")
    shown = table(*columns, title=f"\nNoise on releases: {best}")
    for option in advice.options:
        figures = (option.epsilon, option.delta, option.relative_penalty, option.distance, option.noise)
        accuracies = (percent(option.accuracy), percent(option.without_noise))
        shown.add_row(f"a {option.unit}", *(f"{value:.3g}" for value in figures), *accuracies)
    out.print(shown)
    out.print(advice.verdict)


def _print_pilot(advice: Advice) -> None:
    facts = table("", "")
    facts.add_row("clients, parameters", f"{advice.clients}, {advice.parameters}")
    solved = [way.name for way in advice.ways] == ["closed form"]
    if not solved:
        facts.add_row(
            "enough clients?",
            f"{number(advice.clients_over_law, 3)} times the rule of thumb s sqrt(parameters); several times 1 is good",
        )
        facts.add_row(
            "noise / signal",
            f"{number(advice.noise_to_signal, 3)} for the most expensive client, "
            f"{number(advice.typical_noise_to_signal, 3)} for a typical one: the noise that hides a client, relative "
            "to how far training moved the model; well below 1 is good",
        )
    reached = "its target was reached" if advice.reached_target else "its target was not reached"
    reached = reached if advice.target > 0.0 else "the spec has no target"
    pilot = "a solve" if solved else counted(advice.pilot_rounds, "round")
    facts.add_row("pilot", f"{pilot}, accuracy {percent(advice.accuracy)}; {reached}")
    if advice.predicted_rounds is not None and not solved:
        low, high = advice.predicted_interval or (advice.predicted_rounds,) * 2
        predicted = counted(advice.predicted_rounds, "round")
        rounds = f"perhaps {predicted} ({low} to {high}); Scratch {advice.scratch_rounds}"
        facts.add_row("a plain request", rounds)
    chosen = next((way for way in advice.ways if way.name == advice.recommended), None)
    trained_by = f", trained by {chosen.name}" if chosen is not None and chosen.name == "groups" else ""
    facts.add_row("level", level_text(advice.level if chosen is None else chosen.level) + trained_by)
    if advice.epsilon_needed is not None:
        facts.add_row(
            "worthwhile with", f"epsilon {number(advice.epsilon_needed)}, or about {advice.clients_needed} such clients"
        )
    elif advice.clients_needed is not None:
        facts.add_row("worthwhile with", f"about {advice.clients_needed} such clients")
    out.print(facts)


def _print_training_options(advice: Advice, everything: bool) -> None:
    """Print the comparison of training regimes; with `everything`, also an explanation of each."""
    columns = ("train by", "level", "-accuracy", "-training", "-a request", "-its time", "-its traffic")
    shown = table(*columns, title="\nPlain rounds, groups or closed form")
    for way in advice.ways:
        rounds = "-" if way.request_rounds is None else counted(round(way.request_rounds), "round")
        if way.request_interval is not None:
            rounds += f" ({way.request_interval[0]}-{way.request_interval[1]})"
        name = way.name + (" *" if way.name == advice.recommended else "")
        shown.add_row(
            name,
            level_text(way.level),
            percent(way.accuracy),
            "-" if way.training_seconds is None else duration(way.training_seconds),
            rounds,
            "-" if way.request_seconds is None else duration(way.request_seconds),
            "-" if way.request_bytes is None else byte_size(way.request_bytes),
        )
    out.print(shown)
    out.print(f"Accuracy {advice.measured_on}, the same rows for every method.", style="dim")
    if everything:
        for way in advice.ways:
            out.print(f"{way.name}: {escape(way.reason)}")
    chosen = next((way for way in advice.ways if way.name == advice.recommended), None)
    if chosen is not None and chosen.settings:
        out.print(f"Train by {chosen.name}: set {escape(', '.join(chosen.settings))}")
