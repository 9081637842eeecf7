"""Whoever knocks, and however often: the operator reads one line a minute at most."""

from __future__ import annotations

from metis.deployment.controller import strangers
from metis.deployment.controller.strangers import RefusedCalls


def test_the_first_at_once_then_a_summary_a_minute() -> None:
    """With a count for each address, whatever its port, and the latest reason."""
    clock, lines = [1000.0], list[str]()
    refused = RefusedCalls(lines.append, lambda: clock[0])
    refused.add("10.0.0.7:4711", "no certificate")
    assert lines == ["refused a call from 10.0.0.7: no certificate"]
    for port in range(500):
        refused.add(f"10.0.0.7:{port}", "revoked")
    refused.add("[::1]:80", "forged\nline")
    assert len(lines) == 1
    clock[0] += 60
    refused.report_due()
    assert lines[1:] == [
        "refused 501 calls: 500 from 10.0.0.7 (revoked); 1 from [::1] (forged\N{REPLACEMENT CHARACTER}line)"
    ]
    clock[0] += 60
    refused.report_due()
    assert len(lines) == 2, "nobody came"


def test_memory_and_lines_are_bounded() -> None:
    """Thousands of addresses: the busiest are named, the others counted, none kept after the line."""
    clock, lines = [1000.0], list[str]()
    refused = RefusedCalls(lines.append, lambda: clock[0])
    refused.add("10.0.0.1:1", "first")
    for number in range(5000):
        refused.add(f"10.1.{number // 250}.{number % 250}:1", "x" * 10_000)
    assert len(refused._callers) == strangers._MAX_ADDRESSES
    clock[0] += 60
    refused.report_due()
    assert lines[-1].startswith("refused 5,000 calls: 1 from ")
    assert lines[-1].endswith("; 195 from 195 other addresses; 4,800 from still others") and len(lines[-1]) < 3000
    assert not refused._callers
