"""What `sifu doctor` shows: what is installed, which engines and devices work here."""

from __future__ import annotations

import importlib.metadata
import os
import platform

from rich.markup import escape

from sifu.cli.output import out, print_json, table

PACKAGES = (
    "sifu", "numpy", "scipy", "torch", "safetensors", "cryptography", "scikit-learn", "matplotlib", "flwr",
)  # fmt: skip


def show_doctor(as_json: bool) -> None:
    """`sifu doctor`."""
    import torch

    from sifu.data.sources import search_folders
    from sifu.launch.devices import why_no_gpu

    packages = {name: _version_of(name) for name in PACKAGES}
    flwr = packages["flwr"]
    engines = {
        "embedded": f"works, on cpu with {torch.get_num_threads()} threads",
        "flower": f"works, with flwr {flwr}" if flwr else 'needs Flower: pip install "sifu[flower]"',
        "gpu": why_no_gpu() or "works, sifu train and forget take --device cuda",
    }
    devices = ["cpu"] + [torch.cuda.get_device_name(k) for k in range(torch.cuda.device_count())]
    data_folders = [str(folder) for folder in search_folders(None)]
    if as_json:
        print_json(
            {
                "python": platform.python_version(),
                "platform": platform.platform(),
                "cores": os.cpu_count(),
                "packages": packages,
                "engines": engines,
                "devices": devices,
                "data_folders": data_folders,
            }
        )
        return
    facts = table("", "")
    facts.add_row("python", f"{platform.python_version()} on {platform.platform()}, {os.cpu_count()} cores")
    for name, version in packages.items():
        facts.add_row(name, version or "not installed")
    facts.add_row("embedded engine", engines["embedded"])
    facts.add_row("flower engine", escape(engines["flower"]))
    facts.add_row("on a gpu", engines["gpu"])
    facts.add_row("devices", ", ".join(devices))
    facts.add_row("data looked for in", ", ".join(data_folders))
    out.print(facts)


def _version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
