"""Groups that tune your network separately: forgetting a client takes no round and is exact. Takes seconds on a CPU."""

import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

import sifu

SPEC = {
    "data": {"name": "digits", "clients": 40, "samples_per_client": 20},
    "model": {"kind": "ridge"},
    "features": {"kind": "module", "module": "tuned_network:public_network", "tune": "blocks", "block": 16},
    "groups": {"count": 4, "rounds": 4, "rebuild": "later"},
    "local": {"rate": 0.05, "steps": 5, "momentum": 0.9},
}


def public_network() -> nn.Module:
    """Return your public network: any torch module with public weights that maps each sample to a row of numbers."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 32), nn.Tanh())


def main(folder: Path) -> sifu.Outcome:
    """Tune, forget one client, verify; return the outcome."""
    sys.path.insert(0, str(Path(__file__).parent))
    sifu.allow_code("tuned_network:public_network")
    run = sifu.train(SPEC, run=folder)
    (outcome,) = run.forget(["client-007"])
    assert run.verify().problems == []
    return outcome


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        print(main(Path(temporary) / "run"))
