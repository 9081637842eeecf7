"""NVFlare's published quickstarts, their own files, under Metis: what each needs, and what comes out.

    git clone https://github.com/NVIDIA/NVFlare    # any place
    pip install 'metis-federated[nvflare,jax]' pytorch-lightning scikit-learn
    python benchmarks/nvflare/quickstarts.py path/to/NVFlare/examples/hello-world --out quickstarts.json

Nothing of a script is changed. What it would download is replaced by local data. Each quickstart runs in a process of
its own, with two sites, one of them ten times slower, under Sync and SemiSync for as many seconds of virtual time.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent

# What a recipe says, and therefore what [site] must: the initial model and the arguments of the script.
QUICKSTARTS: dict[str, dict[str, Any]] = {
    "hello-pt": {"network": "model.py:SimpleNetwork", "args": "--epochs 1 --num_workers 0", "metric": "accuracy"},
    "hello-lightning": {"network": "model.py:LitNet", "args": "--batch_size 16", "metric": "accuracy"},
    "hello-jax": {"start": "jax", "args": "--num_partitions 2 --data_dir {data}", "metric": "accuracy"},
    "hello-numpy": {"start": "numpy", "args": "", "metric": "weight_mean"},
}
FILE = """
[site]
nvflare = "client.py"
{site}

[[learners]]
names = ["site-1"]
name = "fast"
time_per_batch = {fast}

[[learners]]
names = ["site-2"]
name = "slow"
time_per_batch = {slow}

[training]
{training}

[evaluation]
metric = "{metric}"

[[policy]]
name = "sync_fedavg"
local_epochs = 1

[[policy]]
name = "semisync_fedavg"
slowest_learner_epochs = 1

[stop]
seconds = {seconds}
"""


def prepare(name: str, examples: Path, folder: Path, seconds: float) -> Path:
    """The quickstart's own files, local data, and the file that Metis needs."""
    settings = QUICKSTARTS[name]
    for file in (examples / name).glob("*.py"):
        shutil.copy(file, folder)
    data, training = folder / "data", ""
    data.mkdir()
    if "start" in settings:
        training = f'initial_model = "{_start(settings["start"], folder, data)}"'
    site = [f'args = "{settings["args"].format(data=data)}"'] if settings["args"] else []
    site += [f'network = "{settings["network"]}"'] if "network" in settings else []
    calls = "start" in settings  # a script without torch is called as a whole, which is one turn
    fast, slow = (1.0, 10.0) if calls else (0.01, 0.1)
    text = FILE.format(
        site="\n".join(site), training=training, metric=settings["metric"], fast=fast, slow=slow, seconds=seconds
    )
    file = folder / "federation.toml"
    file.write_text(text, "utf-8")
    return file


def _start(kind: str, folder: Path, data: Path) -> Path:
    """The initial model that the recipe names, as a safetensors file."""
    import numpy as np
    from safetensors.numpy import save_file

    file = folder / "start.safetensors"
    if kind == "numpy":
        array = np.arange(1, 10, dtype=np.float32).reshape(3, 3)
    else:
        from sklearn.datasets import load_digits

        found = load_digits()
        images = np.pad((found.images * 15.9).repeat(3, 1).repeat(3, 2), ((0, 0), (2, 2), (2, 2)))[..., None]
        for part, chosen in (("train", slice(1400)), ("test", slice(1400, None))):
            np.save(data / f"{part}_images.npy", images[chosen].astype(np.uint8))
            np.save(data / f"{part}_labels.npy", found.target[chosen])
        made = "import model, numpy; numpy.save('start.npy', model.flatten_params(model.create_initial_params()))"
        subprocess.run([sys.executable, "-c", made], cwd=folder, check=True)
        array = np.load(folder / "start.npy")
    save_file({"numpy_key": array}, file)
    return file


def run(name: str, examples: Path, seconds: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        file = prepare(name, examples, folder, seconds)
        environment = dict(os.environ)
        if not _works("torchvision"):
            environment["PYTHONPATH"] = os.pathsep.join([str(HERE / "standins"), environment.get("PYTHONPATH", "")])
        command = [sys.executable, "-c", "from metis.cli.app import main; main()", "compare", str(file), "--json"]
        started = time.monotonic()
        done = subprocess.run(
            [*command, "--out", str(folder / "runs")], capture_output=True, check=False, text=True, env=environment
        )
        took = time.monotonic() - started
    if done.returncode:
        return {"name": name, "failed": done.stderr.strip().splitlines()[-1]}
    rows = json.loads(done.stdout)["rows"]
    keys = ("label", "last", "best", "rounds", "update_requests", "iterations")
    found = [{key: row[key] for key in keys if key in row} for row in rows]
    return {"name": name, "set": QUICKSTARTS[name], "policies": found, "seconds": round(took, 1)}


def _works(package: str) -> bool:
    return (
        subprocess.run(
            [sys.executable, "-c", f"import {package}.datasets"], capture_output=True, check=False
        ).returncode
        == 0
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="NVFlare's quickstarts under Metis.")
    parser.add_argument("examples", type=Path)
    parser.add_argument("--only", nargs="*", default=list(QUICKSTARTS))
    parser.add_argument("--seconds", type=float, default=30.0, help="of virtual time")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    found = []
    for name in given.only:
        found.append(run(name, given.examples, given.seconds))
        print(json.dumps(found[-1], indent=1), flush=True)
    if given.out is not None:
        given.out.write_text(json.dumps(found, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
