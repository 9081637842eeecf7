"""The example attack: it works on an update in the clear, and finds nothing in a masked or a noised one."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("cryptography")

PATH = Path(__file__).parents[1] / "examples" / "attack" / "attack.py"


@pytest.fixture
def attack(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """With the bundled digits, whatever data sets are there."""
    monkeypatch.delenv("METIS_DATA", raising=False)
    spec = importlib.util.spec_from_file_location("attack_example", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_images_can_be_read_from_an_update_in_the_clear_only(attack: ModuleType, tmp_path: Path) -> None:
    """The best copies are nearly the images in the clear, and no better than grey otherwise."""
    errors, pictures = attack.inversion()
    assert errors["data"] == "digits"
    assert errors["clear"] < 0.35
    assert errors["masked"] > 0.9
    assert errors["noised"] > 0.7
    attack.figure(pictures, tmp_path / "attack.png")
    assert (tmp_path / "attack.png").stat().st_size > 1000


def test_members_can_be_told_from_others_in_the_clear_only(attack: ModuleType) -> None:
    found = attack.membership(quick=True)
    assert found["clear"]["area"] > 0.6
    assert abs(found["masked"]["area"] - 0.5) < 0.25  # of 50 images, by a coin
    assert found["noised"]["area"] < found["clear"]["area"]
    assert found["masked"]["at 1 %"] <= 0.2
