"""Workflow for NVIDIA FLARE: FLARE sends models to the sites; sifu averages, records, forgets and certifies."""

from __future__ import annotations

from typing import Any

import numpy as np
from nvflare.app_common.abstract.fl_model import FLModel
from nvflare.app_common.workflows.model_controller import ModelController

import sifu


class ForgettingController(ModelController):
    """Controller that runs a sifu run on FLARE's sites: training first, then every waiting request.

    Args:
        folder: Absolute path of the run folder on the server.
        samples: Number of samples of each site, by the site's name in FLARE.
        shapes: Shape of each array of the model, initially zero; for a closed-form head, of a sample `x`.
        spec: Sections of a spec (`sifu init`), with `regularity.kind = "assumed"`.
        timeout: Seconds that a site has to answer; a later site counts as absent from the round.

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
        """Send tasks to the sites until no work is left."""
        solves = self.spec.get("model", {}).get("kind") == "ridge"
        model: dict[str, Any] = {"sample_shape": self.shapes["x"]} if solves else {"initial": self._fresh}
        with sifu.ServerLoop(self.folder, self.spec, self.samples, **model) as loop:
            while (task := loop.next()) and not self.abort_signal.triggered:
                replies: dict[str, Any] = {}
                # one task for each group
                for arrays in {id(arrays): arrays for arrays in task.models.values()}.values():
                    targets = [site for site, own in task.models.items() if own is arrays]
                    params = {name: np.array(array) for name, array in arrays.items()}
                    told = {"instructions": {site: task.instructions.get(site) for site in targets}}
                    sent = FLModel(params=params, current_round=task.round, meta=told)
                    answers = self.send_model_and_wait(targets=targets, data=sent, timeout=self.timeout)
                    replies |= {answer.meta["client_name"]: answer.params for answer in answers}
                loop.take(replies)

    def _fresh(self) -> dict[str, np.ndarray]:
        return {name: np.zeros(shape) for name, shape in self.shapes.items()}
