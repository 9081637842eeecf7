"""The guards of the secure sum, each deleted once: a test must then fail.

    python tests/privacy/guards.py [GUARD ...]

A guard is a source substitution, as the planted bugs of the whole-system simulation are. Each is deleted in a process
of its own, forked from one that has loaded everything but Metis.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

TESTS = Path(__file__).parent.parent
if __name__ == "__main__":
    sys.path.insert(0, str(TESTS))

import pytest  # noqa: E402

from system.bugs import Bug, Planter  # noqa: E402

_SUM, _MEMBER, _OPENER = "metis.core.secure_sum", "metis.privacy.member", "metis.privacy.opener"
_SITE, _TRAINER = "metis.deployment.learner.sums", "metis.deployment.trainer.masking"
_CONTROLLER = "metis.deployment.controller.sums"
_KEYS, _MASKS, _RING, _CANONICAL = (
    "metis.privacy.keys",
    "metis.privacy.masks",
    "metis.core.ring",
    "metis.core.canonical",
)


def _never(module: str, condition: str) -> Bug:
    """The check is not made."""
    word = condition.split(" ", 1)[0]
    return Bug(module, condition, f"{word} False and (" + condition.split(" ", 1)[1].removesuffix(":") + "):")


GUARDS: dict[str, Bug] = {
    # --- what a site accepts ----------------------------------------------------------------------
    "peers are pinned": Bug(_SUM, "if unknown := sorted(set(names) - self.peers):", "if unknown := []:"),
    "few peers may be absent": _never(_SUM, "if len(self.peers) - count > allowed:"),
    "t is computed": _never(_SUM, "if opening.threshold != threshold(count):"),
    "c is pinned": _never(_SUM, "if self.colluders > max_colluders(count):"),
    "least is computed": Bug(_SUM, "not fewest <= opening.least <= most", "not opening.least <= most"),
    "extra vectors cost": Bug(_SUM, "colluders + max(FEWEST, extra_vectors + 2)", "colluders + FEWEST"),
    "the ring fits the cohort": _never(_SUM, "if opening.ring.bits not in self.bits or not fits:"),
    "clips are pinned": Bug(_SUM, '_within("the clip", clip, self.clips)', "pass"),
    "rates are pinned": Bug(_SUM, '_within("the factor of the learning rate", opening.rate, self.rates)', "pass"),
    "steps are pinned": Bug(_SUM, '_within(f"the steps of {place.name}", place.steps, self.steps)', "pass"),
    "weights are positive": _never(_SUM, "if not (math.isfinite(place.weight) and place.weight > 0):"),
    "weights are comparable": _never(_SUM, "if largest > self.max_ratio * smallest:"),
    "the learner computes model and settings": _never(_SUM, "if getattr(opening, name) != value:"),
    "members come once": Bug(_SUM, " or list(names) != sorted(set(names)):", ":"),
    "pins can be kept": _never(_SUM, "if not 0 <= self.colluders <= most:"),
    # --- windows ----------------------------------------------------------------------------------
    "a site allows windows": _never(_SUM, "if not self.windows:"),
    "a version has one model in a window": Bug(_SUM, "        opening.check_models()\n", ""),
    "a version has one model in all windows": Bug(_MEMBER, "opening.check_models(self.latest)", "pass"),
    "models of a window are not later than it": _never(_SUM, "if each.version > opening.version:"),
    "rates of a window are pinned": Bug(
        _SUM, '_within("the factor of the learning rate", each.rate, self.rates)', "pass"
    ),
    "rates of a window are comparable": _never(_SUM, "if max(rates) > self.max_rate_ratio * min(rates):"),
    "only who has a place is in the sum of a window": Bug(
        _SUM, "<= set(opening.handing_in):", "<= set(opening.names):"
    ),
    "what comes without a place is not taken": _never(_OPENER, "if upload.name not in self.opening.handing_in:"),
    "who has no place masks nothing": _never(_MEMBER, "if self.name not in opening.handing_in:"),
    "a task is fresh in one window": _never(_MEMBER, "if trained.task <= seen.get(name, -1):"),
    "other learners' tasks are remembered": Bug(
        _MEMBER, "for name in opening.fresh:", "for name in {self.name} & set(opening.fresh):"
    ),
    "what was fresh survives erasing": Bug(_MEMBER, " else state.version, seen=state.seen))", " else state.version))"),
    "what was fresh survives the next window": Bug(_MEMBER, "(_Round(opening),), seen)", "(_Round(opening),))"),
    "who masks again masks its latest": _never(_MEMBER, "if again is not None and again != latest:"),
    "only whole models are handed in again": _never(
        _SUM, "if self.whole not in (0, 1) or (self.whole and not self.windowed) or (again and not self.whole):"
    ),
    "enough that is fresh has a place": Bug(_SUM, "most = len(opening.fresh)", "most = len(opening.handing_in)"),
    "clips of whole models are pinned too": Bug(
        _SUM, "opening.ring.clip / wider", "1.0 if opening.whole else opening.ring.clip"
    ),
    "a round compares the model": Bug(
        _MEMBER, "if not opening.windowed or model is not None:", "if model is not None:"
    ),
    # --- statements -------------------------------------------------------------------------------
    "a statement is about this context": _never(_SUM, "if statement.context != opening.context:"),
    "a statement is about this cohort": _never(_SUM, "if not set(statement.names) <= set(opening.handing_in):"),
    "a sum has the fewest learners": _never(_SUM, "if fresh < opening.least:"),
    "a sum has the fewest that are fresh": Bug(
        _SUM, "fresh = len(set(statement.names) & set(opening.fresh))", "fresh = len(statement.names)"
    ),
    "a statement's learners come once": Bug(
        _SUM, "if list(self.names) != sorted(set(self.names)) or len(self.names)", "if len(self.names)"
    ),
    # --- the member -------------------------------------------------------------------------------
    "pins are checked": Bug(_MEMBER, "        self._pins.check(opening)\n", ""),
    "the task is compared": Bug(
        _MEMBER, '        check_expected(opening, {**expected, "extra_vectors": extra_vectors})\n', ""
    ),
    "the own key is the own": _never(
        _MEMBER, "if not mine or mine[0] not in [held.public for held in self._state.keys]:"
    ),
    "peers' keys are verified": Bug(_MEMBER, "        self._keys(opening)\n        if any(", "        if any("),
    "a version does not come back": _never(_MEMBER, "if opening.version < state.version:"),
    "a version has one context": Bug(_MEMBER, "            self._check_abandoned(abandoned)\n", ""),
    "every earlier context is abandoned": Bug(
        _MEMBER,
        "        for round_ in self._state.rounds:\n            votes",
        "        for round_ in self._state.rounds[:1]:\n            votes",
    ),
    "refusals are of that context": Bug(
        _MEMBER, "for given in abandoned if given.context == round_.opening.context for", "for given in abandoned for"
    ),
    "votes are for the statement": Bug(
        _MEMBER,
        "if (vote.context, vote.statement) == (opening.context, statement) and vote.name in keys:",
        "if vote.name in keys:",
    ),
    "votes are of members": Bug(_MEMBER, " and vote.name in keys:", ":"),
    "votes are signed": Bug(
        _MEMBER,
        '                check_signature(keys[vote.name], vote.signed, vote.signature, f"the vote of {vote.name}")\n',
        "",
    ),
    "votes count once": Bug(
        _MEMBER, "self._keys(opening), set()\n", 'self._keys(opening), type("", (list,), {"add": list.append})()\n'
    ),
    "t votes are needed": _never(_MEMBER, "if len(valid) < opening.threshold:"),
    "masked once": Bug(_MEMBER, "        if round_.upload:\n            return Upload.decode(round_.upload)\n", ""),
    "the body fits": _never(
        _MEMBER, "if bytes.fromhex(layout.fingerprint) != opening.layout or body.size != sections[-1].end:"
    ),
    "the upload is durable": Bug(
        _MEMBER,
        '        self._change(replace(round_, upload=upload.encode(), own_shares=b"".join(dealt[me])))\n',
        "        changed = replace(round_, upload=upload.encode(), own_shares=b''.join(dealt[me]))\n"
        "        self._state = replace(self._state, rounds=(*self._state.rounds[:-1], changed))\n",
    ),
    "the body is durable first": Bug(_MEMBER, "        self._store.write(self._body_name, body.data)\n", ""),
    "a body of another context is not sent": Bug(
        _MEMBER, " if hashlib.sha256(body).digest() == upload.body else None", ""
    ),
    "the own digest is compared": _never(_MEMBER, "if statement.digests[statement.names.index(self.name)] != mine:"),
    "the statement is checked": Bug(_MEMBER, "        check_statement(round_.opening, statement)\n", ""),
    "one vote": _never(_MEMBER, "if cast.statement != statement:"),
    "the vote is durable": Bug(_MEMBER, "        self._change(replace(round_, vote=vote.encode()))\n", ""),
    "no shares without an own vote": Bug(
        _MEMBER, "        self.vote(statement)  # never shares of a statement that it would not sign\n", ""
    ),
    "no shares without t votes": Bug(
        _MEMBER, '        self._check_votes(opening, request.votes, statement.digest, "opening a sum")\n', ""
    ),
    "only what the sum needs is released": Bug(
        _MEMBER, "opened = frozenset(released(dealer, summed, count))", "opened = frozenset(range(count))"
    ),
    "a box is compared with its commitment": Bug(
        _MEMBER, "if root(context, dealer, me, made, opened) == committed:", "if True:"
    ),
    "a box is sealed to its upload": Bug(
        _KEYS,
        "return nonce + ChaCha20Poly1305(key).encrypt(nonce, data, bound_to)",
        'return nonce + ChaCha20Poly1305(key).encrypt(nonce, data, b"")',
    ),
    "the version survives erasing": Bug(
        _MEMBER, "_State(state.version + 1 if state.rounds else state.version, seen", "_State(seen"
    ),
    "keys are erased": Bug(
        _MEMBER,
        "keys = tuple(held for held in state.keys if held.public.version >= opening.version)",
        "keys = state.keys",
    ),
    # --- keys and masks ---------------------------------------------------------------------------
    "signatures are verified": Bug(
        _KEYS,
        "    except InvalidSignature:\n        raise",
        "    except InvalidSignature:\n        return\n        raise",
    ),
    "keys are of this version": _never(_KEYS, "if (signed.run, signed.version) != (opening.run, opening.version):"),
    "a key's signature covers the version": Bug(
        _SUM,
        'digest("key", PROTOCOL, self.run, self.version, self.name, self.key)',
        'digest("key", PROTOCOL, self.run, self.name, self.key)',
    ),
    "certificates are of the CA": Bug(_KEYS, "            shown.verify_directly_issued_by(self.authority)\n", ""),
    "certificates are of that learner": _never(
        _KEYS, 'if [uri for uri in uris if uri.startswith("metis:")] != [f"metis://learner/{name}"]:'
    ),
    "certificates expire": _never(
        _KEYS, "if not shown.not_valid_before_utc <= self.now() <= shown.not_valid_after_utc:"
    ),
    "secrets are not predictable": Bug(
        _KEYS,
        '        raise Refused("a member\'s key of the round has a predictable secret with every other") from None',
        "        return bytes(32)",
    ),
    "sections have keystreams of their own": Bug(
        _MASKS, 'derive(seed, "mask", section.number, section.bits)', 'derive(seed, "mask")'
    ),
    "a pair's seed is the context's": Bug(
        _MEMBER, 'pair_key(pair, "pair", context, min', 'pair_key(pair, "pair", b"", min'
    ),
    # --- the controller ---------------------------------------------------------------------------
    "uploads are signed": Bug(
        _OPENER,
        '        self._check_author(upload.name, upload.context, upload.digest, upload.signature, "upload")\n',
        "",
    ),
    "late uploads are not taken": Bug(_OPENER, " if self.closed is None else self.uploads.get(upload.name)\n", "\n"),
    "the first upload counts": Bug(_OPENER, "if known is None or known.digest != upload.digest:", "if known is None:"),
    "commitments of pairs are compared": Bug(_OPENER, "        out = blamed(edges)\n", "        out = set[str]()\n"),
    "a closed sum does not change": Bug(_OPENER, " or self.closed not in (None, statement):", ":"),
    "shares are compared with commitments": Bug(
        _OPENER, " or root(self.context, dealer, member, given, opened) != committed:", ":"
    ),
    "seeds are compared with commitments": Bug(
        _OPENER,
        "seed_commitment(self.context, dealer, k, seed) == self.uploads[name].commitments[k] for k, seed in seeds",
        "True for k, seed in seeds",
    ),
    "other subsets are tried": Bug(
        _OPENER,
        "islice(combinations(sorted(rows), count), MOST_SUBSETS)",
        "islice(combinations(sorted(rows), count), 1)",
    ),
    "stored bodies are compared": Bug(
        _OPENER,
        "if name not in bodies or hashlib.sha256(bodies[name].data).digest() != self.uploads[name].body:",
        "if name not in bodies:",
    ),
    "the sum of q is the public one": _never(_RING, "if int(head[0]) != expected:"),
    "numbers are finite": _never(_RING, "if not np.isfinite(np.add.reduce(values)):"),
    "a word has room": Bug(_RING, "bits - 1 - self.learners.bit_length()", "bits - 1"),
    "integers have one encoding": Bug(
        _CANONICAL, "if len(data) > 9 or len(data) != number.bit_length() // 8 + 1:", "if len(data) > 9:"
    ),
    # --- the deployment ---------------------------------------------------------------------------
    "a member has a certificate": _never(_SITE, "if self._kit is None:"),
    "a member names its peers": _never(_SITE, "if not policy.peers:"),
    "a site wants so many members": _never(_SITE, "if len(opening.names) < fewest:"),
    "the task is the one of its opening": _never(
        _SITE, "if (opening.version, opening.rate, mine) != (task.version, rate, steps):"
    ),
    "the model is hashed at the site": Bug(
        _SITE, "_accepts(opening, bytes.fromhex(file_sha256(model))", "_accepts(opening, opening.model"
    ),
    "settings are hashed at the site": Bug(
        _SITE, "settings=settings_hash(welcome.settings),", "settings=opening.settings,"
    ),
    "what is masked for a window is what it says": _never(
        _SITE, "if (mine.version, mine.model, mine.rate, places[name]) != (task.version, wait.model, rate, steps):"
    ),
    "a window has a place for the task": Bug(
        _SITE, " or mine.task != wait.task.number or wait.place", " or wait.place"
    ),
    "a window is accepted before anything is masked for it": Bug(
        _SITE, "await asyncio.to_thread(self._member_accepts, opening, None, policy)", "pass"
    ),
    "a site says that it takes part in windows": _never(
        "metis.deployment.learner.site_policy", "if task.window and not self.masked_windows:"
    ),
    "keys go when they are old": Bug(
        _SITE, "                        member.erase()\n", "                        pass\n"
    ),
    "peers demand masks": Bug(
        "metis.deployment.learner.site_policy",
        "if not (opening or task.window) and (self.peers or self.min_masked_members is not None):",
        "if not (opening or task.window) and self.min_masked_members is not None:",
    ),
    "the training process reads what was signed": Bug(
        _TRAINER,
        "        return Member(self._identity, Peers(), pins, self._run, self._store)\n",
        "        made = Member(self._identity, Peers(), pins, self._run, self._store)\n"
        "        return self.__dict__.setdefault('_made', made)\n",
    ),
    "a damaged body is not masked again": _never(_TRAINER, "if kept is None:"),
    "whole models are summed where the policy does": Bug(
        _TRAINER, " or bool(opening.whole) != policy.sums_whole_models:", ":"
    ),
    "windows are summed where the policy does": Bug(_TRAINER, "opening.windowed == policy.protocol.has_rounds or ", ""),
    "a local model is kept before it counts as masked": Bug(
        _TRAINER, "                    self._keep(kept_too)\n", "                    pass\n"
    ),
    "what was not masked is not kept": Bug(
        _TRAINER,
        '        for path in self._store.folder.glob(f"{self._beginning}*"):\n            path.unlink()\n        write',
        "        write",
    ),
    "only the latest local model is kept": Bug(
        _TRAINER, "                    self._forget(but=self._beginning)\n", "                    pass\n"
    ),
    "a damaged local model is not masked": Bug(
        _TRAINER, 'if not found or file_sha256(found[0]) != found[0].name.rpartition("-")[2]:', "if not found:"
    ),
    "local models go with the keys": Bug(
        _SITE, "                    forget_local_models(self._folder)\n", "                    pass\n"
    ),
    "one process at a time": Bug(
        "metis.privacy.store",
        'return locked(self.folder / "lock", wait=_WAIT_SECONDS, note=False)',
        'return __import__("contextlib").nullcontext()',
    ),
    "a key comes from its owner, for this round": _never(
        _CONTROLLER, "if (key.name, key.run, key.version) != (learner, self._state.run, round_.version):"
    ),
    "a key is signed": Bug(
        _CONTROLLER,
        """            check_signature(public, key.signed, key.signature, f"the key of '{learner}'")\n""",
        "",
    ),
    "messages are of this version": Bug(
        _CONTROLLER, "if round_ is None or message.version != round_.version:", "if round_ is None:"
    ),
    "so many keys begin a round": _never(_CONTROLLER, "if len(members) < round_.fewest:"),
    "the opening is durable": Bug(_CONTROLLER, '        self._store.write("opening", opening.encode())\n', ""),
    "tasks wait until the members are journaled": Bug(
        _CONTROLLER, "opening.version != version or not round_.fixed:", "opening.version != version:"
    ),
    "an opening goes with its own version": Bug(
        _CONTROLLER, "or opening.version != version or not round_.fixed:", "or not round_.fixed:"
    ),
    "an update is signed by who sends it": _never(_CONTROLLER, "if upload.name != learner:"),
    "an update's numbers are those that it signed": _never(
        _CONTROLLER, "if hashlib.sha256(memoryview(content)[:size]).digest() != upload.body:"
    ),
    "an update has a possible length": Bug(
        _CONTROLLER,
        "return self._body_bytes < length <= self._body_bytes + _TAIL",
        "return self._body_bytes < length",
    ),
    "a file that was damaged is not in the sum": _never(
        _CONTROLLER, "if self._tails.get(learner) != tail and not has_checksum(path, checksum_in(blob)):"
    ),
    "the statement is durable": Bug(
        _CONTROLLER, '            self._store.write("statement", statement.encode())\n', "            pass\n"
    ),
    "a vote comes from its owner": Bug(
        _CONTROLLER, "if vote.name != learner or kept is not None:", "if kept is not None:"
    ),
    "a vote is kept": Bug(_CONTROLLER, '            self._store.write(f"vote.{learner}", message.content)\n', ""),
    "shares come from their owner": Bug(
        _CONTROLLER, "if answer.name != learner or not opener.agreed", "if not opener.agreed"
    ),
    "shares are kept": Bug(_CONTROLLER, '            self._store.write(f"answer.{learner}", message.content)\n', ""),
    "masked models go with their round": Bug(
        _CONTROLLER,
        '                self._state.blobs.discard((self._store.read(path.name) or b"").decode())\n',
        "                pass\n",
    ),
    "hashes have purposes": Bug(_CANONICAL, 'encode(("metis", purpose, *values))', 'encode(("metis", *values))'),
}


_DEPLOYED = ("metis.deployment", "metis.privacy.store")
_FILES = [
    *(f"privacy/test_{name}.py" for name in ("attacks", "windows", "opener", "keys")),
    *(f"core/test_{name}.py" for name in ("secure_sum", "ring", "canonical")),
    *(f"privacy/test_{name}.py" for name in ("round", "adversary", "schedules")),
]


class _Failures:
    """Remembers the first test that failed."""

    first = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self.first:
            self.first = report.nodeid


def failing(name: str) -> str:
    """The first test that fails without this guard; empty if none does. In a process of its own."""
    assert GUARDS[name].module not in sys.modules
    sys.meta_path.insert(0, Planter(GUARDS[name]))
    seen, quiet = _Failures(), ["-q", "-x", "-m", "not slow", "-p", "no:cacheprovider", "--no-header", "--tb=no"]
    module = GUARDS[name].module
    files = ["deployment/test_masked_members.py"] if module.startswith(_DEPLOYED) else _FILES
    files = ["deployment/test_masked_sums.py"] if module == _CONTROLLER else files
    code = pytest.main([*quiet, *(str(TESTS / file) for file in files)], plugins=[seen])
    return seen.first if code == pytest.ExitCode.TESTS_FAILED else ""


def main(names: list[str]) -> int:
    """How many guards no test needs."""
    for large in ("cryptography.x509", "torch"):
        importlib.import_module(large)
    survived = 0
    for name in names or GUARDS:
        reading, writing = os.pipe()
        if not (child := os.fork()):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os.write(writing, failing(name).encode())
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as end:
            found = end.read()
        os.waitpid(child, 0)
        survived += not found
        print(f"{name}: {found or 'NO TEST FAILS'}", flush=True)
    print(f"{len(names or GUARDS) - survived} of {len(names or GUARDS)} guards are needed by a test")
    return survived


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
