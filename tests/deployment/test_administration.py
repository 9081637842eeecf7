"""Remote administration over the real wire: roles, pause, stop, extension, members, and what is audited."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import json
import shutil
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import grpc
import pytest

from deployment.consortium import Consortium
from deployment.federations import Served, served
from deployment.scripted_learner import HonestLearner, ScriptedLearner
from metis.core.policies import async_fedavg, semisync_fedavg, sync_fedavg
from metis.core.policy import Policy
from metis.core.stop import StopRule
from metis.deployment.administrator import RemoteController, StartedAgain
from metis.deployment.controller.audit import AUDIT, read_audit
from metis.deployment.controller.callers import administrator_by_certificate, identify_by_certificate
from metis.deployment.controller.settings import DeploymentSettings
from metis.deployment.mirror import Mirror
from metis.deployment.security.identity import Revocations, channel_credentials, server_credentials
from metis.deployment.wire import wire_pb2 as pb
from metis.deployment.wire.protocol import ADMINISTRATION, PROTOCOL
from metis.errors import ConfigError
from metis.reporting.dashboard.follow import setting_of
from metis.reporting.dashboard.view import RunView
from metis.runs.storage import load_model

_T = TypeVar("_T")
PROMPT = DeploymentSettings(expected=2, lease=20.0, heartbeat=1.0, linger=600.0)
ALONE = DeploymentSettings(lease=20.0, heartbeat=1.0)


def awaited(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A test that is a coroutine."""

    @functools.wraps(test)
    def run(*arguments: Any, **options: Any) -> None:
        asyncio.run(test(*arguments, **options))

    return run


async def ask(address: str, question: Callable[[RemoteController], _T], identity: Path | None = None) -> _T:
    """What an administrator on another machine would be answered."""

    def call() -> _T:
        with RemoteController.dial(address, identity) as remote:
            return question(remote)

    return await asyncio.to_thread(call)


async def command(federation: Served, name: str, **arguments: Any) -> dict[str, Any]:
    return await ask(federation.address, lambda remote: remote.command(name, **arguments))


def kinds(folder: Path) -> list[str]:
    """Of the audit log, whose chain must be whole."""
    lines = list(read_audit(folder / AUDIT))
    assert all(line.problem is None for line in lines)
    return [line.record.get("command") or line.record["kind"] for line in lines]


# --- roles ------------------------------------------------------------------------------------


@awaited
async def test_roles_by_certificate(tmp_path: Path) -> None:
    """An admin may do everything, a viewer only read, a learner nothing here; an admin is not a learner."""
    ours = Consortium(tmp_path / "ours")
    main, kim = ours.controller(), ours.kit("kim", "admin")
    ours.kit("vera", "viewer"), ours.kit("l0")
    revocations = Revocations(main)
    async with served(
        tmp_path / "state", sync_fedavg(1), StopRule(rounds=3),
        credentials=server_credentials(main), identify=identify_by_certificate(revocations),
        administrators=administrator_by_certificate(revocations),
    ) as federation:  # fmt: skip
        where = federation.address.replace("127.0.0.1", "localhost")

        async def allowed(who: str, name: str, **arguments: Any) -> str:
            try:
                await ask(where, lambda remote: remote.command(name, **arguments), tmp_path / "ours" / who)
                return "yes"
            except ConfigError as problem:
                return str(problem)

        for reading in ("status", "members", "rounds", "log", "setting"):
            assert await allowed("vera", reading) == "yes"
            assert await allowed("kim", reading) == "yes"
        for changing in ("pause", "resume", "add", "extend", "stop", "model"):
            assert f"viewer 'vera' may only read; '{changing}' needs the role admin" in await allowed("vera", changing)
        assert await allowed("kim", "pause") == "yes"
        assert "belongs to learner 'l0'; give the kit of an admin or a viewer" in await allowed("l0", "status")

        as_learner = ScriptedLearner("kim", where, credentials=channel_credentials(kim))
        async with as_learner:
            with contextlib.suppress(grpc.aio.AioRpcError):  # it may be refused before its greeting is written
                await as_learner.greet()
            assert await as_learner.ended() == grpc.StatusCode.PERMISSION_DENIED

        async with ScriptedLearner("l0", where, credentials=channel_credentials(ours.kit("l0"))) as learner:
            call = learner.channel.unary_unary("/metis.Administration/Command")
            with pytest.raises(grpc.aio.AioRpcError) as refusal:
                await call(b"")
            assert refusal.value.code() == grpc.StatusCode.PERMISSION_DENIED
            assert "is that of a learner; administration needs one of the role admin or viewer" in str(refusal.value)

        ours.authority.revoke("kim")
        shutil.copy(tmp_path / "ours" / "ca" / "revoked.pem", main.folder)
        assert "was revoked" in await allowed("kim", "status")
    found = kinds(tmp_path / "state")
    assert found.count("pause") == 1 and "refused" in found


_HEAD = pb.AdminRequest(protocol=PROTOCOL).SerializeToString()


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"\xff\xff", grpc.StatusCode.INVALID_ARGUMENT),
        (b"", grpc.StatusCode.FAILED_PRECONDITION),
        (_HEAD + b"\x12\x03odd", grpc.StatusCode.UNIMPLEMENTED),
        (_HEAD + b"\x12\x06status\x1a\x02[]", grpc.StatusCode.INVALID_ARGUMENT),
        (_HEAD + b"\x12\x06extend\x1a\x0e" + b'{"rounds": -1}', grpc.StatusCode.INVALID_ARGUMENT),
        (_HEAD + b"\x12\x06extend", grpc.StatusCode.INVALID_ARGUMENT),
        (_HEAD + b"\x12\x03add\x1a\x0f" + b'{"learner": ""}', grpc.StatusCode.INVALID_ARGUMENT),
        (_HEAD + b"\x12\x05model\x1a\x0f" + b'{"version": 99}', grpc.StatusCode.NOT_FOUND),
    ],
)
@awaited
async def test_nonsense_is_refused_in_one_sentence(tmp_path: Path, content: bytes, code: grpc.StatusCode) -> None:
    """Whatever arrives: a status and a reason, and the controller goes on."""
    async with served(tmp_path, sync_fedavg(1), StopRule(rounds=3)) as federation:
        async with grpc.aio.insecure_channel(federation.address) as channel:
            for role, expected in (("admin", code), ("learner", grpc.StatusCode.UNAUTHENTICATED)):
                with pytest.raises(grpc.aio.AioRpcError) as refusal:
                    await channel.unary_unary("/metis.Administration/Command")(
                        content, metadata=(("metis-role", role),)
                    )
                assert refusal.value.code() == expected and refusal.value.details()
        assert (await command(federation, "status"))["state"] == "waiting for learners"


@awaited
async def test_calls_are_limited(tmp_path: Path) -> None:
    """One that calls without end is refused after a while, and may come back later."""
    async with served(tmp_path, sync_fedavg(1), StopRule(rounds=3)) as federation:

        def many(remote: RemoteController) -> str:
            try:
                for _ in range(5000):
                    remote.command("members")
            except ConfigError as problem:
                return str(problem)
            return "all were answered"

        assert "calls too often" in await ask(federation.address, many)


# --- pause, stop, extension -------------------------------------------------------------------


@pytest.mark.parametrize("policy", [sync_fedavg(1), semisync_fedavg(2), async_fedavg(1)])
@awaited
async def test_pausing_and_resuming(tmp_path: Path, policy: Policy) -> None:
    """In a pause what is being trained is taken and nothing new is sent; the run's clock stands still; also after a
    restart of the controller; and it goes on to its end."""
    async with served(tmp_path, policy, StopRule(update_requests=24), terms=PROMPT) as federation:
        learners = federation.learners(2)
        running = [asyncio.create_task(learner.run()) for learner in learners]
        await federation.until(lambda: federation.process._view.standing.version >= 2)
        assert "paused" in (await command(federation, "pause"))["text"]
        assert (await command(federation, "pause"))["text"] == "the federation is paused already"
        await federation.until(lambda: not federation.process._view.tasks)
        before = await command(federation, "status")
        assert before["state"] == "paused" and before["on_hold"]
        tasks = [len(learner.tasks) for learner in learners]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    async with served(tmp_path, policy, StopRule(update_requests=24), terms=PROMPT) as federation:
        again = federation.learners(2)
        running = [asyncio.create_task(learner.run()) for learner in again]
        await federation.until(lambda: len(federation.process._sessions.open) == 2)
        status = await command(federation, "status")
        assert status["state"] == "paused" and status["seconds"] <= before["seconds"] + 5  # it stood still
        assert not any(learner.tasks for learner in again) and any(tasks)
        assert (await command(federation, "resume"))["text"] == "resumed"
        assert (await command(federation, "resume"))["text"] == "the federation is not paused"
        await asyncio.gather(*running)
        assert all(learner.final is not None for learner in again)
    found = kinds(tmp_path)
    assert found.count("pause") == 2 and found.count("controller_started") == 2 == found.count("controller_stopped")


@awaited
async def test_an_update_that_was_trained_in_a_pause_has_its_true_speed(tmp_path: Path) -> None:
    """The clock of the run stood still, the learner did not: its seconds are not cut to those of the clock."""
    async with served(tmp_path, async_fedavg(1), StopRule(rounds=5), terms=DeploymentSettings()) as federation:
        async with federation.scripted() as learner:
            await learner.join()
            task = await learner.task()
            await command(federation, "pause")
            process = federation.process
            assert process._time.clock._held_since is not None
            process._time.clock._held_since -= 100.0  # as if the pause had lasted so long
            receipt = await learner.hand_in(task.number, steps=10, seconds=90.0, time_per_batch=9.0)
            assert receipt.verdict == 0
            await federation.until(lambda: not process._view.tasks)
            status = await command(federation, "status")
            assert status["learners"][0]["time_per_batch"] == pytest.approx(9.0)
            assert status["seconds"] < 50


@awaited
async def test_stopping_remotely(tmp_path: Path) -> None:
    """Everybody gets the final model; a second stop says that it has ended."""
    async with served(tmp_path, async_fedavg(1), StopRule(rounds=10**6), terms=PROMPT) as federation:
        learners = federation.learners(2)
        running = [asyncio.create_task(learner.run()) for learner in learners]
        await federation.until(lambda: federation.process._view.standing.version >= 3)
        assert "stopped" in (await command(federation, "stop"))["text"]
        await asyncio.gather(*running)
        assert all(learner.final is not None for learner in learners)
    assert federation.process.result.finish_reason == "stopped by admin 'local'"


@awaited
async def test_a_finished_federation_is_extended_while_its_controller_lingers(tmp_path: Path) -> None:
    """Its learners are started again and train on; a rule that leaves nothing is refused with the reason."""
    async with served(tmp_path, sync_fedavg(1), StopRule(rounds=2), terms=PROMPT) as federation:
        async with federation.scripted("l0") as stays:  # so that the controller lingers
            first = [HonestLearner(name, federation.address, federation.process.layout) for name in ("a", "b")]
            running = [asyncio.create_task(learner.run()) for learner in first]
            await stays.greet()
            await asyncio.gather(*running)
            await federation.until(lambda: hasattr(federation.process, "result"))
            with pytest.raises(ConfigError, match="nothing left to do: 2 rounds are done; raise that limit as well"):
                await command(federation, "extend", seconds=1e6)
            assert (await command(federation, "extend", rounds=4))["text"] == (
                "the federation goes on until 4 rounds are done"
            )
            again = [HonestLearner(name, federation.address, federation.process.layout) for name in ("a", "b")]
            await asyncio.gather(*(learner.run() for learner in again))
        await asyncio.wait_for(federation.serving, 600)
    assert federation.process.result.finish_reason == "4 rounds are done"
    assert federation.process._view.standing.version == 4


@awaited
async def test_a_finished_federation_is_extended_by_its_file(tmp_path: Path) -> None:
    """Started again with another [stop] it goes on; a rule that an administrator has set stays until the file changes
    again."""
    for rounds, expected in ((2, 2), (4, 4), (4, 4)):
        async with served(
            tmp_path, sync_fedavg(1), StopRule(rounds=rounds), begun=StopRule(rounds=2), terms=ALONE
        ) as federation:
            (learner,) = federation.learners(1)
            await learner.run()
            await asyncio.wait_for(federation.serving, 600)
            assert federation.process._view.standing.version == expected
    async with served(
        tmp_path, sync_fedavg(1), StopRule(rounds=5), begun=StopRule(rounds=2), terms=ALONE
    ) as federation:
        with pytest.raises(ConfigError, match="nothing left to do: 4 rounds are done; limits count from"):
            await command(federation, "extend", rounds=3)
        await command(federation, "extend", rounds=6)
    async with served(
        tmp_path, sync_fedavg(1), StopRule(rounds=5), begun=StopRule(rounds=2), terms=ALONE
    ) as federation:
        (learner,) = federation.learners(1)
        await learner.run()
        await asyncio.wait_for(federation.serving, 600)
        assert federation.process._view.standing.version == 6


# --- members ----------------------------------------------------------------------------------


@awaited
async def test_members_come_and_go_while_it_runs(tmp_path: Path) -> None:
    """A removed one is sent away at once and refused afterwards; an added one joins, with its own settings; both
    outlive a restart."""
    members, policy = ("l0", "l1"), sync_fedavg(1)
    async with served(tmp_path, policy, StopRule(rounds=50), members=members, terms=PROMPT) as federation:
        async with federation.scripted("l0") as first, federation.scripted("l1") as second:
            await first.join()
            await second.join()
            task, _ = await first.task(), await second.task()
            assert "'l1' was removed" in (await command(federation, "remove", learner="l1"))["text"]
            farewell = await second.expect("farewell")
            assert farewell.reason == "learner 'l1' was removed from this federation"
            await first.hand_in(task.number)
            await first.task()  # nobody waits for the other one
        async with federation.scripted("l1") as second:
            await second.greet()
            assert await second.ended() == grpc.StatusCode.PERMISSION_DENIED
        assert (await command(federation, "remove", learner="l1"))["text"] == "'l1' is not a member"
        await command(federation, "add", learner="l7", watts=300, idle_watts=20)
    async with served(tmp_path, policy, StopRule(rounds=50), members=members, terms=PROMPT) as federation:
        listed = await command(federation, "members")
        assert listed["members"] == [{"name": "l0", "added": False}, {"name": "l7", "added": True}]
        assert listed["removed"] == ["l1"]
        async with federation.scripted("l7") as third, federation.scripted("l1") as second:
            welcome = await third.connect()
            assert (welcome.index, json.loads(welcome.settings)) == (2, {"added": "l7"})
            await third.ready()
            await federation.until(lambda: "l7" in federation.process._presence)
            await command(federation, "add", learner="l1")
            assert (await second.connect()).index == 1
    assert {"member_added", "member_removed", "admitted"} <= set(kinds(tmp_path))


@awaited
async def test_a_removed_member_takes_its_contribution_along(tmp_path: Path) -> None:
    """With `withdraw`, from the mixture of a cached policy."""
    async with served(tmp_path, async_fedavg(1), StopRule(rounds=10**6), terms=PROMPT) as federation:
        running = [asyncio.create_task(learner.run()) for learner in federation.learners(2)]
        await federation.until(lambda: federation.process._view.standing.version >= 4)
        await command(federation, "pause")
        await federation.until(lambda: not federation.process._view.tasks)
        community = federation.process._writer.controller.community
        assert community.contributors == 2
        text = (await command(federation, "remove", learner="l1", withdraw=True))["text"]
        assert "is taken out of the community model" in text and community.contributors == 1
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


# --- reading ----------------------------------------------------------------------------------


@awaited
async def test_models_trace_log_and_rounds_are_read(tmp_path: Path) -> None:
    """A model arrives whole as a safetensors file; the trace is that of the folder; round 2 is explained."""
    async with served(tmp_path / "state", sync_fedavg(1), StopRule(rounds=30), terms=PROMPT) as federation:
        running = [asyncio.create_task(learner.run()) for learner in federation.learners(2)]
        await federation.until(lambda: federation.process._view.standing.version >= 3)
        await command(federation, "pause")
        await federation.until(lambda: not federation.process._view.tasks)
        out = tmp_path / "model.safetensors"
        about = await ask(federation.address, lambda remote: remote.save_model(out, None, False))
        model = load_model(out)
        assert about["version"] == federation.process._view.standing.version
        current = federation.process._writer.controller.community.model
        assert model.sha256() == current.network.sha256() and not list(tmp_path.glob("*.part*"))

        epoch = (await command(federation, "setting"))["start"]
        trace = await ask(federation.address, lambda remote: b"".join(remote.read("trace", start=epoch)))
        assert trace == (tmp_path / "state" / "run" / "events.jsonl").read_bytes()
        tail = await ask(federation.address, lambda remote: b"".join(remote.read("trace", start=epoch, offset=100)))
        assert tail == trace[100:]
        with pytest.raises(StartedAgain):
            await ask(federation.address, lambda remote: b"".join(remote.read("trace", start=epoch + 1)))

        explained = await command(federation, "rounds", round=2)
        assert explained["round"]["round"] == 2 and "was the last to hand in" in " ".join(explained["text"])
        with pytest.raises(ConfigError, match="there is no round 99; there are rounds 1 to"):
            await command(federation, "rounds", round=99)
        lines = (await command(federation, "log", lines=5))["lines"]
        assert len(lines) == 5 and any("paused" in line["text"] for line in lines)
        status = await command(federation, "status")
        assert status["stop"]["rounds"] == 30 and status["left"]["rounds"] == 30 - status["version"]
        assert all(learner["bytes_per_second"] > 0 and learner["drops"] == 0 for learner in status["learners"])
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    sent = [line.record for line in read_audit(tmp_path / "state" / AUDIT) if line.record["kind"] == "model_sent"]
    assert {record["learner"] for record in sent} == {"l0", "l1"}
    assert len({(record["learner"], record["version"]) for record in sent}) == len(sent)
    assert all(len(record["sha256"]) == hashlib.sha256().digest_size * 2 for record in sent)


async def _mirrored(here: Served, mirror: Mirror, copy: Path) -> None:
    """Let it train, pause it, and wait until the copy is what the controller has written."""
    running = [asyncio.create_task(learner.run()) for learner in here.learners(2)]
    begun = here.process._view.standing.version
    await here.until(lambda: here.process._view.standing.version >= begun + 2)
    await asyncio.to_thread(mirror.update)  # in the middle of it
    await command(here, "pause")
    await here.until(lambda: not here.process._view.tasks)
    trace = here.process.folder / "events.jsonl"
    while (copy / "events.jsonl").read_bytes() != trace.read_bytes():
        await asyncio.to_thread(mirror.update)
    view = RunView(setting_of(copy))
    view.feed(trace.read_bytes().splitlines())
    assert view.damage is None and view.version == here.process._view.standing.version
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


@awaited
async def test_the_dashboard_of_a_remote_federation(tmp_path: Path) -> None:
    """Its trace is copied while it grows, and from the beginning when the controller is started again."""
    copy, rule = tmp_path / "copy", StopRule(rounds=10**6)
    copy.mkdir()
    async with served(tmp_path / "state", sync_fedavg(1), rule, terms=PROMPT) as here:
        first = await asyncio.to_thread(RemoteController.dial, here.address, None)
        mirror = await asyncio.to_thread(Mirror, first, copy)
        await _mirrored(here, mirror, copy)
        await command(here, "resume")
    first.__exit__()
    async with served(tmp_path / "state", sync_fedavg(1), rule, terms=PROMPT) as here:
        with await asyncio.to_thread(RemoteController.dial, here.address, None) as second:
            mirror._remote = second  # the same address, but for the port, which a test cannot keep
            await _mirrored(here, mirror, copy)


UNUSABLE = ("[" * 4000, '{"a": ' * 1000, r'{"learner": "\ud800"}', '{"seconds": true}', "null", '{"seconds": 1e300}')


@awaited
async def test_arguments_that_nobody_can_use_are_refused_in_a_sentence(tmp_path: Path) -> None:
    """Deep nesting, half a surrogate pair, a truth value as a number: none is an exception of the controller."""
    async with served(tmp_path, async_fedavg(1), StopRule(rounds=5), terms=PROMPT) as federation:
        async with grpc.aio.insecure_channel(federation.address) as channel:
            call: Any = channel.unary_unary(f"/{ADMINISTRATION}/Command")
            for arguments in UNUSABLE:
                request = pb.AdminRequest(protocol=PROTOCOL, command="extend", arguments=arguments)
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await call(request.SerializeToString(), metadata=(("metis-role", "admin"),))
                assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT, arguments[:40]
