"""A workflow for NVIDIA FLARE: FLARE takes models to the sites, sifu averages, records, forgets and certifies."""

from __future__ import annotations

from typing import Any

import numpy as np
from nvflare.app_common.abstract.fl_model import FLModel
from nvflare.app_common.workflows.model_controller import ModelController

import sifu


class ForgettingController(ModelController):
    """Rounds of a sifu run on FLARE's sites: training first, then every request that waits.

    Args:
        folder: The run folder, an absolute path on the server's machine.
        samples: Number of samples of each site, by FLARE's name of it.
        shapes: Shape of each array of the model; a fresh model is zero.
        spec: The sections of a spec (`sifu init`), with `regularity.kind = "assumed"`.
        timeout: Seconds a site has to answer; a later one was absent from the round.
    """

    def __init__(
        self,
        folder: str,
        samples: dict[str, int],
        shapes: dict[str, list[int]],
        spec: dict[str, Any],
        timeout: int = 60,
    ) -> None:
        super().__init__(persistor_id="")
        self.folder, self.samples, self.shapes, self.spec, self.timeout = folder, samples, shapes, spec, timeout

    def run(self) -> None:
        """Take tasks to the sites until nothing is left to do."""
        with sifu.ServerLoop(self.folder, self.spec, self.samples, self._fresh) as loop:
            while (task := loop.next()) and not self.abort_signal.triggered:
                replies: dict[str, Any] = {}
                for model in {id(model): model for model in task.models.values()}.values():  # one for each group
                    targets = [site for site, own in task.models.items() if own is model]
                    params = {name: np.array(array) for name, array in model.items()}
                    sent = FLModel(params=params, current_round=task.round)
                    answers = self.send_model_and_wait(targets=targets, data=sent, timeout=self.timeout)
                    replies |= {answer.meta["client_name"]: answer.params for answer in answers}
                loop.take(replies)

    def _fresh(self) -> dict[str, np.ndarray]:
        return {name: np.zeros(shape) for name, shape in self.shapes.items()}
