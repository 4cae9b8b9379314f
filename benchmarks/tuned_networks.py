"""Test accuracy of tuned networks that forget without a round: blocks and merges against retuning and frozen heads.

    python benchmarks/tuned_networks.py --data FOLDER --out rows.jsonl --seeds 3 --seconds 600
    python benchmarks/tuned_networks.py --data FOLDER --pack FOLDER    # pack data and backbone into one folder
    python benchmarks/tuned_networks.py --data FOLDER --out rows.jsonl --smoke    # minutes of CPU, every path once
    python benchmarks/tuned_networks.py --time-rounds 5 --device cuda    # seconds per round; needs no data
    python benchmarks/tuned_networks.py --table rows.jsonl [rows.jsonl ...]    # the committed table and its figure

The setting is EfficientNet-Lite0 with its ImageNet weights, images enlarged to 128 pixels, 100 clients of 100 images,
and full participation. Groups (by a keyed hash of names) tune the backbone separately; features of all backbones are
computed once per seed, and every request then uses integer statistics, as in `sifu.theory.closed_form`: the library
provides the fixed point, the projection, the positions of blocks, the grid of penalties and the merge. Only the
products and the eigenvalues are computed on the device, where sums of integers below 2^53 are exact; `--smoke` compares
them with the library's statistics. Generalised cross-validation chooses the penalty: no choice uses test images.

Rows are appended to one file of JSON lines as they are measured; a seed of a job that is finished there is skipped, so
the same command continues after `--seconds` or a kill. It needs torch, numpy, and the library's folder on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from tuned.tuned_federation import (
    JOBS,
    SMOKE,
    Clock,
    Images,
    Job,
    OutOfTime,
    Run,
    Size,
    Tuner,
    images_of,
    pack,
    public_backbone,
    time_rounds,
)
from tuned.tuned_table import table_of, write_table

from sifu.data.partition import partition
from sifu.theory.closed_form import FixedPoint, Targets, statistics_of, total
from sifu.theory.closed_form.blocks import Blocks, drop, projection
from sifu.theory.closed_form.ridge import GRID
from sifu.theory.merging import members_by_group, merge, move_on

NORM = 10.0
FIXED_PENALTY = 0.1
"""Fixed value of r: a request then solves once, instead of scoring the whole grid."""


def shortened(rows: Tensor, norm: float) -> Tensor:
    """Scale rows to one length, in float64; zero rows stay zero."""
    exact = rows.double()
    lengths = torch.linalg.vector_norm(exact, dim=1, keepdim=True)
    return torch.where(lengths > 0.0, exact * (norm / lengths), torch.zeros_like(exact))


class Heads:
    """Heads on parts of the features: all rows are in fixed point on the device, and each request selects rows and
    columns.
    """

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
        dropped: Sequence[int] = (),
        own: Mapping[int, np.ndarray] | None = None,
        relative: float | None = None,
    ):
        """Return the test accuracy of the head on these training samples without the dropped groups' blocks, and r.

        `own` maps each group to its members' samples, whose own block is then zeroed. `relative` is r; if it is None,
        generalised cross-validation chooses it.
        """
        keep = torch.ones(self.fixed.width, dtype=torch.bool, device=self.rows.device)
        for group in dropped:
            keep[self.blocks.columns(group)] = False
        chosen = torch.as_tensor(samples).to(self.rows.device)
        whole = self.rows
        if own is not None:
            whole = self.rows.clone()
            for group, members in own.items():
                whole[torch.as_tensor(members).to(whole.device), self.blocks.columns(group)] = 0.0
        phi = whole[chosen][:, keep]
        gram, cross = phi.T @ phi, phi.T @ self.wanted[chosen]  # integers below 2^53: exact in any order
        if self.run.check and own is None:
            self._compare(samples, dropped, keep, gram, cross)
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
        """Return the head with the given r, or with the r that generalised cross-validation chooses on G's spectrum."""
        if relative is not None:
            gram.diagonal().add_(relative * float(gram.diagonal().sum()) / len(gram))
            return torch.cholesky_solve(cross, torch.linalg.cholesky(gram)), relative
        values, vectors = torch.linalg.eigh(gram)
        values = values.clamp_min(0.0)
        rotated = vectors.T @ cross
        mean_square = float(gram.diagonal().sum()) / len(gram)  # over the remaining features
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

    def _compare(self, samples: np.ndarray, dropped: Sequence[int], keep: Tensor, gram: Tensor, cross: Tensor) -> None:
        """Check that the library gives the same integers, by adding statistics of two halves and dropping blocks."""
        assert self.phi is not None
        targets = self.targets.encode(self.images.y_train)
        halves = np.array_split(samples, 2)
        parts = [statistics_of(self.fixed, self.phi[half], targets[half]) for half in halves]
        whole = drop(total(self.fixed, parts), self.blocks, dropped)
        kept = keep.cpu().numpy()
        if not np.array_equal(whole.gram[np.ix_(kept, kept)], gram.cpu().numpy()):
            raise SystemExit("G on the device differs from the library's")
        if not np.array_equal(whole.cross[kept], cross.cpu().numpy()):
            raise SystemExit("H on the device differs from the library's")
        if np.any(whole.gram[~kept]) or np.any(whole.cross[~kept]):
            raise SystemExit("a dropped block is not zero")


def group_key(seed: int) -> bytes:
    """Return the key of the groups' hash, which a run would draw at its creation."""
    return hashlib.sha256(f"tuned networks {seed}".encode()).digest()


def samples_of(shares: Sequence[np.ndarray], clients: Sequence[int]) -> np.ndarray:
    """Return the samples of these clients."""
    return np.concatenate([shares[client] for client in clients])


def measure(job: Job, seed: int, size: Size, run: Run, images: Images, backbone: nn.Module) -> None:
    """Measure all rows of one seed of a job."""
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
    tuner = Tuner(backbone, images, shares, job, size, seed, run)
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
            "tuned_numbers": tuner.backbone_numbers,
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
        dropped = more.pop("struck", ())
        fixed = more.pop("relative", None)
        begun = time.perf_counter()
        accuracy, relative = heads.accuracy(samples_of(self.shares, staying), dropped, own, fixed)
        row = {"kind": kind, "leavers": len(leavers), "test_accuracy": accuracy, "relative_penalty": relative}
        self.run.write(self.base | row | more | {"seconds": round(time.perf_counter() - begun, 2)})
        self.run.clock.check()

    def _hit(self, leavers: Sequence[int]) -> list[int]:
        return [group for group, members in enumerate(self.groups) if set(members) & set(leavers)]

    def sequence(self, number: int, order: Sequence[int], *, scratch: bool, variants: bool) -> None:
        """Execute requests one by one without rebuilding; the state after q of them equals that of
        q leavers at once.
        """
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
        backbones = self.tuner.backbone_numbers
        weights = [sum(len(self.shares[client]) for client in self.groups[group]) for group in parts]
        mean = merge([self.vectors[group].double().cpu().numpy() for group in parts], weights)
        merged = move_on(mean, self.tuner.fresh.double().cpu().numpy(), self.size.stretch)
        vector = torch.as_tensor(merged).to(self.frozen.device).float()
        assert len(vector) >= backbones
        phi = self.tuner.features(vector)
        more = {"groups_left": len(parts), "sequence": number}
        with heads_of(self._plain([self.frozen, phi])) as heads:
            self._row(heads, "merge", leavers, **more)
        with heads_of(self._plain([phi])) as heads:
            self._row(heads, "merge alone", leavers, **more)

    def _scratch(self, leavers: Sequence[int], number: int) -> None:
        """Retune with all remaining clients: with the network's own head, and with a ridge head that also uses the
        frozen backbone.
        """
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
        """Measure other block widths, a member's own block zeroed, and blocks without the frozen backbone."""
        some = (0, *[leaving for leaving in (1, 5) if leaving in self.size.at])
        own = {group: samples_of(self.shares, self.groups[group]) for group in self.through}
        with heads_of(self._blocks(self.size.block)) as heads:
            for leaving in some:
                leavers = order[:leaving]
                self._row(heads, "blocks, own zeroed", leavers, dropped=self._hit(leavers), own=own)
        for block in self.size.other_blocks:
            with heads_of(self._blocks(block)) as heads:
                for leaving in some:
                    leavers = order[:leaving]
                    self._row(heads, f"blocks of {block}", leavers, dropped=self._hit(leavers))

    def rebuilt(self, number: int, order: Sequence[int]) -> None:
        """Execute requests one after the other; after each, the remaining clients of the hit group retune it."""
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
                state = replace(self, groups=groups, through=dict(through))
                with heads_of(state._blocks(self.size.block)) as heads:
                    state._row(heads, "blocks, rebuilt", order[:leaving], sequence=number, groups_left=len(through))


@contextmanager
def heads_of(heads: Heads) -> Iterator[Heads]:
    """Release the device's memory afterwards."""
    try:
        yield heads
    finally:
        del heads.rows, heads.test
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def main() -> None:
    """Execute the measurements of the command line until they are done or the time is over."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="the folder with the data sets' files")
    parser.add_argument("--pack", type=Path, help="copy the data sets and the backbone here, and stop")
    parser.add_argument("--out", type=Path, help="file of JSON lines; its rows are not measured again")
    parser.add_argument("--jobs", nargs="+", default=[job.name for job in JOBS], choices=[job.name for job in JOBS])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--rate", type=float)
    parser.add_argument("--lanes", type=int, default=6, help="clients trained concurrently on a GPU")
    parser.add_argument("--skip-tuned-again", action="store_true", help="skip retuning without the leavers")
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop cleanly after this time")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--smoke", action="store_true", help="a tiny federation, statistics compared with the library")
    parser.add_argument("--sequences", type=int, help="orders of twenty leavers for each seed")
    parser.add_argument(
        "--tuned-again-at", type=int, nargs="+", help="numbers of leavers after which all clients retune"
    )
    parser.add_argument("--commit", help="commit to record in the rows; by default the repository's")
    parser.add_argument(
        "--table", type=Path, nargs="+", help="write the table and the figure from these rows, and stop"
    )
    parser.add_argument("--time-rounds", type=int, metavar="N", help="time N rounds of the library and of a script")
    parser.add_argument(
        "--time-lanes", type=int, nargs="+", default=[3], help="numbers of concurrent clients in --time-rounds"
    )
    given = parser.parse_args()
    if given.table:
        write_table(given.table)
        return
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
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short=8", "HEAD"]
    commit = given.commit or subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    if not commit:
        parser.error("--commit is needed, because there is no repository here")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = given.device == "cuda"
    before = [json.loads(line) for line in given.out.read_text().splitlines()] if given.out.exists() else []
    finished = {(row["job"], row["seed"]) for row in before if row["kind"] == "done"}
    kept = [row for row in before if (row["job"], row["seed"]) in finished]
    given.out.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
    run = Run(given.device, given.lanes, Clock(given.seconds), given.out, given.smoke, kept)
    size = SMOKE if given.smoke else Size()
    size = replace(size, rounds=given.rounds or size.rounds, rate=given.rate or size.rate, commit=commit)
    size = replace(size, sequences=given.sequences or size.sequences)
    size = replace(size, scratch_at=tuple(given.tuned_again_at or size.scratch_at))
    backbone = public_backbone(given.data)
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
                measure(job, seed, size, run, data[1], backbone)
    except OutOfTime:
        print("time is up: the same command goes on", file=sys.stderr)
    for row in table_of([given.out]):
        print("{federation:20} {leavers:3} leavers  {way:30} {test_accuracy} ({smallest} to {largest})".format(**row))


if __name__ == "__main__":
    main()
