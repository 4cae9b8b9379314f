"""The wheel: everything is in it, and it works in an environment that has never seen the sources."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SPEC = """
[data]
clients = 6
samples_per_client = 5
[stop]
target = 0.0
max_rounds = 3
"""


def setuptools_version() -> tuple[int, ...]:
    """(0,) if there is none."""
    try:
        return tuple(int(part) for part in importlib.metadata.version("setuptools").split(".")[:2])
    except importlib.metadata.PackageNotFoundError:
        return (0,)


pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        setuptools_version() < (70, 1),
        reason="building a wheel offline needs setuptools 70.1 or later in this environment: pip install -e '.[dev]'",
    ),
]


def call(command: list[object], folder: Path) -> str:
    """What a command prints, run in a folder with nothing of ours on Python's path."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "PIP_"))}
    answer = subprocess.run(
        list(map(str, command)), cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return answer.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that nothing is left in the checkout and nothing left in it is packed."""
    folder = tmp_path_factory.mktemp("wheel")
    copy = folder / "checkout"
    shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    build = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", folder, copy]
    call([sys.executable, "-m", "pip", *build], folder)
    (path,) = folder.glob("sifu-*.whl")
    return path


@pytest.fixture(scope="module")
def fresh(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of programs of a new environment: the wheel, and for its dependencies the packages of this one."""
    folder = tmp_path_factory.mktemp("fresh") / "environment"
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    (packages,) = folder.glob("lib/python*/site-packages")
    # A path that a .pth file names is searched last, and its own .pth files (an editable sifu) are not read.
    ours = dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib"))
    (packages / "dependencies.pth").write_text("".join(f"{path}\n" for path in ours))
    install = ["install", "--quiet", "--no-deps", "--no-index", "--ignore-installed", wheel]
    call([sys.executable, "-m", "pip", "--python", python, *install], folder)
    return folder / "bin"


def left_out(wheel: Path, sources: Path) -> list[str]:
    """Files of the package that the wheel lacks."""
    with zipfile.ZipFile(wheel) as archive:
        packed = set(archive.namelist())
    files = [path for path in sources.glob("sifu/**/*") if path.is_file() and "__pycache__" not in path.parts]
    return sorted({path.relative_to(sources).as_posix() for path in files} - packed)


def test_everything_is_packed(wheel: Path) -> None:
    assert left_out(wheel, ROOT / "src") == []
    with zipfile.ZipFile(wheel) as archive:
        packed = archive.namelist()
    kinds = {Path(name).suffix for name in packed if name.startswith("sifu/")}
    others = [name for name in packed if not name.startswith(("sifu/", "sifu-"))]
    assert kinds >= {".py", ".typed", ".sql", ".html", ".css"}
    assert others == []
    assert [name for name in packed if "experiment" in name or "bench" in name or "simulation" in name] == []


def test_a_file_that_is_not_packed_is_noticed(wheel: Path, tmp_path: Path) -> None:
    """The negative control."""
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
    """Training reads the schema, the report its page and style."""
    (tmp_path / "spec.toml").write_text(SPEC)
    call([fresh / "sifu", "train", "spec.toml", "--run", "run"], tmp_path)
    call([fresh / "sifu", "verify", "run"], tmp_path)
    call([fresh / "sifu", "report", "run"], tmp_path)
    assert list((tmp_path / "run").rglob("*.html"))
