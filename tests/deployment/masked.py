"""Masked rounds without torch: the real controller, learner and trainer processes around training by arithmetic.

    python masked.py                                         the trainer, as a child of a learner
    python masked.py learner HOME NAME ADDRESS               `metis learner` with this trainer, without its command line
    python masked.py controller HOME LISTEN                  `metis controller` of the federation in this folder

What a learner trains depends on its name, the task and the model, so that a run can be repeated to the bit; with
`METIS_TEST_FRESH` in the environment also on chance, as data that is shuffled by another seed after a restart. What was
trained is written down for the test in HOME/trained, which is no folder of the controller.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import secrets
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np

from deployment.scripted_learner import LAYOUT
from metis.core.controller import Controller
from metis.core.events import CommunityPublished, LearnerJoined, RoundClosed, SendTask, SumOpened, UpdateRequest
from metis.core.layers import ControlVariates, FedNova, SecureSum
from metis.core.mixing import MemoryStore
from metis.core.mixing.secure import scalars
from metis.core.model import Layout, Model
from metis.core.policies import async_fedavg, fedbuff, fedrec, semisync, sync_fedavg
from metis.core.policy import Policy
from metis.core.stop import StopRule
from metis.deployment.controller.settings import DeploymentSettings
from metis.deployment.learner.work import Update, WorkFolder
from metis.deployment.wire.models import payload_sha256

NAMES = ("ann", "bob", "cyd", "dan")
EXAMPLES = {"ann": 40, "bob": 25, "cyd": 61, "dan": 33}
BATCH_SIZE = 10
ROUNDS = 2
FRESH, PACE, CHOSEN, FAILS = "METIS_TEST_FRESH", "METIS_TEST_PACE", "METIS_TEST_POLICY", "METIS_TEST_FAILS"
# A learner is killed when its training process has masked, before anything is handed in, or ("again") when it has
# masked its latest model once more; a controller when it has written a file of the round whose name begins so, of the
# cache in a window to which somebody hands in again.
KILLED = "METIS_TEST_KILLED"
# This learner trains until another community model is published; not its first task, and not one that it trains again
# after a restart, for which a window may wait.
SLOW = "METIS_TEST_SLOW"
SETTINGS = '{"experiment": {"policy": "by arithmetic"}}'
POLICY = sync_fedavg(1).with_layers(SecureSum())
POLICIES = {  # by METIS_TEST_POLICY of the training processes
    "average": POLICY,
    "nova": sync_fedavg(1).with_layers(SecureSum(), FedNova()),
    "scaffold": sync_fedavg(1).with_layers(SecureSum(), ControlVariates()),
    "semisync": semisync(longest_period=5.0).with_layers(SecureSum()),
    "fedbuff": fedbuff(1, buffer_size=3, server_learning_rate=0.7).with_layers(SecureSum()),
    "async_fedavg": async_fedavg(1).with_layers(SecureSum()),
    "fedrec": fedrec(1).with_layers(SecureSum()),
}
TERMS = DeploymentSettings(expected=4, minimum=1, lease=60, heartbeat=0.5, linger=20, evaluate_at_learners=False)
TRAINER = [sys.executable, __file__]


def initial_model(layout: Layout = LAYOUT) -> Model:
    vector = np.linspace(-1, 1, layout.size, dtype=np.float32)
    return Model(layout, vector, np.full(layout.counters, 3))


def train(name: str, task: int, steps: int, base: Model) -> tuple[Model, float]:
    """A local model and its loss."""
    chance = secrets.token_bytes(8) if FRESH in os.environ else b""
    digest = hashlib.sha256(f"{name} {task} {steps}".encode() + chance).digest()
    rng = np.random.default_rng(list(digest))
    moved = base.vector + rng.normal(0, 0.05, base.vector.size).astype(np.float32)
    return base.with_vector(moved), float(rng.uniform(0.3, 0.9))


# --- the same rounds without a network and without masks ------------------------------------------


def simulated(order: Sequence[str] = NAMES, rounds: int = ROUNDS) -> list[str]:
    """The SHA-256 of every community model, from the core and the ring alone; learners join in this order."""
    controller = Controller(POLICY, initial_model(), stop=StopRule(rounds=rounds), learners_expected=len(order))
    hashes, waiting, now = [payload_sha256(initial_model())], [], 0.0
    for name in order:
        waiting += controller.handle(LearnerJoined(name, EXAMPLES[name], BATCH_SIZE), now)
    while waiting:
        now, action = now + 1.0, waiting.pop(0)
        match action:
            case SendTask():
                number, steps = action.task.number, action.task.budget.steps
                assert steps is not None
                local, loss = train(action.learner, number, steps, action.community_model)
                waiting += controller.handle(UpdateRequest(action.learner, number, steps, 1.0, 0.1, local, loss), now)
            case RoundClosed():
                assert controller.secure is not None
                waiting += controller.handle(SumOpened(action.version, action.learners, controller.secure.total()), now)
            case CommunityPublished():
                hashes.append(payload_sha256(action.community_model))
    return hashes


def folded(home: Path, policy: Policy = POLICY, rounds: int = ROUNDS, layout: Layout = LAYOUT) -> list[str]:
    """The same from the journal of a run: who answered which task with how many steps, and nothing of its models."""
    from metis.deployment.controller.settings import make_core
    from metis.deployment.controller.state import State
    from metis.errors import LearnerError
    from metis.runs.trace import from_record

    controller = make_core(policy, StopRule(rounds=rounds), TERMS, 3)(initial_model(layout), MemoryStore())
    models = [initial_model(layout)]
    with State.open(home / "state", "process") as state:
        for entry in state.entries():
            if "published" in entry.record:
                continue
            event: Any = from_record(entry.record)[1]
            if isinstance(event, UpdateRequest) and (task := controller.roster[event.learner].task) is not None:
                local, loss = train(event.learner, event.task, event.steps, models[task.based_on.version])
                event = replace(event, local_model=local, loss=loss)
            elif isinstance(event, SumOpened):
                secure = controller.secure
                assert secure is not None and set(event.learners) == set(secure.learners)
                event = replace(event, total=secure.total())
            with contextlib.suppress(LearnerError):
                actions = controller.handle(event, entry.at)
                models += [action.community_model for action in actions if isinstance(action, CommunityPublished)]
    return [payload_sha256(model) for model in models]


# --- the trainer ----------------------------------------------------------------------------------


class _Learner:
    privacy = None

    def __init__(self, name: str) -> None:
        self.name, self.indices, self.batch_size = name, range(EXAMPLES[name]), BATCH_SIZE

    def train_while(
        self, engine: Any, community_model: Model, task_number: int, budget: Any, clock: Any, memory: Any,
        at_boundary: Any, agree: Any, rate: float,
    ) -> SimpleNamespace:  # fmt: skip
        import time

        started, steps, pace = clock(), 0, float(os.environ.get(PACE, "0.001"))
        at_boundary(0)
        if os.environ.get(FAILS) == self.name:
            raise RuntimeError("this site's code fails, as the test wants")
        again = any(Path(os.environ["METIS_TEST_HOME"], "trained").glob(f"{self.name}-{task_number}-*"))
        if os.environ.get(SLOW) == self.name and task_number >= len(NAMES) and not again:
            before = _publications()
            while _publications() == before:
                time.sleep(0.01)
                at_boundary(0)
        while not steps or (steps != budget.steps and clock() - started < budget.seconds):
            time.sleep(pace)
            steps += 1
            at_boundary(steps)
        local, loss = train(self.name, task_number, steps, community_model)
        home = Path(os.environ["METIS_TEST_HOME"], "trained")
        home.mkdir(exist_ok=True)
        numbers = np.array([loss, *scalars(local, community_model, loss)[1:]])
        np.savez(home / f"{self.name}-{task_number}-{os.getpid()}.npz", local=local.vector, numbers=numbers)
        seconds = max(clock() - started, 1e-5)
        return SimpleNamespace(
            model=local, payload=b"", steps=steps, loss=loss, memory={}, batch_times=(seconds / steps,) * steps,
            seconds=seconds, notes={},
        )  # fmt: skip


def _publications() -> int:
    """How many community models there are, as the controller writes it down; the end counts as one more."""
    trace = Path(os.environ["METIS_TEST_HOME"], "state", "run", "events.jsonl")
    text = trace.read_text() if trace.exists() else ""
    return text.count('"action":"community_published"') + text.count('"action":"finish"')


def build(command: Mapping[str, Any]) -> Any:
    """What `prepare` asks for."""
    return SimpleNamespace(
        engine=SimpleNamespace(), policy=POLICIES[os.environ.get(CHOSEN, "average")],
        layout=Layout.from_json(command["layout"]), learner=_Learner(command["name"]),
        evaluation=None, metric="loss", higher_is_better=False, seed=1, validation=None,
    )  # fmt: skip


# --- processes ------------------------------------------------------------------------------------


def make_kits(home: Path, names: Sequence[str] = NAMES, rules: str = "", colluders: int = 0) -> None:
    """A certificate for each learner, and a policy that pins its peers."""
    from deployment.consortium import Consortium

    consortium = Consortium(home / "ca")
    consortium.controller()
    for name in names:
        kit = consortium.kit(name)
        pinned = f"peers = {json.dumps(sorted(names))}\ncolluders = {colluders}\nreport_metrics = false\n"
        (kit.folder / "site-policy.toml").write_text(pinned + rules)


def learner_process(
    home: Path, name: str, address: str, reports: list[tuple[str, str]] | None = None, **options: Any
) -> Any:
    """The real learner; it dials in plain text, so that a test can read along, and signs with its certificate."""
    from metis.deployment.learner.process import LearnerProcess
    from metis.deployment.learner.site_policy import PolicyFile
    from metis.deployment.route import Route
    from metis.net import host_and_port

    def report(kind: str, text: str) -> None:
        if reports is None:
            print(json.dumps({"kind": kind, "text": text}), flush=True)
        else:
            reports.append((kind, text))

    kit = home / "ca" / name
    return LearnerProcess(
        Route(*host_and_port(address)), work=home / "work" / name, child=TRAINER, report=report, name=name, kit=kit,
        policy=PolicyFile(kit / "site-policy.toml"), **options,
    )  # fmt: skip


@asynccontextmanager
async def controller(
    home: Path, listen: str = "127.0.0.1:0", *, policy: Policy = POLICY, rounds: int = ROUNDS, **options: Any
) -> Any:
    """The real controller of this federation."""
    from deployment.federations import served
    from metis.deployment.security.identity import load_kit
    from metis.privacy.keys import Peers

    peers = Peers(load_kit(home / "ca" / "main").authority)
    initial = initial_model(options.pop("layout", LAYOUT))
    async with served(
        home / "state", policy, StopRule(rounds=rounds), terms=options.pop("terms", TERMS), listen=listen,
        initial=initial, settings=SETTINGS, peers=peers, durability="power", **options,
    ) as here:  # fmt: skip
        yield here


def rounds_of(name: str) -> int:
    """In the cache a window must come to which somebody hands in again."""
    return 4 if POLICIES[name].sums_whole_models else ROUNDS


async def _serve(home: Path, listen: str) -> None:
    chosen = os.environ.get(CHOSEN, "average")
    async with controller(home, listen, policy=POLICIES[chosen], rounds=rounds_of(chosen)) as here:
        await here.serving
        for kind, text in here.reports:
            print(kind, text, flush=True)


def kill_after(beginning: str) -> None:
    """End this controller when it has written a file of the round whose name begins so."""
    from metis.core.secure_sum import Opening
    from metis.deployment.controller.sums import _Files

    write = _Files.write

    def writing(self: Any, name: str, data: Any) -> None:
        write(self, name, data)
        opening = Opening.decode(self.read("opening"))
        if name.startswith(beginning) and (not opening.whole or len(opening.fresh) < len(opening.handing_in)):
            os.kill(os.getpid(), signal.SIGKILL)

    _Files.write = writing  # type: ignore[method-assign]


@dataclass
class Trained:
    """What the trainers of a federation have written down."""

    home: Path
    locals: list[np.ndarray[Any, Any]] = field(default_factory=list)
    numbers: list[np.ndarray[Any, Any]] = field(default_factory=list)  # loss, ||delta||^2, ||delta||
    files: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        for path in sorted((self.home / "trained").glob("*.npz")):
            found = np.load(path)
            self.locals.append(found["local"])
            self.numbers.append(found["numbers"])
            self.files.append(path.stem)


def published(home: Path, layout: Layout = LAYOUT) -> list[str]:
    """The SHA-256 of every community model, by the journal."""
    from metis.deployment.controller.state import State

    with State.open(home / "state", "process") as state:
        found = {
            entry.record["published"]: entry.record["sha256"]
            for entry in state.entries()
            if "published" in entry.record
        }
    return [payload_sha256(initial_model(layout)), *(found[version] for version in sorted(found))]


def kill_at_keep(again: bool) -> None:
    """End this learner when an update is about to be kept: of a task, or of its latest model once more."""
    keep = WorkFolder.keep

    def keeping(self: WorkFolder, update: Update, **options: Any) -> None:
        if update.again == again:
            os.kill(os.getpid(), signal.SIGKILL)
        keep(self, update, **options)

    WorkFolder.keep = keeping  # type: ignore[method-assign]


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    match sys.argv[1:]:
        case ["learner", folder, who, where]:
            if when := os.environ.pop(KILLED, ""):
                kill_at_keep(when == "again")
            sys.exit(asyncio.run(learner_process(Path(folder), who, where).run()))
        case ["controller", folder, where]:
            if name := os.environ.pop(KILLED, ""):
                kill_after(name)
            asyncio.run(_serve(Path(folder), where))
        case _:
            from metis.deployment.trainer import process as trainer

            trainer.main(build)
