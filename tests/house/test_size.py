"""The library stays small enough to read: lines and files only get fewer, and a request is carried out by few files."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import sifu
from run_tools import small_spec

SOURCES = Path(sifu.__file__).resolve().parent
MOST_LINES = 54_750
"""Lower it when `src/sifu` gets smaller; a feature takes as many lines out elsewhere as it adds."""
MOST_FILES = 245
MOST_ENTERED = 80
"""Files of which `sifu forget` calls a function."""

FORGET = """
import sys
from pathlib import Path
import sifu
from sifu.cli.main import app

run, sources, entered = sys.argv[1], str(Path(sifu.__file__).resolve().parent), set()
app(["forget", run, "--client", "client-002"], standalone_mode=False)  # afterwards every module is loaded


def note(frame, event, argument):
    if event == "call" and frame.f_code.co_filename.startswith(sources):
        entered.add(frame.f_code.co_filename.removeprefix(sources))


sys.setprofile(note)
app(["forget", run, "--client", "client-003"], standalone_mode=False)
sys.setprofile(None)
print("\\nentered", *sorted(entered), sep="\\n")
"""


def test_the_library_does_not_grow() -> None:
    files = list(SOURCES.rglob("*.py"))
    lines = sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)
    assert lines <= MOST_LINES
    assert len(files) <= MOST_FILES


def test_no_file_name_is_used_twice() -> None:
    names = Counter(file.name for file in SOURCES.rglob("*.py") if file.name != "__init__.py")
    assert [name for name, count in names.items() if count > 1] == []


def test_a_request_enters_few_files(tmp_path: Path) -> None:
    sifu.train(small_spec(), run=tmp_path / "run")
    forget = [sys.executable, "-c", FORGET, str(tmp_path / "run")]
    output = subprocess.run(forget, capture_output=True, text=True, check=True).stdout
    entered = output.partition("\nentered\n")[2].split()
    assert 40 < len(entered) <= MOST_ENTERED, entered
