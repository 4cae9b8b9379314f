"""Participants and batches of many rounds of many lanes, drawn on the device.

The draws equal the draws of `sifu.theory.participation`, so that all engines share a schedule. Integer arithmetic in
torch wraps modulo 2^64, as in numpy; `_shift` implements logical shifts.

A lane has as many slots as it can have participants. Groups of unequal size or a random number of participants leave
some slots empty, and training an empty slot costs as much as a full one. `Packing` therefore packs the slots of all
lanes into `width` places: occupied slots first, ordered by lane and slot.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sifu.engines.sim.gpu.device_queue import capture
from sifu.theory.participation import GOLDEN, MULTIPLIERS, SHIFTS, Participation

_SIGN = -(2**63)
_LAST = 2**63 - 1
POISSON_MARGIN = 8.0
"""Number of standard deviations above the expected number of participants for which slots are allocated."""


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def _shift(values: Tensor, bits: int) -> Tensor:
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def mix(values: Tensor) -> Tensor:
    """Return `sifu.theory.participation.mix` of unsigned values that are stored as int64."""
    values = (values ^ _shift(values, SHIFTS[0])) * _signed(MULTIPLIERS[0])
    values = (values ^ _shift(values, SHIFTS[1])) * _signed(MULTIPLIERS[1])
    return values ^ _shift(values, SHIFTS[2])


def scores(key: Tensor, index: Tensor) -> Tensor:
    """Return `sifu.theory.participation.scores` of values stored as int64; the arguments broadcast."""
    return mix(key + (index + 1) * _signed(GOLDEN))


@dataclass(frozen=True)
class LaneTables:
    """Constant tables of the lanes: each client's samples as rows of the data, and the keys of the lanes' draws.

    `rows` (lanes, clients, most samples) is padded with -1 after a client's last sample. Keys are unsigned values
    stored as int64, one per lane.
    """

    rows: Tensor
    sizes: Tensor
    participation_keys: Tensor
    batch_keys: Tensor
    dropout_keys: Tensor
    smallest: int
    """Smallest number of samples of any client."""

    def select(self, lanes: Tensor) -> LaneTables:
        """Return the tables of some lanes."""
        keys = (self.participation_keys[lanes], self.batch_keys[lanes], self.dropout_keys[lanes])
        return LaneTables(self.rows[lanes], self.sizes[lanes], *keys, self.smallest)


@dataclass(frozen=True)
class Schedule:
    """Participants, batches and dropout keys of the next rounds.

    `participants` (rounds, lanes, slots) holds client indices, -1 for an empty slot. `weights` are their averaging
    weights. `rows` (rounds, steps, lanes * slots, batch) holds the samples of each step's batch, padded with -1.
    `dropout` (rounds, steps, layers, lanes * slots) holds the dropout keys.
    """

    participants: Tensor
    weights: Tensor
    rows: Tensor
    dropout: Tensor
    drawn: Tensor
    """Number of clients drawn in each round (rounds, lanes); if it exceeds the slots, some clients were left out."""


@dataclass(frozen=True)
class Drawing:
    """Parameters that all schedules of a lane group share."""

    slots: int
    participation: Participation
    batch: int
    steps: int
    dropout_layers: int


class ScheduleDrawer:
    """Drawer of schedules for a fixed number of lanes and rounds; on a GPU it replays one captured graph."""

    def __init__(self, tables: LaneTables, drawing: Drawing, lanes: int, rounds: int) -> None:
        self._tables, self._drawing, self._rounds = tables, drawing, rounds
        clients, device = tables.sizes.shape[1], tables.rows.device
        self.places = torch.zeros((3, lanes), dtype=torch.int64, device=device)
        self.lanes, self.branches, self.starts = self.places
        self.active = torch.zeros((lanes, clients), dtype=torch.bool, device=device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._drawn: Schedule | None = None

    def draw(self) -> Schedule:
        """Draw the schedule of the lanes at their positions; it is valid until the next call."""
        if self.lanes.device.type != "cuda":
            self._draw()
        else:
            self._graph = self._graph or capture(self.lanes.device, self._draw)
            self._graph.replay()
        assert self._drawn is not None
        return self._drawn

    def _draw(self) -> None:
        tables = self._tables.select(self.lanes)
        self._drawn = draw_schedule(tables, self.active, self.branches, self.starts, self._rounds, self._drawing)


def draw_schedule(
    tables: LaneTables,
    active: Tensor,
    branches: Tensor,
    first_rounds: Tensor,
    rounds: int,
    drawing: Drawing,
) -> Schedule:
    """Draw participants, batches and dropout keys of `rounds` rounds from each lane's position.

    Args:
        tables: Samples and keys of the lanes.
        active: Clients that may be drawn (lanes, clients).
        branches: Branch of each lane.
        first_rounds: First round of each lane.
        rounds: Number of rounds to draw.
        drawing: Settings of participation and local training.

    Returns:
        The schedule of the rounds.
    """
    position = first_rounds[None, :] + torch.arange(rounds, device=tables.rows.device)[:, None]
    who, drawn = _participants(tables, active, branches, position, drawing)

    (rounds, lanes, slots), steps, device = who.shape, drawing.steps, who.device
    chosen = who.clamp(min=0)
    lane = torch.arange(lanes, device=device)[None, :, None]
    sizes = torch.where(who >= 0, tables.sizes[lane, chosen], 0)
    weights = sizes.to(torch.float64) / sizes.sum(dim=2, keepdim=True).clamp(min=1).to(torch.float64)
    place = scores(scores(tables.batch_keys[None, :], branches[None, :]), position)
    client_keys = scores(place[:, :, None], chosen)
    rows = _batches(tables.rows[lane, chosen], who, sizes, client_keys, tables.smallest, drawing)
    key = scores(scores(tables.dropout_keys[None, :], branches[None, :]), position)
    by_client = scores(key[:, :, None], chosen).reshape(rounds, 1, lanes * slots)
    by_step = scores(by_client, torch.arange(steps, device=device)[None, :, None])
    layers = torch.arange(max(drawing.dropout_layers, 1), device=device)[None, None, :, None]
    drops = scores(by_step[:, :, None, :], layers)
    return Schedule(who, weights, rows, drops, drawn)


def _participants(
    tables: LaneTables, active: Tensor, branches: Tensor, position: Tensor, drawing: Drawing
) -> tuple[Tensor, Tensor]:
    clients, slots, participation = active.shape[1], drawing.slots, drawing.participation
    index = torch.arange(clients, device=active.device)
    if participation.kind == "all":
        taking = active[None].expand(position.shape[0], -1, -1)
    else:
        key = scores(scores(tables.participation_keys[None, :], branches[None, :]), position)
        drawn = scores(key[:, :, None], index)
        if participation.kind == "poisson":
            taking = active[None] & (_shift(drawn, 11).to(torch.float64) * 2.0**-53 < participation.rate)
        else:
            # Flip the sign bit to sort by unsigned values, and put inactive clients last.
            ordered = torch.where(active[None], drawn ^ _SIGN, _LAST)
            first = ordered.sort(dim=2, stable=True).indices[:, :, : participation.count]
            taking = torch.zeros_like(ordered, dtype=torch.bool).scatter_(2, first, True) & active[None]
    kept = torch.where(taking, index, clients).sort(dim=2).values[:, :, :slots]
    if kept.shape[2] < slots:
        kept = torch.nn.functional.pad(kept, (0, slots - kept.shape[2]), value=clients)
    return torch.where(kept < clients, kept, -1), taking.sum(dim=2)


def _batches(own: Tensor, who: Tensor, sizes: Tensor, key: Tensor, smallest: int, drawing: Drawing) -> Tensor:
    """Draw the rows of each step's batch from each participant's `own` rows (rounds, lanes, slots, most samples)."""
    (rounds, lanes, slots, most), device = own.shape, who.device
    batch, steps = drawing.batch, drawing.steps
    if batch >= most:
        rows = torch.where((who >= 0)[..., None], own, -1).to(torch.int32)
        return rows.reshape(rounds, 1, lanes * slots, most).expand(-1, steps, -1, -1)
    epochs = -(-steps // -(-smallest // batch))
    sample = torch.arange(most, device=device)
    drawn = scores(scores(key[..., None], torch.arange(epochs, device=device))[..., None], sample) ^ _SIGN
    drawn = torch.where(sample < sizes[..., None, None], drawn, _LAST)
    order = drawn.sort(dim=-1, stable=True).indices
    # A client whose data fit into one batch uses them in their own order.
    order = torch.where((sizes <= batch)[..., None, None], sample, order)
    a_pass = -(-sizes.clamp(min=1) // batch)
    step = torch.arange(steps, device=device)
    # Clamp, because an empty slot would otherwise count one epoch per step.
    epoch, part = (step // a_pass[..., None]).clamp(max=epochs - 1), step % a_pass[..., None]
    spot = part[..., None] * batch + torch.arange(batch, device=device)
    inside = (spot < sizes[..., None, None]) & (who >= 0)[..., None, None]
    picked = order.gather(3, epoch[..., None].expand(-1, -1, -1, -1, most)).gather(4, spot.clamp(max=most - 1))
    rows = own[..., None, :].expand(-1, -1, -1, steps, -1).gather(4, picked)
    rows = torch.where(inside, rows, -1).to(torch.int32)
    return rows.permute(0, 3, 1, 2, 4).reshape(rounds, steps, lanes * slots, batch)


def slots_for(participation: Participation, clients: int) -> int:
    """Return the number of slots for the participants of a round, given the number of clients in a lane.

    A round never has more participants, with one exception: a Poisson draw exceeds the slots with negligible
    probability.
    """
    if participation.kind == "all":
        return clients
    if participation.kind == "fixed":
        return min(participation.count, clients)
    expected = participation.rate * clients
    return min(clients, math.ceil(expected + POISSON_MARGIN * math.sqrt(expected) + POISSON_MARGIN))


def width_for(participation: Participation, lanes: Sequence[int]) -> int:
    """Return the number of places for the participants of all lanes (see `slots_for`).

    Args:
        participation: The rule by which participants are drawn.
        lanes: Number of active clients of each lane.

    >>> width_for(Participation("fixed", count=3), [2, 5]), width_for(Participation("all"), [2, 5])
    (5, 7)
    """
    if participation.kind == "fixed":
        return sum(min(participation.count, clients) for clients in lanes)
    return slots_for(participation, sum(lanes))


def rounded_up(needed: int) -> int:
    """Round a width up by at most a sixteenth, so that similar widths share a program.

    >>> rounded_up(7), rounded_up(99), rounded_up(497)
    (7, 100, 512)
    """
    step = 1 << max(0, needed.bit_length() - 5)
    return -(-needed // step) * step


@dataclass(frozen=True)
class Packing:
    """Assignment of slots to places.

    `order` (rounds, width) is the slot at each place, numbered lane * slots + slot. `places` (rounds, lanes, slots) is
    the inverse; -1 marks an empty slot.
    """

    order: Tensor
    places: Tensor

    @staticmethod
    def of(participants: Tensor, width: int) -> Packing:
        """Pack `participants` (rounds, lanes, slots) into `width` places.

        Negative entries are empty slots. Participants beyond `width` are dropped.

        >>> packing = Packing.of(torch.tensor([[[4, -1], [7, 9]]]), 3)
        >>> packing.order.tolist(), packing.places.tolist()
        ([[0, 2, 3]], [[[0, -1], [1, 2]]])
        """
        real = participants.flatten(1) >= 0
        order = (~real).to(torch.uint8).sort(dim=1, stable=True).indices[:, :width]
        numbers = torch.arange(width, device=order.device).expand(order.shape)
        places = torch.full(real.shape, -1, device=order.device).scatter_(1, order, numbers)
        return Packing(order, torch.where(real, places, -1).view(participants.shape))

    def rows(self, schedule: Schedule) -> Tensor:
        """Return the batches of the packed slots: (rounds, steps, width, batch)."""
        steps, batch = schedule.rows.shape[1], schedule.rows.shape[3]
        return schedule.rows.gather(2, self.order[:, None, :, None].expand(-1, steps, -1, batch))

    def dropout(self, schedule: Schedule) -> Tensor:
        """Return the dropout keys of the packed slots: (rounds, steps, layers, width)."""
        steps, layers = schedule.dropout.shape[1:3]
        return schedule.dropout.gather(3, self.order[:, None, None, :].expand(-1, steps, layers, -1))
