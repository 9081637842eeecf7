"""The line about skipped tests: what they need, and the command that installs it."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("package", "target"),
    [
        ("pandas", "venv"),
        ("cryptography", "venv"),
        ("jax", "test-libraries"),
        ("optax", "test-libraries"),
        ("onnx", "test-libraries"),
        ("nvflare", "test-libraries"),
        ("monai", "test-libraries"),
        ("flwr", "test-flower"),
    ],
)
def test_a_package_that_is_missing_is_named_with_the_make_target_that_installs_it(
    package: str, target: str, pytestconfig: pytest.Config
) -> None:
    """`make venv` installs neither the libraries of the field nor Flower."""
    summary = pytestconfig.pluginmanager.get_plugin(str(Path(__file__).with_name("conftest.py")))
    assert summary is not None
    reason = f"Skipped: could not import '{package}': No module named '{package}'"
    report = pytest.TestReport("t", ("t.py", 1, "t"), {}, "skipped", ("t.py", 1, reason), "setup")
    assert f"(make {target})" in summary._missing(report)
    assert f"\n{target}:" in Path(__file__).parents[1].joinpath("Makefile").read_text("utf-8")
