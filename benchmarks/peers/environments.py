"""Contestants, and the virtual environment of each peer (made with pip, under .bench/)."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".bench"
TORCH = "torch>=2.6,<2.14"


@dataclass(frozen=True)
class Contestant:
    """Script of `peers/`, its command line, and the requirements of its environment (none: this environment)."""

    key: str
    title: str
    script: str
    options: tuple[str, ...] = ()
    requirements: tuple[str, ...] = ()

    @property
    def peer(self) -> bool:
        """True if it is another project's framework."""
        return bool(self.requirements)

    @property
    def environment(self) -> Path:
        """Folder of its virtual environment."""
        return FOLDER / self.key

    @property
    def python(self) -> Path:
        """Interpreter that runs it."""
        return self.environment / "bin" / "python" if self.peer else Path(sys.executable)


CONTESTANTS = (
    Contestant("ours", "sifu", "ours.py"),
    Contestant("ours-tracking", "sifu, tracking on", "ours.py", ("--tracking",)),
    Contestant("plain", "plain PyTorch loop", "plain.py"),
    Contestant("pfl", "pfl-research", "pfl.py", (), ("pfl[pytorch]==0.6.0", TORCH)),
    Contestant("fluke", "fluke", "fluke.py", (), ("fluke-fl==0.8.1", TORCH)),
    Contestant("fedlab", "FedLab", "fedlab.py", (), ("fedlab==1.3.0", TORCH)),
    Contestant("flower", "Flower simulation (ray)", "flower.py", (), ("flwr[simulation]>=1.41,<1.43", TORCH)),
)


def install(contestant: Contestant) -> str | None:
    """Make a peer's environment unless it exists; return an error message, or None."""
    done = contestant.environment / ".done"
    wanted = "\n".join(contestant.requirements)
    if not contestant.peer or (done.is_file() and done.read_text() == wanted):
        return None
    FOLDER.mkdir(exist_ok=True)
    pip = [str(contestant.python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    for command in ([sys.executable, "-m", "venv", str(contestant.environment)], [*pip, *contestant.requirements]):
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            return f"not installed: {last_line(result.stderr)}"
    done.write_text(wanted)
    return None


def last_line(text: str) -> str:
    """Return the last line that is not empty."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no message"
