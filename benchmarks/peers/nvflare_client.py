"""The training script of nvflare_exchange.py: gives back the model that it got; the first client notes when."""

import os
import time
from pathlib import Path

import nvflare.client as flare

flare.init()
with Path(os.environ["METIS_BENCHMARK_MOMENTS"]).open("a", buffering=1) as moments:
    while flare.is_running():
        model = flare.receive()
        if flare.get_site_name() == "site-1":
            moments.write(f"{time.perf_counter()}\n")
        flare.send(flare.FLModel(params=model.params, params_type=model.params_type, metrics={"accuracy": 0.0}))
