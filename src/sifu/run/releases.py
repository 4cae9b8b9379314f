"""Release of a head with noise N(0, sigma^2 I), and the guarantee that follows from the recorded distances."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sifu.core.closed_form_engine import HasRecords, recorded_fixed_point
from sifu.core.engine import Engine, LacksData
from sifu.core.layout import Vector
from sifu.core.ledger import RELEASE_DISTANCES
from sifu.core.observers import BeforeAfter
from sifu.core.request_terms import Terms
from sifu.core.round import NormalSource, SystemNormals, add_noise
from sifu.core.spec import Spec
from sifu.errors import RunDamagedError
from sifu.run.training import Progress, ProgressCallback
from sifu.store.actors import actor_name
from sifu.store.files import remove_files
from sifu.store.projection import NewEvent
from sifu.store.reader import NOISE_GIVEN, RELEASED, RESTORED, RunReader, chain_of
from sifu.store.release_files import ReleaseRow, released_node, releases, unnamed_releases, write_release
from sifu.store.statistics_files import OwnStatistics, read_statistics
from sifu.store.writer import RunWriter
from sifu.theory.closed_form import Rows, total
from sifu.theory.history import PathNode
from sifu.theory.release_noise import Release, epsilon_reached, rounded_up

GRID_BITS = 8
"""Precision of released weights: multiples of a power of two, at most sigma / 2^`GRID_BITS`."""


def with_noise(head: Vector, noise_std: float, normals: NormalSource) -> Vector:
    """Return the released form of a head: with noise, rounded to a grid.

    In floating point, the last bits of a head plus Gaussian noise reveal the head, because only few sums are possible
    for a given head. After rounding to a step of at most sigma / 2^`GRID_BITS`, the last bits reveal nothing
    (docs/theory.md, section 14.7).

    >>> with_noise(np.zeros(2), 3.0, np.random.default_rng(0)) * 2.0**7
    array([ 48., -51.])
    """
    step = math.ldexp(1.0, math.frexp(noise_std)[1] - 1 - GRID_BITS)
    rounded: Vector = np.rint(add_noise(head.astype(np.float64), noise_std, normals) / step) * step
    return rounded.astype(head.dtype)


def is_due(reader: RunReader, tip: PathNode) -> bool:
    """Return whether a run with noise on releases must release its current head."""
    return tip.kind == "round" and released_node(reader) != tip.node


def publish(writer: RunWriter, engine: Engine, spec: Spec, node: int, progress: ProgressCallback | None) -> Vector:
    """Release the head of `node`, the run's current model, with noise, and return it; record each client's distance.

    If the engine has the clients' records, the distances of records are recorded as well. The head without noise never
    leaves the run folder.
    """
    noise_std = spec.release.noise
    clients = writer.participation(first=node).between(node, node).clients.tolist()
    accountant = Accountant.of(writer, spec)
    distances, records = dict[int, float](), dict[int, float]()
    for done, client in enumerate(clients, start=1):
        distances[client], largest = accountant.distances_of(client)
        largest = _largest_of_records(engine, accountant.release, client) if largest is None else largest
        if largest is not None:
            records[client] = largest
        if progress:
            progress(Progress("distances", done, math.nan, 0.0, len(clients), "client"))
    released = with_noise(writer.load_model(node), noise_std, writer.noise or SystemNormals())
    payload = {
        "node": node,
        "noise_std": noise_std,
        "digest": write_release(writer.folder, writer.layout, node, released),
        "clients": clients,
        "actor": actor_name(),
        RELEASE_DISTANCES: {
            "clients": {str(client): distance for client, distance in distances.items()},
            "records": {str(client): distance for client, distance in records.items()},
        },
    }
    writer.record(NewEvent(RELEASED, payload))
    remove_files(unnamed_releases(writer))
    return released


@dataclass(frozen=True)
class Accountant:
    """Computation of the distances between the current head and heads without a client or record."""

    folder: Path
    release: Release
    own: OwnStatistics

    @staticmethod
    def of(reader: RunReader, spec: Spec) -> Accountant:
        """Return the accountant of the current head; raise an error if its statistics are missing."""
        fixed, rows = recorded_fixed_point(spec, reader.layout), list(reader.statistics().values())
        own, whole = OwnStatistics.among(rows, fixed), next((row for row in rows if row.is_sum), None)
        if whole is None or spec.ridge.regularisation == "auto":
            raise RunDamagedError("the statistics of the current head are missing: its distances cannot be computed")
        release = Release(read_statistics(reader.folder, whole, fixed), spec.ridge.regularisation)
        return Accountant(reader.folder, release, own)

    def distances_of(self, client: int) -> tuple[float, float | None]:
        """Return the distance to the head without a client, and the largest distance of any of its records.

        The latter is None if the client's samples are not kept as rows.
        """
        fixed, kept = self.own.fixed, self.own.read(self.folder, client)
        distance = self.release.distance_without(total(fixed, [kept]))
        if not isinstance(kept, Rows):
            return distance, None
        features = np.ldexp(kept.features.astype(np.float64), -fixed.feature_bits)
        targets = np.ldexp(kept.targets.astype(np.float64), -fixed.target_bits)
        return distance, float(np.max(self.release.distances_of_records(features, targets)))


def _largest_of_records(engine: Engine, release: Release, client: int) -> float | None:
    """Return the largest distance of any record of a client, or None if the engine does not have its records."""
    lacks = isinstance(engine, LacksData) and client in engine.absent
    if lacks or not isinstance(engine, HasRecords):
        return None
    blocks = (release.distances_of_records(phi, targets) for phi, targets in engine.records_of(client))
    return float(max(np.max(block) for block in blocks))


def guarantee_of_all(
    reader: RunReader, spec: Spec, clients: Iterable[int], terms: Terms, before: int | None = None
) -> BeforeAfter | None:
    """Return the guarantee against an observer of all releases, for each of `clients` or each of their records.

    If the guarantee demanded by the terms is met, it is returned unchanged. Otherwise epsilon is rounded up to two
    digits, because the exact figure is a function of the client's data. Only releases before the event `before` count,
    if it is given. A client stands for all indices that it has had.

    Returns:
        The guarantee, or None if there is no noise on releases, if the caller gave its source, if a distance is
        unknown, or if the run was restored from a backup, because releases made after the backup are not in the record.
    """
    restored = reader.query("SELECT seq FROM events WHERE kind = ?", (RESTORED,))
    if spec.release.noise == 0.0 or any(before is None or seq < before for (seq,) in restored):
        return None
    if reader.value(NOISE_GIVEN, ""):
        return None
    demanded = terms.before_after_budget
    delta = spec.release.delta if demanded is None else demanded[1]
    rows = [row for row in releases(reader) if before is None or row.seq < before]
    of_each = [list(_distances(rows, chain_of(reader, client), bool(terms.records))) for client in clients]
    epsilons = (epsilon_reached(distances, rows[0].noise_std, delta) for distances in of_each if distances)
    reached = max(epsilons, default=0.0)
    if demanded is not None and reached <= demanded[0]:
        return BeforeAfter(*demanded)
    return None if math.isinf(reached) else BeforeAfter(rounded_up(reached), delta)


def _distances(rows: Iterable[ReleaseRow], numbers: Sequence[int], records: bool) -> Iterator[float]:
    """Yield the distance of a client, or of its records, in each release it took part in, or infinity if unknown."""
    for row in rows:
        known = row.record_distances if records else row.distances
        for number in set(numbers) & set(row.clients):
            yield known.get(number, math.inf)


def waiting_note(reader: RunReader, spec: Spec, clients: Iterable[int]) -> str:
    """Return a note on the privacy cost of further releases, or "" without noise on releases."""
    rows = [] if spec.release.noise == 0.0 else releases(reader)
    known = [list(_distances(rows, chain_of(reader, client), records=False)) for client in clients]
    known = [distances for distances in known if distances and math.isfinite(sum(distances))]
    if not known:
        return ""
    now, one, five = (
        max(epsilon_reached([*own, *[own[-1]] * more], rows[0].noise_std, spec.release.delta) for own in known)
        for more in (0, 1, 5)
    )
    return (
        f"against an observer of all releases a client that stays is held to epsilon {now:.3g} at delta "
        f"{spec.release.delta:g}, about {one:.3g} after one more release and {five:.3g} after five"
    )
