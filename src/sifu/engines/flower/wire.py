"""What travels between server and clients: named numpy arrays and plain values, in Flower's own usual records.

A training message holds `arrays` and `config` and is answered by `arrays` and `metrics` with `num-examples`, as
Flower's FedAvg has it: a ClientApp written for that takes part as it is, in any framework. What is ours stands in
`config` (branch, round, the client's number, the local steps, the plan as JSON), and there is one query more, the
client's profile, asked once.

Clients of a closed-form head send statistics in the clear, or masked in two steps. In the clear a client answers
`STATISTICS` with its words (`sifu.theory.closed_form.sums`). Masked, it computes them at `PREPARE_STATISTICS` and
answers with a key for the round, and at `SEND_MASKED_STATISTICS`, given everybody's keys, with words that only the sum
of all can be read from. Either way it says which feature map it used and how its numbers are written, so that nothing
else is ever added up.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from io import BytesIO
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from numpy.lib.format import read_array_header_1_0, read_array_header_2_0, read_magic
from numpy.typing import NDArray

from sifu.core.engine import Position
from sifu.core.layout import ModelLayout, ModelPieces, Vector, model_pieces
from sifu.engines.remote import USUAL_METRICS, MetricNames, Score
from sifu.errors import InputError
from sifu.theory.arrays import Integers, Words
from sifu.theory.closed_form import Rows, Statistics
from sifu.theory.closed_form.rows import RowNumbers
from sifu.theory.facts import ClientProfile

Arrays = dict[str, NDArray[np.floating]]
ARRAYS, CONFIG, METRICS, PROFILE = "arrays", "config", "metrics", "profile"
NETWORK = "network-"
"""Begins the names of the records that hold what groups tuned of a network: `network-0`, `network-1`, ..."""
SAMPLES = "num-examples"
PROFILE_QUERY = "query.sifu_profile"
PROFILE_WANTED = "sifu-profile"
"""In `config` of a training: a client that knows us answers with its profile, any other one trains."""
TRAIN, EVALUATE = "train", "evaluate"
EVALUATE_SEVERAL = "evaluate.sifu_several"
"""An evaluation of several models, in `arrays-0`, `arrays-1`, ...; asked of clients whose profile says `several`."""
PREPARE, MASKED_TRAIN, DRIFT_QUERY = "train.sifu_prepare", "train.sifu_masked", "query.sifu_drift"
"""The three messages of a masked round; a ClientApp that does not know them answers none of them in the clear."""
KEY, MASKED, DRIFT = "key", "masked", "drift"
CHECKPOINT, ROTATIONS = "checkpoint", "key-rotations"
"""In `config` of every message of a run: the latest signed head of its ledger, and its changes of keys, as JSON."""
LINKS, LINKS_FROM = "ledger-links", "ledger-links-from"
"""How that head follows from event `ledger-links-from`: [time, kind, commitment] of every event since, as JSON."""
SHOW_EVENT = re.compile(r"show event (\d{1,15}):")
"""How a client says from which event on it wants to see the links."""
LOSS_KEYS = ("loss", "eval_loss", "eval-loss")
BOUNDS = ("smoothness", "curvature", "batch_ratio", "energy", "target_norm")
"""What a profile says of its client's loss, each a number or None."""
ACCURACY_KEYS = ("accuracy", "eval_acc", "eval_accuracy", "acc")


@dataclass(frozen=True)
class WirePlan:
    """What every client of a ready-made model must know, the same in every message.

    `features` is the section `[features]` of the spec as JSON where samples go through a public map first, `ridge` the
    section `[ridge]` where the head is solved in closed form. `groups` is how many tune the map's network (0: it stays
    as it is), and `stretch` how far their merge moves on.
    """

    model: str
    outputs: int
    init: str
    dtype: str
    seed: int
    rate: float
    steps: int
    batch: int
    momentum: float
    nesterov: bool
    weight_decay: float
    clip: float = 0.0
    features: str = ""
    ridge: str = ""
    groups: int = 0
    stretch: float = 1.0

    def to_text(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self), sort_keys=True)

    @staticmethod
    def of_text(text: str) -> WirePlan:
        """From JSON."""
        return WirePlan(**json.loads(text))


@dataclass(frozen=True)
class Instruction:
    """What a message asks of a client besides the model: where it stands, how many local steps, and the plan.

    `client` is its number among all, which its batches are drawn for. `plan` is empty unless the model is ready-made.
    `networks` are what groups tuned of the network that features go through, by group.
    """

    position: Position
    client: int
    steps: int
    plan: str = ""
    networks: Mapping[int, Arrays] = field(default_factory=dict)

    def to_record(self) -> ConfigRecord:
        """As Flower carries it."""
        return ConfigRecord(
            {
                "branch": self.position.branch,
                "round": self.position.round,
                "server-round": self.position.round + 1,
                "client": self.client,
                "steps": self.steps,
                "plan": self.plan,
            }
        )

    @staticmethod
    def of(message: Message) -> Instruction:
        """Of a message of ours."""
        config, keys = message.content[CONFIG], ("branch", "round", "client", "steps")
        if not isinstance(config, ConfigRecord) or not {*keys, "plan"} <= set(config):
            raise InputError("the message was not sent by a sifu server: it names no branch, round and client")
        branch, round_number, client, steps = (int(config[key]) for key in keys)  # type: ignore[arg-type]
        networks = {
            int(name.removeprefix(NETWORK)): arrays_of(record)
            for name, record in message.content.array_records.items()
            if name.startswith(NETWORK)
        }
        return Instruction(Position(branch, round_number), client, steps, str(config["plan"]), networks)


@dataclass(frozen=True)
class WireProfile:
    """A `ClientProfile`, and what a server needs to build a ready-made model and to bound its rounding.

    `input_shape` and `outputs` are those of the client's data; `batch_ratio`, `energy` and `target_norm` are those of
    `engines.sim.float_rounding`, None where nothing is proven. `several` says that it evaluates several models at once.
    """

    name: str
    samples: int
    local_steps: int
    smoothness: float | None = None
    curvature: float | None = None
    input_shape: tuple[int, ...] = ()
    outputs: int = 0
    batch_ratio: float | None = None
    energy: float | None = None
    target_norm: float | None = None
    several: bool = False

    @property
    def client(self) -> ClientProfile:
        """What every engine knows of a client."""
        return ClientProfile(self.name, self.samples, self.local_steps, self.smoothness, self.curvature)

    def to_mapping(self) -> dict[str, Any]:
        """As plain values, ready for JSON."""
        return asdict(self) | {"input_shape": list(self.input_shape)}

    @staticmethod
    def of_mapping(values: Mapping[str, Any]) -> WireProfile:
        """From plain values, checked: a client must not break the server."""
        try:
            shape = tuple(int(length) for length in values["input_shape"])
            # The store's JSON writes 1.0 as 1.
            bounds = {key: values.get(key) for key in BOUNDS}
            numbers = {key: float(bound) if type(bound) is int else bound for key, bound in bounds.items()}
            profile = WireProfile(**{**values, **numbers, "input_shape": shape})
            sound = (
                isinstance(profile.name, str)
                and isinstance(profile.several, bool)
                and all(isinstance(count, int) for count in (profile.samples, profile.local_steps))
                and 0 < profile.samples < 2**53
                and 0 < profile.local_steps <= 10**6
                and all(
                    bound is None or (type(bound) is float and 0.0 <= bound < math.inf) for bound in numbers.values()
                )
            )
        except (TypeError, ValueError, KeyError) as error:
            raise InputError(f"a client's profile cannot be read ({error})") from error
        if not sound:
            raise InputError(f"a client reported a profile that cannot be used: {dict(values)!r}"[:300])
        return profile


def arrays_record(
    layout: ModelLayout, model: Vector, carried: Mapping[str, NDArray[Any]] = MappingProxyType({})
) -> ArrayRecord:
    """A model as named arrays, with those of whole numbers that it carries along."""
    arrays = {**layout.unflatten(model), **carried}
    return ArrayRecord({name: Array(np.ascontiguousarray(array)) for name, array in arrays.items()})


def arrays_of(record: ArrayRecord) -> Arrays:
    """The named arrays of a record."""
    return {name: array.numpy() for name, array in record.items()}


def in_order(arrays: Mapping[str, NDArray[Any]]) -> NDArray[Any]:
    """Named arrays as one vector, by name: both sides of a masked round agree on it without a layout."""
    return np.concatenate([arrays[name].reshape(-1) for name in sorted(arrays)])


def model_message(
    models: ArrayRecord | Sequence[ArrayRecord] | None,
    instruction: Instruction,
    node: int,
    kind: str,
    timeout: float,
    more: Mapping[str, Any] | None = None,
    networks: Mapping[int, ArrayRecord] = MappingProxyType({}),
) -> Message:
    """A message, mostly with a model, or several; its answer is worth nothing after `timeout` seconds."""
    content = RecordDict({CONFIG: ConfigRecord({**instruction.to_record(), **(more or {})})})
    if isinstance(models, ArrayRecord):
        content[ARRAYS] = models
    elif models is not None:
        for number, model in enumerate(models):
            content[f"{ARRAYS}-{number}"] = model
    for group, network in networks.items():
        content[f"{NETWORK}{group}"] = network
    place = instruction.position
    return Message(content, node, kind, ttl=timeout, group_id=f"{place.branch}.{place.round}")


def with_config(message: Message, more: Mapping[str, Any], timeout: float) -> Message:
    """The same message to be sent again, with more in its configuration."""
    place = message.metadata
    content = RecordDict(dict(message.content))
    content[CONFIG] = ConfigRecord({**message.content[CONFIG], **more})  # type: ignore[dict-item]
    return Message(content, place.dst_node_id, place.message_type, ttl=timeout, group_id=place.group_id)


def profile_message(node: int, plan: str, timeout: float) -> Message:
    """Asks a node who it is and what it has."""
    content = RecordDict({CONFIG: Instruction(Position(0, 0), 0, 1, plan).to_record()})
    return Message(content, node, PROFILE_QUERY, ttl=timeout, group_id="profile")


def profile_reply(profile: WireProfile, message: Message) -> Message:
    """The answer to `profile_message`."""
    content = RecordDict({PROFILE: ConfigRecord({"profile": json.dumps(profile.to_mapping())})})
    return Message(content, reply_to=message)


def read_profile(reply: Message) -> WireProfile:
    """The profile in a reply."""
    try:
        return WireProfile.of_mapping(json.loads(str(reply.content[PROFILE]["profile"])))
    except (KeyError, ValueError, TypeError) as error:
        raise InputError(f"a node's answer holds no profile ({error})") from error


def read_profile_or_samples(reply: Message) -> WireProfile | int:
    """Return the profile in a reply to a training with `PROFILE_WANTED`, or the number of samples trained on."""
    return read_profile(reply) if PROFILE in reply.content else read_arrays(reply)[1]


def in_place(array: Array) -> NDArray[Any]:
    """What `array.numpy()` gives, read where it lies in the message: not writable, and no copy."""
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
    """The one record of a kind in a reply."""
    records = [record for record in reply.content.values() if isinstance(record, kind)]
    if len(records) != 1:
        raise InputError(f"the answer holds {len(records)} {KINDS[kind]} records, one was expected")
    return records[0]


def _value(record: MetricRecord | ConfigRecord, key: str, *kinds: type) -> Any:
    """A value of one of these types, by its name."""
    value = record.get(key)
    if not isinstance(value, kinds):
        wanted = " or ".join(kind.__name__ for kind in kinds)
        raise InputError(f"the answer has no {key!r} of type {wanted}; it has {sorted(record)}")
    return value


def _decoded(reply: Message, only: str = "") -> dict[str, NDArray[Any]]:
    """The named arrays of a reply, read where they lie in it; with `only`, of that name alone."""
    record = _only(reply, ArrayRecord)
    if only and set(record) != {only}:
        raise InputError(f"the answer holds {sorted(record)[:3]}, {only!r} was expected")
    try:
        return {name: in_place(array) for name, array in record.items()}
    except (ValueError, TypeError) as error:
        raise InputError(f"the answer's arrays cannot be read ({error})") from error


def read_arrays(reply: Message) -> tuple[Arrays, int]:
    """The named arrays and the number of samples in a reply to `TRAIN`."""
    return _decoded(reply), int(_value(_only(reply, MetricRecord), SAMPLES, *NUMBER))


def read_model(reply: Message, layout: ModelLayout) -> tuple[ModelPieces, int]:
    """The model and the number of samples in a reply, not yet checked; other names or shapes give an empty model.

    It is read where it lies in the message. Nothing is cast: an array of another type gives a model of that type,
    which is then refused for it.
    """
    arrays, samples = read_arrays(reply)
    return model_pieces(arrays, layout), samples


@dataclass(frozen=True)
class Ready:
    """A client that has trained for a masked round: its samples, whether its update fits the range, its key."""

    samples: int
    fits: bool
    key: bytes


def read_ready(reply: Message) -> Ready:
    """The answer to `PREPARE`."""
    metrics = _only(reply, MetricRecord)
    return Ready(int(_value(metrics, SAMPLES, *NUMBER)), bool(_value(metrics, "fits", *NUMBER)), read_key(reply))


def read_key(reply: Message) -> bytes:
    """The key for a masked round in a reply."""
    key: bytes = _value(_only(reply, ConfigRecord), KEY, bytes)
    if len(key) != 32:
        raise InputError("the answer holds no key for the round")
    return key


def read_masked(reply: Message, size: int) -> Words:
    """The answer to `MASKED_TRAIN`: `size` words."""
    words = _decoded(reply, only=MASKED)[MASKED]
    if words.dtype != np.uint64 or words.shape != (size,):
        raise InputError(f"the masked update is {words.dtype} of shape {words.shape}, not {size} words")
    return words


def read_drift(reply: Message, position: Position) -> float:
    """The answer to `DRIFT_QUERY`: a number for this very round."""
    metrics = _only(reply, MetricRecord)
    place = Position(int(_value(metrics, "branch", *NUMBER)), int(_value(metrics, "round", *NUMBER)))
    drift = float(_value(metrics, DRIFT, *NUMBER))
    if place != position:
        raise InputError(f"the drift is that of round {place.branch}.{place.round}")
    if not 0.0 <= drift < math.inf:
        raise InputError(f"the drift is {drift}")
    return drift


def read_score(reply: Message, names: MetricNames = USUAL_METRICS) -> Score:
    """Samples, correct predictions and the sum of losses in an evaluation's reply, ours or Flower's usual one.

    Without any loss it is the number of wrong predictions.
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
        raise InputError(f"the evaluation says {correct} of {samples} right with losses of {loss_sum}")
    return samples, correct, loss_sum


def read_scores(reply: Message, count: int) -> list[Score]:
    """Samples, correct predictions and the sum of losses of each of `count` models; a loss may be infinite."""
    metrics = _only(reply, MetricRecord)
    columns = [metrics.get(key) for key in (SAMPLES, "correct", "loss-sum")]
    scores: list[Score] = []
    if all(isinstance(column, list) and len(column) == count for column in columns):
        scores = [(int(n), int(right), float(loss)) for n, right, loss in zip(*columns, strict=True)]
    if not scores or any(n < 1 or not 0 <= right <= n for n, right, _ in scores):
        raise InputError(f"the answer does not hold {count} evaluations")
    return scores


STATISTICS = "train.sifu_statistics"
PREPARE_STATISTICS, SEND_MASKED_STATISTICS = "train.sifu_prepare_statistics", "train.sifu_masked_statistics"
WORDS, FEATURES, NUMBERS = "statistics", "features", "numbers"
ROW_FEATURES, ROW_TARGETS = "row-features", "row-targets"
Sent = Integers | tuple[RowNumbers, RowNumbers]
"""The words of statistics, or the features and targets of rows."""


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
    config = _only(reply, ConfigRecord)
    samples = _value(_only(reply, MetricRecord), SAMPLES, int)
    return Origin(samples, _value(config, FEATURES, str), _value(config, NUMBERS, str))


def statistics_arrays(sent: Statistics | Rows) -> ArrayRecord:
    """Return statistics, or rows, as Flower carries them."""
    if isinstance(sent, Rows):
        return ArrayRecord({ROW_FEATURES: Array(sent.features), ROW_TARGETS: Array(sent.targets)})
    return ArrayRecord({WORDS: Array(sent.words())})


def read_statistics_sent(reply: Message) -> tuple[Origin, Sent]:
    """The answer to `STATISTICS`, its numbers not yet checked."""
    if set(_only(reply, ArrayRecord)) == {ROW_FEATURES, ROW_TARGETS}:
        arrays = _decoded(reply)
        return read_origin(reply), (arrays[ROW_FEATURES], arrays[ROW_TARGETS])
    words = _decoded(reply, only=WORDS)[WORDS]
    if words.dtype != np.int64 or words.ndim != 1:
        raise InputError(f"the statistics are {words.dtype} of shape {words.shape}, not whole numbers")
    return read_origin(reply), words


def read_prepared(reply: Message) -> tuple[Origin, bytes]:
    """The answer to `PREPARE_STATISTICS`: where the statistics come from, and a key."""
    return read_origin(reply), read_key(reply)
