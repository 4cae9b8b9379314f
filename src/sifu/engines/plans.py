"""Settings, instructions and profiles that server and clients exchange, whatever the transport."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sifu.core.engine import Position
from sifu.errors import InputError
from sifu.theory.arrays import Integers
from sifu.theory.closed_form.rows import RowNumbers
from sifu.theory.facts import ClientProfile

Arrays = dict[str, NDArray[np.floating]]
WORDS, FEATURES, NUMBERS = "statistics", "features", "numbers"
ROW_FEATURES, ROW_TARGETS = "row-features", "row-targets"
KEY, MASKED = "key", "masked"
"""Names of the values in a client's reply for a closed-form head."""
BOUNDS = ("expansion", "rate", "steepness", "batch_ratio", "energy", "target_norm")
"""Names of the optional bounds in a client's profile; each bound is a number or None."""


@dataclass(frozen=True)
class WirePlan:
    """Settings that every client of a built-in model needs, identical in every message.

    `features` is the spec's `[features]` section as JSON if samples pass through a public feature map, and `ridge` the
    `[ridge]` section if the head is solved in closed form.
    """

    model: str
    outputs: int
    init: str
    dtype: str
    seed: int
    rate: float | None
    steps: int
    batch: int
    momentum: float
    weight_decay: float
    features: str = ""
    ridge: str = ""

    def to_text(self) -> str:
        """Return the plan as JSON."""
        return json.dumps(asdict(self), sort_keys=True)

    @staticmethod
    def of_text(text: str) -> WirePlan:
        """Parse a plan from JSON."""
        return WirePlan(**json.loads(text))


@dataclass(frozen=True)
class Instruction:
    """Instructions sent with a model: position in the run, number of local steps, and plan.

    `client` is the client's index in the federation, which seeds its batches. `plan` is empty unless the model is built
    in.
    """

    position: Position
    client: int
    steps: int
    plan: str = ""

    def to_values(self) -> dict[str, int | str]:
        """Return the instruction as plain values, ready for JSON."""
        return {
            "branch": self.position.branch,
            "round": self.position.round,
            "server-round": self.position.round + 1,
            "client": self.client,
            "steps": self.steps,
            "plan": self.plan,
        }

    @staticmethod
    def of_values(values: Mapping[str, Any]) -> Instruction:
        """Read an instruction from plain values.

        Raises:
            InputError: If the values do not come from a sifu server.
        """
        keys = ("branch", "round", "client", "steps")
        if not {*keys, "plan"} <= set(values):
            raise InputError("the message was not sent by a sifu server: it names no branch, round and client")
        branch, round_number, client, steps = (int(values[key]) for key in keys)
        return Instruction(Position(branch, round_number), client, steps, str(values["plan"]))


@dataclass(frozen=True)
class WireProfile:
    """A `ClientProfile` plus the values a server needs to build a built-in model and to bound its rounding errors.

    `input_shape` and `outputs` describe the client's data. `rate`, `steepness`, `batch_ratio`, `energy` and
    `target_norm` are those of `engines.sim.float_rounding.ClientSizes`; None means that no bound is proven.
    """

    name: str
    samples: int
    local_steps: int
    expansion: float | None = None
    input_shape: tuple[int, ...] = ()
    outputs: int = 0
    rate: float | None = None
    steepness: float | None = None
    batch_ratio: float | None = None
    energy: float | None = None
    target_norm: float | None = None

    @property
    def client(self) -> ClientProfile:
        """Profile without the values that only built-in models need."""
        return ClientProfile(self.name, self.samples, self.local_steps, self.expansion)

    def to_mapping(self) -> dict[str, Any]:
        """Return the profile as plain values, ready for JSON."""
        return asdict(self) | {"input_shape": list(self.input_shape)}

    @staticmethod
    def of_mapping(values: Mapping[str, Any]) -> WireProfile:
        """Parse and validate a profile received from a client.

        Raises:
            InputError: If a value is missing, has the wrong type or is out of range.
        """
        try:
            shape = tuple(int(length) for length in values["input_shape"])
            # Bounds may arrive as integers, because the store's JSON writes 1.0 as 1.
            bounds = {key: values.get(key) for key in BOUNDS}
            numbers = {key: float(bound) if type(bound) is int else bound for key, bound in bounds.items()}
            profile = WireProfile(**{**values, **numbers, "input_shape": shape})
            sound = (
                isinstance(profile.name, str)
                and all(isinstance(count, int) for count in (profile.samples, profile.local_steps))
                and 0 < profile.samples < 2**53
                and 0 < profile.local_steps <= 10**6
                and (profile.expansion is None or 0.0 < profile.expansion <= 1.0)
                and all(
                    bound is None or (type(bound) is float and 0.0 <= bound < math.inf) for bound in numbers.values()
                )
            )
        except (TypeError, ValueError, KeyError) as error:
            raise InputError(f"a client's profile cannot be read ({error})") from error
        if not sound:
            raise InputError(f"a client reported a profile that cannot be used: {dict(values)!r}"[:300])
        return profile


Sent = Integers | tuple[RowNumbers, RowNumbers]
"""Words of statistics, or features and targets of rows."""


@dataclass(frozen=True)
class Origin:
    """Origin of statistics: number of samples, digest of the feature map, and number format."""

    samples: int
    features: str
    numbers: str
