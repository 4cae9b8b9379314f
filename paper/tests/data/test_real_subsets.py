"""The library's feature maps and partitions on real subsets of public data sets."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sifu.data.feature_maps import RandomConvolutions, fixed_point
from sifu.theory.closed_form import Targets, fit_head
from sifu.theory.closed_form.sums import statistics_of_chunks
from sifu_paper.data import load


@pytest.mark.long
def test_a_head_on_the_default_map_reads_real_digits(shared_data: Path) -> None:
    """A head on 2,000 MNIST images without tuning exceeds 93 %, which softmax regression on all 10,000 aims at."""
    data = load("mnist", shared_data)
    features, targets = RandomConvolutions((1, 28, 28)), Targets("classification", 10)
    assert features.features <= 2100
    encoded = targets.encode(data.y_train[:2000])
    chunks = ((phi, encoded[rows]) for rows, phi in features.chunks(data.x_train[:2000]))
    statistics = statistics_of_chunks(fixed_point(features, targets), chunks)
    predicted = targets.decode(fit_head(statistics).predict(features(data.x_test[:500])))
    assert np.mean(predicted == data.y_test[:500]) > 0.93
