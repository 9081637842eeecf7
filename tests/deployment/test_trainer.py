"""The child process, spoken to as its parent does: real processes, real training, JSON lines."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("grpc")

from deployment.tiny import settings, write_site
from metis.core.layers.compression import Compression
from metis.deployment.trainer.pace import Pace
from metis.deployment.wire.models import read_model, write_model
from metis.experiments.silo import build_silo
from metis.runs.storage import load_model

TRAINER = [sys.executable, "-m", "metis.cli.trainer"]


class Trainer:
    """A child process and the lines to and from it."""

    def __init__(self, command: Sequence[str] = TRAINER) -> None:
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )  # fmt: skip
        self._numbers = itertools.count(1)
        self.progress: list[int] = []

    def send(self, command: str, **arguments: Any) -> int:
        number = next(self._numbers)
        self.write({"id": number, "command": command, **arguments})
        return number

    def write(self, line: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(line).encode() + b"\n")
        self.process.stdin.flush()

    def read(self) -> dict[str, Any]:
        """The next line that is not about progress."""
        assert self.process.stdout is not None
        while True:
            answer: dict[str, Any] = json.loads(self.process.stdout.readline())
            if "progress" not in answer:
                return answer
            self.progress.append(answer["progress"]["steps"])

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        number = self.send(command, **arguments)
        answer = self.read()
        assert answer.pop("id") == number
        return answer

    def prepare(self, site: Path, **changes: Any) -> dict[str, Any]:
        arguments: dict[str, Any] = {
            "settings": settings(site), "site": str(site), "name": "zurich", "index": 1, "layout": None,
            "memory": None, "device": None, "pace": None,
        }  # fmt: skip
        return self.ask("prepare", **{**arguments, **changes})

    def train(self, model: Path, out: Path, task: int = 1, **changes: Any) -> dict[str, Any]:
        return self.ask("train", **training(model, out, task, **changes))

    def end(self) -> str:
        """Close its stdin and wait; returns what it wrote to stderr."""
        _, stderr = self.process.communicate()
        return stderr.decode()


def training(model: Path, out: Path, task: int = 1, **changes: Any) -> dict[str, Any]:
    return {"task": task, "model": str(model), "steps": 5, "seconds": None, "out": str(out), **changes}


@pytest.fixture(scope="module")
def trainer() -> Iterator[Trainer]:
    """One process for many tests: starting torch takes longer than all of them."""
    child = Trainer()
    yield child
    child.end()
    assert child.process.returncode == 0


@pytest.fixture
def site(tmp_path: Path) -> Path:
    return write_site(tmp_path)


@pytest.fixture
def model(site: Path, tmp_path: Path) -> Path:
    """The initial community model."""
    silo = build_silo(settings(site), site, "zurich", 1)
    write_model(tmp_path / "initial.model", silo.engine.initial_model(1990))
    return tmp_path / "initial.model"


def test_a_task_may_ask_for_another_learning_rate(trainer: Trainer, site: Path, model: Path, tmp_path: Path) -> None:
    """A thousandth of the rate goes about a thousandth of the way."""
    trainer.prepare(site)
    start = np.fromfile(model, "<f4")
    lengths = []
    for number, rate in enumerate((1.0, 1e-3)):
        out = tmp_path / f"{number}.model"
        assert "done" in trainer.train(model, out, rate=rate)
        lengths.append(np.linalg.norm(np.fromfile(out, "<f4") - start))
    assert 0.3e-3 < lengths[1] / lengths[0] < 3e-3


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "int8", "top_k"])
def test_a_compressed_update_is_what_travels_and_its_error_is_reported(
    kind: str, trainer: Trainer, site: Path, model: Path, tmp_path: Path
) -> None:
    """What is left out is kept with the momentum, and added to the next update."""
    policy = {"name": "semisync_fedavg", "compression": {"kind": kind, **({"share": 0.1} if kind == "top_k" else {})}}
    compression = Compression(**policy["compression"])  # type: ignore[arg-type]
    memory = tmp_path / "memory"
    memory.mkdir()
    changed = settings(site, policy=policy)
    community = read_model(model, (silo := build_silo(changed, site, "zurich", 1)).engine.layout)
    assert silo.learner is not None
    expected, remembered = [], None
    for task in (1, 2):
        expected.append(silo.learner.train(silo.engine, community, task, 5, remembered))
        remembered = expected[-1].memory
    for task, trained in enumerate(expected, start=1):
        trainer.prepare(site, settings=changed, memory=str(memory))  # in a new life
        out = tmp_path / f"{task}.model"
        done = trainer.train(model, out, task)["done"]
        assert done["bytes"] == out.stat().st_size == compression.nbytes(silo.engine.layout)
        arrives = compression.restore(out.read_bytes(), community)
        assert arrives.vector == pytest.approx(trained.model.vector, abs=1e-6)
        assert done["compression_error"] == pytest.approx(trained.notes["compression_error"], rel=1e-3)
        assert 0 < done["compression_error"] < 1


def test_a_site_with_another_frozen_part_is_refused(trainer: Trainer, site: Path) -> None:
    """Its layout fits, because a frozen part does not travel; the digest of the others comes with the settings."""
    changed = settings(site)
    changed["experiment"]["training"]["parameters"] = {"frozen": ["0.*"]}
    own = trainer.prepare(site, settings=changed)["done"]["frozen"]
    assert len(own) == 64
    assert "done" in trainer.prepare(site, settings={**changed, "frozen": own})
    refused = trainer.prepare(site, settings={**changed, "frozen": "0" * 64})
    assert refused["kind"] == "network_differs"
    assert refused["failed"] == (
        f"the frozen part of the network here has the digest {own[:12]}, the federation's 000000000000; load the same "
        "base model as the other sites"
    )


def test_prepare_says_what_the_learner_brings(trainer: Trainer, site: Path) -> None:
    """Sizes, the layout and what is measured."""
    silo = build_silo(settings(site), site, "zurich", 1)
    done = trainer.prepare(site, layout=silo.engine.layout.to_json())["done"]
    assert done == {
        "examples": 40, "batch_size": 10, "evaluation_examples": 20, "fingerprint": silo.engine.layout.fingerprint,
        "layout": silo.engine.layout.to_json(), "metric": "accuracy", "higher_is_better": True, "seed": 1990,
        "metrics": ["accuracy", "loss"], "validation_examples": 0, "frozen": "", "network": None,
    }  # fmt: skip


def test_training_is_that_of_the_learner(trainer: Trainer, site: Path, model: Path, tmp_path: Path) -> None:
    """The same local model as in a simulation, in a file that its hash names, and honest numbers about it."""
    silo = build_silo(settings(site), site, "zurich", 1)
    assert silo.learner is not None
    community = read_model(model, silo.engine.layout)
    expected = silo.learner.train(silo.engine, community, 7, 5)
    trainer.prepare(site)

    done = trainer.train(model, tmp_path / "7.model", 7)["done"]

    trained = read_model(tmp_path / "7.model", silo.engine.layout)
    assert trained.sha256() == expected.model.sha256()
    assert (done["task"], done["steps"], done["loss"]) == (7, 5, pytest.approx(expected.loss))
    assert done["seconds"] > 0 < done["time_per_batch"]
    content = (tmp_path / "7.model").read_bytes()
    assert (done["sha256"], done["bytes"]) == (hashlib.sha256(content).hexdigest(), len(content))
    assert not list(tmp_path.glob("*.new"))


def test_evaluation_initial_model_and_final_model(trainer: Trainer, site: Path, model: Path, tmp_path: Path) -> None:
    """What the controller asks its own child, and what a learner asks at the end."""
    silo = build_silo(settings(site), site, "zurich", 1)
    assert silo.evaluation is not None
    trainer.prepare(site)
    done = trainer.ask("evaluate", model=str(model))["done"]
    assert done["examples"] == 20
    assert done["metrics"] == pytest.approx(
        silo.engine.evaluate(read_model(model, silo.engine.layout), silo.evaluation)
    )

    prepared = trainer.prepare(site, name=None)["done"]
    assert (prepared["examples"], prepared["evaluation_examples"]) == (0, 0)
    done = trainer.ask("initial", seed=None, out=str(tmp_path / "first.model"))["done"]
    assert (tmp_path / "first.model").read_bytes() == model.read_bytes()
    assert done["layout"] == silo.engine.layout.to_json()
    other = trainer.ask("initial", seed=3, out=str(tmp_path / "other.model"))["done"]
    assert other["sha256"] != done["sha256"]

    out = tmp_path / "out" / "community.safetensors"
    assert "done" in trainer.ask(
        "save", model=str(model), layout=done["layout"], out=str(out), metadata={"version": "9"}
    )
    assert load_model(out).sha256() == read_model(model, silo.engine.layout).sha256()


def test_what_cannot_be_done_is_told_and_the_process_goes_on(
    trainer: Trainer, site: Path, model: Path, tmp_path: Path
) -> None:
    """Every fault is one sentence; the next command is answered as if nothing had been."""
    assert trainer.ask("dance")["failed"] == "'dance' is not a command of a trainer"
    layout = trainer.prepare(site)["done"]["layout"]
    layout[0][1] = [8, 4]
    failed = trainer.prepare(site, layout=layout)["failed"]
    assert failed == (
        "the network here is not the federation's: tensor '0.weight' is a parameter [8, 3] of float32 here, "
        "a parameter [8, 4] of float32 there"
    )
    failed = trainer.prepare(site, layout=layout[1:])["failed"]
    assert failed.endswith("the federation's has no tensor '0.weight' of shape [8, 3]")
    trainer.prepare(site)
    failed = trainer.train(tmp_path / "nowhere", tmp_path / "out.model")["failed"]
    assert failed == f"the model {tmp_path}/nowhere cannot be read: No such file or directory"
    (tmp_path / "short").write_bytes(b"12345678")
    failed = trainer.train(tmp_path / "short", tmp_path / "out.model")["failed"]
    assert failed == f"the model {tmp_path}/short has 8 bytes, one of this network has 200"
    failed = trainer.train(model, tmp_path / "nowhere" / "out.model")["failed"]
    assert failed == f"the model cannot be written to {tmp_path}/nowhere/out.model: No such file or directory"
    assert trainer.train(model, tmp_path / "out.model")["done"]["steps"] == 5


@pytest.mark.parametrize(
    ("code", "where", "sentence", "kind"),
    [
        ("def loss(outputs, targets):\n    raise RuntimeError('no GPU today')", "train",
         "site.py:19: RuntimeError: no GPU today", "site_code"),
        ("def training_data(site):\n    x, y = records(site, 1, 10); x[3, 1] = float('nan'); return x, y", "train",
         "in batch 1 of task 1, 1 example of 10 (at index 3 of its data) has NaN or inf", "data_not_finite"),
        ("def training_data(site):\n    x, y = records(site, 1, 10); return x, y + 7", "train",
         "a label is not among the classes of the network: IndexError: Target ", "site_code"),
        ("def loss(outputs, targets):\n    return outputs.sum() * float('inf')", "train",
         "learner 'zurich' diverged in task 1 within 1 steps", "diverged"),
        ("def training_data(site):\n    return np.zeros((10**9, 10**6)), np.zeros(10**9)", "prepare",
         "training_data('zurich') failed: site.py:19: ", "setup"),
        ("def loss(outputs, targets):\n    return np.zeros(10**15)", "train",
         "out of memory: site.py:19: ", "out_of_memory"),
        ("def evaluation_data(site):\n    return np.zeros((4, 5)), np.zeros(4, int)", "evaluate",
         "RuntimeError: mat1 and mat2 shapes cannot be multiplied", "site_code"),
        ("metrics = {'auc': lambda outputs, targets: float('nan')}", "evaluate",
         "the community model's auc here is not a finite number", "setup"),
        ("def training_data(site):\n    import sys; sys.exit(3)", "prepare",
         "failed: site.py:19: SystemExit: 3", "setup"),
    ],
)  # fmt: skip
def test_a_fault_in_the_sites_code_is_a_sentence_with_its_line(
    trainer: Trainer, tmp_path: Path, model: Path, code: str, where: str, sentence: str, kind: str
) -> None:
    """Not a dead process: the operator reads what to fix."""
    path = write_site(tmp_path, code)
    prepared = trainer.prepare(path)
    if where == "prepare":
        answer = prepared
    elif where == "train":
        answer = trainer.train(model, tmp_path / "out.model")
        assert answer["steps"] in (0, 1) and answer["seconds"] >= 0
    else:
        answer = trainer.ask("evaluate", model=str(model))
    assert sentence in answer["failed"]
    assert answer["kind"] == kind
    assert answer["details"].startswith("Traceback (most recent call last)")
    assert trainer.ask("ping") == {"done": {}}


def test_what_the_site_prints_or_reads_does_not_get_into_the_lines(tmp_path: Path, model: Path) -> None:
    """Prints, raw writes to descriptor 1 and programs that it starts go to stderr; its stdin is empty."""
    code = """
        import os, subprocess, sys
        print("hello from the site")
        os.write(1, b"raw bytes\\n")
        subprocess.run(["echo", "a program"])
        rest = sys.stdin.read()
        def loss(outputs, targets):
            print("a batch")
            return nn.functional.cross_entropy(outputs, targets)
    """
    trainer = Trainer()
    assert "done" in trainer.prepare(write_site(tmp_path, textwrap.dedent(code)))
    assert trainer.train(model, tmp_path / "out.model")["done"]["steps"] == 5

    stderr = trainer.end()

    assert trainer.process.returncode == 0
    assert {"hello from the site", "raw bytes", "a program", "a batch"} <= set(stderr.splitlines())


def test_a_paced_batch_takes_at_least_so_long(trainer: Trainer, site: Path, model: Path, tmp_path: Path) -> None:
    """The time per batch that the controller hears of is that of the slower machine; progress is reported meanwhile."""
    trainer.prepare(site, pace=0.3)
    trainer.progress.clear()
    done = trainer.train(model, tmp_path / "out.model")["done"]
    assert done["seconds"] >= 5 * 0.3
    assert done["time_per_batch"] >= 0.3
    assert trainer.progress and trainer.progress == sorted(set(trainer.progress))


def test_a_pace_ends_with_the_budget(trainer: Trainer, site: Path, model: Path, tmp_path: Path) -> None:
    """A batch of ten minutes is not waited for; the steps that were done count, the cut one is not measured."""
    trainer.prepare(site, pace=600.0)
    done = trainer.train(model, tmp_path / "out.model", steps=None, seconds=0.2)["done"]
    assert done["steps"] == 1
    trainer.prepare(site, pace=0.25)
    done = trainer.train(model, tmp_path / "out.model", steps=None, seconds=1.1)["done"]
    assert done["steps"] >= 2
    assert done["time_per_batch"] >= 0.25
    trainer.prepare(site, pace=0.01)
    done = trainer.train(model, tmp_path / "out.model", seconds=0.0)["done"]
    assert done["steps"] == 1  # one batch is always done


def test_a_slow_batch_is_not_slowed_further() -> None:
    """The pace is a lower bound: what is left of it is waited for, and nothing if the batch took longer."""
    waits: list[float] = []
    pace = Pace(0.05, math.inf, lambda seconds: bool(waits.append(seconds)))
    pace.wait(0)
    time.sleep(0.06)
    pace.wait(1)
    pace.wait(2)
    assert waits[0] == 0
    assert waits[1] <= 0
    assert waits[2] <= 0.05


def test_a_training_that_is_abandoned_ends_at_its_next_batch(
    trainer: Trainer, site: Path, model: Path, tmp_path: Path
) -> None:
    """Also in the middle of a pace; the training of another id is not touched."""
    trainer.prepare(site, pace=600.0)
    number = trainer.send("train", **training(model, tmp_path / "out.model", 3))
    trainer.write({"id": number + 1, "command": "abandon"})
    trainer.write({"id": number, "command": "abandon"})
    answer = trainer.read()
    assert answer["id"] == number and answer["abandoned"]["task"] == 3 and answer["abandoned"]["steps"] <= 1
    assert not (tmp_path / "out.model").exists()
    trainer.prepare(site)
    assert trainer.train(model, tmp_path / "out.model", 3)["done"]["steps"] == 5


def test_momentum_outlives_the_process_and_a_task_that_is_given_again_starts_as_before(
    tmp_path: Path, model: Path
) -> None:
    """Two tasks in one process, or with the process killed in between, or the second task twice: the same bits."""
    site = tmp_path / "site.py"
    kept = {"training": {"solver": "momentum", "learning_rate": 0.1, "keep_momentum": True}}

    def prepared(folder: str) -> Trainer:
        trainer = Trainer()
        answer = trainer.prepare(site, settings=settings(site, **kept), memory=str(tmp_path / folder))
        assert "done" in answer
        return trainer

    whole = prepared("a")
    first = whole.train(model, tmp_path / "1.model", 1)["done"]["sha256"]
    second = whole.train(model, tmp_path / "2.model", 2)["done"]["sha256"]
    again = whole.train(model, tmp_path / "2.model", 2)["done"]["sha256"]
    third = whole.train(model, tmp_path / "3.model", 3)["done"]["sha256"]
    without = whole.train(model, tmp_path / "2.model", 1)["done"]["sha256"]
    whole.end()
    broken = prepared("b")
    assert broken.train(model, tmp_path / "1.model", 1)["done"]["sha256"] == first
    assert broken.train(model, tmp_path / "2.model", 2)["done"]["sha256"] == second
    broken.process.kill()
    broken.end()
    back = prepared("b")
    assert back.train(model, tmp_path / "2.model", 2)["done"]["sha256"] == second
    assert back.train(model, tmp_path / "3.model", 3)["done"]["sha256"] == third
    back.end()

    assert again == second
    assert without == first
    assert len(list((tmp_path / "b").iterdir())) == 2
    silo = build_silo(settings(site), site, "zurich", 1)
    models = [read_model(tmp_path / f"{n}.model", silo.engine.layout).vector for n in (1, 2, 3)]
    assert not np.array_equal(models[1], models[2])


def test_a_memory_that_was_cut_off_is_left_aside(tmp_path: Path, site: Path, model: Path) -> None:
    """A loss of power may leave half a file; the learner trains without it and reports it."""
    kept = {"training": {"solver": "momentum", "learning_rate": 0.1, "keep_momentum": True}}
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "task-1.safetensors").write_bytes(b"half")
    trainer = Trainer()
    assert "done" in trainer.prepare(site, settings=settings(site, **kept), memory=str(tmp_path / "memory"))
    assert trainer.train(model, tmp_path / "2.model", 2)["done"]["steps"] == 5
    assert "the learner starts without it" in trainer.end()


def test_a_full_disk_is_a_failure_of_the_task_only(tmp_path: Path, model: Path) -> None:
    """The process may write no file of more than 100 bytes: the model of 200 does not fit."""
    code = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))\n"
    trainer = Trainer()
    assert "done" in trainer.prepare(write_site(tmp_path, code))
    (tmp_path / "spool").mkdir()
    failed = trainer.train(model, tmp_path / "spool" / "1.model")["failed"]
    assert failed == f"the model cannot be written to {tmp_path}/spool/1.model: File too large"
    assert list((tmp_path / "spool").iterdir()) == []
    assert trainer.ask("ping") == {"done": {}}
    trainer.end()


def test_the_end_of_stdin_is_the_end_of_the_child(tmp_path: Path, site: Path, model: Path) -> None:
    """In the middle of a training, too."""
    trainer = Trainer()
    trainer.prepare(site, pace=600.0)
    trainer.send("train", **training(model, tmp_path / "out.model"))
    trainer.end()
    assert trainer.process.returncode == 0
    assert not (tmp_path / "out.model").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="only on Linux a child learns that its parent died")
def test_the_child_dies_with_its_parent_even_in_c_code_that_keeps_the_interpreter(tmp_path: Path, model: Path) -> None:
    """Otherwise a learner that is killed and started again would train alongside its old child."""
    code = "import ctypes\ndef loss(outputs, targets):\n    ctypes.PyDLL(None).sleep(600)\n"
    site = write_site(tmp_path, code)
    parent = tmp_path / "parent.py"
    parent.write_text(f"""
import json, subprocess, sys
child = subprocess.Popen({TRAINER!r}, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
print(child.pid, flush=True)
for line in sys.stdin:
    child.stdin.write(line.encode()); child.stdin.flush()
    if '"prepare"' in line: print(child.stdout.readline().decode(), end="", flush=True)
sys.stdin.close()
""")
    process = subprocess.Popen([sys.executable, str(parent)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    child = int(process.stdout.readline())
    prepare = {
        "id": 1, "command": "prepare", "settings": settings(site), "site": str(site), "name": "zurich", "index": 1,
        "layout": None, "memory": None, "device": None, "pace": None,
    }  # fmt: skip
    print(json.dumps(prepare), file=process.stdin, flush=True)
    assert "done" in json.loads(process.stdout.readline())
    print(
        json.dumps({"id": 2, "command": "train", **training(model, tmp_path / "x.model")}),
        file=process.stdin,
        flush=True,
    )
    while _state(child) != "S":
        time.sleep(0.05)
    time.sleep(0.3)

    process.send_signal(signal.SIGKILL)
    process.communicate()

    while _state(child) not in ("Z", None):  # the test's time-out is the guard
        time.sleep(0.05)


def _state(pid: int) -> str | None:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return None


def test_signals_that_go_to_the_whole_group_are_the_parents_to_answer(trainer: Trainer) -> None:
    """Ctrl-C in a terminal reaches the child too."""
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(trainer.process.pid, number)
        assert trainer.ask("ping") == {"done": {}}


# --- records that are protected -----------------------------------------------------------------------


def protection(folder: Path, **settings: Any) -> dict[str, Any]:
    """What a learner's process says about privacy when it prepares its child."""
    places = {"ledger": str(folder / "ledger"), "witness": str(folder / "witness"), "data": "cohort", "run": "r1"}
    return {"settings": settings or None, **places}


def test_private_training_reserves_first_and_says_nothing_clear(
    trainer: Trainer, site: Path, model: Path, tmp_path: Path
) -> None:
    """Exactly the steps, no loss, new noise each time; the ledger has the task before it is trained, each time."""
    facts = trainer.prepare(site, privacy=protection(tmp_path, noise=2.0, budget=3.0))["done"]
    assert facts["private"] and facts["steps_left"] > 10 and facts["larger_batches"] is True
    hashes = set()
    for number in range(2):
        done = trainer.train(model, tmp_path / "out", steps=4, seconds=0.0, batches_per_step=2)["done"]
        assert (done["steps"], done["loss"]) == (4, None)
        hashes.add(done["sha256"])
        lines = (tmp_path / "ledger" / "cohort.ledger").read_text().splitlines()
        assert len(lines) == 2 + number and json.loads(lines[-1])["steps"] == 4
        assert json.loads(lines[-1])["rate"] == 0.5  # two batches of 10 of 40 records
    assert len(hashes) == 2
    left = trainer.prepare(site, privacy=protection(tmp_path, noise=2.0, budget=3.0))["done"]["steps_left"]
    assert left == facts["steps_left"] - 8


def test_a_task_beyond_the_privacy_budget_is_refused(trainer: Trainer, site: Path, model: Path, tmp_path: Path) -> None:
    """Nothing is trained, and nothing is reserved; nor for a task that ends by time."""
    left = trainer.prepare(site, privacy=protection(tmp_path, noise=2.0, budget=1.0))["done"]["steps_left"]
    answer = trainer.train(model, tmp_path / "out", steps=2 * left + 10)
    assert answer["kind"] == "privacy_budget" and "does not allow" in answer["failed"]
    assert "deadline" in trainer.train(model, tmp_path / "out", steps=None, seconds=1.0)["failed"]
    assert not (tmp_path / "out").exists()
    assert len((tmp_path / "ledger" / "cohort.ledger").read_text().splitlines()) == 1


def test_a_ledger_that_is_behind_its_witness_keeps_the_site_out(
    trainer: Trainer, site: Path, model: Path, tmp_path: Path
) -> None:
    """Restored from a backup: the site does not even join."""
    demands = protection(tmp_path, noise=2.0, budget=3.0)
    trainer.prepare(site, privacy=demands)
    trainer.train(model, tmp_path / "out", steps=1)
    ledger = tmp_path / "ledger" / "cohort.ledger"
    backup = ledger.read_bytes()
    trainer.train(model, tmp_path / "out", task=2, steps=1)
    ledger.write_bytes(backup)
    assert "lacks reservations" in trainer.prepare(site, privacy=demands)["failed"]


def test_the_federation_may_ask_for_more_noise_than_the_site(trainer: Trainer, site: Path, tmp_path: Path) -> None:
    """Of both settings the strictest count; without any of the site's own, the federation's alone."""
    learners = [{"name": "all", "names": ["cleveland", "zurich"], "batch_size": 10, "time_per_batch": 0.1}]
    learners[0]["privacy"] = {"noise": 3.0}
    theirs = settings(site, learners=learners)
    facts = trainer.prepare(site, settings=theirs, privacy=protection(tmp_path, noise=2.0, budget=3.0))["done"]
    assert (facts["noise"], facts["budget"]) == (3.0, 3.0)
    facts = trainer.prepare(site, settings=theirs, privacy=protection(tmp_path))["done"]
    assert (facts["noise"], facts["steps_left"]) == (3.0, None)
