"""A training process in memory: it speaks the real JSON lines, trains by exact arithmetic, and writes real files."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from metis.core.layers import Layer
from metis.core.layers.base import Outgoing, Work
from metis.core.model import Layout, Model
from metis.core.solvers import VanillaSGD
from metis.deployment.wire.model_mac import ModelMac
from metis.deployment.wire.models import model_parts, payload_sha256, read_model, write_parts
from metis.errors import DataError
from system.disk import DiskPath
from system.loop import BOOT, Boot
from system.masks import MaskChecks, Spending, WatchedMasking

EXAMPLES, BATCH_SIZE = 64, 8
_PRIVATE = {"private": True, "noise": 1.0, "epsilon_spent": 0.0, "budget": None, "delta": 1e-5}


def trained_value(task: int, index: int, different: int) -> float:
    """What every weight of a local model is: small integers, so that sums are exact."""
    return float((task * 7 + index) % different + 1)


class Process:
    """What `asyncio.create_subprocess_exec` returns, as far as it is used."""

    count = 0

    def __init__(
        self,
        boot: Boot,
        time_per_batch: float,
        evaluates: bool,
        wire: Layer | None,
        different: int,
        trained: Callable[[Model, str], None],
        checks: MaskChecks | None = None,
        spending: Spending | None = None,
    ) -> None:
        self._checks, self._spending = checks, spending
        Process.count += 1
        self.pid, self.returncode = Process.count, None
        self._boot, self._time_per_batch, self._evaluates = boot, time_per_batch, evaluates
        self._wire, self._different, self._trained = wire, different, trained
        self.stdin = self.stdout = self
        self._commands: deque[dict[str, Any]] = deque()
        self._held: tuple[Model, Model, dict[str, Any]] | None = None
        self._lines: deque[bytes] = deque()
        self._abandoned: set[int] = set()
        self._more, self._answered = asyncio.Event(), asyncio.Event()
        self._gone = boot.world.loop.create_future()
        self._task = boot.world.loop.create_task(self._work())

    # --- its standard input ---------------------------------------------------------------------

    def write(self, data: bytes) -> None:
        if self.returncode is not None:
            raise BrokenPipeError
        command = json.loads(data)
        if command["command"] == "abandon":
            self._abandoned.add(command["id"])
        else:
            self._commands.append(command)
        self._more.set()

    async def drain(self) -> None:
        await asyncio.sleep(0)

    def close(self) -> None:
        self._end(0)

    # --- its standard output --------------------------------------------------------------------

    async def readline(self) -> bytes:
        while not self._lines:
            if self.returncode is not None:
                return b""
            self._answered.clear()
            await self._answered.wait()
        return self._lines.popleft()

    async def wait(self) -> int:
        return int(await asyncio.shield(self._gone))

    def kill(self) -> None:
        self._end(-9)

    def _end(self, code: int) -> None:
        if self.returncode is None:
            self.returncode = code  # type: ignore[assignment]
            self._task.cancel()
            self._answered.set()
            self._gone.set_result(code)

    def _answer(self, **answer: Any) -> None:
        self._lines.append(json.dumps(answer).encode() + b"\n")
        self._answered.set()

    # --- its work -------------------------------------------------------------------------------

    async def _work(self) -> None:
        while True:
            while not self._commands:
                self._more.clear()
                await self._more.wait()
            command = self._commands.popleft()
            try:
                await self._do(command)
            except (OSError, DataError) as problem:
                self._boot.world.note("trainer", str(problem).rpartition("/")[2])
                self._answer(id=command["id"], failed=str(problem), kind="disk")
            except Exception as problem:
                self._boot.world.violated(f"L7: the training process of {self._boot.name} fails: {problem!r}")

    async def _do(self, command: dict[str, Any]) -> None:
        number, rng = command["id"], self._boot.rng
        match command["command"]:
            case "prepare":
                await asyncio.sleep(rng.random() * 0.5)
                self._layout = Layout.from_json(command["layout"])
                self._index = command["index"]
                self._answer(
                    id=number,
                    done={
                        "examples": EXAMPLES,
                        "batch_size": BATCH_SIZE,
                        "evaluation_examples": 16 if self._evaluates else 0,
                        "fingerprint": self._layout.fingerprint,
                        **({} if self._spending is None else _PRIVATE),
                    },
                )
            case "train":
                self._held = None
                await self._train(command)
            case "mask":
                await self._mask(command)
            case "evaluate":
                await asyncio.sleep(rng.random() * 0.3)
                model = read_model(Path(command["model"]), self._layout)
                metrics = {"accuracy": float(model.vector[0]) / 128, "loss": 1.0}
                self._answer(id=number, done={"metrics": metrics, "examples": 16})
            case "save" | "ping":
                self._answer(id=number, done={})
            case other:
                self._answer(id=number, failed=f"'{other}' is not a command", kind="unknown")

    async def _train(self, command: dict[str, Any]) -> None:
        number, loop = command["id"], self._boot.world.loop
        masking = None
        if command.get("masking") is not None:
            assert self._checks is not None
            masking = WatchedMasking(command["masking"], self._checks)
            if (done := await asyncio.to_thread(masking.done)) is not None:
                self._boot.world.sometimes("what was masked before a crash is sent again")
                written, _ = _written(command, done[1])
                self._answer(id=number, done={**done[0], **written})
                return
        model = read_model(Path(command["model"]), self._layout)
        if payload_sha256(model) != Path(command["model"]).name:
            self._boot.world.violated(f"L6: {self._boot.name} trains on a model that is not what was asked for")
        batch = self._time_per_batch * self._boot.rng.uniform(0.9, 1.2)
        steps, began = 0, loop.now
        if self._spending is not None:
            run = "" if masking is None else command["masking"]["run"]
            await asyncio.to_thread(self._spending.reserve, run, command["task"], command["steps"])
        while command["steps"] is None or steps < command["steps"]:
            await asyncio.sleep(batch * self._boot.world.dawdling.get(self._boot.name, 1.0))
            steps += 1
            if self._spending is not None:
                self._spending.step()
            if number in self._abandoned:
                self._answer(id=number, abandoned={"task": command["task"], "steps": steps})
                return
            if command["seconds"] is not None and loop.now - began >= command["seconds"]:
                break
            if steps % 4 == 0:
                self._answer(id=number, progress={"task": command["task"], "steps": steps})
        if self._different < 64:  # equal models in files of one name: only a SHA-256 has them
            command = {**command, "seal": False}
        value = trained_value(command["task"], self._index, self._different)
        if masking is not None or command.get("hold"):  # other batches after a restart
            value += self._boot.rng.randrange(8) / 8
        vector = np.full(self._layout.size, value, np.float32)
        made, payload = Model(self._layout, vector, np.array(model.counters)), b""
        if self._wire is not None:
            base = Work(model, VanillaSGD(1.0), {})
            encoded = self._wire.encode(Outgoing(made, {}), base, base)
            made, payload = encoded.model, encoded.payload
        parts = (memoryview(payload),) if payload else model_parts(made)
        seconds = loop.now - began
        facts = {
            "task": command["task"],
            "steps": steps,
            "seconds": seconds,
            "time_per_batch": seconds / steps,
            "loss": 0.5 if masking is None and not command.get("hold") else None,
            "compression_error": None,
        }
        if masking is None and command.get("hold"):
            self._held = made, model, facts
            self._answer(id=number, done=facts)
            return
        if masking is not None:
            parts = tuple(await asyncio.to_thread(masking.mask, made, model, 0.5, facts, self._checks.policy))
        written, checksum = _written(command, parts)
        self._trained(made, checksum)
        self._answer(id=number, done={**facts, **written})

    async def _mask(self, command: dict[str, Any]) -> None:
        """A window has a place for what was trained."""
        assert self._checks is not None
        held, self._held = self._held, None
        if held is None or held[2]["task"] != command["task"]:
            self._answer(id=command["id"], failed="the model is not here any more", kind="setup")
            return
        made, base, facts = held
        masking = WatchedMasking(command["masking"], self._checks)
        await asyncio.to_thread(masking.look)
        parts = tuple(await asyncio.to_thread(masking.mask, made, base, 0.5, facts, self._checks.policy))
        written, checksum = _written(command, parts)
        self._trained(made, checksum)
        self._answer(id=command["id"], done={**facts, **written})


def _written(command: dict[str, Any], parts: Iterable[memoryview]) -> tuple[dict[str, Any], str]:
    mac = ModelMac() if command["seal"] else None
    checksum, length = write_parts(DiskPath(command["out"]), parts, mac, synced=command.get("synced", True))
    return {"sha256": "", "sha256" if mac is None else "seal": checksum, "bytes": length}, checksum


def spawner(
    time_per_batch: float,
    evaluates: bool,
    wire: Layer | None,
    different: int,
    trained: Callable[[Model, str], None],
    checks: MaskChecks | None = None,
    spending: Spending | None = None,
) -> Any:
    """Starts such processes for the boot that runs; `trained` hears of every local model as it arrives.

    Local models have one of so many `different` contents.
    """

    async def spawn(*command: str, **options: Any) -> Process:
        boot = BOOT.get()
        assert boot is not None
        await asyncio.sleep(0)
        return Process(boot, time_per_batch, evaluates, wire, different, trained, checks, spending)

    return spawn
