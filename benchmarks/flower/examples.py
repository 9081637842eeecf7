"""Flower's published examples, their own files, under Metis: what each needs, and whether it comes out as under Flower.

    git clone https://github.com/adap/flower    # any place
    pip install 'metis-federated[flower]' pytorch-lightning jax flax optax opacus
    python benchmarks/flower/examples.py path/to/flower/examples --out examples.json

Nothing of an example is changed. What it would download is replaced by local data, and so are the
libraries that would (standins/). Each example runs
in a process of its own, with four clients, two of them ten times slower:

- under `sync_fedavg` for three rounds, next to Flower's own FedAvg on the same clients with the same seeds;
- then Sync and SemiSync until the accuracy that Sync has after six rounds, in seconds of virtual time.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
FAST, SLOW, ROUNDS, LONG = 0.1, 1.0, 3, 6

# What had to be set besides the folder: the table [site], and how the example is called where there are several.
EXAMPLES: dict[str, dict[str, Any]] = {
    "quickstart-pytorch": {},
    "quickstart-numpy": {},
    "quickstart-sklearn": {},
    "quickstart-jax": {},
    "quickstart-pytorch-lightning": {"metric": "loss"},
    "advanced-pytorch": {},
    "fl-tabular": {},
    "federated-vae": {"metric": "loss"},
    "custom-mods": {},
    "embedded-devices": {"disk": "zalando-datasets/fashion_mnist"},
    "supernode-authentication": {"disk": "uoft-cs/cifar10"},
    "opacus": {},
    "quickstart-tensorflow": {},
    "quickstart-sklearn-tabular": {},
    "quickstart-xgboost": {},
}


class LoopbackGrid:
    """Flower's own strategy on the same clients: messages are delivered in this process, each with Metis's seed."""

    def __init__(self, client: Any, seed: int) -> None:
        self._client, self._seed, self._tasks = client, seed, itertools.count()

    def get_node_ids(self) -> list[int]:
        return list(range(2, 2 + len(self._client.source.learners)))

    def call(self, message: Any, index: int) -> Any:
        import numpy as np
        from flwr.app import RecordDict

        from metis.flower.opening import context_of
        from metis.learning.learner import torch_seed
        from metis.learning.torch.foreign import seeded

        learner = self._client.source.learners[index]
        task = next(self._tasks)
        seed = torch_seed(np.random.SeedSequence(self._seed, spawn_key=(index, task, 2)))
        self._states = getattr(self, "_states", {})
        state = self._states.setdefault(index, RecordDict())
        context = context_of(self._client.project, index + 2, self._client.source.node(learner), state)
        with seeded(seed):
            return self._client.project.client_app(message, context)

    def send_and_receive(self, messages: Iterable[Any], *, timeout: float | None = None) -> list[Any]:
        by_node = sorted(messages, key=lambda message: int(message.metadata.dst_node_id))
        return [self.call(message, message.metadata.dst_node_id - 2) for message in by_node]


def by_flower(client: Any, initial: Any, seed: int, rounds: int) -> dict[str, Any]:
    """The model of Flower's FedAvg after these rounds."""
    from flwr.app import ArrayRecord, Message, RecordDict

    from metis.flower.opening import identify, is_legacy
    from metis.flower.records import content_with, record_of

    identify()
    grid, template = LoopbackGrid(client, seed), client.opening().contents["train"]
    if not is_legacy(client.project.client_app):
        from flwr.serverapp.strategy import FedAvg

        config = next(iter(template.config_records.values()))
        names = {
            "arrayrecord_key": next(iter(template.array_records)),
            "configrecord_key": next(iter(template.config_records)),
        }
        strategy = FedAvg(fraction_evaluate=0.0, **names)
        result = strategy.start(grid=grid, initial_arrays=record_of(initial), train_config=config, num_rounds=rounds)
        return {name: array.numpy() for name, array in result.arrays.items()}
    from flwr.common import parameters_to_ndarrays
    from flwr.compat.common.recorddict_compat import parameters_to_arrayrecord, recorddict_to_fitres
    from flwr.server.strategy import FedAvg as LegacyFedAvg

    strategy, arrays = LegacyFedAvg(), record_of(initial)
    for number in range(1, rounds + 1):
        results = []
        for index in range(len(client.source.learners)):
            content = content_with(template, initial, {"server-round": number})
            name = next(iter(content.array_records))
            content[name] = ArrayRecord(dict(arrays))
            message = Message(RecordDict(dict(content)), dst_node_id=index + 2, message_type="train")
            results.append((None, recorddict_to_fitres(grid.call(message, index).content, keep_input=True)))
        parameters, _ = strategy.aggregate_fit(number, results, [])
        arrays = parameters_to_arrayrecord(parameters, keep_input=True)
    return {str(index): array for index, array in enumerate(parameters_to_ndarrays(parameters))}


def prepared(name: str, spec: dict[str, Any], folder: Path, scratch: Path) -> dict[str, Any]:
    site: dict[str, Any] = {"flower": str(folder)}
    if "disk" in spec:  # what the example's own script would have written: one folder for each device
        import datasets

        data = datasets.load_dataset(spec["disk"], split="train")
        for index in range(4):
            part = data.shard(4, index).train_test_split(test_size=0.2, seed=42)
            part.save_to_disk(str(scratch / f"device-{index}"))
        site["node_config"] = {"dataset-path": f"{scratch}/device-{{partition}}"}
    return {
        "site": site,
        "learners": [
            {"name": "fast", "count": 2, "time_per_batch": FAST},
            {"name": "slow", "count": 2, "time_per_batch": SLOW},
        ],
        "policy": [{"name": "sync_fedavg", "local_epochs": 1}],
        "stop": {"rounds": ROUNDS},
        **({"evaluation": {"metric": spec["metric"]}} if "metric" in spec else {}),
    }


def worked(name: str, folder: Path) -> dict[str, Any]:
    """One example in this process."""
    import numpy as np

    sys.path.insert(0, str(HERE / "standins"))
    from metis.core.policies import semisync_fedavg, sync_fedavg
    from metis.experiments.bridges import site_path
    from metis.experiments.build import build_federation
    from metis.experiments.config.load import resolve_config
    from metis.flower.engine import client_of

    spec = EXAMPLES.get(name, {})
    with tempfile.TemporaryDirectory() as scratch:
        config = resolve_config(prepared(name, spec, folder, Path(scratch)), name)
        client = client_of(str(site_path(config)))
        evaluates = bool(client.measured("fast-1")[0])
        began = time.perf_counter()
        federation = build_federation(config)
        facts = client.facts("fast-1", federation.engine.layout)
        run = federation.simulate(sync_fedavg(local_epochs=1), rounds=ROUNDS)
        ours = run.community_model.tensors()
        row: dict[str, Any] = {
            "unit": facts.unit,
            "examples": facts.examples,
            "batch_size": facts.batch_size,
            "parameters": run.community_model.layout.size,
            "metric": federation.metric if evaluates else None,
            "sync": run.final_metric,
        }
        initial = federation.engine.initial_model(config.seed)
        theirs = by_flower(client, initial, config.seed, ROUNDS)
        floats = [key for key in ours if ours[key].dtype.kind == "f"]
        scale = max(float(np.abs(theirs[key]).max()) for key in floats) or 1.0
        row["differs"] = max(float(np.abs(ours[key] - theirs[key]).max()) for key in floats) / scale
        if evaluates:
            long = federation.simulate(sync_fedavg(local_epochs=1), rounds=LONG)
            aim, last = long.best_metric, long.history[-1].at
            semi = federation.simulate(semisync_fedavg(slowest_learner_epochs=1), seconds=last, target=aim)
            better = (lambda value: value >= aim) if federation.higher_is_better else (lambda value: value <= aim)
            metric = federation.metric
            for label, one in (("sync", long), ("semisync", semi)):
                reached = [point.at for point in one.history if better(point.metrics[metric])]
                row[f"{label}_seconds"] = reached[0] if reached else None
            row["target"] = aim
        row["seconds_here"] = time.perf_counter() - began
        return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "folder", type=Path, nargs="+", help="examples/ of Flower's repository; of several releases if you like"
    )
    parser.add_argument("--only", nargs="*", help="names of examples")
    parser.add_argument("--out", type=Path, help="a JSON file, which is filled as examples end")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            try:
                row = worked(options.folder[0].name, options.folder[0].resolve())
            except Exception as problem:
                row = {"problem": f"{type(problem).__name__}: {problem}"[:300]}
        print("ROW", json.dumps(row))
        return
    found: dict[str, Any] = {}
    if options.out is not None and options.out.exists():
        found = json.loads(options.out.read_text(encoding="utf-8"))
    for folder, name in itertools.product(options.folder, EXAMPLES):
        example, key = folder / name, f"{folder.parent.name}/{name}" if len(options.folder) > 1 else name
        if not (example / "pyproject.toml").is_file() or (options.only and name not in options.only) or key in found:
            continue
        command = [sys.executable, __file__, str(example), "--one"]
        with tempfile.TemporaryDirectory() as scratch:
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, cwd=scratch, timeout=1800,
                env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HOME": scratch},
            )  # fmt: skip
        lines = [line for line in done.stdout.splitlines() if line.startswith("ROW ")]
        found[key] = json.loads(lines[-1][4:]) if lines else {"problem": done.stderr.strip().splitlines()[-1][:300]}
        print(key, json.dumps(found[key]), flush=True)
        if options.out is not None:
            options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
