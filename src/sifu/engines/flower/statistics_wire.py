"""Messages of closed-form heads: statistics in the clear, or masked in two steps.

In the clear a client answers `STATISTICS` with its words (`sifu.theory.closed_form.sums`). Masked, it computes
them at `PREPARE_STATISTICS` and answers with a key for the round, and at `SEND_MASKED_STATISTICS`, given everybody's
keys, with words that only the sum of all can be read from. Either way it says which feature map it used and how its
numbers are written, so that nothing else is ever added up.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord

from sifu.engines.flower.wire import ARRAYS, CONFIG, KEY, METRICS, SAMPLES, read_key
from sifu.errors import InputError
from sifu.theory.arrays import Integers

STATISTICS = "train.sifu_statistics"
PREPARE_STATISTICS, SEND_MASKED_STATISTICS = "train.sifu_prepare_statistics", "train.sifu_masked_statistics"
WORDS, FEATURES, NUMBERS = "statistics", "features", "numbers"


@dataclass(frozen=True)
class Origin:
    """What statistics were computed from: how many samples, through which map (digest), written how."""

    samples: int
    features: str
    numbers: str


def origin_records(origin: Origin, key: bytes | None = None) -> dict[str, MetricRecord | ConfigRecord]:
    """As Flower carries it, with a key for a masked round."""
    config: dict[str, str | bytes] = {FEATURES: origin.features, NUMBERS: origin.numbers}
    if key is not None:
        config[KEY] = key
    return {METRICS: MetricRecord({SAMPLES: origin.samples}), CONFIG: ConfigRecord(config)}  # type: ignore[arg-type]


def read_origin(reply: Message) -> Origin:
    """What a reply says of where its statistics come from."""
    metrics, config = reply.content.get(METRICS), reply.content.get(CONFIG)
    if not isinstance(metrics, MetricRecord) or not isinstance(config, ConfigRecord):
        raise InputError("the answer does not say what its statistics were computed from")
    samples, features, numbers = metrics.get(SAMPLES), config.get(FEATURES), config.get(NUMBERS)
    if not isinstance(samples, int) or not isinstance(features, str) or not isinstance(numbers, str):
        raise InputError("the answer does not say what its statistics were computed from")
    return Origin(samples, features, numbers)


def read_statistics_words(reply: Message) -> tuple[Origin, Integers]:
    """The answer to `STATISTICS`, its words not yet checked."""
    record = reply.content.get(ARRAYS)
    if not isinstance(record, ArrayRecord) or set(record) != {WORDS}:
        raise InputError("the answer holds no statistics")
    try:
        words = record[WORDS].numpy()
    except (ValueError, TypeError) as error:
        raise InputError(f"the statistics cannot be read ({error})") from error
    if words.dtype != np.int64 or words.ndim != 1:
        raise InputError(f"the statistics are {words.dtype} of shape {words.shape}, not whole numbers")
    return read_origin(reply), words


def read_prepared(reply: Message) -> tuple[Origin, bytes]:
    """The answer to `PREPARE_STATISTICS`: where the statistics come from, and a key."""
    key = read_key(reply)
    return read_origin(reply), key
