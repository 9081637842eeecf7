"""A pytest plugin: runs only the tests of one row of the fault matrix, and writes down how often faults were tried.

A test belongs to a row if its docstring says so: "C1 row 9: ...", "C1 rows 4 and 9: ...".
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from deployment import faults


def rows_of(docstring: str | None) -> set[int]:
    """The rows that a test says it is of."""
    found = re.match(r"C1 rows? ([\d, and]+):", docstring or "")
    return set() if found is None else {int(number) for number in re.findall(r"\d+", found[1])}


class Counted:
    """What came of the tests of one row."""

    def __init__(self, row: int, out: Path) -> None:
        self._row, self._out = row, out
        self._passed = 0
        self._problems: list[str] = []

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        mine = [item for item in items if self._row in rows_of(getattr(item, "function").__doc__)]  # noqa: B009
        config.hook.pytest_deselected(items=[item for item in items if item not in mine])
        items[:] = mine

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            lines = str(report.longrepr).strip().splitlines()
            shown = [line for line in lines if line.startswith("E ")] or lines
            self._problems.append(f"{report.nodeid.split('::')[-1]}: {shown[0].removeprefix('E').strip()}")
        elif report.when == "call" and report.passed:
            self._passed += 1

    def pytest_sessionfinish(self) -> None:
        found = {"tried": faults.attempts, "passed": self._passed, "problems": self._problems}
        self._out.write_text(json.dumps(found), "utf-8")


def pytest_configure(config: Any) -> None:
    config.pluginmanager.register(Counted(int(os.environ["CHAOS_ROW"]), Path(os.environ["CHAOS_OUT"])))
