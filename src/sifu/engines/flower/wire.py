"""Message format between server and clients: named numpy arrays and plain values in Flower's standard records.

A training message holds `arrays` and `config`. Its reply holds `arrays` and `metrics` with `num-examples`, as in
Flower's FedAvg, so an unmodified ClientApp of any framework can take part. Fields specific to sifu are in `config`
(branch, round, client index, local steps, the plan as JSON). One additional query asks each client for its profile.

Clients of a closed-form head send statistics unmasked in one step, or masked in two steps. Unmasked, a client answers
`STATISTICS` with its integer words (`sifu.theory.closed_form.sums`). Masked, the client computes the words on
`PREPARE_STATISTICS` and answers with a key for the round. On `SEND_MASKED_STATISTICS` it receives all clients' keys
and answers with masked words, of which only the sum over all clients can be read. The reply to `STATISTICS` or
`PREPARE_STATISTICS` names the feature map and the number format, so that the server never adds incompatible statistics.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from io import BytesIO
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from numpy.lib.format import read_array_header_1_0, read_array_header_2_0, read_magic
from numpy.typing import NDArray

from sifu.core.engine import Position
from sifu.core.layout import ModelLayout, ModelPieces, Vector, model_pieces
from sifu.engines.masked_updates import Ready
from sifu.engines.plans import (
    FEATURES,
    KEY,
    MASKED,
    NUMBERS,
    ROW_FEATURES,
    ROW_TARGETS,
    WORDS,
    Arrays,
    Instruction,
    Origin,
    Sent,
    WireProfile,
)
from sifu.engines.remote import NO_ROUND, MetricNames, Score
from sifu.errors import InputError
from sifu.theory.arrays import Words
from sifu.theory.closed_form import Rows, Statistics

ARRAYS, CONFIG, METRICS, PROFILE = "arrays", "config", "metrics", "profile"
SAMPLES = "num-examples"
PROFILE_QUERY = "query.sifu_profile"
PROFILE_WANTED = "sifu-profile"
"""Key in `config` of a training message: a sifu client answers with its profile, any other client trains."""
TRAIN, EVALUATE = "train", "evaluate"
PREPARE, MASKED_TRAIN, DRIFT_QUERY = "train.sifu_prepare", "train.sifu_masked", "query.sifu_drift"
"""The three messages of a masked round; a ClientApp without handlers for them never sends an unmasked update."""
DRIFT = "drift"
CHECKPOINT, ROTATIONS = "checkpoint", "key-rotations"
"""Keys in `config` of every message of a run: the latest signed ledger head and the key rotations, as JSON."""
LINKS, LINKS_FROM = "ledger-links", "ledger-links-from"
"""Proof that the head extends event `ledger-links-from`: [time, kind, commitment] of each later event, as JSON."""
SHOW_EVENT = re.compile(r"show event (\d{1,15}):")
"""Pattern of the error with which a client requests the links that start from an event."""
LOSS_KEYS = ("loss", "eval_loss", "eval-loss")
ACCURACY_KEYS = ("accuracy", "eval_acc", "eval_accuracy", "acc")


def instruction_of(message: Message) -> Instruction:
    """Read the instruction of a message.

    Raises:
        InputError: If the message does not come from a sifu server.
    """
    config = message.content[CONFIG]
    return Instruction.of_values(config if isinstance(config, ConfigRecord) else {})


def arrays_record(
    layout: ModelLayout, model: Vector, carried: Mapping[str, NDArray[Any]] = MappingProxyType({})
) -> ArrayRecord:
    """Return a model as named arrays, together with the integer arrays in `carried`."""
    arrays = {**layout.unflatten(model), **carried}
    return ArrayRecord({name: Array(np.ascontiguousarray(array)) for name, array in arrays.items()})


def arrays_of(record: ArrayRecord) -> Arrays:
    """Return the named arrays of a record."""
    return {name: array.numpy() for name, array in record.items()}


def model_message(
    model: ArrayRecord | None,
    instruction: Instruction,
    node: int,
    kind: str,
    timeout: float,
    config: Mapping[str, Any],
) -> Message:
    """Build a message to a node."""
    content = RecordDict({CONFIG: ConfigRecord({**instruction.to_values(), **config})})
    if model is not None:
        content[ARRAYS] = model
    place = instruction.position
    return Message(content, node, kind, ttl=timeout, group_id=f"{place.branch}.{place.round}")


def with_config(message: Message, more: Mapping[str, Any], timeout: float) -> Message:
    """Return a copy of the message with additional `config` entries, to be sent again."""
    place = message.metadata
    content = RecordDict(dict(message.content))
    content[CONFIG] = ConfigRecord({**message.content[CONFIG], **more})  # type: ignore[dict-item]
    return Message(content, place.dst_node_id, place.message_type, ttl=timeout, group_id=place.group_id)


def profile_message(node: int, plan: str, timeout: float) -> Message:
    """Build the message that asks a node for its profile."""
    content = RecordDict({CONFIG: ConfigRecord({**Instruction(NO_ROUND, 0, 1, plan).to_values()})})
    return Message(content, node, PROFILE_QUERY, ttl=timeout, group_id="profile")


def profile_reply(profile: WireProfile, message: Message) -> Message:
    """Build the reply to `profile_message`."""
    content = RecordDict({PROFILE: ConfigRecord({"profile": json.dumps(profile.to_mapping())})})
    return Message(content, reply_to=message)


def read_profile(reply: Message) -> WireProfile:
    """Read the profile in a reply.

    Raises:
        InputError: If the reply holds no valid profile.
    """
    try:
        return WireProfile.of_mapping(json.loads(str(reply.content[PROFILE]["profile"])))
    except (KeyError, ValueError, TypeError) as error:
        raise InputError(f"a node's answer holds no profile ({error})") from error


def read_profile_or_samples(reply: Message) -> WireProfile | int:
    """Return the profile in a reply to a training message with `PROFILE_WANTED`, or the number of samples used."""
    return read_profile(reply) if PROFILE in reply.content else read_arrays(reply)[1]


def in_place(array: Array) -> NDArray[Any]:
    """Return the same values as `array.numpy()`, as a read-only view of the message where possible."""
    stream = BytesIO(array.data)
    read_header = {(1, 0): read_array_header_1_0, (2, 0): read_array_header_2_0}.get(read_magic(stream))
    if array.stype != "numpy.ndarray" or read_header is None:
        return array.numpy()
    shape, by_columns, dtype = read_header(stream)
    if dtype.hasobject or by_columns:
        return array.numpy()
    return np.frombuffer(array.data, dtype, math.prod(shape), stream.tell()).reshape(shape)


Record = TypeVar("Record", ArrayRecord, MetricRecord, ConfigRecord)
NUMBER = (int, float)
KINDS = {ArrayRecord: "array", MetricRecord: "metric", ConfigRecord: "configuration"}


def _only(reply: Message, kind: type[Record]) -> Record:
    """Return the only record of this kind in a reply; raise `InputError` if there is not exactly one."""
    records = [record for record in reply.content.values() if isinstance(record, kind)]
    if len(records) != 1:
        raise InputError(f"the answer holds {len(records)} {KINDS[kind]} records, one was expected")
    return records[0]


def _value(record: MetricRecord | ConfigRecord, key: str, *kinds: type) -> Any:
    """Return the value of `key`; raise `InputError` if it is missing or has none of these types."""
    value = record.get(key)
    if not isinstance(value, kinds):
        wanted = " or ".join(kind.__name__ for kind in kinds)
        raise InputError(f"the answer has no {key!r} of type {wanted}; it has {sorted(record)}")
    return value


def _decoded(reply: Message, only: str = "") -> dict[str, NDArray[Any]]:
    """Return the named arrays of a reply, without copies if possible; if `only` is given, accept no other array."""
    record = _only(reply, ArrayRecord)
    if only and set(record) != {only}:
        raise InputError(f"the answer holds {sorted(record)[:3]}, {only!r} was expected")
    try:
        return {name: in_place(array) for name, array in record.items()}
    except (ValueError, TypeError) as error:
        raise InputError(f"the answer's arrays cannot be read ({error})") from error


def read_arrays(reply: Message) -> tuple[Arrays, int]:
    """Return the named arrays and the number of samples in a reply to `TRAIN`."""
    return _decoded(reply), int(_value(_only(reply, MetricRecord), SAMPLES, *NUMBER))


def read_model(reply: Message, layout: ModelLayout) -> tuple[ModelPieces, int]:
    """Return the model and the number of samples in a reply, not yet validated.

    Missing names or wrong shapes give an empty model. The arrays are views of the message and keep their type; later
    checks refuse a model of the wrong type.
    """
    arrays, samples = read_arrays(reply)
    return model_pieces(arrays, layout), samples


def read_ready(reply: Message) -> Ready:
    """Read the reply to `PREPARE`."""
    metrics = _only(reply, MetricRecord)
    return Ready(int(_value(metrics, SAMPLES, *NUMBER)), bool(_value(metrics, "fits", *NUMBER)), read_key(reply))


def read_key(reply: Message) -> bytes:
    """Return the 32-byte key for a masked round in a reply."""
    key: bytes = _value(_only(reply, ConfigRecord), KEY, bytes)
    if len(key) != 32:
        raise InputError("the answer holds no key for the round")
    return key


def read_masked(reply: Message, size: int) -> Words:
    """Return the `size` masked words of updates or statistics in a reply."""
    words = _decoded(reply, only=MASKED)[MASKED]
    if words.dtype != np.uint64 or words.shape != (size,):
        raise InputError(f"the masked update is {words.dtype} of shape {words.shape}, not {size} words")
    return words


def read_drift(reply: Message, position: Position) -> float:
    """Return the drift in a reply to `DRIFT_QUERY`.

    Raises:
        InputError: If the drift belongs to another round, is negative or is not finite.
    """
    metrics = _only(reply, MetricRecord)
    place = Position(int(_value(metrics, "branch", *NUMBER)), int(_value(metrics, "round", *NUMBER)))
    drift = float(_value(metrics, DRIFT, *NUMBER))
    if place != position:
        raise InputError(
            f"the drift belongs to round {place.branch}.{place.round}, not {position.branch}.{position.round}"
        )
    if not 0.0 <= drift < math.inf:
        raise InputError(f"the drift must be finite and at least 0, found {drift}")
    return drift


def read_score(reply: Message, names: MetricNames) -> Score:
    """Return the score in a reply to an evaluation, in sifu's or Flower's usual format.

    If the reply has an accuracy but no loss, the number of wrong predictions serves as the loss.
    """
    metrics = _only(reply, MetricRecord)
    samples = int(_value(metrics, SAMPLES, *NUMBER))
    like_a_loss = sorted(key for key in metrics if "loss" in key.lower())
    loss = names.loss or next((key for key in (*LOSS_KEYS, *like_a_loss) if key in metrics), None)
    accuracy = names.accuracy or next((key for key in ACCURACY_KEYS if key in metrics), None)
    if "correct" in metrics:
        correct = int(_value(metrics, "correct", *NUMBER))
    else:
        correct = round(samples * _value(metrics, accuracy, *NUMBER)) if accuracy else 0
    if "loss-sum" in metrics:
        loss_sum = _value(metrics, "loss-sum", *NUMBER)
    elif loss is None and accuracy is not None:
        loss_sum = float(samples - correct)
    else:
        loss_sum = samples * _value(metrics, loss or "loss", *NUMBER)
    if samples < 1 or not 0 <= correct <= samples or not math.isfinite(loss_sum):
        raise InputError(
            f"the evaluation reports {correct} of {samples} predictions as correct and a loss of {loss_sum}"
        )
    return samples, correct, loss_sum


STATISTICS = "train.sifu_statistics"
PREPARE_STATISTICS, SEND_MASKED_STATISTICS = "train.sifu_prepare_statistics", "train.sifu_masked_statistics"


def origin_records(origin: Origin, key: bytes | None = None) -> dict[str, MetricRecord | ConfigRecord]:
    """Return the origin as Flower records, with the key of a masked round if given."""
    config: dict[str, str | bytes] = {FEATURES: origin.features, NUMBERS: origin.numbers}
    if key is not None:
        config[KEY] = key
    return {METRICS: MetricRecord({SAMPLES: origin.samples}), CONFIG: ConfigRecord(config)}  # type: ignore[arg-type]


def read_origin(reply: Message) -> Origin:
    """Read the origin of the statistics in a reply."""
    config = _only(reply, ConfigRecord)
    samples = _value(_only(reply, MetricRecord), SAMPLES, int)
    return Origin(samples, _value(config, FEATURES, str), _value(config, NUMBERS, str))


def statistics_arrays(sent: Statistics | Rows) -> ArrayRecord:
    """Return statistics, or rows, as a Flower record."""
    if isinstance(sent, Rows):
        return ArrayRecord({ROW_FEATURES: Array(sent.features), ROW_TARGETS: Array(sent.targets)})
    return ArrayRecord({WORDS: Array(sent.words)})


def read_statistics_sent(reply: Message) -> tuple[Origin, Sent]:
    """Read the reply to `STATISTICS`; the values are not yet validated."""
    if set(_only(reply, ArrayRecord)) == {ROW_FEATURES, ROW_TARGETS}:
        arrays = _decoded(reply)
        return read_origin(reply), (arrays[ROW_FEATURES], arrays[ROW_TARGETS])
    words = _decoded(reply, only=WORDS)[WORDS]
    if words.dtype != np.int64 or words.ndim != 1:
        raise InputError(f"the statistics are {words.dtype} of shape {words.shape}, not whole numbers")
    return read_origin(reply), words


def read_prepared(reply: Message) -> tuple[Origin, bytes]:
    """Return the origin of the statistics and the round key in a reply to `PREPARE_STATISTICS`."""
    return read_origin(reply), read_key(reply)
