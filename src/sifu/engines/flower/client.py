"""The client's side: a few lines make a training function, or a ClientApp that exists, a tracked client.

    app = client_app(lambda context: FunctionClient("hospital-a", samples=len(y), train=my_training))

`my_training(arrays)` gets the model as named numpy arrays and returns the trained ones. A ClientApp that already
answers Flower's `train` (and `evaluate`) messages needs one line: `add_profile(app, "hospital-a", samples=len(y))`.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from typing import Protocol

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from sifu.engines.flower.checkpoints_of_nodes import guard
from sifu.engines.flower.masking import add_masking, add_statistics
from sifu.engines.flower.wire import (
    ARRAYS,
    CONFIG,
    EVALUATE_SEVERAL,
    METRICS,
    PROFILE_QUERY,
    PROFILE_WANTED,
    SAMPLES,
    TRAIN,
    Arrays,
    Instruction,
    WireProfile,
    arrays_of,
    profile_reply,
    read_arrays,
)
from sifu.errors import InputError

USUAL_TRAINING = "train.default"
"""Flower's name of the function that answers `train` messages."""
IN_THE_CLEAR = "this client sends masked updates only: the server must run with masked-updates = true"


class LocalClient(Protocol):
    """What a node can do: say what it has, train, and evaluate."""

    def profile(self, instruction: Instruction) -> WireProfile:
        """Name, samples, local steps, and bounds on its loss where it has any."""
        ...

    def train(self, model: Arrays, instruction: Instruction) -> tuple[Arrays, int]:
        """The model after `instruction.steps` local steps, and on how many samples."""
        ...

    def evaluate(self, model: Arrays, instruction: Instruction) -> tuple[int, int, float]:
        """Samples, correct predictions and the sum of losses."""
        ...


MakeClient = Callable[[Context], LocalClient]


def client_app(make_client: MakeClient, *, masked_only: bool = False) -> ClientApp:
    """A ClientApp around `make_client`, which is called for every message: each may come to a new process.

    It takes part in masked rounds too. With `masked_only` it never sends an update, or statistics, in the clear. The
    signed heads of the run's ledger that it is shown are kept, and it takes no part in a fork (`checkpoints_of_nodes`).
    """
    app = ClientApp()

    def trained(message: Message, context: Context) -> tuple[Arrays, int]:
        return make_client(context).train(_model_of(message), Instruction.of(message))

    add_masking(app, trained)
    add_statistics(app, make_client, masked_only=masked_only)

    @app.query(PROFILE_QUERY.removeprefix("query."))
    def profile(message: Message, context: Context) -> Message:
        return profile_reply(replace(make_client(context).profile(Instruction.of(message)), several=True), message)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        if masked_only:
            raise InputError(IN_THE_CLEAR)
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
        samples, correct, loss_sum = make_client(context).evaluate(_model_of(message), Instruction.of(message))
        metrics = MetricRecord({SAMPLES: samples, "correct": correct, "loss-sum": loss_sum})
        return Message(RecordDict({METRICS: metrics}), reply_to=message)

    @app.evaluate(EVALUATE_SEVERAL.removeprefix("evaluate."))
    def evaluate_several(message: Message, context: Context) -> Message:
        client, instruction = make_client(context), Instruction.of(message)
        models = [message.content[f"{ARRAYS}-{number}"] for number in range(len(message.content.array_records))]
        scores = [client.evaluate(arrays_of(model), instruction) for model in models]  # type: ignore[arg-type]
        samples, correct, losses = (list(column) for column in zip(*scores, strict=True))
        metrics = MetricRecord({SAMPLES: samples, "correct": correct, "loss-sum": losses})
        return Message(RecordDict({METRICS: metrics}), reply_to=message)

    return _answering(guard(app), profile)


def _answering(app: ClientApp, profile: Callable[[Message, Context], Message]) -> ClientApp:
    """Let a training that asks for a profile be answered by it; there may be no run yet to be a witness of."""
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
    smoothness: float | None = None,
    curvature: float | None = None,
) -> ClientApp:
    """Make a ClientApp that answers Flower's usual messages a tracked one: it also says who it is and can mask.

    The same app runs on every node: where name and samples differ, give functions of the node's context.
    """

    def trained(message: Message, context: Context) -> tuple[Arrays, int]:
        usual = copy(message)  # its content is shared, its kind is the usual one
        usual.__dict__["_metadata"] = copy(message.metadata)
        usual.metadata.message_type = TRAIN
        return read_arrays(app(usual, context))

    add_masking(app, trained)

    @app.query(PROFILE_QUERY.removeprefix("query."))
    def profile(message: Message, context: Context) -> Message:
        who = name(context) if callable(name) else name
        count = samples(context) if callable(samples) else samples
        return profile_reply(WireProfile(who, count, local_steps, smoothness, curvature), message)

    return _answering(guard(app), profile)


@dataclass(frozen=True)
class FunctionClient:
    """A client made of functions over named numpy arrays, in whatever framework they are written."""

    name: str
    samples: int
    train_arrays: Callable[[Arrays], Arrays]
    evaluate_arrays: Callable[[Arrays], tuple[int, float]] | None = None
    local_steps: int = 1
    smoothness: float | None = None
    curvature: float | None = None

    def profile(self, instruction: Instruction) -> WireProfile:
        """What was given."""
        return WireProfile(self.name, self.samples, self.local_steps, self.smoothness, self.curvature)

    def train(self, model: Arrays, instruction: Instruction) -> tuple[Arrays, int]:
        """One call of the function; it knows its own number of steps."""
        if instruction.steps != self.local_steps:
            raise InputError(
                f"{instruction.steps} local steps were asked for, this client always does {self.local_steps}"
            )
        return self.train_arrays(model), self.samples

    def evaluate(self, model: Arrays, instruction: Instruction) -> tuple[int, int, float]:
        """Correct predictions and the sum of losses."""
        if self.evaluate_arrays is None:
            raise InputError("this client evaluates nothing")
        correct, loss_sum = self.evaluate_arrays(model)
        return self.samples, correct, loss_sum


def _model_of(message: Message) -> Arrays:
    return arrays_of(message.content[ARRAYS])  # type: ignore[arg-type]
