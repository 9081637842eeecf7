"""What all tests share."""

import os
import signal
from pathlib import Path

# Before numpy and torch are imported: thread pools of several test processes only get in each other's way.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")

import pytest
from hypothesis import settings

# A shell that starts the tests in the background lets them ignore Ctrl-C, and the processes that they start as well.
signal.signal(signal.SIGINT, signal.default_int_handler)

try:
    import torch
except ImportError:  # the tests of core and data run without it
    pass
else:
    torch.set_num_threads(1)

# No deadline: a test never depends on how busy the machine is. In CI the examples are the same every time.
settings.register_profile("metis", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "metis")


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """The folder of real data sets that METIS_DATA names; without it the test is skipped."""
    name = os.environ.get("METIS_DATA")
    if not name:
        pytest.skip("METIS_DATA names no folder of data sets")
    folder = Path(name)
    if not folder.is_dir():
        pytest.skip(f"METIS_DATA names {folder}, which is not a folder")
    return folder
