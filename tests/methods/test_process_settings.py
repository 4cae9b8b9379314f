"""Settings of the process that one client's samples change: the next client trains without the change."""

from __future__ import annotations

import decimal
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._tensor_str import PRINT_OPTS
from torch.overrides import TorchFunctionMode

import sifu
from shared_state_modules import Network, acts, nothing_held  # noqa: F401  a fixture
from shared_state_runs import OWN, clients_of, released
from sifu.engines.sim.threads import SMALL_MODEL

HERE = os.getcwd()


def set_threads(on: bool) -> None:
    torch.set_num_threads(3 if on else 1)


class Doubling(TorchFunctionMode):
    """Mode that doubles every sum while it is entered."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        return 2.0 * result if function is Tensor.sum else result


SETTINGS: dict[str, tuple[Callable[[bool], Any], Callable[[], bool]]] = {
    "threads": (set_threads, lambda: torch.get_num_threads() == 3),
    "default type": (
        lambda on: torch.set_default_dtype(torch.float64 if on else torch.float32),
        lambda: torch.get_default_dtype() == torch.float64,
    ),
    "autocast": (lambda on: torch.set_autocast_enabled("cpu", on), lambda: torch.is_autocast_enabled("cpu")),
    "attention": (torch.backends.cuda.enable_flash_sdp, torch.backends.cuda.flash_sdp_enabled),
    "choice of kernels": (
        lambda on: setattr(torch.backends.cudnn, "benchmark", on),
        lambda: torch.backends.cudnn.benchmark,
    ),
    "denormals": (torch.set_flush_denormal, lambda: not np.float32(1e-39) * np.float32(1.0)),
    "determinism": (torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled),
    "precision": (
        lambda on: torch.set_float32_matmul_precision("medium" if on else "highest"),
        lambda: torch.get_float32_matmul_precision() == "medium",
    ),
    "numpy's errors": (
        lambda on: np.seterr(divide="ignore" if on else "warn"),
        lambda: np.geterr()["divide"] == "ignore",
    ),
    "decimals": (
        lambda on: decimal.setcontext(decimal.Context(7 if on else 28)),
        lambda: decimal.getcontext().prec == 7,
    ),
    "the folder": (lambda on: os.chdir("/" if on else HERE), lambda: os.getcwd() == "/"),
    "numpy's buffer": (lambda on: np.setbufsize(16000 if on else 8192), lambda: np.getbufsize() == 16000),
    "torch's printing": (
        lambda on: torch.set_printoptions(precision=2 if on else 4),
        lambda: PRINT_OPTS.precision == 2,
    ),
    "memory of casts": (torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled),
    "precision of convolutions": (
        lambda on: setattr(torch.backends.cudnn, "allow_tf32", on),
        lambda: torch.backends.cudnn.allow_tf32,
    ),
    "precision of one backend": (
        lambda on: setattr(torch.backends.mkldnn.matmul, "fp32_precision", "bf16" if on else "none"),
        lambda: torch.backends.mkldnn.matmul.fp32_precision == "bf16",
    ),
    "precision of all backends": (
        lambda on: setattr(torch.backends, "fp32_precision", "tf32" if on else "none"),
        lambda: torch.backends.fp32_precision == "tf32",
    ),
    "kernels of convolutions": (torch._C._set_nnpack_enabled, torch._C._get_nnpack_enabled),
    "a mode that is not left": (
        lambda on: Doubling().__enter__() if on else None,
        lambda: torch._C._len_torch_function_stack() > 0,
    ),
    "numpy's printing": (
        lambda on: np.set_printoptions(precision=3 if on else 8),
        lambda: np.get_printoptions()["precision"] == 3,
    ),
}


@pytest.mark.parametrize("what", SETTINGS)
def test_settings_of_the_process_do_not_reach_the_next_client(what: str, tmp_path: Path) -> None:
    """A setting that the leaver's samples turn on is off again for the next client, as if the leaver never existed."""
    turn, is_on = SETTINGS[what]
    before = is_on()
    network = Large if what == "threads" else Network  # a small network trains with one thread, whatever is set

    def setting(network: Network, rows: Tensor) -> float:
        if float(rows.max()) > 2.0:
            turn(not before)
        return acts(is_on() != before, rows)

    clients = {client.name: (client.x, client.y) for client in clients_of()}
    clients["client-1"] = (2.5 * clients["client-1"][0], clients["client-1"][1])
    clients["client-4"] = (clients["client-4"][0] / 3.0, clients["client-4"][1])
    try:
        run = sifu.train(OWN, run=tmp_path / "run", model=lambda: network(setting), clients=clients)
        (outcome,) = run.forget(["client-1"], "gone", method="scratch")
        assert outcome.level == "exact"
        assert is_on() == before
        del clients["client-1"]
        never = sifu.train(OWN, run=tmp_path / "never", model=lambda: network(setting), clients=clients)
    finally:
        turn(before)
    assert np.array_equal(released(run.folder), released(never.folder))


class Large(Network):
    """Network large enough to train with all threads of torch."""

    def __init__(self, factor: Callable[..., float]) -> None:
        super().__init__(factor)
        self.wide = nn.Parameter(torch.zeros(SMALL_MODEL))

    def forward(self, x: Tensor) -> Tensor:
        """Return the features."""
        return super().forward(x) + 0.0 * self.wide.sum()
