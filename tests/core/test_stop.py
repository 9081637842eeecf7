"""When a federation ends."""

from __future__ import annotations

import math
from typing import Any

import pytest

from metis.core.stop import StopRule
from metis.errors import ArgumentError


@pytest.mark.parametrize(
    ("limits", "complaint"),
    [
        ({"rounds": 0}, "rounds is 0; it must be greater than 0"),
        ({"seconds": math.nan}, "seconds is nan; it must be greater than 0"),
        ({"rounds": 2.5}, "rounds is 2.5; it must be a whole number"),
        ({"update_requests": 1e3}, "update_requests is 1000.0; it must be a whole number"),
        ({"steps": math.inf}, "steps is inf; it must be a whole number"),
    ],
)
def test_impossible_limits_are_refused(limits: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ArgumentError, match=f"^{complaint}$") as refusal:
        StopRule(**limits)
    assert refusal.value.argument in limits


def test_seconds_need_not_be_whole() -> None:
    assert StopRule(seconds=2.5).seconds == 2.5
