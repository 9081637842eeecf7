"""Ctrl-C comes only where a run can be left whole."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import metis
from metis.simulation.interrupt import Interrupts
from simulation.federations import StillEngine, still


@pytest.fixture(autouse=True)
def handler_is_given_back() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    yield
    assert signal.getsignal(signal.SIGINT) is before


def ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


def test_it_is_raised_at_once_where_it_is_welcome() -> None:
    """In the middle of training, where nothing has changed yet."""
    with Interrupts() as interrupts, pytest.raises(KeyboardInterrupt), interrupts.welcome():
        ctrl_c()
        pytest.fail("not reached")

    assert not interrupts.torn


def test_elsewhere_it_is_noted_until_it_is_welcome() -> None:
    """A change is finished first; then it is raised before anything that takes long."""
    with Interrupts() as interrupts:
        ctrl_c()
        assert interrupts.pending
        with pytest.raises(KeyboardInterrupt), interrupts.welcome():
            pytest.fail("not reached")

    assert not interrupts.torn


def test_a_second_one_is_raised_anywhere_and_says_so() -> None:
    """The user insists; the exception says that a change may be half made."""
    with Interrupts() as interrupts:
        ctrl_c()
        with pytest.raises(KeyboardInterrupt):
            ctrl_c()

    assert interrupts.torn


def test_after_a_welcome_passage_it_is_noted_again() -> None:
    """Welcome ends with its block."""
    with Interrupts() as interrupts:
        with interrupts.welcome():
            pass
        ctrl_c()

        assert interrupts.pending


def test_in_another_thread_signals_are_left_alone() -> None:
    """Only the main thread may handle signals; elsewhere a run goes on without Ctrl-C."""
    results = []

    def work() -> None:
        results.append(still([2, 2], [0.1, 0.1]).simulate(metis.fedrec(1), rounds=4).rounds)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()

    assert results == [4]


class TimedOut(StillEngine):
    """Somebody presses Ctrl-C during the n-th evaluation."""

    def __init__(self, at: int, presses: int = 1) -> None:
        self.countdown, self.presses = at, presses

    def evaluate(self, model: object, examples: object) -> dict[str, float]:
        self.countdown -= 1
        for _ in range(self.presses if self.countdown == 0 else 0):
            ctrl_c()
        return {"accuracy": 0.5}


def test_during_the_first_evaluation_the_run_ends_before_any_training() -> None:
    """The initial model has been measured, and that is all that is reported."""
    run = still([2, 2], [0.1, 0.1], engine=TimedOut(at=1)).simulate(metis.sync_fedavg(1), rounds=4)

    assert (run.finish_reason, run.rounds, len(run.history)) == ("interrupted", 0, 1)


def test_during_an_evaluation_in_between_the_run_so_far_is_kept() -> None:
    """Evaluations before it stay, the current one is given up."""
    run = still([2, 2], [0.1, 0.1], engine=TimedOut(at=3)).simulate(metis.sync_fedavg(1), rounds=4)

    assert (run.finish_reason, run.rounds, len(run.history)) == ("interrupted", 2, 2)


def test_during_the_last_evaluation_the_run_is_done_anyway() -> None:
    """The end was reached: nothing is lost, and the reason is the true one."""
    run = still([2, 2], [0.1, 0.1], engine=TimedOut(at=5)).simulate(metis.sync_fedavg(1), rounds=4)

    assert (run.finish_reason, run.rounds, len(run.history)) == ("4 rounds are done", 4, 5)


def test_twice_during_the_last_evaluation_it_is_raised() -> None:
    """Somebody who insists gets out."""
    with pytest.raises(KeyboardInterrupt):
        still([2, 2], [0.1, 0.1], engine=TimedOut(at=5, presses=2)).simulate(metis.sync_fedavg(1), rounds=4)


def test_while_the_run_is_saved_it_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end was reached and the files are being written: they are completed."""
    import metis.runs.run

    save_model = metis.runs.run.save_model

    def press_and_save(path: Path, *arguments: Any) -> None:
        if path.name == "community.safetensors":
            ctrl_c()
        save_model(path, *arguments)

    monkeypatch.setattr("metis.runs.run.save_model", press_and_save)
    run = still([2, 2], [0.1, 0.1]).simulate(metis.sync_fedavg(1), rounds=2, out=tmp_path)

    assert metis.Run.load(tmp_path).summary() == run.summary()
