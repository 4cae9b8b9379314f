"""Linear models, many clients at once: batched products and hand-written gradients.

With X (n x d, bias column included), W (d x C) and residual rows r(z) = df/dz, a step needs

    eta gradient = X' (weights * r(X W)),     weights eta/b on the rows of the batch and 0 elsewhere.

Each client has a step eta of its own, so it is part of the weights.

**In feature space** a step multiplies by X twice. **In sample space** it never uses X: every iterate is
W_k = a_k W_0 + X' V_k, so with G = XX' (computed once) and Z_0 = X W_0 the outputs are a_k Z_0 + G V_k. SGD with decay
and momentum is linear, so it acts on the pair (a, V) with gradient (0, weights * r). With few samples per client and
many features this is far cheaper: 60 samples of 784 features need 1/26 of the multiplications per step. The mean of the
round and the drifts also follow from V, without the local models (`sim.client_updates`). This is done in float64 for
clients with at most a few rows per output; otherwise computing X'V is cheaper or more precise.

Both variants agree with the plain loop up to rounding;
`sifu.engines.sim.float_rounding` bounds the error of either.

Outputs precede rows: scores are (clients, C, n) and models (C, d), so that sums over outputs run along long rows.

Softmax regression with whole batches, in sample space, uses several cores. One function, of torch operations only,
trains a set of clients. TorchScript runs it without Python's lock, so each thread trains its own clients. If the
function cannot be compiled, it runs as Python with identical results (`sifu.engines.sim.threads`). A client's result
depends neither on the number of threads nor on the other participants.
"""

from __future__ import annotations

import functools
import itertools
import os
import platform
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from sifu.core.engine import Position
from sifu.core.layout import Vector
from sifu.core.round import Average
from sifu.engines.sim.client_blocks import Block, Part, PartPlaces, groups_of, make_block, padded_rows, side_by_side
from sifu.engines.sim.client_updates import KEEP_BYTES, DualUpdates, LocalUpdates, RowUpdates, average
from sifu.engines.sim.embedded_clients import CheckedClient
from sifu.engines.sim.local_training import LocalTraining, TrainingPlan, draw_batches
from sifu.engines.sim.models import TORCH_TYPES, LinearModel
from sifu.engines.sim.threads import one_thread, scripted
from sifu.theory.arrays import Integers
from sifu.theory.participation import ClientIndices

ROWS_AN_OUTPUT = 4
"""Number of rows per output up to which another product with all samples is cheaper than computing local models."""
SMALL_ROUND = 2**19
"""Number of sample values below which threads would wait for each other about as long as they work."""
NEARLY_ALL = 0.75
"""Share of a block's clients from which the requested clients are made contiguous once, not copied every round."""
MASKED_BATCHES = 4
"""Number of batches per client up to which weighting all rows is cheaper than copying the rows of a batch."""


class VectorisedTrainer:
    """Trainer and evaluator of the clients of a linear model; it works on one part of a block at a time."""

    def __init__(self, model: LinearModel, clients: Sequence[CheckedClient], plan: TrainingPlan) -> None:
        self._plan, self._training, self._objective = plan, plan.training, model.objective
        self._shape = (model.features + 1, model.outputs)
        (width, outputs), training = self._shape, plan.training
        padded = padded_rows(plan.samples, training.batch_size)
        self._blocks = [
            make_block(
                clients,
                indices,
                int(padded[indices[0]]),
                self._objective,
                outputs,
                TORCH_TYPES[plan.dtype],
                plan.rates[indices],
                between_samples=cheaper_between_samples(int(padded[indices[0]]), width, training),
            )
            for indices in groups_of(padded)
        ]
        self._block_of = np.zeros(len(clients), dtype=np.int64)
        self._row_of = np.zeros(len(clients), dtype=np.int64)
        for number, block in enumerate(self._blocks):
            self._block_of[block.clients] = number
            self._row_of[block.clients] = np.arange(block.clients.size)
        self._plain = not training.momentum and not training.weight_decay
        self._whole = {id(block): whole for block in self._blocks if (whole := self._whole_batches(block))}

    def train(
        self, start: Vector, position: Position, participants: ClientIndices
    ) -> Iterator[tuple[PartPlaces, Tensor]]:
        """Yield (places among the participants, rows of models) after local training, one part at a time."""
        model = torch.tensor(start).reshape(self._shape)
        for part in self._parts(participants):
            updates = self._updates(part, model, position).transpose(1, 2)
            yield part.places, (updates + self._share(part) * model).flatten(1)

    def average(
        self,
        start: Vector,
        position: Position,
        participants: ClientIndices,
        samples: np.ndarray,
    ) -> Average:
        """Train the participants and average their models, without computing each model if that is cheaper."""
        parts = list(self._parts(participants))
        model = torch.from_numpy(start).reshape(self._shape)
        keep = samples.size * start.size * 8 <= KEEP_BYTES
        threads = torch.get_num_threads() if int(samples.sum()) * self._shape[0] >= SMALL_ROUND else 1
        # Keep torch at one thread while sifu's own threads work: torch's others would wait in a busy loop on the same
        # cores (`sifu.engines.sim.threads`).
        alone = threads == 1 or all(id(part.block) in self._whole for part in parts)
        with torch.inference_mode(), one_thread() if alone and torch.get_num_threads() > 1 else nullcontext():
            updates = [self._local_updates(part, model, position, keep, len(parts) == 1, threads) for part in parts]
            mean = average(updates, None, samples)
        step = np.ascontiguousarray(mean.step.reshape(self._shape[::-1]).T).reshape(-1)
        return replace(mean, step=step)

    def evaluate(self, model: Vector, clients: ClientIndices) -> tuple[np.ndarray, np.ndarray]:
        """Return the number of correct predictions and the summed loss of each client."""
        weights = _turned(torch.from_numpy(model).reshape(self._shape))
        correct, loss_sum = np.zeros(clients.size, dtype=np.int64), np.zeros(clients.size)
        for part in self._parts(clients):
            scores = part.outputs(weights)
            losses = self._objective.row_loss(scores, part.targets, dim=1)
            hits = self._objective.hits(scores, part.targets, dim=1)
            real = part.row_weights[:, 0] > 0
            losses, hits = torch.where(real, losses, 0.0), hits & real
            loss_sum[part.places] = losses.sum(dim=1, dtype=torch.float64).numpy()
            correct[part.places] = hits.sum(dim=1).numpy()
        return correct, loss_sum

    def _parts(self, clients: ClientIndices) -> Iterator[Part]:
        """Yield `clients` in parts that each belong to one block, with their places in `clients`."""
        if len(self._blocks) == 1:
            yield from self._blocks[0].parts(self._rows(self._blocks[0], clients))
            return
        number = self._block_of[clients]
        for block in np.unique(number):
            places = np.flatnonzero(number == block)
            yield from self._blocks[block].parts(self._rows(self._blocks[block], clients[places]), places)

    def _rows(self, block: Block, clients: ClientIndices) -> Integers:
        """Return the rows of `clients` in their block; make them contiguous first if they are nearly the whole block.

        Rounds of the same clients then access their samples through a view and copy nothing.
        """
        rows: Integers = self._row_of[clients]
        if rows.size >= NEARLY_ALL * block.clients.size and not side_by_side(rows):
            block.bring_forward(rows)
            self._row_of[block.clients] = np.arange(block.clients.size)
            rows = self._row_of[clients]
        return rows

    def _whole_batches(self, block: Block) -> WholeBatches | None:
        """Return a trainer that takes all steps of a block's clients in one call, or None if that is not possible."""
        rows, softmax = block.targets.shape[2], self._objective.name == "softmax"
        if not (softmax and self._plain and self._training.whole_batches(rows) and block.one_by_one):
            return None
        if block.gram is None or _averaged_by_duals(block.targets):
            return None
        return WholeBatches(self._training.steps)

    def _local_updates(
        self, part: Part, model: Tensor, position: Position, keep: bool, keep_samples: bool, threads: int
    ) -> LocalUpdates:
        """Return the updates of a part in the form that is cheapest to average."""
        places, whole = part.places, self._whole.get(id(part.block))
        if whole is not None:
            turned = _turned(model)
            return RowUpdates(lambda: iter([(places, whole.updates(part.block, part.rows, turned, threads))]), keep)
        if part.gram is None or self._training.weight_decay:
            return RowUpdates(lambda: iter([(places, self._whole_updates(part, model, position))]), keep)
        dual = self._dual(part, part.gram, model, self._batches(part, position))
        if _averaged_by_duals(dual):
            return DualUpdates(part, part.gram, dual, keep_samples)
        return RowUpdates(lambda: iter([(places, part.transposed_products(dual).flatten(1).to(torch.float64))]), keep)

    def _whole_updates(self, part: Part, model: Tensor, position: Position) -> Tensor:
        """Return W_K - W_0 of each client after K steps: (clients, outputs * width), in float64."""
        updates = self._updates(part, model, position).to(torch.float64)
        if self._training.weight_decay:
            updates = updates + (self._share(part).to(torch.float64) - 1.0) * model.T.to(torch.float64)
        return updates.flatten(1)

    def _decay(self, part: Part) -> Tensor:
        """Return eta_i lambda of each client, in a shape that broadcasts with models (clients, 1, 1)."""
        decay = torch.from_numpy(self._plan.rates[part.clients] * self._training.weight_decay)
        return decay.to(part.targets.dtype)[:, None, None]

    def _share(self, part: Part) -> Tensor:
        """Return a_K of each client: the factor of W_0 that weight decay leaves in W_K."""
        decay = self._decay(part)
        share, velocity, nothing = torch.ones_like(decay), None, torch.zeros_like(decay)
        for _ in range(self._training.steps):
            share, velocity = self._training.descend(share, nothing, velocity, decay)
        return share

    def _updates(self, part: Part, model: Tensor, position: Position) -> Tensor:
        """Return u_i = W_K - a_K W_0 of each client after K steps: (clients, outputs, width)."""
        batches = self._batches(part, position)
        if part.gram is None:
            return (self._between_features(part, model, batches) - self._share(part) * model).transpose(1, 2)
        return part.transposed_products(self._dual(part, part.gram, model, batches))

    def _between_features(self, part: Part, model: Tensor, batches: _Batches) -> Tensor:
        """Return W_K of each client (clients, width, outputs)."""
        weights, velocity, decay = model.expand(part.size, *self._shape), None, self._decay(part)
        for rows, row_weights in batches:
            x = part.x if rows is None else rows.of_samples(part.x)
            targets = (part.targets if rows is None else rows(part.targets)).transpose(1, 2)
            residual = self._objective.residual(torch.bmm(x, weights), targets).mul_(row_weights.transpose(1, 2))
            gradient = torch.bmm(x.transpose(1, 2), residual)
            weights, velocity = self._training.descend(weights, gradient, velocity, decay)
        return weights

    def _dual(self, part: Part, gram: Tensor, model: Tensor, batches: _Batches) -> Tensor:
        """Return V_K of each client, transposed: (clients, outputs, rows)."""
        training, first, decay = self._training, part.outputs(_turned(model)), self._decay(part)
        share, dual = torch.ones_like(decay), None
        share_velocity, dual_velocity = None, None
        for rows, row_weights in batches:
            products, outputs, targets = gram, first, part.targets
            if rows is not None:
                products, outputs, targets = rows.of_samples(gram).transpose(1, 2), rows(first), rows(targets)
            # V is zero before the first step.
            if dual is None:
                scores = outputs
            else:
                scores = torch.baddbmm(outputs * share if training.weight_decay else outputs, dual, products)
            residual = self._objective.residual(scores, targets, dim=1)
            if self._plain and rows is None:  # like `descend`, but in one pass and in place
                scale = -row_weights
                dual = residual.mul_(scale) if dual is None else dual.addcmul_(residual, scale)
                continue
            gradient = residual.mul_(row_weights)
            if rows is not None:
                gradient = rows.spread(gradient, first)
            share, share_velocity = training.descend(share, torch.zeros_like(share), share_velocity, decay)
            dual, dual_velocity = training.descend(
                torch.zeros_like(first) if dual is None else dual, gradient, dual_velocity, decay
            )
        assert dual is not None
        return dual

    def _batches(self, part: Part, position: Position) -> _Batches:
        """Return the rows (None for all) and their weights for each step."""
        training = self._training
        largest = part.targets.shape[2]
        if training.whole_batches(largest):
            return [(None, part.row_weights)] * training.steps
        numbers = self._plan.numbers[part.clients]
        drawn = draw_batches(training.batch_size, part.samples, self._plan.seed, position, numbers, training.steps)
        shares = self._plan.rates[part.clients][:, None] * drawn.real / drawn.counts[..., None]
        weights = torch.from_numpy(shares).to(part.targets.dtype)
        index = torch.from_numpy(drawn.rows)
        if largest <= MASKED_BATCHES * index.shape[2]:
            # Padding entries have weight zero, so they add nothing to row 0.
            everywhere = weights.new_zeros((*weights.shape[:2], largest)).scatter_add_(2, index, weights)
            return [(None, step[:, None]) for step in everywhere]
        return [(Rows(rows), step[:, None]) for rows, step in zip(index, weights, strict=True)]


class Rows:
    """Selection of rows from each client's data, padded with row 0 to the largest batch of the step."""

    def __init__(self, index: Tensor) -> None:
        self._index = index
        self._clients = torch.arange(index.shape[0])[:, None]

    def of_samples(self, data: Tensor) -> Tensor:
        """Return these rows of `data` (clients, rows, ...)."""
        return data[self._clients, self._index]

    def __call__(self, data: Tensor) -> Tensor:
        """Return these rows of `data` (clients, outputs, rows)."""
        return data.gather(2, self._index[:, None].expand(-1, data.shape[1], -1))

    def spread(self, rows: Tensor, like: Tensor) -> Tensor:
        """Return a tensor shaped like `like` with `rows` at their original positions and zeros elsewhere."""
        index = self._index[:, None].expand(-1, rows.shape[1], -1)
        return torch.zeros_like(like).scatter_add_(2, index, rows)


_Batches = Sequence[tuple[Rows | None, Tensor]]


def _averaged_by_duals(dual: Tensor) -> bool:
    """Return whether updates are averaged from V directly; `dual` is any tensor (clients, outputs, rows)."""
    return dual.dtype == torch.float64 and dual.shape[2] <= ROWS_AN_OUTPUT * dual.shape[1]


def _turned(model: Tensor) -> Tensor:
    """Return a contiguous copy of W'; for so few columns, numpy copies three times as fast as torch."""
    return torch.from_numpy(np.ascontiguousarray(model.numpy().T))


def cheaper_between_samples(samples: int, width: int, training: LocalTraining) -> bool:
    """Return whether K steps need fewer multiplications in sample space than in feature space.

    A step on b of n rows costs about b n in sample space and 2 b d in feature space. Copying a batch adds b n and b d.
    Steps in sample space cost another 2 n d once.
    """
    seen = training.steps * min(samples, training.batch_size or samples)
    if training.whole_batches(samples):
        return 2 * samples * width + seen * samples < 2 * seen * width
    return 2 * samples * width + 2 * seen * samples < 3 * seen * width


CLIENTS_A_THREAD = 3
"""Minimum number of clients per thread; with fewer, a thread waits about as long as it works."""
SCRIPT_AFTER = 50
"""Number of rounds after which the steps are compiled; compiling takes as long as a few dozen rounds."""
GATHERED = platform.machine() in ("aarch64", "arm64")
"""True if samples are copied for one large product, which is faster with OpenBLAS but slower with MKL."""


class SoftmaxSteps(nn.Module):
    """Module that takes `steps` steps on all rows of each client."""

    def __init__(self, steps: int, gathered: bool) -> None:
        super().__init__()
        self.steps, self.gathered = steps, gathered

    @torch.jit.export
    def updates(
        self, model: Tensor, x: Tensor, gram: Tensor, targets: Tensor, weights: Tensor, rows: list[int], into: Tensor
    ) -> None:
        """Write X_i' V_K of the clients at `rows` into `into` (clients, outputs, width), in float64.

        `model` is W' (outputs, width); `x`, `gram`, `targets` and `weights` are the tensors of a `Block`.
        """
        index = torch.tensor(rows)
        grams, wanted = gram.index_select(0, index), targets.index_select(0, index)
        scale = weights.index_select(0, index).neg_()
        samples = x.index_select(0, index) if self.gathered else x[:0]
        first = torch.empty_like(wanted)
        if self.gathered:
            # This is the faster orientation that gives the same bits as one product per client (checked with OpenBLAS).
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
    """Trainer that takes all steps of some clients of a block, in several threads if there are enough clients."""

    def __init__(self, steps: int) -> None:
        self._steps, self._rounds = SoftmaxSteps(steps, GATHERED), 0

    def updates(self, block: Block, rows: Integers, model: Tensor, threads: int) -> Tensor:
        """Train clients and return X_i' V_K of each in float64: (clients, outputs * width)."""
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
            wait(jobs)  # afterwards no thread writes into `into`
        for job in jobs:
            job.result()
        return into.flatten(1)

    def _train(self, block: Block, model: Tensor, rows: list[int], into: Tensor) -> None:
        assert block.gram is not None
        with torch.inference_mode():
            self._steps.updates(model, block.x, block.gram, block.targets, block.row_weights, rows, into)


@functools.lru_cache(maxsize=4)
def _helpers(process: int, count: int) -> ThreadPoolExecutor:
    """Return a pool of persistent worker threads, one pool per `process`: a forked process inherits no threads."""
    before = torch.get_num_threads()
    crew = ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,))
    wait([crew.submit(int) for _ in range(count)])
    torch.set_num_threads(before)  # threads started later inherit the most recent setting
    return crew
