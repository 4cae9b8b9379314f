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
        shapes: Shape of each array of the model, which begins at zero; for a closed-form head, of a sample `x`.
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
        solves = self.spec.get("model", {}).get("kind") == "ridge"
        model: dict[str, Any] = {"sample_shape": self.shapes["x"]} if solves else {"initial": self._fresh}
        with sifu.ServerLoop(self.folder, self.spec, self.samples, **model) as loop:
            while (task := loop.next()) and not self.abort_signal.triggered:
                replies: dict[str, Any] = {}
                for arrays in {id(arrays): arrays for arrays in task.models.values()}.values():  # one for each group
                    targets = [site for site, own in task.models.items() if own is arrays]
                    params = {name: np.array(array) for name, array in arrays.items()}
                    told = {"instructions": {site: task.instructions.get(site) for site in targets}}
                    sent = FLModel(params=params, current_round=task.round, meta=told)
                    answers = self.send_model_and_wait(targets=targets, data=sent, timeout=self.timeout)
                    replies |= {answer.meta["client_name"]: answer.params for answer in answers}
                loop.take(replies)

    def _fresh(self) -> dict[str, np.ndarray]:
        return {name: np.zeros(shape) for name, shape in self.shapes.items()}
