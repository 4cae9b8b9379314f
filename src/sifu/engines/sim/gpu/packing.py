"""Only slots that hold a client are trained: the participants of all lanes, side by side without gaps.

A lane has as many slots as it may have participants. Groups of unequal size, or a random number of participants, leave
some of them empty, and an empty slot costs as much as a full one. So the slots of all lanes are packed into `width`
places, those that hold a client first, in the order of lanes and slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sifu.engines.sim.gpu.schedule import Schedule


def rounded_up(needed: int) -> int:
    """A width that programs are made for: at least `needed`, by at most a sixteenth more, so that few differ.

    >>> rounded_up(7), rounded_up(99), rounded_up(497)
    (7, 100, 512)
    """
    step = 1 << max(0, needed.bit_length() - 5)
    return -(-needed // step) * step


@dataclass(frozen=True)
class Packing:
    """Where slots lie: `order` (rounds, width) numbers the slots of all lanes, lane * slots + slot; `places` (rounds,
    lanes, slots) is the inverse, -1 for an empty slot."""

    order: Tensor
    places: Tensor

    @staticmethod
    def of(participants: Tensor, width: int) -> Packing:
        """Pack `participants` (rounds, lanes, slots), of whom negative ones are none; more than `width` are left out.

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
        """The batches of the packed slots: (rounds, steps, width, batch)."""
        steps, batch = schedule.rows.shape[1], schedule.rows.shape[3]
        return schedule.rows.gather(2, self.order[:, None, :, None].expand(-1, steps, -1, batch))

    def dropout(self, schedule: Schedule) -> Tensor:
        """The dropout keys of the packed slots: (rounds, steps, layers, width)."""
        steps, layers = schedule.dropout.shape[1:3]
        return schedule.dropout.gather(3, self.order[:, None, None, :].expand(-1, steps, layers, -1))
