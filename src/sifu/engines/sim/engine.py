"""The embedded simulator: FedAvg over clients that live in this process.

One round (eq. 5 of the paper): draw the participants, train each from the same model, average, step with the server
rate. Same model, position and active clients give the same bits on one machine with one number of threads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from sifu.core.engine import Evaluation, Position, RoundResult
from sifu.core.layout import ModelLayout, Vector
from sifu.core.noise import NoiseSource
from sifu.core.replies import Reply, ReplyGate, ReplyRules
from sifu.engines.sim.averaging import Average, average_models
from sifu.engines.sim.clients import ClientData, check_clients, count_outputs, input_shape
from sifu.engines.sim.clipping import OUTSIDE, ClippedAverage, Clipping
from sifu.engines.sim.cpu_conv.conv_trainer import ConvTrainer
from sifu.engines.sim.float_rounding import ClientSizes, LinearRounding, within_reach
from sifu.engines.sim.linear import VectorisedTrainer
from sifu.engines.sim.local_training import LocalTraining
from sifu.engines.sim.loop import LoopTrainer
from sifu.engines.sim.models import TORCH_TYPES, LinearModel, Model, make_model
from sifu.engines.sim.objectives import OBJECTIVES
from sifu.engines.sim.smoothness import linear_curvature
from sifu.engines.sim.threads import one_thread
from sifu.errors import InputError, RoundRejectedError
from sifu.theory.draws import Places, base_key, place_key
from sifu.theory.facts import ClientProfile, TrainingFacts
from sifu.theory.participation import ClientIndices, Participation
from sifu.theory.rounding import norm_up

Strategy = Literal["auto", "loop", "vectorised"]


class SimulatedFederation:
    """An `Engine` of clients whose data are at hand.

    `model` is a name (see `make_model`; outputs are counted from the targets) or a `LinearModel` or `ModuleModel`.
    `strategy` auto trains linear models many clients at once, a `ConvNet` by hand-written passes, and everything else
    one client after the other. Data are checked and copied here; later changes to them have no effect. `first_number`
    is the number that batches and dropped units of the first client are drawn for: a client that trains alone, on a
    machine of its own, draws what it would draw among all. `replies` says what happens to a client's model that cannot
    be used; by default the round stops with a sentence.
    """

    def __init__(
        self,
        clients: Sequence[ClientData],
        model: str | Model,
        training: LocalTraining,
        *,
        server_rate: float = 1.0,
        participation: Participation | None = None,
        dtype: Literal["float64", "float32"] = "float64",
        seed: int = 0,
        strategy: Strategy = "auto",
        preprocessing: str = "fixed constants",
        shape_from_labels: bool = False,
        clipping: Clipping | None = None,
        first_number: int = 0,
        replies: ReplyRules | None = None,
    ) -> None:
        if not (math.isfinite(server_rate) and server_rate > 0.0):
            raise InputError(f"the server rate must be a positive number, found {server_rate}")
        if dtype not in TORCH_TYPES:
            raise InputError(f"models are float64 or float32, found dtype {dtype!r}")
        if strategy not in ("auto", "loop", "vectorised"):
            raise InputError(f"the strategy is auto, loop or vectorised, found {strategy!r}")
        shape = input_shape(clients)
        if isinstance(model, str):
            kind = model if model in OBJECTIVES else "softmax"
            model = make_model(model, shape, count_outputs(clients, OBJECTIVES[kind]))
        linear = model if isinstance(model, LinearModel) else None
        if linear and linear.features != math.prod(shape):
            raise InputError(f"the model takes {linear.features} features, the clients have {math.prod(shape)}")
        conv_net = None if isinstance(model, LinearModel) else model.conv_net
        if strategy == "vectorised" and not linear and not conv_net:
            raise InputError(
                "only linear models and described convolutional networks can be vectorised; use strategy auto or loop "
                "for a module"
            )

        self._model = model
        self._training = training
        self._seed = int(seed)
        self._participation_key = base_key(self._seed, "participation")
        self._last_given: ClientIndices | None = None
        self._last_checked = Places.of(np.zeros(0, dtype=np.int64))
        """Clients in increasing order that were asked for last."""
        self._layout = model.layout(dtype)
        outputs = linear.outputs if linear else count_outputs(clients, model.objective)
        checked = check_clients(clients, model.objective, outputs, dtype, flat=linear is not None)
        self._samples = np.array([client.samples for client in checked], dtype=np.int64)
        self._trainer: LoopTrainer | VectorisedTrainer | ConvTrainer
        if linear and strategy != "loop":
            self._trainer = VectorisedTrainer(linear, checked, training, dtype, self._seed, first_number)
        elif conv_net and strategy != "loop":
            self._trainer = ConvTrainer(conv_net, checked, outputs, training, dtype, self._seed, first_number)
        else:
            self._trainer = LoopTrainer(model, checked, outputs, training, dtype, self._seed, first_number)
        self._clipping = clipping
        self._reply_rules = replies or ReplyRules()
        self._rounding: LinearRounding | None = None
        self._sizes: ClientSizes | None = None
        self._clients = tuple(ClientProfile(one.name, one.samples, training.steps) for one in checked)
        if linear:
            found = linear_curvature(checked, linear.objective, training)
            self._clients = tuple(
                ClientProfile(one.name, one.samples, training.steps, smoothness, training.weight_decay)
                for one, smoothness in zip(checked, found.smoothness.tolist(), strict=True)
            )
            self._sizes = ClientSizes.of(checked, linear.objective, training, found)
            within = within_reach(training, float(found.smoothness.max()))
            if clipping is None and dtype == "float64" and within:
                self._rounding = LinearRounding(linear, training, server_rate, self._sizes)
        self._facts = TrainingFacts(
            local_rate=training.rate,
            momentum=training.momentum,
            nesterov=training.nesterov,
            weight_decay=training.weight_decay,
            batch_size=training.batch_size,
            server_rate=server_rate,
            participation=participation or Participation("all"),
            dtype=dtype,
            smooth_model=model.smooth,
            rounding_bounded=self._rounding is not None,
            outside=(
                *model.outside,
                *((OUTSIDE,) if clipping else ()),
                *self._reply_rules.outside,
            ),
            preprocessing=preprocessing,
            shape_from_labels=shape_from_labels,
            clip=clipping.clip if clipping else 0.0,
            noise=clipping.noise if clipping else 0.0,
        )

    @property
    def model(self) -> Model:
        """What is trained."""
        return self._model

    @property
    def training(self) -> LocalTraining:
        """What a client does in a round."""
        return self._training

    @property
    def reply_rules(self) -> ReplyRules:
        """What is done with a client's model that cannot be used."""
        return self._reply_rules

    @property
    def seed(self) -> int:
        """Keys every draw."""
        return self._seed

    @property
    def noise_source(self) -> NoiseSource | None:
        """Where the noise of training comes from, if updates are clipped."""
        return self._clipping.source if self._clipping else None

    @property
    def layout(self) -> ModelLayout:
        """Names and shapes of the parameters."""
        return self._layout

    @property
    def clients(self) -> tuple[ClientProfile, ...]:
        """Every known client; indices elsewhere point into this tuple."""
        return self._clients

    @property
    def facts(self) -> TrainingFacts:
        """What every round does, and what is proven about it."""
        return self._facts

    @property
    def sizes(self) -> ClientSizes | None:
        """What rounding of a linear model depends on, client by client."""
        return self._sizes

    def rounding_allowance(self, length: float, participants: ClientIndices) -> float:
        """How far floating point may have moved a round from a model of norm `length`; 0 where nothing is proven."""
        return self._rounding.of_round(length, participants) if self._rounding and participants.size else 0.0

    def initial_model(self, branch: int) -> Vector:
        """A fresh model, another one for each branch (unless a linear model starts from zeros)."""
        return self._model.initial(self._seed, branch, self._layout.dtype)

    def run_round(
        self,
        model: Vector,
        position: Position,
        active: ClientIndices,
        *,
        want_gram: bool = False,
        want_updates: bool = False,
        absent: ClientIndices | None = None,
    ) -> RoundResult:
        """One round of FedAvg; drifts and shift are to the float64 mean, before it is rounded to float32.

        `absent` clients are drawn like everyone and then left out, their slots not refilled: the counterfactual
        that Psi bounds the distance to.
        """
        start = self._checked_model(model)
        chosen = self._checked_clients(active, "active")
        participants = self._facts.participation.draw(
            self._last_checked if chosen is self._last_checked.index else chosen,
            place_key(self._participation_key, position.branch, position.round),
        )
        if absent is not None:
            participants = np.setdiff1d(participants, absent)
        samples = self._samples[participants]
        if participants.size == 0:
            gram = np.zeros((0, 0)) if want_gram else None
            return RoundResult(start, participants, samples, np.zeros(0), 0.0, 0.0, gram)
        if self._reply_rules.update_bound or type(self).replies is not SimulatedFederation.replies:
            return self._round_of_replies(start, position, active, participants, want_gram, want_updates)
        if self._clipping:
            return self._clipped_round(self._clipping, start, position, active, participants, want_gram, want_updates)
        found = self._trainer.average(start, position, participants, samples, want_gram)
        # No client moved further than the largest drift and the shift of the mean together.
        reach = float(found.drifts.max(initial=0.0)) + found.mean_shift
        if self._reply_rules.on_rejection != "stop" and (found.not_finite or not reach <= self._reply_rules.limit):
            return self._round_of_replies(start, position, active, participants, want_gram, want_updates)
        exact_start = start.astype(np.float64)
        with np.errstate(over="ignore", invalid="ignore"):
            rate = self._facts.server_rate
            new = (exact_start + (found.step if rate == 1.0 else rate * found.step)).astype(self._layout.dtype)
        self._reject_not_finite(found, new, position, participants)
        rounding = self.rounding_allowance(norm_up(exact_start), participants) if self._rounding else 0.0
        updates = None
        if want_updates:
            updates = self.local_updates(start, position, participants, self._training.steps)
        return RoundResult(new, participants, samples, found.drifts, found.mean_shift, rounding, found.gram, updates)

    def _clipped_round(
        self,
        clipping: Clipping,
        start: Vector,
        position: Position,
        active: ClientIndices,
        participants: ClientIndices,
        want_gram: bool,
        want_updates: bool,
    ) -> RoundResult:
        """A round of clipped, perhaps noised updates; its noise is drawn anew if it is run again (unless seeded)."""
        updates = self.local_updates(start, position, participants, self._training.steps)
        if self._reply_rules.on_rejection != "stop" and not bool(np.isfinite(updates).all()):
            return self._round_of_replies(start, position, active, participants, want_gram, want_updates)
        samples = self._samples[participants]
        found = clipping.average(updates, position, participants, samples, want_gram)
        new = (start.astype(np.float64) + self._facts.server_rate * found.step).astype(self._layout.dtype)
        self._reject_not_finite(found, new, position, participants)
        sent = found.updates.astype(self._layout.dtype) if want_updates else None
        return RoundResult(new, participants, samples, found.drifts, found.mean_shift, 0.0, found.gram, sent)

    def replies(self, start: Vector, position: Position, participants: ClientIndices) -> list[Reply]:
        """What the participants send back: their models. An engine of less honest clients says something else."""
        models = np.zeros((participants.size, start.size), dtype=self._layout.dtype)
        for places, rows in self._trainer.train(start, position, participants, self._training.steps):
            models[places] = rows.numpy()
        samples = self._samples[participants].tolist()
        return [
            Reply(client, position, count, model)
            for client, count, model in zip(participants.tolist(), samples, models, strict=True)
        ]

    def _round_of_replies(
        self,
        start: Vector,
        position: Position,
        active: ClientIndices,
        participants: ClientIndices,
        want_gram: bool,
        want_updates: bool,
    ) -> RoundResult:
        """A round in which every reply is looked at by itself, and only those that can be used are averaged."""
        rules = self._reply_rules
        gone = set(range(len(self._clients))) - set(np.asarray(active).tolist())
        asked = participants.tolist()
        gate = ReplyGate(start, position, asked, self._layout, self._clients, rules, forgotten=gone)
        for reply in self.replies(start, position, participants):
            gate.take(reply)
        rejections = gate.finish()
        if rules.on_rejection == "stop" and any(one.left_out for one in rejections):
            names = [f"{one.client!r}: {one.reason}" for one in rejections if one.left_out]
            listed = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            raise RoundRejectedError(
                f"round {position.round} of branch {position.branch} was rejected and changed nothing: {len(names)} of "
                f"{participants.size} replies cannot be used ({listed}). See server.rejected"
            )
        taken = np.array(sorted(gate.accepted), dtype=np.int64)
        samples = self._samples[taken]
        if taken.size == 0:
            gram = np.zeros((0, 0)) if want_gram else None
            return RoundResult(start, taken, samples, np.zeros(0), 0.0, 0.0, gram, rejections=rejections)
        models = np.stack([gate.accepted[int(client)] for client in taken])
        updates = models - start
        found: Average | ClippedAverage
        if self._clipping:
            found = self._clipping.average(updates, position, taken, samples, want_gram)
            updates = found.updates.astype(self._layout.dtype)
        else:
            rows = [(slice(0, taken.size), torch.from_numpy(models))]
            # As in `ConvTrainer.average`: no thread is left spinning on the cores that train.
            with one_thread() if isinstance(self._trainer, ConvTrainer) else nullcontext():
                found = average_models(lambda: iter(rows), start.astype(np.float64), samples, start.itemsize, want_gram)
        new = (start.astype(np.float64) + self._facts.server_rate * found.step).astype(self._layout.dtype)
        self._reject_not_finite(found, new, position, taken)
        rounding = 0.0 if self._clipping else self.rounding_allowance(norm_up(start.astype(np.float64)), taken)
        sent = updates if want_updates else None
        return RoundResult(new, taken, samples, found.drifts, found.mean_shift, rounding, found.gram, sent, rejections)

    def local_updates(
        self, model: Vector, position: Position, clients: ClientIndices, steps: int
    ) -> NDArray[np.floating]:
        """theta_i - model of each client after its first `steps` local steps of this position."""
        return self.local_models(model, position, clients, steps) - self._checked_model(model)

    def local_models(
        self, model: Vector, position: Position, clients: ClientIndices, steps: int
    ) -> NDArray[np.floating]:
        """theta_i of each client after its first `steps` local steps of this position."""
        start = self._checked_model(model)
        chosen = self._checked_clients(clients, "trained")
        found = np.zeros((chosen.size, start.size), dtype=self._layout.dtype)
        for places, models in self._trainer.train(start, position, chosen, steps):
            found[places] = models.numpy()
        return found

    def evaluate(self, model: Vector, clients: ClientIndices) -> Evaluation:
        """Samples, correct predictions (0 for regression) and sum of losses of each of `clients`, in their order."""
        chosen = self._checked_clients(clients, "evaluated")
        correct, loss_sum = self._trainer.evaluate(self._checked_model(model), chosen)
        return Evaluation(chosen.copy(), self._samples[chosen], correct, loss_sum)

    def _reject_not_finite(
        self, found: Average | ClippedAverage, new: Vector, position: Position, participants: ClientIndices
    ) -> None:
        if bool(np.isfinite(new).all()) and not found.not_finite:
            return
        where = f"round {position.round} of branch {position.branch} was rejected and changed nothing: "
        advice = f"; lower the local rate ({self._training.rate:g}) or look at the data"
        if not found.not_finite:
            raise RoundRejectedError(
                f"{where}every client's model is finite but the averaged model overflows {self._layout.dtype}{advice}"
            )
        names = [repr(self._clients[participants[place]].name) for place in found.not_finite]
        listed = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        raise RoundRejectedError(
            f"{where}{len(names)} of {participants.size} clients returned a model with NaN or Inf ({listed}){advice}"
        )

    def _checked_model(self, model: Vector) -> Vector:
        """A copy of `model` in the training type."""
        vector = np.array(model, dtype=self._layout.dtype)
        if vector.shape != (self._layout.size,):
            raise InputError(f"a model of {self._layout.size} parameters was expected, found shape {vector.shape}")
        return vector

    def _checked_clients(self, clients: ClientIndices, what: str) -> ClientIndices:
        """`clients` as indices of known clients, none of them twice; an argument that may change is never kept."""
        if clients is self._last_given:
            return self._last_checked.index
        chosen = np.asarray(clients, dtype=np.int64).reshape(-1)
        if not np.array_equal(chosen, self._last_checked.index):
            # Clients in increasing order, the usual case, are seen to differ in one pass.
            increasing = bool((chosen[1:] > chosen[:-1]).all())
            ends = chosen[[0, -1]] if increasing and chosen.size else chosen
            lowest, highest = ends.min(initial=0), ends.max(initial=0)
            if lowest < 0 or highest >= len(self._clients):
                raise InputError(
                    f"{what} clients must be indices in 0..{len(self._clients) - 1}, found {lowest}..{highest}"
                )
            if not increasing and np.unique(chosen).size != chosen.size:
                raise InputError(f"the {what} clients name some client twice: {chosen.tolist()[:20]}")
            if not increasing:
                return chosen
            self._last_checked = Places.of(chosen)
        # An array that nobody can write to is known by itself the next time, however long it is.
        self._last_given = clients if isinstance(clients, np.ndarray) and _is_constant(clients) else None
        return self._last_checked.index


def _is_constant(array: np.ndarray) -> bool:
    """Whether an array owns its values and they cannot be written to."""
    return array.base is None and not array.flags.writeable
