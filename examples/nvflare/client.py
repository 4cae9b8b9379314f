"""Training script of a site, like any NVIDIA FLARE client script: receive a model, train it on local data, send it."""

import numpy as np
import nvflare.client as flare
from nvflare.app_common.abstract.fl_model import FLModel

flare.init()
site = int(flare.get_site_name().removeprefix("site-"))
random = np.random.default_rng(site)
x = random.normal(size=(20, 4))
y = x @ np.array([1.0, -2.0, 0.5, 0.0]) + site

while flare.is_running():
    received = flare.receive()
    if received is None:
        break
    weights = received.params["w"]
    flare.send(FLModel(params={"w": weights - 0.1 * x.T @ (x @ weights - y) / len(y)}))
