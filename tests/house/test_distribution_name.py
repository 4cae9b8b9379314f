"""The distribution is called `sifu-unlearning`: no text may send an installer to the other project called `sifu`."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from distribution_names import mentions, texts_below

from sifu.cli.federation_commands import write_app
from sifu.errors import install_extra

ROOT = Path(__file__).resolve().parents[2]
NAME = "si" + "fu"  # in two parts, because the search also covers this file


def test_no_file_of_the_repository_installs_the_other_project() -> None:
    assert mentions(texts_below(ROOT)) == []


def test_both_distributions_have_the_name_that_is_ours() -> None:
    product, paper = (tomllib.loads((ROOT / path).read_text())["project"] for path in (
        "pyproject.toml", "paper/pyproject.toml"
    ))  # fmt: skip
    assert product["name"] == f"{NAME}-unlearning"
    assert f"{product['name']}[train,report]" in paper["dependencies"]


def test_a_generated_app_depends_on_nothing_and_says_where_the_wheel_goes(tmp_path: Path) -> None:
    write_app(tmp_path / "app", tmp_path / "run", insecure=False)
    assert mentions(texts_below(tmp_path / "app")) == []
    project = tomllib.loads((tmp_path / "app" / "pyproject.toml").read_text())["project"]
    assert project["dependencies"] == []
    told = (tmp_path / "app" / "README.md").read_text()
    for needed in ("make wheel", ".whl[flower]", "SuperNode", "--disable-runtime-dependency-installation"):
        assert needed in told


def test_errors_name_the_repository_and_the_wheel() -> None:
    assert mentions(iter([("message", install_extra("onnx"))])) == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("page.md", f"pip install {NAME}"),
        ("page.md", f"pip install --upgrade '{NAME}'"),
        ("page.md", f"`python -m pip install {NAME}`, then"),
        ("page.md", f"uv add {NAME}"),
        ("module.py", f'"pip install \\"{NAME}[flower]\\""'),
        ("module.py", f"needs {NAME}\\[console]"),
        ("page.md", f"with {NAME}[flower,onnx] installed"),
        ("module.py", f'"{NAME}>=0.1"'),
        ("app/pyproject.toml", f'[project]\ndependencies = ["{NAME}"]'),
        ("app/pyproject.toml", f"[project.optional-dependencies]\nextra = [\"{NAME} ; python_version > '3'\"]"),
        ("x.dist-info/METADATA", f"Name: x\nRequires-Dist: {NAME}; extra == 'y'"),
    ],
)
def test_control_a_text_that_would_fetch_it_is_noticed(name: str, text: str) -> None:
    assert len(mentions(iter([(name, text)]))) == 1


@pytest.mark.parametrize(
    "text", [f"pip install {NAME}-unlearning", "pip install '.[onnx]'", f"{NAME} request", f"pip install ./{NAME}.whl"]
)
def test_control_what_is_ours_is_left_alone(text: str) -> None:
    assert mentions(iter([("page.md", text)])) == []
