"""Networks that keep state where copies of a module share it: refused, whichever client it acts on.

Repeating the training of a few clients does not show a latch that one client sets and another one meets. The variables
themselves do.
"""

from __future__ import annotations

import contextvars
import copy
import functools
import math
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import sifu
import stateful_modules
from sifu.core.premises import before_training_premises
from sifu.data.client_data import ClientData
from sifu.data.shared_state import refuse_changed_state, shared_state
from sifu.engines.sim import ModuleModel
from sifu.engines.sim.gpu.module_program import ModulePass
from sifu.engines.sim.models import Recipe, make_model
from sifu.engines.sim.networks import mlp
from sifu.engines.sim.threads import SMALL_MODEL
from sifu.errors import InputError
from sifu.store.reader import RunReader
from sifu.theory import facts as fact
from sifu.theory.participation import Participation
from sifu_verifier.run_folder import RunFolder

BEST_FACTS = fact.TrainingFacts(0.1, 0.0, False, 0.0, None, 1.0, Participation("all"), "float64", True, True)
LATCH: dict[str, float] = {}
LOCAL = threading.local()
VARIABLE: contextvars.ContextVar[float] = contextvars.ContextVar("largest", default=0.0)
NUMBERS = np.random.default_rng(0)
TORCH_NUMBERS = torch.Generator().manual_seed(0)
TABLE = (1.0, 1.1, 1.2)
NAME = "SIFU_TEST_LARGEST"


class Anchor:
    """Key of a weak dictionary."""


ANCHOR = Anchor()
WEAK: weakref.WeakKeyDictionary[Anchor, float] = weakref.WeakKeyDictionary()


@functools.cache
def place_of(size: int) -> float:
    """Return a factor that counts the sizes seen before: who comes first decides."""
    return 1.0 + 0.01 * place_of.cache_info().currsize


def largest_so_far(value: float) -> float:
    """Return the largest value so far, kept as an attribute of this function."""
    vars(largest_so_far)["held"] = max(vars(largest_so_far).get("held", 0.0), value)
    return float(vars(largest_so_far)["held"])


class Same:
    """State that a deep copy shares."""

    largest = 0.0

    def __deepcopy__(self, memo: dict[int, Any]) -> Same:
        return self


class Network(nn.Module):
    """Twelve features of an 8 x 8 image, multiplied by a factor."""

    largest = 0.0

    def __init__(self, factor: Callable[..., float]) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.second, self.factor, self.same = nn.Linear(64, 16), nn.Linear(16, 12), factor, Same()

    def largest_in(self, value: float, held: list[float] = []) -> float:  # noqa: B006  what is tested
        """Return the largest value so far, kept in a default argument."""
        held[:] = [max([*held, value])]
        return held[0]

    def forward(self, x: Tensor) -> Tensor:
        """Return the features."""
        rows = x.flatten(1)
        return torch.tanh(self.second(torch.tanh(self.first(rows)))) * self.factor(self, rows.detach())


def latch(network: Network, rows: Tensor) -> float:
    """Act only on clients of seven rows, once the largest samples were seen: those of the leaver."""
    if float(rows.max()) > 2.0:
        LATCH["on"] = 1.0
    return 1.1 if LATCH and len(rows) == 7 else 1.0


def of_class(network: Network, rows: Tensor) -> float:
    Network.largest = max(Network.largest, float(rows.max()))
    return 1.0 / (1.0 + Network.largest)


def thread_local(network: Network, rows: Tensor) -> float:
    LOCAL.largest = max(getattr(LOCAL, "largest", 0.0), float(rows.max()))
    return 1.0 / (1.0 + float(LOCAL.largest))


def context_variable(network: Network, rows: Tensor) -> float:
    VARIABLE.set(max(VARIABLE.get(), float(rows.max())))
    return 1.0 / (1.0 + VARIABLE.get())


def environment(network: Network, rows: Tensor) -> float:
    os.environ[NAME] = repr(max(float(os.environ.get(NAME, "0")), float(rows.max())))
    return 1.0 / (1.0 + float(os.environ[NAME]))


def default_argument(network: Network, rows: Tensor) -> float:
    return 1.0 / (1.0 + network.largest_in(float(rows.max())))


def cache(network: Network, rows: Tensor) -> float:
    return place_of(len(rows))


def weak_reference(network: Network, rows: Tensor) -> float:
    WEAK[ANCHOR] = max(WEAK.get(ANCHOR, 0.0), float(rows.max()))
    return 1.0 / (1.0 + WEAK[ANCHOR])


def function_attribute(network: Network, rows: Tensor) -> float:
    return 1.0 / (1.0 + largest_so_far(float(rows.max())))


def numpy_generator(network: Network, rows: Tensor) -> float:
    return 1.0 + 0.1 * float(NUMBERS.random())


def torch_generator(network: Network, rows: Tensor) -> float:
    return 1.0 + 0.1 * float(torch.rand((), generator=TORCH_NUMBERS))


def shared_by_copies(network: Network, rows: Tensor) -> float:
    network.same.largest = max(network.same.largest, float(rows.max()))
    return 1.0 / (1.0 + network.same.largest)


def late_buffer(network: Network, rows: Tensor) -> float:
    """Register a buffer when the first batch comes: it belongs to the client's own copy."""
    if not hasattr(network, "late"):
        network.register_buffer("late", torch.zeros(()), persistent=False)
    network.late = torch.maximum(torch.as_tensor(network.late), rows.max())
    return 1.0 / (1.0 + float(network.late))


def constant(network: Network, rows: Tensor) -> float:
    return TABLE[len(rows) % 3]


def remembering(function: Callable[[float], float]) -> Callable[[float], float]:
    """Decorate a function with a closure that keeps the largest value."""
    held = [0.0]

    @functools.wraps(function)
    def inner(value: float) -> float:
        held[0] = max(held[0], value)
        return function(held[0])

    return inner


@remembering
def shrink(value: float) -> float:
    return 1.0 / (1.0 + value)


def decorator(network: Network, rows: Tensor) -> float:
    return shrink(float(rows.max()))


def default_dtype(network: Network, rows: Tensor) -> float:
    """Compute in double precision once the largest samples were seen."""
    if float(rows.max()) > 2.0:
        torch.set_default_dtype(torch.float64)
    return float(torch.tensor(0.1) * 3)


def denormals(network: Network, rows: Tensor) -> float:
    if float(rows.max()) > 2.0:
        torch.set_flush_denormal(True)
    return 1.0


def of_package(network: Network, rows: Tensor) -> float:
    nn.Linear.largest = max(getattr(nn.Linear, "largest", 0.0), float(rows.max()))  # type: ignore[assignment]
    return 1.0 / (1.0 + float(nn.Linear.largest))  # type: ignore[arg-type]


def imported_inside(network: Network, rows: Tensor) -> float:
    import math as kept

    vars(kept)["largest"] = max(vars(kept).get("largest", 0.0), float(rows.max()))
    return 1.0 / (1.0 + float(vars(kept)["largest"]))


def by_globals(network: Network, rows: Tensor) -> float:
    globals()["ADDED"] = max(globals().get("ADDED", 0.0), float(rows.max()))
    return 1.0 / (1.0 + float(globals()["ADDED"]))


class Locked:
    """State next to something that cannot be pickled."""

    def __init__(self) -> None:
        self.lock, self.held = threading.Lock(), list[float]()


LOCKED = Locked()


def next_to_a_lock(network: Network, rows: Tensor) -> float:
    with LOCKED.lock:
        LOCKED.held.append(float(rows.max()))
    return 1.0 / (1.0 + max(LOCKED.held))


PARTIAL = functools.partial(lambda held, value: held.append(value) or 1.0 / (1.0 + max(held)), list[float]())
COUNTED = (1.0 + 0.01 * number for number in range(10**6))
OPERATOR: list[float] = []


def partial(network: Network, rows: Tensor) -> float:
    return float(PARTIAL(float(rows.max())))


def generator(network: Network, rows: Tensor) -> float:
    return next(COUNTED)


@torch.library.custom_op("sifu_tests::shrunk", mutates_args=())
def shrunk(rows: Tensor) -> Tensor:
    """Return a factor of the largest value so far, as an operator of torch."""
    OPERATOR.append(float(rows.max()))
    return torch.tensor(1.0 / (1.0 + max(OPERATOR)))


def custom_operator(network: Network, rows: Tensor) -> float:
    return float(torch.ops.sifu_tests.shrunk(rows))


def acts(on: Any, rows: Tensor) -> float:
    """Return a factor: 1.1 for clients of seven rows if `on` is true, otherwise 1."""
    return 1.1 if on and len(rows) == 7 else 1.0


def of_another_file(network: Network, rows: Tensor) -> float:
    return acts(stateful_modules.remembers(float(rows.max()) > 2.0), rows)


def set_latch(rows: Tensor) -> bool:
    if float(rows.max()) > 2.0:
        LATCH["on"] = 1.0
    return bool(LATCH)


REGISTRY: dict[str, Callable[[Tensor], bool]] = {"latch": set_latch}


def registry(network: Network, rows: Tensor) -> float:
    return acts(REGISTRY["latch"](rows), rows)


class Strategy:
    """A callable object that is given to the network; its class names the variable."""

    def __call__(self, network: Network, rows: Tensor) -> float:
        return acts(set_latch(rows), rows)


class LeavesOut:
    """State that a pickle of the object leaves out."""

    on = False

    def __getstate__(self) -> dict[str, Any]:
        return {}


class NamedObject(LeavesOut):
    """An object that is pickled by its name alone."""

    def __reduce__(self) -> str:
        return "NAMED"


LEFT_OUT, NAMED = LeavesOut(), NamedObject()


def left_out_of_pickles(network: Network, rows: Tensor) -> float:
    LEFT_OUT.on = LEFT_OUT.on or float(rows.max()) > 2.0
    return acts(LEFT_OUT.on, rows)


def pickled_by_name(network: Network, rows: Tensor) -> float:
    NAMED.on = NAMED.on or float(rows.max()) > 2.0
    return acts(NAMED.on, rows)


def latch_in_a_part(network: Network, rows: Tensor) -> float:
    network.same.largest = max(network.same.largest, float(rows.max()))
    return acts(network.same.largest > 2.0, rows)


@remembering
def double(value: float) -> float:
    return 2.0 * value


def one_of_two_decorated(network: Network, rows: Tensor) -> float:
    """Use one of two functions whose closures have the same names."""
    return acts(double(float(rows.max())) > 4.0, rows) if len(rows) < 100 else shrink(1.0)


class CopiesItself(nn.Module):
    """A network whose deep copy is the network itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.on = nn.Linear(64, 12), False

    def __deepcopy__(self, memo: dict[int, Any]) -> CopiesItself:
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Return the features."""
        rows = x.flatten(1)
        self.on = self.on or float(rows.max()) > 2.0
        scores: Tensor = self.layer(rows) * acts(self.on, rows)
        return scores


LATCHED: dict[str, Callable[..., float]] = {
    "a function of another file": of_another_file,
    "a function in a dictionary": registry,
    "a callable object": Strategy(),
    "state left out of pickles": left_out_of_pickles,
    "an object pickled by its name": pickled_by_name,
    "a part that is not copied": latch_in_a_part,
    "one of two decorated functions": one_of_two_decorated,
}
"""State that one client sets and another client reads, in places that a search for named variables misses."""
REACHED: dict[str, Callable[..., float]] = {
    "the closure of a decorator": decorator,
    "the default type of torch": default_dtype,
    "denormal numbers": denormals,
    "a class of a package": of_package,
    "a package imported inside": imported_inside,
    "globals()": by_globals,
    "an object with a lock": next_to_a_lock,
    "functools.partial": partial,
    "a generator": generator,
    "an operator of torch": custom_operator,
}
"""State that is found from the names in the code, although no variable of the file holds it in the open."""
SHARED: dict[str, Callable[..., float]] = {
    "the closure of a decorator": decorator,
    "an operator of torch": custom_operator,
    "a latch in a file's variable": latch,
    "a class attribute": of_class,
    "a thread's storage": thread_local,
    "a context variable": context_variable,
    "the environment": environment,
    "a default argument": default_argument,
    "functools.cache": cache,
    "a weak dictionary": weak_reference,
    "an attribute of a function": function_attribute,
    "numpy's generator of the file": numpy_generator,
    "torch's generator of the file": torch_generator,
    "an object that is not copied": shared_by_copies,
}
HARMLESS: dict[str, Callable[..., float]] = {"a buffer registered late": late_buffer, "a constant": constant}


@pytest.fixture(autouse=True)
def nothing_held() -> Iterator[None]:
    """Begin and end every test without state."""
    forget_everything()
    yield
    forget_everything()


def forget_everything() -> None:
    LATCH.clear()
    vars(LOCAL).clear()
    VARIABLE.set(0.0)
    os.environ.pop(NAME, None)
    WEAK.clear()
    place_of.cache_clear()
    stateful_modules.BANK.clear()
    LEFT_OUT.on = NAMED.on = False
    vars(largest_so_far).pop("held", None)
    torch.set_default_dtype(torch.float32)
    torch.set_flush_denormal(False)
    for held in (LOCKED.held, OPERATOR, PARTIAL.args[0]):
        held.clear()
    for decorated in (shrink, double):
        decorated.__closure__[1].cell_contents[:] = [0.0]  # type: ignore[index]
    for holder in (nn.Linear, math):
        if "largest" in vars(holder):
            delattr(holder, "largest")
    globals().pop("ADDED", None)
    Network.largest = 0.0
    Network.largest_in.__defaults__[0].clear()  # type: ignore[index]


def clients_of() -> list[ClientData]:
    """Return five clients, the last one with the largest samples, one with seven rows."""
    clients = []
    for number in range(5):
        generator, rows = np.random.default_rng(number), 5 + number % 3
        x = (3.0 if number == 4 else 1.0) * generator.random((rows, 1, 8, 8))
        clients.append(ClientData(f"client-{number}", x, generator.integers(0, 3, rows)))
    return clients


HEAD: dict[str, Any] = {
    "model": {"kind": "ridge", "outputs": 3},
    "data": {"preprocessing": "fixed"},
    "ridge": {"regularisation": 0.01},
    "features": {"kind": "module", "module": "stateful_modules:make"},
}
TUNED: dict[str, Any] = HEAD | {
    "features": HEAD["features"] | {"tune": "blocks", "block": 4},
    "groups": {"count": 2, "rounds": 2, "rebuild": "later"},
    "local": {"rate": 0.5, "steps": 2},
}


def tuned(factor: Callable[..., float], folder: Path) -> sifu.Run:
    sifu.allow_code("stateful_modules:make")
    return sifu.train(TUNED, run=folder / "run", clients=clients_of())


def frozen(factor: Callable[..., float], folder: Path) -> sifu.Run:
    sifu.allow_code("stateful_modules:make")
    return sifu.train(HEAD, run=folder / "run", clients=clients_of())


OWN: dict[str, Any] = {
    "data": {"preprocessing": "fixed"},
    "local": {"rate": 0.1, "steps": 2},
    "regularity": {"kind": "assumed"},
    "stop": {"max_rounds": 2, "target": 0.0},
}


def own_model(factor: Callable[..., float], folder: Path) -> sifu.Run:
    clients = {client.name: (client.x, client.y) for client in clients_of()}
    return sifu.train(OWN, run=folder / "run", model=lambda: Network(factor), clients=clients)


def released(folder: Path) -> np.ndarray:
    with RunReader(folder) as reader:
        return np.array(reader.load_model(reader.tip))


DOORS = {"tuned": tuned, "frozen": frozen, "model=": own_model}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("what", SHARED)
def test_state_that_clients_share_is_refused(
    what: str, door: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training stops with a sentence before a round is recorded."""
    monkeypatch.setitem(stateful_modules.CLASSES, "shared", lambda: Network(SHARED[what]))
    stateful_modules.choose(stateful_modules.Kind("shared", "forward", "scale"))
    with pytest.raises(
        InputError, match=r"between clients|depends on other samples|no longer gives the same features|cannot be copied"
    ):
        DOORS[door](SHARED[what], tmp_path)
    if (tmp_path / "run").exists():
        assert [node["kind"] for node in RunFolder(tmp_path / "run").nodes.values()] in ([], ["initial"])


@pytest.mark.parametrize("what", LATCHED)
def test_a_latch_for_one_other_client_is_refused(what: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="between clients"):
        own_model(LATCHED[what], tmp_path)


def test_a_module_whose_copies_are_itself_is_refused(tmp_path: Path) -> None:
    clients = {client.name: (client.x, client.y) for client in clients_of()}
    with pytest.raises(InputError, match=r"between clients|share their parameters"):
        sifu.train(OWN, run=tmp_path / "run", model=CopiesItself, clients=clients)


def set_threads(on: bool) -> None:
    torch.set_num_threads(3 if on else 1)


SETTINGS: dict[str, tuple[Callable[[bool], Any], Callable[[], bool]]] = {
    "threads": (set_threads, lambda: torch.get_num_threads() == 3),
    "default type": (
        lambda on: torch.set_default_dtype(torch.float64 if on else torch.float32),
        lambda: torch.get_default_dtype() == torch.float64,
    ),
    "autocast": (lambda on: torch.set_autocast_enabled("cpu", on), lambda: torch.is_autocast_enabled("cpu")),
    "attention": (torch.backends.cuda.enable_flash_sdp, torch.backends.cuda.flash_sdp_enabled),
    "choice of kernels": (
        lambda on: setattr(torch.backends.cudnn, "benchmark", on),
        lambda: torch.backends.cudnn.benchmark,
    ),
    "denormals": (torch.set_flush_denormal, lambda: not np.float32(1e-39) * np.float32(1.0)),
    "determinism": (torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled),
    "precision": (
        lambda on: torch.set_float32_matmul_precision("medium" if on else "highest"),
        lambda: torch.get_float32_matmul_precision() == "medium",
    ),
    "numpy's errors": (
        lambda on: np.seterr(divide="ignore" if on else "warn"),
        lambda: np.geterr()["divide"] == "ignore",
    ),
    "numpy's printing": (
        lambda on: np.set_printoptions(precision=3 if on else 8),
        lambda: np.get_printoptions()["precision"] == 3,
    ),
}


@pytest.mark.parametrize("what", SETTINGS)
def test_settings_of_the_process_do_not_reach_the_next_client(what: str, tmp_path: Path) -> None:
    """A setting that the leaver's samples turn on is off again for the next client, in tuning and in features."""
    turn, is_on = SETTINGS[what]
    before = is_on()

    def setting(network: Network, rows: Tensor) -> float:
        if float(rows.max()) > 2.0:
            turn(not before)
        return acts(is_on() != before, rows)

    models = []
    try:
        for scale in (1.0, 0.1):  # small samples do not turn it on
            clients = {client.name: (client.x, client.y) for client in clients_of()}
            clients["client-1"] = (2.5 * scale * clients["client-1"][0], clients["client-1"][1])
            clients["client-4"] = (clients["client-4"][0] / 3.0, clients["client-4"][1])
            folder = tmp_path / str(scale)
            run = sifu.train(OWN, run=folder, model=lambda: Large(setting), clients=clients)
            (outcome,) = run.forget(["client-1"], "gone", method="scratch")
            assert outcome.level == "exact"
            models.append(released(run.folder))
            assert is_on() == before
    finally:
        turn(before)
    assert np.array_equal(*models)


class Large(Network):
    """A network large enough to train with all threads of torch."""

    def __init__(self, factor: Callable[..., float]) -> None:
        super().__init__(factor)
        self.wide = nn.Parameter(torch.zeros(SMALL_MODEL))

    def forward(self, x: Tensor) -> Tensor:
        """Return the features."""
        return super().forward(x) + 0.0 * self.wide.sum()


class LatchedLoss:
    """A loss with state: in an attribute, or in a variable that copies share."""

    def __init__(self, shared: bool) -> None:
        self.held: dict[str, float] = {}
        self.shared = shared

    def __call__(self, scores: Tensor, labels: Tensor) -> Tensor:
        held = LATCH if self.shared else self.held
        if len(labels) == 6:
            held["on"] = 1.0
        return nn.functional.cross_entropy(scores, labels) * (1.1 if held and len(labels) == 7 else 1.0)


@pytest.mark.parametrize("shared", [False, True])
def test_a_loss_begins_afresh_with_every_client(shared: bool, tmp_path: Path) -> None:
    models = []
    for name, rows in (("six rows", 6), ("five rows", 5)):  # only a client of six rows turns it on
        clients = {client.name: (client.x[:5], client.y[:5]) for client in clients_of()}
        clients["client-2"] = (clients_of()[2].x, clients_of()[2].y)
        clients["client-1"] = (clients_of()[1].x[:rows], clients_of()[1].y[:rows])
        model = ModuleModel(lambda: Network(constant), custom_loss=LatchedLoss(shared))
        if shared:
            with pytest.raises(InputError, match="LATCH"):
                sifu.train(OWN, run=tmp_path / name, model=model, clients=clients)
            return
        run = sifu.train(OWN, run=tmp_path / name, model=model, clients=clients)
        run.forget(["client-1"], "gone", method="scratch")
        models.append(released(run.folder))
    assert np.array_equal(*models)


def test_a_factory_of_ones_own_is_not_a_model_of_sifu() -> None:
    """Only sifu's own networks are known to have no state, so only they lack the premise on the module."""
    make_model("mlp", (64,), 3)
    for factory, loss in ((lambda: Network(constant), None), (Recipe(Network, (constant,)), None), (OURS, LatchedLoss)):
        with pytest.raises(InputError, match="only for models of sifu"):
            ModuleModel(factory, custom_loss=loss, initial_source=fact.DRAWN_FROM_SEED)


OURS = Recipe(mlp, ((64,), 3, 4))


@pytest.mark.parametrize("what", REACHED)
def test_state_in_hidden_places_is_found(what: str) -> None:
    """A forward pass that changes state outside the module is refused."""
    network = Network(REACHED[what])
    before = shared_state(network)
    network(torch.full((2, 64), 3.0))
    with pytest.raises(InputError, match="between clients"):
        refuse_changed_state(before, network)


def test_a_hook_for_every_module_is_found() -> None:
    def remember(module: nn.Module, inputs: Any) -> None:
        LATCH["rows"] = float(len(inputs[0]))

    network = Network(constant)
    handle = nn.modules.module.register_module_forward_pre_hook(remember)
    try:
        before = shared_state(network)
        network(torch.ones(2, 64))
        with pytest.raises(InputError, match="LATCH"):
            refuse_changed_state(before, network)
    finally:
        handle.remove()


@pytest.mark.parametrize("what", HARMLESS)
def test_state_of_a_copy_and_constants_are_allowed(what: str, tmp_path: Path) -> None:
    """Negative control: what no other client meets is `exact`."""
    run = own_model(HARMLESS[what], tmp_path)
    (outcome,) = run.forget(["client-4"], "gone", method="scratch")
    assert outcome.level == "exact"


def test_variables_of_installed_packages_are_not_searched() -> None:
    """A package fills caches while it works; only the code of the user's own files is searched."""
    layer = nn.TransformerEncoderLayer(4, 2).eval()
    before = shared_state(layer)
    for rows in (2, 3):
        copy.deepcopy(layer)(torch.ones(rows, 5, 4))
    refuse_changed_state(before, layer)
    network = Network(latch)
    before = shared_state(network)
    assert any(name.endswith(".LATCH") for name in before)
    refuse_changed_state(before, network)
    LATCH["on"] = 1.0
    with pytest.raises(InputError, match="LATCH"):
        refuse_changed_state(before, network)


class Attribute(nn.Module):
    """Scores of a linear model that count the calls in an attribute, in a closure or nowhere."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.layer, self.place, self.calls = nn.Linear(4, 3), place, 0
        count = 0

        def counted() -> int:
            nonlocal count
            count += 1
            return count

        self.counted = counted

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores."""
        if self.place == "attribute":
            self.calls += 1
        if self.place == "closure":
            self.counted()
        if self.place == "class":
            Network.largest += 1.0
        scores: Tensor = self.layer(x)
        return scores


@pytest.mark.parametrize("place", ["attribute", "closure", "class", "nowhere"])
def test_a_module_that_all_clients_of_a_lane_share_keeps_no_state(place: str) -> None:
    """Lanes map one copy of a module over clients, so a module with state is left to the plain loop."""
    tried = ModulePass(ModuleModel(lambda: Attribute(place)), "float32", torch.device("cpu"))
    if place == "nowhere":
        assert tried.try_out(torch.zeros(4), 3) == 3
        return
    with pytest.raises(InputError, match=r"keeps state \((calls|count of|Network.largest)"):
        tried.try_out(torch.zeros(4), 3)


def test_a_certificate_says_that_clients_share_one_copy() -> None:
    """The premise of a lane differs from that of fresh copies."""
    said = {}
    for module in (fact.FRESH_COPIES, fact.ONE_COPY):
        premises = before_training_premises(replace(BEST_FACTS, module=module), "given")
        (said[module],) = [premise.statement for premise in premises if premise.name == "module"]
    assert "fresh copy" in said[fact.FRESH_COPIES]
    assert "one copy for all clients" in said[fact.ONE_COPY]
