"""The site's operator decides: which federation, when, how much, and what is reported."""

from __future__ import annotations

import asyncio
import contextlib
import math
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from datetime import datetime, time, timedelta
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("grpc")

from deployment.scripted_controller import ScriptedController, Stream
from deployment.tiny import settings, write_site
from metis.deployment.learner import outgoing
from metis.deployment.learner.absence import Absence
from metis.deployment.learner.process import LearnerProcess
from metis.deployment.learner.site_policy import EXAMPLE, PolicyFile, SitePolicy, parsed
from metis.deployment.route import Route
from metis.deployment.wire import wire_pb2 as pb
from metis.deployment.wire.causes import RULES, sentence
from metis.errors import ConfigError
from metis.net import host_and_port

LIGHT = [sys.executable, str(Path(__file__).with_name("light_learner.py"))]


def policy(**rules: Any) -> SitePolicy:
    return parsed(rules, "site-policy.toml")


# --- the file ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("max_task_second = 3", "site-policy.toml: max_task_second: unknown key; did you mean 'max_task_seconds'?"),
        ("hours = '19:00-07:00'", "hours is '19:00-07:00'; it must be a list of windows such as \"19:00-07:00\""),
        ("hours = ['7:00-19:00']", "hours is ['7:00-19:00']; it must be"),
        ("hours = ['25:00-26:00']", "it must be a list of windows"),
        ("hours = ['07:00-07:00']", "it must be a list of windows"),
        ("max_task_seconds = 0", "max_task_seconds is 0; it must be a number of seconds above 0"),
        ("max_task_steps = 1.5", "max_task_steps is 1.5; it must be a whole number of 1 or more"),
        ("min_members = true", "min_members is True; it must be a whole number"),
        ("report_metrics = 0", "report_metrics is 0; it must be true or false"),
        ("metric_decimals = 16", "metric_decimals is 16; it must be a whole number from 0 to 15"),
        ("controller = ''", "controller is ''; it must be a host, or HOST:PORT"),
        ("[task]\nseconds = 3", "site-policy.toml: task: unknown key;"),
        ("hours = ", "site-policy.toml: "),
        (
            'peers = ["a", "b", "c"]',
            "site-policy.toml: peers names 3 learners; with colluders = 0 a masked sum needs 4 or more, this site "
            "included",
        ),
        ('peers = ["a", "b", "c", "c"]', "peers names 3 learners; with colluders = 0 a masked sum needs 4 or more"),
        ('peers = ["a", "b", "c", "d"]\ncolluders = 1', "with colluders = 1 a masked sum needs 5 or more"),
        (
            'peers = ["a", "b", "c", "d"]\nmin_masked_members = 5',
            "site-policy.toml: min_masked_members is 5, and peers names only 4",
        ),
    ],
)
def test_a_wrong_rule_is_one_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    """With the key, what it is and what it may be: a rule that is misread would be no rule."""
    path = tmp_path / "site-policy.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as problem:
        PolicyFile(path).read()
    assert sentence in str(problem.value)


def test_the_example_is_a_policy_as_it_stands_and_with_every_rule_set(tmp_path: Path) -> None:
    """It has each rule once, commented out."""
    path = tmp_path / "site-policy.toml"
    path.write_text(EXAMPLE)
    assert PolicyFile(path).read() == SitePolicy()
    path.write_text("\n".join(line.removeprefix("# ") for line in EXAMPLE.splitlines() if " = " in line))
    assert PolicyFile(path).read().rules().keys() == SitePolicy.__dataclass_fields__.keys()


def test_a_policy_that_vanishes_is_not_no_policy(tmp_path: Path) -> None:
    """The one in the kit counts from the moment on that it exists; the one that was named must exist."""
    path = tmp_path / "site-policy.toml"
    assert PolicyFile(None).read() == PolicyFile(path, required=False).read() == SitePolicy()
    with pytest.raises(ConfigError, match="there is no site policy"):
        PolicyFile(path).read()
    file = PolicyFile(path, required=False)
    path.write_text("min_members = 3")
    assert file.read().min_members == 3
    path.unlink()
    _, refusal = file.ask()
    assert refusal is not None and refusal.rule == pb.Cause.UNREADABLE


# --- the rules --------------------------------------------------------------------------------------


def test_hours_may_go_over_midnight() -> None:
    """The end does not belong to a window."""
    rules = policy(hours=["19:00-07:00", "12:00-13:00"])
    allowed = [time(19), time(23, 59), time(0), time(6, 59), time(12, 30)]
    refused = [time(7), time(11, 59), time(13), time(18, 59)]
    assert [rules.refuses_hour(now) for now in allowed] == [None] * 5
    for now in refused:
        refusal = rules.refuses_hour(now)
        assert refusal is not None and refusal.rule == pb.Cause.HOURS
    assert "this site trains 19:00-07:00 and 12:00-13:00 only" in str(rules.refuses_hour(time(7)))


def test_each_rule_refuses_what_is_beyond_it_and_nothing_else() -> None:
    """At the limit it is allowed; every rule has a name that the controller can show."""
    task = pb.Task(number=1, steps=100, seconds=60.0, bytes=1000)
    for key, limit, rule in [
        ("max_task_steps", 99, pb.Cause.TASK_STEPS),
        ("max_task_seconds", 59.5, pb.Cause.TASK_SECONDS),
        ("max_download_bytes", 999, pb.Cause.DOWNLOAD),
    ]:
        refusal = policy(**{key: limit}).refuses_task(task)
        assert refusal is not None and refusal.rule == rule
        assert key in refusal.text
    assert policy(max_task_steps=100, max_task_seconds=60, max_download_bytes=1000).refuses_task(task) is None
    assert policy(max_task_steps=10**9).refuses_task(pb.Task(seconds=1.0)) is not None  # any number of steps
    allowed = policy(controller="a.example.org", federation="1f0c:93aa", min_members=3)
    assert allowed.refuses_controller("a.example.org:443") is None
    assert policy(controller="a.example.org:443").refuses_controller("a.example.org:443") is None
    assert allowed.refuses_controller("b.example.org:443") is not None
    assert allowed.refuses_federation("r", "1f0c:93aa", 3) is None
    assert policy(federation="r").refuses_federation("r", None, 1) is None
    few, other = allowed.refuses_federation("r", "1f0c:93aa", 2), allowed.refuses_federation("r", None, 3)
    assert few is not None and other is not None
    assert (few.rule, other.rule) == (pb.Cause.MEMBERS, pb.Cause.FEDERATION)
    assert set(RULES) == set(pb.Cause.Rule.values()) - {pb.Cause.NO_RULE}
    for known, name in RULES.items():
        assert sentence(pb.Cause(kind=pb.Cause.SITE_POLICY, rule=known)).endswith(f"(rule {name})")


def test_metrics_leave_as_coarsely_as_the_site_says_or_not_at_all() -> None:
    """Also the loss of training; names that the federation does not know never leave."""
    answer = {"metrics": {"loss": 0.123456, "accuracy": 0.987654, "of ward 7": 1.0}, "examples": 40}
    known = {"loss", "accuracy"}
    sent = outgoing.evaluation(3, answer, known, policy(metric_decimals=2))
    assert sent is not None and dict(sent.metrics) == {"loss": 0.12, "accuracy": 0.99}
    assert outgoing.evaluation(3, answer, known, policy(min_metric_examples=41)) is None
    exact = outgoing.evaluation(3, answer | {"sums": {"accuracy": ["mean", [39.50616, 40.0]]}}, known, policy())
    coarse = outgoing.evaluation(
        3, answer | {"sums": {"accuracy": ["mean", [39.50616, 40.0]]}}, known, policy(metric_decimals=9)
    )
    wrong = outgoing.evaluation(3, answer | {"sums": {"accuracy": ["mean", [38.0, 40.0]]}}, known, policy())
    assert exact is not None and list(exact.sums["accuracy"].values) == [39.50616, 40.0]
    assert coarse is not None and wrong is not None
    assert not coarse.sums, "sums are exact: they stay where metrics are rounded"
    assert wrong.metrics and not wrong.sums, "nothing is sent that the controller would refuse"
    assert outgoing.evaluation(3, answer, known, policy(report_metrics=False)) is None
    assert outgoing.evaluation(3, answer, {"auc"}, policy()) is None
    assert outgoing.loss(0.123456, 40, policy(metric_decimals=1)) == 0.1
    assert math.isnan(outgoing.loss(0.1, 40, policy(report_metrics=False)))
    assert math.isnan(outgoing.loss(0.1, 40, policy(min_metric_examples=41)))
    facts = {"examples": 9, "batch_size": 3, "evaluation_examples": 40, "fingerprint": "ab"}
    assert outgoing.ready(facts, policy()).evaluation_examples == 40
    assert outgoing.ready(facts, policy(report_metrics=False)).evaluation_examples == 0


def test_every_field_that_a_learner_sends_is_described() -> None:
    """Here, where the dry run reads it, and in the table of docs/secure.md; a new field fails this test."""

    def fields_of(descriptor: Any) -> set[str]:
        found = set()
        for field in descriptor.fields:
            inner = field.message_type
            if inner is None or inner.GetOptions().map_entry:
                found.add(f"{descriptor.name}.{field.name}")
            else:
                found |= fields_of(inner)
        return found

    sent = [fields_of(message.DESCRIPTOR) for message in (pb.FromLearner, pb.UploadPart, pb.ModelRequest)]
    assert set.union(*sent) == outgoing.FIELDS.keys()
    page = (Path(__file__).parents[2] / "docs" / "secure.md").read_text("utf-8")
    assert [name for name, meaning in outgoing.FIELDS.items() if f"| `{name}` | {meaning} |" not in page] == []


# --- in a learner -----------------------------------------------------------------------------------


@pytest.fixture
def scripted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ScriptedController:
    monkeypatch.setattr(Absence, "look_seconds", 0.02)
    site = write_site(tmp_path)
    return ScriptedController(site, settings(site), tmp_path)


Story = Callable[[ScriptedController, Path, list[tuple[str, str]]], Coroutine[Any, Any, None]]


def play(scripted: ScriptedController, folder: Path, rules: str, story: Story, **options: Any) -> None:
    """A learner with this policy and this controller."""
    path, lines = folder / "site-policy.toml", []  # type: tuple[Path, list[tuple[str, str]]]
    path.write_text(rules)

    @contextlib.asynccontextmanager
    async def learner() -> AsyncIterator[None]:
        process = LearnerProcess(
            Route(*host_and_port(scripted.address)), work=folder / "work", child=LIGHT, name="zurich",
            policy=PolicyFile(path), report=lambda *line: lines.append(line), **options,
        )  # fmt: skip
        running = asyncio.ensure_future(process.run())
        try:
            yield
        finally:
            process.stop()
            await running

    async def scene() -> None:
        async with scripted:
            async with learner():
                await asyncio.wait_for(story(scripted, path, lines), 300)

    asyncio.run(scene())


async def refused(stream: Stream, rule: Any, task: int) -> pb.Failed:
    failed: pb.Failed = await stream.expect("failed")
    assert (failed.task, failed.cause.kind, failed.cause.rule) == (task, pb.Cause.SITE_POLICY, rule)
    assert (await stream.expect("leaving")).cause == failed.cause
    await stream.ended.wait()
    return failed


def window(minutes: int) -> str:
    """An hour that begins in so many minutes."""
    begin = datetime.now() + timedelta(minutes=minutes)
    return f'hours = ["{begin:%H:%M}-{begin + timedelta(hours=1):%H:%M}"]'


def test_a_task_that_is_too_long_is_refused_and_an_edited_policy_counts_for_the_next(
    scripted: ScriptedController, tmp_path: Path
) -> None:
    """The learner leaves instead of being set aside, and comes back by itself when the policy has changed."""

    async def story(controller: ScriptedController, path: Path, lines: list[tuple[str, str]]) -> None:
        stream = await controller.ready()
        stream.send(task=controller.task(1, steps=5))
        failed = await refused(stream, pb.Cause.TASK_STEPS, 1)
        assert failed.steps == 0
        assert controller.streams.empty()  # it stays away while nothing has changed
        path.write_text("max_task_steps = 5")
        stream = await controller.ready()
        stream.send(task=controller.task(2, steps=5))
        await controller.receipts.get()
        path.write_text("max_task_stepps = 5")  # a policy that cannot be read allows nothing
        stream.send(task=controller.task(3, steps=5))
        await refused(stream, pb.Cause.UNREADABLE, 3)
        assert any("did you mean 'max_task_steps'" in text for kind, text in lines if kind == "failed")

    play(scripted, tmp_path, "max_task_steps = 4", story)


def test_outside_its_hours_a_learner_is_away_and_comes_back_when_they_begin(
    scripted: ScriptedController, tmp_path: Path
) -> None:
    """It does not even dial; what it trains when they end is given up."""

    async def story(controller: ScriptedController, path: Path, lines: list[tuple[str, str]]) -> None:
        while not any("staying away: it is " in text for _, text in lines):
            await asyncio.sleep(0.01)
        assert controller.streams.empty()
        path.write_text(window(-30))
        stream = await controller.ready()
        stream.send(task=controller.task(1, steps=1_000_000))
        while not any(beat.task == 1 for beat in await stream.beats(1)):
            pass
        path.write_text(window(30))
        await refused(stream, pb.Cause.HOURS, 1)
        path.write_text(window(-30))
        await controller.ready()

    play(scripted, tmp_path, window(30), story, pace=0.01)


def test_a_task_is_given_up_when_it_takes_too_long(scripted: ScriptedController, tmp_path: Path) -> None:
    """A number of steps does not say how long they take."""

    async def story(controller: ScriptedController, path: Path, lines: list[tuple[str, str]]) -> None:
        stream = await controller.ready()
        stream.send(task=controller.task(1, steps=1_000_000))
        await refused(stream, pb.Cause.TASK_SECONDS, 1)

    play(scripted, tmp_path, "max_task_seconds = 0.3", story, pace=0.01)


def test_a_federation_that_is_too_small_is_left_before_anything_is_said(
    scripted: ScriptedController, tmp_path: Path
) -> None:
    """No number of examples has left the site by then; another federation ends the learner."""

    async def story(controller: ScriptedController, path: Path, lines: list[tuple[str, str]]) -> None:
        stream = await controller.welcomed(members=2)
        assert (await stream.expect("leaving")).cause.rule == pb.Cause.MEMBERS
        await stream.ended.wait()
        path.write_text('federation = "of the neighbours"')
        stream = await controller.welcomed(members=3)
        assert (await stream.expect("leaving")).cause.rule == pb.Cause.FEDERATION
        while lines[-1][0] != "error":
            await asyncio.sleep(0.01)
        assert "is not the federation that this site allows" in lines[-1][1]

    play(scripted, tmp_path, "min_members = 3", story)


def test_another_controller_is_never_dialled(scripted: ScriptedController, tmp_path: Path) -> None:
    """The learner ends and says why."""

    async def story(controller: ScriptedController, path: Path, lines: list[tuple[str, str]]) -> None:
        while not lines:
            await asyncio.sleep(0.01)
        assert lines[0][0] == "error" and "is not the controller that this site allows" in lines[0][1]
        assert controller.streams.empty()

    play(scripted, tmp_path, 'controller = "federation.example.org"', story)
