"""A policy of Metis in a Flower deployment: the core's controller between a grid's messages and the wall clock.

    app = metis.flower.ServerApp(app, metis.semisync_fedavg(slowest_learner_epochs=1))

The ServerApp that is given runs as it is; only the loop of its strategy is another one: starting a strategy in it
starts the policy. The first call of each node says how many examples it has and how long a call takes, and is its
first contribution at the same time. A node whose ClientApp has `budget_mod` is sent one message a task, any other one
is called again with its own model until its budget is used up.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid, ServerApp as FlowerServerApp
from flwr.serverapp.strategy import Result, Strategy

from metis.core.controller import Controller
from metis.core.events import (
    Action,
    CommunityPublished,
    DeadlinePassed,
    Evaluated,
    Event,
    Finish,
    LearnerJoined,
    LearnerLeft,
    LearnerSetAside,
    LocalTask,
    SendTask,
    TaskFailed,
    UpdateRefused,
    UpdateRequest,
)
from metis.core.model import Model
from metis.core.policies import POLICIES
from metis.core.policy import Policy
from metis.core.stop import StopRule
from metis.core.timing import SHORTEST_BATCH
from metis.errors import ClientFailed, ConfigError, MetisError
from metis.flower.records import (
    BATCH_SIZE,
    ROUND,
    SECONDS,
    STEPS,
    TIME_PER_BATCH,
    arrays_of,
    content_with,
    examples_of,
    metrics_of,
    model_of,
    numbers_of,
    record_of,
)
from metis.learning.clients import layout_of
from metis.runs.run import Run
from metis.runs.setting import LearnerInfo, Setting
from metis.runs.trace import EVENTS, to_line

_PULL_SECONDS = 0.1  # between two looks for replies
_LOOK_SECONDS = 2.0  # between two looks at who is there
_log = logging.getLogger("flwr")


@dataclass
class _Node:
    """One SuperNode: what is known of it, and what it does now."""

    number: int
    examples: int = 0
    batch_size: int = 0
    aware: bool = False  # its ClientApp keeps budgets
    present: bool = False
    message: str | None = None  # that it has not answered yet
    sent_at: float = 0.0
    task: LocalTask | None = None
    base: Model | None = None  # of the task
    model: Model | None = None  # what it has trained so far
    steps: int = 0
    seconds: float = 0.0
    time_per_batch: float = math.nan
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"node-{self.number}"


class ServerApp(FlowerServerApp):  # type: ignore[misc]
    """A Flower ServerApp whose strategy is a policy of Metis.

    - `app`: the ServerApp that you have, with a main function; everything in it but the strategy's loop stays.
    - `policy`: a policy of Metis, or its name.
    - `seconds`: when to end, besides the rounds that the app starts its strategy with.
    - `learners`: how many nodes to begin with; by default as many as the strategy's min_available_nodes.
    - `out`: a folder for the run, which `metis report` reads.
    """

    def __init__(
        self,
        app: FlowerServerApp,
        policy: Policy | str,
        *,
        seconds: float | None = None,
        learners: int | None = None,
        out: str | Path | None = None,
    ) -> None:
        super().__init__()
        if getattr(app, "_main", None) is None:
            raise ConfigError(
                "metis.flower.ServerApp needs a ServerApp with a main function (@app.main()); one that is made of a "
                "server_fn has no place for a policy"
            )
        if isinstance(policy, str):
            policy = POLICIES.named(policy)()
        if policy.learner_layers or policy.secure_sum is not None or policy.baseline is not None:
            raise ConfigError(
                f"the policy '{policy.label}' has parts that run at learners, which are Flower's own here: leave them "
                "out"
            )
        self._app, self._policy = app, policy
        self._seconds, self._learners, self._out = seconds, learners, None if out is None else Path(out)

        @self.main()  # type: ignore[untyped-decorator]
        def main(grid: Grid, context: Context) -> None:
            with self._instead_of_strategies():
                app(grid, context)

    @contextlib.contextmanager
    def _instead_of_strategies(self) -> Iterator[None]:
        original = Strategy.start

        def start(
            strategy: Any,
            grid: Grid,
            initial_arrays: ArrayRecord,
            num_rounds: int = 3,
            timeout: float = 3600,
            train_config: ConfigRecord | None = None,
            evaluate_config: ConfigRecord | None = None,
            evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
        ) -> Result:
            runtime = Runtime(
                grid,
                self._policy,
                initial_arrays,
                StopRule(rounds=num_rounds, seconds=self._seconds),
                learners=self._learners or int(getattr(strategy, "min_available_nodes", 1)),
                names=(getattr(strategy, "arrayrecord_key", "arrays"), getattr(strategy, "configrecord_key", "config")),
                train_config=dict(train_config or {}),
                evaluate_config=dict(evaluate_config or {}),
                evaluate=evaluate_fn,
                evaluates=getattr(strategy, "fraction_evaluate", 1.0) > 0,
                ttl=timeout,
            )
            result = runtime.run()
            if self._out is not None:
                runtime.save(self._out)
            return result

        Strategy.start = start
        try:
            yield
        finally:
            Strategy.start = original


class Runtime:
    """The controller of the core over a grid, by the wall clock; `run` may be called once."""

    def __init__(
        self,
        grid: Grid,
        policy: Policy,
        initial_arrays: ArrayRecord,
        stop: StopRule,
        *,
        learners: int,
        names: tuple[str, str] = ("arrays", "config"),
        train_config: dict[str, Any] | None = None,
        evaluate_config: dict[str, Any] | None = None,
        evaluate: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
        evaluates: bool = True,
        ttl: float = 3600.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._grid, self._policy, self._ttl = grid, policy, ttl
        self._clock, self._sleep = clock, sleep
        arrays = arrays_of(RecordDict({names[0]: initial_arrays}))
        self._initial = Model.from_tensors(arrays, layout_of(arrays, "the Flower app"))
        self._train = RecordDict({names[0]: initial_arrays, names[1]: ConfigRecord(train_config or {})})
        self._evaluation = RecordDict({names[0]: initial_arrays, names[1]: ConfigRecord(evaluate_config or {})})
        self._evaluate, self._evaluates = evaluate, evaluates
        self.controller = Controller(policy, self._initial, stop=stop, learners_expected=learners)
        self._expected = learners
        self._nodes: dict[int, _Node] = {}
        self._by_name: dict[str, _Node] = {}
        self._open: dict[str, _Node] = {}  # by message
        self._looked = -math.inf
        self._began = 0.0
        self.result = Result()
        self.events: list[tuple[float, Event | Action]] = []
        self._trained: dict[str, dict[str, float]] = {}  # what nodes reported of the current round

    @property
    def now(self) -> float:
        return self._clock() - self._began

    def run(self) -> Result:
        """Until the controller finishes; then the nodes measure the final model, if the app wants them to."""
        self._began = self._clock()
        self._measure(0, self._initial)
        while not self.controller.finished:
            self._look()
            self._take_replies()
            if self.controller.deadline <= self.now:
                self._handle(DeadlinePassed(), self.now)
            wait = min(_PULL_SECONDS, max(0.0, self.controller.deadline - self.now))
            if not self.controller.finished:
                self._sleep(wait)
        final = self.controller.community.model
        self.result.arrays = record_of(final)
        if self._evaluates:
            self._measure_at_nodes(final)
        return self.result

    # --- nodes ----------------------------------------------------------------------------------

    def _look(self) -> None:
        """Who is there; somebody new is called once before it joins."""
        if self.now - self._looked < _LOOK_SECONDS:
            return
        self._looked = self.now
        there = {int(number) for number in self._grid.get_node_ids()}
        if not self.controller.started and len(there) < self._expected:
            return  # the first calls of all begin together
        for number in there - self._nodes.keys():
            node = self._nodes[number] = _Node(number)
            self._by_name[node.name] = node
            node.present = True
            self._call(node, self._initial, 0, math.inf)
        for node in self._nodes.values():
            if node.present and node.number not in there:
                node.present, node.message, node.task = False, None, None
                if node.examples:
                    self._handle(LearnerLeft(node.name), self.now)
            elif not node.present and node.number in there:
                node.present = True
                if node.examples:
                    self._handle(LearnerJoined(node.name, node.examples, node.batch_size), self.now)
                else:
                    self._call(node, self._initial, 0, math.inf)

    def _call(self, node: _Node, model: Model, steps: int, seconds: float) -> None:
        config = {
            ROUND: self.controller.community.stamp.version + 1,
            STEPS: steps,
            SECONDS: min(seconds, 1e9),
        }
        content = content_with(self._train, model, config)
        message = Message(content, dst_node_id=node.number, message_type="train", ttl=self._ttl)
        node.sent_at = self.now
        (identity,) = self._grid.push_messages([message])
        node.message = identity
        self._open[identity] = node

    def _take_replies(self) -> None:
        if not self._open:
            return
        for reply in self._grid.pull_messages(list(self._open)):
            node = self._open.pop(reply.metadata.reply_to_message_id, None)
            if node is None or node.message != reply.metadata.reply_to_message_id or self.controller.finished:
                continue  # of a node that has left meanwhile, or too late
            node.message = None
            try:
                self._take(node, reply)
            except MetisError as problem:
                self._failed(node, str(problem))

    def _take(self, node: _Node, reply: Message) -> None:
        if reply.has_error():
            raise ClientFailed(f"{node.name} failed: {reply.error.reason or 'without a reason'}")
        now = self.now
        model, numbers = model_of(reply.content, self._initial.layout), numbers_of(reply)
        took = max(now - node.sent_at, SHORTEST_BATCH)
        node.metrics = metrics_of(numbers)
        node.aware = STEPS in numbers
        made = max(1, int(numbers[STEPS])) if node.aware else 1
        per_batch = numbers.get(TIME_PER_BATCH, math.nan)
        if not SHORTEST_BATCH <= per_batch < took:
            per_batch = took / made
        node.model, node.steps, node.seconds = model, node.steps + made, node.seconds + took
        node.time_per_batch = per_batch
        if not node.examples:
            node.examples = examples_of(numbers)
            if not node.examples:
                raise ClientFailed(f"{node.name} does not say how many examples it has: num-examples in its metrics")
            # Without the mod a call is the smallest piece of work there is, so it stands for a batch and for an epoch.
            node.batch_size = max(1, int(numbers.get(BATCH_SIZE, 1))) if node.aware else node.examples
            self._handle(LearnerJoined(node.name, node.examples, node.batch_size), now)
        elif node.task is not None:
            self._go_on(node, now)

    def _go_on(self, node: _Node, now: float) -> None:
        """With the rest of the budget if a node keeps none itself; else it hands in what it has."""
        assert node.task is not None and node.model is not None
        budget = node.task.budget
        left = math.inf if budget.steps is None else budget.steps - node.steps
        time_left = budget.seconds - node.seconds
        if not node.aware and left >= 1 and time_left > 0:
            self._call(node, node.model, 0, time_left)
            return
        task, node.task = node.task, None
        steps = node.steps if budget.steps is None else min(node.steps, budget.steps)
        self._trained[node.name] = {**node.metrics, "": float(node.examples)}
        self._handle(
            UpdateRequest(
                node.name,
                task.number,
                steps,
                node.seconds,
                node.time_per_batch,
                node.model,
                node.metrics.get("loss", math.nan),
            ),
            now,
        )

    def _failed(self, node: _Node, reason: str) -> None:
        _log.error("metis: %s", reason)
        task, node.task = node.task, None
        if task is not None:
            self._handle(TaskFailed(node.name, task.number, reason, node.steps, node.seconds), self.now)
        elif not node.examples:
            node.present = False  # tried again when it is looked at next

    # --- the controller -------------------------------------------------------------------------

    def _handle(self, event: Event, now: float) -> None:
        self.events.append((now, event))
        for action in self.controller.handle(event, now):
            self.events.append((now, action))
            match action:
                case SendTask():
                    self._send(action, now)
                case CommunityPublished():
                    self._published(action)
                case UpdateRefused() | LearnerSetAside():
                    _log.warning("metis: %s: %s", action.learner, action.reason)
                case Finish():
                    _log.info("metis: %s", action.reason)
                case _:
                    pass

    def _send(self, action: SendTask, now: float) -> None:
        node, budget = self._by_name[action.learner], action.task.budget
        ahead = node.model if action.task.based_on.version == 0 and node.task is None and node.base is None else None
        node.task, node.base = action.task, action.community_model
        if ahead is not None and (budget.steps is None or node.steps <= budget.steps):
            self._go_on(node, now)  # its first call was from this very model
            return
        node.model, node.steps, node.seconds = None, 0, 0.0
        self._call(node, action.community_model, budget.steps or 0 if node.aware else 0, budget.seconds)

    def _published(self, action: CommunityPublished) -> None:
        version = action.stamp.version
        total = sum(numbers[""] for numbers in self._trained.values())
        names = {name for numbers in self._trained.values() for name in numbers if name}
        if total:
            means = {
                name: sum(numbers.get(name, 0.0) * numbers[""] for numbers in self._trained.values()) / total
                for name in sorted(names)
                if all(name in numbers for numbers in self._trained.values())
            }
            self.result.train_metrics_clientapp[version] = MetricRecord(means)
        self._trained = {}
        _log.info("metis: community model %d of %d nodes at %.1f s", version, action.contributors, self.now)
        self._measure(version, action.community_model)

    def _measure(self, version: int, model: Model) -> None:
        """By the app's own function at the server."""
        if self._evaluate is None:
            return
        found = self._evaluate(version, record_of(model))
        if found is None:
            return
        self.result.evaluate_metrics_serverapp[version] = found
        numbers = {str(name): float(value) for name, value in found.items() if isinstance(value, (int, float))}
        if numbers:
            self._handle(Evaluated(version, metrics_of(numbers)), self.now)

    def _measure_at_nodes(self, model: Model) -> None:
        """The final model, by every node that is there; means over their examples."""
        there = [node for node in self._nodes.values() if node.present and node.examples]
        version = self.controller.community.stamp.version
        messages = [
            Message(
                content_with(self._evaluation, model, {ROUND: version}),
                dst_node_id=node.number,
                message_type="evaluate",
                ttl=self._ttl,
            )
            for node in there
        ]
        sums: dict[str, float] = {}
        total = 0
        for reply in self._replies(messages):
            if not reply.has_content():
                continue
            numbers = numbers_of(reply)
            weight = max(1, examples_of(numbers))
            total += weight
            for name, value in metrics_of(numbers).items():
                sums[name] = sums.get(name, 0.0) + weight * value
        if total:
            means = MetricRecord({name: value / total for name, value in sums.items()})
            self.result.evaluate_metrics_clientapp[version] = means

    def _replies(self, messages: list[Message]) -> Iterable[Message]:
        waiting, began = set(self._grid.push_messages(messages)), self.now
        while waiting and self.now - began < self._ttl:
            for reply in self._grid.pull_messages(list(waiting)):
                waiting.discard(reply.metadata.reply_to_message_id)
                yield reply
            self._sleep(_PULL_SECONDS)

    # --- the run --------------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        """The run as `metis report` and `metis compare` read it."""
        metric = "accuracy" if any(isinstance(event, Evaluated) for _, event in self.events) else "loss"
        infos = [
            LearnerInfo(node.name, node.examples, node.batch_size, node.time_per_batch)
            for node in self._nodes.values()
            if node.examples
        ]
        setting = Setting.of(
            self._policy, self._initial, infos, seed=0, metric=metric, higher_is_better=metric != "loss",
            real_time=True, facts={"learners are": "nodes of a Flower deployment; time is the wall clock's"},
        )  # fmt: skip
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / EVENTS).open("w", encoding="utf-8") as trace:
            trace.writelines(to_line(now, item) + "\n" for now, item in self.events)
        setting.save(folder)
        Run(setting, self.events, self.controller.community.model, self.now).save(folder)
