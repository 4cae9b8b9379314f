"""Embedded simulator: FedAvg over clients in this process.

`sifu.core.round` defines a round. This engine trains the participants and averages their models in the same pass if
possible; it inspects single models only if necessary. On one machine with the same number of threads, the same model,
position and active clients give identical results.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray

from sifu.core.engine import (
    Evaluation,
    LacksData,
    Position,
    Rejection,
    RoundResult,
    ShowsSamples,
)
from sifu.core.layout import Vector
from sifu.core.replies import Reply, ReplyRules
from sifu.core.round import AcceptedModels, Average, RoundSetup, gate_replies, run_round
from sifu.core.round_stream import DrawsAhead
from sifu.core.spec.sections import TF32
from sifu.data.dataset import sample_digest
from sifu.data.own_modules import combined
from sifu.engines.sim.client_updates import average_models
from sifu.engines.sim.embedded_clients import (
    OBJECTIVES,
    CheckedClient,
    ClientData,
    check_clients,
    count_outputs,
    input_shape,
)
from sifu.engines.sim.float_rounding import ClientSizes, proven_allowance
from sifu.engines.sim.linear import VectorisedTrainer
from sifu.engines.sim.local_training import LocalTraining, TrainingPlan
from sifu.engines.sim.models import TORCH_TYPES, LinearModel, Model, ModuleModel, make_model, module_of_model
from sifu.engines.sim.own_steps import OwnSteps
from sifu.engines.sim.plain_loop import LoopTrainer
from sifu.engines.sim.threads import one_thread
from sifu.engines.sim.trainers import NotHere, Trainer, who_trains
from sifu.errors import InputError
from sifu.theory.facts import (
    IN_PROCESS,
    MADE_BY_OPERATOR,
    UNKNOWN,
    ClientProfile,
    TrainingFacts,
)
from sifu.theory.participation import ClientIndices, Participation, Places, base_key
from sifu.theory.rounding import norm_up


def training_facts(model: Model, training: LocalTraining, rules: ReplyRules, **others: Any) -> TrainingFacts:
    """Return the training facts that follow from a model, its local training and the server's rules."""
    return TrainingFacts(
        local_rate=training.rate if math.isfinite(training.rate) else None,
        momentum=training.momentum,
        weight_decay=training.weight_decay,
        batch_size=training.batch_size,
        smooth_model=model.smooth,
        outside=(*model.outside, *rules.outside),
        **others,
    )


def _trainer(
    model: Model, clients: Sequence[CheckedClient], plan: TrainingPlan, settings: SimulationSettings, by: Trainer
) -> Any:
    """Return the trainer of a model for the chosen strategy: a `LoopTrainer` or an object with the same methods."""
    if settings.strategy != "loop" and isinstance(model, LinearModel):
        return VectorisedTrainer(model, clients, plan)
    if by.kernels is not None and isinstance(model, ModuleModel):
        return by.kernels.cpu_trainer(model.conv_net, clients, plan)
    return LoopTrainer(model, clients, plan, settings.device)


def _all_usable(trained: AcceptedModels, start: Vector, limit: float) -> bool:
    """Return whether all models are known to be usable without a check of each model."""
    mean = trained.average
    if mean is None:
        return bool(np.isfinite(np.asarray(trained.models) - start).all())
    # No client moved further than the sum of the largest drift and the shift of the mean.
    return not mean.not_finite and float(mean.drifts.max(initial=0.0)) + mean.mean_shift <= limit


@dataclass(frozen=True)
class SimulationSettings:
    """Settings of a simulated federation besides clients, model and local training.

    Attributes:
        participation: Rule that draws the participants of a round. By default, all clients take part.
        dtype: Number format of models; `tf32` models are float32, and only another trainer trains them.
        seed: Public seed of all draws.
        strategy: `auto` trains many clients of a linear model at once, and any other model one client at a time
            unless `trainer` is another package. `loop` always trains one client at a time.
        trainer: Trainer that a run recorded, or None for the best trainer here (`who_trains`).
        device: Device of the loop.
        preprocessing: Preprocessing of the samples (`TrainingFacts`).
        shape_from_labels: True if the clients' labels determined the number of outputs.
        features: Digest of the public map that computed the samples, if any (`TrainingFacts`).
        features_declared: True if the operator declared that this map is public.
        features_module: Value of `TrainingFacts.module` for a module of the operator that computes this map.
        module_is_pure: True if the operator declares that modules compute from their inputs and parameters alone.
        numbers: Increasing indices that key the draws of participants, batches and dropout (by default 0, 1, ...). A
            subset of the clients, or one client on its own machine, thus makes the same draws as in the whole
            federation.
        replies: Handling of a client's model that cannot be used. By default, the round stops with an error.
    """

    participation: Participation = Participation("all")
    dtype: Literal["float64", "float32", "tf32"] = "float64"
    seed: int = 0
    strategy: Literal["auto", "loop"] = "auto"
    trainer: str | None = None
    device: str = "cpu"
    preprocessing: str = UNKNOWN
    shape_from_labels: bool = False
    features: str = ""
    features_declared: bool = False
    features_module: str = ""
    module_is_pure: bool = False
    numbers: Sequence[int] | None = None
    replies: ReplyRules = field(default_factory=ReplyRules)

    def __post_init__(self) -> None:
        if self.dtype not in (*TORCH_TYPES, TF32):
            raise InputError(f"models are float64, float32 or tf32, found dtype {self.dtype!r}")

    def numbers_of(self, clients: int) -> ClientIndices:
        """Return the indices that key the clients' draws.

        Raises:
            InputError: If there is not one index per client, or the indices do not increase.
        """
        numbers = np.arange(clients) if self.numbers is None else np.array(self.numbers, dtype=np.int64)
        if numbers.size != clients or bool((np.diff(numbers) <= 0).any()):
            raise InputError(
                f"the {clients} clients need as many numbers in increasing order, found {numbers.tolist()[:20]}"
            )
        return numbers


class SimulatedFederation(LacksData, ShowsSamples):
    """Engine of clients whose data are available in this process.

    `model` is a name (see `make_model`; outputs are counted from the targets), a `LinearModel` or a `ModuleModel`.
    Data are checked and copied; later changes to them have no effect.

    Client indices refer to `clients`. `samples` holds |D_i| of each client, `participation_key` keys the draws of
    participants, and `sizes` holds the quantities that determine the rounding error of a linear model.
    """

    def __init__(
        self,
        clients: Sequence[ClientData],
        model: str | Model,
        training: LocalTraining,
        settings: SimulationSettings | None = None,
    ) -> None:
        settings = settings or SimulationSettings()
        shape = input_shape(clients)
        if isinstance(model, str):
            kind = model if model in OBJECTIVES else "softmax"
            model = make_model(model, shape, count_outputs(clients, OBJECTIVES[kind]))
            settings = replace(settings, shape_from_labels=kind == "softmax")
        linear = model if isinstance(model, LinearModel) else None
        if linear and linear.features != math.prod(shape):
            raise InputError(f"the model takes {linear.features} features, the clients have {math.prod(shape)}")

        self.given = tuple(clients)
        self.model = model
        self.training = training
        self.seed = int(settings.seed)
        self.participation_key = base_key(self.seed, "participation")
        self._numbers = settings.numbers_of(len(clients))
        self._last_given: ClientIndices | None = None
        self._last_checked = Places.of(np.zeros(0, dtype=np.int64))
        """Most recent clients that `_checked_clients` found to be in increasing order."""
        self.settings = settings
        dtype = "float32" if settings.dtype == TF32 else settings.dtype
        self.layout = model.layout(dtype)
        outputs = linear.outputs if linear else count_outputs(clients, model.objective)
        checked = check_clients(clients, model.objective, outputs, dtype, flat=linear is not None)
        self.samples = np.array([client.samples for client in checked], dtype=np.int64)
        steps = OwnSteps.of(linear, checked, training)
        self.plan = plan = TrainingPlan(self.samples, steps.rates, self._numbers, outputs, training, dtype, self.seed)
        network = model.conv_net if isinstance(model, ModuleModel) and settings.strategy == "auto" else None
        if settings.dtype == TF32:
            self._trained_by, self._trainer = Trainer(UNKNOWN), cast("Any", NotHere())
        else:
            self._trained_by = who_trains(network, dtype, "cpu", settings.trainer)
            self._trainer = _trainer(model, checked, plan, settings, self._trained_by)
        self.reply_rules = settings.replies
        self._rounding: Callable[[float, ClientIndices], float] | None = None
        self.sizes: ClientSizes | None = None
        if linear:
            bounds = steps.rates, steps.smoothness, steps.energy
            self.sizes = ClientSizes.of(checked, linear.objective, training, *bounds)
            self._rounding = proven_allowance(linear, training, self.sizes, settings.dtype)
        self.clients = tuple(
            ClientProfile(client.name, client.samples, training.steps, expansion)
            for client, expansion in zip(checked, steps.expansions, strict=True)
        )
        self.facts = self._facts(model, settings)
        self._draws = DrawsAhead(self.facts.participation, self.participation_key)

    def _facts(self, model: Model, settings: SimulationSettings) -> TrainingFacts:
        """Return the facts that certificates of this training depend on."""
        own_kind = type(model) in (LinearModel, ModuleModel)
        return training_facts(
            model,
            self.training,
            self.reply_rules,
            participation=settings.participation,
            dtype=settings.dtype,
            rounding_bounded=self._rounding is not None,
            preprocessing=settings.preprocessing,
            shape_from_labels=settings.shape_from_labels,
            identity=IN_PROCESS,
            initial=model.initial_source if own_kind else MADE_BY_OPERATOR,
            features=settings.features,
            features_declared=settings.features_declared,
            module=combined(settings.features_module, module_of_model(model, settings.module_is_pure)),
            trainer=self._trained_by.name,
        )

    @cached_property
    def sample_digests(self) -> tuple[str, ...]:
        """Digest of each client's samples as given; a run continues only with the samples it was created with."""
        return tuple(map(sample_digest, self.given))

    def rounding_allowance(self, length: float, participants: ClientIndices) -> float:
        """Return a bound on the rounding error of a round from a model of norm `length`, or 0 if none is proven."""
        return self._rounding(length, participants) if self._rounding and participants.size else 0.0

    def initial_model(self, branch: int) -> Vector:
        """Return the initial model of a branch; branches differ if the initialisation is random."""
        return self.model.initial(self.seed, branch, self.layout.dtype)

    def run_round(self, model: Vector, position: Position, active: ClientIndices) -> RoundResult:
        """Run one round of FedAvg; drifts and shift refer to the float64 mean, before rounding to float32."""
        start = self.layout.own_copy(model)
        chosen = self._checked_clients(active, "active")
        places = self._last_checked
        if chosen is not places.index:
            in_order = np.sort(chosen)
            places = Places.of(in_order, self._numbers[in_order])
        setup = RoundSetup(start, position, places)
        return run_round(self, setup, self._draws.draw(setup))

    def collect(self, setup: RoundSetup, drawn: ClientIndices) -> AcceptedModels | Sequence[Reply]:
        """Train the drawn clients; return only the mean of their models unless single models are needed."""
        if self.reply_rules.update_bound:
            return self.replies(setup, drawn)
        average = self._trainer.average(setup.start, setup.position, drawn, self.samples[drawn])
        return AcceptedModels(drawn, (), average)

    def replies(self, setup: RoundSetup, participants: ClientIndices) -> list[Reply]:
        """Train the participants and return their models as replies."""
        models = self._train(setup.start, setup.position, participants)
        return [
            Reply(client, setup.position, count, model)
            for client, count, model in zip(
                participants.tolist(), self.samples[participants].tolist(), models, strict=True
            )
        ]

    def gate(
        self, setup: RoundSetup, drawn: ClientIndices, collected: AcceptedModels | Sequence[Reply]
    ) -> tuple[AcceptedModels | None, tuple[Rejection, ...]]:
        """Accept all collected models at once if the rules allow it; otherwise check every reply separately."""
        rules = self.reply_rules
        if isinstance(collected, AcceptedModels):
            if rules.on_rejection == "stop" or _all_usable(collected, setup.start, rules.limit):
                return collected, ()  # `sifu.core.round.step` refuses models that are not finite
            collected = self.replies(setup, drawn)
        active = setup.active.index if isinstance(setup.active, Places) else setup.active
        forgotten = set(range(len(self.clients))) - set(active.tolist())
        return gate_replies(self, setup, drawn, collected, rules, forgotten)

    def average(self, setup: RoundSetup, accepted: AcceptedModels) -> Average:
        """Return the mean of the accepted models, which training may already have computed."""
        start, participants, average = setup.start, accepted.participants, accepted.average
        samples = self.samples[participants]
        if average is None:
            rows = [(slice(0, participants.size), torch.from_numpy(np.asarray(accepted.models)))]
            # Another package trains in threads of its own: leave no thread of torch in a busy loop on their cores.
            with one_thread() if self._trained_by.kernels else nullcontext():
                average = average_models(lambda: iter(rows), start.astype(np.float64), samples, start.itemsize)
        if self._rounding is None:
            return average
        return replace(average, rounding=self._rounding(norm_up(start), participants))

    def local_models(self, model: Vector, position: Position, clients: ClientIndices) -> NDArray[np.floating]:
        """Return one row theta_i per client, after its local training at this position."""
        return self._train(self.layout.own_copy(model), position, self._checked_clients(clients, "trained"))

    def _train(self, start: Vector, position: Position, clients: ClientIndices) -> NDArray[np.floating]:
        trained = np.zeros((clients.size, start.size), dtype=self.layout.dtype)
        for places, models in self._trainer.train(start, position, clients):
            trained[places] = models.numpy()
        return trained

    def evaluate(self, model: Vector, clients: ClientIndices) -> Evaluation:
        """Return each client's number of samples, correct predictions (0 for regression) and summed loss."""
        chosen = self._checked_clients(clients, "evaluated")
        correct, loss_sum = self._trainer.evaluate(self.layout.own_copy(model), chosen)
        return Evaluation(chosen.copy(), self.samples[chosen], correct, loss_sum)

    def _checked_clients(self, clients: ClientIndices, what: str) -> ClientIndices:
        """Return `clients` as an array of indices; raise `InputError` if an index is unknown or repeated."""
        if clients is self._last_given:
            return self._last_checked.index
        chosen = np.asarray(clients, dtype=np.int64).reshape(-1)
        if not np.array_equal(chosen, self._last_checked.index):
            # Increasing order, the usual case, proves in one pass that the clients are distinct.
            increasing = bool((chosen[1:] > chosen[:-1]).all())
            ends = chosen[[0, -1]] if increasing and chosen.size else chosen
            lowest, highest = ends.min(initial=0), ends.max(initial=0)
            if lowest < 0 or highest >= len(self.clients):
                raise InputError(
                    f"{what} clients must be indices in 0..{len(self.clients) - 1}, found {lowest}..{highest}"
                )
            if not increasing and np.unique(chosen).size != chosen.size:
                raise InputError(f"the {what} clients name some client twice: {chosen.tolist()[:20]}")
            if not increasing:
                return chosen
            self._last_checked = Places.of(chosen, self._numbers[chosen])
        # Arrays that own their values and are read-only are cached by identity, however long they are.
        constant = isinstance(clients, np.ndarray) and clients.base is None and not clients.flags.writeable
        self._last_given = clients if constant else None
        return self._last_checked.index


class FederationOnDevice(SimulatedFederation):
    """Variant of `SimulatedFederation` whose plain loop runs on another device.

    This is a separate class, because `run.devices` identifies engines by class.
    """

    @staticmethod
    def of(federation: SimulatedFederation, device: str) -> FederationOnDevice:
        """Return a copy of a federation that trains on `device`, one client at a time."""
        settings = replace(federation.settings, strategy="loop", device=device)
        return FederationOnDevice(federation.given, federation.model, federation.training, settings)
