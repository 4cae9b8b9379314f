"""Program that prints the lower bounds of pyproject.toml as constraints for pip.

It leaves torch and the developers' tools to pip, because few package indexes have old CPU builds of torch.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
project, console = (
    tomllib.loads((ROOT / path).read_text(encoding="utf-8"))["project"]
    for path in ("pyproject.toml", "console/pyproject.toml")
)
print("click<8.5")  # the oldest Typer shows no help of arguments with a newer click
for requirement in project["dependencies"] + console["dependencies"] + project["optional-dependencies"]["dev"]:
    bound = re.match(r"([A-Za-z0-9_.-]+)>=([0-9.]+)", requirement)
    if bound and bound[1] not in {"torch", "triton", "setuptools", "ruff", "mypy", "import-linter", "pre-commit"}:
        print(f"{bound[1]}=={bound[2]}")
