"""Models that are larger than the memory that a controller may use."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("large_models.py")
SLOW = ["semisync", "fedasync", "fedbuff", "sync-nova-adam"]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc to look at memory")
@pytest.mark.parametrize("policy", ["sync", "fedrec", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_neither_a_model_nor_a_sum_is_in_ordinary_memory(policy: str, tmp_path: Path) -> None:
    """Mixing, publishing, a snapshot, and a restart from it, with half a model of memory."""
    done = subprocess.run(
        [sys.executable, SCRIPT, tmp_path, policy], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
