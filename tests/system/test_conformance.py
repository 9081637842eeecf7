"""The simulated network and disk do what the real ones do: one script runs on both, and what it sees is the same."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from deployment.crash_points import strace_problem
from metis.deployment.controller.state import State
from metis.errors import StateError
from metis.system import REAL, SYSTEM, Disk, System
from system.disk import DiskPath, Machine, VirtualDisk
from system.loop import Boot, World
from system.network import Network

SERVICE = "metis.conformance"


class Script:
    """Handlers that answer, and what both sides saw, in an order that is fixed."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    async def chat(self, requests: AsyncIterator[bytes], context: Any) -> None:
        async for request in requests:
            self.seen.append(("server got", request))
            if request == b"abort":
                await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "not today")
            await context.write(b"<" + request + b">")
        self.seen.append("server saw the end")

    async def collect(self, requests: AsyncIterator[bytes], context: Any) -> bytes:
        await context.send_initial_metadata((("turn", "come"),))
        return b"+".join([request async for request in requests])

    async def count(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        for number in range(int(request)):
            yield str(number).encode()

    async def ask(self, request: bytes, context: Any) -> bytes:
        if request == b"abort":
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, "no")
        if request == b"wait":
            await asyncio.sleep(60)
        return request.upper()

    @property
    def handler(self) -> Any:
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "Chat": grpc.stream_stream_rpc_method_handler(self.chat),
                "Collect": grpc.stream_unary_rpc_method_handler(self.collect),
                "Count": grpc.unary_stream_rpc_method_handler(self.count),
                "Ask": grpc.unary_unary_rpc_method_handler(self.ask),
            },
        )


def _same(message: bytes) -> bytes:
    return message


def _stubs(channel: Any) -> dict[str, Any]:
    return {
        "chat": channel.stream_stream(f"/{SERVICE}/Chat", _same, _same),
        "collect": channel.stream_unary(f"/{SERVICE}/Collect", _same, _same),
        "count": channel.unary_stream(f"/{SERVICE}/Count", _same, _same),
        "ask": channel.unary_unary(f"/{SERVICE}/Ask", _same, _same),
    }


Play = Callable[[dict[str, Any], Any, Script], Awaitable[None]]


async def _failure(work: Awaitable[Any]) -> tuple[str, str]:
    try:
        await work
    except grpc.aio.AioRpcError as problem:
        return problem.code().name, problem.details() or ""
    return "OK", ""


async def messages_in_order(stubs: dict[str, Any], channel: Any, script: Script) -> None:
    call = stubs["chat"]()
    for message in (b"a", b"b", b"c"):
        await call.write(message)
        script.seen.append(await call.read())
    await call.done_writing()
    script.seen.append(await call.read() is grpc.aio.EOF)
    script.seen.append((await call.code()).name)


async def an_abort_in_a_stream(stubs: dict[str, Any], channel: Any, script: Script) -> None:
    call = stubs["chat"]()
    await call.write(b"abort")
    script.seen.append(await _failure(call.read()))
    await asyncio.sleep(0.05)
    with pytest.raises(asyncio.InvalidStateError):
        await call.write(b"more")


async def a_header_and_one_answer(stubs: dict[str, Any], channel: Any, script: Script) -> None:
    call = stubs["collect"]()
    await call.write(b"x")
    script.seen.append(("turn", "come") in tuple(await call.initial_metadata()))
    await call.write(b"y")
    await call.done_writing()
    script.seen.append(await call)


async def one_request_and_many_answers(stubs: dict[str, Any], channel: Any, script: Script) -> None:
    call = stubs["count"](b"3")
    while (message := await call.read()) is not grpc.aio.EOF:
        script.seen.append(message)


async def one_request_and_one_answer(stubs: dict[str, Any], channel: Any, script: Script) -> None:
    script.seen.append(await stubs["ask"](b"hello"))
    script.seen.append(await _failure(stubs["ask"](b"abort")))


async def a_call_that_is_cancelled(stubs: dict[str, Any], channel: Any, script: Script) -> None:
    call = stubs["chat"]()
    await call.write(b"a")
    await call.read()
    script.seen.append(call.cancel())
    with pytest.raises(asyncio.CancelledError):
        await call.read()
    script.seen.append((await call.code()).name)


async def a_method_that_nobody_serves(stubs: dict[str, Any], channel: Any, script: Script) -> None:
    other = channel.unary_unary(f"/{SERVICE}/Other", _same, _same)
    script.seen.append((await _failure(other(b"")))[0])


async def a_channel_that_is_closed(stubs: dict[str, Any], channel: Any, script: Script) -> None:
    call = stubs["chat"]()
    await call.write(b"a")
    await call.read()
    reading = asyncio.ensure_future(call.read())
    await asyncio.sleep(0)
    await channel.close()
    script.seen.append(isinstance((await asyncio.gather(reading, return_exceptions=True))[0], asyncio.CancelledError))


async def many_messages_at_once(stubs: dict[str, Any], channel: Any, script: Script) -> None:
    call = stubs["collect"]()
    for number in range(200):
        await call.write(bytes([number]) * 1000)
    await call.done_writing()
    whole = await call
    script.seen.append((len(whole), [whole[1001 * number] for number in range(200)]))


async def two_calls_at_once(stubs: dict[str, Any], channel: Any, script: Script) -> None:
    calls = [stubs["collect"](), stubs["collect"]()]
    for message in (b"a", b"b"):
        for call in calls:
            await call.write(message)
    for call in calls:
        await call.done_writing()
    script.seen.append(await asyncio.gather(*calls))


async def nothing_is_written_behind_the_end(stubs: dict[str, Any], channel: Any, script: Script) -> None:
    call = stubs["chat"]()
    await call.done_writing()
    with pytest.raises(asyncio.InvalidStateError):
        await call.write(b"more")
    script.seen.append(await call.read() is grpc.aio.EOF)
    script.seen.append((call.done(), await call.details()))


async def a_cancelled_call_that_is_awaited(stubs: dict[str, Any], channel: Any, script: Script) -> None:
    call = stubs["collect"]()
    await call.write(b"x")
    script.seen.append((call.cancel(), call.cancel()))
    with pytest.raises(asyncio.CancelledError):
        await call


async def an_answer_that_is_not_waited_for_any_more(stubs: dict[str, Any], channel: Any, script: Script) -> None:
    call = stubs["ask"](b"wait")
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(call, 0.05)
    script.seen.append((call.done(), (await call.code()).name))


async def a_channel_that_is_closed_before_the_answer(stubs: dict[str, Any], channel: Any, script: Script) -> None:
    call = stubs["ask"](b"wait")
    waiting = asyncio.ensure_future(call)
    await asyncio.sleep(0.05)
    await channel.close()
    script.seen.append(isinstance((await asyncio.gather(waiting, return_exceptions=True))[0], asyncio.CancelledError))


PLAYS: list[Play] = [
    many_messages_at_once, two_calls_at_once, nothing_is_written_behind_the_end, a_cancelled_call_that_is_awaited,
    messages_in_order, an_abort_in_a_stream, a_header_and_one_answer, one_request_and_many_answers,
    one_request_and_one_answer, a_call_that_is_cancelled, a_method_that_nobody_serves, a_channel_that_is_closed,
    an_answer_that_is_not_waited_for_any_more, a_channel_that_is_closed_before_the_answer,
]  # fmt: skip


async def _play(play: Play, network: Any) -> list[Any]:
    script = Script()
    server = network.server()
    server.add_generic_rpc_handlers((script.handler,))
    port = server.add_insecure_port("127.0.0.1:0" if network is grpc.aio else "127.0.0.1:1")
    await server.start()
    channel = network.insecure_channel(f"127.0.0.1:{port}")
    try:
        await asyncio.wait_for(play(_stubs(channel), channel, script), 60)
        # A handler whose caller is gone may see the end of its stream or be cancelled first: gRPC does either.
        seen = [one for one in script.seen if one != "server saw the end" or play is messages_in_order]
    finally:
        await channel.close()
        await server.stop(0)
    return seen


def _simulated(work: Callable[[Boot], Awaitable[Any]]) -> Any:
    """Let a process of a simulated machine do this."""
    world = World(1)
    boot = Boot(world, "p", 1)

    async def main() -> Any:
        return await work(boot)

    task = boot.context.run(world.loop.create_task, main())
    try:
        return boot.context.copy().run(world.loop.run_until_complete, task)
    finally:
        world.over = True
        world.loop.close()


@pytest.mark.parametrize("play", PLAYS, ids=lambda play: play.__name__)
def test_calls_are_as_those_of_grpc(play: Play) -> None:
    """Messages, ends, aborts, cancellations."""
    real = asyncio.run(_play(play, grpc.aio))
    simulated = _simulated(lambda boot: _play(play, Network(boot.world)))

    assert simulated == real
    assert real  # it saw something


async def _gone(network: Any) -> list[Any]:
    """A server that stops in the middle of a stream, and a port where nobody listens any more."""
    script, seen = Script(), []
    server = network.server()
    server.add_generic_rpc_handlers((script.handler,))
    port = server.add_insecure_port("127.0.0.1:0" if network is grpc.aio else "127.0.0.1:1")
    await server.start()
    async with network.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = _stubs(channel)["chat"]()
        await call.write(b"a")
        seen.append(await call.read())
        reading = asyncio.ensure_future(_failure(call.read()))
        await server.stop(0)
        seen.append((await asyncio.wait_for(reading, 60))[0])
    async with network.insecure_channel(f"127.0.0.1:{port}") as channel:
        seen.append((await asyncio.wait_for(_failure(_stubs(channel)["ask"](b"a")), 60))[0])
    return seen


def test_a_server_that_is_gone_is_as_one_of_grpc() -> None:
    """Both ends see the same whatever broke: UNAVAILABLE, which is tried again."""
    real = asyncio.run(_gone(grpc.aio))

    assert _simulated(lambda boot: _gone(Network(boot.world))) == real
    assert real == [b"<a>", "UNAVAILABLE", "UNAVAILABLE"]


# --- the disk ------------------------------------------------------------------------------------


def _observed(work: Callable[[], Any], root: str) -> Any:
    try:
        return work()
    except OSError as problem:
        return type(problem).__name__, problem.errno
    except sqlite3.Error as problem:
        return type(problem).__name__, str(problem)


def _write(path: Path, mode: str, *parts: bytes) -> int:
    with path.open(mode, buffering=0) as file:
        return sum(file.write(part) for part in parts)


def _append(disk: Disk, path: Path) -> bytes:
    descriptor = disk.open(path, os.O_RDWR | os.O_CREAT)
    try:
        disk.pwrite(descriptor, b"0123456789", 0)
        disk.pwrite(descriptor, b"ab", 4)
        disk.fsync(descriptor)
        return disk.pread(descriptor, 100, 2)
    finally:
        disk.close(descriptor)


def _database(disk: Disk, path: Path) -> Any:
    with contextlib.closing(disk.connect(path)) as database:
        database.execute("PRAGMA journal_mode=WAL").fetchall()
        database.execute("CREATE TABLE IF NOT EXISTS t (n INTEGER UNIQUE, text TEXT)").fetchall()
        database.execute("INSERT INTO t VALUES (?, ?)", (1, "one")).fetchall()
        database.execute("INSERT INTO t VALUES (?, ?)", (2, "two")).fetchall()
        try:
            database.execute("INSERT INTO t VALUES (?, ?)", (2, "again")).fetchall()
        except sqlite3.IntegrityError as problem:
            refused = type(problem).__name__
        return refused, database.execute("SELECT * FROM t ORDER BY n").fetchall(), database.in_transaction


def _lock_twice(disk: Disk, path: Path) -> tuple[bool, bool]:
    """Within one process a lock is per open file."""
    first = disk.open(path, os.O_RDWR | os.O_CREAT)
    taken = disk.lock(first)
    disk.close(first)
    second = disk.open(path, os.O_RDWR)
    again = disk.lock(second)
    disk.close(second)
    return taken, again


def _cut(disk: Disk, path: Path) -> bytes:
    """Truncate, write behind the end, open with O_TRUNC."""
    descriptor = disk.open(path, os.O_RDWR | os.O_CREAT)
    disk.pwrite(descriptor, b"0123456789", 0)
    disk.truncate(descriptor, 4)
    disk.pwrite(descriptor, b"z", 8)
    seen = disk.pread(descriptor, 100, 0)
    disk.close(descriptor)
    disk.close(disk.open(path, os.O_RDWR | os.O_TRUNC))
    return seen + path.read_bytes()


def _continue(path: Path) -> tuple[bytes, bytes]:
    """As a resumed transfer does: read what is there, then append."""
    _write(path, "wb", b"abc")
    with path.open("a+b", buffering=0) as file:
        file.seek(0)
        before = file.read(100)
        file.write(b"def")
        file.truncate(5)
    return before, path.read_bytes()


def _journal(disk: Disk, path: Path) -> Any:
    """SQLite as the state folder uses it: locked, in WAL mode, checkpointed, rolled back, opened again."""
    seen: list[Any] = []
    for start in range(2):
        with contextlib.closing(disk.connect(path)) as database:
            for pragma in (
                "locking_mode=EXCLUSIVE", "journal_mode=WAL", "wal_autocheckpoint=0", "synchronous=FULL",
                "cell_size_check=ON", "user_version", "integrity_check(1)",
            ):  # fmt: skip
                seen.append(database.execute(f"PRAGMA {pragma}").fetchall())
            if start == 0:
                database.execute("CREATE TABLE j (seq INTEGER PRIMARY KEY, at REAL, record TEXT, blob BLOB)").fetchall()
                database.execute("PRAGMA user_version=3").fetchall()
            database.execute("BEGIN IMMEDIATE").fetchall()
            database.execute("INSERT INTO j (at, record) VALUES (?, ?)", (0.5, "lost")).fetchall()
            seen.append(database.in_transaction)
            database.execute("ROLLBACK").fetchall()
            for _ in range(300):
                database.execute("INSERT INTO j (at, record, blob) VALUES (?, ?, ?)", (0.1, "ä" * 50, b"x")).fetchall()
            seen.append(database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall())
            seen.append(database.execute("SELECT count(*), max(seq), max(at), max(record) FROM j").fetchone())
            seen.append([_observed(lambda: database.execute("SELECT * FROM missing").fetchall(), "")])
    _write(path, "wb", b"no database at all, but long enough to be looked at" * 40)
    with contextlib.closing(disk.connect(path)) as database:
        seen.append(_observed(lambda: database.execute("PRAGMA integrity_check(1)").fetchall(), ""))
    return seen


def _disk_script(root: Path, disk: Disk) -> list[Any]:
    """What a state folder and a work folder do with their files."""
    folder, file = root / "folder", root / "folder" / "file"
    works: list[Callable[[], Any]] = [
        folder.mkdir,
        folder.mkdir,
        lambda: folder.mkdir(exist_ok=True),
        lambda: (root / "a" / "b").mkdir(parents=True),
        lambda: _write(file, "xb", b"abc", b"def"),
        lambda: _write(file, "xb", b"no"),
        lambda: _write(file, "ab", b"ghi"),
        file.read_bytes,
        lambda: _write(file, "wb", b"new"),
        lambda: file.stat().st_size,
        lambda: file.replace(folder / "other").name,
        file.exists,
        (folder / "missing").unlink,
        lambda: (folder / "missing").replace(folder / "other"),
        lambda: (folder / "missing").unlink(missing_ok=True),
        lambda: (folder / "other").write_text("text\n", encoding="utf-8"),
        lambda: (folder / "other").read_text("utf-8"),
        lambda: _append(disk, folder / "marks"),
        lambda: sorted(path.name for path in folder.iterdir()),
        lambda: sorted(path.name for path in folder.glob("o*")),
        lambda: [*(folder / "missing").glob("*")],
        lambda: [*(folder / "missing").iterdir()],
        lambda: [*(folder / "other").iterdir()],
        *(
            lambda path=path: (path.exists(), path.is_file(), path.is_dir())  # type: ignore[misc]
            for path in (root, folder, folder / "other", folder / "missing", folder / "other" / "below")
        ),
        lambda: disk.space(folder)[0] > disk.space(folder)[1] > 0,
        lambda: _database(disk, root / "a" / "db"),
        lambda: _lock_twice(disk, folder / "lock"),
        lambda: _cut(disk, folder / "cut"),
        lambda: _continue(folder / "part"),
        lambda: (folder / "part").replace(folder / "cut").read_bytes(),  # over another file
        lambda: (folder / "cut").replace(root / "a" / "cut").name,  # into another folder
        lambda: disk.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_EXCL),
        lambda: disk.open(folder / "missing", os.O_RDWR),
        lambda: _journal(disk, root / "a" / "journal"),
        (folder / "other").unlink,
        lambda: sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()),
    ]
    return [_observed(work, str(root)) for work in works]


def test_files_are_as_those_of_the_system() -> None:
    """Contents, names and errors; on the simulated disk nothing was lost, because the power was on."""

    async def simulated(boot: Boot) -> list[Any]:
        with tempfile.TemporaryDirectory() as folder:
            machine = Machine(boot.world, f"{folder}/machine")
            disk = VirtualDisk(boot, machine)
            SYSTEM.set(System(disk=disk))
            try:
                return _disk_script(DiskPath(machine.root), disk)
            finally:
                machine.close()

    with tempfile.TemporaryDirectory() as folder:
        real = _disk_script(Path(folder), REAL.disk)

    assert _simulated(simulated) == real


def _state_script(folder: Path) -> list[Any]:
    """The state folder itself, over three starts: journal, blobs, snapshots, collection."""
    seen: list[Any] = []
    for start in range(3):
        with State.open(folder) as state:
            if start == 0:
                state.begin({"rounds": 3})
            kept = state.put_blob((memoryview(b"kept" * 9),))
            seq = state.append(start + 0.5, {"event": "one", "start": start}, update=start, blob=kept)
            state.put_blob((memoryview(b"fresh%d" % start),))
            state.write_snapshot(seq, {"a": np.arange(3.0)}, {"start": start}, [kept])
            seen += [state.epoch, state.facts(), [(one.seq, one.at, one.record, one.blob) for one in state.entries()]]
            seen += [state.find(0) is not None, state.find(9), state.collect([kept]), state.verify_blob(kept)]
            seen += [[(one.seq, one.facts, one.blobs) for one in state.snapshots()]]
            seen += [float(state.load_snapshot(state.snapshots()[0])["a"].sum())]
            seen += [sorted(path.name for path in (folder / "blobs").iterdir())]
    _write(folder / "controller.db", "wb", b"x" * 8192)
    with pytest.raises(StateError) as refused:
        State.open(folder)
    return [*seen, str(refused.value).replace(str(folder), "")]


def test_a_state_folder_is_as_one_of_the_system() -> None:
    """With SQLite on the simulated disk and on the real one."""

    async def simulated(boot: Boot) -> list[Any]:
        with tempfile.TemporaryDirectory() as folder:
            machine = Machine(boot.world, f"{folder}/machine")
            SYSTEM.set(System(threads=SYSTEM.get().threads, disk=VirtualDisk(boot, machine)))
            try:
                return _state_script(DiskPath(f"{machine.root}/state"))
            finally:
                machine.close()

    with tempfile.TemporaryDirectory() as folder:
        real = _state_script(Path(folder, "state"))

    assert _simulated(simulated) == real


_TWICE = """
import sys
from pathlib import Path
from metis.deployment.controller.state import State
for _ in range(2):
    with State.open(Path(sys.argv[1])) as state:
        state.append(1.0, {"event": "one"})
"""


@pytest.mark.skipif(bool(strace_problem()), reason=str(strace_problem()))
def test_a_state_folder_syncs_what_it_does_on_the_system() -> None:
    """File by file: SQLite syncs the folder of a new WAL by itself, and relies on it."""

    async def simulated(boot: Boot) -> list[str]:
        with tempfile.TemporaryDirectory() as folder:
            machine = Machine(boot.world, f"{folder}/machine")
            SYSTEM.set(System(threads=SYSTEM.get().threads, disk=VirtualDisk(boot, machine)))
            synced: list[str] = []
            sync = machine.sync

            def listen(item: Any, path: str) -> None:
                synced.append(path[len(machine.below) :])
                sync(item, path)

            machine.sync = listen  # type: ignore[method-assign]
            try:
                for _ in range(2):
                    with State.open(DiskPath(f"{machine.root}/state")) as state:
                        state.append(1.0, {"event": "one"})
            finally:
                machine.close()
        return synced

    with tempfile.TemporaryDirectory() as folder:
        below = f"{os.path.realpath(folder)}/"
        traced = subprocess.run(
            ["strace", "-f", "-y", "-e", "trace=fsync,fdatasync", sys.executable, "-c", _TWICE, f"{below}state"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
    real = [path[len(below) :] for path in re.findall(r"sync\(\d+<([^>]*)>", traced.stderr)]

    assert _simulated(simulated) == real
    assert "state/controller.db-wal" in real


def test_what_was_synced_survives_and_what_was_not_may_be_lost() -> None:
    """A file needs two syncs: of its content and of the name in its folder."""

    async def lost(boot: Boot) -> set[tuple[bool, bool]]:
        found = set()
        for _ in range(40):
            with tempfile.TemporaryDirectory() as folder:
                machine = Machine(boot.world, f"{folder}/machine")
                disk, root = VirtualDisk(boot, machine), DiskPath(machine.root)
                try:
                    for name in ("synced", "unsynced"):
                        descriptor = disk.open(root / name, os.O_RDWR | os.O_CREAT)
                        disk.pwrite(descriptor, name.encode(), 0)
                        if name == "synced":
                            disk.fsync(descriptor)
                            top = disk.open(root, os.O_RDONLY)
                            disk.fsync(top)
                            disk.close(top)
                        disk.close(descriptor)
                    machine.lose_power(boot.rng)
                    contents = {path.name: path.read_bytes() for path in Path(machine.root).iterdir()}
                finally:
                    machine.close()
            found.add((contents.get("synced") == b"synced", contents.get("unsynced") == b"unsynced"))
        return found

    assert _simulated(lost) == {(True, True), (True, False)}
