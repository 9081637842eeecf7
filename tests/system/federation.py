"""A whole federation under one seed: real controller, state, service and learners on a simulated machine each.

The seed draws the policy, the machines and a swarm of faults: each kind is enabled with a certain probability, then
some are drawn. After them it is calm, and the federation must come to its end. Checkers watch the wire, the journal at
each start, the learners' spools, and at the end the journal folded by the core alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import random
import re
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import apsw
import grpc
import numpy as np

from metis.core.controller import Controller
from metis.core.costs import Power
from metis.core.events import (
    Action,
    CohortFixed,
    CommunityPublished,
    Event,
    LearnerWithdrawn,
    MemberRemoved,
    ModelResent,
    RolledBack,
    RoundFailed,
    SumOpened,
    UpdateCommitted,
    UpdateRequest,
)
from metis.core.layers import Compression, FedAvgM
from metis.core.mixing import MemoryStore
from metis.core.model import Layout, Model, TensorSpec
from metis.core.policies import async_fedavg, fedasync, fedbuff, fedrec, semisync, semisync_fedavg, sync_fedavg
from metis.core.policy import Policy
from metis.core.stop import StopRule
from metis.deployment.controller.audit import AUDIT
from metis.deployment.controller.blobs import mismatch
from metis.deployment.controller.callers import administrator_by_name
from metis.deployment.controller.durable import DurableController
from metis.deployment.controller.journal import Entry
from metis.deployment.controller.openings import MaskedRound
from metis.deployment.controller.process import ControllerProcess
from metis.deployment.controller.session import Refused
from metis.deployment.controller.settings import DeploymentSettings, FederationPlan, make_core
from metis.deployment.controller.state import State
from metis.deployment.controller.upload import announced_checksum
from metis.deployment.learner.process import LearnerProcess
from metis.deployment.learner.site_policy import PolicyFile
from metis.deployment.learner.uploads import PROMPT_SECONDS
from metis.deployment.learner.work import Update, WorkFolder
from metis.deployment.route import Route
from metis.deployment.wire import chunks, wire_pb2 as pb
from metis.deployment.wire.model_mac import checksum_in
from metis.deployment.wire.models import model_bytes, payload_sha256
from metis.errors import LearnerError, MetisError, StateError
from metis.runs.setting import Setting
from metis.runs.trace import from_record
from metis.system import SYSTEM, Chance, Clock, System, Threads
from system.administrator import ADMIN, COMMANDS, CONTROLLER, NEWCOMER, Office, Order
from system.checks import Calls, Leases, Members, WatchedState
from system.disk import DiskPath, Machine, VirtualDisk
from system.liar import LIAR, lie
from system.loop import BOOT, EPOCH, Boot, Crashed, Stuck, ThreadLock, Violation, Worker, Workers, World
from system.masks import (
    CACHED,
    FOURTH,
    MASKED,
    SECURE,
    SETTINGS as MASKED_SETTINGS,
    WINDOWED,
    MaskChecks,
    Spending,
    masks,
    peers,
    write_kits,
)
from system.memory import remember
from system.network import Call, Network
from system.reference import Reference
from system.trainer import spawner

remember()
_GRAVEYARD: list[Any] = []  # what collecting the garbage of a dead process would do must never happen
COUNTER = TensorSpec("n", (1,), "int64", "counter")
SMALL = Layout((TensorSpec("w", (30,)), TensorSpec("b", (2,)), COUNTER))
LARGE = Layout((TensorSpec("w", (9000,)), TensorSpec("b", (2,)), COUNTER))  # several messages, which may be half sent
LEARNERS = ("l0", "l1", "l2")
LISTEN, ROUTE = "simulated:1", Route("simulated", 1)
LENGTHS = ((2, 6), (3, 10), (5, 14))  # of a federation: in rounds, and in update requests
FAULT_SECONDS, LIVE_SECONDS = 25.0, 400.0
SETTINGS = DeploymentSettings(expected=3, minimum=1, wait_seconds=20, lease=10, heartbeat=1.0, linger=5)
KINDS = (
    "kill controller", "power controller", "kill learner", "power learner", "strike controller", "strike learner",
    "reset", "cut", "slow line", "stop process", "clock", "full disk", "EIO", "rot controller",
)  # fmt: skip
MORE_KINDS = (  # that are drawn by themselves
    "rot learner", "rot download", "hang up", "full disk at a deadline", "member vanishes", "member dawdles",
    "full disk at a sum", "rot upload", "rot first model", "EIO learner",
    "vanish after an upload", "full disk learner",
)  # fmt: skip
LONGEST_PERIOD = 10.0
# Without a longest period a liar that claims a billion examples makes one of months, as docs/secure.md says.
SEMISYNC = semisync_fedavg(slowest_learner_epochs=1.0, cold_start_limit=5.0, longest_period=LONGEST_PERIOD)
POLICIES: dict[str, Policy] = {
    "semisync": SEMISYNC,
    "semisync int8": SEMISYNC.with_layers(Compression("int8")),
    "semisync measured": semisync(longest_period=LONGEST_PERIOD),  # the policy without parameters, with all its layers
    "sync": sync_fedavg(local_epochs=1.0),
    "sync FedAvgM": sync_fedavg(local_epochs=1.0).with_layers(FedAvgM()),
    "async": async_fedavg(local_epochs=1.0),
    "fedrec": fedrec(local_epochs=1.0),
    "fedasync": fedasync(local_epochs=1.0),
    "fedbuff": fedbuff(local_epochs=1.0),
    "semisync masked": SEMISYNC.with_layers(SECURE),
    "sync masked": sync_fedavg(local_epochs=1.0).with_layers(SECURE),
    "fedbuff masked": fedbuff(local_epochs=1.0, buffer_size=3).with_layers(SECURE),
    "async masked": async_fedavg(local_epochs=1.0).with_layers(SECURE),
    "fedrec masked": fedrec(local_epochs=1.0).with_layers(SECURE),
}
PLAIN = sorted(POLICIES.keys() - {*MASKED, *WINDOWED, *CACHED})
SOMETIMES = (  # what a thousand seeds reach
    *(f"fault: {kind}" for kind in (*KINDS, *MORE_KINDS)), "an update rotted", "half a download rotted",
    "a full disk at a deadline", "a command lost its caller", "a finished federation was extended",
    "models are equal", "models of several messages", "slow threads", "jobs that pause", "many snapshots",
    "models inside messages",
    *(f"policy {policy}" for policy in sorted(POLICIES)),
    *(f"kill at {call}" for call in ("create", "write", "fsync", "rename", "unlink")),
    *(f"power at {call}" for call in ("create", "write", "fsync", "rename", "unlink")),
    *(f"EIO at {call}" for call in ("write", "fsync")),
    *(f"ENOSPC at {call}" for call in ("create", "write")),
    "a full disk", "a thread waited for a lock", "already committed", "committed", "an upload went on where it was",
    "exit 74", "c ended by its disk", "l ended by its disk", "a liar takes part", "a rotten file was refused",
    "a lie was answered with REFUSED", "a lie was answered with COMMITTED",
    *(f"{command} was answered" for command in COMMANDS), "a command was not answered",
    "a command whose answer was lost was done", "a rollback was not made twice", "a removed learner was refused",
    "a cohort was fixed", "a statement was signed", "shares were given", "a sum was opened",
    "a sum without some of its members", "what was masked before a crash is sent again",
    "a window with an update of an older model", "a model was handed in again",
)  # fmt: skip
_FULL_ALONE = ((0.0, "kill controller"), (0.05, "full disk learner"))
_AT_THE_END, _AT_A_TASK = "command extend at the end", "command rollback at a task"
_MASKED_COMMANDS = ("pause", "resume", "extend", "rollback", "stop")  # a fifth site has no certificate, three too few
_DAMAGED = str(mismatch("", "")).partition(" ,")[0]  # in the words of the controller, whatever they are
_MAY_LOSE_BYTES = "power controller|strike controller|EIO|rot controller"  # that were received of an update


@dataclass(frozen=True)
class Fault:
    """Something bad at a certain time; `number` determines whom it hits and how."""

    at: float
    kind: str
    number: int


class _Clock(Clock):
    def __init__(self, boot: Boot) -> None:
        self._boot, self._world = boot, boot.world

    def monotonic(self) -> float:
        return self._world.loop.now + self._boot.monotonic_offset

    def time(self) -> float:
        return EPOCH + self._world.loop.now + self._boot.wall_offset

    def sleep(self, seconds: float) -> None:
        if self._world.worker is not None:
            self._world.worker.sleep(seconds)


class _Chance(Chance):
    def __init__(self, boot: Boot) -> None:
        self._rng = boot.rng

    def uniform(self, low: float, high: float) -> float:
        return self._rng.uniform(low, high)

    def token(self, count: int) -> bytes:
        return self._rng.randbytes(count)


class _Threads(Threads):
    def __init__(self, boot: Boot) -> None:
        self._boot = boot

    def one(self, name: str) -> Worker:
        return Worker(self._boot)

    def many(self) -> Workers:
        return Workers(self._boot)

    def lock(self) -> ThreadLock:
        return ThreadLock(self._boot)


def drawn_faults(seed: int) -> list[Fault]:
    """The faults of this seed."""
    rng = random.Random(f"faults {seed}")
    kinds = [kind for kind in KINDS if rng.random() < 0.4] or ["kill controller"]
    count = rng.choice((1, 1, 2, 3, 5, 8))
    faults = [Fault(rng.uniform(0.5, FAULT_SECONDS), rng.choice(kinds), rng.randrange(1 << 30)) for _ in range(count)]
    # A disk that fails is seldom alone: what the next start builds on must survive the loss of its power too.
    faults += [
        Fault(fault.at + rng.uniform(1.0, 10.0), "power controller", rng.randrange(1 << 30))
        for fault in faults
        if fault.kind == "EIO" and rng.random() < 0.5
    ]
    if rng.random() < 0.06:  # somebody is silent, a deadline comes, and it cannot be journaled
        at = rng.uniform(2.0, 10.0)
        faults += [Fault(at, kind, rng.randrange(1 << 30)) for kind in ("cut", "full disk at a deadline")]
    others = (_drawn_rot, _drawn_of_learners, _drawn_of_members, _drawn_commands)
    return sorted([*faults, *(fault for drawn in others for fault in drawn(seed))], key=lambda f: f.at)


def _drawn_rot(seed: int) -> list[Fault]:
    """A bit of an update that waits at a learner, of a model of which a part has come, or of the first one."""
    rng, first = random.Random(f"rot {seed}"), random.Random(f"rot first model {seed}")
    kinds = [kind for kind in ("rot learner", "rot download") if rng.random() < 0.15]
    faults = [Fault(rng.uniform(1.0, 12.0), kind, rng.randrange(1 << 30)) for kind in kinds]
    if first.random() < 0.03:
        faults.append(Fault(first.uniform(1.0, 12.0), "rot first model", first.randrange(1 << 30)))
    return faults


def _drawn_of_learners(seed: int) -> list[Fault]:
    """Its disk fails once; or it begins an upload on a slow line, and is gone."""
    rng, gone = random.Random(f"EIO learner {seed}"), random.Random(f"vanish {seed}")
    faults = []
    if rng.random() < 0.1:
        at, number = rng.uniform(0.5, 15.0), rng.randrange(1 << 30)
        faults.append(Fault(at, "EIO learner", number))
        if rng.random() < 0.6:  # what it builds on must survive the loss of its power too
            faults.append(Fault(at + rng.uniform(0.5, 8.0), "power learner", number))
    if (full := random.Random(f"full disk learner {seed}")).random() < 0.05:  # while nobody can be told of it
        at = full.uniform(1.0, 12.0)
        faults += [Fault(at + later, kind, full.randrange(1 << 30)) for later, kind in _FULL_ALONE]
    if gone.random() < 0.04:
        faults.append(Fault(gone.uniform(0.5, 10.0), "vanish after an upload", gone.randrange(1 << 30)))
    return faults


def _drawn_of_members(seed: int) -> list[Fault]:
    """In masked rounds: members vanish in the middle of one or are slow, the disk is full or a masked model rots."""
    shares = {"member vanishes": 0.4, "member dawdles": 0.2, "full disk at a sum": 0.15, "rot upload": 0.1}
    rngs = {kind: random.Random(f"{kind} {seed}") for kind in shares if masks(seed)}
    return [
        Fault(rng.uniform(0.5, 8.0), kind, rng.randrange(1 << 30))
        for kind, rng in rngs.items()
        if rng.random() < shares[kind]
    ]


def _drawn_commands(seed: int) -> list[Fault]:
    """What administrators ask for in a third of all seeds, at any time and as if nothing were wrong."""
    rng, at_the_end = random.Random(f"commands {seed}"), random.Random(f"at the end {seed}")
    last = [Fault(0.5, _AT_THE_END, at_the_end.randrange(1 << 30))] if at_the_end.random() < 0.08 else []
    if masks(seed) and (stopped := random.Random(f"stopped {seed}")).random() < 0.05:
        at = stopped.uniform(1.0, 10.0)
        last += [Fault(at, "command stop", 0), Fault(at + 1.0, "command extend", stopped.randrange(1 << 30))]
    if (at_a_task := random.Random(f"at a task {seed}")).random() < 0.04:
        last.append(Fault(at_a_task.uniform(0.5, 6.0), _AT_A_TASK, at_a_task.randrange(1 << 30)))
    if rng.random() > 0.35:
        return last
    enabled = [command for command in COMMANDS if rng.random() < 0.5] or ["rollback"]
    if masks(seed):
        enabled = [command for command in enabled if command in _MASKED_COMMANDS] or ["rollback"]
    commands = [
        Fault(rng.uniform(1.0, rng.choice((12.0, 30.0))), f"command {rng.choice(enabled)}", rng.randrange(1 << 30))
        for _ in range(rng.choice((1, 2, 4, 6)))
    ]
    hung_up = [Fault(each.at, "hang up", rng.randrange(1 << 30)) for each in commands if rng.random() < 0.3]
    return [*last, *hung_up, *commands]


@dataclass(frozen=True)
class Swarm:
    """What else a seed draws, apart from faults."""

    policy: str
    slowness: float  # seconds that a thread takes at most to begin
    interleaving: float  # probability that the writer pauses at a call of the disk
    length: tuple[int, int]
    large: bool  # models are
    different: int  # contents that local models may have
    replay_at_most: int | None  # updates between two snapshots
    keep_models: int
    inside: bool  # models travel inside other messages

    @property
    def words(self) -> list[str]:
        """For those who look for seeds of a certain kind; in this order."""
        words = {
            f"policy {self.policy}": True,
            "models of several messages": self.large,
            "models are equal": self.different < 64,
            "slow threads": self.slowness >= 0.05,
            "jobs that pause": self.interleaving >= 0.5,
            "many snapshots": self.replay_at_most == 2,
            "models inside messages": self.inside,
        }
        return [word for word, holds in words.items() if holds]


def drawn_swarm(seed: int, rng: random.Random) -> Swarm:
    """Of this seed; the world's numbers begin with it."""
    policy, slowness, interleaving = (
        rng.choice(PLAIN),
        rng.choice((0.0005, 0.003, 0.05)),
        rng.choice((0.0, 0.1, 0.5)),
    )
    models, snapshots = random.Random(f"swarm {seed}"), random.Random(f"snapshots {seed}")
    length, large = models.choice(LENGTHS), models.random() < 0.2
    if masks(seed):
        policy = random.Random(f"masked policy {seed}").choice(MASKED)
        if random.Random(f"masked windows {seed}").random() < 1 / 3:
            policy = random.Random(f"windowed policy {seed}").choice(WINDOWED)
            if (cached := random.Random(f"cached windows {seed}")).random() < 0.5:
                policy = cached.choice(CACHED)
    different = models.choice((2, 4, 5, 6)) if models.random() < 0.3 else 64
    replay_at_most, keep_models = snapshots.choice((2, 4, None)), snapshots.choice((1, 2, 5))
    inside = random.Random(f"inside {seed}").random() < 0.4
    return Swarm(policy, slowness, interleaving, length, large, different, replay_at_most, keep_models, inside)


def words_of(seed: int) -> str:
    """The kinds of faults of a seed and what else it draws, each between commas."""
    kinds = sorted({fault.kind for fault in drawn_faults(seed)})
    return f",{','.join([*kinds, *drawn_swarm(seed, random.Random(f'world {seed}')).words])},"


class Federation(World):
    """One controller and three learners, from the first start to the final model at every learner."""

    def __init__(self, seed: int, folder: str, *, traced: bool = False, faults: Sequence[Fault] | None = None) -> None:
        super().__init__(seed, traced=traced)
        self._folder = f"{folder}/{seed}"
        swarm = drawn_swarm(seed, self.rng)
        self.policy_name, self.slowness, self.interleaving = swarm.policy, swarm.slowness, swarm.interleaving
        self.policy = POLICIES[self.policy_name]
        self.masked, self.learners, settings = "masked" in self.policy_name, LEARNERS, SETTINGS
        if self.masked:
            self.learners, settings = (*LEARNERS, FOURTH), replace(SETTINGS, expected=4)
        by_round = self.policy.protocol.has_rounds
        rounds, requests = swarm.length
        self._stop = StopRule(rounds=rounds) if by_round else StopRule(update_requests=requests)
        self.layout = LARGE if swarm.large else SMALL
        chunks.SMALL = 1 << 16 if swarm.inside else 0
        chunks.FIRST_STRETCH = chunks.SMALLEST_CHUNK  # so that an upload of these models may be acknowledged in part
        self.initial = Model(self.layout, np.ones(self.layout.size, np.float32), np.full(self.layout.counters, 3))
        self.reached.update(swarm.words)
        self._make = make_core(self.policy, self._stop, settings, 3)
        self.mask_checks = MaskChecks(self.layout, self.policy, self.violated, self.sometimes)
        self.faults = drawn_faults(seed) if faults is None else list(faults)
        self.network = Network(self)
        self.network.written, self.network.sent, self.network.aborted = self._written, self._sent, self._aborted
        self._partial_are_sound = not any(re.search(_MAY_LOSE_BYTES, fault.kind) for fault in self.faults)
        self._administered = any(fault.kind.startswith("command") for fault in self.faults)
        self._resets, self._power_at_rollback, self._power_after_start = 0, False, False
        self._lied_to = self.rng.random() < 0.3 and not self.masked  # it has no certificate
        more = (NEWCOMER, ADMIN) if self._administered else ()
        names = (CONTROLLER, *self.learners, LIAR, *more)
        self.machines = {name: Machine(self, f"{self._folder}/{name}") for name in names}
        private = self.masked and random.Random(f"private {seed}").random() < 0.5
        self.spending = {
            name: Spending(self.machines[name].root, name, self.violated) for name in self.learners if private
        }  # fmt: skip
        self._kits = Path(f"{self._folder}/kits")
        if self.masked:
            write_kits(self._kits, self.learners)
        self._spawn = {
            name: spawner(
                self.rng.choice((0.05, 0.1, 0.3)), self.rng.random() < 0.5, self.policy.wire, swarm.different,
                self._trained, self.mask_checks, self.spending.get(name),
            )
            for name in self.learners
        }  # fmt: skip
        self._spawn[NEWCOMER] = spawner(0.1, False, self.policy.wire, swarm.different, self._trained)
        self.boots: dict[str, Boot | None] = dict.fromkeys(names)
        self.process: ControllerProcess | None = None  # of the controller's latest start
        limit = ("rounds", rounds) if by_round else ("update_requests", requests)
        self.office = Office(self, self.learners, limit)
        self.starts: Counter[str] = Counter()
        self._codes: dict[str, int] = {}
        self._finished = False
        self.rotted: set[tuple[str, int]] = set()  # updates with a wrong bit: the learner may give them up
        self._replay_at_most = swarm.replay_at_most
        self._settings = replace(settings, keep_models=swarm.keep_models)
        self._done: asyncio.Future[None] = self.loop.create_future()
        self._rotten: str | None = None  # a file with a wrong bit; a controller may refuse to start from it
        self._refused = False
        self._last_upload: dict[str, float] = {}  # who vanishes, and how many seconds after its next one
        # what the checkers know
        self.acknowledged: dict[int, tuple[int, str]] = {}  # by task: entry and checksum
        self.refused: set[int] = set()
        self._versions = {0: payload_sha256(self.initial)}
        self._tasks: dict[int, tuple[str, int]] = {}  # learner and version
        self.spooled: dict[tuple[str, int], str] = {}
        self.unsynced: dict[tuple[str, int], int] = {}  # seconds for which a loss of power may have taken each of these
        self.models: dict[str, Model] = {}  # local ones, by SHA-256
        self._epochs: dict[int, int] = {}  # of which start
        self._highest_epoch = 0
        self._entries: list[Any] = []
        self._snapshots: dict[int, tuple[int, dict[str, bytes]]] = {}
        self._uploads: dict[Call, tuple[int, str, float]] = {}  # task, SHA-256, when it began
        self._calls, self._leases = Calls(self.violated), Leases(SETTINGS.lease, self.violated)
        self.abandoned: set[tuple[str, int]] = set()
        self._extend_at_the_end: int | None = None
        self._full_at_a_sum: tuple[type, float] | None = None  # at which event of a masked round, and for how long
        self._released: Counter[str] = Counter()

    # --- faults -----------------------------------------------------------------------------------

    def _strike(self, fault: Fault) -> None:
        rng, kind = random.Random(fault.number), fault.kind
        name = rng.choice(self.learners)
        if self._administered and kind in ("reset", "cut", "slow line") and fault.number % 2:
            name = ADMIN
        everywhere = (
            kind.endswith(("controller", "upload", "model"))
            or kind == "EIO"
            or kind.startswith(("command", "clock", "hang"))
        )
        self.note("fault", kind if everywhere else f"{kind} {name}")
        self.sometimes(f"fault: {kind}")
        whose = CONTROLLER if kind.endswith(("controller", "model")) else name
        boot, machine, line = self.boots[whose], self.machines[whose], self.network.line(name)
        match kind.split()[0]:
            case "kill" | "power":
                if boot is not None:
                    self.kill(boot, power=kind.startswith("power"))
            case "strike":
                machine.strike_at = machine.calls + rng.randrange(1, 60)
                machine.strike = rng.choice(("kill", "power", "ENOSPC"))
            case "EIO":
                machine = machine if kind == "EIO learner" else self.machines[CONTROLLER]
                machine.strike_at, machine.strike = machine.calls + rng.randrange(1, 40), "EIO"
                if kind == "EIO" and self.masked and fault.number % 2:  # names of files in a round that it shows later
                    machine.strike_sync = "/state/sums"
            case "reset" if self.layout is LARGE and fault.number % 3:
                self._resets += 1  # of the next upload of which a part was acknowledged
            case "reset":
                for connection in list(line.connections):
                    connection.reset()
            case "cut":
                line.cut(*rng.choice(((True, True), (True, False), (False, True))))
                self.loop.call_later(rng.choice((0.5, 3.0, 15.0, 40.0)), line.heal)
            case "slow":
                line.latency, line.jitter = rng.choice(((0.2, 0.5), (1.0, 3.0)))
                self.loop.call_later(rng.uniform(2, 15), _quicken, line)
            case "stop":
                stopped = self.boots[rng.choice((CONTROLLER, name))]
                if stopped is not None:
                    stopped.stopped = True
                    self.loop.call_later(rng.choice((0.5, 4.0, 25.0)), self.loop.go_on, stopped)
            case "vanish":
                line.latency, line.jitter = 1.0, 3.0
                self.loop.call_later(15, _quicken, line)
                self._last_upload[name] = rng.uniform(0.0, rng.choice((0.1, 3.0)))
            case "hang":
                self.office.hang_up = rng.uniform(0.01, rng.choice((0.06, 0.5)))
            case "rot" if kind == "rot learner":
                self._rot_update(name, rng, 200)
            case "rot" if kind == "rot upload":
                self._rot_upload(rng, 400)
            case "rot" if kind == "rot download":
                self._rot_download(name, rng, 400)
            case "rot":
                if boot is not None:
                    self.kill(boot, power=False)
                    which = self._versions[0] if kind == "rot first model" else "*"
                    self._rotten = machine.rot(rng, "state", which) or self._rotten
                    self.note("rot", str(self._rotten))
                    if kind == "rot first model" and self._administered:  # then somebody wants it
                        order = Order("rollback", fault.number, version=0)
                        self.loop.call_later(rng.uniform(1.0, 6.0), self.office.order, order)
            case "command" if kind == _AT_THE_END:
                self._extend_at_the_end = fault.number
            case "command" if kind == _AT_A_TASK:
                self._roll_back_at_a_task(fault.number, len(self._tasks), 2000)
            case "command" if kind == "command revoke":
                self.office.revoke("l1")
            case "command":
                self.office.order(Order(kind.split()[1], fault.number))
                if kind == "command add":
                    self._start(NEWCOMER)
            case "clock":
                for each in self.boots.values():
                    if each is not None and rng.random() < 0.5:
                        each.wall_offset += rng.choice((-86400.0, -5.0, 5.0, 86400.0))
            case "member" if kind == "member dawdles":  # its machine does something else
                self.dawdling[name] = rng.choice((4.0, 10.0))
                self.loop.call_later(rng.uniform(3, 12), self.dawdling.pop, name, None)
            case "member":
                who = rng.sample(self.learners, rng.choice((1, 1, 2)))
                away = rng.choice((4.0, 7.0, 14.0))  # less and more than a lease
                self._vanish(who, away, rng.choice(("keys", "training", "training", "shares")), 400)
            case "full" if kind == "full disk at a sum":
                self._full_at_a_sum = rng.choice((CohortFixed, SumOpened)), rng.uniform(0.3, 3.0)
            case "full" if kind == "full disk at a deadline":
                self._fill_at_a_deadline(rng.uniform(0.3, 2.0), 400)
            case "full":
                anywhere = self.machines[rng.choice((CONTROLLER, CONTROLLER, name))]
                machine = machine if kind == "full disk learner" else anywhere
                machine.full = True
                self.loop.call_later(rng.uniform(0.2, 8), setattr, machine, "full", False)

    def _rot_update(self, name: str, rng: random.Random, attempts: int) -> None:
        """As soon as there is one."""
        waiting = {task for (owner, task), where in self.spooled.items() if (owner, where) == (name, "kept")}
        rotten = self.machines[name].rot(rng, "work/spool", "*.model") if waiting else None
        if rotten is None:
            if attempts:
                self.loop.call_later(0.05, self._rot_update, name, rng, attempts - 1)
            return
        self.note("rot", rotten)
        self.sometimes("an update rotted")
        self.rotted.add((name, int(Path(rotten).stem)))

    def _fill_at_a_deadline(self, seconds: float, attempts: int) -> None:
        machine = self.machines[CONTROLLER]
        if self._until_the_deadline() < 0.1:
            self.sometimes("a full disk at a deadline")
            machine.full = True
            self.loop.call_later(seconds, setattr, machine, "full", False)
        elif attempts:
            self.loop.call_later(0.05, self._fill_at_a_deadline, seconds, attempts - 1)

    def _masked_round(self) -> MaskedRound | None:
        return None if self.process is None or self.process._sums is None else self.process._sums._round

    def _rot_upload(self, rng: random.Random, attempts: int) -> None:
        """What a member has handed in to a masked round, of a controller that is killed before the sum is opened."""
        round_, boot = self._masked_round(), self.boots[CONTROLLER]
        if boot is None or round_ is None or not round_.uploads:
            if attempts:
                self.loop.call_later(0.05, self._rot_upload, rng, attempts - 1)
            return
        self.kill(boot, power=False)
        blob = rng.choice(sorted(round_.uploads.values()))
        self._rotten = self.machines[CONTROLLER].rot(rng, "state/blobs", blob) or self._rotten
        self.note("rot", str(self._rotten))
        self.reached["a masked model rotted"] += self._rotten is not None

    def _roll_back_at_a_task(self, number: int, known: int, attempts: int) -> None:
        """While learners fetch the model of a task that they have just been given."""
        if len(self._tasks) > known:
            if number % 3:  # then the models of that task are still on their way when the next one comes
                for name in self.learners:
                    line = self.network.line(name)
                    line.latency, line.jitter = 0.1, 0.3
                    self.loop.call_later(3.0, _quicken, line)
            self._power_at_rollback = number % 2 == 0
            self.office.order(Order("rollback", number, version=-1 if number % 4 != 3 else None))
        elif attempts:
            self.loop.call_later(0.01, self._roll_back_at_a_task, number, known, attempts - 1)

    def _extend_when_all_are_gone(self, order: Order, attempts: int) -> None:
        """Then the controller is about to end; or some time before that."""
        if not attempts:
            self.loop.call_later(self.rng.random(), self.office.order, order)
        elif self.process is not None and self.process._everybody_gone():
            self.loop.call_later(self.rng.uniform(0.0, 0.05), self.office.order, order)
        else:
            self.loop.call_later(0.01, self._extend_when_all_are_gone, order, attempts - 1)

    def _vanish_for_long(self, number: int) -> None:
        """A learner of a federation that was extended does not come back before its lease has ended."""
        boot = self.boots[self.learners[number % len(self.learners)]]
        if boot is not None:
            self.kill(boot, power=False, away=60.0)

    def _lose_power_at_rollback(self) -> None:
        if self._power_at_rollback:
            self.loop.call_later(0.0, self._kill_controller, True)
        self._power_at_rollback = False

    def _kill_controller(self, power: bool) -> None:
        boot = self.boots[CONTROLLER]
        if boot is not None:
            self.kill(boot, power=power)

    def _vanish(self, names: list[str], away: float, when: str, attempts: int) -> None:
        """As soon as a masked round is there: without keys, while its members train, or while it is opened."""
        round_, stage = self._masked_round(), None
        if round_ is not None and round_.values:
            stage = "keys" if not round_.fixed else "training" if round_.closed is None else "shares"
        boots = [boot for name in names if (boot := self.boots[name]) is not None]
        if stage == when and len(boots) == len(names):
            self.sometimes(f"a member vanished with its {when}")
            for boot in boots:
                self.kill(boot, power=False, away=away)
        elif attempts:
            self.loop.call_later(0.01, self._vanish, names, away, when, attempts - 1)

    def _rot_download(self, name: str, rng: random.Random, attempts: int) -> None:
        """Of a learner that is killed in the middle of one: what has come by then."""
        rotten = self.machines[name].rot(rng, "work/models", "*.part")
        if rotten is not None:
            self.note("rot", rotten)
            self.sometimes("half a download rotted")
            if (boot := self.boots[name]) is not None:
                self.kill(boot, power=False)
        elif attempts:
            self.loop.call_later(0.013, self._rot_download, name, rng, attempts - 1)

    def _calm(self) -> None:
        for machine in self.machines.values():
            machine.full, machine.strike_at = False, None
        self.office.settle()

    def _revive(self) -> None:
        """Learners end with the federation; if it is extended after that, their operators start them again."""
        process, running = self.process, self.boots[CONTROLLER] is not None
        if process is not None and running and not process.finished:
            for name in [name for name, code in self._codes.items() if code == 0]:
                self.sometimes("a finished federation was extended")
                del self._codes[name]
                self._start(name)
        self.loop.call_later(3.0, self._revive)

    # --- processes --------------------------------------------------------------------------------

    def kill(self, boot: Boot, *, power: bool, away: float | None = None) -> None:
        if boot.dead:
            return
        self.note("killed", f"{boot}{' with its machine' * power}")
        boot.dead = True
        self.context.copy().run(self._bury, boot, power)
        self._start_later(boot.name, away or 0.2 + self.rng.random() * self.rng.choice((1.0, 15.0)))

    def _bury(self, boot: Boot, power: bool) -> None:
        for end in boot.at_death:
            end(power)
        if power:
            for name, task in self.unsynced:
                if name == boot.name and self.spooled[name, task] == "kept":
                    self.spooled[name, task] = "unsure"
            self.machines[boot.name].lose_power(self.rng)
        self.boots[boot.name] = None
        self.abandoned = {(name, task) for name, task in self.abandoned if name != boot.name}

    def _watch_spools(self) -> None:
        """L8: what was trained is synced soon, unless it is answered before; until then a loss of power may take it."""
        for (name, task), seconds in self.unsynced.items():
            boot = self.boots[name]
            there = self.spooled[name, task] == "kept" and (name, task) not in self.rotted
            if boot is not None and not boot.stopped and there:
                self.unsynced[name, task] = seconds + 1
                if seconds > PROMPT_SECONDS + 4:
                    self.violated(f"L8: {name} has not synced the update of task {task} for {seconds} s")

    def _start_later(self, name: str, seconds: float) -> None:
        self.loop.call_later(seconds, self._start, name, context=self.context.copy())

    def _start(self, name: str) -> None:
        if self.boots[name] is not None or self.over or self._codes.get(name) == 0:
            return
        self.starts[name] += 1
        boot = self.boots[name] = Boot(self, name, self.starts[name])
        if name == CONTROLLER and self._power_after_start:
            self._power_after_start = False
            self.loop.call_later(self.rng.uniform(0.3, 4.0), self._kill_controller, True)
        disk = VirtualDisk(boot, self.machines[name])
        system = System(_Clock(boot), _Chance(boot), _Threads(boot), disk, self.network, self._spawn.get(name))  # type: ignore[arg-type]
        boot.context.run(SYSTEM.set, system)
        self.loop.call_soon(self._launch, boot, context=boot.context.copy())

    def _launch(self, boot: Boot) -> None:
        self.note("start", self.policy_name if boot.name == CONTROLLER else "")
        others: Any = {CONTROLLER: self._controller, LIAR: self._liar, ADMIN: self._administrator}
        work = others.get(boot.name, self._learner)
        task = self.loop.create_task(work(boot))
        task.add_done_callback(lambda done: self._ended(boot, done), context=boot.context.copy())

    def _ended(self, boot: Boot, task: asyncio.Task[Any]) -> None:
        problem = None if task.cancelled() else task.exception()
        if isinstance(problem, Crashed) or boot.dead:
            return
        self.note("end", self._without_paths(repr(problem) if problem else f"exit code {task.result()}"))
        boot.dead = True
        self.context.copy().run(self._bury, boot, False)
        if problem is not None:
            if isinstance(problem, StateError) and self._rotten is not None:
                self.sometimes("a rotten file was refused")
                self._refused = True
                if not self._done.done():
                    self._done.set_result(None)
            elif self._is_of_the_disk(problem):
                self.sometimes(f"{boot.name[0]} ended by its disk")
                self._start_later(boot.name, 2.0)
            else:
                self.note("traceback", self._without_paths("".join(traceback.format_exception(problem)[-6:])))
                self.violated(self._without_paths(f"{boot.name} ended with {problem!r}"))
            return
        if boot.name == CONTROLLER:
            self._finished = self._finished or bool(task.result())
        else:
            self._codes[boot.name] = task.result()
            if task.result() != 0:
                self.sometimes(f"a learner's exit code {task.result()}")
                out = self.office.out(boot.name)
                self.reached["a removed learner was refused"] += out
                self._start_later(boot.name, 5.0 if out else 1.0)
        if self.boots[CONTROLLER] is None and not self._done.done():
            if self._finished and all(self._is_through(name) for name in self.learners):
                self._done.set_result(None)
            elif boot.name == CONTROLLER:
                self._start_later(CONTROLLER, 0.5)  # somebody does not have the final model yet

    def _is_through(self, name: str) -> bool:
        """Whether it has the final model, is out, or had not joined when an administrator stopped everything."""
        code, out = self._codes.get(name), self.office.out(name)
        return code == 0 or (out and (code == 2 or self._finished)) or self._never_joined(name)

    def _never_joined(self, name: str) -> bool:
        if not (self._finished and self.office.asked["stop"]):
            return False
        records = [entry.record for entry in self._entries]
        return not any(record.get("event") == "learner_joined" and record["learner"] == name for record in records)

    def _is_of_the_disk(self, problem: BaseException) -> bool:
        """A process may end when its disk is full or fails, if it says so."""
        texts = ("cannot be opened", "No space left", "Input/output error", "cannot be written", "disk is full")
        return isinstance(problem, OSError | MetisError) and any(text in str(problem) for text in texts)

    def _without_paths(self, text: str) -> str:
        return text.replace(self._folder, "")

    async def _controller(self, boot: Boot) -> bool:
        root = self.machines[CONTROLLER].root
        state = State.open(DiskPath(f"{root}/state"), "power")
        state.__class__ = WatchedState
        assert isinstance(state, WatchedState)
        state.initial, state.violated, state.sound = self._versions[0], self.violated, self._rotten is None
        state.masked, state.written, state.rolled_back = self.masked, self._snapshots, self._lose_power_at_rollback
        if state.facts() is None:
            state.begin({"policy": self.policy_name})
        self._check_journal(state)
        state.check_files()
        setting = Setting.of(self.policy, self.initial, (), seed=1, metric="accuracy")
        members = dict.fromkeys((*self.learners, LIAR) if self._lied_to else self.learners, Power())
        plan = FederationPlan(
            self._make, self.initial, MASKED_SETTINGS if self.masked else "{}", setting, members, self._settings,
            self.policy.wire, began_with=self._stop, secure_sum=self.policy.secure_sum,
            settings_of_added=lambda learner: "{}",
        )  # fmt: skip
        process = self.process = ControllerProcess(
            plan, state, DiskPath(f"{root}/run"), evaluator=None, identify=self._identify,
            report=self._reporter(boot), administrators=administrator_by_name,
            peers=peers() if self.masked else None,
        )  # fmt: skip
        self._finished = False
        process._writer.durable._replay_at_most = self._replay_at_most  # a short run needs snapshots too
        self._watch_journal(process._writer.durable)
        self.office.check_start(process)
        for version, sha256 in process._writer.durable.hashes.items():
            self._is_version(version, sha256)
        ended = await process.serve(LISTEN, None)
        self._check_journal(state)
        self._entries = list(state.entries())
        state.close()
        return ended

    def _watch_journal(self, durable: DurableController) -> None:
        """I27: an update is journaled for the task that is open, as far as anybody can know then."""
        journal = durable.journal

        def watched(event: Event, now: float, blob: str | None = None, small: bytes | None = None) -> Entry:
            if self._full_at_a_sum is not None and isinstance(event, self._full_at_a_sum[0]):
                machine, (_, seconds), self._full_at_a_sum = self.machines[CONTROLLER], self._full_at_a_sum, None
                self.sometimes("a full disk at a sum")
                machine.full = True
                self.loop.call_later(seconds, setattr, machine, "full", False, context=self.context.copy())
            if isinstance(event, RoundFailed):
                self.mask_checks.failed(event, self._rotten is None)
            content = None if blob is None or not self.masked else durable.state.blob_path(blob).read_bytes()
            self.mask_checks.journaled(event, content)
            if isinstance(event, UpdateRequest | ModelResent) and content is not None:
                self.mask_checks.uploaded(event.learner, content)
            if isinstance(event, ModelResent) and durable.controller.resend_of(event.learner) != event.task:
                self.violated(f"I27: {event.learner} hands in {event.task} again, for which no window waits")
            if isinstance(event, UpdateRequest):
                task = durable.open_task(event.learner)
                if task is not None:  # one that was not sent yet, and whose number was guessed
                    self._tasks.setdefault(task.number, (event.learner, task.based_on.version))
                if task is None or task.number != event.task or durable.controller.finished:
                    self.violated(f"I27: the update of {event.learner} to task {event.task} counts, which is closed")
                if blob is None:
                    self.violated(f"I27: the update of {event.learner} to task {event.task} counts without a model")
            return journal(event, now, blob, small)

        durable.journal = watched  # type: ignore[method-assign]

    def _watch_leases(self) -> None:
        boot, machine = self.boots[CONTROLLER], self.machines[CONTROLLER]
        busy = boot is None or boot.stopped or machine.full
        self._leases.look(self.loop.now, self.process, busy, self.network.heard, self._until_the_deadline())
        if self.masked and self.process is not None:
            self.mask_checks.look(self.loop.now, self.process, busy)
        self._watch_spools()
        self.loop.call_later(1.0, self._watch_leases)

    def _until_the_deadline(self) -> float:
        """Seconds, by the clock of the run."""
        boot, process = self.boots[CONTROLLER], self.process
        if boot is None or process is None:
            return math.inf
        return process._view.standing.deadline - boot.context.copy().run(process._time.clock.now)

    async def _learner(self, boot: Boot) -> int:
        folder = DiskPath(f"{self.machines[boot.name].root}/work")
        kit = self._kits / boot.name if self.masked else None
        policy = None if kit is None else PolicyFile(kit / "site-policy.toml")
        if boot.name in self.spending:
            self.spending[boot.name].check()
        process = LearnerProcess(
            ROUTE, work=folder, child=("trainer",), report=self._reporter(boot), name=boot.name, kit=kit, policy=policy
        )  # fmt: skip
        process.work.__class__ = _WatchedFolder
        return await process.run()

    async def _liar(self, boot: Boot) -> int:
        self.sometimes("a liar takes part")
        return await lie(LISTEN, self.layout, boot.rng, self._done, self._overheard)

    def _overheard(self) -> tuple[int, str] | None:
        """The latest update of an honest learner that was acknowledged: its task and its checksum."""
        return max(((task, checksum) for task, (_, checksum) in self.acknowledged.items()), default=None)

    async def _administrator(self, boot: Boot) -> int:
        return await self.office.work(LISTEN)

    def _identify(self, context: Any) -> str:
        """By certificate, as far as that matters here: asked at every call."""
        name = str(dict(context.invocation_metadata())["metis-learner"])
        if name in self.office.revoked:
            raise Refused(grpc.StatusCode.PERMISSION_DENIED, f"the certificate of '{name}' was revoked")
        return name

    def _reporter(self, boot: Boot) -> Any:
        started = self.loop.now

        def report(kind: str, text: str) -> None:
            self.note("says", self._without_paths(f"{kind}: {text}"))
            if kind == "finished" and boot.name == CONTROLLER and self._extend_at_the_end is not None:
                order, self._extend_at_the_end = Order("extend", self._extend_at_the_end), None
                if order.number % 3:
                    self.loop.call_later(self.rng.uniform(1.0, 6.0), self._vanish_for_long, order.number)
                self.context.copy().run(self._extend_when_all_are_gone, order, 200 if order.number % 2 else 0)
            if (given_up := re.match(r"task (\d+): abandoned", text)) is not None:
                self.abandoned.add((boot.name, int(given_up[1])))
            elif (begun := re.match(r"task (\d+): .* from community model", text)) is not None:
                self.abandoned.discard((boot.name, int(begun[1])))
            silent = re.match(r"learner '(\w+)' was silent", text)
            if (gone := re.match(r"learner '(\w+)' (was silent|leaves)", text)) is not None:
                self._released[gone[1]] += 1
            if re.search("lied in the secure sum|is left out of the sum", text) is not None:
                self.violated(f"I38: {self._without_paths(text)}, and nobody lies here")
            refused = silent is not None and (silent[1] == LIAR or self.office.out(silent[1]))
            if (
                silent
                and not refused
                and self.loop.now - max(started, self.network.heard.get(silent[1], 0.0)) < SETTINGS.lease - 1
            ):
                self.violated(f"I17: the lease of {silent[1]} ends, which was heard, or had no time to come back")

        return report

    # --- checkers on the wire -------------------------------------------------------------------

    def _written(self, call: Call, message: Any) -> None:
        self._calls.written(call, message)
        header = message.header if isinstance(message, pb.UploadPart) and message.HasField("header") else message
        if isinstance(header, pb.UploadHeader):
            self._uploads[call] = (header.task, announced_checksum(header), self.loop.now)
            boot = self.boots.get(who := call.channel.boot.name)
            if boot is not None and (seconds := self._last_upload.pop(who, None)) is not None:
                self.loop.call_later(seconds, partial(self.kill, boot, power=False, away=14.0))
        if isinstance(message, pb.FromLearner) and message.HasField("secure"):
            self.mask_checks.heard(dict(call.metadata)["metis-learner"], message.secure)

    def _receipt(self, call: Call, receipt: pb.Receipt) -> None:
        (task, checksum, begun), who = self._uploads[call], dict(call.metadata)["metis-learner"]
        if receipt.verdict == pb.Receipt.COMMITTED:
            self.office.committed(who, begun)
            self._calls.committed(call)
        if receipt.verdict != pb.Receipt.REFUSED and self._tasks[task][0] != who:
            self.violated(f"I16: the update of {who} is accepted for task {task} of {self._tasks[task][0]}")
        if who == LIAR:
            self.sometimes(f"a lie was answered with {pb.Receipt.Verdict.Name(receipt.verdict)}")
            return
        if receipt.verdict == pb.Receipt.REFUSED:
            self.refused.add(task)
            if task in self.acknowledged:
                self.violated(f"I5: task {task} was acknowledged and is refused now: {receipt.reason}")
            return
        self.sometimes("already committed" if receipt.verdict == pb.Receipt.ALREADY else "committed")
        if task in self.refused:
            self.violated(f"I15: task {task} was refused and is accepted now")
        if self.acknowledged.setdefault(task, (receipt.sequence, checksum))[0] != receipt.sequence:
            self.violated(f"I5: task {task} has two receipts, {self.acknowledged[task][0]} and {receipt.sequence}")

    def _sent(self, call: Call, message: Any) -> None:
        if isinstance(message, pb.Receipt):
            self._receipt(call, message)
            return
        if isinstance(message, pb.UploadAnswer):
            if message.HasField("receipt"):
                self._receipt(call, message.receipt)
            elif message.received:
                self.sometimes("an upload went on where it was")
                if self._resets:
                    self._resets -= 1
                    for connection in list(self.network.line(dict(call.metadata)["metis-learner"]).connections):
                        connection.reset()
            return
        if not isinstance(message, pb.ToLearner):
            return
        boot, name = BOOT.get(), dict(call.metadata)["metis-learner"]
        assert boot is not None
        match message.WhichOneof("message"):
            case "welcome":
                self.office.welcomed(name)
                epoch = message.welcome.epoch
                if epoch < self._highest_epoch or self._epochs.setdefault(epoch, boot.number) != boot.number:
                    self.violated(f"I6: epoch {epoch} of start {boot.number}, after epoch {self._highest_epoch}")
                self._highest_epoch = max(epoch, self._highest_epoch)
            case "secure":
                self.mask_checks.asked(message.secure)
                if number := message.secure.task:  # of what is handed in again
                    self._tasks.setdefault(number, (name, message.secure.version))
            case "task":
                task = message.task
                if self.masked:
                    self.mask_checks.task(task)
                self.office.task_sent(name, task.number)
                self._calls.task(call, task.number)
                self._is_version(task.version, task.sha256)
                if self._tasks.setdefault(task.number, (name, task.version)) != (name, task.version):
                    self.violated(f"I15: task {task.number} was {self._tasks[task.number]}, is {(name, task.version)}")

    def _aborted(self, call: Call, reason: str) -> None:
        if _DAMAGED not in reason or call not in self._uploads or not self._partial_are_sound:
            return
        task, who = self._uploads[call][0], dict(call.metadata)["metis-learner"]
        if who != LIAR and (who, task) not in self.rotted:
            self.violated(f"I28: the update of {who} to task {task} is refused, though it came as it was sent")

    def disk_failed(self, boot: Boot, kind: str, path: str) -> None:
        """I30: after an error of its disk a controller ends; only the clock's file may be behind."""
        if boot.name == CONTROLLER and kind in ("write", "fsync") and "/state/" in path and Path(path).name != "clock":
            self.loop.call_later(5.0, self._has_ended, boot, kind)
        self._power_after_start = path.endswith("/state/sums")

    def _has_ended(self, boot: Boot, kind: str) -> None:
        if not (boot.dead or boot.stopped):
            self.violated(f"I30: the controller goes on after its disk has failed to {kind}")

    def _is_version(self, version: int, sha256: str) -> None:
        if self._versions.setdefault(version, sha256) != sha256:
            self.violated(f"I7: community model {version} has two contents")

    # --- checkers of what is kept ---------------------------------------------------------------

    def _check_journal(self, state: State) -> None:
        """I3: what was acknowledged is in the journal, once, with its bytes."""
        found: dict[int, Any] = {}
        latest = 0.0
        for entry in state.entries():
            if "published" in entry.record:  # with the time of its event, behind which others may be journaled already
                continue
            if entry.at < latest - 2.0:  # the clock is saved every second
                self.violated(f"I10: entry {entry.seq} is of {entry.at:g} s, the one before of {latest:g} s")
            latest = entry.at
            if entry.record.get("event") == "update_request" or entry.record.get("lost") is False:
                if entry.record["task"] in found:
                    self.violated(f"I3: task {entry.record['task']} is in the journal twice")
                found[entry.record["task"]] = entry
        for task, (sequence, checksum) in self.acknowledged.items():
            entry = found.get(task)
            if entry is None:
                self.violated(f"I3: task {task} was acknowledged and is not in the journal")
            elif entry.seq != sequence or (self.policy.wire is None and checksum_in(entry.blob) != checksum):
                self.violated(f"I3: task {task} was acknowledged as entry {sequence}, is entry {entry.seq}")

    def _check_end(self) -> None:
        """I4, I8, I9, I17: the journal folded by the core alone gives every version that anybody has seen."""
        twin: Controller = self._make(self.initial, MemoryStore())
        longest = LONGEST_PERIOD if "semisync" in self.policy_name else math.inf
        reference = Reference(
            self.policy_name, self.initial, self._tasks, longest, self.violated, self.mask_checks.mean
        )  # fmt: skip
        members = Members(self.learners, twin.refusals_allowed, self._released, self.violated)
        current, counted = 0, set[str]()
        communities = {payload_sha256(self.initial): self.initial}
        seq = 0
        for entry in self._entries:
            self._check_snapshot(seq, twin)
            seq = entry.seq
            if "published" in entry.record:
                self._is_version(entry.record["published"], entry.record["sha256"])
                continue
            event: Any = from_record(entry.record)[1]
            if isinstance(event, UpdateRequest):
                event = replace(event, local_model=Model.empty() if self.masked else self._model(entry.blob))
            elif isinstance(event, SumOpened):
                event = replace(event, total=self.mask_checks.total(event.version))
            elif isinstance(event, RolledBack):
                event = replace(event, community_model=communities[entry.blob])
            members.before(event, twin)
            before = _mixing_state(twin)
            actions: list[Action] | None = None
            with contextlib.suppress(LearnerError):
                actions = twin.handle(event, entry.at)
            counts = any(isinstance(action, UpdateCommitted | CommunityPublished) for action in actions or ())
            if not (counts or isinstance(event, MemberRemoved) or _mixing_state(twin) == before):
                self.violated(f"I17: {type(event).__name__} changed the mixture without counting")
            if actions is None:
                continue
            reference.record(event, actions)
            members.after(actions, twin)
            if isinstance(event, LearnerWithdrawn) or (isinstance(event, MemberRemoved) and event.withdraw):
                counted.discard(event.learner)  # what it had contributed to this round is taken out
            for action in actions:
                if isinstance(action, CommunityPublished):
                    sha256 = payload_sha256(action.community_model)
                    communities[sha256] = action.community_model
                    self._is_version(action.stamp.version, sha256)
                    current, counted = action.stamp.version, set()
                elif isinstance(action, UpdateCommitted) and self.policy.protocol.has_rounds:
                    if action.learner in counted and not twin.protocol.accepts_stale:  # then the later one replaces it
                        self.violated(f"I8: {action.learner} counts twice in round {current}")
                    counted.add(action.learner)
                    based_on = self._tasks[action.task][1]
                    if based_on != current and not twin.protocol.accepts_stale:
                        self.violated(f"I9: task {action.task} is based on {based_on} and counts in {current}")
        published = {entry.record["published"] for entry in self._entries if "published" in entry.record}
        for version in {version for _, version in self._tasks.values() if version} - published:
            self.violated(f"I7: community model {version} was handed out and is not in the journal")
        if not twin.finished:
            self.violated("I4: the journal does not lead to the end that everybody has seen")
        audit = Path(self.machines[CONTROLLER].root, "state", AUDIT)
        if self._rotten is None:
            self.office.check_end([entry.record for entry in self._entries], self._versions, audit)
        for (name, task), where in self.spooled.items():
            answered = task in self.acknowledged or (name, task) in self.rotted or self._is_through(name)
            if where == "kept" and not answered and name != NEWCOMER:  # it may come too late
                self.violated(f"L3: task {task} was kept by {name} and never answered")

    def _check_snapshot(self, seq: int, twin: Controller) -> None:
        """I32: a snapshot after an entry is what the journal leads to up to there."""
        if seq not in self._snapshots or self.masked:
            return
        version, mixed = self._snapshots[seq]
        arrays = twin.community.arrays(local_models=False)
        if version != twin.community.stamp.version or mixed != {name: arrays[name].tobytes() for name in arrays}:
            self.violated(f"I32: the snapshot after entry {seq} is not what the journal leads to")

    def _model(self, blob: str) -> Model:
        """A local model, of a learner or of the liar, who sends the same number everywhere."""
        if checksum_in(blob) not in self.models:
            for value in (1.0, 9e9):
                content, size = np.full(model_bytes(self.layout) // 4, value, "<f4").tobytes(), 4 * self.layout.size
                vector, counters = np.frombuffer(content[:size], "<f4"), np.frombuffer(content[size:], "<i8")
                self._trained(Model(self.layout, vector.copy(), counters.copy()))
        return self.models[checksum_in(blob)]

    def _trained(self, model: Model, checksum: str = "") -> None:
        self.models[payload_sha256(model)] = model
        if checksum:
            self.models[checksum] = model

    # --- a seed -----------------------------------------------------------------------------------

    async def _scenario(self) -> None:
        self._start(CONTROLLER)
        for name in (*self.learners, LIAR)[: None if self._lied_to else -1]:
            self._start_later(name, self.rng.random() * 2)
        for fault in self.faults:
            self.loop.call_later(fault.at, self._strike, fault)
        if self._administered:
            self._start(ADMIN)
            self._revive()
        self.loop.call_later(FAULT_SECONDS + 45, self._calm)
        self._watch_leases()
        done, _ = await asyncio.wait(
            [self._done, self.problem], timeout=LIVE_SECONDS, return_when=asyncio.FIRST_COMPLETED
        )
        if not done:
            self.violated(f"I18: not at its end after {LIVE_SECONDS:g} s: {self._codes}, {len(self._versions)} models")
        elif self._done in done and not self._refused:
            self._check_end()
        if self.problem.done():
            self.problem.result()

    def run(self) -> None:
        """Play this seed; raises what was found."""
        apsw.randomness(0)
        gc.disable()
        try:
            self.context.run(self.loop.run_until_complete, self._scenario())
        finally:
            self.over = True
            asyncio.events._set_running_loop(None)
            for boot in self.boots.values():
                if boot is not None:
                    boot.dead = True
            for machine in self.machines.values():
                machine.close()
            if not self.problem.done():
                self.problem.cancel()
            gc.enable()


class _WatchedFolder(WorkFolder):
    """The real folder; what is kept in it must be there until it was answered."""

    def _watched(self) -> tuple[Federation, str]:
        boot = BOOT.get()
        assert boot is not None and isinstance(boot.world, Federation)
        return boot.world, boot.name

    def __enter__(self) -> WorkFolder:
        entered = super().__enter__()
        world, owner = self._watched()
        there = {update.task for update in self.updates()}
        for (name, task), where in list(world.spooled.items()):
            if name == owner and where == "unsure":
                world.sometimes("an update that was not synced is lost" if task not in there else "and is there")
                world.spooled[name, task] = "kept" if task in there else "lost"
            if name == owner and where == "kept" and task not in there and (name, task) not in world.rotted:
                world.violated(f"L1: {name} had kept the update of task {task}, and it is gone")
        return entered

    def begin(self, run: str, learner: str, layout: str) -> None:
        super().begin(run, learner, layout)
        world, owner = self._watched()
        for (name, task), where in world.spooled.items():
            there = self.update_file(task).is_file() or (name, task) in world.rotted
            if name == owner and where == "kept" and not there:
                world.violated(f"L1: {name} had kept the update of task {task}, and has deleted it")

    def keep(self, update: Update, *, synced: bool = True) -> None:
        world, owner = self._watched()
        if world.spooled.get((owner, update.task)) == "kept" and (owner, update.task) not in world.rotted:
            world.violated(f"L4: {owner} has trained task {update.task} again, whose update was waiting")
        if (owner, update.task) in world.abandoned:
            world.violated(f"L5: {owner} has trained task {update.task} to its end, which was replaced")
        super().keep(update, synced=synced)
        world.spooled[owner, update.task] = "kept"
        if not synced:
            world.unsynced[owner, update.task] = 0

    def sync(self, task: int) -> None:
        world, owner = self._watched()
        if (owner, task) in world.unsynced:
            world.unsynced[owner, task] = 0
        super().sync(task)
        world.unsynced.pop((owner, task), None)

    def drop(self, task: int) -> None:
        world, owner = self._watched()
        if (owner, task) in world.spooled:
            answered = task in world.acknowledged or task in world.refused
            if not answered and (owner, task) not in world.rotted:
                world.violated(f"L2: {owner} drops the update of task {task}, which nobody answered")
            world.spooled[owner, task] = "dropped"
        super().drop(task)


def _mixing_state(twin: Controller) -> tuple[Any, ...]:
    arrays = twin.community.arrays()
    return twin.community.stamp, twin.community.committed_steps, {name: arrays[name].tobytes() for name in arrays}


def _quicken(line: Any) -> None:
    line.latency, line.jitter = 0.005, 0.01


def play(
    seed: int, folder: str, *, traced: bool = False, faults: Sequence[Fault] | None = None
) -> tuple[Federation, Exception | None]:
    """One seed, and what was found wrong."""
    federation = Federation(seed, folder, traced=traced, faults=faults)
    _GRAVEYARD.append(federation)
    try:
        federation.run()
    except (Violation, Stuck, AssertionError, KeyError, ValueError) as problem:
        return federation, problem
    return federation, None


def signature(problem: Exception) -> str:
    """The same fault of the program, whatever its numbers."""
    return re.sub(r"/\S+|[0-9a-f]{12,}|\d+", "", str(problem))[:80]


def shrink(seed: int, folder: str, kind: str, faults: Sequence[Fault]) -> list[Fault]:
    """The fewest faults that still fail in the same way: one after the other is left out."""
    left = list(faults)
    smaller = True
    while smaller:
        smaller = False
        for fault in list(left):
            fewer = [other for other in left if other is not fault]
            _, problem = play(seed, folder, faults=fewer)
            if problem is not None and signature(problem) == kind:
                left, smaller = fewer, True
    return left
