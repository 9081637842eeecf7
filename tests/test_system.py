"""What a process takes from its machine."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

_STEPS = """
import resource
import numpy as np
from metis.system import keep_freed_memory

keep_freed_memory(256 << 20, pieces=32 << 20)

def step():
    made = [np.ones(1 << 18) for _ in range(8)]  # 2 MB each, all freed at the end

for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries do not know mallopt")
def test_memory_that_was_freed_is_kept_for_the_next_step() -> None:
    """A step that allocates and frees 16 MB takes new pages from the system every time, unless they are kept."""

    done = subprocess.run([sys.executable, "-c", _STEPS], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 1_000  # instead of 40,960
