"""What an exception out of a user's file says."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from metis.errors import described


def _module(path: Path, code: str) -> ModuleType:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(code, "utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("folder", ["site-packages", "dist-packages"])
def test_a_line_of_a_library_is_not_shown_as_the_users(tmp_path: Path, folder: str) -> None:
    """Also where the library is in another environment, on which this one builds."""
    library = _module(
        tmp_path / folder / "library.py", "def fail():\n    raise IndexError('Target 7 is out of bounds')"
    )
    with pytest.raises(IndexError) as raised:
        library.fail()
    assert described(raised.value) == f"test_errors.py:{_line(raised)}: IndexError: Target 7 is out of bounds"


def _line(raised: pytest.ExceptionInfo[IndexError]) -> int:
    return raised.traceback[0].lineno + 1
