"""Time to an accuracy in a real federation of fast and slow learners, one order of magnitude apart.

    python benchmarks/time_to_accuracy.py [--target 0.95] [--seconds 150] [--quick] [--no-peers] [--out FOLDER]

Four learners on loopback, as processes, with a quarter of the bundled digits each (8x8, 64-32-10 network, batches of
16, momentum SGD): two take 0.01 s for a batch, two take 0.1 s, held up by sleeping, so two cores are enough. Metis
is a real deployment: `metis controller` and `metis learner` processes, model over gRPC, everything journaled. Flower
is one too: a SuperLink, four SuperNodes, `flwr run`. Same data, division, start, network, solver, batches, paces and
test set; the training loop is Metis' own in the one case and plain torch (peers/task.py) in the other, and both hold
each batch to its pace. Sync FedAvg (both systems) trains one epoch a round; SemiSync trains everybody for as long as
the slowest takes for one (lambda = 1). Time runs from the first task to the first community model that reaches the
accuracy on the test set; the start of processes is not in it.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _bench import ROOT, Report, arguments, report
from _peers import Unavailable, ask

from metis.core.events import Evaluated, SendTask
from metis.experiments.build import build_federation
from metis.experiments.config.load import load_config
from metis.runs.trace import read_trace

PACES = {"lyon": 0.01, "turin": 0.01, "oslo": 0.1, "porto": 0.1}
METIS = [sys.executable, "-m", "metis.cli.app"]
EXAMPLE = ROOT / "examples" / "deployment.toml"
BATCH, RATE, MOMENTUM = 16, 0.01, 0.75
POLICIES = {
    "Metis SemiSync": ["policy.name=semisync_fedavg", "policy.slowest_learner_epochs=1"],
    "Metis Sync": ["policy.name=sync_fedavg", "policy.local_epochs=1"],
}


def settings(policy: list[str], target: float, seconds: float) -> list[str]:
    return [
        *policy, f"training.learning_rate={RATE}", f"training.momentum={MOMENTUM}",
        f"evaluation.target={target}", "stop.at_target=true", f"stop.seconds={seconds}",
    ]  # fmt: skip


def federation_file(folder: Path) -> Path:
    """The example's federation without its policy's own settings."""
    text = EXAMPLE.read_text("utf-8").replace("slowest_learner_epochs = 1      # lambda\n", "")
    text = text.replace("rounds = 12\n", "").replace("[evaluation]\ntarget = 0.93\n", "")
    file = folder / "federation.toml"
    file.write_text(text, "utf-8")
    return file


def deploy(folder: Path, changes: list[str], paces: dict[str, float], limit: float) -> list[tuple[float, float]]:
    """Seconds since the first task and accuracy of each community model of one federation from start to end."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    log = folder / "log"
    changed = [word for change in changes for word in ("--set", change)]
    there = ["--controller", address, "--insecure"]
    commands = [
        [*METIS, "controller", federation_file(folder), "--state", folder / "state", "--insecure", "--listen", address,
         "--http", "", *changed],
        *([*METIS, "learner", *there, "--name", name, "--work", folder / name, "--pace", str(pace)]
          for name, pace in paces.items()),
    ]  # fmt: skip
    with log.open("ab") as file:
        processes = [subprocess.Popen(command, stdout=file, stderr=file) for command in commands]
        try:
            deadline = time.monotonic() + limit
            while any(process.poll() is None for process in processes):
                if any(process.poll() for process in processes) or time.monotonic() > deadline:
                    break  # without it, the others would wait for ever
                time.sleep(0.1)
            codes = [process.poll() for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
    if codes != [0] * len(codes):
        raise SystemExit(log.read_text("utf-8")[-2000:])
    events = list(read_trace(folder / "state" / "run" / "events.jsonl"))
    began = next(at for at, item in events if isinstance(item, SendTask))
    return [(at - began, item.metrics["accuracy"]) for at, item in events if isinstance(item, Evaluated)]


def flower(folder: Path, target: float, seconds: float) -> list[tuple[float, float]]:
    federation = build_federation(load_config(federation_file(folder), settings(POLICIES["Metis Sync"], target, 1.0)))
    inputs, labels = federation.train.batch(np.arange(len(federation.train)))
    assert federation.test is not None
    test = federation.test.batch(np.arange(len(federation.test)))
    np.savez(
        folder / "data.npz", x_train=inputs.numpy(), y_train=labels.numpy(), x_test=test[0].numpy(),
        y_test=test[1].numpy(), **{f"part{n}": learner.indices for n, learner in enumerate(federation.learners)},
        **{f"initial/{name}": array for name, array in federation.initial_model.tensors().items()},
    )  # fmt: skip
    spec = {
        "data": str(folder / "data.npz"), "learners": len(PACES), "target": target, "seconds": seconds,
        "paces": [PACES[learner.name] for learner in federation.learners], "batch_size": BATCH, "local_epochs": 1,
        "learning_rate": RATE, "momentum": MOMENTUM, "timeout": seconds + 120,
    }  # fmt: skip
    found = ask("flower", "flower_deployment", spec, timeout=seconds + 150)
    return list(zip(found["seconds"], found["accuracy"], strict=True))[1:]


def measure(sheet: Report, options: Any) -> None:
    target, seconds = (0.3, 20.0) if options.quick else (options.target, options.seconds)
    curves: dict[str, list[tuple[float, float]]] = {}
    for name, policy in list(POLICIES.items())[: 1 if options.quick else None]:
        with tempfile.TemporaryDirectory() as folder:
            curves[name] = deploy(Path(folder), settings(policy, target, seconds), PACES, seconds + 120)
    if not options.no_peers:
        with tempfile.TemporaryDirectory() as folder:
            try:
                curves["Flower FedAvg"] = flower(Path(folder), target, seconds)
            except Unavailable as problem:
                sheet.say(f"Flower was not measured: {problem}")
    reached = {name: next((at for at, accuracy in curve if accuracy >= target), None) for name, curve in curves.items()}
    rows: list[list[Any]] = [["", f"s to {target:.0%}", "rounds", "best accuracy", "s a round"]]
    for name, curve in curves.items():
        rounds = sum(1 for at, _ in curve if at > 0 and (reached[name] is None or at <= reached[name]))
        end = reached[name] or max(at for at, _ in curve)
        rows.append(
            [name, reached[name] or f"not within {seconds:g}", rounds, f"{max(a for _, a in curve):.3f}", end / rounds]
        )
    sheet.table(rows)
    sheet.figures = {"target": target, "paces": PACES, "curves": curves, "seconds_to_target": reached}
    mine, theirs = reached["Metis SemiSync"], reached.get("Flower FedAvg")
    if mine and "Flower FedAvg" in curves:
        times = (theirs or seconds) / mine
        sheet.goal(
            "time to accuracy, 10x heterogeneous, SemiSync against Flower FedAvg", "at least 4 times faster",
            f"{'' if theirs else 'more than '}{times:.1f} times", times >= 4, times / 4,
        )  # fmt: skip

    def draw(axes) -> None:
        for name, curve in curves.items():
            axes.plot(*zip(*curve, strict=True), ".-", label=name)
        axes.axhline(target, color="grey", linestyle="--")
        axes.set(xlabel="seconds", ylabel="accuracy on the test set")
        axes.legend(fontsize=8)

    sheet.chart("time_to_accuracy", draw, "Accuracy against real time")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--target", type=float, default=0.95)
    parser.add_argument("--seconds", type=float, default=150.0, help="the longest that a federation may take")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with report(options, __doc__) as sheet:
        measure(sheet, options)


if __name__ == "__main__":
    main()
