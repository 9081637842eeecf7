"""Planted bugs: each takes one guard away, as a change of the source text of one module when it is imported.

`run.py --bug NAME` plays seeds until one finds it. A guard whose bug survives needs another checker, unless another
guard does the same: then both are taken away together, as `more` of one bug.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

SOURCE = Path(__file__).parent.parent.parent / "src"


@dataclass(frozen=True)
class Bug:
    """In this module, the text `before` (which stands there once) becomes `after`, and `more` in the same way.

    Seeds whose faults and other draws do not match `needs` cannot show it, or hardly, and are not played.
    """

    module: str
    before: str
    after: str
    more: tuple[tuple[str, str], ...] = ()
    also: Bug | None = None  # in another module
    needs: str = ""

    @property
    def path(self) -> Path:
        return SOURCE / (self.module.replace(".", "/") + ".py")

    @property
    def planted(self) -> str:
        text = self.path.read_text(encoding="utf-8")
        for before, after in self.changes:
            text = text.replace(before, after)
        return text

    @property
    def changes(self) -> tuple[tuple[str, str], ...]:
        return ((self.before, self.after), *self.more)

    @property
    def parts(self) -> tuple[Bug, ...]:
        """What is changed in each module."""
        return (self,) if self.also is None else (self, *self.also.parts)


_CONTROLLER, _LEARNER, _CORE = "metis.deployment.controller", "metis.deployment.learner", "metis.core"

BUGS: dict[str, Bug] = {
    # --- an update becomes durable before it is acknowledged --------------------------------------
    "a blob is not synced": Bug(
        f"{_CONTROLLER}.blobs",
        "            disk().fsync(self._file.fileno())\n",
        "            pass\n",
        needs="power controller|strike controller",
    ),
    "the folder of blobs is not synced": Bug(
        f"{_CONTROLLER}.blobs",
        "        if durable:\n            self._sync_folder",
        "        if False:\n            self._sync_folder",
        needs="power controller|strike controller",
    ),
    "SQLite does not sync each commit": Bug(
        f"{_CONTROLLER}.database",
        "synchronous={'FULL' if self._durable else 'NORMAL'}",
        "synchronous=NORMAL",
        needs="power controller|strike controller",
    ),
    "an update is acknowledged before it is journaled": Bug(
        f"{_CONTROLLER}.requests",
        "sequence=writer.journal(event, now, blob, content).seq)",
        "sequence=(writer.submit(lambda: writer.journal(event, now, blob, content)), self._state.last_seq() + 1)[1])",
    ),
    "a receipt does not wait for what is decided together": Bug(
        f"{_CONTROLLER}.writer",
        "                answers = [(answer, self._unless_failed(decide)) for decide, answer in waiting]\n",
        "                answers = [(answer, self._unless_failed(decide)) for decide, answer in waiting]\n"
        "                for answer in answers:\n"
        "                    self.in_loop(_answer, *answer)\n",
        needs="controller",
    ),
    "a small model is not journaled with its update": Bug(
        f"{_CONTROLLER}.journal",
        "            if content is not None and blob is not None:\n",
        "            if content is not None and blob is not None and not self.contents.add(blob) and False:\n",
        needs="controller",
    ),
    "ACKNOWLEDGED is ahead of what is synced": Bug(
        f"{_CONTROLLER}.journal",
        "        elif synced:\n",
        "        else:\n",
        needs="power controller|strike controller",
    ),
    "collection forgets that a small model is needed": Bug(
        f"{_CONTROLLER}.state",
        "self.journal.delete_contents(self.journal.contents - kept)",
        "self.journal.delete_contents(set(self.journal.contents))",
    ),
    "an update that was journaled before is journaled again": Bug(
        f"{_CONTROLLER}.requests", "        if known is not None:\n            return known\n", ""
    ),
    "the epoch does not grow": Bug(f"{_CONTROLLER}.state", "self.epoch = epoch + 1", "self.epoch = max(1, epoch)"),
    "the row of the run is not written at a start": Bug(
        f"{_CONTROLLER}.state", "        self._write_run(self.epoch, facts)\n        self._mark(0, self.epoch)\n", ""
    ),
    "a start builds on what was never written": Bug(
        f"{_CONTROLLER}.database",
        'busy = pragma("wal_checkpoint(TRUNCATE)")',
        "busy = 0",
        needs="EIO|strike controller",
    ),
    "after an error of the disk it goes on": Bug(
        f"{_CONTROLLER}.disk", "    disk().end_process(EXIT_DISK_FAILED, text)", "    raise DiskFull(text)", needs="EIO"
    ),
    "an entry is skipped on a full disk": Bug(
        f"{_CONTROLLER}.writer",
        "                self.submit(self._apply_first)\n            raise\n",
        "                self._unapplied.popleft()\n            raise\n",
        needs="full disk|strike controller",
    ),
    "what was half applied is applied twice": Bug(
        f"{_CONTROLLER}.durable",
        "        if self._half_applied is None:\n            self._half_applied",
        "        if True:\n            self._half_applied",
        needs="full disk|strike controller",
    ),
    # --- published models -------------------------------------------------------------------------
    "a publication is not journaled": Bug(
        f"{_CONTROLLER}.durable", "        self._journal_publication(actions, entry.at)\n", ""
    ),
    "a replay checks neither model files nor publications": Bug(
        f"{_CONTROLLER}.durable",
        "if self.versions.get(version, published) != published:",
        "if False:",
        more=(("if self._recovering and not self.state.verify_blob(entry.blob):", "if False:"),),
        needs="rot controller",
    ),
    "publications that a crash swallowed are not journaled": Bug(
        f"{_CONTROLLER}.durable",
        "for version in range(self._published + 1, self.controller.community.stamp.version + 1):",
        "for version in range(0):",
        needs="controller",
    ),
    "a community model changes between two starts": Bug(
        f"{_CONTROLLER}.durable",
        "blob = self.state.put_blob(model_pieces(action.community_model), durable=False, also=mac)",
        "blob = self.state.put_blob(list(model_pieces(action.community_model))[: 1 if self._recovering else 2])",
        more=(
            (
                'content = b"".join(model_pieces(action.community_model))',
                'content = b"".join(list(model_pieces(action.community_model))[: 1 if self._recovering else 2])',
            ),
        ),
    ),
    # --- snapshots and collection -----------------------------------------------------------------
    "snapshots are not synced": Bug(
        f"{_CONTROLLER}.state",
        "                if self._durable:\n                    sync(path)\n                    sync(self._snapshots)",
        "                if False:\n                    sync(path)\n                    sync(self._snapshots)",
        needs="power controller|strike controller",
    ),
    "community models of a snapshot are not synced": Bug(
        f"{_CONTROLLER}.state",
        "        for blob in sorted(blobs):\n            self.sync_blob(blob)\n",
        "",
        needs="power controller|strike controller",
    ),
    "collection forgets what has just come": Bug(
        f"{_CONTROLLER}.blobs", "        kept = {*self._fresh, *self._held}\n", "        kept = set[str]()\n"
    ),
    "collection forgets what waits to be journaled": Bug(
        f"{_CONTROLLER}.blobs",
        "        kept = {*self._fresh, *self._held}\n",
        "        kept = {*self._fresh} - self._held.keys()\n",
    ),
    "collection deletes what came meanwhile": Bug(
        f"{_CONTROLLER}.blobs",
        "if path.name not in self._fresh:  # the same",
        "if True:  # the same",
        needs="models are equal,.*jobs that pause,many snapshots",
    ),
    "collection forgets what snapshots need": Bug(
        f"{_CONTROLLER}.state",
        "                kept.update(name for snapshot in snapshots for name in snapshot.blobs)\n",
        "",
    ),
    "collection forgets entries after the older snapshot": Bug(
        f"{_CONTROLLER}.state", "*(name for (name,) in journaled)", "*()"
    ),
    "a snapshot is numbered as if all was applied": Bug(
        f"{_CONTROLLER}.durable",
        "self.state.write_snapshot(self._seq, arrays",
        "self.state.write_snapshot(self.state.last_seq(), arrays",
        needs="controller,.*many snapshots",
    ),
    "the initial model is collected": Bug(f"{_CONTROLLER}.durable", ", *self.pinned, self.hashes[0]", ", *self.pinned"),
    # --- delivery and tasks -----------------------------------------------------------------------
    "a late update counts": Bug(
        f"{_CORE}.controller",
        "if not self.protocol.accepts_stale and (task.based_on != self.community.stamp or self.closed is not None):",
        "if False:",
    ),
    "an update of a closed task counts": Bug(
        f"{_CONTROLLER}.requests",
        "        if task is None or task.number != header.task or writer.controller.finished:\n            return",
        "        if task is None:\n            return",
    ),
    "a learner hands in the task of another": Bug(
        f"{_CONTROLLER}.requests",
        '            if known.record["learner"] != learner:\n                raise',
        "            if False:\n                raise",
    ),
    "an upload without its end counts": Bug(
        f"{_CONTROLLER}.upload",
        "                            raise Refused(\n                                grpc.StatusCode.ABORTED,",
        "                            if received == length:\n"
        "                                return pb.UploadEnd(bytes=length, sha256=incoming.checksum)\n"
        "                            raise Refused(\n                                grpc.StatusCode.ABORTED,",
    ),
    "an update is not compared with its checksum": Bug(
        f"{_CONTROLLER}.blobs",
        "        if self.checksum != expected_checksum:\n",
        "        if False:\n",
        needs="rot learner",
    ),
    "the claims of an update are not checked": Bug(
        f"{_CONTROLLER}.requests", "problem = received.problem or claim_problem(event, task)", "problem = None"
    ),
    "a partial upload goes on from the wrong byte": Bug(
        f"{_CONTROLLER}.blobs",
        "                self._digest.update(piece)\n                if check",
        "                if check",
        needs="reset.*models of several messages",
    ),
    "a task is not sent again after a reconnection": Bug(
        f"{_CONTROLLER}.process",
        "        self._time.let_the_clock_go()\n        self._sessions.offer(session.learner)",
        "        self._time.let_the_clock_go()",
        needs="reset|cut|learner|controller",
    ),
    "a task is sent to a learner that is working on it": Bug(
        f"{_CONTROLLER}.sessions", " or session.held_task == opened.task.number:", ":"
    ),
    "a reconnection is a new join": Bug(
        f"{_CONTROLLER}.requests",
        "            if same and not record.set_aside and not _over(writer.controller, record.task):",
        "            if False:",
        needs="reset|cut|learner|controller",
    ),
    "a lease never ends": Bug(
        f"{_CONTROLLER}.sessions", "oldest = monotonic() - self._lease", "oldest = -1e9", needs="cut|learner|stop"
    ),
    "a lease ends while the learner is heard": Bug(
        f"{_CONTROLLER}.service", "                session.last_heard = monotonic()\n", ""
    ),
    "the beginning of an upload is not a sign of life": Bug(
        f"{_CONTROLLER}.service",
        "            first = await first_message(requests)\n            self._streams.alive(learner)\n",
        "            first = await first_message(requests)\n",
        (
            ("            self._streams.alive(learner)\n            request = _read", "            request = _read"),
            ("            self._streams.alive(learner)\n            header = pb", "            header = pb"),
        ),
        needs="vanish after an upload",
    ),
    "after a restart nobody has time to come back": Bug(
        f"{_CONTROLLER}.sessions",
        "self.heard = dict.fromkeys(present, self._began)",
        "self.heard = dict.fromkeys(present, self._began - lease)",
        needs="controller",
    ),
    "the deadline is posted again and again": Bug(
        f"{_CONTROLLER}.timekeeper", "            self._deadline_posted = standing.deadline\n", ""
    ),
    "a deadline that could not be journaled is forgotten": Bug(
        f"{_CONTROLLER}.timekeeper",
        "self._writer.post(DeadlinePassed(), self._deadline_given_up)",
        "self._writer.post(DeadlinePassed())",
        needs="full disk at a deadline,.*policy semisync",
    ),
    "the run's clock begins again": Bug(
        f"{_CONTROLLER}.timekeeper",
        "self.clock = RunClock(max(seconds, ticked))",
        "self.clock = RunClock(0.0)",
        needs="controller",
    ),
    # --- the learner ------------------------------------------------------------------------------
    "an update is dropped before its receipt": Bug(
        f"{_LEARNER}.uploads",
        "        call = session.calls.upload()\n",
        "        _ = self._work.drop(update.task) if update.task % 3 == 1 else None\n"
        "        call = session.calls.upload()\n",
    ),
    "an update is not sent again": Bug(
        f"{_LEARNER}.uploads",
        "            await asyncio.sleep(backoff.next(self._connection.heartbeat))\n",
        "            await asyncio.sleep(1e6)\n",
        needs="reset|cut|controller",
    ),
    "the names of new folders are not synced": Bug(
        "metis.files", "        sync(made.parent)\n", "        pass\n", needs="power learner"
    ),
    "the spool is not synced": Bug(
        f"{_LEARNER}.work",
        "                if synced:\n                    sync_file(file)\n",
        "",
        needs="power learner|strike learner",
    ),
    "the folder of the spool is not synced": Bug(
        f"{_LEARNER}.work",
        "        if synced:\n            sync(path.parent)\n",
        "        if synced:\n            pass\n",
        needs="power learner|strike learner",
    ),
    "a local model is not synced": Bug(
        "metis.files",
        "            if synced:\n                sync_file(file)\n",
        "",
        needs="power learner|strike learner",
    ),
    "the folder of a local model is not synced": Bug(
        "metis.files",
        "    if synced:\n        sync(path.parent)\n",
        "",
        needs="power learner|strike learner",
    ),
    "an update without a prompt receipt is not synced": Bug(
        f"{_LEARNER}.uploads",
        "        while task in self._work.unsynced:\n",
        "        while False:\n",
        needs="power learner|strike learner",
    ),
    "what is synced later is synced in part": Bug(
        f"{_LEARNER}.work",
        "        for path in (model, note):\n",
        "        for path in (note,):\n",
        needs="power learner|strike learner",
    ),
    "what the disk could not write is only synced again": Bug(
        f"{_LEARNER}.work",
        "write_durable(path, path.read_bytes())",
        "sync(path)",
        needs="EIO learner.*power learner",
    ),
    "an update that could not be synced is not synced again": Bug(
        f"{_LEARNER}.uploads",
        "await asyncio.sleep(backoff.next(PROMPT_SECONDS))",
        "break",
        needs="EIO learner",
    ),
    "a learner trains a task again that waits to be handed in": Bug(
        f"{_LEARNER}.tasks",
        "if self._uploads.has(task.number) or (",
        "if (",
        # A controller does not send a task that a learner names when it connects.
        also=Bug(
            f"{_LEARNER}.process", "return self.uploads.task if task is None else", "return None if task is None else"
        ),
        needs="reset|cut|learner|controller",
    ),
    "a learner does not abandon a task that was replaced": Bug(
        f"{_LEARNER}.tasks",
        "            before.cancel()\n        self.current, self.steps",
        "        self.current, self.steps",
    ),
    "a downloaded model is not checked": Bug(
        f"{_LEARNER}.work",
        "if self.received != self._length or self._check.digest() != self._right:",
        "if False:",
        needs="power learner|strike learner|rot download",
    ),
    "a learner never dials again": Bug(
        f"{_LEARNER}.process",
        "await asyncio.sleep(backoff.next(self.connection.heartbeat) if wait is None",
        "await asyncio.sleep(1e6 if wait is None",
        needs="reset|cut|controller",
    ),
    "the spool is tidied of what waits": Bug(
        f"{_LEARNER}.work",
        "        waiting = {self.update_file(update.task).name for update in self.updates()}\n",
        "        waiting = set[str]()\n",
        needs="learner",
    ),
    # --- administrators and members ---------------------------------------------------------------
    "a command that is not journaled is answered": Bug(
        f"{_CONTROLLER}.writer",
        "        self.submit(job, lambda: _answer(done, StateError(_FAILED)))\n        return await done\n",
        "        self._loop.call_later(2.0, self.submit, job)\n        return Entry(0, 0.0, {}, None, None)\n",
        needs="command",
    ),
    "a command ends with its caller": Bug(
        f"{_CONTROLLER}.administration",
        "document = await asyncio.shield(work)",
        "document = await work",
        needs="hang up",
    ),
    "a rollback is made again": Bug(
        f"{_CONTROLLER}.durable",
        "if after is not None and (latest := self.controller.latest_rollback) > after:",
        "if after is not None and (latest := 0) > after:",
        needs="command rollback",
    ),
    "a paused federation hands out tasks": Bug(
        f"{_CORE}.controller",
        "        return self.on_hold or self.roster.available_count < self.quorum\n",
        "        return self.roster.available_count < self.quorum\n",
        needs="command pause",
    ),
    "a removed learner is welcomed": Bug(
        f"{_CONTROLLER}.sessions", "if learner not in members:", "if False:", needs="command (remove|add)"
    ),
    "changes of members are forgotten at a start": Bug(
        f"{_CONTROLLER}.process",
        "Members(plan.members, recovered.member_changes,",
        "Members(plan.members, {},",
        needs="command (remove|add)",
    ),
    "a removed learner keeps its task": Bug(
        f"{_CORE}.controller",
        "                if self.roster.get(event.learner) is not None:\n",
        "                if False:\n",
        needs="command remove",
    ),
    "a command is answered before it is in the audit log": Bug(
        f"{_CONTROLLER}.administration", "noted = await self._audit.flushed()\n", "pass\n", needs="command"
    ),
    "a command is answered though the audit log has no room": Bug(
        f"{_CONTROLLER}.administration", "        if not noted:", "        if False:", needs="command.*full disk"
    ),
    "the audit log builds on what was never written": Bug(
        f"{_CONTROLLER}.audit",
        "            self._write(tail, start)\n",
        "            pass\n",
        needs="EIO|strike controller",
    ),
    "who calls is asked only once": Bug(
        f"{_CONTROLLER}.service",
        "            learner = self._identify(context)\n            # A learner",
        "            learner = dict(context.invocation_metadata())['metis-learner']\n            # A learner",
        needs="command revoke",
    ),
    "a federation that goes on hands out its old tasks": Bug(
        f"{_CORE}.masked",
        "        self.roster.void_tasks()  # what",
        "        pass  # what",
        needs="command extend",
    ),
    # --- rounds -----------------------------------------------------------------------------------
    "an extension at the end is not waited for": Bug(
        f"{_CONTROLLER}.process",
        "await self._administration.settle()",
        "pass",
        needs="command extend at the end",
    ),
    "a command is taken after the end": Bug(
        f"{_CONTROLLER}.process",
        "self._administration.ended = True",
        "self._administration.ended = False",
        needs="command extend at the end",
    ),
    "a masked round goes on after the end": Bug(
        f"{_CORE}.masked",
        "begun = self.secure is not None and self.secure.values",
        "begun = False",
        needs="command extend.*command stop.*masked",
    ),
    "what the process before did not sync is not synced": Bug(
        "metis.deployment.learner.work",
        "            self.unsynced |= {update.task for update in found.values() if travels_inside(update.bytes)}\n",
        "",
        needs="vanish after an upload",
    ),
    "a publication for which there was no room counts as journaled": Bug(
        f"{_CONTROLLER}.durable",
        "        self.state.append(now, record, synced=False)\n",
        "        self.state.append(now, record, synced=False)\n        self._published = version\n",
        needs="strike controller|full disk",
    ),
    "two downloads write to one file": Bug(
        "metis.deployment.learner.downloads",
        "        async with self._one_at_a_time:\n            return",
        "        if True:\n            return",
        needs="command rollback at a task.*slow threads",
    ),
    "a rollback is journaled before its model is synced": Bug(
        f"{_CONTROLLER}.durable",
        "        self.state.sync_blob(kept[version])  # what the journal names is on the disk\n",
        "",
        needs="command rollback at a task",
    ),
    "nobody's lease ends after an extension": Bug(
        f"{_CONTROLLER}.sessions",
        "        self.owed.discard(learner)\n\n    def begin_again",
        "        self.gone(learner)\n\n    def begin_again",
        needs="command extend at the end",
    ),
    "a damaged first model stays": Bug(
        f"{_CONTROLLER}.durable",
        "if not self.state.verify_blob(self.hashes[0]):",
        "if False:",
        needs="command.*rot first model",
    ),
    "a learner that left keeps its task": Bug(
        f"{_CORE}.roster",
        "        record.present = False\n",
        "        record.present = False\n        return\n",
        needs="cut|learner",
    ),
    "an update counts before the journal says so": Bug(
        f"{_CONTROLLER}.writer",
        "        entry = self.durable.journal(event, now, blob, content)\n",
        "        entry = self.durable.journal(event, now, blob, content)\n"
        "        self._unapplied.append((entry, None))\n",
    ),
    # --- masked rounds and ledgers ----------------------------------------------------------------
    "what was masked is forgotten at a restart": Bug(
        "metis.privacy.member",
        "self._state = _State() if stored is None else _State.decode(stored)",
        "self._state = _State() if stored is None else _State.decode(stored)\n"
        "        lost = tuple(replace(r, upload=b'') if not r.vote else r for r in self._state.rounds)\n"
        "        self._state = replace(self._state, rounds=lost)",
        needs="masked",
    ),
    "what a member signs is not synced": Bug(
        "metis.privacy.store",
        "write_durable(self.path(name), data, private=True)",
        "self.path(name).open('wb').write(data)",
        needs="masked",
    ),
    "the opening of a masked round is not kept": Bug(
        f"{_CONTROLLER}.sums", '        self._store.write("opening", opening.encode())\n', "", needs="masked"
    ),
    "a member that joins again is not asked": Bug(
        f"{_CONTROLLER}.masked", '.get("event") == "learner_joined":', '.get("event") == "nothing":', needs="masked"
    ),
    "a full disk ends masked rounds": Bug(
        f"{_CONTROLLER}.sums",
        "            self._out = []\n            return False\n",
        "            self._out = []\n            return True\n",
        needs="masked",
    ),
    "what is left of a masked round outlives its opening": Bug(
        f"{_CONTROLLER}.sums",
        'key=lambda path: path.name == "opening"',
        'key=lambda path: path.name != "opening"',
        needs="strike controller.*masked",
    ),
    "a task of a masked round that is over is kept": Bug(
        f"{_CONTROLLER}.requests",
        "    return secure is not None and not secure.windowed and task",
        "    return False and task",
        needs="(kill learner|member vanishes).*semisync masked",
    ),
    "keys of another version are kept": Bug(
        f"{_CONTROLLER}.sums",
        'self._version, self._keys, self._posted = round_.version, {}, ""',
        "self._version = round_.version",
        needs="(command rollback|member vanishes).*masked",
    ),
    "a damaged masked model is summed": Bug(
        f"{_CONTROLLER}.sums",
        "        if self._tails.get(learner) != tail and not has_checksum(path, checksum_in(blob)):",
        "        if False:",
        needs="rot (controller|upload).*masked",
    ),
    "what a masked round has come to is lost on a full disk": Bug(
        f"{_CONTROLLER}.masked",
        "call_later(_DISK_FULL_PAUSE, self._post_sum, event, content)",
        "call_later(1e9, self._post_sum, event, content)",
        needs="full disk at a sum.*masked",
    ),
    "a damaged file of a masked round is used": Bug(
        f"{_CONTROLLER}.sums",
        "        if hashlib.sha256(content).digest() != stored[:HASH]:\n",
        "        if False:\n",
        needs="rot controller.*masked",
    ),
    "a start builds on files of a masked round that were never written": Bug(
        f"{_CONTROLLER}.sums",
        "            self._store.write_again()\n",
        "            pass\n",
        needs="EIO.*masked",
    ),
    "a sum of two learners is opened": Bug(
        "metis.core.secure_sum",
        "    return colluders + max(FEWEST, extra_vectors + 2)\n",
        "    return colluders + max(FEWEST, extra_vectors + 2) - 1\n",
        needs="masked",
    ),
    "the training process undoes what the learner has signed": Bug(
        "metis.deployment.trainer.masking",
        "        return Member(self._identity, Peers(), pins, self._run, self._store)\n",
        "        made = Member(self._identity, Peers(), pins, self._run, self._store)\n"
        "        return self.__dict__.setdefault('_made', made)  # type: ignore[no-any-return]\n",
        needs="(member dawdles|slow line).*semisync masked",
    ),
    "masks stay in the sum": Bug(
        "metis.privacy.opener",
        "                (minus if k >= dealer else plus).append(seed)\n",
        "                (minus if k >= dealer else minus).append(seed)\n",
        needs="member vanishes.*masked",
    ),
    "who comes back does not learn of a window": Bug(
        f"{_CONTROLLER}.sums",
        "        self._has_opening.discard(learner)\n",
        "",
        needs="(kill learner|member vanishes|reset).*(fedbuff|async|fedrec) masked",
    ),
    "what waits for a window is said once": Bug(
        "metis.deployment.learner.tasks",
        "        self._sums.announce()\n",
        "",
        needs="(kill controller|power controller|reset).*(fedbuff|async|fedrec) masked",
    ),
    "a window waits for who is gone": Bug(
        f"{_CORE}.masked",
        "if (task := open_.get(k)) is not None and task.number == n]",
        "if (task := open_.get(k)) is None or task.number == n]",
        needs="member vanishes.*(fedbuff|async|fedrec) masked",
    ),
    "a window waits for a model that is lost": Bug(
        f"{_CONTROLLER}.requests",
        "        elif self._writer.controller.resend_of(learner) == failed.task:\n",
        "        elif False:\n",
        needs="(async|fedrec) masked",
    ),
    "what is handed in again counts otherwise": Bug(
        "metis.deployment.trainer.masking",
        "local, opening.weights[self._name], opening.most)\n        return self._masked(body, layout, {})",
        "local, opening.most, opening.most)\n        return self._masked(body, layout, {})",
        needs="fedrec masked",
    ),
    "what is handed in again is an older model": Bug(
        "metis.deployment.trainer.masking",
        'found = list(self._store.folder.glob(f"{self._beginning}*"))',
        'found = sorted(self._store.folder.glob(f"{LOCAL}*"))',
        more=(("                    self._forget(but=self._beginning)\n", "                    pass\n"),),
        needs="(async|fedrec) masked",
    ),
    "a model that is handed in again is not kept": Bug(
        f"{_CONTROLLER}.durable",
        "isinstance(event, UpdateRequest) or (isinstance(event, ModelResent) and not event.lost):",
        "isinstance(event, UpdateRequest):",
        needs="(async|fedrec) masked",
    ),
    "what is left out of a window stays": Bug(
        f"{_CORE}.mixing.windows",
        "            self._store.remove(learner)  # what it has masked is not needed\n",
        "            pass\n",
        needs="rot upload.*(async|fedrec|fedbuff) masked",
    ),
    "a reservation is not synced": Bug(
        "metis.privacy.ledger",
        "            file.truncate()\n            sync_file(file)\n",
        "            file.truncate()\n",
        needs="masked",
    ),
    "a steady learner is set aside": Bug(
        f"{_CORE}.controller", "        record.refusals = 0\n", "        record.refusals += 2\n"
    ),
}


class Planter(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, bug: Bug) -> None:
        self._bug = bug

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self._bug.module:
            return None
        return importlib.machinery.ModuleSpec(name, self, origin=str(self._bug.path))

    def exec_module(self, module: ModuleType) -> None:
        exec(compile(self._bug.planted, str(self._bug.path), "exec"), module.__dict__)


def plant(name: str) -> None:
    """Have this bug in the program; before the module is imported."""
    for part in BUGS[name].parts:
        assert part.module not in sys.modules, f"{part.module} is imported already"
        sys.meta_path.insert(0, Planter(part))
