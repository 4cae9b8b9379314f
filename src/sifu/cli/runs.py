"""Commands that create and read runs: `init`, `train`, `status`, `export`, `predict` and others."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import sifu
from sifu.choices import MeasuredOn
from sifu.cli.options import (
    NAME,
    AllOption,
    DeviceOption,
    ModuleOption,
    OutputOption,
    RunArgument,
    RunOption,
    SetOption,
    argument,
    collect_run,
    option,
)
from sifu.cli.output import Answer, RoundsProgress, err
from sifu.core.operator_words import names_words
from sifu.errors import InputError, SifuWarning

if TYPE_CHECKING:
    from sifu.api import PredictedRow


def warn(sentence: str) -> None:
    """Write a warning to stderr."""
    err.print(f"sifu: {sentence}", markup=False, highlight=False, soft_wrap=True)


def demo(run: RunOption = None) -> Answer:
    """Train, forget and verify on digits, in less than a minute.

    First, a closed-form head of 160 clients forgets without noise. Then the same clients train a digit classifier in
    rounds. Three requests of five clients each are executed with noise, compared with Scratch, certified and verified,
    and a report is written. The run's folder is sifu-demo by default.
    """
    from sifu.cli.demo import run_demo

    return run_demo(run)


def init(
    file: Annotated[Path, argument("FILE.toml", "Spec to write.")],
    table: Annotated[
        Path | None,
        option("CSV or Parquet file, or a folder of them, to propose a spec for.", "--from", metavar="TABLE"),
    ] = None,
    label: Annotated[str, option("Column of the label.")] = "",
    client: Annotated[str, option("Column that names the client of each row.", "--client-column")] = "",
    identity: Annotated[str, option("Column that identifies a row.", "--id-column")] = "",
    columns: Annotated[str, option("Names of all columns of a file without a header line.")] = "",
    text: Annotated[str, option("Column of texts to predict from, and nothing else.")] = "",
    model: Annotated[
        str, option("With --text: folder, or name on the hub, of a Hugging Face model.", "--text-model")
    ] = "",
) -> Answer:
    """Write a commented spec to start from.

    With --from, the spec is proposed from the header of your table and the types of its columns: every column gets a
    role. Lines that you must set without looking at the clients' data are marked CHECK.
    """
    from sifu.core.spec import Spec, commented_toml
    from sifu.store.files import write_atomically

    if file.exists():
        raise InputError(f"{file} exists: choose another name, or remove it first")
    if not file.parent.is_dir():
        raise InputError(f"folder {file.parent} does not exist: make it, or write {file.name} elsewhere")
    if table is None:
        write_atomically(file, commented_toml(Spec()).encode())
        return Answer({"spec": str(file)}, f"Wrote {file}. Next: sifu train {file} --run my-run")
    from sifu.data.table_keys import split_names
    from sifu.data.table_proposal import propose_spec

    header = split_names(columns, "--columns")
    proposal = propose_spec(table, label=label, client=client, identity=identity, header=header, text=text, model=model)
    write_atomically(file, proposal.text.encode())
    return Answer(
        {"spec": str(file), "checks": list(proposal.checks)},
        f"Wrote {file}. Check these lines in it:",
        *(f"  {check}" for check in proposal.checks),
        f"Next: sifu plan {file}, or sifu train {file} --run my-run",
    )


def train(
    spec: Annotated[Path, argument("SPEC.toml", "Spec of the training, see sifu init.")],
    run: Annotated[Path, option("Folder of the run.", "--run")],
    settings: SetOption = None,
    device: DeviceOption = "auto",
) -> Answer:
    """Train with FedAvg, tracking the influence of every client.

    Continues an unfinished run. The influence on the model is bounded round by round, and models that a later request
    may roll back to are kept. Ctrl-C loses nothing: run the same command again.
    """
    from sifu.api import load_spec

    collect_run(run)
    merged = load_spec(spec, settings or [])
    with RoundsProgress() as progress:
        trained = sifu.train(merged, run=run, progress=progress, device=device)
    with trained.view() as view:
        if view.facts.shape_from_labels:
            warn(
                "model.outputs is not set, so the classes were counted from the clients' labels: later certificates "
                "are conditional at best. Set model.outputs and train again to avoid this."
            )
    status = trained.status()
    hint = f"Next: sifu plan {run} --client NAME shows what forgetting a client would do."
    return Answer(status.to_mapping, *status.lines(), hint)


def update(run: RunArgument, device: DeviceOption = "auto") -> Answer:
    """Do what the run owes: a later release, rebuilt groups.

    The released model then contains all clients except forgotten clients and clients of an approved request that still
    waits. Approved requests for records are executed first; sifu forget executes the others. A closed-form head is
    solved again if needed. Groups whose models requests erased train again with their remaining members.
    """
    with RoundsProgress() as progress:
        updated = sifu.open_run(run, device=device).update(progress)
    lines = [f"Executed first: {', '.join(updated.executed)}."] if updated.executed else []
    back = f", again with {names_words(updated.returned)}" if updated.returned else ""
    changed = f"The released model is that of {updated.clients} clients now{back}."
    lines.append(changed if updated.rounds or updated.executed else "The released model is up to date.")
    if updated.rebuilt:
        lines.append(f"Groups trained again: {updated.rebuilt}.")
    if updated.left_out:
        lines.append(f"Left out by pending requests: {names_words(updated.left_out)}.")
    return Answer(asdict(updated), " ".join(lines))


def join(
    run: RunArgument,
    file: Annotated[
        Path, option("Data file of the format the run was trained from: CSV, Parquet or .npz.", metavar="FILE")
    ],
    name: Annotated[str | None, NAME] = None,
) -> Answer:
    """Add clients to a head in closed form, and solve it again.

    Each client sends its statistics once. A table needs the same columns, in any order; its client column or --name
    names the client. The run stores the path and reads the file again when it needs the data. To add records of a known
    client, join them under another name; to remove records, use sifu forget --records. Run the same command again after
    an interruption.
    """
    with RoundsProgress() as progress:
        joined = sifu.open_run(run).join(progress, file=file, name=name)
    who = names_words(joined) if joined else "No new client"
    return Answer({"joined": joined}, f"{who} joined {run}; the head was solved again." if joined else f"{who} joined.")


def evaluate(
    run: RunArgument,
    on: Annotated[
        MeasuredOn | None, option("Rows to evaluate on; held-out ones if there are any.", "--on", show_default=False)
    ] = None,
    device: DeviceOption = "auto",
) -> Answer:
    """Measure the accuracy of the current model.

    It is measured on held-out rows, or on the active clients' training data. sifu train and sifu forget measure it as
    well. If a network computes the features, sifu forget does not, because this would take longer than the request.
    sifu status shows the latest figures.
    """
    opened = sifu.open_run(run, device=device)
    found = opened.evaluate(on)
    return Answer({"run": str(run)} | found.to_mapping(), f"{run}: {found.words}")


def status(run: RunArgument, everything: AllOption = False) -> Answer:
    """Show clients, rounds, Psi against Psi*, models and requests.

    Psi bounds how far a client can have moved the current model, if the run's assumptions hold. Noise of size sigma
    hides Psi up to Psi*; "sigma needed now" is the noise that would hide a client at the current model, without a
    rollback.
    """
    status = sifu.Run(run).status()
    return Answer(status.to_mapping, *status.lines(everything))


def report(
    run: RunArgument,
    output: OutputOption = None,
) -> Answer:
    """Write an HTML page with figures (confidential).

    It is self-contained, and shows Psi and nodes. Its folder is DIR/report by default.
    """
    from sifu.report import write_report

    page = write_report(run, output)
    return Answer({"report": str(page)}, f"Wrote {page}")


def export(
    run: RunArgument,
    model: Annotated[Path, option("File to write: .safetensors, or .onnx.", "--model", metavar="FILE")],
) -> Answer:
    """Write the released model and its description.

    The description says kind, classes, features and normalisation. A safetensors file comes with a description file,
    with .json added; sifu predict uses both. A .onnx file (needs the extra onnx) contains its own description. A
    warning names pending requests: the model may contain their data.
    """
    from sifu.api import pending_requests

    path, pending = sifu.Run(run).export(model), [request.request for request in pending_requests(run)]
    named = names_words(pending)
    waits = f"Not executed yet: {named}. The model may still contain what they ask to forget."
    return Answer({"model": str(path), "pending": pending}, f"Wrote {path}", *([waits] if pending else []))


def predict(
    model: Annotated[Path, argument("MODEL", "Safetensors file written by sifu export.")],
    data: Annotated[Path, argument("DATA", "Npz file with x, or a CSV or Parquet file.")],
    output: OutputOption = None,
    module: ModuleOption = None,
) -> Answer:
    """Predict new rows or images with a released model.

    Prints CSV, or writes it to a file. Uses the inputs and features of the model's description. Each line has the row's
    identity (the column data.id) or its number from 0, the class, and a score per class. For a row with a missing or
    unlisted value that the description does not cover, the line has a reason instead.
    """
    import csv
    import io

    from sifu.store.files import write_output

    rows = sifu.load_model(model, module=module).predict_rows(data)
    text = io.StringIO()
    lines = list(_columns(rows))
    names = dict.fromkeys(name for line in (*(line for line in lines if "reason" not in line), *lines) for name in line)
    writer = csv.DictWriter(text, list(names) or ["id"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    without = sum(row.reason != "" for row in rows)
    if without:
        warnings.warn(
            f"{without} of {len(rows)} rows have no prediction: see the column reason", SifuWarning, stacklevel=1
        )
    if output is None:
        return Answer({"predictions": [row.to_mapping() for row in rows]}, text.getvalue().rstrip("\n"))
    write_output(output, text.getvalue().encode())
    predicted = len(rows) - without
    return Answer(
        {"rows": len(rows), "predicted": predicted, "file": str(output)}, f"Wrote {predicted} predictions to {output}"
    )


def _columns(rows: Sequence[PredictedRow]) -> Iterator[dict[str, Any]]:
    """Yield each row's columns: identity or number, then prediction and scores, or the reason for their absence."""
    for row in (row.to_mapping() for row in rows):
        scores = row.pop("scores", {})
        columns = {"id": row.pop("id")}
        ((name, predicted),) = row.items()
        several = isinstance(predicted, list)
        columns |= {f"{name[:-1]}_{k}": value for k, value in enumerate(predicted)} if several else {name: predicted}
        columns |= {f"score_{output}": score for output, score in scores.items()}
        yield columns
