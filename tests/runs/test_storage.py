"""Models on disk: files that any program can load, and a store that keeps memory flat."""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from metis.core.mixing import CachedAverage, FullPass, MemoryStore
from metis.core.model import Layout, Model, TensorSpec
from metis.errors import DataError
from metis.experiments.start import started_from
from metis.runs.storage import DiskStore, load_arrays, load_model, save_arrays, save_model

LAYOUT = Layout(
    (
        TensorSpec("weight", (3, 2)),
        TensorSpec("scale", ()),
        TensorSpec("half", (2,), "float16"),
        TensorSpec("brain", (2,), "bfloat16"),
        TensorSpec("double", (1,), "float64"),
        TensorSpec("batches", (), "int64", "counter"),
        TensorSpec("empty", (0, 4)),
    )
)


def model(seed: int = 0, layout: Layout = LAYOUT) -> Model:
    rng = np.random.default_rng(seed)
    return Model(layout, rng.normal(size=layout.size).astype(np.float32), np.full(layout.counters, seed, np.int64))


# --- files ------------------------------------------------------------------------------------------


def test_a_model_comes_back_bit_for_bit(tmp_path: Path) -> None:
    """Tensors of any dtype, single numbers, counters and empty tensors."""
    path = tmp_path / "deep" / "model.safetensors"
    save_model(path, model(7), {"policy": "fedrec"})

    again = load_model(path)

    assert again.layout == LAYOUT
    assert again.sha256() == model(7).sha256()
    assert [entry.name for entry in path.parent.iterdir()] == ["model.safetensors"]


def test_any_program_can_load_it(tmp_path: Path) -> None:
    """Under the network's own names and shapes."""
    save_model(tmp_path / "model.safetensors", model(7))

    tensors = load_file(tmp_path / "model.safetensors")

    assert {name: array.shape for name, array in tensors.items()} == {s.name: s.shape for s in LAYOUT.tensors}
    assert np.array_equal(tensors["weight"], model(7).tensors()["weight"])


def test_a_network_takes_it_back(tmp_path: Path) -> None:
    """What is saved of a torch network with BatchNorm is its state_dict."""
    import torch

    from metis.learning import TorchEngine

    def network() -> Any:
        return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))

    saved = TorchEngine(network).initial_model(3)
    save_model(tmp_path / "model.safetensors", saved)
    module = network()

    module.load_state_dict({name: torch.tensor(a) for name, a in load_file(tmp_path / "model.safetensors").items()})

    assert load_model(tmp_path / "model.safetensors").sha256() == saved.sha256()


def test_a_flipped_bit_is_noticed(tmp_path: Path) -> None:
    """safetensors alone would not."""
    path = tmp_path / "model.safetensors"
    save_model(path, model(7))
    content = bytearray(path.read_bytes())
    content[-1] ^= 4
    path.write_bytes(content)

    with pytest.raises(DataError, match="is damaged: its numbers do not match their digest"):
        load_model(path)


def test_foreign_and_broken_files_are_refused(tmp_path: Path) -> None:
    """With the file's name and one reason."""
    path = tmp_path / "model.safetensors"
    save_file({"w": np.zeros(3, np.float32)}, path)
    with pytest.raises(DataError, match="but not one that Metis wrote"):
        load_model(path)
    save_file({"w": np.zeros(3, np.float32)}, path, {"metis_layout": '[["v", [3], "float32", "parameter"]]'})
    with pytest.raises(DataError, match="is damaged: tensors missing: "):
        load_model(path)
    save_file({"w": np.zeros(3, np.float32)}, path, {"metis_layout": "[[["})
    with pytest.raises(DataError, match="is damaged"):
        load_model(path)
    path.write_bytes(b"PK\x03\x04 not this format")
    with pytest.raises(DataError, match="cannot be read as a safetensors file"):
        load_model(path)
    with pytest.raises(DataError, match="cannot be read as a safetensors file"):
        load_model(tmp_path / "nowhere")


def _by_the_library(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    with safe_open(path, framework="numpy") as file:
        return load_file(path), {"events": file.metadata()["events"]}


@pytest.mark.parametrize("read", [load_arrays, partial(load_arrays, mapped=True), _by_the_library])
def test_arrays_with_any_names_come_back(read: Callable[[Path], Any], tmp_path: Path) -> None:
    """Learners' names are in the keys of a checkpoint; other programs can read the file too."""
    arrays = {
        "local/a/b ü": np.arange(6, dtype=np.float32).reshape(2, 3).T,
        "single": np.array(3.5),
        "none": np.zeros(0, np.int64),
        "flags": np.array([True, False, True]),
        "small": np.array([1, 2, 3], np.int8),
        "large": np.array([2.0**60, 3]),
    }
    save_arrays(tmp_path / "x.safetensors", arrays, {"events": "12"})

    again, metadata = read(tmp_path / "x.safetensors")

    assert metadata == {"events": "12"}
    assert again.keys() == arrays.keys()
    for name, array in arrays.items():
        assert np.array_equal(again[name], array)
        assert (again[name].shape, again[name].dtype) == (array.shape, array.dtype)


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If writing fails, the last good one is still there."""
    path = tmp_path / "x.safetensors"
    save_arrays(path, {"w": np.zeros(3)}, {"events": "1"})

    class Full(io.BytesIO):
        def write(self, data: Any) -> int:
            if self.tell() + len(data) > 500:
                raise OSError("no space left on device")
            return super().write(data)

    monkeypatch.setattr("metis.system.Disk.file", lambda self, descriptor: os.close(descriptor) or Full())
    with pytest.raises(OSError, match="no space"):
        save_arrays(path, {"w": np.ones(100)}, {"events": "2"})

    assert load_arrays(path)[1] == {"events": "1"}


# --- the store --------------------------------------------------------------------------------------

HISTORIES = st.lists(
    st.tuples(st.sampled_from("abcd"), st.integers(0, 9), st.floats(0.1, 9), st.sampled_from(["commit", "withdraw"])),
    max_size=20,
)


@pytest.mark.parametrize("community", [FullPass, CachedAverage])
def test_disk_equals_memory_bit_for_bit(community: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Any history of commits, withdrawals and publications is mixed to the same bits."""
    layout = Layout((TensorSpec("w", (40_000,)),))  # more than one block of the mixing

    @settings(max_examples=40)
    @given(history=HISTORIES)
    def check(history: list[tuple[str, int, float, str]]) -> None:
        both = [
            community(model(99, layout), MemoryStore()),
            community(model(99, layout), DiskStore(tmp_path_factory.mktemp("store"))),
        ]
        for learner, seed, value, what in history:
            for one in both:
                if what == "commit":
                    one.commit(learner, model(seed, layout), value, 1, None)
                else:
                    one.withdraw(learner)
            if seed % 3 == 0:
                for one in both:
                    one.publish()
        assert both[0].model.sha256() == both[1].model.sha256()

    check()


@given(vectors=st.lists(st.integers(0, 50), min_size=1, max_size=5))
def test_what_is_put_is_got(tmp_path_factory: pytest.TempPathFactory, vectors: list[int]) -> None:
    """The latest, also if it has another length than the last, or none."""
    store = DiskStore(tmp_path_factory.mktemp("store"))
    for size in vectors:
        store.put("a", np.arange(size, dtype=np.float32))

    assert store.get("a").tolist() == list(range(vectors[-1]))


@pytest.mark.skipif(sys.platform == "win32", reason="a mapped file cannot be replaced there")
def test_a_replaced_or_removed_file_does_not_disturb_a_reader(tmp_path: Path) -> None:
    """A reference to the old model keeps it to the last bit."""
    store = DiskStore(tmp_path)
    old = np.random.default_rng(0).normal(size=100_000).astype(np.float32)
    store.put("a", old)
    held = store.get("a")

    store.put("a", np.zeros(5, np.float32))
    assert np.array_equal(held, old)
    assert store.get("a").tolist() == [0.0] * 5
    store.remove("a")
    assert np.array_equal(held, old)
    with pytest.raises(FileNotFoundError):
        store.get("a")
    store.remove("a")  # nothing to do


def test_a_mapped_model_cannot_be_changed_by_accident(tmp_path: Path) -> None:
    """It is read-only."""
    store = DiskStore(tmp_path)
    store.put("a", np.zeros(5, np.float32))

    with pytest.raises(ValueError, match="read-only"):
        store.get("a")[0] = 1


NAMES = [
    "a", "A", "a/b", "a%2Fb", "../../escape", "/etc/passwd", ".", "..", "", "con", "a.f32", "a.new", "Jürgen", "東京",
    "é" * 1000, "x" * 1000, "x" * 1001, "a\nb", "a b", "\0", "\ud800", "🙂" * 100,
]  # fmt: skip


def test_any_name_of_a_learner_is_safe(tmp_path: Path) -> None:
    """Slashes, letters of any script, dots, thousands of characters: each its own file, all inside the folder."""
    folder = tmp_path / "models"
    store = DiskStore(folder)
    for number, name in enumerate(NAMES):
        store.put(name, np.full(3, number, np.float32))

    assert [store.get(name)[0] for name in NAMES] == list(range(len(NAMES)))
    assert len({entry.name.lower() for entry in folder.iterdir()}) == len(NAMES)
    assert [entry.name for entry in tmp_path.iterdir()] == ["models"]
    for name in NAMES:
        store.remove(name)
    assert list(folder.iterdir()) == []


@given(name=st.text())
def test_any_two_names_are_kept_apart(tmp_path_factory: pytest.TempPathFactory, name: str) -> None:
    """A name and its neighbour."""
    store = DiskStore(tmp_path_factory.mktemp("store"))
    store.put(name, np.zeros(1, np.float32))
    store.put(name + " ", np.ones(1, np.float32))

    assert (store.get(name)[0], store.get(name + " ")[0]) == (0.0, 1.0)


# --- a warm start -----------------------------------------------------------------------------------

NETWORK = Layout((TensorSpec("weight", (3, 2)), TensorSpec("bias", (2,)), TensorSpec("seen", (), "int64", "counter")))


def test_a_model_starts_with_the_weights_of_a_file(tmp_path: Path) -> None:
    """Of a run, or of any other program; what a layer has added behind the network is kept."""
    saved = model(3, NETWORK)
    save_model(tmp_path / "community.safetensors", saved)
    save_file(dict(saved.tensors()), tmp_path / "theirs.safetensors")
    for name in ("community", "theirs"):
        started = started_from(tmp_path / f"{name}.safetensors", model(1, NETWORK))
        assert started.sha256() == saved.sha256()
    extended = Layout((*NETWORK.tensors[:2], TensorSpec("c/weight", (3, 2), role="control"), NETWORK.tensors[2]))
    started = started_from(tmp_path / "theirs.safetensors", model(1, extended))
    assert started.network.sha256() == saved.sha256()
    assert (started.control == model(1, extended).control).all()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"weight": None}, "it has no tensor 'weight' [3, 2] of float32"),
        ({"bias": np.zeros(3, np.float32)}, "tensor 'bias' is [3] of float32, the network's is [2] of float32"),
        ({"weight": np.zeros((3, 2), np.int64)}, "tensor 'weight' is [3, 2] of int64, the network's is [3, 2] of"),
        ({"seen": np.zeros((), np.float32)}, "tensor 'seen' is [] of float32, the network's is [] of int64"),
        ({"head": np.zeros(1, np.float32)}, "it has a tensor 'head', which the network does not have"),
        ({"bias": np.array([1, np.nan], np.float32)}, "has numbers that are not finite"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_by_its_first_difference(
    tmp_path: Path, change: dict[str, Any], sentence: str
) -> None:
    arrays = {name: array for name, array in ({**model(3, NETWORK).tensors(), **change}).items() if array is not None}
    save_file(arrays, tmp_path / "other.safetensors")
    with pytest.raises(DataError, match=re.escape(sentence)):
        started_from(tmp_path / "other.safetensors", model(1, NETWORK))


def test_a_file_that_is_not_there_or_not_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no file"):
        started_from(tmp_path / "none.safetensors", model(1, NETWORK))
    (tmp_path / "notes.safetensors").write_text("lambda = 2")
    with pytest.raises(DataError, match="cannot be read as a safetensors file"):
        started_from(tmp_path / "notes.safetensors", model(1, NETWORK))
