"""Calls that are refused, summarized for the operator: one line a minute at most, whatever knocks at the door."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from metis.system import monotonic
from metis.text import plural, printable

_LINE_SECONDS = 60.0
_MAX_ADDRESSES = 200  # that are kept apart; calls from others are only counted
_SHOWN = 5
_MAX_REASON = 300


@dataclass
class _Caller:
    calls: int
    reason: str  # of the latest call


class RefusedCalls:
    """Counts refused calls by address, and reports them."""

    def __init__(self, report: Callable[[str], None], clock: Callable[[], float] = monotonic) -> None:
        self._report, self._clock = report, clock
        self._callers: dict[str, _Caller] = {}
        self._others = 0
        self._reported_at = -math.inf

    def add(self, address: str, reason: str) -> None:
        host = address.rpartition(":")[0] or address  # its port is another one each time
        if host in self._callers or len(self._callers) < _MAX_ADDRESSES:
            caller = self._callers.setdefault(host, _Caller(0, ""))
            caller.calls, caller.reason = caller.calls + 1, printable(reason)[:_MAX_REASON]
        else:
            self._others += 1
        self.report_due()

    def report_due(self) -> None:
        """Report what came since the last line, if that was long enough ago."""
        now = self._clock()
        if not self._callers or now - self._reported_at < _LINE_SECONDS:
            return
        self._reported_at = now
        callers = sorted(self._callers.items(), key=lambda item: -item[1].calls)
        parts = [f"{caller.calls:,} from {host} ({caller.reason})" for host, caller in callers[:_SHOWN]]
        if more := callers[_SHOWN:]:
            calls = sum(caller.calls for _, caller in more)
            parts.append(f"{calls:,} from {plural(len(more), 'other address', 'other addresses')}")
        if self._others:
            parts.append(f"{self._others:,} from still others")
        total = self._others + sum(caller.calls for _, caller in callers)
        if total == 1:
            ((host, caller),) = callers
            self._report(f"refused a call from {host}: {caller.reason}")
        else:
            self._report(f"refused {total:,} calls: {'; '.join(parts)}")
        self._callers.clear()
        self._others = 0
