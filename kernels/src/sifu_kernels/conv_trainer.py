"""Training of convolutional networks on the CPU with hand-written passes, on several clients in parallel.

A batch is split into pieces whose buffers fit into a core's cache. The gradients of the pieces are summed in an order
that depends only on the batch, so results depend neither on the number of threads nor on the other participants. Each
thread trains its own clients. If the number of clients is not a multiple of the number of threads, several threads
share each remaining client by sharing the pieces of its batches. For example, with five clients on two cores, each core
trains two clients and both share the fifth.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from sifu.core.engine import Position
from sifu.core.layout import Vector
from sifu.core.round import Average
from sifu.engines.sim.client_updates import average_models
from sifu.engines.sim.embedded_clients import OBJECTIVES, CheckedClient
from sifu.engines.sim.local_training import TrainingPlan
from sifu.engines.sim.networks import ConvNet, dropout_key, kept_units
from sifu.engines.sim.threads import one_thread, scripted
from sifu.errors import InputError
from sifu.theory.participation import ClientIndices
from sifu_kernels.conv_pass import (
    ConvPass,
    bytes_a_sample,
    padded_images,
    parameter_views,
    pass_order,
    prepare,
    room_to_prepare,
)

PIECE_BYTES = 3 * 2**19
"""Maximum size of the largest buffer of a piece: most of a core's second-level cache."""

SUMS = 4
"""Number of partial sums of a batch's gradient, which is also the maximum number of threads that share a client."""

SCRIPT_AFTER = 50
"""Number of uses after which a pass is compiled; compiling takes as long as 10 to 70 passes of the paper's networks."""

CLIENTS_AHEAD = 32
"""Maximum number of clients trained before their models are yielded, independent of the number of threads."""


class ConvTrainer:
    """Trainer and evaluator of the clients of a `ConvNet` with softmax loss."""

    def __init__(self, network: ConvNet, clients: Sequence[CheckedClient], plan: TrainingPlan) -> None:
        shape = clients[0].x.shape[1:]
        if shape != network.input_shape and (1, *shape) != network.input_shape:
            raise InputError(
                f"the model cannot take the samples of client {clients[0].name!r} (shape {shape}): it takes images of "
                f"shape {network.input_shape}"
            )
        if network.outputs < plan.outputs:
            raise InputError(f"the model has outputs of shape {(network.outputs,)}, {plan.outputs} are needed")
        self._network, self._plan, self._training = network, plan, plan.training
        self._order = pass_order(network)
        self._back = torch.argsort(self._order)
        self._samples, self._first = plan.samples, np.cumsum(plan.samples) - plan.samples
        self._images = torch.cat(
            [padded_images(network, torch.from_numpy(client.x).reshape(-1, *network.input_shape)) for client in clients]
        )
        self._labels = torch.from_numpy(np.concatenate([client.y for client in clients]))
        item = self._images.element_size()
        largest = max(bytes_a_sample(layer, item) for layer in network.convolution_layers)
        self._piece = max(1, PIECE_BYTES // largest)
        self._passes = _BufferPool(lambda: _Passes(network, self._images.dtype))
        self._locals = _BufferPool(lambda: _Local(network, self._images.dtype))

    def average(self, start: Vector, position: Position, participants: ClientIndices, samples: np.ndarray) -> Average:
        """Train the participants and average their models.

        Averaging uses one thread, because torch's other threads would occupy the cores that train
        (`sifu.engines.sim.threads`).
        """
        threads = torch.get_num_threads()
        with one_thread(), ExitStack() as stack:

            def train() -> Iterator[tuple[slice, Tensor]]:
                # Close the generator here even if averaging fails, because closing restores the number of threads.
                return stack.enter_context(closing(self.train(start, position, participants, threads)))

            return average_models(train, start.astype(np.float64), samples, start.itemsize)

    def train(
        self,
        start: Vector,
        position: Position,
        participants: ClientIndices,
        threads: int | None = None,
    ) -> Generator[tuple[slice, Tensor]]:
        """Yield (places among the participants, rows of models) after local training, some clients at a time.

        `threads` is the number of threads, by default torch's setting.
        """
        model = torch.from_numpy(start)[self._order]
        largest = int(self._samples[participants].max(initial=1))
        # A thread without a piece of a batch would only wait.
        most_pieces = len(self._pieces(min(largest, self._training.batch_size or largest)))
        threads = threads or torch.get_num_threads()
        with _crew(threads) as crew:
            for first in range(0, participants.size, CLIENTS_AHEAD):
                chosen = participants[first : first + CLIENTS_AHEAD]
                rows = torch.empty((chosen.size, start.size), dtype=model.dtype)
                left = chosen.size % threads
                team = min(SUMS, threads // left, most_pieces) if left else 1
                alone = chosen.size - left if team > 1 else chosen.size
                waiting = [
                    crew.submit(self._train_alone, model, position, int(client), rows[place])
                    for place, client in enumerate(chosen[:alone])
                ]
                for place in range(alone, chosen.size):
                    shared = self._begin(model, position, int(chosen[place]))
                    meeting = threading.Barrier(team)
                    waiting += [
                        crew.submit(self._train_member, shared, member, meeting, rows[place]) for member in range(team)
                    ]
                errors = [job.exception() for job in waiting]
                for error in errors:
                    if error and not isinstance(error, threading.BrokenBarrierError):  # other errors break the barrier
                        raise error
                yield slice(first, first + chosen.size), rows

    def evaluate(self, model: Vector, clients: ClientIndices) -> tuple[np.ndarray, np.ndarray]:
        """Return the number of correct predictions and the summed loss of each client."""
        parameters = parameter_views(self._network, torch.from_numpy(model)[self._order])
        prepared = prepare(self._network, parameters)
        sizes = self._samples[clients]
        spans = zip(self._first[clients], self._first[clients] + sizes, strict=True)
        rows = np.concatenate([np.zeros(0, dtype=np.int64), *(np.arange(first, end) for first, end in spans)])
        hits, losses = np.zeros(rows.size, dtype=np.int64), np.zeros(rows.size)

        def score(low: int, high: int) -> None:
            index = torch.from_numpy(rows[low:high])
            passes = self._passes.take()
            conv_pass = passes.of(high - low)
            conv_pass.forward(self._images, index, None, parameters, prepared)
            targets = OBJECTIVES["softmax"].encode(self._labels[index], self._network.outputs, conv_pass.scores.dtype)
            hits[low:high] = OBJECTIVES["softmax"].hits(conv_pass.scores, targets).numpy()
            losses[low:high] = OBJECTIVES["softmax"].row_loss(conv_pass.scores, targets).numpy()
            self._passes.give(passes)

        with _crew(torch.get_num_threads()) as crew:
            for job in [crew.submit(score, low, high) for low, high in self._pieces(rows.size)]:
                job.result()
        owner = np.repeat(np.arange(clients.size), sizes)
        correct = np.bincount(owner, weights=hits, minlength=clients.size).astype(np.int64)
        return correct, np.bincount(owner, weights=losses, minlength=clients.size)

    def _pieces(self, samples: int) -> list[tuple[int, int]]:
        """Return the bounds (first, end) of the fewest pieces of nearly equal size that hold `samples` samples."""
        count = -(-samples // self._piece)
        return [(samples * piece // count, samples * (piece + 1) // count) for piece in range(count)]

    def _begin(self, model: Tensor, position: Position, client: int) -> _Local:
        """Return the state before a client's local training, with the model, the batches and the dropout keys."""
        local = self._locals.take()
        local.value.copy_(model)
        plan, hidden = self._plan, [layer for layer in self._network.linear_layers if layer.hidden]
        local.batches = [torch.from_numpy(rows + self._first[client]) for rows in plan.batches(position, client)]
        places = np.arange(self._training.steps)[:, None], np.arange(len(hidden))[None, :]
        local.keys = dropout_key(plan.seed, position, int(plan.numbers[client]), *places)
        return local

    def _train_alone(self, model: Tensor, position: Position, client: int, row: Tensor) -> None:
        self._train_member(self._begin(model, position, client), 0, threading.Barrier(1), row)

    def _train_member(self, local: _Local, member: int, meeting: threading.Barrier, row: Tensor) -> None:
        """Run one team member's share of a client's training; the first member writes the model into `row`."""
        try:
            self._descend(local, member, meeting)
        except BaseException:
            meeting.abort()  # otherwise the other members would wait forever
            raise
        if member == 0:
            torch.index_select(local.value, 0, self._back, out=row)
            self._locals.give(local)

    def _descend(self, local: _Local, member: int, meeting: threading.Barrier) -> None:
        """Run one team member's share of a client's steps: its pieces of each batch and its slice of the parameters.

        The team meets at a barrier whenever a member needs results of the others.
        """
        passes, team = self._passes.take(), meeting.parties
        size = self._network.parameters
        share = slice(size * member // team, size * (member + 1) // team)
        for step, batch in enumerate(local.batches):
            prepared = prepare(self._network, local.parameters, passes.room)
            pieces = self._pieces(batch.numel())
            for number in range(min(SUMS, len(pieces))):
                if number % team == member:
                    self._add_up(passes, local, step, number, pieces, prepared)
            meeting.wait()
            total = local.sums[0][share]
            for other in local.sums[1 : min(SUMS, len(pieces))]:
                total.add_(other[share])
            self._take_step(local.value[share], total, local.velocity[share], step)
            meeting.wait()
        self._passes.give(passes)

    def _take_step(self, value: Tensor, gradient: Tensor, velocity: Tensor, step: int) -> None:
        """Take one step of SGD in place; the gradient is overwritten, and the velocity is ignored in step 0."""
        training = self._training
        if training.weight_decay:
            gradient.add_(value, alpha=training.weight_decay)
        if training.momentum:
            gradient = velocity.copy_(gradient) if step == 0 else velocity.mul_(training.momentum).add_(gradient)
        value.sub_(gradient, alpha=training.rate)

    def _add_up(
        self,
        passes: _Passes,
        local: _Local,
        step: int,
        number: int,
        pieces: Sequence[tuple[int, int]],
        prepared: list[Tensor],
    ) -> None:
        """Compute sum `number` of a step: the gradients of every SUMS-th piece, starting with piece `number`."""
        batch = local.batches[step]
        for low, high in pieces[number::SUMS]:
            first = low == pieces[number][0]
            rows = batch[low:high]
            kept = None
            if self._network.dropout:
                kept = [
                    torch.from_numpy(kept_units(key, low, high - low, layer.features_out, layer.dropout))
                    for key, layer in zip(local.keys[step], self._network.linear_layers, strict=False)
                ]
            passes.of(high - low).gradient(
                self._images,
                rows,
                self._labels[rows],
                batch.numel(),
                kept,
                local.parameters,
                prepared,
                local.gradients[number] if first else passes.gradients,
            )
            if not first:
                local.sums[number].add_(passes.flat_gradient)


class _Local:
    """State of a client's training: model, velocity and gradient sums in pass order, batches and dropout keys."""

    def __init__(self, network: ConvNet, dtype: torch.dtype) -> None:
        self.value = torch.empty(network.parameters, dtype=dtype)
        self.parameters = parameter_views(network, self.value)
        self.velocity = torch.empty_like(self.value)
        self.sums = torch.empty((SUMS, network.parameters), dtype=dtype)
        self.gradients = [parameter_views(network, total) for total in self.sums]
        self.batches: list[Tensor] = []
        self.keys = np.zeros((0, 0), dtype=np.uint64)


class _Passes:
    """Passes of a thread, one per number of samples in a piece, and the thread's gradient buffers."""

    def __init__(self, network: ConvNet, dtype: torch.dtype) -> None:
        self._network, self._dtype = network, dtype
        self._by_size: dict[int, ConvPass] = {}
        self._uses: collections.Counter[int] = collections.Counter()
        self.flat_gradient = torch.empty(network.parameters, dtype=dtype)
        self.gradients = parameter_views(network, self.flat_gradient)
        self.room = room_to_prepare(network, dtype)

    def of(self, samples: int) -> ConvPass:
        """Return the pass for `samples` samples."""
        self._uses[samples] += 1
        if samples not in self._by_size:
            self._by_size[samples] = ConvPass(self._network, samples, self._dtype)
        if self._uses[samples] == SCRIPT_AFTER:
            self._by_size[samples] = scripted(self._by_size[samples])
        return self._by_size[samples]


Buffers = TypeVar("Buffers")


class _BufferPool(Generic[Buffers]):
    """Pool of buffers that are used by one thread at a time, and made on demand."""

    def __init__(self, make: Callable[[], Buffers]) -> None:
        self._make, self._spare = make, list[Buffers]()

    def take(self) -> Buffers:
        """Return unused buffers."""
        try:
            return self._spare.pop()
        except IndexError:
            return self._make()

    def give(self, buffers: Buffers) -> None:
        """Put buffers back into the pool."""
        self._spare.append(buffers)


@contextmanager
def _crew(threads: int) -> Iterator[ThreadPoolExecutor]:
    """Yield a pool of threads in which each torch operation uses one thread."""
    before = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as crew:
            yield crew
    finally:
        torch.set_num_threads(before)  # threads started later inherit the most recent setting
