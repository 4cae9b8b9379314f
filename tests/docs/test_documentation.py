"""The README's example and every command in the docs run, in order, as a reader would type them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = ["README.md", "docs/your-csv.md", "docs/guide.md", "docs/closed-form.md"]
EXAMPLES = ["own_model.py", "new_method.py", "frozen_features.py", "server_loop.py"]


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), flags=re.S | re.M)


def commands(page: str) -> list[str]:
    lines = [line.split("  #")[0].strip() for block in blocks(page, "sh") for line in block.splitlines()]
    return [line for line in lines if line.startswith(("sifu ", "printf "))]


@pytest.fixture
def shell(tmp_path: Path):
    """Runs one command in a separate folder, with the `sifu` of this interpreter."""
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]))

    def run(arguments: list[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(arguments, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)

    return run


@pytest.mark.long
@pytest.mark.parametrize("page", PAGES)
def test_every_command_of_a_page_runs(page: str, shell, tmp_path: Path) -> None:
    lines = commands(page)
    assert lines
    if page != "README.md":
        for example in blocks(page, "python"):
            assert shell([sys.executable, "-c", example]).returncode == 0
    (tmp_path / "commands.json").write_text(json.dumps(lines))
    result = shell([sys.executable, str(ROOT / "tests" / "docs" / "command_lines.py"), "commands.json"])
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"


@pytest.mark.long
def test_the_example_of_frozen_features_runs(shell) -> None:
    (example,) = blocks("docs/frozen-features.md", "python")
    result = shell([sys.executable, "-c", example])
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(("proven", "exact"))


@pytest.mark.long
def test_the_readme_example_runs(shell) -> None:
    (example,) = blocks("README.md", "python")
    result = shell([sys.executable, "-c", example])
    assert result.returncode == 0, result.stderr


@pytest.mark.long
@pytest.mark.parametrize("example", EXAMPLES)
def test_the_examples_run(shell, example: str) -> None:
    result = shell([sys.executable, str(ROOT / "examples" / example)])
    assert result.returncode == 0, result.stderr
    assert "verified: True" in result.stdout


def test_every_command_is_documented() -> None:
    from sifu.cli.main import app

    text = "\n".join((ROOT / page).read_text(encoding="utf-8") for page in PAGES)
    for command in app.registered_commands:
        name = command.name or command.callback.__name__.replace("_", "-")
        assert f"sifu {name}" in text, f"sifu {name} is not in the docs"
    everything = text + (ROOT / "docs/flower.md").read_text(encoding="utf-8")
    for group in app.registered_groups:
        for command in group.typer_instance.registered_commands:
            assert f"sifu {group.typer_instance.info.name} {command.name}" in everything


def test_every_link_of_the_pages_exists() -> None:
    pages = [
        "CONTRIBUTING.md",
        "SECURITY.md",
        "CHANGELOG.md",
        "docs/store.md",
        "docs/performance.md",
        "docs/flower.md",
        "docs/flower-app.md",
        "docs/new-method.md",
        "paper/README.md",
        "docs/noise.md",
        "docs/frozen-features.md",
        "docs/security.md",
        "docs/console.md",
        "docs/audit.md",
    ]
    for page in [*PAGES, *pages]:
        base = (ROOT / page).parent
        for target in re.findall(r"\]\(([^)#]+)\)", (ROOT / page).read_text(encoding="utf-8")):
            if "://" not in target:
                assert (base / target).exists(), f"{page} links to {target}, which does not exist"
