"""events.jsonl: one JSON object a line, read back as it was written."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from metis.core.events import (
    Action,
    Budget,
    CommunityPublished,
    CommunityStamp,
    DeadlinePassed,
    Evaluated,
    Event,
    Finish,
    LearnerJoined,
    LearnerLeft,
    LearnerSetAside,
    LearnerWithdrawn,
    LocalTask,
    MemberAdded,
    MemberRemoved,
    Paused,
    Resumed,
    SendTask,
    StopRequested,
    StopRuleChanged,
    TaskFailed,
    UpdateCommitted,
    UpdateRefused,
    UpdateRequest,
)
from metis.core.model import Layout, Model, TensorSpec
from metis.core.stop import StopRule, Target
from metis.errors import DataError
from metis.runs.trace import from_record, read_trace, to_line, to_record, without_weights

NAMES = st.text(min_size=1, max_size=20)
COUNTS = st.integers(0, 2**53)
SECONDS = st.floats(0, 1e9)
STAMPS = st.builds(CommunityStamp, COUNTS, COUNTS)
MODEL = Model(Layout((TensorSpec("w", (3,)),)), np.ones(3, np.float32))
POSITIVE = st.none() | st.integers(1, 2**53)
TARGETS = st.builds(Target, NAMES, SECONDS, st.booleans())
STOPS = st.builds(StopRule, POSITIVE, st.none() | st.floats(1e-3, 1e9), POSITIVE, st.none() | TARGETS, POSITIVE)
ITEMS: st.SearchStrategy[Event | Action] = st.one_of(
    st.builds(LearnerJoined, NAMES, COUNTS, COUNTS),
    st.builds(LearnerLeft, NAMES),
    st.builds(LearnerWithdrawn, NAMES),
    st.builds(UpdateRequest, NAMES, COUNTS, COUNTS, SECONDS, SECONDS, st.just(MODEL), st.floats(0, 1e30)),
    st.builds(TaskFailed, NAMES, COUNTS, st.text(), COUNTS, SECONDS),
    st.builds(Evaluated, COUNTS, st.dictionaries(NAMES, st.floats(allow_nan=False, allow_infinity=False))),
    st.just(DeadlinePassed()),
    st.builds(StopRequested, st.text()),
    st.builds(Paused, NAMES),
    st.builds(Resumed, NAMES),
    st.builds(StopRuleChanged, STOPS, NAMES),
    st.builds(MemberAdded, NAMES, SECONDS, st.none() | SECONDS, st.sampled_from(["epsilon", "watt"])),
    st.builds(MemberRemoved, NAMES, st.booleans()),
    st.builds(
        SendTask,
        NAMES,
        st.builds(LocalTask, COUNTS, STAMPS, st.builds(Budget, st.none() | COUNTS, SECONDS | st.just(math.inf))),
        st.just(MODEL),
    ),
    st.builds(CommunityPublished, STAMPS, COUNTS, st.just(MODEL)),
    st.builds(UpdateCommitted, NAMES, COUNTS, st.floats(1e-9, 1e9)),
    st.builds(UpdateRefused, NAMES, COUNTS, st.sampled_from(["late", "invalid", "failed"]), st.text()),
    st.builds(LearnerSetAside, NAMES, st.text()),
    st.builds(Finish, st.text()),
)


@given(now=SECONDS, item=ITEMS)
def test_every_event_and_action_comes_back_as_it_was(now: float, item: Event | Action) -> None:
    """To the last bit of every number; one line each, and without weights."""
    line = to_line(now, item)

    assert "\n" not in line
    assert from_record(json.loads(line)) == (now, item)
    assert without_weights(item) == item
    for model in (getattr(without_weights(item), name, None) for name in ("local_model", "community_model")):
        assert model is None or model.layout.size == 0


def test_numbers_that_json_does_not_know() -> None:
    """Infinity and NaN are written as null, and come back as what can have been meant."""
    endless = SendTask("a", LocalTask(1, CommunityStamp(), Budget(3)), MODEL)
    lost = UpdateRequest("a", 1, 3, 0.3, 0.1, MODEL, math.nan)
    measured = Evaluated(1, {"loss": math.inf, "accuracy": 0.5})

    assert to_record(0.0, endless)["seconds"] is None
    assert from_record(to_record(0.0, endless))[1].task.budget.seconds == math.inf  # type: ignore[union-attr]
    assert to_record(0.0, lost)["loss"] is None
    assert math.isnan(from_record(to_record(0.0, lost))[1].loss)  # type: ignore[union-attr]
    assert to_record(0.0, measured)["metrics"] == {"loss": None, "accuracy": 0.5}


def test_numbers_of_numpy_are_numbers() -> None:
    """Batch sizes and seconds that a user took from an array."""
    item = LearnerJoined("a", np.int64(30), np.int32(10))  # type: ignore[arg-type]

    assert from_record(json.loads(to_line(np.float32(0.5), item))) == (0.5, LearnerJoined("a", 30, 10))  # type: ignore[arg-type]


def test_what_is_no_number_is_not_written() -> None:
    """An error here, and not a string that cannot be read back."""
    with pytest.raises(TypeError, match="complex cannot be written as JSON"):
        to_line(0.0, LearnerJoined("a", 1j, 10))  # type: ignore[arg-type]


def test_a_line_that_was_cut_off_in_writing_is_left_out(tmp_path: Path) -> None:
    """A process that is killed writes half a line at most, the last."""
    whole = [to_line(float(n), LearnerLeft(f"learner {n}")) for n in range(3)]
    path = tmp_path / "events.jsonl"
    path.write_text("\n".join(whole))

    assert [item for _, item in read_trace(path)] == [LearnerLeft("learner 0"), LearnerLeft("learner 1")]


@pytest.mark.parametrize(
    "line",
    [
        b"not json",
        b"[1, 2]",
        b"7",
        b'{"at": 1.0}',
        b'{"event": "learner_left", "learner": "a"}',
        b'{"at": 1.0, "event": "learner_danced", "learner": "a"}',
        b'{"at": 1.0, "event": "learner_left"}',
        b'{"at": 1.0, "event": "learner_left", "learner": "a", "mood": "bad"}',
        b'{"at": 1.0, "event": "evaluated", "version": 1, "metrics": 5}',
        b'{"at": NaN, "event": "learner_left", "learner": "a"}',
        b'{"at": 1e308, "event": "learner_left", "learner": "a"}',
        b'{"at": -1, "event": "learner_left", "learner": "a"}',
        b'{"at": "1", "event": "learner_left", "learner": "a"}',
        b'{"at": 1.0, "event": "learner_left", "learner": 5}',
        b'{"at": 1.0, "action": "finish", "reason": true}',
        b'{"at": 1.0, "event": "controller_away", "seconds": Infinity}',
        b'{"at": 1.0, "action": "send_task", "learner": "a", "task": 1, "based_on": 3, "steps": 1, "seconds": 1}',
    ],
)
def test_a_line_that_is_no_event_is_named(line: bytes, tmp_path: Path) -> None:
    """File and line are in the sentence."""
    path = tmp_path / "events.jsonl"
    path.write_bytes(to_line(0.0, LearnerLeft("a")).encode() + b"\n" + line + b"\n")

    with pytest.raises(DataError, match=r"events.jsonl, line 2 is not an event of a run") as caught:
        list(read_trace(path))
    assert not re.search(r"Error|NoneType|__init__|object", str(caught.value)), caught.value


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("not JSON", "it is not valid JSON"),
        ('{"at": 1.0, "event": "left"}', "there is no event 'left'"),
        ('{"at": 1.0}', "it has no 'action'"),
        ('{"at": -1, "event": "learner_left"}', "'at' is -1, which is not a valid time of a run"),
        ('{"at": 1.0, "event": "learner_left"}', "a value in it is missing or of the wrong type"),
    ],
)
def test_what_is_wrong_with_a_line_is_said_in_words(line: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(line + "\n", "utf-8")
    with pytest.raises(DataError) as caught:
        list(read_trace(path))
    assert str(caught.value) == f"{path}, line 1 is not an event of a run: {why}"


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    """Also a folder, and a file that is not there."""
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"\xff\xfe\x00\x80\n")

    with pytest.raises(DataError, match="it is not a text file"):
        list(read_trace(path))
    with pytest.raises(DataError, match="cannot be read: No such file"):
        list(read_trace(tmp_path / "nowhere"))
    with pytest.raises(DataError, match="cannot be read: Is a directory"):
        list(read_trace(tmp_path))
