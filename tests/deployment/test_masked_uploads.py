"""Masked sums on the real wire: deployed bits are simulated ones, and all that the controller gets is read.

Of rounds, of windows of FedBuff, and of windows of the cache, to which one learner hands in its latest model again.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
import re
from collections import defaultdict
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

pytest.importorskip("grpc")

from google.protobuf.message import DecodeError

from deployment import masked
from deployment.masked import NAMES, POLICIES, Trained
from deployment.proxy import Proxy
from metis.core.mixing.windows import whole_body
from metis.core.model import Model
from metis.core.policies import sync_fedavg
from metis.core.ring import Body
from metis.core.secure_sum import Answer, Opening, SignedKey, Upload, Vote
from metis.deployment.learner.outgoing import FIELDS
from metis.deployment.security.identity import load_kit
from metis.deployment.wire import wire_pb2 as pb
from metis.deployment.wire.protocol import PROTOCOL
from metis.deployment.wire.secure import unpacked
from metis.errors import Refused
from metis.privacy.keys import Peers
from metis.privacy.masks import unmasked_sum
from metis.privacy.opener import Opener

DOCUMENT = Path(__file__).parents[2] / "docs" / "privacy.md"


class Recorded:
    """Both directions of one learner's line."""

    def __init__(self) -> None:
        self.content = bytearray()

    def __call__(self, data: bytes) -> bytes:
        self.content += data
        return data

    def streams(self) -> Iterator[list[bytes]]:
        """The gRPC messages of each HTTP/2 stream."""
        data, parts = bytes(self.content), defaultdict[int, bytearray](bytearray)
        at = 24 if data.startswith(b"PRI * HTTP/2.0") else 0
        while at + 9 <= len(data):
            length, kind, flags = int.from_bytes(data[at : at + 3], "big"), data[at + 3], data[at + 4]
            stream = int.from_bytes(data[at + 5 : at + 9], "big")
            if kind == 0:
                assert not flags & 8, "padded"
                parts[stream] += data[at + 9 : at + 9 + length]
            at += 9 + length
        for _, whole in sorted(parts.items()):
            messages, at = [], 0
            while at + 5 <= len(whole):
                assert whole[at] == 0, "compressed"
                length = int.from_bytes(whole[at + 1 : at + 5], "big")
                messages.append(bytes(whole[at + 5 : at + 5 + length]))
                at += 5 + length
            yield messages


class Run(NamedTuple):
    """What a whole run left behind."""

    policy: str
    home: Path
    up: dict[str, Recorded]
    down: dict[str, Recorded]
    trained: Trained

    @property
    def received(self) -> bytes:
        """All that learners sent and all that the controller stored."""
        files = [path.read_bytes() for path in sorted((self.home / "state").rglob("*")) if path.is_file()]
        return b"".join([*(line.content for line in self.up.values()), *files])


async def _run(home: Path, order: tuple[str, ...], name_of_policy: str = "average", **options: Any) -> Run:
    up: dict[str, Recorded] = defaultdict(Recorded)
    down: dict[str, Recorded] = defaultdict(Recorded)
    async with masked.controller(home, **options) as here:
        with contextlib.ExitStack() as stack:
            running = []
            for name in order:
                proxy = stack.enter_context(Proxy(here.address))
                proxy.up.change, proxy.down.change = up[name], down[name]
                running.append(asyncio.ensure_future(masked.learner_process(home, name, proxy.address, []).run()))
                await here.until(lambda name=name: _joined(here, name), 300)  # type: ignore[misc]
            assert await asyncio.wait_for(asyncio.gather(*running), 300) == [0] * len(order)
            here.process.drain("everybody has the final model")  # its last words may have been lost in a proxy
            assert await here.serving
    return Run(name_of_policy, home, up, down, Trained(home))


def _joined(here: Any, name: str) -> bool:
    return any(f"learner '{name}' joins" in text for _, text in here.reports)


@pytest.fixture(scope="module", params=["average", "fedbuff", "fedrec"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Of a masked federation whose learners join against the order of their names."""
    home, policy = tmp_path_factory.mktemp("masked"), str(request.param)
    masked.make_kits(home, rules="masked_windows = true\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("METIS_TEST_HOME", str(home))
        patch.setenv(masked.CHOSEN, policy)
        if policy != "average":
            patch.setenv(masked.SLOW, "dan")
        options = {"policy": POLICIES[policy], "rounds": masked.rounds_of(policy)}
        return asyncio.run(_run(home, tuple(reversed(NAMES)), policy, **options))


def test_the_deployed_bits_are_the_simulated_ones_whoever_joins_first(run: Run) -> None:
    """The ring without masks, in virtual time, gives the same bytes of every community model."""
    rounds, found = masked.rounds_of(run.policy), masked.published(run.home)
    assert len(found) == 1 + rounds and found == masked.folded(run.home, POLICIES[run.policy], rounds)
    if run.policy == "average":  # in windows it depends on the machine who is in which
        assert found == masked.simulated(NAMES) == masked.simulated(NAMES[::-1])


# --- what can be found in it ----------------------------------------------------------------------


_Haystack = np.ndarray[Any, np.dtype[np.uint64]]


def _windows(content: bytes) -> _Haystack:
    """Eight bytes from every byte on."""
    data = np.frombuffer(content, np.uint8)
    return np.lib.stride_tricks.sliding_window_view(data, 8).copy().view("<u8").ravel()


def _haystack(content: bytes) -> _Haystack:
    return np.unique(_windows(content))


def _found(haystack: _Haystack, secret: np.ndarray[Any, Any]) -> int:
    """How many pairs of neighbouring numbers of a secret are in it."""
    pairs = _windows(np.ascontiguousarray(secret).tobytes())[::4]
    return int((haystack[np.searchsorted(haystack, pairs).clip(max=haystack.size - 1)] == pairs).sum())


def _plain_bodies(run: Run) -> dict[tuple[bytes, str], Body]:
    """What every learner masked, by context and name."""
    trained = {tuple(stem.rsplit("-", 2)[:2]): index for index, stem in enumerate(run.trained.files)}
    initial, sent, bodies = masked.initial_model(), _tasks(run), {}
    for opening in _openings(run):
        for name in opening.handing_in:
            if not opening.windowed:
                task = next(number for (who, number), (of, _) in sent.items() if (who, of) == (name, opening.context))
            elif (fresh := opening.trained_by(name)) is not None:
                task = fresh.task
            else:
                task = opening.again_by(name) or 0
            local = initial.with_vector(run.trained.locals[trained[name, str(task)]])
            ring, p, most = opening.ring, opening.weights[name], opening.most
            loss, *lengths = run.trained.numbers[trained[name, str(task)]]
            if opening.whole:
                body = whole_body(ring, local, p, most)
            else:
                scalars = (0.0 if opening.windowed else loss, *lengths)
                body = ring.quantize(local, sent[name, task][1], p, most, scalars).body
            bodies[opening.context, name] = body
    return bodies


def _sent_down(run: Run, name: str) -> Iterator[pb.ToLearner]:
    for messages in run.down[name].streams():
        for message in messages:
            with contextlib.suppress(DecodeError):
                yield pb.ToLearner.FromString(message)


def _openings(run: Run) -> list[Opening]:
    """All that came down somebody's line."""
    found = {}
    for name in NAMES:
        for message in _sent_down(run, name):
            window = message.secure.content if message.secure.kind == pb.SecureSum.WINDOW else b""
            with contextlib.suppress(Refused):  # bytes of another kind of stream
                if content := message.task.opening or window:
                    opening = Opening.decode(content)
                    found[opening.context] = opening
    return list(found.values())


def _tasks(run: Run) -> dict[tuple[str, int], tuple[bytes, Model]]:
    """The tasks that came down, by learner and number: the context, if it is of a round, and the model."""
    blobs = (run.home / "state" / "blobs").iterdir()
    versions = {hashlib.sha256(path.read_bytes()).hexdigest(): path for path in blobs}
    initial, found = masked.initial_model(), {}
    for name in NAMES:
        for message in _sent_down(run, name):
            task = message.task
            with contextlib.suppress(Refused, KeyError):
                content = task.model or versions[task.sha256].read_bytes()
                vector = np.frombuffer(content, "<f4", initial.layout.size).astype(np.float32)
                context = Opening.decode(task.opening).context if task.opening else b""
                found[name, task.number] = context, initial.with_vector(vector)
    return found


def test_no_local_model_loss_or_norm_is_among_the_bytes(run: Run) -> None:
    """Neither on the wire nor on the controller's disk."""
    bodies = _plain_bodies(run)
    assert len(run.trained.locals) >= len(NAMES) and len(bodies) >= 3 * masked.rounds_of(run.policy)
    if run.policy == "fedrec":
        assert any(opening.again_by(name) is not None for opening in _openings(run) for name in NAMES)
    content = run.received
    haystack = _haystack(content)
    for local in run.trained.locals:
        assert _found(haystack, local.astype("<f4")) == 0
        assert _found(haystack, local.astype("<f8")) == 0
    start = 16 if run.policy == "average" else 40  # behind the public weight, clamps, and in windows three zeros
    for body in bodies.values():
        assert _found(haystack, body[start:]) == 0
    for value in np.concatenate(run.trained.numbers):
        assert value.tobytes() not in content and np.float32(value).tobytes() not in content
        assert f"{value:.6g}".encode() not in content


def test_the_same_search_finds_all_of_it_where_nothing_is_masked(tmp_path: Path, monkeypatch: Any) -> None:
    """So that the test above could fail."""
    masked.make_kits(tmp_path, rules="")
    for name in NAMES:
        (tmp_path / "ca" / name / "site-policy.toml").write_text("")
    monkeypatch.setenv("METIS_TEST_HOME", str(tmp_path))
    clear = asyncio.run(_run(tmp_path, NAMES, policy=sync_fedavg(1), rounds=1))
    seen = clear.received
    assert all(_found(_haystack(seen), local.astype("<f4")) > 900 for local in clear.trained.locals)
    assert all(numbers[0].tobytes() in seen for numbers in clear.trained.numbers)


def _fields(message: Any) -> Iterator[tuple[str, Any]]:
    """Every field that is set, also of messages within; a field that this version does not know is a mistake."""
    for field, value in message.ListFields():
        if field.message_type is not None and not field.message_type.GetOptions().map_entry:
            yield from _fields(value)
        else:
            yield f"{message.DESCRIPTOR.name}.{field.name}", value
    again = type(message)()
    again.CopyFrom(message)
    again.DiscardUnknownFields()
    assert again == message and again.ByteSize() == message.ByteSize()


def _messages(run: Run, name: str) -> Iterator[Any]:
    """All that a learner sent, as the controller reads it."""
    for messages in run.up[name].streams():
        yield from map(_kind(messages[0]).FromString, messages)


def _kind(first: bytes) -> Any:
    """What a stream that begins so is of."""
    with contextlib.suppress(DecodeError):
        if pb.FromLearner.FromString(first).hello.protocol == PROTOCOL:
            return pb.FromLearner
    with contextlib.suppress(DecodeError):
        header = pb.UploadHeader.FromString(first)
        if header.content and header.bytes == len(header.content):
            return pb.UploadHeader
    with contextlib.suppress(DecodeError):
        if pb.UploadPart.FromString(first).header.bytes:
            return pb.UploadPart
    return pb.ModelRequest


def test_exactly_the_documented_fields_leave(run: Run) -> None:
    """The table in docs/privacy.md has every field that was seen; the loss is NaN, and there is no evaluation."""
    section = DOCUMENT.read_text().split("### What a site sends in a masked round")[1].split("\n## ")[0]
    documented = set(re.findall(r"`(\w+\.\w+)`", section))
    assert documented <= set(FIELDS)
    seen: dict[str, list[Any]] = defaultdict(list)
    for name in NAMES:
        for message in _messages(run, name):
            for field, value in _fields(message):
                seen[field].append(value)
    assert set(seen) <= documented
    assert {"UploadHeader.time_per_batch", "SecureSum.content", "UploadHeader.content", "Ready.examples"} <= set(seen)
    assert all(map(math.isnan, seen["UploadHeader.loss"]))
    assert sorted(seen["Ready.examples"]) == sorted(masked.EXAMPLES.values())
    for content, kind in zip(seen["SecureSum.content"], seen["SecureSum.kind"] or [], strict=False):
        assert content and kind in pb.SecureSum.Kind.values()


# --- what can be computed from it -----------------------------------------------------------------


class Context(NamedTuple):
    """One round, put together from the wire alone, as a controller that keeps everything could."""

    opener: Opener
    bodies: dict[str, Body]


def _contexts(run: Run) -> list[Context]:
    peers = Peers(load_kit(run.home / "ca" / "main").authority)
    found = []
    for opening in _openings(run):
        context, opener, bodies = opening.context, Opener(opening, peers), {}
        votes, answers = [], []
        for name in NAMES:
            upload = bytearray()
            for message in _messages(run, name):
                if isinstance(message, pb.UploadPart | pb.UploadHeader):
                    small = isinstance(message, pb.UploadHeader)
                    if small or message.HasField("header"):
                        upload = bytearray()
                    upload += message.content if small else message.chunk.data
                    size = opening.ring.nbytes(masked.LAYOUT)
                    if small or message.HasField("end"):
                        made = Upload.decode(unpacked(bytes(upload), size))
                        if made.context == context:
                            opener.take(made)
                            bodies[name] = np.frombuffer(bytes(upload[:size]), np.uint8)
                elif isinstance(message, pb.FromLearner) and message.HasField("secure"):
                    match message.secure.kind:
                        case pb.SecureSum.STATEMENT:
                            votes.append(Vote.decode(message.secure.content))
                        case pb.SecureSum.SHARES:
                            answers.append(Answer.decode(message.secure.content))
                        case pb.SecureSum.WINDOW:
                            assert not message.secure.content  # only which task waits
                        case _:
                            SignedKey.decode(message.secure.content)
        if not any(vote.context == context for vote in votes):
            continue  # the run had ended before it was closed
        opener.close(opener.statement())
        for vote in votes:
            if vote.context == context:
                opener.vote(vote)
        for answer in answers:
            if answer.context == context:
                opener.answer(answer)
        found.append(Context(opener, bodies))
    return found


def _uniform(words: bytes) -> float:
    """Chi-square of bytes over its expectation, in standard deviations of a uniform source."""
    counts = np.bincount(np.frombuffer(words, np.uint8), minlength=256)
    expected = len(words) / 256
    return (float(((counts - expected) ** 2).sum()) / expected - 255) / math.sqrt(510)


def test_masked_uploads_are_uniform_and_so_are_their_differences(run: Run) -> None:
    """Of one learner and another, of one sum and the next, also of a model that is handed in again; of two sections.

    What is not masked is far from it.
    """
    contexts, plain = _contexts(run), _plain_bodies(run)
    assert len(contexts) == masked.rounds_of(run.policy)
    everything = [body for context in contexts for body in context.bodies.values()]
    word = f"<u{contexts[0].opener.opening.ring.bits // 8}"
    assert len(everything) >= 3 * len(contexts)
    assert _uniform(b"".join(body.tobytes() for body in everything)) < 8
    for one, other in combinations(everything, 2):
        assert _uniform((one.view(word) - other.view(word)).tobytes()) < 8
    for context in contexts:
        wide, main = context.opener.opening.ring.sections(masked.LAYOUT)
        for name, body in context.bodies.items():
            head, words = wide.view(body).astype(word), main.view(body)
            difference = head - words[: head.size]
            assert len({int(word) for word in difference}) == head.size
            assert int(difference[0]) != int(plain[context.opener.context, name][: head.itemsize].view(word)[0])
    assert _uniform(b"".join(body.tobytes() for body in plain.values())) > 1000


def test_of_all_sums_only_the_one_of_everybody_can_be_opened(run: Run) -> None:
    """With every seed that the members' shares give, each smaller set of uploads is still uniform."""
    plain = _plain_bodies(run)
    for opener, bodies in _contexts(run):
        opening, sections = opener.opening, opener.opening.ring.sections(masked.LAYOUT)
        assert opener.closed is not None and opener.openable and set(opener.closed.names) == set(bodies)
        names, summed = opening.names, opener.closed.names
        assert len(summed) >= 3 and (summed == NAMES or run.policy != "average")
        known = {name: list(opener._dealt(name, names.index(name))) for name in summed}
        for size in range(1, len(summed) + 1):
            for chosen in combinations(summed, size):
                # Each added its own mask and those shared with members after it, and subtracted the others.
                minus = [seed for name in chosen for k, seed in known[name] if k >= names.index(name)]
                plus = [seed for name in chosen for k, seed in known[name] if k < names.index(name)]
                total = unmasked_sum({name: bodies[name] for name in chosen}, sections, plus, minus)
                right = opening.ring.sum((plain[opening.context, name] for name in chosen), masked.LAYOUT)
                if chosen == summed:
                    assert np.array_equal(total, right)
                else:
                    error = [section.view(total) - section.view(right) for section in sections]
                    assert _uniform(total.tobytes()) < 8 and _uniform(b"".join(map(bytes, error))) < 8


def test_nothing_of_a_round_stays_at_either_end(run: Run) -> None:
    """When the run is over, keys, shares and masked models are gone."""
    assert not list((run.home / "state" / "sums").iterdir())
    uploads = {hashlib.sha256(bodies.tobytes()).hexdigest() for _, kept in _contexts(run) for bodies in kept.values()}
    masked_words = [body for _, kept in _contexts(run) for body in kept.values()]
    assert len(uploads) == len(masked_words)
    for path in (run.home / "state" / "blobs").iterdir():
        haystack = _haystack(path.read_bytes())
        assert not any(_found(haystack, body) for body in masked_words)
    for name in NAMES:
        kept = {path.name for path in (run.home / "work" / name / "sums").iterdir()}
        assert not any(file.endswith("-body") or file == "facts" or file.startswith("local-") for file in kept)
        assert all(path.stat().st_mode & 0o077 == 0 for path in (run.home / "work" / name / "sums").iterdir())
