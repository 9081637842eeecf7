"""The state folder: what was acknowledged is there, once, whatever happened to the process or to the files."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import metis.deployment.controller.blobs as blobs_module
from metis.deployment.controller.blobs import BlobMismatch
from metis.deployment.controller.journal import Entry
from metis.deployment.controller.state import State
from metis.deployment.wire.model_mac import ModelMac, checksum_in, name_of
from metis.errors import DataError, DuplicateUpdate, StateError

SOURCE = Path(__file__).parents[2] / "src"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def put(state: State, content: bytes) -> str:
    return state.put_blob([memoryview(content)])


def hand_in(state: State, number: int, content: bytes | None = None) -> Entry:
    """One update as a learner's service would commit it."""
    with state.incoming() as incoming:
        incoming.write(content if content is not None else f"model {number}".encode())
        blob = incoming.commit(incoming.bytes, incoming.checksum)
    seq = state.append(number / 10, {"event": "update_request", "task": number}, update=number, blob=blob)
    return Entry(seq, number / 10, {"event": "update_request", "task": number}, number, blob)


def blobs(folder: Path) -> set[str]:
    return {path.name for path in (folder / "blobs").iterdir()}


@pytest.fixture
def state(tmp_path: Path) -> Iterator[State]:
    with State.open(tmp_path / "state", "process") as state:
        yield state


# --- opening ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("durability", ["power", "process"])
def test_a_folder_is_made_and_found_again(tmp_path: Path, durability: Any) -> None:
    """Same run, next epoch, everything that was acknowledged; also below folders that are not there yet."""
    folder = tmp_path / "deep" / "state"
    with State.open(folder, durability) as first:
        assert (first.epoch, first.facts(), first.last_seq(), first.snapshots()) == (1, None, 0, [])
        first.begin({"layout": [["w", [3]]], "rate": 0.1})
        entry = hand_in(first, 7)
    with State.open(folder, durability) as second:
        assert (second.run, second.epoch) == (first.run, 2)
        assert second.facts() == {"layout": [["w", [3]]], "rate": 0.1}
        assert list(second.entries()) == [entry]
        assert second.verify_blob(entry.blob or "")
    with State.open(tmp_path / "other", durability) as other:
        assert other.run != first.run


def test_a_run_is_begun_once(state: State) -> None:
    """What it was begun with is for ever."""
    state.begin({"a": 1})
    with pytest.raises(ValueError, match="already begun"):
        state.begin({"a": 2})
    assert state.facts() == {"a": 1}


def test_two_controllers_cannot_share_a_folder(tmp_path: Path) -> None:
    """The second learns who has it, also in another process; when that is killed the folder is free."""
    program = "import sys, time\nfrom pathlib import Path\nfrom metis.deployment.controller.state import State\n"
    program += "State.open(Path(sys.argv[1]))\nprint('open', flush=True)\ntime.sleep(100)"
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "state")], stdout=subprocess.PIPE, env=ENVIRONMENT
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"open\n"
        with pytest.raises(StateError, match=f"is in use by a controller with process id {other.pid} on "):
            State.open(tmp_path / "state")
        other.send_signal(signal.SIGKILL)
    with State.open(tmp_path / "state") as mine:
        assert mine.epoch == 2
        with pytest.raises(StateError, match=f"process id {os.getpid()} on "):
            State.open(tmp_path / "state")
    State.open(tmp_path / "state").close()


def test_a_program_that_reads_the_journal_is_named(tmp_path: Path) -> None:
    """Somebody who looks with sqlite3 must leave first."""
    State.open(tmp_path, "process").close()
    other = sqlite3.connect(tmp_path / "controller.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    try:
        with pytest.raises(StateError, match="open in another program"):
            State.open(tmp_path, "process")
    finally:
        other.close()
    State.open(tmp_path, "process").close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("PRAGMA user_version=4", r"made by a newer version of Metis \(format 4; this one reads 3\)"),
        ("PRAGMA user_version=0", r"made by an older version of Metis \(format 0; this one reads 3\)"),
        ("PRAGMA application_id=7", "is not the journal of a controller"),
        ("DROP TABLE snapshot", "its tables are not those that were made"),
        ("CREATE TABLE more (x)", "its tables are not those that were made"),
        ("DELETE FROM run", "the row of the run is not as it was written"),
        ("UPDATE run SET epoch = 0", "the row of the run is not as it was written"),
        ("DELETE FROM journal WHERE seq = 2", "2 entries, from 1 to 3"),
        ("DELETE FROM journal WHERE seq = 3", "has lost what was acknowledged: it ends with entry 2"),
        ("DELETE FROM snapshot", "has lost what was acknowledged"),
    ],
)
def test_a_folder_of_another_version_or_kind_is_refused(tmp_path: Path, change: str, message: str) -> None:
    """Clearly, and again when tried again."""
    with State.open(tmp_path, "process") as state:
        for number in (1, 2, 3):
            hand_in(state, number)
        state.write_snapshot(3, {}, {})
    with sqlite3.connect(tmp_path / "controller.db") as database:
        database.execute(change)
    database.close()
    for _ in range(2):
        with pytest.raises(StateError, match=message):
            State.open(tmp_path, "process")


def test_a_folder_of_the_format_before_is_used_on_and_gets_the_new_number(tmp_path: Path) -> None:
    """Its models are named by their SHA-256, and stay so; an earlier version of Metis refuses it from then on."""
    with State.open(tmp_path, "process") as state:
        hand_in(state, 1)
    with sqlite3.connect(tmp_path / "controller.db") as database:
        database.execute("DROP TABLE content")
        database.execute("PRAGMA user_version=1")
    database.close()
    with State.open(tmp_path, "process") as state:
        hand_in(state, 2)
        state.append(3.0, {"n": 3}, update=3, blob="0" * 64, content=b"small")
        assert [entry.seq for entry in state.entries()] == [1, 2, 3]
    with sqlite3.connect(tmp_path / "controller.db") as database:
        assert database.execute("PRAGMA user_version").fetchone() == (3,)
    database.close()


def test_other_bytes_under_the_same_seal_replace_nothing(tmp_path: Path) -> None:
    """Who has chosen the key of a seal can make other bytes for it: each gets a file of its own, and all are whole."""
    key = bytes(32)  # under which everything has the same code
    seal = (key + bytes(16)).hex()
    with State.open(tmp_path, "process") as state:
        names = []
        for content in (b"the first", b"another one"):
            with state.incoming(checksum=seal) as incoming:
                incoming.write(content)
                names.append(incoming.commit(len(content), seal))
        assert names[0] != names[1] and {checksum_in(name) for name in names} == {seal}
        assert [state.blob_path(name).read_bytes() for name in names] == [b"the first", b"another one"]
        assert all(state.verify_blob(name) for name in names)


def test_a_sealed_update_is_checked_when_it_comes_and_later(tmp_path: Path) -> None:
    mac = ModelMac()
    mac.update(b"trained")
    seal = mac.digest().hex()
    with State.open(tmp_path, "process") as state:
        with state.incoming(checksum=seal) as incoming, pytest.raises(BlobMismatch, match="have the checksum"):
            incoming.write(b"trainee")
            incoming.commit(7, seal)
        with state.incoming(task=1, checksum=seal) as incoming:
            incoming.write(b"tra")
        with state.incoming(task=1, checksum=seal) as incoming:
            assert incoming.resume(7, None) == 0  # of whole numbers only
            incoming.write(b"trained")
            name = incoming.commit(7, seal)
        assert state.verify_blob(name)
        path = state.blob_path(name)
        path.write_bytes(b"trainex")
        assert not state.verify_blob(name)
        assert not path.exists() and (tmp_path / "quarantine" / name).exists()


def test_a_folder_that_cannot_be_is_refused(tmp_path: Path) -> None:
    """A file instead of it, or another program's database."""
    (tmp_path / "file").write_text("x")
    with pytest.raises(StateError, match="cannot be opened"):
        State.open(tmp_path / "file")
    with pytest.raises(StateError, match="cannot be opened"):
        State.open(tmp_path / "file" / "below")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "controller.db").write_text("These are my notes. " * 100)
    with pytest.raises(StateError, match="is damaged"):
        State.open(tmp_path / "notes")
    (tmp_path / "foreign").mkdir()
    with sqlite3.connect(tmp_path / "foreign" / "controller.db") as database:
        database.execute("CREATE TABLE mine (x)")
    database.close()
    with pytest.raises(StateError, match="is not the journal of a controller"):
        State.open(tmp_path / "foreign")


@pytest.mark.parametrize("content", [None, b""])
def test_a_missing_journal_is_no_new_run(tmp_path: Path, content: bytes | None) -> None:
    """Starting again next to the models of a run would be silent and wrong."""
    with State.open(tmp_path, "process") as state:
        hand_in(state, 1)
    (tmp_path / "controller.db").unlink()
    if content is not None:
        (tmp_path / "controller.db").write_bytes(content)
    with pytest.raises(StateError, match=r"controller\.db is missing or empty"):
        State.open(tmp_path, "process")
    (tmp_path / "ACKNOWLEDGED").unlink()
    with pytest.raises(StateError, match=r"controller\.db is missing or empty"):
        State.open(tmp_path, "process")


def killed_copy(state: State, to: Path) -> Path:
    """The folder as a kill at this moment would leave it."""
    shutil.copytree(state.folder, to)
    return to


def test_a_missing_end_of_the_journal_is_noticed(tmp_path: Path) -> None:
    """SQLite starts from an earlier state without a word; deleting ACKNOWLEDGED accepts the loss."""
    with State.open(tmp_path / "a", "process") as state:
        hand_in(state, 1)
    with State.open(tmp_path / "a", "process") as state:
        hand_in(state, 2)
        killed = killed_copy(state, tmp_path / "b")
    (killed / "controller.db-wal").unlink()

    with pytest.raises(StateError, match="it ends with entry 1 of epoch 1, and once ended with entry 2 of epoch 2"):
        State.open(killed, "process")

    (killed / "ACKNOWLEDGED").unlink()
    with State.open(killed, "process") as state:
        assert [entry.update for entry in state.entries()] == [1]


def test_what_a_killed_controller_left_half_done_is_removed(tmp_path: Path) -> None:
    """Nothing half received, no snapshot that was not listed."""
    with State.open(tmp_path / "a", "process") as state:
        hand_in(state, 1)
        incoming = state.incoming()
        incoming.write(b"half")
        (tmp_path / "a" / "snapshots" / "000000000001-x.safetensors.new").write_bytes(b"half")
        killed = killed_copy(state, tmp_path / "b")
        incoming.__exit__()
    assert len(blobs(killed)) == 2
    with State.open(killed, "process"):
        assert blobs(killed) == {sha256(b"model 1")}
        assert not list((killed / "snapshots").iterdir())


def test_importing_it_is_cheap() -> None:
    """A crash test starts it hundreds of times."""
    program = (
        "import sys, metis.deployment.controller.state\n"
        "print([m for m in ('numpy', 'grpc', 'torch') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=ENVIRONMENT)
    assert done.stdout == "[]\n", done.stderr


# --- the journal --------------------------------------------------------------------------------------


def test_an_update_counts_once(state: State) -> None:
    """The second time the first entry is the answer, whatever came with it."""
    first = hand_in(state, 5)

    with pytest.raises(DuplicateUpdate, match="task 5 was already answered by entry 1") as caught:
        hand_in(state, 5, b"other bytes")

    assert caught.value.entry == first
    assert state.find(5) == first
    assert state.find(6) is None
    assert state.find(2**70) is None
    assert state.last_seq() == 1


def test_entries_come_in_order_and_lazily(state: State) -> None:
    """Also those that are appended while somebody reads, beyond any page."""
    for number in range(1, 601):
        state.append(float(number), {"n": number})
    reader = state.entries(after=250)
    assert next(reader).record == {"n": 251}
    state.append(601.0, {"n": 601})
    assert [entry.seq for entry in reader] == list(range(252, 602))
    assert list(state.entries(after=601)) == []


@pytest.mark.parametrize(
    "record",
    [
        {"event": "learner_joined", "learner": "Jürgen 東京 🙂 \ud800 \0", "examples": 3},
        {"numbers": [0.1, 1e308, -5e-324, 2**80], "none": None, "yes": True},
        {"numpy": np.float64(0.1).item(), "nested": {"a": [{}]}},
    ],
)
def test_a_record_comes_back_as_it_was(state: State, record: dict[str, Any]) -> None:
    """Any text, any number."""
    for at in (0.0, -0.0, 0.1 + 0.2, 1e300, 3):
        state.append(at, record)
    assert [entry.record for entry in state.entries()] == [record] * 5
    assert [entry.at for entry in state.entries()] == [0.0, -0.0, 0.1 + 0.2, 1e300, 3.0]


def test_numbers_of_numpy_are_numbers(state: State) -> None:
    """Which users take from their arrays."""
    state.append(np.float64(1.5), {"steps": np.int64(7), "loss": np.float32(0.5)})
    assert next(state.entries()).record == {"steps": 7, "loss": 0.5}


def test_an_entry_needs_its_blob(state: State) -> None:
    """An update without its model could not be replayed."""
    with pytest.raises(DataError, match="there is no model"):
        state.append(1.0, {}, update=1, blob=sha256(b"never came"))
    assert state.last_seq() == 0


def test_threads_take_turns(state: State) -> None:
    """Eight threads hand in the same hundred updates: each counts once, and the numbering has no gap."""
    seen: list[int] = []
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for number in range(1, 101):
                try:
                    seen.append(hand_in(state, number).seq)
                except DuplicateUpdate as duplicate:
                    assert duplicate.entry.update == number
                if number % 20 == 0:
                    state.collect([])
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert not failures
    assert sorted(seen) == list(range(1, 101))
    assert all(state.verify_blob(entry.blob or "") for entry in state.entries())


# --- blobs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("durability", ["power", "process"])
def test_a_model_is_received_in_parts(tmp_path: Path, durability: Any) -> None:
    """Bytes, arrays, empty parts; its name is its SHA-256."""
    vector = np.arange(6, dtype=np.float32).reshape(2, 3)
    content = b"ab" + vector.tobytes()
    with State.open(tmp_path, durability) as state:
        with state.incoming() as incoming:
            incoming.write(b"")
            incoming.write(b"ab")
            incoming.write(np.zeros((0, 3), np.float32).data)
            incoming.write(vector.data)
            assert incoming.bytes == len(content)
            name = incoming.commit(len(content), sha256(content))
        assert name == sha256(content)
        assert state.blob_path(name).read_bytes() == content
        assert blobs(tmp_path) == {name}


def test_what_is_not_as_announced_is_refused(state: State) -> None:
    """Too short, too long, other bytes: nothing stays."""
    for announced, message in [
        ((4, sha256(b"abc")), "3 bytes came, but 4 were announced"),
        ((2, sha256(b"abc")), "3 bytes came, but 2 were announced"),
        ((3, sha256(b"abd")), f"checksum {sha256(b'abc')}, not {sha256(b'abd')}"),
    ]:
        with pytest.raises(BlobMismatch, match=message), state.incoming() as incoming:
            incoming.write(b"abc")
            incoming.commit(*announced)
    assert blobs(state.folder) == set()


def test_what_is_not_committed_leaves_no_trace(state: State) -> None:
    """A learner that vanishes in the middle of an upload."""
    with pytest.raises(ConnectionError), state.incoming() as incoming:
        incoming.write(b"abc")
        raise ConnectionError
    assert blobs(state.folder) == set()


@pytest.mark.parametrize("name", ["../controller.db", "tmp.abc", "", ".", "A" * 64, "a" * 63, "a" * 64 + "\n"])
def test_only_a_blob_is_a_blob(state: State, name: str) -> None:
    """A name that comes from elsewhere does not lead out of the folder."""
    with pytest.raises(DataError, match="there is no model"):
        state.blob_path(name)
    assert not state.verify_blob(name)


def test_a_damaged_blob_is_set_aside(state: State) -> None:
    """It is not taken for whole, and the same bytes sent again replace it."""
    name = put(state, b"model")
    assert state.verify_blob(name)
    path = state.blob_path(name)
    path.write_bytes(b"nodel")

    assert not state.verify_blob(name)

    assert blobs(state.folder) == set()
    assert (state.folder / "quarantine" / name).read_bytes() == b"nodel"
    put(state, b"model")
    assert state.verify_blob(name)
    path.write_bytes(b"")
    put(state, b"model")  # also when nobody had noticed
    assert state.verify_blob(name)


def test_a_reader_keeps_the_blob_that_is_collected(state: State) -> None:
    """Somebody downloads the last version while it is replaced."""
    name = put(state, b"old model")
    with state.blob_path(name).open("rb") as file:
        state.collect([])
        assert state.collect([]) == 1
        assert file.read() == b"old model"


# --- collection -----------------------------------------------------------------------------------------


def test_what_a_restart_needs_is_not_collected(state: State) -> None:
    """All since the older snapshot, what the snapshots name, and what the caller keeps; the rest goes."""
    entries = [hand_in(state, number) for number in range(1, 5)]
    kept, needed = put(state, b"being evaluated"), put(state, b"version 1")
    state.write_snapshot(4, {}, {}, [needed])
    state.collect([kept])
    state.collect([kept])
    assert blobs(state.folder) == {kept, needed, *(entry.blob for entry in entries)}  # one snapshot may be damaged

    later = [hand_in(state, number) for number in (5, 6)]
    state.write_snapshot(6, {}, {})
    state.collect([kept])
    assert state.collect([kept]) == 0
    assert blobs(state.folder) == {kept, needed, *(entry.blob for entry in later)}

    assert state.find(1) == entries[0]  # the answer stays the same
    state.write_snapshot(6, {}, {})
    state.collect([])
    state.collect([])
    assert blobs(state.folder) == set()


def test_what_was_received_is_not_collected(state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between being received and being journaled it belongs to nobody; what is never journaled goes in the end."""
    with state.incoming() as incoming:
        incoming.write(b"received")
        name = incoming.commit(incoming.bytes, incoming.checksum)
    for _ in range(3):
        assert state.collect([]) == 0
    state.append(1.0, {}, update=1, blob=name)
    for _ in range(3):
        assert state.collect([]) == 0

    with state.incoming() as incoming:
        incoming.write(b"invalid")
        incoming.commit(incoming.bytes, incoming.checksum)
    state.collect([])
    monkeypatch.setattr(blobs_module, "_HOLD_SECONDS", 0)
    assert state.collect([]) == 1
    assert blobs(state.folder) == {name}


# --- snapshots ------------------------------------------------------------------------------------------


def test_the_last_two_snapshots_stay(state: State) -> None:
    """With their arrays of any shape, or none."""
    for number in range(1, 5):
        state.append(float(number), {})
        arrays = {"sum": np.full((2, number), 0.1), "one": np.array(number)} if number < 4 else {}
        state.write_snapshot(number, arrays, {"version": number})

    newest, older = state.snapshots()

    assert ((newest.seq, newest.facts), (older.seq, older.facts)) == ((4, {"version": 4}), (3, {"version": 3}))
    assert state.load_snapshot(newest) == {}
    assert np.array_equal(state.load_snapshot(older)["sum"], np.full((2, 3), 0.1))
    assert {path.name for path in (state.folder / "snapshots").iterdir()} == {newest.arrays, older.arrays}


def test_a_damaged_snapshot_is_passed_over(tmp_path: Path) -> None:
    """The older one is used, and stays until there are two good ones again."""
    with State.open(tmp_path, "process") as state:
        for number in (1, 2):
            state.append(float(number), {})
            state.write_snapshot(number, {"w": np.arange(9.0)}, {})
        newest, older = state.snapshots()
        path = tmp_path / "snapshots" / newest.arrays
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(DataError, match=newest.arrays):
            state.load_snapshot(newest)
        assert state.snapshots() == [older]
    with State.open(tmp_path, "process") as state:
        assert state.snapshots() == [older]
        state.append(3.0, {})
        state.write_snapshot(3, {}, {})
        assert [snapshot.seq for snapshot in state.snapshots()] == [3, 1]
        assert np.array_equal(state.load_snapshot(older)["w"], np.arange(9.0))
        state.write_snapshot(3, {}, {})
        assert len(list((tmp_path / "snapshots").iterdir())) == 2


def test_a_snapshot_of_another_moment_is_damaged(state: State) -> None:
    """A whole file under the wrong name is wrong too."""
    state.append(1.0, {})
    state.append(2.0, {})
    state.write_snapshot(1, {"w": np.zeros(2)}, {})
    state.write_snapshot(2, {"w": np.ones(2)}, {})
    newest, older = (state.folder / "snapshots" / snapshot.arrays for snapshot in state.snapshots())
    shutil.copy(older, newest)
    with pytest.raises(DataError, match="it is not the snapshot after entry 2 of this run"):
        state.load_snapshot(state.snapshots()[0])


def test_a_snapshot_is_of_what_is_there(state: State) -> None:
    """Not of the future, not older than the last, not without its blobs."""
    state.append(1.0, {})
    state.append(2.0, {})
    state.write_snapshot(2, {}, {})
    for seq in (1, 3):
        with pytest.raises(ValueError, match="is older than the last one, or newer than the journal"):
            state.write_snapshot(seq, {}, {})
    with pytest.raises(DataError, match="there is no model"):
        state.write_snapshot(2, {}, {}, [sha256(b"never came")])
    assert len(state.snapshots()) == 1
    assert len(list((state.folder / "snapshots").iterdir())) == 1


# --- the disk -------------------------------------------------------------------------------------------


def test_use_of_the_disk_is_told(state: State) -> None:
    """All files count."""
    before = state.usage()
    put(state, b"x" * 100_000)
    assert state.usage() == before + 100_000
    assert state.measure_commit() > 0


def test_the_journal_stays_small_on_disk(state: State) -> None:
    """The WAL is emptied on the way, not only at the end."""
    for number in range(2000):
        state.append(float(number), {"n": number})
    assert (state.folder / "controller.db-wal").stat().st_size < 8 << 20
    state.close()
    assert not (state.folder / "controller.db-wal").exists()


def test_a_full_disk_stops_nothing_for_ever(tmp_path: Path) -> None:
    """A blob, the journal and a snapshot find no room; nothing half-written stays, and it goes on with room again."""
    disk = tmp_path / "disk"
    disk.mkdir()
    program = Path(__file__).with_name("full_disk.py")
    mount = f"mount -t tmpfs -o size=600k tmpfs {disk}"
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-rm", "sh", "-c", mount], stderr=-3).returncode:
        pytest.skip("a small disk cannot be mounted here")
    script = f"{mount} && head -c 200000 /dev/zero > {disk}/ballast && exec {sys.executable} {program} {disk}/state"
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", f"{script} {disk}/ballast"],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["updates"] > 5
    assert result["read_while_full"] == result["updates"] + result["events"]
    assert result["refusal"] == "" or "no room" in result["refusal"]
    assert (result["left"], result["lost"], result["whole"]) == ([], 0, True)
    assert result["last"][0] == result["last"][1]
    assert result["snapshot"] == 20_003


# --- damage ---------------------------------------------------------------------------------------------


def everything(folder: Path) -> dict[str, Any]:
    """All that a restarting controller would read; a damaged snapshot or blob is None, which it would notice."""
    with State.open(folder, "process") as state:
        found: dict[str, Any] = {"run": state.run, "facts": state.facts(), "entries": list(state.entries())}
        found["find"] = [state.find(number) for number in range(1, 117)]
        for index, snapshot in enumerate(state.snapshots()):
            found[f"snapshot {index}"] = snapshot
            try:
                arrays = state.load_snapshot(snapshot)
            except DataError:
                found[f"arrays {index}"] = None
            else:
                found[f"arrays {index}"] = {name: array.tolist() for name, array in arrays.items()}
        for entry in found["entries"]:
            if entry.blob is not None:
                found[entry.blob] = True if state.verify_blob(entry.blob) else None
        return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as a kill leaves it: some of the journal in the database, some in the WAL."""
    folder = tmp_path_factory.mktemp("damage")

    def work(state: State, first: int, last: int) -> None:
        for number in range(first, last + 1):
            blob = put(state, f"model {number}".encode()) if number % 10 == 0 else None
            state.append(number / 7, {"learner": "x" * 200, "n": number}, update=number, blob=blob)

    with State.open(folder / "a", "process") as state:
        state.begin({"config": "x" * 300, "layout": [1, 2, 3]})
        work(state, 1, 99)
    with State.open(folder / "a", "process") as state:
        state.write_snapshot(99, {"sum": np.arange(40.0), "b": np.ones(3, np.float32)}, {"v": {"1": "x"}})
        work(state, 100, 110)
        state.write_snapshot(110, {"sum": np.arange(40.0) * 2, "b": np.zeros(3, np.float32)}, {"v": {"2": "y"}})
        work(state, 111, 115)
        return killed_copy(state, folder / "b")


def flip(path: Path, offset: int, chance: random.Random) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ (1 << chance.randrange(8))]))


def truncate(path: Path, offset: int, chance: random.Random) -> None:
    os.truncate(path, offset)


def overwrite(path: Path, offset: int, chance: random.Random) -> None:
    """A sector of something else."""
    with path.open("r+b") as file:
        file.seek(offset // 512 * 512)
        file.write(chance.randbytes(min(512, path.stat().st_size - file.tell())))


FILES: dict[str, Callable[[Path], Path]] = {
    "database": lambda folder: folder / "controller.db",
    "wal": lambda folder: folder / "controller.db-wal",
    "acknowledged": lambda folder: folder / "ACKNOWLEDGED",
    "lock": lambda folder: folder / "LOCK",
    "snapshot": lambda folder: max((folder / "snapshots").iterdir()),
    "older snapshot": lambda folder: min((folder / "snapshots").iterdir()),
    "blob": lambda folder: folder / "blobs" / sha256(b"model 30"),
}
TRIES = {"database": 100, "wal": 100}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", [flip, truncate, overwrite])
def test_damage_is_noticed(whole: Path, tmp_path: Path, name: str, damage: Callable[..., None]) -> None:
    """Wherever a file is damaged: the right data, or a clear error that comes again; never a silent wrong start."""
    truth = everything(Path(shutil.copytree(whole, tmp_path / "truth")))
    chance = random.Random(f"{name} {damage.__name__}")
    size = FILES[name](whole).stat().st_size
    outcomes = {"right": 0, "noticed": 0, "refused": 0}
    for attempt in range(TRIES.get(name, 30)):
        folder = Path(shutil.copytree(whole, tmp_path / str(attempt)))
        offset = chance.randrange(min(size, 200)) if attempt % 4 == 0 else chance.randrange(size)
        damage(FILES[name](folder), offset, chance)
        try:
            found = everything(folder)
        except StateError as problem:
            assert str(folder) in str(problem)
            assert "\n" not in str(problem)
            outcomes["refused"] += 1
            with pytest.raises(StateError):
                everything(folder)
        else:
            silent = {key for key in truth if found.get(key) != truth[key] and found.get(key, 1) is not None}
            assert not silent, f"{damage.__name__} at {offset} of {size}: {silent}"
            outcomes["right" if found == truth else "noticed"] += 1
        shutil.rmtree(folder)
    if name in {"lock", "acknowledged"}:
        assert outcomes["right"] == 30
    elif "snapshot" in name or name == "blob":
        assert outcomes["refused"] == 0
        assert outcomes["noticed"] > 20
    elif damage is truncate:
        assert outcomes["refused"] > 50


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_noticed(whole: Path, tmp_path: Path, name: str) -> None:
    """The same for one that is gone."""
    truth = everything(Path(shutil.copytree(whole, tmp_path / "truth")))
    folder = Path(shutil.copytree(whole, tmp_path / "state"))
    FILES[name](folder).unlink()
    if name in {"database", "wal"}:
        with pytest.raises(StateError, match=r"missing or empty|lost what was acknowledged"):
            everything(folder)
        return
    found = everything(folder)
    assert {key for key in truth if found.get(key) != truth[key] and found.get(key, 1) is not None} == set()
    assert (found == truth) == (name in {"acknowledged", "lock"})


# --- any history ----------------------------------------------------------------------------------------


class Histories(RuleBasedStateMachine):
    """Whatever is done in whatever order, closed or killed in between: the folder is what a dictionary would be."""

    folder: Path
    state: State
    serial = 0

    @initialize()
    def start(self) -> None:
        Histories.serial += 1
        self.generation = 0
        self.base = self.root / str(Histories.serial)
        self.folder = self.base / "0"
        self.state = State.open(self.folder, "process")
        self.run, self.epoch = self.state.run, 1
        self.facts: dict[str, Any] | None = None
        self.journal: list[Entry] = []
        self.snapshots: list[tuple[int, float]] = []
        self.needed: set[str] = set()

    root: Path

    @rule(facts=st.dictionaries(st.text(max_size=3), st.floats(allow_nan=False), max_size=2))
    def begin(self, facts: dict[str, Any]) -> None:
        if self.facts is None:
            self.state.begin(facts)
            self.facts = facts
        else:
            with pytest.raises(ValueError, match="already begun"):
                self.state.begin(facts)

    @rule(number=st.integers(1, 12), content=st.binary(max_size=3))
    def update(self, number: int, content: bytes) -> None:
        known = next((entry for entry in self.journal if entry.update == number), None)
        if known is None:
            self.journal.append(hand_in(self.state, number, content))
        else:
            with pytest.raises(DuplicateUpdate) as caught:
                hand_in(self.state, number, content)
            assert caught.value.entry == known

    @rule(at=st.floats(0, 1e9), text=st.text(max_size=5))
    def event(self, at: float, text: str) -> None:
        seq = self.state.append(at, {"reason": text})
        self.journal.append(Entry(seq, at, {"reason": text}, None, None))

    @rule(number=st.floats(allow_nan=False), content=st.binary(max_size=3))
    def snapshot(self, number: float, content: bytes) -> None:
        needed = put(self.state, content)
        self.state.write_snapshot(len(self.journal), {"w": np.array([number])}, {"x": number}, [needed])
        self.snapshots = [(len(self.journal), number), *self.snapshots[:1]]

    @rule(content=st.binary(max_size=3))
    def abandon(self, content: bytes) -> None:
        with self.state.incoming() as incoming:
            incoming.write(content)

    @rule()
    def collect(self) -> None:
        self.state.collect([])

    @rule(killed=st.booleans())
    def restart(self, killed: bool) -> None:
        if killed:
            self.generation += 1
            left = killed_copy(self.state, self.base / str(self.generation))
            self.state.close()
            shutil.rmtree(self.folder)
            self.folder = left
        else:
            self.state.close()
        self.state = State.open(self.folder, "process")
        self.epoch += 1

    @invariant()
    def same(self) -> None:
        assert (self.state.run, self.state.epoch, self.state.facts()) == (self.run, self.epoch, self.facts)
        assert list(self.state.entries()) == self.journal
        assert self.state.last_seq() == len(self.journal)
        snapshots = self.state.snapshots()
        assert [(s.seq, self.state.load_snapshot(s)["w"][0]) for s in snapshots] == self.snapshots
        assert [s.facts["x"] for s in snapshots] == [number for _, number in self.snapshots]
        replayed = self.snapshots[1][0] if len(self.snapshots) > 1 else 0
        needed = {entry.blob for entry in self.journal[replayed:] if entry.blob is not None}
        needed |= {blob for snapshot in snapshots for blob in snapshot.blobs}
        assert all(self.state.verify_blob(blob) for blob in needed)
        for entry in self.journal:
            if entry.update is not None:
                assert self.state.find(entry.update) == entry

    def teardown(self) -> None:
        if hasattr(self, "state"):
            self.state.close()
            shutil.rmtree(self.base)


@pytest.mark.hypothesis
def test_any_history(tmp_path: Path) -> None:
    """Against a model in memory."""
    Histories.root = tmp_path
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(
        Histories,
        settings=settings(max_examples=40, stateful_step_count=25, suppress_health_check=list(HealthCheck)),
    )


# --- small local models, and several entries at once --------------------------------------------------


def small(state: State, number: int, content: bytes) -> str:
    """Journal an update with its content; the name of it."""
    mac = ModelMac()
    mac.update(content)
    name = name_of(mac.digest().hex())
    state.append(float(number), {"n": number}, update=number, blob=name, content=content)
    return name


def test_a_small_model_is_in_the_journal_and_becomes_a_file_where_one_is_needed(tmp_path: Path) -> None:
    """After a restart too; it goes when nothing needs it, and a damaged one is noticed."""
    with State.open(tmp_path, "process") as state:
        name, other = small(state, 1, b"first"), small(state, 2, b"second")
        assert not list(state.blobs.folder.iterdir())
    with State.open(tmp_path, "process") as state:
        assert state.journal.content(name) == b"first"
        assert state.verify_blob(name) and state.verify_blob(other)
        assert state.blob_path(name).read_bytes() == b"first"
        for seq in (1, 2):
            state.write_snapshot(seq, {}, {}, [other])
        later = small(state, 3, b"third")
        state.collect([])
        assert state.journal.contents == {other, later}
        assert not state.verify_blob(name)
    with sqlite3.connect(tmp_path / "controller.db") as database:
        database.execute("UPDATE content SET bytes = ? WHERE name = ?", (b"secone", other))
    database.close()
    with State.open(tmp_path, "process") as state:
        assert not state.verify_blob(other)
        assert state.verify_blob(later)


def test_entries_of_one_block_are_there_together_or_not_at_all(tmp_path: Path) -> None:
    """And nobody finds one of them before all are durable."""
    with State.open(tmp_path, "process") as state:
        small(state, 1, b"one")
        with state.together():
            small(state, 2, b"two")
            assert state.find(2) is None
            with pytest.raises(DuplicateUpdate, match="task 2 was already answered by entry 2"):
                small(state, 2, b"other")
            state.append(3.0, {"n": 3})
        assert [entry.update for entry in state.entries()] == [1, 2, None]
        with pytest.raises(RuntimeError), state.together():
            small(state, 4, b"four")
            raise RuntimeError
        assert state.find(4) is None
        assert state.last_seq() == 3
        assert small(state, 4, b"four") in state.journal.contents
    with State.open(tmp_path, "process") as state:
        assert [entry.seq for entry in state.entries()] == [1, 2, 3, 4]


def test_what_is_not_synced_may_be_lost_without_harm(tmp_path: Path) -> None:
    """What says how far the journal had come is not ahead of it."""
    with State.open(tmp_path, "power") as state:
        state.append(1.0, {"n": 1})
        state.append(2.0, {"n": 2}, synced=False)
        marks = (tmp_path / "ACKNOWLEDGED").read_text()
        state.append(3.0, {"n": 3})
        later = (tmp_path / "ACKNOWLEDGED").read_text()
    assert (int(marks.split()[3]), int(later.split()[3])) == (1, 3)
