"""The README's example and every command in the docs run, in order, as a reader would type them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from run_tools import built_command
from sifu.cli.main import app

ROOT = Path(__file__).resolve().parents[2]
PAGES = ["README.md", "docs/your-csv.md", "docs/guide.md", "docs/closed-form.md"]
EXAMPLES = ["own_model.py", "frozen_features.py", "server_loop.py"]


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), flags=re.S | re.M)


def commands(page: str) -> list[str]:
    lines = [line.split("  #")[0].strip() for block in blocks(page, "sh") for line in block.splitlines()]
    return [line for line in lines if line.startswith(("sifu ", "printf "))]


class Reader:
    """Reader that runs what a page shows in one folder; `sifu` and Python are already imported (`command_lines.py`)."""

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self.process, self.folder = process, folder

    def run(self, **task: str) -> Any:
        """Run a task, which must succeed; return its standard output."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps({"folder": str(self.folder)} | task), file=self.process.stdin, flush=True)
        answer = json.loads(self.process.stdout.readline())
        assert answer["status"] == 0, f"{task} ended with {answer['status']}\n{answer['out']}\n{answer['err']}"
        return answer["out"]


@pytest.fixture(scope="module")
def process() -> Iterator[subprocess.Popen[str]]:
    """Start a Python process that has imported everything and forks for every task."""
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]))
    command = [sys.executable, str(ROOT / "tests" / "docs" / "command_lines.py")]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        yield process


@pytest.fixture
def reader(process: subprocess.Popen[str], tmp_path: Path) -> Reader:
    """Return a reader with an empty folder."""
    return Reader(process, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("page", PAGES)
def test_every_command_of_a_page_runs(page: str, reader: Reader, tmp_path: Path) -> None:
    lines = commands(page)
    assert lines
    if page != "README.md":
        for example in blocks(page, "python"):
            reader.run(text=example)
    for line in lines:
        if line.startswith("sifu "):
            reader.run(command=line)
        else:
            subprocess.run(["sh", "-c", line], cwd=tmp_path, check=True)


@pytest.mark.long
def test_control_a_command_that_fails_is_noticed(reader: Reader) -> None:
    for task in ({"command": "sifu status nowhere"}, {"text": "raise SystemExit(3)"}, {"text": "1 / 0"}):
        with pytest.raises(AssertionError, match=r"ended with [123]"):
            reader.run(**task)


@pytest.mark.long
def test_the_readme_example_runs(reader: Reader) -> None:
    (example,) = blocks("README.md", "python")
    reader.run(text=example)


@pytest.mark.long
@pytest.mark.parametrize("example", EXAMPLES)
def test_the_examples_run(reader: Reader, example: str) -> None:
    assert "verified: True" in reader.run(path=str(ROOT / "examples" / example))


def shown_commands() -> Iterator[tuple[str, str]]:
    """Yield each command line of `sifu` that a page shows, in a block or within a sentence, with the page's name."""
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *ROOT.glob("[ce]*/**/*.md"), ROOT / "mkdocs.yml"]:
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        blocks = re.findall(r"^```\w*\n(.*?)^```", text, flags=re.S | re.M)
        lines = [line.removeprefix("$ ") for block in blocks for line in block.splitlines()]
        for line in [*(line for line in lines if line.startswith("sifu ")), *re.findall(r"`(sifu [^`]+)`", text)]:
            if page.name != "CHANGELOG.md":
                yield page.name, " ".join(line.split("  #")[0].split())


def wrong_word(line: str) -> str:
    """Return the first word of a command line that names no command or option, or "" if there is none."""
    command, before = built_command(app), ""
    for word in line.split()[1:]:
        options = {flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)}
        if word.startswith("--") and word.split("=")[0] not in {*options, "--help"}:
            return word
        below = getattr(command, "commands", None)
        if below is not None and not word.startswith("--") and not before.startswith(("--a", "--w")):
            if word not in below:
                return "" if word.isupper() or word == "..." else word
            command = below[word]
        before = word
    return ""


def test_pages_show_every_command_and_no_other_command_or_option() -> None:
    lines = list(shown_commands())
    assert [(page, line) for page, line in lines if wrong_word(line)] == []
    everything = built_command(app).commands
    names = [f"{name} {below}" for name in everything for below in getattr(everything[name], "commands", [""])]
    assert {name for name in names if not any(f"sifu {name}".strip() in line for _, line in lines)} == set()


@pytest.mark.parametrize("line", ["sifu methods", "sifu train --bigger", "sifu --old train", "sifu clients remove RUN"])
def test_control_an_unknown_command_or_option_is_noticed(line: str) -> None:
    assert wrong_word(line)


def test_every_link_of_the_pages_exists() -> None:
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "paper" / "README.md"]:
        for target in re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}, which does not exist"
