"""A released model outside its run: its description and its predictions for new rows."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import sifu
from run_tools import Command, small_spec
from sifu.errors import InputError


@pytest.fixture(scope="module")
def table_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("table")
    rng = np.random.default_rng(0)
    lines = [
        f"shop-{shop},{value},{rng.choice(['red', 'blue'])},{'yes' if value > 0.5 else 'no'}"
        for shop in range(6)
        for value in rng.random(6)
    ]
    (folder / "sales.csv").write_text("shop,price,colour,bought\n" + "\n".join(lines) + "\n")
    data = {
        "name": "table", "file": str(folder / "sales.csv"), "label": "bought", "client": "shop", "classes": "no,yes",
        "categories": "colour=red,blue", "partition": "given", "preprocessing": "fixed",
    }  # fmt: skip
    sifu.train(small_spec(stop={"max_rounds": 40}) | {"data": data}, run=folder / "run").export(
        folder / "m.safetensors"
    )
    return folder


def test_the_description_says_what_the_model_is_and_nothing_of_clients(table_run: Path) -> None:
    text = (table_run / "m.safetensors.json").read_text()
    description = json.loads(text)
    assert description["model"] == "softmax"
    assert description["classes"] == ["no", "yes"]
    assert description["columns"] == ["price", "colour"]
    assert description["table"]["categories"] == {"colour": ["red", "blue"]}
    assert description["parameters"] == {"weight": [3, 2], "bias": [2]}
    assert "shop-" not in text
    assert str(table_run) not in text


def test_predictions_are_those_of_the_parameters(table_run: Path, cli: Command) -> None:
    model = sifu.load_model(table_run / "m.safetensors")
    tensors = load_file(table_run / "m.safetensors")
    x = np.array([[0.9, 1.0, 0.0], [0.1, 0.0, 1.0]])
    np.testing.assert_allclose(model.scores(x), x @ tensors["weight"] + tensors["bias"], rtol=1e-12)
    wanted = ["no" if index == 0 else "yes" for index in (x @ tensors["weight"] + tensors["bias"]).argmax(axis=1)]
    # Columns in another order, without label and client, and one extra column that is no feature.
    (table_run / "new.csv").write_text("colour,note,price\nred,a,0.9\nblue,b,0.1\n")
    assert [row.prediction for row in model.predict_rows(table_run / "new.csv")] == wanted
    answer = cli("predict", table_run / "m.safetensors", table_run / "new.csv", "--output", table_run / "out.csv")
    assert answer.code == 0, answer.err
    scores = model.scores(x).tolist()
    lines = ["id,class,score_no,score_yes", *(f"{k},{wanted[k]},{no},{yes}" for k, (no, yes) in enumerate(scores))]
    assert (table_run / "out.csv").read_text().split() == lines
    assert cli("predict", table_run / "m.safetensors", table_run / "new.csv").out.split() == lines
    answer = cli("predict", table_run / "m.safetensors", table_run / "new.csv", "--format", "json")
    assert json.loads(answer.out)["predictions"] == [
        {"id": k, "class": wanted[k], "scores": {"no": no, "yes": yes}} for k, (no, yes) in enumerate(scores)
    ]


def test_a_row_that_cannot_be_read_has_a_reason_and_the_others_a_prediction(table_run: Path, cli: Command) -> None:
    (table_run / "all.csv").write_text("price,colour\n0.9,red\n0.1,blue\n")
    (table_run / "some.csv").write_text("price,colour\n,red\n0.9,red\n0.5,green\n0.1,blue\n")
    model = sifu.load_model(table_run / "m.safetensors")
    rows = model.predict_rows(table_run / "some.csv")
    first, second = model.predict_rows(table_run / "all.csv")
    assert [row.prediction for row in rows] == [None, first.prediction, None, second.prediction]
    assert (rows[1].scores, rows[3].scores) == (first.scores, second.scores)
    assert "column 'price' holds '', which means a missing value" in rows[0].reason
    assert "column 'colour' holds 'green'" in rows[2].reason
    answer = cli("predict", table_run / "m.safetensors", table_run / "some.csv")
    assert answer.code == 0
    assert "2 of 4 rows have no prediction" in answer.err
    header, *lines = answer.out.splitlines()
    assert header == "id,class,score_no,score_yes,reason"
    assert lines[0].startswith('0,,,,"')
    assert lines[1].startswith(f"1,{first.prediction},")


@pytest.mark.parametrize("kind", ["logistic", "least_squares"])
def test_other_linear_models(tmp_path: Path, kind: str) -> None:
    rng = np.random.default_rng(1)
    x = rng.random((30, 4))
    y = (x[:, 0] > 0.5).astype(int) if kind == "logistic" else x[:, 0] + 0.25
    np.savez(tmp_path / "own.npz", x=x, y=y, client=np.repeat(np.arange(6), 5))
    data = {"name": "npz", "file": str(tmp_path / "own.npz"), "partition": "given"}
    run = sifu.train(small_spec(model={"kind": kind}) | {"data": data}, run=tmp_path / "run")
    model = sifu.load_model(run.export(tmp_path / "m.safetensors"))
    tensors = load_file(tmp_path / "m.safetensors")
    scores = (x @ tensors["weight"] + tensors["bias"])[:, 0]
    np.testing.assert_allclose(model.predict(x), (scores > 0).astype(int) if kind == "logistic" else scores, rtol=1e-12)
    assert len(model.predict_rows(tmp_path / "own.npz")) == 30


def test_what_does_not_fit_is_a_sentence(table_run: Path, tmp_path: Path) -> None:
    model = sifu.load_model(table_run / "m.safetensors")
    with pytest.raises(InputError, match="rows of 3 features"):
        model.predict(np.zeros((2, 5)))
    (tmp_path / "few.csv").write_text("price\n1\n")
    with pytest.raises(InputError, match="no column 'colour'"):
        model.predict_rows(tmp_path / "few.csv")
    (tmp_path / "m.safetensors").write_bytes((table_run / "m.safetensors").read_bytes() + b" ")
    description = json.loads((table_run / "m.safetensors.json").read_text())
    (tmp_path / "m.safetensors.json").write_text(json.dumps(description))
    with pytest.raises(InputError, match="is not the file that"):
        sifu.load_model(tmp_path / "m.safetensors")
    (tmp_path / "m.safetensors").write_bytes((table_run / "m.safetensors").read_bytes())
    for change, words in (
        ({"format": "other"}, "does not describe"),
        ({"model": "python"}, "your own module: name the function"),
        ({"parameters": {"weight": [3, 3], "bias": [3]}}, "does not hold the parameters"),
    ):
        (tmp_path / "m.safetensors.json").write_text(json.dumps(description | change))
        with pytest.raises(InputError, match=words):
            sifu.load_model(tmp_path / "m.safetensors")
    with pytest.raises(InputError, match="not a file that sifu export wrote"):
        sifu.load_model(tmp_path / "nothing.safetensors")
    with pytest.raises(InputError, match=r"^m\.onnx is for ONNX runtimes"):
        sifu.load_model(tmp_path / "m.onnx")


@pytest.mark.skipif(shutil.which("model_signing") is None, reason="pip install model-signing pyOpenSSL")
def test_an_export_is_signed_the_openssf_way(tmp_path: Path) -> None:
    """The commands of docs/security.md sign an export and verify it; they refuse a changed model, an added file and
    another key.
    """
    spec = small_spec(data={"clients": 4, "samples_per_client": 6}, stop={"target": 0.0, "max_rounds": 1})
    release = tmp_path / "release"
    release.mkdir()
    model = sifu.train(spec, run=tmp_path / "run").export(release / "model.safetensors")

    def succeeds(*command: str) -> bool:
        return subprocess.run(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": ""}).returncode == 0

    for name in ("release", "other"):
        assert succeeds("openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", f"{name}.key.pem")
        assert succeeds("openssl", "ec", "-in", f"{name}.key.pem", "-pubout", "-out", f"{name}.pub.pem")
    sign = ["model_signing", "sign", "key", "release", "--private_key", "release.key.pem"]
    assert succeeds(*sign, "--signature", "release.sig")
    verify = ["model_signing", "verify", "key", "release", "--signature", "release.sig", "--public_key"]
    assert succeeds(*verify, "release.pub.pem")
    assert not succeeds(*verify, "other.pub.pem")
    (release / "added").write_text("x")
    assert not succeeds(*verify, "release.pub.pem")
    (release / "added").unlink()
    content = model.read_bytes()
    model.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert not succeeds(*verify, "release.pub.pem")
