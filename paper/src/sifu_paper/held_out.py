"""Accuracy on the test samples of a data set, which belong to no client and are not used in training."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from sifu import Spec
from sifu.core.engine import Engine
from sifu.core.layout import Vector
from sifu.data import ClientData, Dataset, load
from sifu.run.clients_and_engine import engine_from_spec, known_outputs, takes_rows

MOST_KEPT = 4


class HeldOut:
    """Evaluator of models on the test samples of their specs; engines are kept for the next model."""

    def __init__(self, data_folder: Path | None) -> None:
        self._folder = data_folder
        self._engines: dict[Any, Engine | None] = {}
        self._lock = threading.Lock()

    def accuracy(self, spec: Spec, model: Vector) -> float | None:
        """Return the accuracy of a model of this spec on the test samples; None if the data set has none."""
        with self._lock:  # an engine evaluates one model at a time
            key = (spec.data.name, spec.data.normalise, spec.model, spec.features, spec.ridge)
            if key not in self._engines:
                if len(self._engines) >= MOST_KEPT:
                    self._engines.pop(next(iter(self._engines)))
                self._engines[key] = self._engine(spec)
            engine = self._engines[key]
            return None if engine is None else engine.evaluate(model, np.zeros(1, dtype=np.int64)).accuracy

    def _engine(self, spec: Spec) -> Engine | None:
        """Return an engine whose only client holds the test samples; it never trains."""
        dataset: Dataset = load(spec.data.name, self._folder or spec.data.folder or None)
        if dataset.x_test.shape[0] == 0:
            return None
        x = dataset.features("test", dtype=spec.model.dtype, flat=takes_rows(spec), normalise=spec.data.normalise)
        outputs = known_outputs(spec) or len(dataset.classes)
        alone = replace(
            spec,
            model=replace(spec.model, outputs=outputs),
            server=replace(spec.server, participation="all"),
            extensions=(),
        )
        return engine_from_spec(alone, [ClientData("held out", x, dataset.y_test)])[0]
