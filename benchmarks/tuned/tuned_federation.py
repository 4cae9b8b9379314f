"""Groups that tune the backbone separately on one device, for `tuned_networks.py`: federations, data and rounds."""

from __future__ import annotations

import copy
import json
import math
import shutil
import sys
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

try:
    import threadpoolctl  # noqa: F401
except ImportError:  # the library uses it to limit threads in solves; here the device solves
    stand_in = types.ModuleType("threadpoolctl")
    stand_in.threadpool_limits = lambda limits=None: nullcontext()  # type: ignore[attr-defined]
    sys.modules["threadpoolctl"] = stand_in

from sifu.core.engine import Position
from sifu.data import load
from sifu.data.client_data import ClientData
from sifu.data.feature_maps.fixed_networks import SIDE, EfficientNetLite0
from sifu.data.feature_maps.tuned_networks import TunedNetwork
from sifu.engines.sim.local_training import LocalTraining
from sifu.engines.sim.tuned_engine import TuningOnDevice

BACKBONE = "efficientnet_lite0_trunk.npz"
LAST = ("_blocks.12", "_blocks.13", "_blocks.14", "_blocks.15", "_conv_head", "_bn1")
"""Layers of `trainable = last`: the last stages and the widening before the mean."""


@dataclass(frozen=True)
class Job:
    """One federation: its data and partition, the number of groups, the tuned layers, and additional measurements."""

    name: str
    data: str
    split: str = "dirichlet"
    alpha: float = 0.3
    groups: int = 10
    trainable: str = "all"
    scratch: bool = True
    variants: bool = False
    rebuild: bool = False


JOBS = (
    Job("cifar10-0.3", "cifar10", variants=True),
    Job("cifar10-iid", "cifar10", "iid"),
    Job("cifar100-iid", "cifar100", "iid"),
    Job("cifar10-0.3-last", "cifar10", trainable="last", scratch=False),
    Job("celeba", "celeba", "identity"),
    Job("fashion-0.3", "fashion_mnist"),
    Job("cifar10-0.1", "cifar10", alpha=0.1),
    Job("cifar100-0.3", "cifar100"),
    Job("cifar10-0.3-s20", "cifar10", groups=20, scratch=False),
    Job("cifar10-0.3-s5", "cifar10", groups=5, scratch=False),
    Job("cifar10-0.3-rebuild", "cifar10", scratch=False, rebuild=True),
)


@dataclass(frozen=True)
class Size:
    """Size of a federation, and the length of its training."""

    clients: int = 100
    samples: int = 100
    train: int = 10_000
    test: int = 2000
    rounds: int = 12
    steps: int = 4
    batch: int = 50
    rate: float = 0.003
    head_rate: float = 0.03
    momentum: float = 0.9
    stretch: float = 1.0
    block: int = 400
    other_blocks: tuple[int, ...] = (50, 100, 200)
    sequences: int = 2
    at: tuple[int, ...] = (1, 2, 3, 5, 7, 10, 15, 20)
    scratch_at: tuple[int, ...] = (1, 5, 10)
    commit: str = ""


SMOKE = Size(
    clients=8,
    samples=8,
    train=100,
    test=40,
    rounds=1,
    steps=1,
    batch=4,
    block=6,
    other_blocks=(3,),
    sequences=1,
    at=(1, 2),
    scratch_at=(1,),
)


class OutOfTime(Exception):
    """Exception at the time limit."""


class Clock:
    """Timer that raises `OutOfTime` at its limit."""

    def __init__(self, limit: float) -> None:
        self._start, self._limit = time.perf_counter(), limit

    def check(self) -> None:
        """Raise `OutOfTime` if the time is over."""
        if time.perf_counter() - self._start > self._limit:
            raise OutOfTime


@dataclass(frozen=True)
class Images:
    """Data set on the device: training images, then test images, (n, side, side, 3), and all labels."""

    pixels: Tensor
    labels: Tensor
    train: int
    classes: int
    y_train: np.ndarray
    y_test: np.ndarray
    identity: np.ndarray | None


def images_of(name: str, folder: Path, size: Size, device: str) -> Images:
    """Read a data set, enlarge its images and move it to the device."""
    dataset = load(name, folder)
    train, test = min(size.train, len(dataset.y_train)), min(size.test, len(dataset.y_test))
    stacked = np.concatenate([dataset.x_train[:train], dataset.x_test[:test]])
    if stacked.ndim == 3:
        stacked = np.repeat(stacked[..., None], 3, axis=3)
    kind = torch.float16 if device == "cuda" else torch.float32
    pieces = []
    for start in range(0, len(stacked), 1000):
        piece = torch.as_tensor(stacked[start : start + 1000]).to(device).permute(0, 3, 1, 2).float() / 255.0
        piece = F.interpolate(piece, size=(SIDE, SIDE), mode="bilinear", align_corners=False)
        pieces.append(piece.permute(0, 2, 3, 1).to(kind).contiguous())
    labels = np.concatenate([dataset.y_train[:train], dataset.y_test[:test]]).astype(np.int64)
    return Images(
        torch.cat(pieces),
        torch.as_tensor(labels).to(device),
        train,
        len(dataset.classes),
        dataset.y_train[:train].astype(np.int64),
        dataset.y_test[:test].astype(np.int64),
        None if dataset.identity_train is None else dataset.identity_train[:train],
    )


def public_backbone(folder: Path) -> EfficientNetLite0:
    """Return the backbone with its ImageNet weights, from the packed file or from the package that provides them."""
    backbone = EfficientNetLite0()
    packed = folder / BACKBONE
    if packed.exists():
        with np.load(packed, allow_pickle=False) as stored:
            backbone.load_state_dict({name: torch.as_tensor(stored[name]) for name in stored.files}, strict=True)
        return backbone.eval()
    from sifu.data.feature_maps.fixed_networks import pretrained_efficientnet

    pretrained = pretrained_efficientnet((3, SIDE, SIDE)).module
    assert isinstance(pretrained, EfficientNetLite0)
    return pretrained.requires_grad_(True).eval()


def pack(data: Path, folder: Path) -> None:
    """Pack the four data sets and the backbone without its last layer: 60 MiB."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in sorted({job.data for job in JOBS}):
        shutil.copyfile(data / f"{name}.npz", folder / f"{name}.npz")
    np.savez(folder / BACKBONE, **{name: value.numpy() for name, value in public_backbone(data).state_dict().items()})
    print(f"{sum(file.stat().st_size for file in folder.iterdir()) / 2**20:.1f} MiB in {folder}")


@dataclass
class Run:
    """Settings that the whole measurement shares."""

    device: str
    lanes: int
    clock: Clock
    out: Path
    check: bool
    rows: list[dict[str, Any]]

    def write(self, row: Mapping[str, Any]) -> None:
        """Append a row to the file and print it."""
        line = json.dumps(dict(row))
        with self.out.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        self.rows.append(dict(row))
        print(line, flush=True)


class Lane:
    """Copy of the network that trains one client: its tuned parameters are one flat vector, and a step is one CUDA
    graph.
    """

    def __init__(self, backbone: nn.Module, images: Images, trainable: str, size: Size, device: str) -> None:
        self.images, self.size, self.device = images, size, device
        # Evaluation mode: batch statistics of a client's few images would replace the public ones, and running
        # statistics are not parameters that an average could contain.
        self.backbone = copy.deepcopy(backbone).to(device).eval().requires_grad_(False)
        self.head = nn.Linear(1280, images.classes).to(device)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        named = [(n, p) for n, p in self.backbone.named_parameters() if trainable == "all" or n.startswith(LAST)]
        tuned = [parameter.requires_grad_(True) for _, parameter in named] + list(self.head.parameters())
        self.backbone_numbers = sum(parameter.numel() for _, parameter in named)
        count = sum(parameter.numel() for parameter in tuned)
        self.flat, self.gradient = torch.zeros(count, device=device), torch.zeros(count, device=device)
        self.velocity, self.rate = torch.zeros(count, device=device), torch.full((count,), size.rate, device=device)
        self.rate[self.backbone_numbers :] = size.head_rate
        start = 0
        for parameter in tuned:
            stop = start + parameter.numel()
            self.flat[start:stop] = parameter.data.reshape(-1)
            parameter.data = self.flat[start:stop].view(parameter.shape)
            parameter.grad = self.gradient[start:stop].view(parameter.shape)
            start = stop
        self.chosen = torch.zeros(size.batch, dtype=torch.int64, device=device)
        self.stream: Any = None
        self.graph: Any = None
        if device == "cuda":
            self._capture()

    def _capture(self) -> None:
        begun = self.flat.clone()
        self.stream = torch.cuda.Stream()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for _ in range(3):
                self._step()
        torch.cuda.synchronize()
        try:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=self.stream):
                self._step()
            self.graph = graph
        except RuntimeError as error:
            print(f"steps run uncaptured: {error}", file=sys.stderr)
        torch.cuda.synchronize()
        self.flat.copy_(begun)
        self.velocity.zero_()

    def scores(self, pixels: Tensor) -> Tensor:
        """Return the scores of images (n, side, side, 3)."""
        return self.head(self.backbone(pixels.permute(0, 3, 1, 2)))

    def _step(self) -> None:
        self.gradient.zero_()
        with torch.autocast("cuda", torch.bfloat16) if self.device == "cuda" else nullcontext():
            scores = self.scores(torch.index_select(self.images.pixels, 0, self.chosen))
            loss = F.cross_entropy(scores.float(), torch.index_select(self.images.labels, 0, self.chosen))
        loss.backward()
        self.velocity.mul_(self.size.momentum).add_(self.gradient)
        self.flat.addcmul_(self.velocity, self.rate, value=-1.0)

    def train(self, begin: Tensor, batches: Tensor, result: Tensor) -> None:
        """Train one client for a round: from `begin`, one step per row of `batches`, into `result`."""
        with torch.cuda.stream(self.stream) if self.stream is not None else nullcontext():
            self.flat.copy_(begin)
            self.velocity.zero_()
            for rows in batches:
                self.chosen.copy_(rows)
                if self.graph is not None:
                    self.graph.replay()
                else:
                    self._step()
            result.copy_(self.flat)


class Tuner:
    """FedAvg of separate groups on one device."""

    def __init__(
        self,
        backbone: nn.Module,
        images: Images,
        shares: Sequence[np.ndarray],
        job: Job,
        size: Size,
        seed: int,
        run: Run,
    ) -> None:
        lanes = run.lanes if run.device == "cuda" else 1
        self.images, self.shares, self.size, self.seed, self.run = images, shares, size, seed, run
        self.lanes = [Lane(backbone, images, job.trainable, size, run.device) for _ in range(lanes)]
        self.fresh = self.lanes[0].flat.clone()
        self.backbone_numbers = self.lanes[0].backbone_numbers

    def tuned(self, groups: Sequence[Sequence[int]]) -> list[Tensor]:
        """Return the vector of each group after all separate rounds; a group without members keeps the initial one."""
        vectors = [self.fresh.clone() for _ in groups]
        results = torch.empty((len(self.shares), self.fresh.numel()), device=self.fresh.device)
        everyone = [(group, client) for group, members in enumerate(groups) for client in members]
        for number in range(self.size.rounds):
            self.run.clock.check()
            drawn = np.stack([self._batches(number, client) for _, client in everyone])
            batches = torch.as_tensor(drawn).to(self.fresh.device)
            self._settle()
            for place, (group, client) in enumerate(everyone):
                lane = self.lanes[place % len(self.lanes)]
                lane.train(vectors[group], batches[place], results[client])
            self._settle()
            for group, members in enumerate(groups):
                if members:
                    weights = [len(self.shares[client]) for client in members]
                    share = torch.tensor(weights, dtype=torch.float64, device=self.fresh.device) / sum(weights)
                    vectors[group] = torch.einsum("c,cp->p", share.float(), results[list(members)])
        return vectors

    def _settle(self) -> None:
        if self.run.device == "cuda":
            torch.cuda.synchronize()

    def _batches(self, number: int, client: int) -> np.ndarray:
        """Return a client's batches of a round: passes over its images, keyed only by its position."""
        own, wanted = self.shares[client], self.size.steps * self.size.batch
        generator = np.random.default_rng([self.seed, number, client])
        passes = [generator.permutation(own) for _ in range(-(-wanted // len(own)))]
        return np.concatenate(passes)[:wanted].reshape(self.size.steps, self.size.batch)

    def features(self, vector: Tensor) -> Tensor:
        """Return the float32 features of all images through the backbone with these parameters."""
        return self._through(vector, heads=False)

    def accuracy(self, vector: Tensor) -> float:
        """Return the accuracy on the test images of the network with its own head."""
        scores = self._through(vector, heads=True)[self.images.train :]
        right = scores.argmax(dim=1) == self.images.labels[self.images.train :]
        return 100.0 * float(right.double().mean())

    def _through(self, vector: Tensor, *, heads: bool) -> Tensor:
        lane = self.lanes[0]
        lane.flat.copy_(vector)
        outputs = []
        with torch.no_grad():
            for start in range(0, len(self.images.pixels), 500):
                pixels = self.images.pixels[start : start + 500].float()
                outputs.append(lane.scores(pixels) if heads else lane.backbone(pixels.permute(0, 3, 1, 2)))
        return torch.cat(outputs)


def time_rounds(rounds: int, size: Size, device: str, lanes: Sequence[int]) -> None:
    """Time a round of all clients of ten groups, in the library's engine and in a script with captured steps.

    Images and weights are random, because time does not depend on them. The library's clients have images of 32 pixels,
    which the network enlarges in every step; the script enlarges them beforehand.
    """
    groups = [np.arange(group, size.clients, 10) for group in range(10)]
    print(
        f"{size.clients} clients, {size.steps} steps of batch {size.batch}; seconds a round, torch {torch.__version__}"
    )
    for lanes_at_once in sorted({1, *lanes}):
        try:
            _time_script(rounds, size, device, lanes_at_once, groups)
        except RuntimeError as error:
            print(f"script, {lanes_at_once} lanes: {error}", flush=True)
    for precision in ("bfloat16", "tf32", "float32"):
        for lanes_at_once in lanes:
            try:
                _time_library(rounds, size, device, lanes_at_once, groups, precision)
            except RuntimeError as error:
                print(f"sifu, {precision}, {lanes_at_once} lanes: {error}", flush=True)


def _time_script(rounds: int, size: Size, device: str, lanes: int, groups: Sequence[np.ndarray]) -> None:
    generator, labels = np.random.default_rng(0), np.arange(size.train) % 10
    kind = torch.float16 if device == "cuda" else torch.float32
    pixels = torch.rand((size.train, SIDE, SIDE, 3), device=device, dtype=kind)
    images = Images(pixels, torch.as_tensor(labels).to(device), size.train, 10, labels, labels[:0], None)
    shares = np.array_split(generator.permutation(size.train), size.clients)
    run = Run(device, lanes, Clock(math.inf), Path(), check=False, rows=[])
    begun = time.perf_counter()
    with cudnn_benchmark(device):
        tuner = Tuner(EfficientNetLite0().eval(), images, shares, JOBS[0], replace(size, rounds=1), 0, run)
        members = [group.tolist() for group in groups]
        tuner.tuned(members)
        first = time.perf_counter() - begun
        seconds = [timed_round(lambda: tuner.tuned(members)) for _ in range(rounds)]
    captured = all(lane.graph is not None for lane in tuner.lanes)
    name = f"script, bfloat16, channels last, {len(tuner.lanes)} lanes{'' if captured else ', uncaptured'}"
    _print_times(name, first, seconds, device)


def _time_library(
    rounds: int,
    size: Size,
    device: str,
    lanes: int,
    groups: Sequence[np.ndarray],
    precision: str,
) -> None:
    local = LocalTraining(size.rate, size.steps, size.batch, size.momentum)
    network = TunedNetwork(EfficientNetLite0().eval(), 1280, 10, "all")
    clients = []
    for number in range(size.clients):
        generator = np.random.default_rng(number)
        pixels = generator.random((size.samples, 3, 32, 32), dtype=np.float32)
        clients.append(ClientData(f"client-{number:03d}", pixels, np.arange(size.samples) % 10))
    begun = time.perf_counter()
    engine = TuningOnDevice(clients, network, local, 0, device, precision=precision, lanes=lanes)
    start = engine.loop.on_device(engine.initial_model(0))
    models = [start] * len(groups)

    def one_round(number: int) -> None:
        nonlocal models
        models, _ = engine.loop.means(models, Position(0, number), groups)

    one_round(0)
    first = time.perf_counter() - begun
    seconds = [timed_round(lambda number=number: one_round(number)) for number in range(1, 1 + rounds)]
    why = f", uncaptured ({engine.loop.why_uncaptured})" if engine.loop.why_uncaptured else ""
    name = f"sifu, {precision}, {lanes} lanes{why}"
    _print_times(name, first, seconds, device)


def timed_round(work: Callable[[], object]) -> float:
    """Return the seconds until the device has finished all submitted work."""
    start = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


@contextmanager
def cudnn_benchmark(device: str) -> Iterator[None]:
    """Let cuDNN choose algorithms by timing, only for the script, because rounding then depends on the choice."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = device == "cuda"
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def _print_times(name: str, first: float, seconds: Sequence[float], device: str) -> None:
    memory = ""
    if device == "cuda":
        memory = f", {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB"
        torch.cuda.reset_peak_memory_stats()
    print(f"{name:44} {np.median(seconds):6.2f} ({min(seconds):.2f} to {max(seconds):.2f}), ", end="")
    print(f"{first:.1f} s until the first round was done{memory}", flush=True)
