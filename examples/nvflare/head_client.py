"""Client script of a closed-form head on NVIDIA FLARE: `sifu.LoopClient` answers from the site's local data."""

import numpy as np
import nvflare.client as flare
from nvflare.app_common.abstract.fl_model import FLModel

import sifu

flare.init()
name = flare.get_site_name()
random = np.random.default_rng(int(name.removeprefix("site-")))
x = random.normal(size=(20, 4))
client = sifu.LoopClient(name, x, (x[:, 0] > x[:, 1]).astype(int))

while flare.is_running():
    received = flare.receive()
    if received is None:
        break
    flare.send(FLModel(params=client.answer(received.params, received.meta["instructions"][name])))
