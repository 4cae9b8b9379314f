"""Attack that reconstructs deleted data from two linear heads, by an observer who kept the earlier release.

Let W be the head before a deletion and V the head after it, phi_i the features of a deleted record with the constant
appended, and e_i = t_i - f(phi_i' W) its residual under the earlier head, with the link function f of the loss. Both
heads minimise a penalised loss, so

    A (W - V) = sum_i phi_i e_i',        A the curvature of the loss on the remaining records.

For ridge heads this is exact, except for a multiple of W if the penalty changes. For softmax and logistic heads it
holds to first order in the influence of the deleted records (Bertran et al. 2024, arXiv 2405.20272). For one record the
right side has rank one: its left singular vector is phi_i up to scale, and the constant gives the scale. The observer
has both heads and estimates A, up to a factor, from public samples of the same kind, without their labels.

Candidates are ranked by a matched filter: the inner product of sum_i phi_i e_i' with the same sum over each candidate,
in the metric A^-1, divided by the candidate's length. A^-1 sum_i phi_i e_i' is W - V itself, so the ranking depends on
the estimate of A only through the lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from sifu.errors import InputError
from sifu.theory.arrays import Floats, Integers

HEAD_KINDS = ("ridge", "least_squares", "softmax", "logistic")
"""Kinds of linear head whose releases can be compared, by their names in the spec."""
ASSUMED_PENALTY = 0.01
"""Relative penalty r that the observer assumes for a ridge head with unknown penalty."""
ASSUMED_DECAY = 1e-3
"""Relative penalty that the observer assumes for other heads, which are regularised by early stopping."""
MOST_PARAMETERS = 4000
"""Maximum number of parameters of a softmax head whose full curvature matrix is inverted."""


@dataclass(frozen=True, eq=False)
class Candidates:
    """Records that may have been deleted, grouped into candidates.

    `phi` holds the features with the constant appended, and `targets` the encoded targets. `owners` numbers the
    candidates from 0; records with the same number form one candidate, a client.
    """

    phi: Floats
    targets: Floats
    owners: Integers

    @property
    def count(self) -> int:
        """Number of candidates."""
        return int(self.owners.max()) + 1

    @property
    def are_records(self) -> bool:
        """True if every candidate is a single record."""
        return self.count == len(self.owners)


class TwoHeads:
    """Two heads of one run, (features + 1) x outputs each, and public samples as rows of features with a constant."""

    def __init__(self, before: Floats, after: Floats, public: Floats, kind: str, relative: float | None = None) -> None:
        if len(public) < 2:
            raise InputError(f"the attack needs public samples, found {len(public)}: give a file with --public-samples")
        self.before, self.after, self.public, self.kind = before, after, public, kind
        self.moved = before - after
        if not np.any(self.moved):
            raise InputError("the two releases have the same head: nothing was deleted between them")
        assumed = ASSUMED_PENALTY if kind == "ridge" else ASSUMED_DECAY
        scale = float(np.mean(public * public))
        self._damping = (assumed if relative is None else relative) * scale
        self._mean = public.mean(axis=0)

    @cached_property
    def deleted_sum(self) -> Floats:
        """Estimate of sum_i phi_i e_i' over the deleted records, up to a positive factor."""
        scores, shares = self.public @ self.moved, self._shares
        if self.kind == "softmax":
            scores = shares * (scores - np.sum(shares * scores, axis=1, keepdims=True))
        elif self.kind == "logistic":
            scores = shares * (1.0 - shares) * scores
        summed = self.public.T @ scores / len(self.public) + self._damping * self.moved
        return np.asarray(summed)

    @cached_property
    def _shares(self) -> Floats:
        """Predictions of the earlier head for the public samples."""
        return self._predicted(self.public)

    @cached_property
    def _inverse(self) -> Floats:
        """Inverse curvature A^-1, of shape (outputs, features, outputs, features).

        The shape is (features, features) if outputs do not interact. A softmax head with more than `MOST_PARAMETERS`
        parameters is approximated in this way.
        """
        rows, outputs = self.public, self.before.shape[1]
        width = rows.shape[1]
        if self.kind != "softmax" or width * outputs > MOST_PARAMETERS:
            weights = self._shares * (1.0 - self._shares) if self.kind == "logistic" else 1.0
            curvature = (weights * rows).T @ rows / len(rows)
            return np.asarray(np.linalg.inv(curvature + self._damping * np.eye(width)))
        joint = np.empty((outputs, width, outputs, width))
        for first in range(outputs):
            for second in range(outputs):
                weights = self._shares[:, [first]] * ((first == second) - self._shares[:, [second]])
                joint[first, :, second] = (weights * rows).T @ rows / len(rows)
        flat = joint.reshape(outputs * width, -1)
        return np.asarray(np.linalg.inv(flat + self._damping * np.eye(len(flat))).reshape(joint.shape))

    def _solved(self, summed: Floats) -> Floats:
        """Return A^-1 times a matrix of the shape of `deleted_sum`."""
        if self._inverse.ndim == 2:
            return np.asarray(self._inverse @ summed)
        return np.asarray(np.einsum("afbg,gb->fa", self._inverse, summed))

    def _square_lengths(self, phi: Floats, errors: Floats) -> Floats:
        """Return the squared length of phi_i e_i' in the metric A^-1, for each record."""
        if self._inverse.ndim == 2:
            return np.asarray(np.sum((phi @ self._inverse) * phi, axis=1) * np.sum(errors * errors, axis=1))
        lengths, outputs = np.zeros(len(phi)), range(errors.shape[1])
        for first in outputs:
            for second in outputs:
                inner = np.sum((phi @ self._inverse[first, :, second]) * phi, axis=1)
                lengths += errors[:, first] * errors[:, second] * inner
        return lengths

    @cached_property
    def reconstruction(self) -> Floats:
        """Reconstructed features of one deleted record, with the constant last."""
        direction = np.linalg.svd(self.deleted_sum, full_matrices=False)[0][:, 0]
        # The constant feature is 1. If the estimate loses it, only the sign of the scale is known.
        constant = direction[-1]
        least = 1e-3 / np.sqrt(len(direction))
        scale = constant if abs(constant) > least else np.copysign(least, constant)
        return np.asarray(direction / scale)

    def template(self, phi: Floats, targets: Floats) -> Floats:
        """Return the value that `deleted_sum` has if exactly these records were deleted."""
        return np.asarray(phi.T @ (targets - self._predicted(phi)))

    def ranking(self, candidates: Candidates) -> Floats:
        """Return a score for each candidate; the attack guesses the candidate with the highest score."""
        filtered = self._filter
        if candidates.are_records:
            phi, errors = candidates.phi, candidates.targets - self._predicted(candidates.phi)
            agreement = np.sum((phi @ filtered) * errors, axis=1)
            lengths = np.sqrt(np.maximum(self._square_lengths(phi, errors), 0.0))
        else:
            agreement, lengths = np.empty(candidates.count), np.empty(candidates.count)
            for number in range(candidates.count):
                rows = candidates.owners == number
                theirs = self.template(candidates.phi[rows], candidates.targets[rows])
                agreement[number] = np.sum(filtered * theirs)
                lengths[number] = np.sqrt(max(float(np.sum(theirs * self._solved(theirs))), 0.0))
        return np.asarray(agreement / np.maximum(lengths, 1e-300))

    def centred_cosines(self, phi: Floats, rows: Floats) -> Floats:
        """Return the cosine between `phi` and each row, both minus the mean of the public samples."""
        own, others = phi - self._mean, rows - self._mean
        lengths = np.linalg.norm(others, axis=1) * np.linalg.norm(own)
        return np.asarray(others @ own / np.maximum(lengths, 1e-300))

    @cached_property
    def _filter(self) -> Floats:
        """A^-1 times `deleted_sum`, without its component along A^-1 W, which a changed penalty contributes."""
        filtered, weights = self.moved, self.before
        if self.kind != "ridge":
            return filtered
        shrunk = self._solved(weights)
        return np.asarray(filtered - shrunk * (np.sum(filtered * weights) / np.sum(shrunk * weights)))

    def _predicted(self, phi: Floats) -> Floats:
        """Return the predictions of the earlier head, in the unit of the targets."""
        scores = phi @ self.before
        if self.kind == "softmax":
            powers = np.exp(scores - scores.max(axis=1, keepdims=True))
            return np.asarray(powers / powers.sum(axis=1, keepdims=True))
        return np.asarray(1.0 / (1.0 + np.exp(-scores)) if self.kind == "logistic" else scores)


@dataclass(frozen=True)
class Attempt:
    """Result of one attack on two releases, compared with the true deletion.

    `reconstructed` says whether the deleted record is the candidate nearest to the reconstruction, and `nearest_public`
    is the centred cosine of the deleted record with the nearest public record; both are None for clients. `cosine` is
    the centred cosine of the reconstruction with the deleted record, or the cosine of `deleted_sum` with the client's
    sum. The control is another candidate, which was not deleted.
    """

    identified: bool
    reconstructed: bool | None
    cosine: float
    nearest_public: float | None
    control_identified: bool
    control_cosine: float


def attempt(heads: TwoHeads, candidates: Candidates, deleted: Sequence[int], control: int) -> Attempt:
    """Attack two releases, and compare the result with the `deleted` candidates and a `control` that was not."""
    named = int(np.argmax(heads.ranking(candidates)))
    if not candidates.are_records:
        cosines = []
        for number in (deleted[0], control):
            rows = candidates.owners == number
            theirs = heads.template(candidates.phi[rows], candidates.targets[rows])
            lengths = np.linalg.norm(theirs) * np.linalg.norm(heads.deleted_sum)
            cosines.append(float(np.sum(theirs * heads.deleted_sum) / max(float(lengths), 1e-300)))
        return Attempt(named in deleted, None, cosines[0], None, named == control, cosines[1])
    rows = candidates.phi
    cosines_of_all = heads.centred_cosines(heads.reconstruction, rows)
    best = max(deleted, key=lambda number: float(cosines_of_all[number]))
    nearest = heads.centred_cosines(rows[best], heads.public).max()
    return Attempt(
        named in deleted,
        int(np.argmax(cosines_of_all)) in deleted,
        float(cosines_of_all[best]),
        float(nearest),
        named == control,
        float(cosines_of_all[control]),
    )


@dataclass(frozen=True)
class BeforeAfterAttack:
    """Success rates of an observer who compares the releases before and after a deletion.

    `what` is "record" or "client"; `source` is a request of the run, or "trials" for deletions by the audit itself.
    `identified` is the share of attempts in which the matched filter named the right one of `candidates`;
    `reconstructed` is the share in which the right record was nearest to the reconstruction. Cosines are medians.
    """

    what: str
    source: str
    attempts: int
    candidates: int
    public: int
    identified: float
    reconstructed: float | None
    cosine: float
    nearest_public: float | None
    control_identified: float
    control_cosine: float

    @staticmethod
    def of(attempts: Sequence[Attempt], source: str, candidates: Candidates, public: int) -> BeforeAfterAttack:
        """Return the summary of these attempts."""

        def over(name: str, summary: Callable[[list[float]], Any]) -> Any:
            values = [getattr(each, name) for each in attempts]
            return None if values[0] is None else float(summary(values))

        return BeforeAfterAttack(
            "record" if candidates.are_records else "client",
            source,
            len(attempts),
            candidates.count,
            public,
            over("identified", np.mean),
            over("reconstructed", np.mean),
            over("cosine", np.median),
            over("nearest_public", np.median),
            over("control_identified", np.mean),
            over("control_cosine", np.median),
        )
