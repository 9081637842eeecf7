"""The secure sum: what masking costs a learner, and opening the controller; homomorphic encryption beside it.

    python benchmarks/secure_sum.py [--quick] [--no-peers] [--out FOLDER]

Ten learners with a ring of 32 bits; three are gone after all have masked against them. The protocol is the one that a
deployment runs (`metis.privacy`), messages encoded and decoded, bodies on disk. Seconds are those of one core
(`time.process_time`), so that other work on the machine counts as little as possible; writing the masked body to disk
and hashing it, which an unmasked upload needs as well, are listed for themselves. CKKS is TenSEAL's, 8192 [60, 40, 60].
Beside it: Flower's SecAgg+ with its default of 22 bits, whose masks come from a generator with seeds of 32 bits, and
NVFlare's homomorphic encryption, each by its own code in an environment of its own. Opening is the best of three.
"""

from __future__ import annotations

import hashlib
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
from _bench import Report, arguments, report
from _peers import Unavailable, ask, version_of
from cryptography.hazmat.primitives.asymmetric import ec

from metis.core.model import Layout, Model, TensorSpec
from metis.core.ring import Ring
from metis.core.secure_sum import PROTOCOL, Opening, Pins, Place, Upload, min_learners, threshold
from metis.errors import ConfigError
from metis.privacy.ckks import Adder, KeyHolder, new_keys
from metis.privacy.keys import Identity, Peers
from metis.privacy.member import Member
from metis.privacy.opener import Opener
from metis.privacy.store import FolderStore

LEARNERS, GONE, HASH = 10, 3, hashlib.sha256(b"").digest()
Result = TypeVar("Result")


class Seconds(dict[str, list[float]]):
    """Of one core, by what was done."""

    def of(self, what: str, work: Callable[..., Result], *arguments: object) -> Result:
        began = time.process_time()
        result = work(*arguments)
        self.setdefault(what, []).append(time.process_time() - began)
        return result

    def least(self, what: str) -> float:
        return min(self[what])


class TimedStore(FolderStore):
    """Says how long it wrote."""

    spent = 0.0

    def write(self, name: str, data: bytes | memoryview) -> None:
        began = time.process_time()
        super().write(name, data)
        self.spent += time.process_time() - began


def secure(numbers: int, folder: Path) -> tuple[Seconds, int, int]:
    """Seconds of every step, and the bytes of an upload without and with what the secure sum adds."""
    names = [f"hospital-{n:02d}" for n in range(LEARNERS)]
    layout = Layout((TensorSpec("w", (numbers,)),))
    identities = {name: Identity(name, ec.generate_private_key(ec.SECP256R1())) for name in names}
    peers = Peers(pinned={name: held.key.public_key() for name, held in identities.items()})
    pins, stores = Pins(frozenset(names), 3), {name: TimedStore(folder / name) for name in names}
    members = {name: Member(identities[name], peers, pins, "run", stores[name]) for name in names}
    places = tuple(Place(100.0 + n, 50, members[name].key(0)) for n, name in enumerate(names))
    opening = Opening(
        PROTOCOL, "run", 0, 0, HASH, bytes.fromhex(layout.fingerprint), HASH, 1.0, 0, Ring(32, LEARNERS, 1.0),
        threshold(LEARNERS), min_learners(3), places,
    )  # fmt: skip
    random, seconds, base = np.random.default_rng(7), Seconds(), Model(layout, np.zeros(numbers, np.float32))
    opener, bodies, plain, size = Opener(opening, peers), {}, opening.ring.total(layout), 0
    for name in names:
        seconds.of(
            "check the opening", lambda m: m.accept(opening, model=HASH, layout=layout, settings=HASH), members[name]
        )
    for name in names[GONE:]:
        local = Model(layout, random.standard_normal(numbers, np.float32) * np.float32(0.01))
        quantized = seconds.of(
            "quantize", opening.ring.quantize, local, base, opening.weights[name], opening.most, (1.0, 1.0, 1.0)
        )
        opening.ring.add(plain, quantized.body, layout)
        stores[name].spent = 0.0
        began = time.process_time()
        upload = members[name].mask(opening.context, quantized.body, layout)
        whole = time.process_time() - began - stores[name].spent
        digest = Seconds()
        digest.of("hash", lambda body: hashlib.sha256(body.data).digest(), quantized.body)
        seconds.setdefault("mask, share and seal", []).append(whole - digest.least("hash"))
        seconds.setdefault("hash the body", []).append(digest.least("hash"))
        size = len(upload.encode())
        opener.take(Upload.decode(upload.encode()))
        quantized.body.tofile(folder / f"{name}.body")
        bodies[name] = np.memmap(folder / f"{name}.body", np.uint8, mode="r")
    statement = opener.statement()
    opener.close(statement)
    for name in names:
        opener.vote(seconds.of("vote", members[name].vote, statement))
    answers = [
        seconds.of("answer", members[name].answer, opener.request(name)) for name in names[: threshold(LEARNERS)]
    ]
    for answer in answers:
        seconds.of("check an answer", opener.answer, answer)
    for _ in range(3):
        total = seconds.of("open the sum, with hashing", opener.open, bodies, layout)
        seconds.of("hash seven bodies", lambda: [hashlib.sha256(body.data).digest() for body in bodies.values()])
    seconds["open the sum"] = [seconds.least("open the sum, with hashing") - seconds.least("hash seven bodies")]
    assert np.array_equal(total, plain), "the opened sum is not the plain one"
    weights = {name: opening.weights[name] for name in statement.names}
    seconds.of("mean", opening.ring.mean, total, base, weights, opening.most)
    return seconds, 4 * numbers, total.size + size


def encrypted(numbers: int) -> tuple[Seconds, int]:
    """Seconds of every step with CKKS, and the bytes of an upload."""
    secret, public = new_keys()
    holder, adder, seconds = KeyHolder(secret), Adder(public), Seconds()
    vector = np.random.default_rng(7).standard_normal(numbers, np.float32)
    blocks = seconds.of("encrypt", lambda: list(holder.encrypt(vector)))
    scaled = seconds.of("scale", lambda: [adder.scaled(block, 100.0) for block in blocks])
    total = seconds.of("add", lambda: [adder.add(block, block) for block in scaled])
    opened = seconds.of("decrypt", holder.decrypt, total, numbers, 200.0)
    assert np.abs(opened - vector).max() < 1e-4
    return seconds, sum(map(len, blocks))


def peers(sheet: Report, numbers: int) -> None:
    """The same size with the secure aggregation of others."""
    rows = [["peer", "learner: mask or encrypt, s", "controller, s", "learner: decrypt, s", "upload over float32"]]
    asked = {"learners": LEARNERS, "gone": GONE, "numbers": numbers}
    for peer, script in (("flower", "flower_secure"), ("nvflare_he", "nvflare_secure")):
        try:
            found = ask(peer, script, asked)
        except Unavailable as problem:
            sheet.say(f"not measured: {problem}")
            continue
        sheet.figures[f"{peer} {numbers:.1e}"] = found
        masked = found.get("mask", found.get("encrypt"))
        opened = found.get("open", found.get("add"))
        decrypted = f"{found['decrypt']:.3g}" if "decrypt" in found else "–"
        rows.append([version_of(peer), f"{masked:.3g}", f"{opened:.3g}", decrypted, f"{found['upload']:.3g}"])
    sheet.say(f"Others, {numbers:.1e} numbers, {LEARNERS} learners, {GONE} gone (NVFlare: one addition):")
    sheet.table(rows)


def measure(sheet: Report, quick: bool, no_peers: bool) -> None:
    large, small = (10**5, 10**4) if quick else (25 * 10**6, 10**6)
    with tempfile.TemporaryDirectory() as folder:
        seconds, plain, sent = secure(large, Path(folder))
    sheet.say(f"{LEARNERS} learners, {GONE} gone, {large:.1e} numbers; seconds of one core, the best of the learners:")
    sheet.table([["step", "seconds"], *([what, f"{seconds.least(what):.4f}"] for what in seconds)])
    sheet.figures = {"seconds": {what: seconds.least(what) for what in seconds}, "upload": sent / plain}
    with tempfile.TemporaryDirectory() as folder:
        masked, small_plain, small_sent = secure(small, Path(folder))
    rows = [["", "secure sum", "CKKS"]]
    try:
        ckks, ciphertext = encrypted(small)
        sheet.figures["ckks"] = {what: ckks.least(what) for what in ckks} | {"upload": ciphertext / small_plain}
        theirs = [ckks.least("encrypt"), ckks.least("scale") + ckks.least("add"), ckks.least("decrypt")]
        rows += [
            ["learner: mask or encrypt, s", masked.least("mask, share and seal"), theirs[0]],
            ["controller: of one learner, s", masked.least("open the sum") / (LEARNERS - GONE), theirs[1]],
            ["learner: decrypt the sum, s", 0.0, theirs[2]],
            ["upload over float32", small_sent / small_plain, ciphertext / small_plain],
        ]
        sheet.say(f"The same beside CKKS, {small:.0e} numbers:")
        sheet.table(rows)
    except ConfigError as problem:
        sheet.say(f"CKKS was not measured: {problem}")
    for numbers in () if no_peers else (small,) if quick else (small, large):
        peers(sheet, numbers)
    mask, opened = seconds.least("mask, share and seal"), seconds.least("open the sum, with hashing")
    sheet.goal("mask a body", "at most 0.3 s", f"{mask:.2f} s", mask <= 0.3)
    sheet.goal("open a sum, with hashing", "at most 1 s", f"{opened:.2f} s", opened <= 1.0)
    sheet.goal("upload over a plain one", "at most 1.01", f"{sent / plain:.4f}", sent / plain <= 1.01)


def main() -> None:
    options = arguments(__doc__).parse_args()
    with report(options, __doc__) as sheet:
        measure(sheet, options.quick, options.no_peers)


if __name__ == "__main__":
    main()
