"""What the commands show: tables that fit 80 columns, or the same as JSON."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from sifu.api import Outcome, Run
from sifu.cli.output import err, level_text, names_text, number, out, percent, print_json
from sifu.core.ledger import finite_or_text
from sifu.core.method_info import METHOD_INFOS
from sifu.launch.federation import way_to_go_on
from sifu.store.inbox import INBOX

MOST_CLIENTS = 10


def table(*columns: str, title: str | None = None) -> Table:
    """A plain table; figures are right-aligned where the column's name starts with a dash."""
    made = Table(
        title=title, title_justify="left", box=None, pad_edge=False, title_style="bold", show_header=any(columns)
    )
    for column in columns:
        made.add_column(column.lstrip("-"), justify="right" if column.startswith("-") else "left", overflow="fold")
    return made


def download_progress() -> Callable[[int, int], None] | None:
    """Bytes fetched, on a terminal only."""
    if not err.is_terminal:
        return None

    def show(done: int, total: int) -> None:
        share = f" of {total / 1e6:.1f}" if total else ""
        err.print(f"fetched {done / 1e6:.1f}{share} MB", end="\r" if done != total else "\n")

    return show


def show_status(run: Run, as_json: bool) -> None:
    """`sifu status`, and what `sifu train` ends with."""
    status = run.status()
    if as_json:
        print_json(status)
        return
    clients = status["clients"]
    counts = {state: sum(1 for one in clients if one["state"] == state) for state in ("active", "waiting", "forgotten")}
    out.print(
        f"[bold]{escape(status['run'])}[/]: {status['phase']}, {status['rounds']} rounds on the active history "
        f"({status['rounds_run']} run in all), accuracy {percent(status['accuracy'])} on the active clients' data"
    )
    missed = missed_target(status["accuracy"], status["target"])
    if missed and status["phase"] == "ready":
        out.print(f"[yellow]{missed}[/]")
    if status["phase"] != "ready":
        way = way_to_go_on(run.spec, status["phase"])
        out.print(f"It was interrupted, or is at work: {way} goes on with it.")
    out.print(
        f"{len(clients)} clients: "
        + ", ".join(f"{count} {state}" for state, count in counts.items() if count)
        + f"; {status['parameters']} parameters; losses {status['regularity']}"
    )
    kept = [one for one in status["models"] if one["kept"]]
    out.print(f"{len(kept)} models kept to go back to, {sum(one['bytes'] for one in kept) / 1e6:.2f} MB")
    if status["updates"]["files"]:
        stored = status["updates"]
        out.print(f"updates of clients stored for {stored['files']} rounds, {stored['bytes'] / 1e6:.2f} MB")
    if status["psi_star"]:
        out.print(f"sigma {number(status['sigma'])} hides Psi up to Psi* = {number(status['psi_star'])}")
    active = sorted((one for one in clients if one["state"] == "active"), key=lambda one: -float(one["psi"]))
    shown = table("client", "-samples", "-Psi", "-sigma needed now", title="\nMost influential active clients")
    for one in active[:MOST_CLIENTS]:
        shown.add_row(
            escape(one["name"]), str(one["samples"]), number(float(one["psi"])), number(float(one["sigma_needed_now"]))
        )
    out.print(shown)
    if status["rejections"]:
        out.print(f"\n{len(status['rejections'])} replies of clients were refused; the latest:")
        for one in status["rejections"][-3:]:
            out.print(f"  round {one['round']} of branch {one['branch']}: {escape(one['client'])}, {one['reason']}")
    if status["refused"]:
        out.print("\nRefused, the latest:")
        for one in status["refused"][-3:]:
            out.print(f"  {one['time']} {escape(one['what'])}: {escape(one['reason'])}")
    if status["incidents"]:
        out.print("\nWent otherwise than asked, the latest:")
        for one in status["incidents"][-3:]:
            # An evaluation belongs to no round; a round as a whole to no client.
            where = f"round {one['round']} of branch {one['branch']}, " if one["round"] or one["branch"] else ""
            out.print(f"  {one['time']} {where}{escape(one['client'] or 'all')}: {escape(one['what'])}")
    if status["inbox"]:
        named = ", ".join(f"{one['kind']} {escape(one['id'])}" for one in status["inbox"][:MOST_CLIENTS])
        out.print(
            f"\n{len(status['inbox'])} in the inbox: {named}. The process that trains takes them in; where none does, "
            "the next sifu forget or sifu request."
        )
        for one in status["inbox"]:
            if one["trouble"]:
                out.print(
                    f"[bold red]{one['kind']} {escape(one['id'])} cannot be opened ({one['trouble']})[/]: it waits in "
                    f"{escape(str(run.folder / INBOX))} until the account that trains may read it."
                )
    if status["requests"]:
        requests = table("request", "status", "until", "clients", "-epsilon", "-sigma", "level", title="\nRequests")
        for one in status["requests"]:
            sigma = one["sigma"] if isinstance(one["sigma"], str) else number(one["sigma"])
            requests.add_row(
                one["request"],
                one["status"],
                one["deadline"][:10] + (" [bold red]overdue[/]" if one["overdue"] else ""),
                names_text(one["clients"], 2),
                number(one["epsilon"]),
                sigma,
                level_text(one["level"] or "-"),
            )
        out.print(requests)
        waiting = sum(one["status"] in ("received", "verified", "planned") for one in status["requests"])
        if waiting and status["phase"] == "ready":
            out.print(f"{waiting} to be carried out: {way_to_go_on(run.spec, 'ready')} does it.")
    if status["budgets"]:
        left = [one["left"] / one["budget"] for one in status["budgets"] if one["budget"] > 0]
        out.print(f"\nBudgets of the {len(left)} forgotten by noise: between {min(left):.0%} and {max(left):.0%} left")
    ahead = status["outlook"]
    if ahead:
        out.print(
            f"Past the last noise {ahead['fitting']} of {ahead['active']} active clients could be forgotten with the "
            f"same noise: about {ahead['expected_requests']:.3g} requests of {ahead['usual_size']:g} before one needs "
            "more"
        )


def missed_target(accuracy: float | None, target: float) -> str | None:
    """A sentence if the stop rule ended at max_rounds without reaching its target."""
    if target <= 0 or accuracy is None or accuracy >= target:
        return None
    return f"It stopped at its limit of rounds: the target of {percent(target)} was not reached."


def outcome_values(outcome: Outcome) -> dict[str, Any]:
    """An outcome as plain values."""
    return asdict(outcome) | {"psi": finite_or_text(outcome.psi)}


def outcomes_table(outcomes: list[Outcome]) -> Table:
    """Requests with what came of them."""
    shown = table("request", "clients", "level", "-sigma", "-back to", "-rounds", "-Scratch", "-accuracy")
    for one in outcomes:
        shown.add_row(
            one.request,
            escape(one.clients[0]) + (f" +{len(one.clients) - 1}" if len(one.clients) > 1 else ""),
            level_text(one.level),
            number(one.sigma),
            str(one.rollback_to),
            str(one.rounds),
            "-" if one.scratch_rounds is None else str(one.scratch_rounds),
            percent(one.accuracy),
        )
    return shown


def show_outcomes(folder: Path, outcomes: list[Outcome], as_json: bool) -> None:
    """`sifu forget`."""
    if as_json:
        print_json({"run": str(folder), "requests": [outcome_values(one) for one in outcomes]})
        return
    if not outcomes:
        out.print("No request is waiting. Ask with: sifu request DIR --clients A,B")
        return
    out.print(outcomes_table(outcomes))
    for one in outcomes:
        missed = missed_target(one.accuracy, one.target)
        if missed:
            out.print(f"[yellow]{one.request}: {missed}[/]")
        if one.training_noise:
            together, alone = one.training_noise.epsilon_composed, one.training_noise.epsilon_one_round
            out.print(
                f"{one.request}: epsilon {number(together)} for all rounds together; "
                f"{number(alone)} for one round, as the paper counts"
            )
    name = escape(str(folder))
    out.print(f"Certificates are in {name}/certificates. Check them with: sifu verify {name}")


def show_methods(as_json: bool) -> None:
    """`sifu methods`."""
    if as_json:
        listed = [
            {"name": name, "summary": one.summary, "certifies": one.certifies, "protection": one.protection}
            for name, one in METHOD_INFOS.items()
        ]
        print_json({"methods": listed})
        return
    shown = table("method", "what it does")
    for name, one in METHOD_INFOS.items():
        shown.add_row(name, one.summary)
    out.print(shown)


def show_doctor(as_json: bool) -> None:
    """`sifu doctor`."""
    import importlib.metadata
    import os
    import platform

    packages = {}
    for name in (
        "sifu",
        "numpy",
        "scipy",
        "torch",
        "safetensors",
        "cryptography",
        "scikit-learn",
        "matplotlib",
        "flwr",
    ):
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            packages[name] = None
    import torch

    from sifu.data.sources import search_folders
    from sifu.launch.devices import why_no_gpu

    devices = ["cpu"] + [torch.cuda.get_device_name(k) for k in range(torch.cuda.device_count())]
    values = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "packages": packages,
        "engines": {
            "embedded": f"works, on cpu with {torch.get_num_threads()} threads",
            "flower": f"works, with flwr {packages['flwr']}"
            if packages["flwr"]
            else 'needs Flower: pip install "sifu[flower]"',
            "gpu": why_no_gpu() or "works, sifu train and forget take --device cuda",
        },
        "devices": devices,
        "data_folders": [str(folder) for folder in search_folders(None)],
    }
    if as_json:
        print_json(values)
        return
    facts = table("", "")
    facts.add_row("python", f"{values['python']} on {values['platform']}, {values['cores']} cores")
    for name, version in packages.items():
        facts.add_row(name, version or "not installed")
    facts.add_row("embedded engine", values["engines"]["embedded"])
    facts.add_row("flower engine", escape(values["engines"]["flower"]))
    facts.add_row("on a gpu", values["engines"]["gpu"])
    facts.add_row("devices", ", ".join(devices))
    facts.add_row("data looked for in", ", ".join(values["data_folders"]))
    out.print(facts)
