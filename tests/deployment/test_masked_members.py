"""A learner's part in masked rounds, file by file: what it refuses, and what two of its processes may not do."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("grpc")

from deployment import masked
from deployment.masked import NAMES, POLICIES
from deployment.scripted_learner import LAYOUT
from metis.core.canonical import digest
from metis.core.policies import sync_fedavg
from metis.core.policy import Policy
from metis.core.ring import Ring
from metis.core.secure_sum import (
    PROTOCOL,
    WIDER,
    Opening,
    Place,
    SignedKey,
    Statement,
    Trained,
    Upload,
    Vote,
    threshold,
)
from metis.deployment.learner.downloads import TaskFailed
from metis.deployment.learner.site_log import SiteLog
from metis.deployment.learner.site_policy import PolicyFile
from metis.deployment.learner.sums import Sums
from metis.deployment.learner.work import Update, WorkFolder, forget_local_models
from metis.deployment.storage import SealedStorage, Storage, choose, file_sha256
from metis.deployment.trainer.masking import Masking
from metis.deployment.wire import wire_pb2 as pb
from metis.deployment.wire.causes import sentence
from metis.deployment.wire.models import read_model, write_model
from metis.deployment.wire.secure import settings_hash, unpacked
from metis.errors import DataError, Refused
from metis.privacy.member import Member

RUN, VERSION, STEPS = "run-1", 3, 7
FACTS = {"task": 1, "steps": STEPS, "seconds": 1.0, "time_per_batch": 0.1, "loss": None, "compression_error": None}


class Site:
    """The part of one learner's process that masked rounds use, with its real files."""

    def __init__(self, home: Path, name: str, kit: bool = True) -> None:
        self.home, self.name, self.folder = home, name, home / "work" / name
        self.policy_path = home / "ca" / name / "site-policy.toml"
        self.sent: list[pb.SecureSum] = []
        self.reports: list[str] = []
        self.welcome = pb.Welcome(
            learner=name, settings=masked.SETTINGS, layout=json.dumps(LAYOUT.to_json()), run=RUN
        )  # fmt: skip
        self.failed: list[int] = []
        connection: Any = SimpleNamespace(
            welcome=self.welcome, send=self._send, send_failed=lambda task, *rest: self.failed.append(task)
        )
        supervisor: Any = SimpleNamespace(
            report=lambda kind, text: self.reports.append(text), start=asyncio.run
        )  # fmt: skip
        self.work = WorkFolder(self.folder)
        (self.folder / "spool").mkdir(parents=True, exist_ok=True)
        self.work.run, self.looked = RUN, 0
        kit_folder, log = home / "ca" / name if kit else None, SiteLog(self.folder, supervisor.report)
        self.sums = Sums(
            supervisor, connection, self.work, PolicyFile(self.policy_path), kit_folder, log, self._look
        )  # fmt: skip

    def _look(self) -> None:
        self.looked += 1

    def _send(self, secure: pb.SecureSum) -> None:
        self.sent.append(secure)

    def hear(self, kind: Any, content: bytes = b"", version: int = VERSION) -> bytes:
        """What it answers, or nothing."""
        before = len(self.sent)
        self.sums.hear(pb.SecureSum(kind=kind, version=version, content=content))
        return self.sent[-1].content if len(self.sent) > before else b""

    def key(self, version: int = VERSION) -> SignedKey:
        return SignedKey.decode(self.hear(pb.SecureSum.KEY, version=version))

    def accept(self, opening: Opening, model: Path | None = None, **task: Any) -> dict[str, Any]:
        """What its training process gets."""
        about = {"number": 1, "version": opening.version, "steps": STEPS, "opening": opening.encode()}
        policy = PolicyFile(self.policy_path).read()
        made = asyncio.run(self.sums.accept(pb.Task(**{**about, **task}), model or self.home / "model", policy))
        assert made is not None
        return made

    def refusal(self, opening: Opening, **options: Any) -> str:
        with pytest.raises(TaskFailed) as refused:
            self.accept(opening, **options)
        return str(refused.value)

    def train(
        self, order: dict[str, Any], task: int = 1, policy: Policy | None = None
    ) -> tuple[Masking, Callable[[], bytes]]:
        """Its training process, and what that does when it has trained."""
        masking, base = Masking(order), masked.initial_model()
        local, loss = masked.train(self.name, task, STEPS, base)
        return masking, lambda: b"".join(masking.mask(local, base, loss, FACTS, policy or sync_fedavg()))


@pytest.fixture
def home(tmp_path: Path) -> Path:
    masked.make_kits(tmp_path)
    write_model(tmp_path / "model", masked.initial_model())
    return tmp_path


@pytest.fixture
def sites(home: Path) -> dict[str, Site]:
    return {name: Site(home, name) for name in NAMES}


def opening_of(sites: dict[str, Site], **changes: Any) -> Opening:
    names = sorted(sites)
    version = changes.get("version", VERSION)
    about: dict[str, Any] = {
        "protocol": PROTOCOL, "run": RUN, "version": version, "attempt": 0,
        "model": bytes.fromhex(file_sha256(next(iter(sites.values())).home / "model")),
        "layout": bytes.fromhex(LAYOUT.fingerprint), "settings": settings_hash(masked.SETTINGS), "rate": 1.0,
        "extra_vectors": 0, "ring": Ring(32, len(names), 4.0), "threshold": threshold(len(names)), "least": 3,
        "members": tuple(
            Place(float(masked.EXAMPLES[name]), STEPS, sites[name].key(version)) for name in names
        ),
    }  # fmt: skip
    return Opening(**{**about, **changes})


def test_without_a_certificate_peers_or_a_readable_policy_it_takes_no_part(home: Path, sites: dict[str, Site]) -> None:
    """Each with the sentence that says what is missing; nothing is answered."""
    opening = opening_of(sites)
    assert "needs its certificate" in Site(home, "ann", kit=False).refusal(opening)
    ann = sites["ann"]
    ann.policy_path.write_text("")
    assert "name the learners to take part with" in ann.refusal(opening)
    assert ann.hear(pb.SecureSum.KEY) == b""
    ann.policy_path.write_text('peers = ["ann", "bob", "cyd", "dan"]\ncolluders = 3\n')
    assert ann.hear(pb.SecureSum.KEY) == b""
    ann.policy_path.write_text("peers = 3")
    assert ann.hear(pb.SecureSum.KEY) == b""


def test_it_refuses_what_its_own_file_and_its_own_task_do_not_say(home: Path, sites: dict[str, Site]) -> None:
    """Another model, other settings, another number of steps, another rate, fewer members than it wants."""
    ann, opening = sites["ann"], opening_of(sites)
    (home / "other").write_bytes(b"other" + (home / "model").read_bytes()[5:])
    assert "model of the opening" in ann.refusal(opening, model=home / "other")
    assert "not the one that its opening describes" in ann.refusal(opening, version=VERSION + 1)
    assert "not the one that its opening describes" in ann.refusal(opening, steps=STEPS + 1)
    assert "not the one that its opening describes" in ann.refusal(opening, rate=0.5)
    assert "settings of the opening" in ann.refusal(opening_of(sites, settings=digest("settings", "others")))
    assert "layout of the opening" in ann.refusal(opening_of(sites, layout=digest("layout", "other")))
    wanted = 'peers = ["ann", "bob", "cyd", "dan", "eve"]\nmin_masked_members = 5\n'
    ann.policy_path.write_text(wanted)
    assert "this site wants 5" in ann.refusal(opening)
    ann.policy_path.write_text(wanted.replace("5", "4"))
    assert ann.accept(opening)["run"] == RUN


def test_the_controller_hears_which_rule_of_the_site_it_was(home: Path, sites: dict[str, Site]) -> None:
    """The name of the rule, and no more; none where it was none of them."""
    ann, names = sites["ann"], '"ann", "bob", "cyd"'

    def rule(rules: str, opening: Opening) -> str:
        ann.policy_path.write_text(rules)
        with pytest.raises(TaskFailed) as refused:
            ann.accept(opening)
        said = sentence(pb.Cause(kind=refused.value.kind, rule=refused.value.rule))
        return said.removeprefix("its site policy does not allow it")

    opening = opening_of(sites)
    pinned = f'peers = [{names}, "dan"]\n'
    window = replace(_window(sites), model=opening.model)
    assert rule("", opening) == " (rule peers)"
    assert rule(f'peers = [{names}, "eve"]\n', opening) == " (rule peers)"
    assert rule(f'peers = [{names}, "dan", "eve", "eva"]\n', opening) == " (rule peers)"
    assert rule(f'peers = [{names}, "dan", "eve"]\ncolluders = 1\n', opening) == " (rule colluders)"
    assert rule(f'peers = [{names}, "dan", "eve"]\nmin_masked_members = 5\n', opening) == " (rule min_masked_members)"
    assert rule(pinned, window) == " (rule masked_windows)"
    assert rule(pinned, replace(opening, rate=0.5)) == ""


def test_a_version_has_one_context_ever(sites: dict[str, Site]) -> None:
    """No message brings refusals to a deployed learner: a round that cannot be opened begins under another number."""
    ann = sites["ann"]
    ann.accept(opening_of(sites))
    again = "abandoning the earlier context of this version needs the votes of 3 members, and there are 0"
    assert again in ann.refusal(opening_of(sites, attempt=1))
    ann.accept(opening_of(sites, version=VERSION + 1))


def test_whoever_names_peers_trains_nothing_that_is_not_masked(sites: dict[str, Site]) -> None:
    """A controller that leaves the opening out gets no model."""
    task = pb.Task(number=1, version=VERSION, steps=STEPS)
    policy = PolicyFile(sites["ann"].policy_path).read()
    refusal = policy.refuses_task(task)
    assert refusal is not None and refusal.rule == pb.Cause.PEERS and "(peers)" in refusal.text
    sites["ann"].policy_path.write_text("min_masked_members = 4\n")
    refusal = PolicyFile(sites["ann"].policy_path).read().refuses_task(task)
    assert refusal is not None and refusal.rule == pb.Cause.MASKS and "(min_masked_members)" in refusal.text
    sites["ann"].policy_path.write_text("")
    assert PolicyFile(sites["ann"].policy_path).read().refuses_task(task) is None


def _statement(opening: Opening, uploads: dict[str, Upload]) -> Statement:
    names = tuple(sorted(uploads))
    return Statement(opening.context, names, tuple(uploads[name].digest for name in names))


def _upload(opening: Opening, content: bytes) -> Upload:
    return Upload.decode(unpacked(content, opening.ring.nbytes(LAYOUT)))


def test_a_vote_that_is_cast_while_the_site_trains_is_not_forgotten(sites: dict[str, Site]) -> None:
    """The training process masks when the learner's own process has voted and made a key; neither is lost."""
    opening = opening_of(sites)
    orders = {name: site.accept(opening) for name, site in sites.items()}
    late, mask_late = sites["dan"].train(orders["dan"])
    assert late.done() is None
    uploads = {name: _upload(opening, sites[name].train(orders[name])[1]()) for name in NAMES[:3]}
    statement = _statement(opening, uploads)
    vote = Vote.decode(sites["dan"].hear(pb.SecureSum.STATEMENT, statement.encode()))
    next_key = sites["dan"].key(VERSION + 1)
    mine = _upload(opening, mask_late())
    everybody = _statement(opening, {**uploads, "dan": mine})
    assert sites["dan"].hear(pb.SecureSum.STATEMENT, everybody.encode()) == b"", "it has signed two statements"
    assert "has voted in this context already" in sites["dan"].reports[-1]
    assert Vote.decode(sites["dan"].hear(pb.SecureSum.STATEMENT, statement.encode())) == vote
    assert sites["dan"].key(VERSION + 1) == next_key


def test_a_context_is_masked_once_whatever_is_trained_after_a_restart(sites: dict[str, Site], monkeypatch: Any) -> None:
    """The same bytes again; if they are damaged, none at all."""
    monkeypatch.setenv(masked.FRESH, "1")
    opening = opening_of(sites)
    order = sites["ann"].accept(opening)
    first = sites["ann"].train(order)[1]()
    masking, again = Site(sites["ann"].home, "ann").train(order)
    done = masking.done()
    assert done is not None and b"".join(done[1]) == first and done[0] == FACTS
    assert again() == first
    (body,) = sites["ann"].folder.glob("sums/*-body")
    content = bytearray(body.read_bytes())
    content[0] ^= 1
    body.write_bytes(content)
    assert masking.done() is None
    with pytest.raises(DataError, match="never masked twice"):
        again()


def test_another_process_waits_until_the_first_is_done(home: Path, sites: dict[str, Site]) -> None:
    """Both change the same file; without the lock one would undo what the other did."""
    from metis.errors import LockHeld
    from metis.privacy import store

    kept = store.FolderStore(home / "work" / "ann" / "sums")
    with kept.locked(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "_WAIT_SECONDS", 0.0)
        with pytest.raises(LockHeld), kept.locked():
            pass
    with kept.locked():
        pass


def test_keys_go_at_the_end_and_when_they_are_old(sites: dict[str, Site], monkeypatch: Any) -> None:
    """Only the version stays: nothing of it is ever summed again."""
    opening = opening_of(sites)
    order = sites["ann"].accept(opening)
    sites["ann"].train(order)[1]()
    sums = sites["ann"].sums
    sums.erase(only_old=True)
    assert list(sites["ann"].folder.glob("sums/*-body"))
    monkeypatch.setattr("metis.deployment.learner.sums.unix_time", lambda: 1e12)
    sums.erase(only_old=True)
    left = {path.name for path in (sites["ann"].folder / "sums").iterdir()}
    assert not any(name.endswith("-body") or name == "facts" for name in left)
    assert "has passed" in sites["ann"].refusal(opening) or "not the one that it made" in sites["ann"].refusal(opening)
    assert sites["ann"].hear(pb.SecureSum.KEY) == b""


# --- windows --------------------------------------------------------------------------------------


def _window(sites: dict[str, Site], task: int = 1, steps: int = STEPS, **changes: Any) -> Opening:
    """Of everybody, for this task of each, trained from the model of the version before."""
    opening = opening_of(sites)
    about: dict[str, Any] = {"version": VERSION - 1, "rate": 1.0, "model": opening.model, **changes}
    trained = (Trained(task, **about),)
    places = tuple(Place(1.0, steps, place.key, trained) for place in opening.members)
    return opening_of(sites, members=places, ring=Ring(32, 1000, 4.0), model=digest("model", "the current one"))


def _waiting(site: Site, opening: Opening, *, before: bool = False) -> tuple[dict[str, Any] | None, str]:
    """What its training process gets for task 1, once it has trained, and why it gets nothing."""

    async def scene() -> tuple[dict[str, Any] | None, str]:
        task = pb.Task(number=1, version=VERSION - 1, steps=STEPS, window=True)
        policy = PolicyFile(site.policy_path).read()
        message = pb.SecureSum(kind=pb.SecureSum.WINDOW, version=VERSION, content=opening.encode())
        if before:
            await site.sums._take_window(message, policy)
        try:
            early = await site.sums.accept(task, site.home / "model", policy)
            if early is not None:
                return early, ""
            place = asyncio.ensure_future(site.sums.place(task))
            await asyncio.sleep(0)
            await site.sums._take_window(message, policy)
            return await asyncio.wait_for(place, 0.05), ""
        except asyncio.TimeoutError:
            return None, ""
        except TaskFailed as problem:
            return None, str(problem)

    return asyncio.run(scene())


@pytest.fixture
def windowed(sites: dict[str, Site]) -> dict[str, Site]:
    for site in sites.values():
        site.policy_path.write_text(site.policy_path.read_text() + "masked_windows = true\n")
    return sites


def test_what_is_trained_is_masked_when_a_window_has_a_place_for_it(windowed: dict[str, Site]) -> None:
    """It says that it is there, and masks once; after a restart it finds the window and the same bytes."""
    ann, opening = windowed["ann"], _window(windowed)
    order, _ = _waiting(ann, opening)
    (said,) = [message for message in ann.sent if message.kind == pb.SecureSum.WINDOW]
    assert said.task == 1 and order is not None and order["opening"] == opening.encode().hex()
    first = ann.train(order, policy=POLICIES["fedbuff"])[1]()
    again = Site(ann.home, "ann")
    order, _ = _waiting(again, opening)
    assert order is not None and not [message for message in again.sent if message.kind == pb.SecureSum.WINDOW]
    done = again.train(order)[0].done()
    assert done is not None and b"".join(done[1]) == first
    assert _waiting(windowed["bob"], opening, before=True)[0] is not None


def test_a_window_that_has_no_place_for_a_task_leaves_it_waiting(windowed: dict[str, Site]) -> None:
    """The site agrees on its sum all the same."""
    assert _waiting(windowed["ann"], _window(windowed, task=2)) == (None, "")
    assert not windowed["ann"].reports
    announced = [message for message in windowed["ann"].sent if message.kind == pb.SecureSum.WINDOW]
    windowed["ann"].sums.announce()  # after a new connection
    assert announced and windowed["ann"].sent[-1] == announced[-1]


def test_a_window_must_say_what_the_site_has_trained(windowed: dict[str, Site]) -> None:
    """Another version, model, rate or number of steps: the task fails, and nothing is masked."""
    other = "what this site has trained is not what the window says"
    changed: list[dict[str, Any]] = [
        {"version": VERSION - 2}, {"model": digest("model", "other")}, {"rate": 0.5}, {"steps": STEPS + 1}
    ]  # fmt: skip
    for changes in changed:
        site = Site(windowed["ann"].home, "ann")
        for path in site.folder.glob("sums/*"):
            path.unlink()
        windowed["ann"] = site
        assert _waiting(site, _window(windowed, **changes)) == (None, other), changes
        assert not list(site.folder.glob("sums/*-body"))


def test_a_window_is_refused_as_a_round_is(windowed: dict[str, Site]) -> None:
    """By everything that the site pins, and without its word for windows at all."""
    ann = windowed["ann"]
    assert "settings of the opening" in _waiting(ann, replace(_window(windowed), settings=digest("settings", "x")))[1]
    assert "needs 3 to 4 learners" in _waiting(ann, replace(_window(windowed), least=2))[1]
    ann.sums.hear(pb.SecureSum(kind=pb.SecureSum.WINDOW, version=VERSION, content=b"nonsense"))
    ann.sums.hear(pb.SecureSum(kind=pb.SecureSum.WINDOW, version=VERSION, content=opening_of(windowed).encode()))
    assert "nobody hands in anything" in ann.reports[-1] and not list(ann.folder.glob("sums/*-body"))
    task = pb.Task(number=1, version=VERSION, steps=STEPS, window=True)
    assert PolicyFile(ann.policy_path).read().refuses_task(task) is None
    ann.policy_path.write_text(ann.policy_path.read_text().replace("masked_windows = true", ""))
    refusal = PolicyFile(ann.policy_path).read().refuses_task(task)
    assert refusal is not None and refusal.rule == pb.Cause.MASKED_WINDOWS and "(masked_windows)" in refusal.text
    opening = _window(windowed)
    assert "rounds only" in _waiting(ann, opening)[1]
    ann.policy_path.write_text("masked_windows = true\n")
    assert "name the learners to take part with" in _waiting(ann, opening)[1]


# --- windows of whole models ----------------------------------------------------------------------

WHOLE = POLICIES["async_fedavg"]
WINDOW_RING = Ring(64, 1000, 4.0 * WIDER)


def _whole_window(sites: dict[str, Site], version: int, tasks: dict[str, int], again: dict[str, int]) -> Opening:
    """To which these sites hand in these tasks, and these again."""
    opening = opening_of(sites, version=version)
    about: dict[str, Any] = {"version": VERSION - 1, "rate": 1.0, "model": opening.model}
    places = tuple(
        replace(
            place,
            trained=(Trained(tasks[place.name], **about),) if place.name in tasks else (),
            again=(again[place.name],) if place.name in again else (),
        )
        for place in opening.members
    )
    model = digest("model", f"of version {version}")
    return opening_of(sites, version=version, members=places, ring=WINDOW_RING, model=model, whole=1)


def _handed_in(site: Site, opening: Opening, number: int) -> Update | None:
    """What a site hands in again under this number, if it does."""
    message = pb.SecureSum(kind=pb.SecureSum.WINDOW, version=opening.version, content=opening.encode(), task=number)
    site.sums.hear(message)
    return next((update for update in site.work.updates() if update.task == number), None)


def _fresh(site: Site, opening: Opening, task: int = 1) -> bytes:
    """A site has trained a task, and masks it for a window."""
    order, why = _waiting(site, opening)
    assert order is not None, why
    return site.train(order, task, WHOLE)[1]()


def _second_window(sites: dict[str, Site]) -> Opening:
    """A first one of everybody, and one for which ann has nothing fresh."""
    first = _whole_window(sites, VERSION, dict.fromkeys(NAMES, 1), {})
    for site in sites.values():
        _fresh(site, first)
    return _whole_window(sites, VERSION + 1, dict.fromkeys(NAMES[1:], 2), {"ann": 1})


def test_the_latest_model_is_masked_again_and_is_the_same(windowed: dict[str, Site]) -> None:
    """By the learner's process, of what its training process kept; also after a restart, and the same bytes again."""
    second = _second_window(windowed)
    ann = windowed["ann"]
    update = _handed_in(ann, second, 7)
    assert update is not None and update.again and ann.looked == 1 and not ann.failed
    content = ann.work.update_file(7).read_bytes()
    assert _upload(second, content).context == second.context
    assert _handed_in(ann, second, 7) == update and ann.looked == 1  # on its way already
    ann.work.drop(7)
    restarted = Site(ann.home, "ann")
    assert _handed_in(restarted, second, 7) is not None
    assert restarted.work.update_file(7).read_bytes() == content, "it was masked twice"
    local, _ = masked.train("ann", 1, STEPS, masked.initial_model())
    (kept,) = (ann.folder / "sums").glob("local-1-*")
    assert np.array_equal(read_model(kept, LAYOUT).vector, local.vector)
    assert kept.stat().st_mode & 0o077 == 0, "others on the site's machine can read it"


def test_the_latest_model_is_sealed_where_the_site_has_a_key(windowed: dict[str, Site]) -> None:
    """And can be masked again all the same."""
    local, _ = masked.train("ann", 1, STEPS, masked.initial_model())
    choose(SealedStorage(bytes(32)))
    try:
        write_model(windowed["ann"].home / "model", masked.initial_model())
        second = _second_window(windowed)
        (kept,) = (windowed["ann"].folder / "sums").glob("local-1-*")
        assert local.vector.tobytes() not in kept.read_bytes()
        assert _handed_in(windowed["ann"], second, 7) is not None and not windowed["ann"].failed
    finally:
        choose(Storage())


def test_a_site_without_its_latest_model_says_so(windowed: dict[str, Site]) -> None:
    """It is gone or damaged, or the window is refused: nobody waits for it, and nothing is masked."""
    second = _second_window(windowed)
    for name in NAMES[:2]:
        (kept,) = (windowed[name].folder / "sums").glob("local-1-*")
        content = kept.read_bytes()
        kept.write_bytes(b"x" + content[1:]) if name == "ann" else kept.unlink()
    assert _handed_in(windowed["ann"], second, 7) is None and windowed["ann"].failed == [7]
    third = _whole_window(windowed, VERSION + 2, dict.fromkeys(("ann", "cyd", "dan"), 3), {"bob": 1})
    assert _handed_in(windowed["bob"], third, 8) is None and windowed["bob"].failed == [8]
    assert "is not here any more" in windowed["bob"].reports[-1]
    cyd = windowed["cyd"]
    assert _handed_in(cyd, replace(third, settings=digest("settings", "x")), 9) is None and cyd.failed == [9]
    cyd.policy_path.write_text("peers = 3")
    assert _handed_in(cyd, third, 10) is None and cyd.failed == [9, 10]
    assert not any(list(site.folder.glob("spool/*.json")) for site in windowed.values())


def test_what_was_trained_and_never_masked_is_not_masked_again(windowed: dict[str, Site], monkeypatch: Any) -> None:
    """A training process that dies before it has masked trains again, with other batches: only these count."""
    first = _whole_window(windowed, VERSION, dict.fromkeys(NAMES, 1), {})
    ann, mask = windowed["ann"], Member.mask

    def dies(*_arguments: Any) -> Upload:
        raise KeyboardInterrupt

    monkeypatch.setattr(Member, "mask", dies)
    with pytest.raises(KeyboardInterrupt):
        _fresh(ann, first, task=99)
    monkeypatch.setattr(Member, "mask", mask)
    _fresh(ann, first, task=1)
    assert len(list((ann.folder / "sums").glob("local-*"))) == 1
    second = _whole_window(windowed, VERSION + 1, dict.fromkeys(NAMES[1:], 2), {"ann": 1})
    assert _handed_in(ann, second, 7) is not None
    local, _ = masked.train("ann", 1, STEPS, masked.initial_model())
    (kept,) = (ann.folder / "sums").glob("local-*")
    assert np.array_equal(read_model(kept, LAYOUT).vector, local.vector)


def test_only_the_latest_model_stays_and_it_goes_with_the_keys(windowed: dict[str, Site]) -> None:
    _second_window(windowed)
    bob, folder = windowed["bob"], windowed["bob"].folder / "sums"
    fresh = _whole_window(windowed, VERSION + 1, dict.fromkeys(NAMES, 2), {})

    async def trained() -> dict[str, Any]:
        task = pb.Task(number=2, version=VERSION - 1, steps=STEPS, window=True)
        policy = PolicyFile(bob.policy_path).read()
        message = pb.SecureSum(kind=pb.SecureSum.WINDOW, version=VERSION + 1, content=fresh.encode())
        await bob.sums._take_window(message, policy)
        made = await bob.sums.accept(task, bob.home / "model", policy)
        assert made is not None
        return made

    bob.train(asyncio.run(trained()), 2, WHOLE)[1]()
    assert [path.name.split("-")[1] for path in folder.glob("local-*")] == ["2"]
    bob.sums.erase()
    assert not list(folder.glob("local-*"))
    forget_local_models(bob.folder / "not there")


def test_a_window_sums_what_the_policy_sums(windowed: dict[str, Site]) -> None:
    """Neither whole models where differences are due, nor the other way round; and no round where windows are."""
    with pytest.raises(DataError, match="does not sum what this federation's policy sums"):
        windowed["dan"].train(windowed["dan"].accept(opening_of(windowed)), 1, POLICIES["fedbuff"])[1]()
    order, _ = _waiting(windowed["ann"], _whole_window(windowed, VERSION, dict.fromkeys(NAMES, 1), {}))
    assert order is not None
    with pytest.raises(DataError, match="does not sum what this federation's policy sums"):
        windowed["ann"].train(order, 1, POLICIES["fedbuff"])[1]()
    order, _ = _waiting(windowed["bob"], _window(windowed))
    assert order is not None
    with pytest.raises(DataError, match="does not sum what this federation's policy sums"):
        windowed["bob"].train(order, 1, WHOLE)[1]()
    assert not list(windowed["ann"].home.glob("work/*/sums/*-body"))


def test_an_unknown_question_is_not_answered(sites: dict[str, Site]) -> None:
    assert sites["ann"].hear(77) == b""
    assert "does not know" in sites["ann"].reports[-1]
    with pytest.raises(Refused):
        unpacked(b"1234", 0)
