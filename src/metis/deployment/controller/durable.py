"""The core's controller on top of a state folder: every event is journaled before it has an effect.

The journal is the truth and the controller a fold over it. A restart replays it: up to the latest snapshot without
weights, which are in the snapshot, and from there on with the models that were handed in. Nothing here knows the
network or the clock; one thread calls it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from metis.core.arithmetic import Row
from metis.core.controller import Controller
from metis.core.events import (
    Action,
    CommunityPublished,
    Event,
    LearnerId,
    LearnersExpected,
    LocalTask,
    ModelResent,
    RolledBack,
    RoundMeasure,
    SumOpened,
    UpdateRequest,
)
from metis.core.mixing import MemoryStore, ModelStore
from metis.core.model import Layout, Model, Vector
from metis.deployment.controller.disk import RESTORE, with_a_file
from metis.deployment.controller.journal import Entry
from metis.deployment.controller.state import Snapshot, State
from metis.deployment.storage import read_file, storage
from metis.deployment.wire.chunks import travels_inside
from metis.deployment.wire.model_mac import new_model_mac
from metis.deployment.wire.models import model_bytes, model_of, model_pieces, payload_sha256, read_model, release_memory
from metis.errors import ConfigError, DataError, DiskFull, LearnerError, StateError
from metis.runs.trace import from_record, measure_record, recorded_measure, to_record

Record = Callable[[float, Event | Action], None]
MakeController = Callable[[Model, ModelStore], Controller]

KEEP_MODELS = 5  # community models that stay on disk behind the current one, unless a file says otherwise
_SMALL_IN_MEMORY = 64 << 20  # bytes of the latest local models, if each of them is small
_MIN_REPLAY = 10  # updates between two snapshots; a restart replays at most twice as many models
_MIN_REPLAY_SMALL = 256  # the same of models in the journal, of which each is replayed in a fraction of a millisecond


def _event_of(record: dict[str, Any]) -> Event:
    """The event of an entry, without weights."""
    if "start_with" in record:  # how the start was journaled before it became an event
        return LearnersExpected(record["start_with"])
    return from_record(record)[1]  # type: ignore[return-value]  # the journal holds events only


def _handed_in(event: Event) -> int | None:
    """The number of the update that an event brings; None if it brings none."""
    if isinstance(event, UpdateRequest) or (isinstance(event, ModelResent) and not event.lost):
        return event.task
    return None


def initial_model(state: State, sha256: str, layout: Layout) -> Model:
    """The model that the run was begun with; a StateError if it is not what it was."""
    if not state.verify_blob(sha256):
        path = state.folder / "blobs" / sha256
        raise StateError(f"the initial model {path} is damaged or missing; {RESTORE}")
    return read_model(state.blob_path(sha256), layout)


class _FileRow:
    """A local model that stays in its file; only the part that is asked for is read."""

    def __init__(self, path: Path, size: int) -> None:
        self._path, self._size = path, size

    def __getitem__(self, part: slice, /) -> Vector:
        start, stop, _ = part.indices(self._size)
        return with_a_file(lambda: self._read(start, stop - start))

    def _read(self, start: int, count: int) -> Vector:
        if storage().sealed:
            content = read_file(self._path, 4 * start, 4 * count)
            return np.frombuffer(content, "<f4").astype(np.float32, copy=False)
        return np.fromfile(self._path, "<f4", count=count, offset=4 * start).astype(np.float32, copy=False)


class _BlobStore:
    """Remembers which file holds the latest local model of each learner; the files are there already."""

    def __init__(self, state: State, size: int) -> None:
        self._state, self._size = state, size
        self.incoming: str | None = None  # the name of the model that is being committed
        self.blobs: dict[LearnerId, str] = {}
        self._small: dict[LearnerId, Vector] = {}  # small ones stay in memory too

    def put(self, learner: LearnerId, vector: Vector) -> None:
        if self.incoming is not None:  # None while a snapshot is loaded, which brings its own list
            self.blobs[learner] = self.incoming
            self._small.pop(learner, None)
            if travels_inside(vector.nbytes) and len(self._small) < _SMALL_IN_MEMORY // vector.nbytes:
                self._small[learner] = vector

    def get(self, learner: LearnerId) -> Row:
        if (vector := self._small.get(learner)) is not None:
            return vector
        if (content := self._state.journal.content(self.blobs[learner])) is not None:
            return np.frombuffer(content, "<f4", self._size).astype(np.float32, copy=False)
        return _FileRow(self._state.blob_path(self.blobs[learner]), self._size)

    def remove(self, learner: LearnerId) -> None:
        self.blobs.pop(learner, None)
        self._small.pop(learner, None)


class DurableController:
    """A controller that can be killed at any instruction and resumes from its journal."""

    controller: Controller

    def __init__(
        self,
        make: MakeController,
        initial_model: Model,
        state: State,
        record: Record,
        *,
        replay_at_most: int | None = None,
        keep_models: int = KEEP_MODELS,
        update_size: int | None = None,  # numbers of an update, if it is not a model
    ) -> None:
        self.state = state
        self.layout = initial_model.layout
        self._update_size = self.layout.size if update_size is None else update_size
        self._make, self._initial_model, self._record = make, initial_model, record
        self._replay_at_most, self._keep_models = replay_at_most, keep_models
        self._half_applied: list[Action] | None = None  # of an entry whose models found no room on a full disk
        self.now = 0.0  # of the latest event
        self.hashes: dict[int, str] = {}  # of every version ever published; the files of old ones are gone
        self.pinned: set[str] = set()  # blobs that are needed elsewhere: the best model, one being evaluated
        self._small = (-1, b"")  # a version and its bytes
        self.contents: dict[str, bytes] = {}  # of small local models that are journaled and not applied yet
        self._recover()

    @property
    def local_blobs(self) -> dict[LearnerId, str]:
        """The files of the latest local models."""
        return self._store.blobs

    # --- tasks ------------------------------------------------------------------------

    def open_task(self, learner: LearnerId) -> LocalTask | None:
        """The task that an update of this learner must answer."""
        record = self.controller.roster.get(learner)
        return record.task if record is not None and record.available else None

    # --- events -----------------------------------------------------------------------------------

    def journal(self, event: Event, now: float, blob: str | None = None, content: bytes | None = None) -> Entry:
        """Make the event durable; it has no effect before `apply`. An update that is already in the journal raises.

        Of a small local model the content is in the journal too, and in no file.
        """
        update = _handed_in(event)
        # The model is in its blob; the journal holds the rest.
        entry_record = to_record(now, event)
        seq = self.state.append(now, entry_record, update=update, blob=blob, content=content)
        if blob is not None and content is not None:
            self.contents[blob] = content
        return Entry(seq, now, entry_record, update, blob)

    def rollback(self, version: int, after: int | None = None) -> tuple[RolledBack, str]:
        """The event that leads back to a community model that is kept, and its blob; a ConfigError if none can.

        `after` is the latest version that the caller knows: if there was a rollback since, this one is not made.
        """
        kept = self.kept()
        if self.controller.finished:
            raise ConfigError("the federation has ended; there is nothing to roll back")
        if after is not None and (latest := self.controller.latest_rollback) > after:
            raise ConfigError(
                f"the federation was rolled back since community model {after}, as community model {latest}; nothing "
                "was changed now"
            )
        if version not in kept or not self.state.verify_blob(kept[version]):
            known = ", ".join(map(str, sorted(kept.keys() - {version}, reverse=True)))
            raise ConfigError(f"community model {version} is not kept; those that are, the newest first: {known}")
        self.state.sync_blob(kept[version])  # what the journal names is on the disk
        return RolledBack(version, Model.empty()), kept[version]

    def apply(self, entry: Entry) -> list[Action]:
        """Let a journaled event take effect, in the order of the journal; returns what the runtime must do.

        After a `DiskFull` the same entry must be applied again before any other: what it did in memory is not repeated.
        """
        if self._half_applied is None:
            self._half_applied = self._digest(entry)
        actions = self._half_applied
        published = any(isinstance(action, CommunityPublished) for action in actions)
        with self.state.together(synced=False) if published and self._in_journal else nullcontext():
            self._keep_versions(actions)
            self._journal_publication(actions, entry.at)
        self._half_applied, self._published = None, self.controller.community.stamp.version
        if entry.update is not None:
            self._since_snapshot += 1
            least = _MIN_REPLAY_SMALL if entry.blob in self.state.journal.contents else _MIN_REPLAY
            limit = self._replay_at_most or max(least, self.controller.roster.available_count)
            if self._since_snapshot >= limit:
                with suppress(DiskFull):  # the next update tries again; until then more is replayed
                    self.snapshot()
        return actions

    def _digest(self, entry: Entry) -> list[Action]:
        self.now = max(self.now, entry.at)
        self._seq = entry.seq
        event = self._event(entry)
        self._store.incoming = entry.blob
        try:
            actions = self.controller.handle(event, entry.at)
        except LearnerError:  # it answers no open task; in a replay the same happens
            return []
        self._record(entry.at, event)
        for action in actions:
            self._record(entry.at, action)
        return actions

    def _event(self, entry: Entry) -> Event:
        event, policy = _event_of(entry.record), self.controller.policy
        masked = isinstance(event, UpdateRequest | ModelResent) and policy.secure_sum is not None  # as `Sums` has them
        if entry.blob is None or masked:
            return event
        whose = f"learner '{event.learner}'" if isinstance(event, UpdateRequest) else "a rollback"
        if self._recovering and not self.state.verify_blob(entry.blob):
            raise DataError(f"the model file blobs/{entry.blob} of {whose} is damaged")
        if isinstance(event, UpdateRequest) and policy.hides_models:
            return event  # nobody here reads it
        if isinstance(event, SumOpened):
            total = with_a_file(lambda: read_file(self.state.blob_path(entry.blob or "")))
            return replace(event, total=np.frombuffer(total, np.uint8))
        model = self._read(entry.blob)
        if isinstance(event, RolledBack):
            return replace(event, community_model=model)
        assert isinstance(event, UpdateRequest)
        return replace(event, local_model=model)

    def _read(self, blob: str) -> Model:
        content = self.contents.pop(blob, None) or self.state.journal.content(blob)
        if content is not None:
            return model_of(content, self.layout)
        return with_a_file(lambda: read_model(self.state.blob_path(blob), self.layout))

    # --- published models -------------------------------------------------------------------------

    def _keep_versions(self, actions: Collection[Action]) -> None:
        for action in actions:
            if isinstance(action, CommunityPublished):
                self._keep_version(action)
        self._forget_versions()

    def _keep_version(self, action: CommunityPublished) -> None:
        """Write the model to its blob and work with the file from now on, so that it need not stay in memory."""
        mac = new_model_mac()
        if self._in_journal:
            content = b"".join(model_pieces(action.community_model))
            blob = self.state.put_small(content)
            self._small = action.stamp.version, content
            if mac is not None:
                mac.update(content)
        else:
            blob = self.state.put_blob(model_pieces(action.community_model), durable=False, also=mac)
        if mac is not None:
            self.model_macs[action.stamp.version] = mac.digest()
        self.versions[action.stamp.version] = self.hashes[action.stamp.version] = blob
        self._recent[action.stamp.version] = blob
        if action.measure is not None:
            self._measures[action.stamp.version] = action.measure
        community = self.controller.community
        if self._in_journal:
            return  # it may stay in memory
        community.model = self._read(blob)
        if community.uses_base:
            for record in self.controller.roster.training:
                if record.task is not None and record.task.based_on == community.stamp:
                    record.base_model = community.model

    def small_model(self, version: int) -> bytes:
        """The bytes of a community model that travels with its task; nothing if it is large, or cannot be read now."""
        if not travels_inside(model_bytes(self.layout)):
            return b""
        if self._small[0] != version:
            with suppress(OSError, DataError):
                blob = self.hashes[version]
                self._small = version, self.state.journal.content(blob) or read_file(self.state.blob_path(blob))
        return self._small[1] if self._small[0] == version else b""

    def kept(self) -> dict[int, str]:
        """The community models that are on disk, by version: the newest, the first, and what is pinned."""
        pinned = {version: blob for version, blob in self.hashes.items() if blob in self.pinned}
        candidates = {0: self.hashes[0], **pinned, **self._recent, **self.versions}
        return {
            version: candidates[version] for version in sorted(candidates) if self.state.has_blob(candidates[version])
        }

    @property
    def _in_journal(self) -> bool:
        """Whether community models are small enough for it; none that is sealed."""
        return travels_inside(model_bytes(self.layout)) and not storage().sealed

    def _journal_publication(self, actions: Collection[Action], now: float) -> None:
        """Before anybody trains on it: after a crash the same version must have the same bits."""
        for action in actions:
            if isinstance(action, CommunityPublished) and action.stamp.version > self._published:
                self._note_published(action.stamp.version, now)

    def _note_published(self, version: int, now: float) -> None:
        measure = self._measures.pop(version, None)
        measured = {} if measure is None else measure_record(measure)
        record = {"at": now, "published": version, "sha256": self.hashes[version], **measured}
        # A loss of power may take it back: then the events before it, which are durable, lead to the same bits again.
        self.state.append(now, record, synced=False)

    def _forget_versions(self) -> None:
        current = self.controller.community.stamp.version
        if others := self.versions.keys() - {current}:
            leased = {r.task.based_on.version for r in self.controller.roster.training if r.task is not None}
            for version in others - leased:
                del self.versions[version]
                self.model_macs.pop(version, None)
        for version in sorted(self._recent.keys() - {current})[: -self._keep_models or None]:
            del self._recent[version]

    # --- snapshots and recovery -------------------------------------------------------------------

    def snapshot(self) -> None:
        """Save what a replay could only restore from all models since the beginning, and drop those."""
        arrays = self.controller.community.arrays(local_models=False)  # they are in their blobs
        recent = {version: blob for version, blob in self._recent.items() if self.state.has_blob(blob)}
        facts = {
            "locals": dict(self._store.blobs),
            "versions": {str(version): blob for version, blob in self.versions.items()},
            "recent": {str(version): blob for version, blob in recent.items()},
            "pinned": sorted(self.pinned),
        }
        for blob in self.versions.values():
            self.state.sync_blob(blob)
        # The initial model stays: without an intact snapshot the replay begins with it.
        needed = {
            *self._store.blobs.values(), *self.versions.values(), *recent.values(), *self.pinned, self.hashes[0]
        }  # fmt: skip
        self.state.write_snapshot(self._seq, arrays, facts, needed)
        self._since_snapshot = 0
        self.state.collect(needed)
        self.state.blobs.forget_partial(self.controller.open_updates)

    def _recover(self) -> None:
        """Restore the state that the journal describes, from the newest intact snapshot."""
        problems: list[str] = []
        for snapshot in [*self.state.snapshots(), None]:
            try:
                self._replay(snapshot)
                return
            except DataError as problem:
                problems.append(str(problem))
        raise StateError(f"the state cannot be recovered: {'; '.join(dict.fromkeys(problems))}; {RESTORE}")

    def _replay(self, snapshot: Snapshot | None) -> None:
        self.versions: dict[int, str] = {}  # that the federation needs: the current one, and those that open tasks have
        self._recent: dict[int, str] = {}  # the newest ones, which a rollback may need
        self.hashes = {0: payload_sha256(self._initial_model)}
        self.model_macs: dict[int, bytes] = {}  # of those in `versions` that were mixed since the start
        self._measures: dict[int, RoundMeasure] = {}  # of versions that are not in the journal yet
        self._store = _BlobStore(self.state, self._update_size)
        self._since_snapshot = 0
        self._seq = 0  # of the last entry that was applied; later ones may be in the journal
        self.now = 0.0
        trace: list[tuple[float, Event | Action]] = []
        self._published = 0  # latest version whose hash is in the journal
        self._recovering = True
        real_record, self._record = self._record, lambda now, item: trace.append((now, item))
        try:
            if snapshot is None:
                self.controller = self._make(self._initial_model, self._store)
                self.versions[0] = self._recent[0] = self.state.put_blob(model_pieces(self._initial_model))
                entries = self.state.entries()
            else:
                self._replay_without_weights(snapshot, trace)
                if not self.state.verify_blob(self.hashes[0]):  # every snapshot names it, and a rollback may need it
                    self.state.put_blob(model_pieces(self._initial_model))
                entries = self.state.entries(snapshot.seq)
            for entry in entries:
                if "published" in entry.record:
                    self._check_published(entry)
                    continue
                self._keep_versions(self._digest(entry))
                self._since_snapshot += entry.update is not None
        finally:
            self._record, self._recovering = real_record, False
            release_memory(self._initial_model)
        # Killed between publishing and journaling it: nobody has trained on these yet.
        for version in range(self._published + 1, self.controller.community.stamp.version + 1):
            self._note_published(version, self.now)
        self._published = self.controller.community.stamp.version
        for now, item in trace:
            self._record(now, item)

    def _replay_without_weights(self, snapshot: Snapshot, trace: list[tuple[float, Event | Action]]) -> None:
        arrays = self.state.load_snapshot(snapshot)
        controller = self._make(Model.empty(), MemoryStore())
        controller.measures = self._journaled_measures()
        for entry in self.state.entries():
            if entry.seq > snapshot.seq:
                break
            self.now = max(self.now, entry.at)
            if "published" in entry.record:
                self._published = entry.record["published"]
                self.hashes[self._published] = entry.record["sha256"]
                continue
            event = _event_of(entry.record)
            try:
                actions = controller.handle(event, entry.at)
            except LearnerError:
                continue
            trace += [(entry.at, event), *((entry.at, action) for action in actions)]
        self._seq = snapshot.seq
        self.versions = {int(version): blob for version, blob in snapshot.facts["versions"].items()}
        self._recent = {int(version): blob for version, blob in snapshot.facts.get("recent", {}).items()}
        self.hashes.update(self.versions)  # the publication may have been noted behind the snapshot
        self.pinned |= set(snapshot.facts["pinned"])
        self._store.blobs = dict(snapshot.facts["locals"])
        masked = controller.secure is not None  # then the local models of a round that is over are gone
        for blob in {*([] if masked else self._store.blobs.values()), *self.versions.values()}:
            if not self.state.verify_blob(blob):  # better found now than in the middle of a round
                raise DataError(f"the model file blobs/{blob} is damaged or missing")
        community = controller.community
        model = self._version_model(community.stamp.version)
        # Local models are in their blobs; the mapping must only not fail for them.
        weights: defaultdict[str, NDArray[Any]] = defaultdict(lambda: np.zeros(0, np.float32), arrays)
        controller.store = self._store
        community.load_arrays(model, weights, self._store)
        if community.uses_base:
            for record in controller.roster.training:
                assert record.task is not None
                record.base_model = self._version_model(record.task.based_on.version)
        self.controller = controller

    def _journaled_measures(self) -> dict[int, RoundMeasure]:
        """What was measured of each round when the models were there, by version."""
        records = (entry.record for entry in self.state.entries() if "published" in entry.record)
        measures = ((record["published"], recorded_measure(record)) for record in records)
        return {version: measure for version, measure in measures if measure is not None}

    def _version_model(self, version: int) -> Model:
        if version not in self.versions:
            raise DataError(f"the snapshot does not name the file of community model {version}")
        return self._read(self.versions[version])

    def _check_published(self, entry: Entry) -> None:
        version, published = entry.record["published"], entry.record["sha256"]
        self._published = version
        if self.versions.get(version, published) != published:
            raise DataError(
                f"community model {version} was published as {published[:12]}..., but the journal now gives "
                f"{self.versions[version][:12]}...: a model file or the journal was changed"
            )
