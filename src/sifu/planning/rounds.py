"""Expected rounds of a request, from the rounds that the first training needed."""

from __future__ import annotations

from dataclasses import dataclass

from sifu.core.spec import StopSpec
from sifu.run.run_view import ACTIVE, RunView
from sifu.theory.automatic_noise import expected_rounds, noise_to_signal


def rounds_to_run(stop: StopSpec, needed: float) -> int:
    """Return the rounds that a request runs if its model needs `needed` rounds to recover.

    >>> rounds_to_run(StopSpec(target=0.9, max_rounds=50), 9.6), rounds_to_run(StopSpec(target=0.0, max_rounds=50), 9.6)
    (10, 50)
    """
    return min(max(1, stop.min_rounds, round(needed)), stop.max_rounds) if stop.target > 0 else stop.max_rounds


@dataclass(frozen=True)
class FirstTraining:
    """Rounds of the first training until it reached a target, and the share of errors left.

    Without a target, or if it was missed, all rounds count. Without a known accuracy, `errors` is 0.
    """

    rounds: int
    errors: float

    @staticmethod
    def of(view: RunView) -> FirstTraining:
        """Return the first training of a run up to its target."""
        rows = [row for row in view.reader.nodes() if row.branch == 0 and row.kind in ("initial", "merge", "round")]
        accuracy = {row.node: row.accuracy for row in view.reader.evaluations() if row.subset == ACTIVE}
        target = view.spec.stop.target
        last = next((row for row in rows if accuracy.get(row.node, 0.0) >= target > 0.0), rows[-1])
        errors = max(0.0, 1.0 - accuracy.get(last.node, 1.0))
        return FirstTraining(max(1, last.position), errors if view.spec.regime.has_accuracy else 0.0)

    def rounds_from(self, view: RunView, depth: int, noise_std: float) -> float:
        """Return the expected rounds of a request that starts from the model at `depth` with noise."""
        path = view.path
        undone, done = path.rounds_until(path.tip) - path.rounds_until(depth), view.rounds_until(depth)
        ratio = noise_to_signal(noise_std, path.nodes[depth].distance, view.parameters, path.noise_energy(depth))
        return expected_rounds(self.rounds, undone, done, ratio, self.errors)
