"""Client side: functions that make a tracked client from a training function or from an existing ClientApp.

    app = client_app(lambda context: FunctionClient("hospital-a", len(y), train_arrays=my_training))

`my_training(arrays)` receives the model as named numpy arrays and returns the trained arrays. A ClientApp that already
answers Flower's `train` (and `evaluate`) messages needs one line: `add_profile(app, "hospital-a", samples=len(y))`.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from typing import Protocol

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from sifu.engines.flower.checkpoints_of_nodes import guard
from sifu.engines.flower.masking import add_masking, add_statistics
from sifu.engines.flower.wire import (
    ARRAYS,
    CONFIG,
    METRICS,
    PROFILE_QUERY,
    PROFILE_WANTED,
    SAMPLES,
    TRAIN,
    arrays_of,
    instruction_of,
    profile_reply,
    read_arrays,
)
from sifu.engines.plans import Arrays, Instruction, WireProfile
from sifu.errors import InputError

USUAL_TRAINING = "train.default"
"""Flower's name of the function that answers `train` messages."""


class LocalClient(Protocol):
    """Interface of a client on a node: profile, training and evaluation."""

    def profile(self, instruction: Instruction) -> WireProfile:
        """Return the name, the numbers of samples and local steps, and known bounds on the loss."""
        ...

    def train(self, model: Arrays, instruction: Instruction) -> tuple[Arrays, int]:
        """Return the model after `instruction.steps` local steps, and the number of samples used."""
        ...

    def evaluate(self, model: Arrays, instruction: Instruction) -> tuple[int, int, float]:
        """Return the numbers of samples and of correct predictions, and the summed loss."""
        ...


MakeClient = Callable[[Context], LocalClient]


def client_app(make_client: MakeClient, *, masked_only: bool = False) -> ClientApp:
    """Make a ClientApp that takes part in rounds, masked or not.

    The app keeps the signed ledger heads that the server shows, and refuses a forked history (`checkpoints_of_nodes`).

    Args:
        make_client: Function that makes the client. It is called for every message, since each message may reach a new
            process.
        masked_only: True to refuse to send unmasked updates or statistics.
    """
    app = ClientApp()

    def trained(message: Message, context: Context) -> tuple[Arrays, int]:
        return make_client(context).train(_model_of(message), instruction_of(message))

    add_masking(app, trained)
    add_statistics(app, make_client, masked_only=masked_only)

    @app.query(PROFILE_QUERY.removeprefix("query."))
    def profile(message: Message, context: Context) -> Message:
        return profile_reply(make_client(context).profile(instruction_of(message)), message)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        if masked_only:
            raise InputError("this client sends masked updates only: the server must run with masked-updates = true")
        arrays, samples = trained(message, context)
        content = RecordDict(
            {
                ARRAYS: ArrayRecord({name: Array(array) for name, array in arrays.items()}),
                METRICS: MetricRecord({SAMPLES: samples}),
            }
        )
        return Message(content, reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        samples, correct, loss_sum = make_client(context).evaluate(_model_of(message), instruction_of(message))
        metrics = MetricRecord({SAMPLES: samples, "correct": correct, "loss-sum": loss_sum})
        return Message(RecordDict({METRICS: metrics}), reply_to=message)

    return _answering(guard(app), profile)


def _answering(app: ClientApp, profile: Callable[[Message, Context], Message]) -> ClientApp:
    """Make the app answer training messages that ask for a profile, without `guard`, as there may be no run yet."""
    train = app._registered_funcs.get(USUAL_TRAINING)
    if train is None:
        return app

    def answer(message: Message, context: Context) -> Message:
        config = message.content.get(CONFIG)
        wanted = isinstance(config, ConfigRecord) and config.get(PROFILE_WANTED) is True
        return profile(message, context) if wanted else train(message, context)

    app._registered_funcs[USUAL_TRAINING] = answer
    return app


def add_profile(
    app: ClientApp,
    name: str | Callable[[Context], str],
    samples: int | Callable[[Context], int],
    local_steps: int = 1,
    expansion: float | None = None,
) -> ClientApp:
    """Turn a ClientApp for Flower's usual messages into a tracked client with a profile and masked updates.

    Args:
        app: The app to extend.
        name: Name of the client, or a function of the node's context if the same app runs on several nodes.
        samples: Number of samples, or a function of the node's context.
        local_steps: Number of local steps in a round.
        expansion: Expansion of the client's steps of a round, if known (`sifu.engines.sim.own_steps.safe_step`).
    """

    def trained(message: Message, context: Context) -> tuple[Arrays, int]:
        usual = copy(message)  # the copy shares the content but gets the usual type
        usual.__dict__["_metadata"] = copy(message.metadata)
        usual.metadata.message_type = TRAIN
        return read_arrays(app(usual, context))

    add_masking(app, trained)

    @app.query(PROFILE_QUERY.removeprefix("query."))
    def profile(message: Message, context: Context) -> Message:
        who = name(context) if callable(name) else name
        count = samples(context) if callable(samples) else samples
        return profile_reply(WireProfile(who, count, local_steps, expansion), message)

    return _answering(guard(app), profile)


@dataclass(frozen=True)
class FunctionClient:
    """Client made of functions over named numpy arrays, written in any framework."""

    name: str
    samples: int
    train_arrays: Callable[[Arrays], Arrays]
    evaluate_arrays: Callable[[Arrays], tuple[int, float]] | None = None
    local_steps: int = 1
    expansion: float | None = None

    def profile(self, instruction: Instruction) -> WireProfile:
        """Return the profile from the given values."""
        return WireProfile(self.name, self.samples, self.local_steps, self.expansion)

    def train(self, model: Arrays, instruction: Instruction) -> tuple[Arrays, int]:
        """Call the training function once; refuse a number of steps other than `local_steps`."""
        if instruction.steps != self.local_steps:
            raise InputError(
                f"{instruction.steps} local steps were requested, but this client always takes {self.local_steps}"
            )
        return self.train_arrays(model), self.samples

    def evaluate(self, model: Arrays, instruction: Instruction) -> tuple[int, int, float]:
        """Return the numbers of samples and of correct predictions, and the summed loss."""
        if self.evaluate_arrays is None:
            raise InputError("this client does not evaluate models")
        correct, loss_sum = self.evaluate_arrays(model)
        return self.samples, correct, loss_sum


def _model_of(message: Message) -> Arrays:
    return arrays_of(message.content[ARRAYS])  # type: ignore[arg-type]
