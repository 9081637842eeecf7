"""Certificates that are expired, too new, of others, revoked or stolen, as the commands of administrators meet them."""

from __future__ import annotations

import shutil
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from deployment.chaos.harness import Crowd, Federation, Outcome, Tally, events, metis, recompute, until
from deployment.chaos.wires import WIRE, try_tests
from deployment.consortium import DAY, Consortium
from metis.deployment.security.identity import Kit, channel_credentials, load_kit, now_utc


@dataclass(frozen=True)
class Refusal:
    """A command that must end with 2 and say this, and with which it must not."""

    what: str
    command: Sequence[object]
    words: Sequence[str]


def _changed(kit: Kit, folder: str, **files: Path) -> Path:
    """A copy of a kit in which some files are of another one."""
    copy = kit.folder.with_name(folder)
    shutil.copytree(kit.folder, copy, dirs_exist_ok=True)
    for name, other in files.items():
        shutil.copy(other / f"{name}.pem", copy / f"{name}.pem")
    return copy


def _learner(here: Federation, kit: Path, address: str | None = None) -> list[object]:
    work = here.folder / f"work-{kit.name}"
    words = ["learner", "--controller", address or here.address, "--identity", kit, "--work", work]
    return [*words, "--site", here.folder / "site.py"]


def _refusals(here: Federation, ours: Consortium, theirs: Consortium, north: Kit, main: Kit) -> list[Refusal]:
    past, future = now_utc() - 60 * DAY, now_utc() + 60 * DAY
    old, early = ours.kit("old", days=30, made=past), ours.kit("early", made=future)
    controllers = {
        "expired": (ours.controller(days=30, made=past, folder="main-old").folder, ("expired on", "renew main")),
        "not yet valid": (ours.controller(made=future, folder="main-early").folder, ("is not valid before", "clock")),
        "key of another kit": (_changed(main, "main-key", key=north.folder), ("key.pem does not belong to",)),
        "CA of another federation": (_changed(main, "main-ca", ca=theirs.folder / "ca"), ("is not signed by",)),
        "a learner's kit": (north.folder, ("give the kit of a controller",)),
        "no kit at all": (here.folder / "nowhere", ("there is no kit",)),
    }
    port = here.address.rpartition(":")[2]
    learners = [
        Refusal("expired", _learner(here, old.folder), ("expired on", f"{old.not_after:%Y-%m-%d}", "renew old")),
        Refusal("not yet valid", _learner(here, early.folder), ("is not valid before", "clock says")),
        Refusal("wrong CA", _learner(here, theirs.kit("north").folder), ("is not signed by our CA", "'Theirs'")),
        Refusal("wrong name", _learner(here, north.folder, f"localhost:{port}"), ("is not for localhost but for",)),
        Refusal("key of another", _learner(here, _changed(north, "k", key=main.folder)), ("does not belong to",)),
        Refusal("CA of another", _learner(here, _changed(north, "c", ca=theirs.folder / "ca")), ("not signed by",)),
        Refusal("controller's kit", _learner(here, main.folder), ("give the kit of a learner",)),
        Refusal("plain text", _plain(here), ("requires TLS: give --identity",)),
    ]
    commands = here.command("--listen", "127.0.0.1:0", "--http", "")
    index = commands.index(here.identity)
    return [
        *learners,
        *(
            Refusal(f"controller: {what}", [*commands[:index], kit, *commands[index + 1 :]], words)
            for what, (kit, words) in controllers.items()
        ),
    ]


def _plain(here: Federation) -> list[object]:
    work = here.folder / "work-plain"
    return ["learner", "--controller", here.address, "--insecure", "--name", "north", "--work", work]


def row_27(tmp: Path, times: int) -> Outcome:
    """certificates: expired, not valid yet, wrong CA, wrong name, key mismatch, revoked in the middle of a run"""
    tally, longest = Tally(), 0.0
    ours, theirs = Consortium(tmp / "ours"), Consortium(tmp / "theirs", "Theirs")
    north, south, main = ours.kit("north"), ours.kit("south"), ours.controller(hosts=("127.0.0.1",))
    kits = {"north": north, "south": south}
    with Federation(tmp / "f", tuple(kits), policy="asynchronous", numbers=2000, identity=main.folder) as here:
        here.start()
        with Crowd(here, credentials=lambda name: channel_credentials(kits[name]), pace=0.03) as crowd:
            here.advance(2)
            for _ in range(times):
                for refusal in _refusals(here, ours, theirs, north, main):
                    tally.tried += 1
                    began = time.monotonic()
                    done = metis(*refusal.command, cwd=tmp)
                    longest = max(longest, time.monotonic() - began)
                    text = done.stdout + done.stderr
                    tally.check(done.returncode == 2, f"{refusal.what}: exit code {done.returncode}: {text[-300:]}")
                    for words in refusal.words:
                        tally.check(words in text, f"{refusal.what}: it does not say '{words}': {text[-300:]}")
                    tally.check("Traceback" not in text, f"{refusal.what}: a traceback")
            here.advance(2)
            _revoked(tally, here, crowd, ours)
            here.finish(1)
            crowd.join()
            tally.problems += recompute(here, crowd).problems
    return tally.outcome(
        "exit 2 and the cause with its date, in 5 s; revoked: refused at its next call, counted; others go on",
        f"{tally.tried - 1} refusals with their cause, process start and end in {longest:.1f} s at most; "
        "1 revoked while it trained",
    )


def _revoked(tally: Tally, here: Federation, crowd: Crowd, ours: Consortium) -> None:
    """Its connection is open and it has an open task; the other learner is not disturbed."""
    tally.tried += 1
    victim = next(learner for learner in crowd.learners if learner.name == "south")
    done = metis("certificates", "revoke", "south", "--ca", ours.folder / "ca", "--kit", here.identity, cwd=here.folder)
    tally.check(done.returncode == 0, f"revoke: {done.stderr[-300:]}")
    until(lambda: victim.refused is not None or victim.codes["PERMISSION_DENIED"], "the revoked learner is refused")
    counted = len(events(here, "update_request", "south"))
    others = len(events(here, "update_request", "north"))
    until(lambda: len(events(here, "update_request", "north")) > others + 3, "the other one goes on")
    tally.check(len(events(here, "update_request", "south")) == counted, "updates of a revoked learner count")
    with urllib.request.urlopen(f"http://127.0.0.1:{here.http_port}/metrics", timeout=600) as answer:
        found = [line for line in answer.read().decode().splitlines() if 'code="PERMISSION_DENIED"' in line]
    tally.check(found and float(found[0].split()[-1]) >= 1, f"it is not counted by its reason: {found}")


def row_28(tmp: Path, times: int) -> Outcome:
    """stolen identity: one certificate in two processes, another learner's task, another name than the certificate's"""
    tally = Tally()
    passed = try_tests(tally, 28, tmp, times)
    ours = Consortium(tmp / "ours")
    main = ours.controller()
    kits = {name: ours.kit(name) for name in ("north", "south")}
    with Federation(tmp / "f", tuple(kits), policy="asynchronous", identity=main.folder) as here:
        here.start()
        with here.learner("south", "--identity", kits["south"].folder, "--pace", 0.1) as south:
            for number in range(times):
                tally.tried += 1
                first = here.learner("north", "--identity", kits["north"].folder, "--pace", 0.1)
                with first:
                    first.wait_for("handed in")
                    with here.learner(f"thief-{number}", "--identity", kits["north"].folder) as second:
                        code = first.wait()
                        tally.check(code == 2, f"the older process ended with {code}")
                        words = "another process with the certificate of 'north' has connected"
                        tally.check(words in first.text(), f"the older one says {first.text()[-300:]}")
                        alarm = "a second process with the certificate of 'north'"
                        tally.check(any(alarm in line for line in here.warnings()), "the operator is not warned")
                        second.wait_for("handed in")
            tally.check(south.code is None and not events(here, "learner_left", "south"), "the other was disturbed")
        tally.tried += 1
        _claims_another_name(tally, here, kits["south"])
    return tally.outcome(
        WIRE[28][1],
        f"{tally.tried} attempts on the wire and by real processes, 0 writes across names (tests passed: {passed})",
    )


def _claims_another_name(tally: Tally, here: Federation, kit: Kit) -> None:
    """The certificate says who calls; what else a caller says about its name is not heard."""
    from metis.deployment.wire import wire_pb2 as pb
    from metis.deployment.wire.protocol import ATTEND, PROTOCOL

    credentials = channel_credentials(load_kit(kit.folder))
    with grpc.secure_channel(here.address, credentials) as channel:
        hello = pb.FromLearner(hello=pb.Hello(protocol=PROTOCOL, instance="liar"))
        call = channel.stream_stream(ATTEND, pb.FromLearner.SerializeToString, pb.ToLearner.FromString)
        stream = call(iter([hello]), metadata=[("metis-learner", "north")], timeout=600)
        welcome = next(stream).welcome
        tally.check(welcome.learner == kit.name, f"the certificate of '{kit.name}' was welcomed as '{welcome.learner}'")
        stream.cancel()
