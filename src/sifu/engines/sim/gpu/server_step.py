"""The server's step at the end of a round of all lanes, and the lengths that are kept of it."""

from __future__ import annotations

import torch
from torch import Tensor


def end_round(
    history: Tensor,
    measured: Tensor,
    counter: Tensor,
    *,
    start: Tensor,
    mean: Tensor,
    drifts: Tensor,
    origins: Tensor,
    server_rate: float,
) -> None:
    """Write the model after round `counter` and what was measured in it, and count it.

    `start` and `mean` (lanes, size) are the model that was handed out and the mean of the local ones, in float64;
    `drifts` (lanes, slots) the lengths of local models less their mean. Behind them come, for each lane, how far the
    mean went, how far the new model is from `origins`, and the length of the old one.
    """
    new = (start + server_rate * (mean - start)).to(history.dtype)
    lengths = torch.cat(
        [
            drifts,
            torch.linalg.vector_norm(mean - start, dim=1, keepdim=True),
            torch.linalg.vector_norm(new.to(torch.float64) - origins, dim=1, keepdim=True),
            torch.linalg.vector_norm(start, dim=1, keepdim=True),
        ],
        dim=1,
    )
    measured.index_copy_(0, counter, lengths[None])
    counter.add_(1)
    history.index_copy_(0, counter, new[None])
