"""A user's tables from the first file to a certificate: init, train, forget, join, predict."""

from __future__ import annotations

import os
import re
import shutil
import tomllib
import warnings
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import sifu
from run_tools import Command
from sifu.core.spec import DataSpec, Spec
from sifu.data.table import read_table
from sifu.data.table_coding import TableCoding
from sifu.data.table_proposal import propose_spec
from sifu.errors import InputError

HOSPITALS = Path(os.environ.get("SIFU_DATA", Path(__file__).resolve().parents[2].parent / "shared/data")) / "hospitals"
COLUMNS = "age,sex,cp,trestbps,chol,fbs,restecg,thalach,exang,oldpeak,slope,ca,thal,num"


def write_clinics(folder: Path, seed: int = 0) -> Path:
    """Write one file for each of four clinics in the style of published tables: no header line, question marks."""
    generator = np.random.default_rng(seed)
    for number in range(4):
        rows = []
        for _ in range(40):
            age, pressure, kind = generator.integers(30, 80), generator.integers(90, 190), generator.integers(1, 5)
            ill = int(age / 20 + pressure / 40 + generator.normal() > 6) * generator.integers(1, 5)
            rows.append(f"{age},{'?' if generator.random() < 0.1 else pressure},{kind},{ill}")
        (folder / f"clinic-{number}.data").write_text("\n".join(rows) + "\n")
    return folder


def edit(spec: Path, **keys: str) -> None:
    """Confirm the lines marked CHECK, as an operator does after `sifu init --from`."""
    text = spec.read_text()
    for key, value in keys.items():
        text = re.sub(rf'(?m)^{key} = "[^"]*"', f'{key} = "{value}"', text)
    spec.write_text(text)


@pytest.fixture
def trained(tmp_path: Path, cli: Command) -> Path:
    folder = tmp_path / "clinics"
    folder.mkdir()
    write_clinics(folder)
    spec = tmp_path / "spec.toml"
    answer = cli("init", spec, "--from", folder, "--columns", "age,trestbps,kind,num", "--label", "num")
    assert answer.code == 0, answer.err
    assert "missing: values are missing in trestbps" in answer.out
    edit(spec, classes="healthy=0,ill=1|2|3|4", preprocessing="fixed")
    assert cli("train", spec, "--run", tmp_path / "run").code == 0
    return tmp_path / "run"


def test_clinics_and_patients_leave_exactly_and_a_clinic_joins_from_csv(
    trained: Path, tmp_path: Path, cli: Command
) -> None:
    run = sifu.open_run(trained)
    dataset_rows = [client.samples for client in run.status().clients]
    assert sum(dataset_rows) < 160  # some rows are kept for testing
    answer = cli("forget", trained, "--client", "clinic-1")
    assert answer.code == 0, answer.err
    rows = [row for row in range(40) if _trains(trained, "clinic-2", row)][:3]
    answer = cli("forget", trained, "--client", "clinic-2", "--records", ",".join(map(str, rows)))
    assert answer.code == 0, answer.err
    assert [outcome.level for outcome in run.status().requests] == ["exact", "exact"]
    fifth = tmp_path / "fifth.csv"
    fifth.write_text("".join((tmp_path / "clinics" / "clinic-0.data").read_text().splitlines(True)[:20]))
    assert cli("join", trained, "--file", fifth, "--name", "clinic-5").code == 0
    assert sifu.open_run(trained).verify().problems == []
    refused = cli("forget", trained, "--client", "clinic-3", "--records", "40")
    assert refused.code == 2
    assert "no record '40'" in refused.err


def _trains(run: Path, client: str, row: int) -> bool:
    try:
        sifu.open_run(run).plan([client], records=[row])
    except InputError:
        return False
    return True


def test_patients_are_named_by_their_identity(tmp_path: Path, cli: Command) -> None:
    generator = np.random.default_rng(1)
    lines = ["patient;hospital;age;ill"]
    lines += [f"P{n:04};h{n % 3};{str(round(generator.normal(50, 9), 1)).replace('.', ',')};{n % 2}" for n in range(60)]
    (tmp_path / "a.csv").write_text("\n".join(lines), encoding="cp1252")
    spec = tmp_path / "spec.toml"
    assert cli("init", spec, "--from", tmp_path / "a.csv", "--label", "ill").code == 0
    edit(spec, preprocessing="fixed")
    spec.write_text(spec.read_text().replace("held_out = 0.2", "held_out = 0"))
    assert cli("train", spec, "--run", tmp_path / "run").code == 0
    answer = cli("forget", tmp_path / "run", "--client", "h0", "--records", "P0003,P0006")
    assert answer.code == 0, answer.err
    reader_rows = sifu.open_run(tmp_path / "run").status().requests[0]
    assert reader_rows.records == 2
    (tmp_path / "names.txt").write_text("P0009  # asked on Monday\nP0012\n")
    again = cli("forget", tmp_path / "run", "--client", "h0", "--records", tmp_path / "names.txt")
    assert again.code == 0, again.err
    unknown = cli("forget", tmp_path / "run", "--client", "h1", "--records", "P0003")
    assert unknown.code == 2
    assert "no record 'P0003'" in unknown.err


def test_a_proposal_takes_no_constant_from_the_rows(tmp_path: Path) -> None:
    """Two federations with different values get the same proposed spec."""
    texts = []
    for seed in (0, 1):
        folder = tmp_path / str(seed) / "clinics"
        folder.mkdir(parents=True)
        write_clinics(folder, seed)
        proposal = propose_spec(folder, header=("age", "trestbps", "kind", "num"), label="num")
        texts.append(proposal.text.replace(str(folder), "FOLDER"))
    assert texts[0] == texts[1]
    assert "add COLUMN=MIDDLE,SPREAD for age" in " ".join(proposal.checks)


def test_a_text_that_differs_in_every_row_is_asked_about(tmp_path: Path) -> None:
    rows = "".join(f"K-{row},{'pq'[row % 2]},{row % 7},{row % 2}\n" for row in range(40))
    (tmp_path / "a.csv").write_text("Kunde,Filiale,x,y\n" + rows)
    checks = propose_spec(tmp_path / "a.csv", client="Filiale").checks
    assert any("--id-column 'Kunde'" in check for check in checks)
    assert not any(
        "--id-column" in check for check in propose_spec(tmp_path / "a.csv", client="Filiale", identity="Kunde").checks
    )


def write_comments(path: Path) -> None:
    """Write comments of two clinics on two wards, with labels that contain dots."""
    rows = [f"T{row},{'pq'[row % 2]},the ward was number {row} for me,ward.{'ab'[row % 2]}" for row in range(30)]
    path.write_text("\n".join(["ticket,clinic,comment,topic", *rows]) + "\n")


def test_a_column_of_sentences_is_offered_as_text(tmp_path: Path, cli: Command) -> None:
    write_comments(tmp_path / "a.csv")
    checks = propose_spec(tmp_path / "a.csv", label="topic").checks
    assert any("--text 'comment' --text-model FOLDER" in check for check in checks)
    assert any("--id-column 'ticket'" in check for check in checks)
    assert not any("--id-column 'comment'" in check or "--text 'ticket'" in check for check in checks)
    made = ("init", tmp_path / "spec.toml", "--from", tmp_path / "a.csv", "--label", "topic", "--id-column", "ticket")
    alone = cli(*made, "--text", "comment")
    assert alone.code == 2
    assert "found --text alone" in alone.err
    assert "no column 'remark'" in cli(*made, "--text", "remark", "--text-model", "somebody/small").err
    assert cli(*made, "--text", "comment", "--text-model", "somebody/small").code == 0
    spec = Spec.from_mapping(tomllib.loads((tmp_path / "spec.toml").read_text()))
    assert (spec.data.text, spec.data.id, spec.data.ignore) == ("comment", "ticket", "")
    assert (spec.features.kind, spec.features.model) == ("transformers", "somebody/small")


def test_words_with_dots_are_classes_and_numbers_with_dots_are_not(tmp_path: Path) -> None:
    write_comments(tmp_path / "a.csv")
    assert 'classes = "ward.a,ward.b"' in propose_spec(tmp_path / "a.csv", label="topic").text
    rows = "".join(f"{'pq'[row % 2]},{row},{row % 3}.5\n" for row in range(30))
    (tmp_path / "b.csv").write_text("clinic,age,cost\n" + rows)
    assert 'task = "regression"' in propose_spec(tmp_path / "b.csv", label="cost").text


def test_many_words_are_classes(tmp_path: Path) -> None:
    rows = "".join(f"{'pq'[row % 2]},{row},word-{row % 30}\n" for row in range(60))
    (tmp_path / "a.csv").write_text("clinic,age,kind\n" + rows)
    proposal = propose_spec(tmp_path / "a.csv", label="kind").text
    assert "word-29" in proposal
    assert "regression" not in proposal


def test_warnings_about_a_table_come_when_it_is_trained_on_and_not_again(tmp_path: Path, cli: Command) -> None:
    lines = "".join(f"{'pq'[row % 2]},{row % 7 * 100 + 0.5},{row % 2}\n" for row in range(30))
    (tmp_path / "a.csv").write_text("hospital,dose,outcome\n" + lines)
    assert cli("init", tmp_path / "spec.toml", "--from", tmp_path / "a.csv").code == 0
    assert "outweigh the others" in cli("train", tmp_path / "spec.toml", "--run", tmp_path / "run").err
    rows = [str(row) for row in range(15) if _trains(tmp_path / "run", "p", row)][:2]
    answer = cli("forget", tmp_path / "run", "--client", "p", "--records", ",".join(rows), "--level", "none")
    assert answer.code == 0, answer.err
    assert "outweigh" not in answer.err


def write_patients(path: Path) -> None:
    """Write patients with identifiers, a few values below the detection limit, and creatinine in umol/l."""
    generator = np.random.default_rng(3)
    lines = ["pid,hospital,age,heart_rate,troponin,creatinine,ill"]
    for row in range(120):
        troponin = "<20" if row in (3, 50, 99) else f"{generator.normal(60, 9):.2f}"
        age, rate, creatinine = generator.normal([60, 80, 90], [9, 9, 9])
        lines.append(f"{1000 + 7 * row},h{row % 3},{age:.1f},{rate:.0f},{troponin},{creatinine:.1f},{int(age > 60)}")
    path.write_text("\n".join(lines) + "\n")


def test_a_proposal_is_what_a_careful_colleague_would_write(tmp_path: Path, cli: Command) -> None:
    write_patients(tmp_path / "a.csv")
    proposal = propose_spec(tmp_path / "a.csv")
    said = "\n".join(proposal.checks)
    assert 'id = "pid"' in proposal.text
    assert "'troponin': 117 of 120 are numbers; the others: '<20' (3)" in said
    assert "troponin=0|<20" in proposal.text
    assert "add COLUMN=MIDDLE,SPREAD for age, heart_rate, troponin, creatinine" in said
    (tmp_path / "spec.toml").write_text(proposal.text)
    trained = cli("train", tmp_path / "spec.toml", "--run", tmp_path / "run")
    assert trained.code == 0, trained.err


def test_whole_numbers_that_repeat_are_no_identity(tmp_path: Path) -> None:
    rows = "".join(f"{row % 39},{'pq'[row % 2]},{row % 2}\n" for row in range(40))
    (tmp_path / "a.csv").write_text("visits,hospital,ill\n" + rows)
    assert "\nid = " not in propose_spec(tmp_path / "a.csv").text


def test_warnings_of_a_wide_table_are_one_sentence_without_its_values(tmp_path: Path) -> None:
    names = [f"g{number}" for number in range(300)]
    rows = "".join(f"{'pq'[row % 2]},{','.join(['123.5'] * 300)},{row % 2}\n" for row in range(30))
    (tmp_path / "a.csv").write_text(f"hospital,{','.join(names)},y\n{rows}")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        read_table(tmp_path / "a.csv", TableCoding("y", "hospital"))
    (only,) = (str(warning.message) for warning in said)
    assert "123" not in only


def test_a_regression_on_whole_numbers_is_not_warned_of_classes_nor_of_an_identity_it_lacks(tmp_path: Path) -> None:
    rows = "".join(f"h{row},{row / 60},{17 * row}\nh{row},0.5,3\n" for row in range(60))
    (tmp_path / "a.csv").write_text("hospital,x,stay\n" + rows)
    data = DataSpec(name="table", label="stay", client="hospital")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        table = read_table(tmp_path / "a.csv", TableCoding.from_spec(data, regression=True))
    assert table.y_train.max() == 17 * 59  # above the largest class number
    with pytest.raises(InputError, match="classes are numbered"):
        read_table(tmp_path / "a.csv", TableCoding.from_spec(data))


def write_stays(path: Path) -> None:
    """Write lengths of stay in whole days for 120 patients of four hospitals, as a regression task."""
    generator = np.random.default_rng(4)
    lines = ["hospital,age,bmi,stay"]
    for row in range(120):
        age, bmi = generator.normal([50, 27], [15, 5])
        lines.append(f"h{row % 4},{age:.2f},{bmi:.2f},{int(max(0, 2 * age + 3 * bmi + generator.normal(0, 10)))}")
    path.write_text("\n".join(lines) + "\n")


@pytest.fixture
def regression(tmp_path: Path, cli: Command) -> Path:
    """Train a run from `write_stays`, without a warning."""
    write_stays(tmp_path / "a.csv")
    spec, run = tmp_path / "spec.toml", tmp_path / "run"
    assert cli("init", spec, "--from", tmp_path / "a.csv", "--label", "stay").code == 0
    edit(spec, preprocessing="fixed", scale="age=50,15;bmi=27,5")
    spec.write_text(spec.read_text().replace("shift = 0.0", "shift = 180.0").replace("scale = 1.0", "scale = 40.0"))
    answer = cli("train", spec, "--run", run)
    assert answer.code == 0, answer.err
    assert answer.err.strip() == ""  # older versions of rich end a progress bar with an empty line
    return run


def test_a_regression_is_told_by_its_error_and_never_by_an_accuracy(regression: Path, cli: Command) -> None:
    run = regression
    planned, said = cli("plan", run, "--client", "h1").out, [cli("status", run).out]
    forgotten = cli("forget", run, "--client", "h1")
    assert "on the same rows" in " ".join(forgotten.out.split())
    said += [forgotten.out, cli("status", run).out]
    assert all("accuracy" not in text.lower() for text in (planned, *said))
    assert all("mean squared error" in " ".join(text.lower().split()) for text in said)
    # The noise has a variance of 100, and rounding down adds little.
    status = sifu.open_run(run).status()
    assert status.held_out is not None
    assert status.held_out.r2 is not None
    assert 0.8 < status.held_out.r2 < 1.0
    assert status.held_out.mean_squared_error == pytest.approx(100, rel=0.6)
    assert cli("report", run).code == 0
    page = (run / "report" / "index.html").read_text()
    assert "Held-out R²" in page
    assert "ccuracy" not in re.sub(r"(?s)<h4>What is not covered</h4>.*?</ul>", "", page)


def test_the_report_of_a_closed_form_run_has_no_rounds_and_counts_records_as_records(
    trained: Path, cli: Command
) -> None:
    rows = [row for row in range(40) if _trains(trained, "clinic-2", row)][:3]
    assert cli("forget", trained, "--client", "clinic-1").code == 0
    assert cli("forget", trained, "--client", "clinic-2", "--records", ",".join(map(str, rows))).code == 0
    fifth = trained.parent / "fifth.csv"
    fifth.write_text("".join((trained.parent / "clinics" / "clinic-0.data").read_text().splitlines(True)[:20]))
    assert cli("join", trained, "--file", fifth, "--name", "clinic-5").code == 0
    assert cli("report", trained).code == 0
    page = (trained / "report" / "index.html").read_text()
    assert "2 requests, 1 client and 3 records forgotten, all certified as exact." in page
    facts = dict(re.findall(r"<dt>([^<]*)</dt><dd>([^<]*)<", page))
    assert facts["Clients forgotten"] == "1"
    assert facts["Records forgotten"] == "3"
    assert not any("Rounds" in name for name in facts)
    assert "of class &#39;ill&#39;" in page
    drawn = {file.name for file in (trained / "report").iterdir()}
    assert drawn == {"index.html", "history.csv"}


def test_a_newcomer_may_have_its_columns_in_another_order(regression: Path, tmp_path: Path, cli: Command) -> None:
    models = []
    for name, header, row in (("same", "age,bmi,stay", "{0},{1},{2}"), ("other", "stay,bmi,age", "{2},{1},{0}")):
        shutil.copytree(regression, tmp_path / name)
        rows = [row.format(30.5 + place, 20 + place % 7, 100 + place) for place in range(25)]
        file = tmp_path / f"{name}-files" / "new.csv"
        file.parent.mkdir()
        file.write_text("\n".join([header, *rows]) + "\n")
        run = sifu.open_run(tmp_path / name)
        assert run.join(file=file, name="new") == ["new"]
        models.append(load_file(run.export(tmp_path / f"{name}.safetensors")))
    for name, values in models[0].items():
        np.testing.assert_array_equal(values, models[1][name])
    (tmp_path / "more.csv").write_text("age,bmi,ward,stay\n50,20,A,100\n")
    refused = cli("join", tmp_path / "same", "--file", tmp_path / "more.csv", "--name", "more")
    assert refused.code == 2
    assert "has another column 'ward', unlike the table" in " ".join(refused.err.split())


def test_a_file_without_a_header_line_is_noticed(tmp_path: Path, cli: Command) -> None:
    write_clinics(tmp_path)
    answer = cli("init", tmp_path / "spec.toml", "--from", tmp_path / "clinic-0.data")
    assert answer.code == 2
    assert "--columns" in answer.err


@pytest.mark.long
@pytest.mark.skipif(not HOSPITALS.is_dir(), reason="the published files of four hospitals are not here")
def test_four_hospitals_as_published(tmp_path: Path, cli: Command) -> None:
    """Only the spec is edited; the files of the forgotten hospital are deleted before anything is verified."""
    pytest.importorskip("onnx")
    from onnx_tools import answers_of_the_graph

    files, spec, run = tmp_path / "files", tmp_path / "heart.toml", tmp_path / "run"
    files.mkdir()
    for source in HOSPITALS.glob("processed.*.data"):  # the copies have a header line, the published files do not
        lines = source.read_text().splitlines(True)
        (files / f"{source.stem.partition('.')[2]}.data").write_text("".join(lines[lines[0].startswith("age") :]))
    fifth = (files / "hungarian.data").read_text().splitlines(True)[:60]
    (tmp_path / "fifth.csv").write_text("".join(fifth))

    def done(*words: object) -> str:
        answer = cli(*words)
        assert answer.code == 0, answer.err
        return " ".join(answer.out.split())

    done("init", spec, "--from", files, "--columns", COLUMNS, "--label", "num")
    edit(spec, classes="healthy=0,disease=1|2|3|4", preprocessing="fixed")
    done("train", spec, "--run", run)
    trained = sifu.open_run(run).status().held_out
    assert trained is not None
    assert (trained.auc or 0.0) >= 0.87
    done("forget", run, "--client", "va")
    (files / "va.data").unlink()
    patients = [row for row in range(60) if _trains(run, "cleveland", row)][:3]
    done("forget", run, "--client", "cleveland", "--records", ",".join(map(str, patients)))
    (files / "cleveland.data").unlink()  # the kept statistics suffice
    done("join", run, "--file", tmp_path / "fifth.csv", "--name", "debrecen")
    assert "4 active, 1 forgotten" in done("status", run)
    assert [request.level for request in sifu.open_run(run).status().requests] == ["exact", "exact"]
    done("verify", run)

    done("export", run, "--model", tmp_path / "m.safetensors")
    done("predict", tmp_path / "m.safetensors", tmp_path / "fifth.csv", "--output", tmp_path / "predictions.csv")
    done("export", run, "--model", tmp_path / "m.onnx")
    header, *rows = (tmp_path / "predictions.csv").read_text().splitlines()
    assert "score" in header
    model = sifu.load_model(tmp_path / "m.safetensors")
    (answer, *_) = answers_of_the_graph(tmp_path / "m.onnx", {"x": model.inputs_of(tmp_path / "fifth.csv")[0]})
    named = [model.description["classes"][number] for number in answer["prediction"]]
    assert [row.split(",")[1] for row in rows] == named
