"""A node's answers to messages of masked rounds and of closed-form heads (docs/theory.md, section 11).

An update takes three messages, and the local model never leaves the client:

1. `train.sifu_prepare`: train, keep theta_c and its update, and answer with a key made for this round.
2. `train.sifu_masked`: answer with the masked update, given the keys of all participants. An update that exceeds the
   range is not sent, and nothing is clipped.
3. `query.sifu_drift`: given the mean, answer with drift_c = ||theta_c - mean||. A client answers for one mean per
   round, since distances to many points would reveal theta_c itself.

Statistics of a closed-form head take only the first two messages. If a round is repeated because another client went
missing, the client reuses the statistics it kept and makes a new key.

State between two messages is stored in `Context.state`, which a node keeps in memory for the run. A restarted node has
lost this state and answers with an error. Its drift is then unknown, and the server treats its Psi as unbounded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from sifu.engines.flower.wire import (
    ARRAYS,
    CONFIG,
    DRIFT,
    DRIFT_QUERY,
    MASKED_TRAIN,
    METRICS,
    PREPARE,
    PREPARE_STATISTICS,
    SAMPLES,
    SEND_MASKED_STATISTICS,
    STATISTICS,
    arrays_of,
    instruction_of,
    origin_records,
    statistics_arrays,
)
from sifu.engines.masked_updates import prepared_update
from sifu.engines.masks import counted_words, in_order, mask, mask_context, new_secret, public_part
from sifu.engines.plans import KEY, MASKED, WORDS, Arrays, Origin
from sifu.errors import InputError
from sifu.theory.closed_form import Rows, Statistics
from sifu.theory.rounding import UNIT_ROUNDOFF, norm_up, up

Train = Callable[[Message, Context], tuple[Arrays, int]]
"""Function that trains and returns the trained arrays and the number of samples."""
UPDATE, HEAD = "sifu-round", "sifu-statistics"
"""Names in `Context.state` of the values kept for updates and for statistics; `_keep` stores arrays separately."""


def _keep(context: Context, name: str, arrays: Mapping[str, Any], **values: Any) -> bytes:
    """Keep the state of a round, make its key pair, and return the public key."""
    secret = new_secret()
    context.state[name] = ConfigRecord({**values, "secret": secret})
    context.state[f"{name}-{ARRAYS}"] = ArrayRecord({key: Array(array) for key, array in arrays.items()})
    return public_part(secret)


def _kept(message: Message, context: Context, name: str) -> tuple[ConfigRecord, Arrays]:
    """Return the values and arrays kept for the round of this message; raise `InputError` if there are none."""
    kept, arrays = context.state.get(name), context.state.get(f"{name}-{ARRAYS}")
    position = instruction_of(message).position
    same = isinstance(kept, ConfigRecord) and kept.get("place") == _place(message)
    if not same or not isinstance(kept, ConfigRecord) or not isinstance(arrays, ArrayRecord):
        raise InputError(f"this node has no state of round {position.branch}.{position.round}: it was restarted")
    return kept, arrays_of(arrays)


def _place(message: Message) -> str:
    """Return an identifier of the round and the plan to which kept state belongs."""
    instruction = instruction_of(message)
    plan = hashlib.sha256(instruction.plan.encode()).hexdigest()
    return f"{instruction.position.branch}.{instruction.position.round} {plan}"


def _send_masked(message: Message, context: Context, name: str) -> Message:
    """Return the kept words, masked with the keys of all participants."""
    instruction, (kept, arrays) = instruction_of(message), _kept(message, context, name)
    position, config = instruction.position, message.content[CONFIG]
    if "secret" not in kept:
        raise InputError(f"the masked update of round {position.branch}.{position.round} was already sent")
    if WORDS not in arrays:
        raise InputError("the update does not fit the range: it was not sent")
    keys: dict[int, bytes] = dict(zip(config["clients"], config["keys"], strict=True))  # type: ignore[arg-type]
    context_of_masks = mask_context(position, of_statistics=name == HEAD)
    sent = mask(arrays[WORDS].view(np.uint64), bytes(kept["secret"]), instruction.client, keys, context_of_masks)  # type: ignore[arg-type]
    # Delete the key, so that no message can make this client mask the same round twice with it.
    context.state[name] = ConfigRecord({key: value for key, value in kept.items() if key != "secret"})
    return Message(RecordDict({ARRAYS: ArrayRecord({MASKED: Array(sent)})}), reply_to=message)


def add_masking(app: ClientApp, train: Train) -> ClientApp:
    """Register the handlers of masked rounds with an app; `train` is its usual training."""

    @app.train(PREPARE.partition(".")[2])
    def prepare(message: Message, context: Context) -> Message:
        start, config = arrays_of(message.content[ARRAYS]), message.content[CONFIG]  # type: ignore[arg-type]
        trained, samples = train(message, context)
        local, words = prepared_update(start, trained, samples, config)  # type: ignore[arg-type]
        arrays = {"local": local} | ({} if words is None else {WORDS: words})
        key = _keep(context, UPDATE, arrays, place=_place(message))
        metrics = MetricRecord({SAMPLES: samples, "fits": int(words is not None)})
        return Message(RecordDict({METRICS: metrics, CONFIG: ConfigRecord({KEY: key})}), reply_to=message)

    @app.train(MASKED_TRAIN.partition(".")[2])
    def masked(message: Message, context: Context) -> Message:
        reply = _send_masked(message, context, UPDATE)
        local = context.state[f"{UPDATE}-{ARRAYS}"]["local"]
        context.state[f"{UPDATE}-{ARRAYS}"] = ArrayRecord({"local": local})  # type: ignore[dict-item]
        return reply

    @app.query(DRIFT_QUERY.partition(".")[2])
    def tell_drift(message: Message, context: Context) -> Message:
        (kept, arrays), position = _kept(message, context, UPDATE), instruction_of(message).position
        mean = in_order(arrays_of(message.content[ARRAYS]))  # type: ignore[arg-type]
        if mean.shape != arrays["local"].shape:
            raise InputError(f"the mean has {mean.size} parameters, the model {arrays['local'].size}")
        exact = arrays["local"].astype(np.float64)
        # The mean was sent as float64, so each entry has an error of at most u |entry|.
        drift = up(norm_up(exact - mean) + 4.0 * UNIT_ROUNDOFF * (norm_up(mean) + norm_up(exact)))
        digest = hashlib.sha256(np.ascontiguousarray(mean).data).hexdigest()
        if kept.get("mean", digest) != digest:
            raise InputError("this client has already reported its distance to another mean of the round")
        context.state[UPDATE] = ConfigRecord({**kept, "mean": digest})
        metrics = MetricRecord({DRIFT: drift, "branch": position.branch, "round": position.round})
        return Message(RecordDict({METRICS: metrics}), reply_to=message)

    return app


def add_statistics(app: ClientApp, make_client: Callable[[Context], object], *, masked_only: bool) -> ClientApp:
    """Register the handlers of closed-form heads with an app; with `masked_only`, refuse to send unmasked statistics.

    Only a client with a method `statistics` can answer.
    """

    def computed(message: Message, context: Context) -> tuple[Statistics | Rows, Origin]:
        client: Any = make_client(context)
        if not hasattr(client, "statistics"):
            raise InputError("this client computes no statistics: a head in closed form needs a ReadyClient")
        sent: tuple[Statistics | Rows, Origin] = client.statistics(instruction_of(message))
        return sent

    @app.train(STATISTICS.partition(".")[2])
    def in_the_clear(message: Message, context: Context) -> Message:
        if masked_only:
            raise InputError(
                "this client sends masked statistics only: the server must run with masked-statistics = true"
            )
        statistics, origin = computed(message, context)
        content = RecordDict({ARRAYS: statistics_arrays(statistics), **origin_records(origin)})
        return Message(content, reply_to=message)

    @app.train(PREPARE_STATISTICS.partition(".")[2])
    def prepare(message: Message, context: Context) -> Message:
        place = _place(message)
        kept, arrays = context.state.get(HEAD), context.state.get(f"{HEAD}-{ARRAYS}")
        same = isinstance(kept, ConfigRecord) and kept.get("place") == place
        if same and isinstance(kept, ConfigRecord) and isinstance(arrays, ArrayRecord):
            counted = arrays[WORDS].numpy()
            origin = Origin(int(kept["samples"]), str(kept["features"]), str(kept["numbers"]))  # type: ignore[arg-type]
        else:
            statistics, origin = computed(message, context)
            counted = counted_words(statistics)
        key = _keep(context, HEAD, {WORDS: counted}, place=place, **asdict(origin))
        return Message(RecordDict({**origin_records(origin, key)}), reply_to=message)

    @app.train(SEND_MASKED_STATISTICS.partition(".")[2])
    def masked(message: Message, context: Context) -> Message:
        return _send_masked(message, context, HEAD)

    return app
