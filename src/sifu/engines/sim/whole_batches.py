"""Steps of softmax regression on whole batches, between samples (`sifu.engines.sim.linear`), on several cores.

The steps of some clients are one function of torch operations alone. TorchScript runs it without Python's lock, so
every thread trains its own clients; where it cannot be compiled, the same function runs as Python, to the same bits
(`sifu.engines.sim.threads`). A client's bits depend neither on the number of threads nor on who else takes part.
"""

from __future__ import annotations

import functools
import itertools
import os
import platform
from concurrent.futures import ThreadPoolExecutor, wait

import torch
from torch import Tensor, nn

from sifu.engines.sim.client_blocks import Block
from sifu.engines.sim.threads import scripted
from sifu.theory.arrays import Integers

CLIENTS_A_THREAD = 3
"""A thread that has fewer clients waits about as long as it works."""
SCRIPT_AFTER = 50
"""Steps that are taken in this many rounds are compiled; that takes as long as a few dozen rounds."""
GATHERED = platform.machine() in ("aarch64", "arm64")
"""Whether samples are copied side by side for one product: quicker where BLAS is OpenBLAS, slower where it is MKL."""


class SoftmaxSteps(nn.Module):
    """K steps of rate eta on all n rows of each client."""

    def __init__(self, steps: int, rate: float, gathered: bool) -> None:
        super().__init__()
        self.steps, self.rate, self.gathered = steps, rate, gathered

    @torch.jit.export
    def updates(
        self, model: Tensor, x: Tensor, gram: Tensor, targets: Tensor, weights: Tensor, rows: list[int], into: Tensor
    ) -> None:
        """Put X_i' V_K of the clients at `rows` into `into` (clients, outputs, width), in float64.

        `model` is W' (outputs, width); `x`, `gram`, `targets` and the `weights` of rows are those of a `Block`.
        """
        index = torch.tensor(rows)
        grams, wanted = gram.index_select(0, index), targets.index_select(0, index)
        scale = weights.index_select(0, index).mul_(-self.rate)
        samples = x.index_select(0, index) if self.gathered else x[:0]
        first = torch.empty_like(wanted)
        if self.gathered:
            # The quicker way round that has the bits of one product per client (checked with OpenBLAS).
            if model.dtype == torch.float32:
                products = torch.mm(samples.flatten(0, 1), model.t())
                first.copy_(products.view(len(rows), x.size(1), model.size(0)).transpose(1, 2))
            else:
                products = torch.mm(model, samples.flatten(0, 1).t())
                first.copy_(products.view(model.size(0), len(rows), x.size(1)).transpose(0, 1))
        else:
            for place, row in enumerate(rows):
                torch.mm(model, x[row].t(), out=first[place])
        # V is zero before the first step.
        dual = torch.softmax(first, 1).sub_(wanted).mul_(scale)
        scores = torch.empty_like(first)
        for _ in range(self.steps - 1):
            torch.baddbmm(first, dual, grams, out=scores)
            dual.addcmul_(torch.softmax(scores, 1).sub_(wanted), scale)
        if self.gathered:
            into.copy_(torch.bmm(dual, samples))
        else:
            product = torch.empty_like(model)
            for place, row in enumerate(rows):
                torch.mm(dual[place], x[row], out=product)
                into[place].copy_(product)


class WholeBatches:
    """Takes all steps of some clients of a block, by as many threads as are worth it."""

    def __init__(self, steps: int, rate: float) -> None:
        self._steps, self._rounds = SoftmaxSteps(steps, rate, GATHERED), 0

    def updates(self, block: Block, rows: Integers, model: Tensor, threads: int) -> Tensor:
        """X_i' V_K of the clients at `rows` of the block in float64, (clients, outputs * width), from W'."""
        self._rounds += 1
        if self._rounds == SCRIPT_AFTER:
            self._steps = scripted(self._steps)
        into = torch.empty((rows.size, *model.shape), dtype=torch.float64)
        count = max(1, min(threads, rows.size // CLIENTS_A_THREAD))
        cuts = [rows.size * number // count for number in range(count + 1)]
        parts = [(rows[low:high].tolist(), into[low:high]) for low, high in itertools.pairwise(cuts)]
        jobs = [
            _helpers(os.getpid(), count - 1).submit(self._train, block, model, some, own) for some, own in parts[1:]
        ]
        try:
            self._train(block, model, *parts[0])
        finally:
            wait(jobs)  # no one writes into `into` after this
        for job in jobs:
            job.result()
        return into.flatten(1)

    def _train(self, block: Block, model: Tensor, rows: list[int], into: Tensor) -> None:
        assert block.gram is not None
        with torch.inference_mode():
            self._steps.updates(model, block.x, block.gram, block.targets, block.row_weights, rows, into)


@functools.lru_cache(maxsize=4)
def _helpers(process: int, count: int) -> ThreadPoolExecutor:
    """Threads next to the one that asks, which stay; a process that was forked off another starts its own."""
    before = torch.get_num_threads()
    crew = ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,))
    wait([crew.submit(int) for _ in range(count)])
    torch.set_num_threads(before)  # threads that others start later take the latest number set
    return crew
