"""Distance of a method's models to Scratch's by two published metrics of outputs on single samples.

Both need many models of either kind, trained with different randomness. A model's margin on a sample is
ln(p / (1 - p)) of the right class. `unlearned` and `retrained` have a row for each model and a column for each sample.

* *KLoM*, the KL divergence of margins (Georgiev et al. 2024, "Attribute-to-delete: machine unlearning via datamodel
  matching"): sample by sample, between the histograms of both kinds' margins.
* *Forgetting quality* of the NeurIPS 2023 unlearning challenge (Triantafillou et al. 2024, "Are we making progress in
  unlearning?"): sample by sample, the largest epsilon that a threshold on the margin shows between both kinds.

Neither is zero for finitely many models of the same kind: compare them with the values of Scratch against other runs of
Scratch.
"""

from __future__ import annotations

import numpy as np

from sifu.theory.arrays import Floats

BINS = 20
SMALLEST = 1e-5
LARGEST_MARGIN = 100.0
BIN_WIDTH, MOST_BINS = 0.5, 13


def klom(unlearned: Floats, retrained: Floats) -> Floats:
    """Return KL(unlearned || retrained) of each sample's margins, in nats.

    Margins are clipped to +-100 and counted in 20 bins of equal width over the range of both kinds together; a bin's
    share is at least 1e-5 before normalisation. The result is zero if all margins are equal.

    >>> klom(np.array([[0.0], [1.0]]), np.array([[0.0], [1.0]]))
    array([0.])

    """
    ours, theirs = (np.clip(margins, -LARGEST_MARGIN, LARGEST_MARGIN) for margins in (unlearned, retrained))
    divergences = np.zeros(ours.shape[1])
    for sample in range(ours.shape[1]):
        low = min(ours[:, sample].min(), theirs[:, sample].min())
        high = max(ours[:, sample].max(), theirs[:, sample].max())
        if high > low:
            edges = np.linspace(low, high, BINS + 1)
            own, other = (_shares(margins[:, sample], edges) for margins in (ours, theirs))
            divergences[sample] = float(np.sum(own * np.log(own / other)))
    return divergences


def _shares(values: Floats, edges: Floats) -> Floats:
    counts, _ = np.histogram(values, bins=edges)
    shares = np.maximum(counts / values.size, SMALLEST)
    return np.asarray(shares / shares.sum())


def forgetting_epsilons(unlearned: Floats, retrained: Floats, delta: float = 0.0) -> Floats:
    """Return each sample's epsilon: the largest that a threshold on its margin shows between both kinds of models.

    An attack with false-positive rate FPR and false-negative rate FNR shows max(ln((1 - delta - FPR) / FNR), ln((1 -
    delta - FNR) / FPR)). As in the challenge, an attack without errors gives infinity, an attack with errors of only
    one kind is ignored, and negative values count as zero. Thresholds between all margins are tried, in both
    directions.

    >>> forgetting_epsilons(np.array([[1.0], [2.0]]), np.array([[3.0], [4.0]]))
    array([inf])

    """
    return np.array([_epsilon(unlearned[:, k], retrained[:, k], delta) for k in range(unlearned.shape[1])])


def _epsilon(unlearned: Floats, retrained: Floats, delta: float) -> float:
    thresholds = np.unique(np.concatenate([unlearned, retrained]))
    above = np.searchsorted(np.sort(unlearned), thresholds, side="right") / unlearned.size  # share not above, FNR
    others = np.searchsorted(np.sort(retrained), thresholds, side="right") / retrained.size
    largest = 0.0
    # "Large is unlearned" has FPR = 1 - others and FNR = above; "small is unlearned" the opposite of both.
    for false_positive, false_negative in ((1.0 - others, above), (others, 1.0 - above)):
        if np.any((false_positive == 0.0) & (false_negative == 0.0)):
            return float("inf")
        usable = (false_positive > 0.0) & (false_negative > 0.0)
        positive, negative = false_positive[usable], false_negative[usable]
        for rate, other in ((positive, negative), (negative, positive)):
            shown = np.maximum(1.0 - delta - rate, 0.0) / other
            if shown.size and shown.max() > 0.0:
                largest = max(largest, float(np.log(shown.max())))
    return largest


def forgetting_quality(epsilons: Floats) -> float:
    """Return the challenge's score: the mean over samples of 2 / 2^n, where n is the bin of a sample's epsilon.

    Bins are 0.5 wide and numbered from 1 to 13: epsilons below 0.5 score 1, which is best, and the last bin scores 2 /
    2^13.

    >>> forgetting_quality(np.array([0.0, 0.6])), forgetting_quality(np.array([np.inf])) == 2 / 2**13
    (0.75, True)

    """
    bins = np.minimum(np.floor(np.minimum(epsilons, 1e6) / BIN_WIDTH) + 1, MOST_BINS)
    return float(np.mean(2.0 / 2.0**bins))
