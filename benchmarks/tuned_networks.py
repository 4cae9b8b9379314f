"""Test accuracy of tuned networks that forget in no round: blocks and merges against tuning again and frozen heads.

    python benchmarks/tuned_networks.py --data FOLDER --out rows.jsonl --seeds 3 --seconds 600
    python benchmarks/tuned_networks.py --data FOLDER --pack FOLDER    # the data sets and the trunk in one folder
    python benchmarks/tuned_networks.py --data FOLDER --out rows.jsonl --smoke    # minutes of CPU, every path once
    python benchmarks/tuned_networks.py --time-rounds 5 --device cuda    # seconds a round; needs no data

EfficientNet-Lite0 with its ImageNet weights, images enlarged to 128 pixels, 100 clients of 100 images, everyone takes
part. Groups (by a keyed hash of names) tune the trunk apart; features of all trunks are computed once per seed, and
every request is then a matter of whole-number statistics, as in `sifu.theory.closed_form`: the fixed point, the
projection, the places of blocks, the grid of penalties and the merge are the library's. Only the products and the
eigenvalues are computed on the device, where sums of integers below 2^53 are the same integers; `--smoke` compares them
with the library's statistics. The penalty is by generalised cross-validation: no choice looks at test images.

Rows are appended to one file of JSON lines as they are measured; a seed of a job that is finished there is skipped, so
the same command goes on after `--seconds` or a kill. Needs torch and numpy; the folder of the library on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import math
import shutil
import sys
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

try:
    import threadpoolctl  # noqa: F401
except ImportError:  # the library limits threads with it where it solves; the solves here are the device's
    stand_in = types.ModuleType("threadpoolctl")
    stand_in.threadpool_limits = lambda limits=None: nullcontext()  # type: ignore[attr-defined]
    sys.modules["threadpoolctl"] = stand_in

from sifu.core.engine import Position
from sifu.data.client_data import ClientData
from sifu.data.feature_maps.fixed_networks import SIDE, EfficientNetLite0
from sifu.data.feature_maps.tuned_networks import TunedNetwork
from sifu.data.partition import partition
from sifu.data.sources import load
from sifu.engines.sim.local_training import LocalTraining
from sifu.engines.sim.tuned_engine import TuningOnDevice
from sifu.theory.closed_form import FixedPoint, Targets, statistics_of, total
from sifu.theory.closed_form.blocks import Blocks, projection, strike
from sifu.theory.closed_form.ridge import GRID
from sifu.theory.merging import members_by_group, merge, move_on

NORM = 10.0
FIXED_PENALTY = 0.1
"""r where it is fixed beforehand: a request then solves once, instead of scoring the whole grid."""
TRUNK = "efficientnet_lite0_trunk.npz"
LAST = ("_blocks.12", "_blocks.13", "_blocks.14", "_blocks.15", "_conv_head", "_bn1")
"""The layers of `trainable = last`: the last stages and the widening before the mean."""


@dataclass(frozen=True)
class Job:
    """One federation: which data, how it is spread, how many groups, what is tuned and what is measured besides."""

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
    """How large a federation is, and how long it trains."""

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
    """The time limit was reached."""


class Clock:
    """Seconds since the start, and whether there are any left."""

    def __init__(self, limit: float) -> None:
        self._start, self._limit = time.perf_counter(), limit

    def check(self) -> None:
        """Stop where time is up."""
        if time.perf_counter() - self._start > self._limit:
            raise OutOfTime


@dataclass(frozen=True)
class Images:
    """A data set on the device: training images first, then test images, (n, side, side, 3), and all labels."""

    pixels: Tensor
    labels: Tensor
    train: int
    classes: int
    y_train: np.ndarray
    y_test: np.ndarray
    identity: np.ndarray | None


def images_of(name: str, folder: Path, size: Size, device: str) -> Images:
    """Read, enlarge and move a data set to the device."""
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


def public_trunk(folder: Path) -> EfficientNetLite0:
    """The trunk with its ImageNet weights, from the packed file or from the package that ships them."""
    trunk = EfficientNetLite0()
    packed = folder / TRUNK
    if packed.exists():
        with np.load(packed, allow_pickle=False) as stored:
            trunk.load_state_dict({name: torch.as_tensor(stored[name]) for name in stored.files}, strict=True)
        return trunk.eval()
    from sifu.data.feature_maps.fixed_networks import pretrained_efficientnet

    pretrained = pretrained_efficientnet((3, SIDE, SIDE)).module
    assert isinstance(pretrained, EfficientNetLite0)
    return pretrained.requires_grad_(True).eval()


def pack(data: Path, folder: Path) -> None:
    """The four data sets and the trunk without its last layer: 60 MiB."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in sorted({job.data for job in JOBS}):
        shutil.copyfile(data / f"{name}.npz", folder / f"{name}.npz")
    np.savez(folder / TRUNK, **{name: value.numpy() for name, value in public_trunk(data).state_dict().items()})
    print(f"{sum(file.stat().st_size for file in folder.iterdir()) / 2**20:.1f} MiB in {folder}")


class Lane:
    """A copy of the network at work on one client: its tuned parameters are one flat vector, a step one CUDA graph."""

    def __init__(self, trunk: nn.Module, images: Images, trainable: str, size: Size, device: str) -> None:
        self.images, self.size, self.device = images, size, device
        # Evaluation mode: batch statistics of a client's few images would replace those of the public training, and
        # running statistics are no parameters that an average could hold.
        self.trunk = copy.deepcopy(trunk).to(device).eval().requires_grad_(False)
        self.head = nn.Linear(1280, images.classes).to(device)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        named = [(n, p) for n, p in self.trunk.named_parameters() if trainable == "all" or n.startswith(LAST)]
        tuned = [parameter.requires_grad_(True) for _, parameter in named] + list(self.head.parameters())
        self.trunk_numbers = sum(parameter.numel() for _, parameter in named)
        count = sum(parameter.numel() for parameter in tuned)
        self.flat, self.gradient = torch.zeros(count, device=device), torch.zeros(count, device=device)
        self.velocity, self.rate = torch.zeros(count, device=device), torch.full((count,), size.rate, device=device)
        self.rate[self.trunk_numbers :] = size.head_rate
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
        """Of images (n, side, side, 3)."""
        return self.head(self.trunk(pixels.permute(0, 3, 1, 2)))

    def _step(self) -> None:
        self.gradient.zero_()
        with torch.autocast("cuda", torch.bfloat16) if self.device == "cuda" else nullcontext():
            scores = self.scores(torch.index_select(self.images.pixels, 0, self.chosen))
            loss = F.cross_entropy(scores.float(), torch.index_select(self.images.labels, 0, self.chosen))
        loss.backward()
        self.velocity.mul_(self.size.momentum).add_(self.gradient)
        self.flat.addcmul_(self.velocity, self.rate, value=-1.0)

    def train(self, begin: Tensor, batches: Tensor, result: Tensor) -> None:
        """One client's round: from `begin`, a step for each row of `batches`, into `result`."""
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
    """FedAvg of groups apart on one device."""

    def __init__(
        self, trunk: nn.Module, images: Images, shares: Sequence[np.ndarray], job: Job, size: Size, seed: int, run: Run
    ) -> None:
        lanes = run.lanes if run.device == "cuda" else 1
        self.images, self.shares, self.size, self.seed, self.run = images, shares, size, seed, run
        self.lanes = [Lane(trunk, images, job.trainable, size, run.device) for _ in range(lanes)]
        self.fresh = self.lanes[0].flat.clone()
        self.trunk_numbers = self.lanes[0].trunk_numbers

    def tuned(self, groups: Sequence[Sequence[int]]) -> list[Tensor]:
        """The vector of each group after all rounds apart; a group without members has the fresh one."""
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
        """A client's batches of a round: passes over its images, keyed by its place alone."""
        own, wanted = self.shares[client], self.size.steps * self.size.batch
        generator = np.random.default_rng([self.seed, number, client])
        passes = [generator.permutation(own) for _ in range(-(-wanted // len(own)))]
        return np.concatenate(passes)[:wanted].reshape(self.size.steps, self.size.batch)

    def features(self, vector: Tensor) -> Tensor:
        """Of all images through the trunk of a vector, float32."""
        return self._through(vector, heads=False)

    def accuracy(self, vector: Tensor) -> float:
        """Of the network with its own head, on the test images."""
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
                outputs.append(lane.scores(pixels) if heads else lane.trunk(pixels.permute(0, 3, 1, 2)))
        return torch.cat(outputs)


@dataclass
class Run:
    """What the whole measurement shares."""

    device: str
    lanes: int
    clock: Clock
    out: Path
    check: bool
    rows: list[dict[str, Any]]

    def write(self, row: Mapping[str, Any]) -> None:
        """Append a row and show it."""
        line = json.dumps(dict(row))
        with self.out.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        self.rows.append(dict(row))
        print(line, flush=True)


def shortened(rows: Tensor, norm: float) -> Tensor:
    """Rows of one length, in float64; zero rows stay zero."""
    exact = rows.double()
    lengths = torch.linalg.vector_norm(exact, dim=1, keepdim=True)
    return torch.where(lengths > 0.0, exact * (norm / lengths), torch.zeros_like(exact))


class Heads:
    """Heads on parts of features: everyone's in fixed point on the device, each request by rows and columns."""

    def __init__(self, parts: Sequence[Tensor], blocks: Blocks, images: Images, run: Run) -> None:
        targets = Targets("classification", images.classes)
        self.blocks, self.images, self.run, self.targets = blocks, images, run, targets
        self.fixed = FixedPoint(
            features=blocks.features, outputs=images.classes, norm=blocks.norm(NORM), target_norm=targets.norm
        )
        scaled = torch.cat([shortened(part, NORM) for part in parts], dim=1)
        self.phi = scaled.cpu().numpy()[: images.train] if run.check else None
        self.rows = torch.cat(
            [torch.round(torch.ldexp(scaled, torch.tensor(float(self.fixed.feature_bits)))), scaled[:, :1] * 0], dim=1
        )
        self.rows[:, -1] = float(self.fixed.unit)
        self.test = scaled[images.train :]
        encoded = torch.as_tensor(self.fixed.quantised_targets(targets.encode(images.y_train)))
        self.wanted = encoded.to(self.rows.device)

    def accuracy(
        self,
        samples: np.ndarray,
        struck: Sequence[int] = (),
        own: Mapping[int, np.ndarray] | None = None,
        relative: float | None = None,
    ):
        """Test accuracy of the head of these training samples without the blocks of the struck groups, and r.

        `own` gives of each group its members' samples, where a member's own block is zeroed. `relative` is r, by
        generalised cross-validation where it is None.
        """
        keep = torch.ones(self.fixed.width, dtype=torch.bool, device=self.rows.device)
        for group in struck:
            keep[self.blocks.columns(group)] = False
        chosen = torch.as_tensor(samples).to(self.rows.device)
        whole = self.rows
        if own is not None:
            whole = self.rows.clone()
            for group, members in own.items():
                whole[torch.as_tensor(members).to(whole.device), self.blocks.columns(group)] = 0.0
        phi = whole[chosen][:, keep]
        gram, cross = phi.T @ phi, phi.T @ self.wanted[chosen]  # whole numbers below 2^53: exact in any order
        if self.run.check and own is None:
            self._compare(samples, struck, keep, gram, cross)
        energy = float((self.wanted[chosen] ** 2).sum()) / 4.0**self.fixed.target_bits
        gram /= 4.0**self.fixed.feature_bits
        cross /= 2.0 ** (self.fixed.feature_bits + self.fixed.target_bits)
        weights, relative = self._head(gram, cross, energy, len(samples), relative)
        full = torch.zeros((self.fixed.width, self.fixed.outputs), dtype=torch.float64, device=weights.device)
        full[keep] = weights
        scores = self.test @ full[:-1] + full[-1]
        decided = self.targets.decode(scores.cpu().numpy())
        return 100.0 * float(np.mean(decided == self.images.y_test)), relative

    def _head(
        self, gram: Tensor, cross: Tensor, energy: float, samples: int, relative: float | None
    ) -> tuple[Tensor, float]:
        """The head with the given r, or the r that generalised cross-validation chooses, from G's eigenvectors."""
        if relative is not None:
            gram.diagonal().add_(relative * float(gram.diagonal().sum()) / len(gram))
            return torch.cholesky_solve(cross, torch.linalg.cholesky(gram)), relative
        values, vectors = torch.linalg.eigh(gram)
        values = values.clamp_min(0.0)
        rotated = vectors.T @ cross
        mean_square = float(gram.diagonal().sum()) / len(gram)  # of the features that are left
        noise = 64.0 * np.finfo(np.float64).eps * len(gram) * energy
        best, chosen = math.inf, GRID[-1]
        for tried in reversed(GRID):
            ridge = tried * mean_square
            weights = rotated / (values + ridge)[:, None]
            left = energy - float((weights * rotated).sum()) - ridge * float((weights * weights).sum())
            free = 1.0 - float((values / (values + ridge)).sum()) / samples
            if left > noise and free > 1e-9 and left / samples / free**2 < best:
                best, chosen = left / samples / free**2, tried
        return vectors @ (rotated / (values + chosen * mean_square)[:, None]), chosen

    def _compare(self, samples: np.ndarray, struck: Sequence[int], keep: Tensor, gram: Tensor, cross: Tensor) -> None:
        """The library's own statistics of two clients, added and struck, are these integers."""
        assert self.phi is not None
        targets = self.targets.encode(self.images.y_train)
        halves = np.array_split(samples, 2)
        parts = [statistics_of(self.fixed, self.phi[half], targets[half]) for half in halves]
        whole = strike(total(self.fixed, parts), self.blocks, struck)
        kept = keep.cpu().numpy()
        if not np.array_equal(whole.gram[np.ix_(kept, kept)], gram.cpu().numpy()):
            raise SystemExit("G on the device is not the library's")
        if not np.array_equal(whole.cross[kept], cross.cpu().numpy()):
            raise SystemExit("H on the device is not the library's")
        if np.any(whole.gram[~kept]) or np.any(whole.cross[~kept]):
            raise SystemExit("a struck block is not zero")


def group_key(seed: int) -> bytes:
    """The key of the groups' hash; a run draws it when it is created."""
    return hashlib.sha256(f"tuned networks {seed}".encode()).digest()


def samples_of(shares: Sequence[np.ndarray], clients: Sequence[int]) -> np.ndarray:
    """The samples of these clients."""
    return np.concatenate([shares[client] for client in clients])


def measure(job: Job, seed: int, size: Size, run: Run, images: Images, trunk: nn.Module) -> None:
    """All rows of one seed of a job."""
    started = time.perf_counter()
    count = size.clients
    shares = partition(
        job.split,
        images.y_train,
        count,
        size.samples,
        np.random.default_rng([seed, 30]),
        alpha=job.alpha,
        identity=images.identity,
    )
    groups = members_by_group(
        group_key(seed), [f"client-{client:03d}" for client in range(count)], range(count), job.groups
    )
    tuner = Tuner(trunk, images, shares, job, size, seed, run)
    ready = time.perf_counter()
    vectors = tuner.tuned(groups)
    tuned = time.perf_counter()
    frozen = tuner.features(tuner.fresh)
    through = {group: tuner.features(vectors[group]) for group, members in enumerate(groups) if members}
    computed = time.perf_counter()
    base = {"job": job.name, "seed": seed}
    run.write(
        base
        | {
            "kind": "times",
            "seconds_ready": round(ready - started, 2),
            "seconds_tuning": round(tuned - ready, 2),
            "seconds_features": round(computed - tuned, 2),
            "tuned_numbers": tuner.trunk_numbers,
            "groups_with_members": len(through),
            "settings": asdict(job) | asdict(size),
        }
    )
    scenario = Scenario(base, size, run, tuner, shares, groups, vectors, frozen, through)
    generator = np.random.default_rng([seed, 31])
    for number in range(size.sequences):
        order = generator.permutation(count).tolist()
        if job.rebuild:
            scenario.rebuilt(number, order)
        else:
            scenario.sequence(number, order, scratch=job.scratch and number == 0, variants=job.variants and number == 0)
    run.write(base | {"kind": "done", "seconds": round(time.perf_counter() - started, 1)})


@dataclass
class Scenario:
    """Requests on one tuned federation."""

    base: dict[str, Any]
    size: Size
    run: Run
    tuner: Tuner
    shares: Sequence[np.ndarray]
    groups: list[list[int]]
    vectors: list[Tensor]
    frozen: Tensor
    through: dict[int, Tensor]

    def _blocks(self, block: int) -> Heads:
        count, device = len(self.groups), self.frozen.device
        drawn = torch.as_tensor(projection(0, self.frozen.shape[1], block)).to(device)
        nothing = torch.zeros((len(self.frozen), block), dtype=torch.float64, device=device)
        parts = [self.through[group].double() @ drawn if group in self.through else nothing for group in range(count)]
        return Heads([self.frozen, *parts], Blocks(self.frozen.shape[1], block, count), self.tuner.images, self.run)

    def _plain(self, parts: Sequence[Tensor]) -> Heads:
        width = self.frozen.shape[1]
        return Heads(parts, Blocks(width, width, len(parts) - 1), self.tuner.images, self.run)

    def _row(self, heads: Heads, kind: str, leavers: Sequence[int], **more: Any) -> None:
        staying = [client for client in range(len(self.shares)) if client not in set(leavers)]
        own = more.pop("own", None)
        struck = more.pop("struck", ())
        fixed = more.pop("relative", None)
        begun = time.perf_counter()
        accuracy, relative = heads.accuracy(samples_of(self.shares, staying), struck, own, fixed)
        row = {"kind": kind, "leavers": len(leavers), "test_accuracy": accuracy, "relative_penalty": relative}
        self.run.write(self.base | row | more | {"seconds": round(time.perf_counter() - begun, 2)})
        self.run.clock.check()

    def _hit(self, leavers: Sequence[int]) -> list[int]:
        return [group for group, members in enumerate(self.groups) if set(members) & set(leavers)]

    def sequence(self, number: int, order: Sequence[int], *, scratch: bool, variants: bool) -> None:
        """Requests one after the other, nothing rebuilt: the state after q of them is that of q leavers at once."""
        with heads_of(self._blocks(self.size.block)) as heads:
            for leaving in (0, *self.size.at):
                leavers = order[:leaving]
                hit = self._hit(leavers)
                left = len(self.through) - len(hit)
                more = {"struck": hit, "groups_left": left, "sequence": number}
                self._row(heads, "blocks", leavers, **more)
                self._row(heads, f"blocks, r = {FIXED_PENALTY}", leavers, relative=FIXED_PENALTY, **more)
        with heads_of(self._plain([self.frozen])) as heads:
            for leaving in (0, *self.size.at):
                self._row(heads, "frozen", order[:leaving], sequence=number)
        for leaving in (0, *self.size.at):
            self._merge(order[:leaving], number)
        if variants:
            self._variants(order)
        if scratch:
            for leaving in self.size.scratch_at:
                self._scratch(order[:leaving], number)

    def _merge(self, leavers: Sequence[int], number: int) -> None:
        hit = set(self._hit(leavers))
        parts = [group for group in self.through if group not in hit]
        if not parts:
            return
        trunks = self.tuner.trunk_numbers
        weights = [sum(len(self.shares[client]) for client in self.groups[group]) for group in parts]
        mean = merge([self.vectors[group].double().cpu().numpy() for group in parts], weights)
        merged = move_on(mean, self.tuner.fresh.double().cpu().numpy(), self.size.stretch)
        vector = torch.as_tensor(merged).to(self.frozen.device).float()
        assert len(vector) >= trunks
        phi = self.tuner.features(vector)
        more = {"groups_left": len(parts), "sequence": number}
        with heads_of(self._plain([self.frozen, phi])) as heads:
            self._row(heads, "merge", leavers, **more)
        with heads_of(self._plain([phi])) as heads:
            self._row(heads, "merge alone", leavers, **more)

    def _scratch(self, leavers: Sequence[int], number: int) -> None:
        """Tuned again by all who stay, together: with its own head, and with a ridge head beside the frozen trunk."""
        staying = [client for client in range(len(self.shares)) if client not in set(leavers)]
        begun = time.perf_counter()
        (vector,) = self.tuner.tuned([staying])
        seconds = round(time.perf_counter() - begun, 2)
        accuracy = self.tuner.accuracy(vector)
        row = {"kind": "tuned again", "leavers": len(leavers), "test_accuracy": accuracy, "sequence": number}
        self.run.write(self.base | row | {"seconds": seconds})
        phi = self.tuner.features(vector)
        with heads_of(self._plain([phi])) as heads:
            self._row(heads, "tuned again + ridge", leavers, sequence=number)
        with heads_of(self._plain([self.frozen, phi])) as heads:
            self._row(heads, "tuned again + ridge + frozen", leavers, sequence=number)

    def _variants(self, order: Sequence[int]) -> None:
        """Other widths of a block, a member's own block zeroed, and blocks without the frozen trunk."""
        some = (0, *[leaving for leaving in (1, 5) if leaving in self.size.at])
        own = {group: samples_of(self.shares, self.groups[group]) for group in self.through}
        with heads_of(self._blocks(self.size.block)) as heads:
            for leaving in some:
                leavers = order[:leaving]
                self._row(heads, "blocks, own zeroed", leavers, struck=self._hit(leavers), own=own)
        for block in self.size.other_blocks:
            with heads_of(self._blocks(block)) as heads:
                for leaving in some:
                    leavers = order[:leaving]
                    self._row(heads, f"blocks of {block}", leavers, struck=self._hit(leavers))

    def rebuilt(self, number: int, order: Sequence[int]) -> None:
        """Requests one after the other; after each the hit group is tuned again by those who stay in it."""
        groups = [list(members) for members in self.groups]
        through = dict(self.through)
        for leaving in range(1, max(self.size.at) + 1):
            leaver = order[leaving - 1]
            (group,) = [place for place, members in enumerate(groups) if leaver in members]
            groups[group].remove(leaver)
            through.pop(group, None)
            if groups[group]:
                (vector,) = self.tuner.tuned([groups[group]])
                through[group] = self.tuner.features(vector)
            if leaving in self.size.at:
                state = replace_state(self, groups, through)
                with heads_of(state._blocks(self.size.block)) as heads:
                    state._row(heads, "blocks, rebuilt", order[:leaving], sequence=number, groups_left=len(through))


def time_rounds(rounds: int, size: Size, device: str, lanes: Sequence[int]) -> None:
    """Seconds a round for all clients of ten groups: the library's engine, and a script with captured steps.

    Random images and weights, on which time does not depend. The library's clients have images of 32 pixels, which the
    network enlarges in every step; the script's were enlarged before.
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
    """Seconds until everything that was handed to the device is done."""
    start = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


@contextmanager
def cudnn_benchmark(device: str) -> Iterator[None]:
    """Let cuDNN choose algorithms by timing them, for the script alone: their rounding is then left to chance."""
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


def replace_state(scenario: Scenario, groups: list[list[int]], through: dict[int, Tensor]) -> Scenario:
    """The same federation with these trunks."""
    return replace(scenario, groups=groups, through=dict(through))


@contextmanager
def heads_of(heads: Heads) -> Iterator[Heads]:
    """Give the device's memory back afterwards."""
    try:
        yield heads
    finally:
        del heads.rows, heads.test
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def summary(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Means and spreads over seeds and sequences, a line for each job, kind and number of leavers."""
    measured: dict[tuple[str, str, int], list[float]] = {}
    for row in rows:
        if "test_accuracy" in row:
            measured.setdefault((row["job"], row["kind"], row["leavers"]), []).append(row["test_accuracy"])
    lines = []
    for (job, kind, leavers), values in measured.items():
        spread = f" +- {np.std(values, ddof=1):.2f}" if len(values) > 1 else ""
        lines.append(f"{job:20} {leavers:3} leavers  {kind:30} {np.mean(values):6.2f}{spread} ({len(values)})")
    return lines


def main() -> None:
    """Measure what was asked for, until it is done or time is up."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="the folder with the data sets' files")
    parser.add_argument("--pack", type=Path, help="copy the data sets and the trunk here, and stop")
    parser.add_argument("--out", type=Path, help="a file of JSON lines; rows that it has are not measured again")
    parser.add_argument("--jobs", nargs="+", default=[job.name for job in JOBS], choices=[job.name for job in JOBS])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--rate", type=float)
    parser.add_argument("--lanes", type=int, default=6, help="clients at work at the same time on a GPU")
    parser.add_argument("--skip-tuned-again", action="store_true", help="leave out tuning again without the leavers")
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop cleanly after this time")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--smoke", action="store_true", help="a tiny federation, statistics compared with the library")
    parser.add_argument("--sequences", type=int, help="orders of twenty leavers for each seed")
    parser.add_argument("--tuned-again-at", type=int, nargs="+", help="numbers of leavers at which all tune again")
    parser.add_argument("--commit", default="", help="the commit that measures, for the rows")
    parser.add_argument("--time-rounds", type=int, metavar="N", help="time N rounds of the library and a script")
    parser.add_argument("--time-lanes", type=int, nargs="+", default=[3], help="clients at a time in --time-rounds")
    given = parser.parse_args()
    if given.time_rounds:
        time_rounds(given.time_rounds, SMOKE if given.smoke else Size(), given.device, given.time_lanes)
        return
    if given.data is None:
        parser.error("--data is needed")
    if given.pack:
        pack(given.data, given.pack)
        return
    if given.out is None:
        parser.error("--out is needed")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = given.device == "cuda"
    before = [json.loads(line) for line in given.out.read_text().splitlines()] if given.out.exists() else []
    finished = {(row["job"], row["seed"]) for row in before if row["kind"] == "done"}
    kept = [row for row in before if (row["job"], row["seed"]) in finished]
    given.out.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
    run = Run(given.device, given.lanes, Clock(given.seconds), given.out, given.smoke, kept)
    size = SMOKE if given.smoke else Size()
    size = replace(size, rounds=given.rounds or size.rounds, rate=given.rate or size.rate, commit=given.commit)
    size = replace(size, sequences=given.sequences or size.sequences)
    size = replace(size, scratch_at=tuple(given.tuned_again_at or size.scratch_at))
    trunk = public_trunk(given.data)
    jobs = [replace(job, groups=4) if given.smoke else job for job in JOBS if job.name in given.jobs]
    jobs = [replace(job, scratch=job.scratch and not given.skip_tuned_again) for job in jobs]
    data: tuple[str, Images | None] = ("", None)
    try:
        for seed in range(given.first_seed, given.first_seed + given.seeds):
            for job in jobs:
                if (job.name, seed) in finished:
                    continue
                if data[0] != job.data:
                    data = (job.data, images_of(job.data, given.data, size, given.device))
                assert data[1] is not None
                measure(job, seed, size, run, data[1], trunk)
    except OutOfTime:
        print("time is up: the same command goes on", file=sys.stderr)
    print("\n".join(summary(run.rows)))


if __name__ == "__main__":
    main()
