"""What all tests share."""

import os
import re
import signal
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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

# No deadline: a test never depends on how busy the machine is. The examples are the same every time, so that a failure
# is the fault of a change; `make test-random` looks for others with --hypothesis-profile=random.
settings.register_profile("fixed", deadline=None, derandomize=True, database=None)
settings.register_profile("random", deadline=None, print_blob=True)
settings.load_profile("fixed")


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


@pytest.fixture
def blank_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are made, but not rendered, which takes nine tenths of a short run; tests/reporting renders them."""
    from matplotlib.figure import Figure

    def savefig(figure: Figure, target: Any, *, format: str = "", **options: Any) -> None:
        suffix = format or Path(target).suffix.removeprefix(".")
        content = "<svg></svg>" if suffix == "svg" else b"\x89PNG"
        if isinstance(target, (str, Path)):
            target = Path(target)
            target.write_text(content, "utf-8") if isinstance(content, str) else target.write_bytes(content)
        else:
            target.write(content)

    monkeypatch.setattr(Figure, "savefig", savefig)


# What `make venv` does not install.
_LIBRARIES = "jax|flax|optax|nvflare|onnx|onnxscript|onnxruntime|pytorch_lightning|monai"
# What a reason to skip says -> what is missing, and how to have it.
_MISSING = {
    "Chromium|playwright": "of the page in a browser (install chromium)",
    "METIS_DATA": "with real data sets (set METIS_DATA)",
    "test-ray": "with Ray clusters (make test-ray)",
    "could not import 'flwr'": "with Flower (make test-flower)",
    "faketime": "with another clock (install faketime)",
    "mounted": "with a small disk (run as root)",
    f"could not import '({_LIBRARIES})'": r"without \1 (make test-libraries)",
    "could not import '(.+?)'": r"without \1 (make venv)",
}


_DESELECTED = pytest.StashKey[int]()


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    if not items:  # --last-failed deselects nothing where the collection found only what had failed
        return
    config, slow = items[0].config, [item for item in items if item.get_closest_marker("slow")]
    config.stash[_DESELECTED] = config.stash.get(_DESELECTED, 0) + len(slow)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """One of several processes reports to the one that sums up; each leaves out the same tests."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["deselected"] = session.config.stash.get(_DESELECTED, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    node.config.stash[_DESELECTED] = getattr(node, "workeroutput", {}).get("deselected", 0)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line at the end: what did not run, and how to run it."""
    counts = Counter(_missing(report) for report in terminalreporter.stats.get("skipped", []))
    if terminalreporter.config.option.markexpr == "not slow":
        counts["that are slow (make test-all)"] = terminalreporter.config.stash.get(_DESELECTED, 0)
    if counts := +counts:
        parts = [f"{count} {what}" for what, count in counts.most_common()]
        terminalreporter.write_line(f"skipped tests: {', '.join(parts)}")


def _missing(report: pytest.TestReport | pytest.CollectReport) -> str:
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    for pattern, what in _MISSING.items():
        if found := re.search(pattern, reason):
            return found.expand(what)
    return f"({reason.removeprefix('Skipped: ')})"
