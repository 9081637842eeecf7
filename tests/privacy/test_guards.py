"""Every guard of the secure sum is needed: without it, a test fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from privacy.guards import GUARDS


@pytest.mark.parametrize("name", GUARDS)
def test_the_text_of_a_guard_stands_in_its_module_once(name: str) -> None:
    """And the module without it is still Python."""
    guard = GUARDS[name]
    assert guard.path.read_text("utf-8").count(guard.before) == 1
    assert guard.planted != guard.path.read_text("utf-8")
    compile(guard.planted, str(guard.path), "exec")


@pytest.mark.slow
def test_without_any_one_guard_a_test_fails() -> None:
    done = subprocess.run([sys.executable, Path(__file__).parent / "guards.py"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
