"""The client's side of a masked round: three messages, and a local model that never leaves.

1. `train.sifu_prepare`: train, keep theta_c and the model it started from, answer with a key made for this round.
2. `train.sifu_masked`: answer with the masked update, given the keys of everyone who is ready.
3. `query.sifu_drift`: given the mean, answer with drift_c = ||theta_c - mean||; for one mean a round, since distances
   to many points would tell theta_c itself.

What lies between two messages is in `Context.state`, which a node keeps in memory for the run. A node that is started
anew has lost it and says so; its drift is then unknown, and the server counts its Psi as unbounded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from sifu.core.layout import Vector
from sifu.engines.flower.masking import FixedPoint, mask, new_secret, public_part
from sifu.engines.flower.wire import (
    ARRAYS,
    CONFIG,
    DRIFT,
    DRIFT_QUERY,
    KEY,
    MASKED,
    MASKED_TRAIN,
    METRICS,
    PREPARE,
    SAMPLES,
    Arrays,
    Instruction,
    arrays_of,
    in_order,
)
from sifu.errors import InputError
from sifu.theory.rounding import UNIT_ROUNDOFF, norm_up, up

Train = Callable[[Message, Context], tuple[Arrays, int]]
STATE, MODELS = "sifu-round", "sifu-models"


def add_masking(app: ClientApp, train: Train) -> ClientApp:
    """Let an app take part in masked rounds; `train` is its usual training, as arrays and a number of samples."""

    @app.train(PREPARE.partition(".")[2])
    def prepare(message: Message, context: Context) -> Message:
        return _prepare(message, context, train)

    app.train(MASKED_TRAIN.partition(".")[2])(_masked)
    app.query(DRIFT_QUERY.partition(".")[2])(_drift)
    return app


def _prepare(message: Message, context: Context, train: Train) -> Message:
    start = in_order(arrays_of(message.content[ARRAYS]))  # type: ignore[arg-type]
    instruction, fixed = Instruction.of(message), _fixed_point(message)
    arrays, samples = train(message, context)
    local = in_order(arrays)
    if local.shape != start.shape:
        raise InputError(f"training made {local.size} parameters of {start.size}")
    fits = fixed.fits(local.astype(np.float64) - start.astype(np.float64))
    secret = new_secret()
    place = instruction.position
    context.state[STATE] = ConfigRecord(
        {"branch": place.branch, "round": place.round, "samples": samples, "secret": secret}
    )
    context.state[MODELS] = ArrayRecord({"start": Array(start), "local": Array(local)})
    metrics = MetricRecord({SAMPLES: samples, "fits": int(fits)})
    return Message(RecordDict({METRICS: metrics, CONFIG: ConfigRecord({KEY: public_part(secret)})}), reply_to=message)


def _masked(message: Message, context: Context) -> Message:
    instruction, kept = Instruction.of(message), _kept(message, context)
    config: Mapping[str, Any] = message.content[CONFIG]
    public_keys: dict[int, bytes] = dict(zip(config["clients"], config["keys"], strict=True))
    start, local = _models(context)
    update = local.astype(np.float64) - start.astype(np.float64)
    words = _fixed_point(message).words(update, int(kept["samples"]))  # type: ignore[arg-type]
    sent = mask(
        words,
        bytes(kept["secret"]),  # type: ignore[arg-type]
        instruction.client,
        public_keys,
        b"%d.%d" % (instruction.position.branch, instruction.position.round),
    )
    # Delete the key, so that no message can make this client mask the same round twice with it.
    context.state[STATE] = ConfigRecord({key: value for key, value in kept.items() if key != "secret"})
    return Message(RecordDict({ARRAYS: ArrayRecord({MASKED: Array(sent)})}), reply_to=message)


def _drift(message: Message, context: Context) -> Message:
    kept = _kept(message, context)
    _, local = _models(context)
    mean = in_order(arrays_of(message.content[ARRAYS]))  # type: ignore[arg-type]
    if mean.shape != local.shape:
        raise InputError(f"the mean has {mean.size} parameters, the model {local.size}")
    exact = local.astype(np.float64)
    # The mean came as float64, each entry off by at most u |entry|.
    drift = up(norm_up(exact - mean) + 4.0 * UNIT_ROUNDOFF * (norm_up(mean) + norm_up(exact)))
    digest = hashlib.sha256(np.ascontiguousarray(mean).data).hexdigest()
    if kept.get("mean", digest) != digest:
        raise InputError("this client already told its distance to another mean of the round")
    context.state[STATE] = ConfigRecord({**kept, "mean": digest})
    metrics = MetricRecord({DRIFT: drift, "branch": kept["branch"], "round": kept["round"]})  # type: ignore[dict-item]
    return Message(RecordDict({METRICS: metrics}), reply_to=message)


def _kept(message: Message, context: Context) -> ConfigRecord:
    """What `prepare` left for the round that is asked about."""
    position = Instruction.of(message).position
    kept = context.state.get(STATE)
    branch_and_round = (kept.get("branch"), kept.get("round")) if isinstance(kept, ConfigRecord) else None
    if not isinstance(kept, ConfigRecord) or branch_and_round != (position.branch, position.round):
        raise InputError(
            f"nothing of round {position.branch}.{position.round} is kept here: this node was started anew"
        )
    if message.metadata.message_type == MASKED_TRAIN and "secret" not in kept:
        raise InputError(f"the update of round {position.branch}.{position.round} was sent already")
    return kept


def _models(context: Context) -> tuple[Vector, Vector]:
    models = arrays_of(context.state[MODELS])  # type: ignore[arg-type]
    return models["start"], models["local"]


def _fixed_point(message: Message) -> FixedPoint:
    config: Mapping[str, Any] = message.content[CONFIG]
    return FixedPoint(int(config["reach-bits"]), int(config["scale-bits"]))
