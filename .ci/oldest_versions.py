"""Prints the lower bounds of pyproject.toml as constraints for pip.

torch, triton and the developers' tools are left to pip: few package indexes have old builds of torch without CUDA.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).resolve().parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
print("click<8.5")  # Typer of that time shows no help of arguments with a newer one
for requirement in project["dependencies"] + project["optional-dependencies"]["dev"]:
    bound = re.match(r"([A-Za-z0-9_.-]+)>=([0-9.]+)", requirement)
    if bound and bound[1] not in {"torch", "triton", "setuptools", "ruff", "mypy", "import-linter", "pre-commit"}:
        print(f"{bound[1]}=={bound[2]}")
