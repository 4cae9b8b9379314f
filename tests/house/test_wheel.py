"""Wheel and sdist of `make wheel`: complete, and usable in an environment that has never seen the sources."""

from __future__ import annotations

import email
import importlib.metadata
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
from distribution_names import mentions, texts_of_wheel
from packaging.version import Version

import sifu

ROOT = Path(__file__).resolve().parents[2]
SPEC = """
[data]
clients = 6
samples_per_client = 5
[stop]
target = 0.0
max_rounds = 3
"""


BUILD_TOOLS = {"build": "1.2", "setuptools": "77"}


def is_missing(package: str, version: str) -> bool:
    """Return whether a package is missing or older than `version`."""
    try:
        return Version(importlib.metadata.version(package)) < Version(version)
    except importlib.metadata.PackageNotFoundError:
        return True


pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        any(is_missing(*tool) for tool in BUILD_TOOLS.items()),
        reason=f"building offline needs {BUILD_TOOLS} in this environment: make test-long installs them",
    ),
]


def call(command: list[object], folder: Path) -> str:
    """Return the output of a command, run in a folder with nothing of sifu on Python's path."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "PIP_"))}
    answer = subprocess.run(
        list(map(str, command)), cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return answer.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build with `make wheel` in a copy, so that the checkout stays unchanged; return its `dist` folder."""
    copy = tmp_path_factory.mktemp("release") / "checkout"
    shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("console", "verifier"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in (
        "Makefile",
        "MANIFEST.in",
        "pyproject.toml",
        "constraints.txt",
        "README.md",
        "CHANGELOG.md",
        "LICENSE",
    ):
        shutil.copy(ROOT / name, copy)
    (copy / "installed").mkdir()
    (copy / "installed" / ".dev").touch()  # this environment already has everything to install
    call(["make", "wheel", "VENV=installed", f"BIN={Path(sys.executable).parent}"], copy)
    return copy / "dist"


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    return built / f"sifu_unlearning-{sifu.__version__}-py3-none-any.whl"


@pytest.fixture(scope="module")
def sdist(built: Path) -> Path:
    return built / f"sifu_unlearning-{sifu.__version__}.tar.gz"


@pytest.fixture(scope="module", params=["wheel", "sdist"])
def fresh(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the bin folder of a new environment with the wheel or sdist; its dependencies are this environment's
    packages.
    """
    folder = tmp_path_factory.mktemp("fresh") / "environment"
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    (packages,) = folder.glob("lib/python*/site-packages")
    # A path in a .pth file is searched last, and its own .pth files (an editable sifu) are not read.
    ours = dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib"))
    (packages / "dependencies.pth").write_text("".join(f"{path}\n" for path in ours))
    options = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--ignore-installed"]
    install = ["install", *options, request.getfixturevalue(request.param)]
    call([sys.executable, "-m", "pip", "--python", python, *install], folder)
    return folder / "bin"


def left_out(wheel: Path, sources: Path) -> list[str]:
    """Return the files of the package that the wheel lacks."""
    with zipfile.ZipFile(wheel) as archive:
        packed = set(archive.namelist())
    files = [path for path in sources.glob("sifu/**/*") if path.is_file() and "__pycache__" not in path.parts]
    return sorted({path.relative_to(sources).as_posix() for path in files} - packed)


def test_everything_is_packed(wheel: Path) -> None:
    assert left_out(wheel, ROOT / "src") == []
    with zipfile.ZipFile(wheel) as archive:
        packed = archive.namelist()
    kinds = {Path(name).suffix for name in packed if name.startswith("sifu/")}
    others = [name for name in packed if not name.startswith(("sifu/", "sifu_unlearning-"))]
    assert kinds >= {".py", ".typed", ".sql", ".html", ".css"}
    assert others == []
    assert [name for name in packed if "experiment" in name or "bench" in name or "simulation" in name] == []


def test_the_release_describes_itself(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        about = email.message_from_bytes(archive.read(name))
    assert (about["Name"], about["Version"]) == ("sifu-unlearning", sifu.__version__)
    assert (about["License-Expression"], about.get_all("License-File")) == ("Apache-2.0", ["LICENSE"])
    assert "Typing :: Typed" in about.get_all("Classifier", [])
    assert about.get_all("Project-URL")
    assert mentions(texts_of_wheel(wheel)) == []


def test_the_sdist_has_the_library_and_what_describes_it(sdist: Path, wheel: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    with zipfile.ZipFile(wheel) as archive:
        packed = {f"src/{name}" for name in archive.namelist() if name.startswith("sifu/")}
    assert packed <= names
    assert {"CHANGELOG.md", "LICENSE", "README.md", "pyproject.toml"} <= names
    assert [name for name in names if name.startswith(("tests", "paper", "docs", ".git"))] == []


def test_a_file_that_is_not_packed_is_noticed(wheel: Path, tmp_path: Path) -> None:
    """Negative control: a file that is not packed is noticed."""
    (tmp_path / "sifu" / "store").mkdir(parents=True)
    (tmp_path / "sifu" / "store" / "forgotten.sql").touch()
    assert left_out(wheel, tmp_path) == ["sifu/store/forgotten.sql"]


def test_it_is_imported_from_the_new_environment(fresh: Path, tmp_path: Path) -> None:
    where = call([fresh / "python", "-c", "import sifu; print(sifu.__file__, sifu.__version__)"], tmp_path)
    assert Path(where.split()[0]).is_relative_to(fresh.parent)
    assert where.split()[1] in call([fresh / "sifu", "--version"], tmp_path)
    assert "Usage" in call([fresh / "sifu", "--help"], tmp_path)


@pytest.mark.slow
def test_a_run_from_the_wheel(fresh: Path, tmp_path: Path) -> None:
    """A run with the wheel finds its data files: training reads the schema, and the report its page and style."""
    (tmp_path / "spec.toml").write_text(SPEC)
    call([fresh / "sifu", "train", "spec.toml", "--run", "run"], tmp_path)
    call([fresh / "sifu", "verify", "run"], tmp_path)
    call([fresh / "sifu", "report", "run"], tmp_path)
    assert list((tmp_path / "run").rglob("*.html"))
