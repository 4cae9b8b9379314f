"""The client's side of a closed-form head: features and whole-number statistics, computed where the data are.

Between the two messages of a masked round the statistics lie in `Context.state`, which a node keeps in memory for the
run. A round that is repeated because another client went missing finds them there and makes a new key.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from sifu.engines.flower.masking import mask, new_secret, public_part
from sifu.engines.flower.wire import (
    ARRAYS,
    CONFIG,
    MASKED,
    PREPARE_STATISTICS,
    SEND_MASKED_STATISTICS,
    STATISTICS,
    WORDS,
    Instruction,
    Origin,
    arrays_of,
    in_order,
    origin_records,
)
from sifu.errors import InputError
from sifu.theory.arrays import Integers

STATE, STATE_WORDS = "sifu-statistics", "sifu-statistics-words"


def add_statistics(app: ClientApp, make_client: Callable[[Context], object], *, masked_only: bool) -> ClientApp:
    """Let an app take part in heads in closed form, if its clients compute statistics."""

    def computed(message: Message, context: Context) -> tuple[Integers, Origin]:
        client: Any = make_client(context)
        if not hasattr(client, "statistics"):
            raise InputError("this client computes no statistics: a head in closed form needs a ReadyClient")
        statistics, features = client.statistics(Instruction.of(message))
        return statistics.words(), Origin(statistics.samples, features, statistics.fixed.describe())

    @app.train(STATISTICS.partition(".")[2])
    def in_the_clear(message: Message, context: Context) -> Message:
        if masked_only:
            raise InputError(
                "this client sends masked statistics only: the server must run with masked-statistics = true"
            )
        words, origin = computed(message, context)
        content = RecordDict({ARRAYS: ArrayRecord({WORDS: Array(words)}), **origin_records(origin)})
        return Message(content, reply_to=message)

    @app.train(PREPARE_STATISTICS.partition(".")[2])
    def prepare(message: Message, context: Context) -> Message:
        place, networks = _place(message), _networks_digest(message)
        kept = context.state.get(STATE)
        same = isinstance(kept, ConfigRecord) and (kept.get("place"), kept.get("networks")) == (place, networks)
        if isinstance(kept, ConfigRecord) and same and STATE_WORDS in context.state:
            origin = Origin(int(kept["samples"]), str(kept["features"]), str(kept["numbers"]))  # type: ignore[arg-type]
        else:
            words, origin = computed(message, context)
            context.state[STATE_WORDS] = ArrayRecord({WORDS: Array(words)})
        secret = new_secret()
        made_for = {"place": place, "networks": networks, "secret": secret}
        context.state[STATE] = ConfigRecord(made_for | asdict(origin))
        return Message(RecordDict({**origin_records(origin, public_part(secret))}), reply_to=message)

    app.train(SEND_MASKED_STATISTICS.partition(".")[2])(_masked)
    return app


def _masked(message: Message, context: Context) -> Message:
    instruction, kept = Instruction.of(message), context.state.get(STATE)
    position = instruction.position
    if not isinstance(kept, ConfigRecord) or kept.get("place") != _place(message) or STATE_WORDS not in context.state:
        raise InputError(
            f"nothing of the statistics of round {position.branch}.{position.round} is kept here: this node was "
            "started anew"
        )
    if "secret" not in kept:
        raise InputError(f"the masked statistics of round {position.branch}.{position.round} were sent already")
    config: Mapping[str, Any] = message.content[CONFIG]
    keys: dict[int, bytes] = dict(zip(config["clients"], config["keys"], strict=True))
    words: Integers = arrays_of(context.state[STATE_WORDS])[WORDS]  # type: ignore[arg-type,assignment]
    # A one at the end counts who is in a sum.
    counted = np.append(words.view(np.uint64), np.uint64(1))
    where = b"statistics %d.%d" % (position.branch, position.round)
    sent = mask(counted, bytes(kept["secret"]), instruction.client, keys, where)  # type: ignore[arg-type]
    # Delete the key, so that no message can make this client mask twice with it.
    context.state[STATE] = ConfigRecord({name: value for name, value in kept.items() if name != "secret"})
    return Message(RecordDict({ARRAYS: ArrayRecord({MASKED: Array(sent)})}), reply_to=message)


def _networks_digest(message: Message) -> str:
    """Of what groups tuned of the network: other networks have other statistics."""
    hashed = hashlib.sha256()
    for group, arrays in sorted(Instruction.of(message).networks.items()):
        hashed.update(b"%d" % group + in_order(arrays).tobytes())
    return hashed.hexdigest()


def _place(message: Message) -> str:
    """The round and the plan that statistics are for: others have other statistics."""
    instruction = Instruction.of(message)
    plan = hashlib.sha256(instruction.plan.encode()).hexdigest()
    return f"{instruction.position.branch}.{instruction.position.round} {plan}"
