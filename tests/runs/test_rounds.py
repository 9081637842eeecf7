"""Why a round was slow, on traces that were made by hand, and on one of a simulation."""

from __future__ import annotations

import pytest

from core.play import Actor, Play
from metis.core.events import (
    Action,
    Budget,
    CohortFixed,
    CommunityPublished,
    CommunityStamp,
    ControllerAway,
    DeadlinePassed,
    Event,
    LearnerJoined,
    LearnerLeft,
    LearnerSetAside,
    LocalTask,
    MemberRemoved,
    Paused,
    SendTask,
    TaskFailed,
    UpdateCommitted,
    UpdateRefused,
    UpdateRequest,
)
from metis.core.model import Model
from metis.core.policies import sync_fedavg
from metis.core.stop import StopRule
from metis.errors import ConfigError
from metis.runs.folds import TimelineFold
from metis.runs.rounds import SitesFold, round_report
from metis.runs.trace import from_record, to_record

NONE = Model.empty()


class Trace:
    """Rounds of two learners, of ten seconds each unless a test says otherwise."""

    def __init__(self) -> None:
        self.items: list[tuple[float, Event | Action]] = [
            (0.0, LearnerJoined("a", 100, 10)),
            (0.0, LearnerJoined("b", 100, 10)),
        ]
        self.now, self.version, self.tasks = 0.0, 0, 0

    def send(self, *learners: str) -> None:
        for learner in learners:
            task = LocalTask(self.tasks, CommunityStamp(self.version), Budget(10))
            self.items.append((self.now, SendTask(learner, task, NONE)))
            self.tasks += 1

    def answer(self, learner: str, after: float, training: float, steps: int = 10) -> None:
        task = self.tasks - (2 if learner == "a" else 1)
        update = UpdateRequest(learner, task, steps, training, training / steps, NONE)
        self.items += [(self.now + after, update), (self.now + after, UpdateCommitted(learner, task, 1.0))]

    def publish(self, after: float, *before: Event | Action, contributors: int = 2) -> None:
        self.now += after
        self.version += 1
        self.items += [(self.now, item) for item in before]
        self.items.append((self.now, CommunityPublished(CommunityStamp(self.version), contributors, NONE)))

    def ordinary(self, count: int = 1) -> Trace:
        for _ in range(count):
            self.send("a", "b")
            self.answer("a", 4.0, 3.0)
            self.answer("b", 10.0, 9.0)
            self.publish(10.0)
        return self

    def why(self, version: int | None = None) -> str:
        return " ".join(round_report(self.items, version or self.version)["text"])


def test_an_ordinary_round_is_called_so() -> None:
    """Who was last, by what, and who waited for how long."""
    text = Trace().ordinary(4).why()

    assert "Round 4 lasted 10 s, from 30 s to 40 s of the run (about as long as usual; the median is 10 s)" in text
    assert (
        "'b' was the last to hand in, 10 s after the round began, mostly because of training: 9 s of training" in text
    )
    assert "Meanwhile these waited: 'a' 6 s." in text


def test_one_that_trained_longer_than_usual() -> None:
    """Its time per batch is compared with its own of earlier rounds."""
    trace = Trace().ordinary(4)
    trace.send("a", "b")
    trace.answer("a", 4.0, 3.0)
    trace.answer("b", 60.0, 59.0)
    trace.publish(60.0)

    assert "Round 5 lasted 60 s" in trace.why() and "6 times the usual" in trace.why()
    assert "A batch took it 5.9 s, 6.56 times its usual 900 ms." in trace.why().replace("0.9 s", "900 ms")
    assert round_report(trace.items)["rounds"][-1]["cause"] == "training"


def test_one_whose_line_was_slow() -> None:
    trace = Trace().ordinary(4)
    trace.send("a", "b")
    trace.answer("a", 50.0, 3.0)
    trace.answer("b", 10.0, 9.0)
    trace.items[-4:] = sorted(trace.items[-4:], key=lambda item: item[0])
    trace.publish(50.0)

    assert "'a' was the last to hand in, 50 s after the round began, mostly because of its transfers" in trace.why()
    assert "Its transfers took 47 s instead of its usual 1 s." in trace.why()
    assert round_report(trace.items)["rounds"][-1]["cause"] == "transfer"


@pytest.mark.parametrize(
    ("event", "words"), [(LearnerLeft("b"), "was away and was given up"), (MemberRemoved("b"), "was removed")]
)
def test_one_that_vanished(event: Event, words: str) -> None:
    """The barrier waited for it until its lease ended, or somebody removed it."""
    trace = Trace().ordinary(4)
    trace.send("a", "b")
    trace.answer("a", 4.0, 3.0)
    trace.publish(34.0, event, contributors=1)

    assert f"The round ended when 'b' {words}, 34 s after it began." in trace.why()
    assert "Left while training: 'b' after 34 s." in trace.why()
    assert round_report(trace.items)["rounds"][-1]["cause"] == "absence"


def test_one_that_came_late_into_the_round() -> None:
    """Its task was sent only when it was back."""
    trace = Trace().ordinary(4)
    trace.send("a")
    trace.now += 40.0
    trace.items.append((trace.now, LearnerJoined("b", 100, 10)))
    trace.send("b")
    trace.now -= 40.0
    trace.answer("a", 4.0, 3.0)
    trace.answer("b", 50.0, 9.0)
    trace.publish(50.0)

    assert "mostly because of its late start" in trace.why()
    assert "its task was sent only 40 s after the round began" in trace.why()


def test_a_deadline_that_went_on_without_the_late() -> None:
    trace = Trace().ordinary(4)
    trace.send("a", "b")
    trace.answer("a", 4.0, 3.0)
    trace.publish(22.0, DeadlinePassed(), contributors=1)

    assert "The round ended at its deadline, without 'b'." in trace.why()


def test_failures_refusals_and_what_the_controller_did() -> None:
    """With the text that a learner may have sent made printable."""
    trace = Trace().ordinary(4)
    trace.send("a", "b")
    trace.items += [
        (trace.now + 1, ControllerAway(35.0)),
        (trace.now + 2, TaskFailed("b", trace.tasks - 1, "no\nmemory", 1, 1.0)),
        (trace.now + 2, UpdateRefused("b", trace.tasks - 1, "failed", "no\nmemory")),
        (trace.now + 2, LearnerSetAside("b", "again")),
    ]
    trace.answer("a", 4.0, 30.0)
    trace.publish(4.0, contributors=1)
    text = trace.why()
    assert "The update of 'b' did not count: no\N{REPLACEMENT CHARACTER}memory." in text and "\n" not in text
    assert "Set aside: 'b'." in text
    assert "The controller stood still for 35 s meanwhile" in text
    assert "30 s of training" in text, "the learner trained on while the clock stood still"

    trace.items.append((trace.now, Paused()))
    trace.ordinary()
    assert "was paused by an administrator" in trace.why()


def test_a_site_over_all_rounds() -> None:
    trace = Trace().ordinary(4)
    found = round_report(trace.items, site="b")
    assert [row["round"] for row in found["rounds"]] == [1, 2, 3, 4]
    assert found["text"] == [
        "'b' took part in 4 rounds; 4 of its updates counted, and it was the last in 4 of them (100 %)."
    ]
    with pytest.raises(ConfigError, match="has no finished round with a task of 'c'"):
        round_report(trace.items, site="c")
    with pytest.raises(ConfigError, match="there is no round 9; there are rounds 1 to 4"):
        round_report(trace.items, 9)
    with pytest.raises(ConfigError, match="there is no round 1; no round has ended yet"):
        round_report([], 1)


def test_a_simulated_run_is_explained_too() -> None:
    """Whatever made the events: the slow learner is the last in every round."""
    play = Play(sync_fedavg(1), gpu=0.03, cpu=0.30, stop=StopRule(rounds=4)).run()

    assert {row["last"] for row in round_report(play.log)["rounds"]} == {"cpu"}
    assert "'cpu' was the last to hand in" in round_report(play.log, 3)["text"][1]


def test_the_history_of_a_site() -> None:
    """Drops, refusals by kind, speeds: as the status shows them."""
    fold = SitesFold(1_000_000, None)
    play = Play(sync_fedavg(1), Actor("a", 0.1, transfer=2.0), Actor("b", 0.1, mood="failing"), stop=StopRule(rounds=3))
    play.run_until(community_version=2)
    play.handle(LearnerLeft("b"))
    for now, item in play.log:
        fold.record(now, item)
    fold.record(play.now, ControllerAway(3.0))

    assert fold.history("a")["bytes_per_second"] == pytest.approx(1_000_000)
    assert (fold.history("b")["failed"], fold.history("b")["drops"]) == (2, 1)
    assert fold.history("nobody")["bytes_per_second"] is None


def test_waiting_for_a_window_is_not_transfer() -> None:
    """In the words about a round, in the history of a site, and on the timeline."""
    trace = Trace().ordinary(3)
    began = trace.now
    trace.send("a", "b")
    waited = CohortFixed(3, ("a", "b"), (trace.tasks - 2, trace.tasks - 1), (0.0, 6.0))
    trace.items.append((trace.now + 9.0, waited))  # it has trained from 1 s to 3 s
    trace.answer("b", 10.0, 2.0)
    trace.publish(10.0)
    assert "2 s of training (10 steps), 2 s of transfer" in trace.why()
    sites, timeline, spans = SitesFold(1_000_000, None), TimelineFold(), []
    for now, item in trace.items:
        sites.record(now, item)
        spans += timeline.record(now, item)
    assert sites.history("b")["transfer_seconds"] == 2.0
    own = [(span.kind, span.start - began, span.end - began) for span in spans if span.learner == "b"]
    assert own[-4:] == [("transfer", 0.0, 1.0), ("training", 1.0, 3.0), ("idle", 3.0, 9.0), ("transfer", 9.0, 10.0)]
    assert from_record(to_record(1.0, waited)) == (1.0, waited)
